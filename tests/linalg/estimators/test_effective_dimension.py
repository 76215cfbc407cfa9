"""The effective dimension against its sum over eigenvalues.

Tests `dense_spectrum.py`.
"""

import math

import pytest
import torch

from curvops.errors import NotPositiveSemidefiniteError
from curvops.linalg import Reason, effective_dimension
from curvops.linalg.core import vectors
from curvops.linalg.estimators import dense_spectrum
from tests.linalg.matrices import SPECTRA, generator, log_spaced, symmetric
from tests.linalg.systems import Counted


def dense(G, prior):
    A = torch.diag(torch.as_tensor(prior, dtype=torch.float64).expand(len(G)))
    return torch.linalg.solve(G + A, G).trace()


@pytest.mark.parametrize("name", ["decaying", "kappa 1e8"])
def test_small_matrices_are_exact(name):
    G, vector = symmetric(SPECTRA[name]), torch.linspace(0.1, 3, 120, dtype=torch.float64)
    for prior in (0.01, torch.tensor(2.0, dtype=torch.float64), vector):
        e = effective_dimension(G, prior)
        torch.testing.assert_close(e.value, dense(G, prior), rtol=1e-10, atol=0)
        assert e.samples == 0 and e.matvecs == 120 and e.reason is Reason.CONVERGED


@pytest.mark.parametrize("kind", ["scalar", "vector"])
def test_the_tolerance_is_reached(kind):
    G = symmetric(10 * torch.arange(1, 401, dtype=torch.float64) ** -1.0)
    prior = 0.1 if kind == "scalar" else torch.logspace(-1, 1, 400, dtype=torch.float64)
    for rtol in (0.1, 0.01, 3e-3):
        e = effective_dimension(G, prior, rtol=rtol, generator=generator())
        low, high = e.interval(0.999)
        assert e.reason is Reason.CONVERGED and e.within(rtol) and low <= dense(G, prior) <= high
        assert e.matvecs < 500 and (e.samples == 0) == (rtol == 3e-3)  # exact: probes would take 1,668 and 6,216
    few = effective_dimension(G, prior, rtol=1e-4, max_matvecs=30, generator=generator())
    assert few.reason in (Reason.MATVEC_LIMIT, Reason.RANK_CAPPED) and few.matvecs <= 30


@pytest.mark.usefixtures("annotations_unchecked")
def test_intervals_hold_where_few_probes_find_little_of_the_one_large_eigenvalue():
    # (zᵀv)² is 1/3 for three probes of four, else 3: by the spread of 5 probes alone, 73 of 100 intervals held, as
    # CONVERGED. At 95 %, fewer than 90 hits has a false-alarm rate of 1 %.
    v, g, hits = torch.zeros(128, dtype=torch.float64), generator(), 0
    v[:3] = (128 / 3) ** 0.5
    G = torch.eye(128, dtype=torch.float64) + torch.outer(v, v)
    exact = dense(G, 0.02)
    for _ in range(100):
        low, high = effective_dimension(G, 0.02, max_matvecs=10, generator=g).interval()
        hits += bool(low <= exact <= high)
    assert hits >= 90


@pytest.mark.usefixtures("annotations_unchecked")
def test_zero_one_by_one_and_low_rank():
    assert effective_dimension(torch.zeros(300, 300), 1.0).value == 0
    assert float(effective_dimension(torch.tensor([[3.0]]), 1.0).value) == pytest.approx(0.75)
    values = torch.cat([torch.linspace(1, 9, 5), torch.zeros(295)]).double()
    e = effective_dimension(symmetric(values), 0.1, generator=generator())
    torch.testing.assert_close(e.value, (values / (values + 0.1)).sum(), rtol=0.03, atol=0)


@pytest.mark.parametrize("n", [100, 270])
def test_a_prior_below_float32_rounding_is_a_precision_limit(n):
    values = torch.cat([torch.zeros(n // 2), torch.logspace(0, -2, n // 2)]).double()
    e = effective_dimension(symmetric(values).float(), 1e-9, generator=generator())
    low, high = e.interval()
    assert e.reason is Reason.PRECISION_LIMIT and low <= (values / (values + 1e-9)).sum() <= high


def test_failures():
    for n in (100, 300):
        with pytest.raises(NotPositiveSemidefiniteError):
            effective_dimension(symmetric(torch.linspace(-1, 1, n).double()), 0.1)
        with pytest.raises(ValueError, match="NaN"):
            effective_dimension(torch.full((n, n), math.nan), 1.0)
    with pytest.raises(ValueError, match="NaN"):
        effective_dimension(Counted(symmetric(log_spaced(300, 1e4)), spoil=7), 1e-4, generator=generator())


@pytest.mark.parametrize("name", ["decaying", "step", "kappa 1e8"])
@pytest.mark.parametrize("rank", [30, 120])
def test_what_rounding_changed_is_in_the_error(name, rank):
    """The products are float32: no prior precision, however weak, gives a γ whose error is beyond what is said."""
    values = SPECTRA[name].sort(descending=True).values
    values[rank:] = 0
    G = symmetric(values, rank).float()
    spectrum = dense_spectrum(vectors.product(G), vectors.describe_square(G), 0.0)
    for prior in (1e-12, 1e-8, 1e-5, 1e-3, 1.0):
        e, exact = spectrum.effective_dimension(prior, 0.01), (values / (values + prior)).sum()
        low, high = e.interval()
        assert low - 1e-9 <= exact <= high + 1e-9, (prior, e, exact)
        if e.reason is Reason.PRECISION_LIMIT:
            assert e.stderr == e.bias_bound > 0
        else:
            assert e.stderr == 0 and abs(e.value - exact) <= 0.01 * exact


@pytest.mark.usefixtures("annotations_unchecked")
def test_interval_covers():
    # 40 runs at 95 %: fewer than 33 hits has a false-alarm rate below 0.1 %.
    G, g, hits = symmetric(log_spaced(100, 1e6)), generator(), 0
    exact = dense(G, 1e-3)
    for _ in range(40):
        low, high = effective_dimension(G, 1e-3, rtol=1e-3, max_matvecs=80, generator=g).interval()
        hits += bool(low <= exact <= high)
    assert hits >= 33
