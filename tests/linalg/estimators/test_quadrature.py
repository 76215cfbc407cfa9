"""Lanczos quadrature of a spectrum: brackets, intervals and the depth of its probes."""

import math
from dataclasses import replace

import pytest
import torch

from curvops.errors import NotPositiveSemidefiniteError
from curvops.linalg import Reason, SpectralQuadrature, logdet, spectral_quadrature
from tests.linalg.matrices import SPECTRA, generator, log_spaced, symmetric


def signs(n, k, seed):
    return torch.empty(k, n, dtype=torch.float64).bernoulli_(0.5, generator=generator(seed)).mul_(2).sub_(1).mT


def dense(values, mu):
    return torch.log1p(values / mu).sum(), (values / (values + mu)).sum()


@pytest.mark.parametrize(("budget", "mu"), [(20, 1e-1), (60, 1e-3), (200, 1e-3)])
@pytest.mark.parametrize("name", ["decaying", "clustered", "kappa 1e8"])
def test_rules_bracket_each_probe(name, budget, mu):
    A = symmetric(SPECTRA[name])
    values, V = torch.linalg.eigh(A)
    q = spectral_quadrature(A, shift=mu, probes=4, rtol=1e-9, max_matvecs=budget, rank=0, generator=generator(7))
    weights = (V.mT @ signs(120, 4, 7)).square()
    for f in (lambda x: torch.log1p(x / mu), lambda x: x / (x + mu)):
        exact = f(values.clamp_min(0)) @ weights
        upper, lower = q.bracket(f)
        slack = 1e-9 * exact.abs().max()
        assert (upper >= exact - slack).all() and (lower <= exact + slack).all()
        assert q.trace(f).bias_bound >= ((upper + lower) / 2 - exact).abs().mean() - slack


@pytest.mark.parametrize("name", ["decaying", "kappa 1e8"])
def test_a_small_matrix_is_decomposed(name):
    A = symmetric(SPECTRA[name])
    q = spectral_quadrature(A, shift=1e-3)
    for mu in (1e-3, 1.0):
        for found, expected in zip((q.logdet(mu), q.effective_dimension(mu)), dense(SPECTRA[name], mu)):
            torch.testing.assert_close(found.value, expected, rtol=1e-10, atol=1e-10)
            assert found.samples == 0 and found.stderr == 0 and found.matvecs == 120
            assert found.reason is Reason.CONVERGED and found.bias_bound < 1e-9 * expected
    assert spectral_quadrature(A, shift=1.0, max_matvecs=60, generator=generator()).logdet(1.0).samples
    with pytest.raises(NotPositiveSemidefiniteError, match="positive semidefinite approximation"):
        spectral_quadrature(A - 0.5 * A.diagonal().amax() * torch.eye(120), shift=1.0)


def test_rules_reproduce_as_many_moments_as_they_have_free_nodes_and_weights():
    """Of m steps: Gauss to degree 2m − 1, Gauss–Radau, whose further node is fixed at 0, to 2m."""
    A = symmetric(SPECTRA["flat"])
    q = spectral_quadrature(A, shift=1.0, probes=2, rtol=1e-12, max_matvecs=12, rank=0, generator=generator(1))
    Z, m = signs(120, 2, 1), q.gauss_nodes.shape[1]
    assert q.radau_nodes.shape[1] == m + 1 and bool((q.radau_nodes.amin(1) < 1e-12).all())
    for power in range(2 * m + 2):
        exact = torch.stack([z @ torch.linalg.matrix_power(A, power) @ z for z in Z.mT])
        rules = {2 * m - 1: (q.gauss_weights, q.gauss_nodes), 2 * m: (q.radau_weights, q.radau_nodes)}
        for most, (weights, nodes) in rules.items():
            error = (weights * nodes**power).sum(1) / exact - 1
            assert bool((error.abs() < 1e-10).all()) == (power <= most), (power, most, error)


def test_smaller_shift_than_built_for_has_a_wider_bracket_and_still_holds():
    values = log_spaced(300, 1e8)
    q = spectral_quadrature(symmetric(values), shift=1e-1, probes=20, generator=generator())
    near, far = q.logdet(1e-1), q.logdet(1e-7)
    assert far.bias_bound > 100 * near.bias_bound
    low, high = far.interval(0.999)
    assert low <= dense(values, 1e-7)[0] <= high


def test_a_grid_has_the_first_reason_that_is_not_converged():
    q = spectral_quadrature(symmetric(log_spaced(300, 1e8)), shift=1e-1, rtol=0.1, generator=generator())
    shifts = torch.tensor([100.0, 1.0, 1e-9])
    reasons = [q.logdet(float(mu)).reason for mu in shifts]
    assert reasons[0] is Reason.CONVERGED is not reasons[-1]
    assert q.logdet(shifts).reason is reasons[-1] and q.logdet(shifts[:1]).reason is Reason.CONVERGED


@pytest.mark.parametrize(("known", "reason"), [(0.0, Reason.MATVEC_LIMIT), (30_000.0, Reason.CONVERGED)])
def test_the_tolerance_is_relative_to_the_part_known_and_the_value(known, reason):
    """Two probes of tr f(G) = 4 ± 1 at rtol 1e-3: within it beside a large known part, not alone."""
    nodes, weights = torch.ones(2, 1).double(), torch.tensor([[3.0], [5.0]]).double()
    nothing, none = torch.zeros(0).double(), torch.zeros(2, 0).double()
    q = SpectralQuadrature(nodes, weights, nodes, weights, nothing, none, 2, Reason.CONVERGED, rtol=1e-3, offset=known)
    found = q.trace(lambda x: x)
    assert found.value == 4 and found.reason is reason
    opposite = replace(q, rtol=0.3, offset=-5.0)  # 0.3 of |−5 + 4|, not of |−5 − 4|
    assert opposite.trace(lambda x: x).reason is Reason.MATVEC_LIMIT


def test_invariant_subspaces_and_low_rank_close_the_bracket():
    values = torch.cat([torch.zeros(100), torch.tensor([1.0, 1.0, 5.0])]).double()
    q = spectral_quadrature(symmetric(values), shift=0.1, probes=3, rank=0, generator=generator())
    assert q.logdet(0.1).bias_bound < 1e-9 and q.reason is Reason.CONVERGED
    sketched = spectral_quadrature(symmetric(values), shift=0.1, probes=3, rank=10, generator=generator())
    torch.testing.assert_close(sketched.logdet(0.1).value, dense(values, 0.1)[0], rtol=1e-9, atol=0)
    assert sketched.logdet(0.1).stderr < 1e-9


def test_zero_operator():
    e = spectral_quadrature(torch.zeros(300, 300), shift=1.0).logdet(1.0)
    assert e.value == 0 and e.stderr == 0 and e.bias_bound == 0


def test_memory_budget_caps_the_depth_and_says_so():
    G = symmetric(log_spaced(300, 1e8))
    q = spectral_quadrature(G, shift=1e-8, memory_budget=300 * 8 * 3 * 20, generator=generator())
    assert q.reason is Reason.RANK_CAPPED and q.gauss_nodes.shape[1] <= 18


@pytest.mark.parametrize("budget", [4, 20, 60])
def test_a_sketch_of_more_columns_than_the_budget_takes_half_of_it(budget):
    q = spectral_quadrature(
        symmetric(SPECTRA["decaying"]), shift=0.1, rank=100, max_matvecs=budget, generator=generator()
    )
    assert q.matvecs <= budget and len(q.control_nodes) <= budget // 2 and len(q.gauss_nodes) >= 2


@pytest.mark.parametrize("budget", [4, 5, 21, 22])
def test_a_small_budget_is_enough_for_an_error_bar(budget):
    estimate = logdet(symmetric(SPECTRA["decaying"]), shift=0.1, max_matvecs=budget, generator=generator())
    assert estimate.matvecs <= budget and math.isfinite(float(estimate.stderr))


def test_indefinite_and_non_finite_are_errors():
    with pytest.raises(NotPositiveSemidefiniteError, match="lower_bound"):
        spectral_quadrature(-torch.eye(300), shift=1.0)
    with pytest.raises(ValueError, match="NaN"):
        spectral_quadrature(torch.full((300, 300), math.nan), shift=1.0)


def test_an_image_without_curvature_is_indefinite():
    """One step from signs z with zᵀAz = 0 leaves T = 0, which no Radau rule follows."""
    A = torch.ones(16, 16, dtype=torch.float64) - torch.eye(16, dtype=torch.float64)
    for seed in range(20):
        with pytest.raises(NotPositiveSemidefiniteError):
            logdet(A, shift=0.5, max_matvecs=4, preconditioner=None, generator=torch.Generator().manual_seed(seed))


def test_few_probes_of_one_dominant_direction_are_not_too_sure():
    """Without the spread about the eigenvalue's known weight 95 intervals hold the truth, and one error is 110 bars."""
    A = symmetric(torch.cat([torch.tensor([1e3]), torch.full((299,), 1e-2)]).double())
    truth, covered, worst = math.log1p(1e3) + 299 * math.log1p(1e-2), 0, 0.0
    for seed in range(100):
        quadrature = spectral_quadrature(A, shift=1.0, probes=3, rank=0, max_matvecs=80, generator=generator(seed))
        found = quadrature.logdet(1.0)
        low, high = found.interval()
        covered += bool(low <= truth <= high)
        worst = max(worst, abs(float(found.value) - truth) / float(found.stderr))
        grid = quadrature.logdet(torch.tensor([1.0, 2.0]))
        assert float(grid.interval()[0][0]) == pytest.approx(float(low), rel=1e-12)
    assert covered >= 98 and worst < 12  # 100, 7.6


def test_an_exact_null_space_beside_one_direction_leaves_the_radau_rule_regular():
    A = symmetric(torch.cat([torch.tensor([1e3]), torch.zeros(299)]).double(), seed=5)
    for seed in range(40):
        found = logdet(A, shift=1.0, max_matvecs=20, generator=generator(seed))
        low, high = found.interval()
        assert low - 1e-9 <= math.log1p(1e3) <= high + 1e-9


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("rank", [0, 20])
def test_interval_covers(rank):
    # 40 runs at 95 %: fewer than 33 hits has a false-alarm rate below 0.1 %.
    values, g, hits = log_spaced(80, 1e4), generator(), 0
    A, exact = symmetric(values), dense(values, 1e-2)[0]
    for _ in range(40):
        q = spectral_quadrature(A, shift=1e-2, probes=5, rank=rank, generator=g, rtol=1e-3, max_matvecs=150)
        low, high = q.logdet(1e-2).interval()
        hits += bool(low <= exact <= high)
    assert hits >= 33
