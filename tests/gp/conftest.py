"""Settings of gpytorch shared by the tests of its kernels, models and distributions."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def iterating() -> Iterator[None]:
    """gpytorch prefers its iterations to factorisations, at all sizes; with `no_foreign_solvers` these raise."""
    from gpytorch import settings  # here, since the process that hands out the tests reads this file, too

    fast = settings.fast_computations(covar_root_decomposition=True, log_prob=True, solves=True)
    with settings.max_cholesky_size(0), settings.min_preconditioning_size(1), fast:
        yield
