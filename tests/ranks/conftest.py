"""What the tables of ranks are compared with."""

from typing import Any

import pytest


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The answers of one process, those of the module's `whole`."""
    from tests.ranks.processes import alone  # here, since the process that hands out the tests reads this file, too

    return alone(request.module.whole)
