import math

import pytest
import torch
from linear_operator.operators import DenseLinearOperator

from curvops.linalg.trace import trace
from tests.linalg.spectra import SPECTRA, symmetric


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("options", [{"method": "exact"}, {"max_matvecs": 120}, {"max_matvecs": 5000}])
def test_exact_with_n_products(options):
    A = symmetric(SPECTRA["decaying"])
    e = trace(DenseLinearOperator(A), **options)
    torch.testing.assert_close(e.value, A.trace(), rtol=1e-12, atol=0)
    assert e.samples == 0 and e.matvecs == 120 and e.interval() == (e.value, e.value)


def test_diagonal_matrices_are_exact_with_random_signs():
    e = trace(torch.diag(torch.rand(200, dtype=torch.float64)), max_matvecs=10)
    assert e.stderr < 1e-13 and e.samples == e.matvecs == 10


def test_equals_the_mean_over_the_same_probes():
    A = symmetric(SPECTRA["kappa 1e4"])
    e = trace(A, max_matvecs=20, generator=generator(3))
    Z = torch.empty(20, 120, dtype=torch.float64).bernoulli_(0.5, generator=generator(3)) * 2 - 1
    samples = torch.einsum("kn,nm,km->k", Z, A, Z)
    torch.testing.assert_close(e.value, samples.mean(), rtol=1e-12, atol=0)
    torch.testing.assert_close(e.stderr, samples.std() / math.sqrt(20), rtol=1e-12, atol=0)


def test_non_symmetric():
    A = torch.randn(60, 60, dtype=torch.float64, generator=generator())
    torch.testing.assert_close(trace(A, method="exact").value, A.trace(), rtol=1e-12, atol=1e-12)


def test_adaptive_stops_at_the_tolerance_or_the_budget():
    A = symmetric(SPECTRA["flat"])
    loose = trace(A, rtol=0.05, max_matvecs=100, generator=generator())
    tight = trace(A, rtol=1e-6, max_matvecs=100, generator=generator())
    assert loose.matvecs < 20 and loose.stderr <= 0.05 * loose.value
    assert tight.matvecs == 100


def test_interval_covers():
    # 200 runs at 95 %: fewer than 180 hits has a false-alarm rate below 0.2 %.
    A, g = symmetric(SPECTRA["kappa 1e4"]), generator()
    hits = 0
    for _ in range(200):
        low, high = trace(A, max_matvecs=12, generator=g).interval()
        hits += bool(low <= A.trace() <= high)
    assert hits >= 180


def test_errors_at_the_door():
    A = torch.eye(300)
    with pytest.raises(ValueError, match="'hutchinson', 'exact'"):
        trace(A, method="guess")
    with pytest.raises(ValueError, match="at least 2"):
        trace(A, max_matvecs=1)
    with pytest.raises(ValueError, match="positive"):
        trace(A, rtol=0.0)
    with pytest.raises(ValueError, match="square"):
        trace(torch.ones(2, 3))
