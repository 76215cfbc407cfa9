"""Trace estimators against exact traces and the laws of their probes.

Tests `probed.py`.
"""

import math

import pytest
import torch

from curvops.linalg import Reason, trace
from tests.linalg.known import Noted
from tests.linalg.matrices import SPECTRA, generator, symmetric

# Exact cases.


@pytest.mark.parametrize(("n", "exact"), [(15, True), (16, True), (17, False)])
def test_up_to_sixteen_columns_are_multiplied_out_under_any_tolerance(n, exact):
    A = symmetric(torch.linspace(1, 1.1, n, dtype=torch.float64))
    e = trace(A, rtol=0.5, generator=generator())
    assert (e.samples == 0) is exact and e.matvecs == min(n, 16) and e.reason is Reason.CONVERGED


@pytest.mark.parametrize(
    ("most", "reason"), [(None, Reason.RANK_CAPPED), (100, Reason.RANK_CAPPED), (30, Reason.MATVEC_LIMIT)]
)
def test_the_smaller_of_memory_and_budget_is_named(most, reason):
    """Memory for 30 products' vectors, of two each."""
    A = symmetric(SPECTRA["decaying"])
    e = trace(A, rtol=1e-12, max_matvecs=most, memory_budget=2 * 30 * 8 * len(A), generator=generator())
    assert e.matvecs == 30 and e.reason is reason


@pytest.mark.parametrize(("options", "budget"), [({}, 25), ({"rtol": 1e-14}, 60)], ids=["at once", "grown"])
def test_hutch_plus_plus_is_its_formula_for_the_probes_it_has(options, budget):
    A = symmetric(SPECTRA["decaying"])
    noted = Noted(A)
    e = trace(noted, method="hutch++", max_matvecs=budget, generator=generator(), **options)
    noted_columns = torch.cat(noted.blocks, 1)
    Q = noted_columns[:, (noted_columns.norm(dim=0) - 1).abs() < 1e-10]
    G = noted.probes[:, (noted.probes.abs() - 1).abs().amax(0) > 1e-10]  # the others are the signs of the sketch
    assert Q.shape[1] == budget // 3 and noted_columns.shape[1] == e.matvecs == budget
    G = G - Q @ (Q.mT @ G)
    samples = torch.einsum("nk,nk->k", G, A @ G)
    torch.testing.assert_close(e.value, (Q.mT @ A @ Q).trace() + samples.mean(), rtol=1e-12, atol=0)
    torch.testing.assert_close(e.stderr, samples.std() / math.sqrt(len(samples)), rtol=1e-10, atol=0)


def test_hutchinson_equals_the_mean_over_the_same_probes():
    A = symmetric(SPECTRA["kappa 1e4"])
    e = trace(A, method="hutchinson", max_matvecs=20, generator=generator(3))
    Z = torch.empty(20, 120, dtype=torch.float64).bernoulli_(0.5, generator=generator(3)) * 2 - 1
    samples = torch.einsum("kn,nm,km->k", Z, A, Z)
    torch.testing.assert_close(e.value, samples.mean(), rtol=1e-12, atol=0)
    torch.testing.assert_close(e.stderr, samples.std() / math.sqrt(20), rtol=1e-12, atol=0)


# Adaptive.


def test_adaptive_stops_at_the_tolerance_or_the_budget():
    A = symmetric(SPECTRA["flat"])
    loose = trace(A, method="hutchinson", rtol=0.05, max_matvecs=100, generator=generator())
    tight = trace(A, method="hutchinson", rtol=1e-6, max_matvecs=100, generator=generator())
    assert loose.matvecs <= 32 and loose.stderr <= 0.05 * loose.value and loose.reason is Reason.CONVERGED
    assert tight.matvecs == 100 and tight.reason is Reason.MATVEC_LIMIT
    assert trace(A, max_matvecs=50, generator=generator()).reason is Reason.BUDGET_SPENT
    with pytest.raises(ValueError, match="memory_budget"):
        trace(A, memory_budget=1000, max_matvecs=50)


@pytest.mark.parametrize("method", ["xtrace", "xnystrace"])
def test_intervals_hold_where_all_leave_one_out_samples_are_off_together(method):
    # Two clusters, as many probes as the upper one has eigenvalues, but a few. The spread of
    # the samples held the trace in 49 runs of 60. Fewer than 54 hits at 95 % has a false-alarm rate of 3 %.
    values = torch.cat([torch.full((30,), 1e-6), torch.ones(30)]).double()
    A, g, hits = symmetric(values), generator(), 0
    for probes in (24, 28, 30):
        for _ in range(20):
            low, high = trace(A, method=method, max_matvecs=probes, generator=g).interval()
            hits += bool(low <= values.sum() <= high)
    assert hits >= 54
