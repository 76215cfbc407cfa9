"""The network of most tests of posteriors."""

from typing import Any

import pytest


@pytest.fixture(scope="module")
def lin() -> Any:
    """A small trained classifier, linearised."""
    import curvops as co  # here, since the process that hands out the tests reads this file, too
    from tests.posterior.trained import problem

    model, x, y = problem()
    return co.linearize(model, (x, y), "classification")
