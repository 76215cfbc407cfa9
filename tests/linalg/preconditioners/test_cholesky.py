"""Pivoted Cholesky: below the matrix, exact at its pivots, honest about what is left."""

import math

import pytest
import torch
from linear_operator.utils.errors import NotPSDError

from curvops.linalg import Dense, Reason, cg, cholesky
from tests.linalg.matrices import EXPONENTIAL, SPECTRA, generator, log_spaced, symmetric
from tests.linalg.operands import random
from tests.linalg.systems import Counted

N = 120
EYE = torch.eye(N, dtype=torch.float64)


def decaying():
    return symmetric(SPECTRA["decaying"])


@pytest.mark.parametrize("wrap", [lambda A: A, Counted, Dense])
@pytest.mark.parametrize("pivoting", ["greedy", "random"])
@pytest.mark.parametrize("name", ["decaying", "kappa 1e4"])
def test_cholesky_is_below_the_matrix_and_exact_at_the_pivots(name, pivoting, wrap):
    A = symmetric(SPECTRA[name])
    found = cholesky(wrap(A), 30, pivoting=pivoting, generator=generator())
    assert found.F.shape == (N, 30) and len(found.pivots.unique()) == 30 and found.reason is Reason.CONVERGED
    left = A - found.F @ found.F.mT
    scale = float(SPECTRA[name].max())
    assert torch.linalg.eigvalsh(left)[0] > -1e-12 * scale
    torch.testing.assert_close(left[found.pivots], torch.zeros(30, N).double(), rtol=0, atol=1e-12 * scale)
    assert found.trace_left == pytest.approx(float(left.trace()), abs=1e-10 * scale)
    torch.testing.assert_close(found @ EYE, found.F @ found.F.mT, rtol=0, atol=1e-12 * scale)


def test_cholesky_counts_its_columns():
    A = Counted(decaying())
    found = cholesky(A, 33, diagonal=decaying().diagonal(), pivoting="random", generator=generator())
    assert found.matvecs == sum(A.log) >= 33
    assert cholesky(Dense(decaying()), 10).matvecs == 10
    assert cholesky(Dense(decaying()) @ Dense(EYE), 10).matvecs == N + 10  # its diagonal has no cheaper way


@pytest.mark.parametrize("pivoting", ["greedy", "random"])
@pytest.mark.parametrize("rank", [0, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cholesky_of_low_rank_stops_there(rank, pivoting, dtype):
    W = random(60, rank).to(dtype)
    found = cholesky(W @ W.mT, 40, pivoting=pivoting, shift=0.1, generator=generator())
    assert found.F.shape == (60, rank) and found.trace_left == 0 and found.reason is Reason.CONVERGED
    torch.testing.assert_close(found.F @ found.F.mT, W @ W.mT, rtol=0, atol=2e3 * torch.finfo(dtype).eps)
    P = found.preconditioner()
    b = random(60).to(dtype)
    solution = cg(W @ W.mT + 0.1 * torch.eye(60, dtype=dtype), b, preconditioner=P, rtol=1e-3)
    assert solution.accepted and solution.iterations <= 4
    with pytest.raises(ValueError, match="positive shift"):
        found.preconditioner(0.0)


def test_random_pivoting_survives_outliers():
    # One heavy row and column each for 30 points, which greedy pivoting takes one by one, and a smooth rest.
    smooth = 0.9 * torch.exp(-2 * (torch.linspace(0, 1, 400).double()[:, None] - torch.linspace(0, 1, 400)).square())
    A = torch.block_diag(torch.eye(30, dtype=torch.float64), smooth)
    greedy = cholesky(A, 30).trace_left
    rows = [cholesky(A, 30, pivoting="random", generator=generator(seed)).trace_left for seed in range(5)]
    assert max(rows) < greedy / 5


def test_random_pivots_follow_the_diagonal():
    # Orthogonal columns: the first draw takes position i with probability a_i / Σ a. False alarms: below 1e-4.
    weights, hits = torch.tensor([1.0, 2.0, 7.0], dtype=torch.float64), torch.zeros(3)
    g = generator()
    for _ in range(200):
        hits[cholesky(weights.diag(), 1, pivoting="random", generator=g).pivots] += 1
    assert (hits / 200 - weights / 10).abs().max() < 4 * 0.5 / math.sqrt(200)


def test_rank_is_grown_until_the_condition_number_is_bounded():
    A, mu = symmetric(EXPONENTIAL), 1e-2
    found = cholesky(A, shift=mu)
    P = found.preconditioner()
    spectrum = torch.linalg.eigvalsh(P.sqrt_inverse(P.sqrt_inverse(A + mu * EYE).mT))
    assert spectrum[-1] / spectrum[0] <= 28 and len(found.pivots) < N and found.trace_left <= 27 * mu
    by_share = cholesky(A, rtol=0.1)
    assert by_share.trace_left <= 0.1 * A.trace() and by_share.reason is Reason.CONVERGED
    capped = cholesky(A, shift=mu, memory_budget=2 * N * 8 * 10)
    assert len(capped.pivots) == 10 and capped.reason is Reason.RANK_CAPPED


def test_without_a_shift_the_mean_left_takes_its_place():
    A = symmetric(log_spaced(N, 1e4))
    found = cholesky(A, 60)
    assert found.preconditioner().level == pytest.approx(found.trace_left / 60)
    assert cg(A, random(N), preconditioner=found.preconditioner()).accepted
    complete = cholesky(A, N).preconditioner()
    torch.testing.assert_close(complete @ A, EYE, rtol=0, atol=1e-8)


def test_more_columns_than_the_first_room():
    A = symmetric(torch.linspace(1, 2, 200, dtype=torch.float64))
    found = cholesky(A, 150)
    assert torch.linalg.eigvalsh(A - found.F @ found.F.mT)[0] > -1e-12
    assert cholesky(A, 500).F.shape == (200, 200)


@pytest.mark.parametrize("pivoting", ["greedy", "random"])
def test_cholesky_of_what_is_not_psd(pivoting):
    with pytest.raises(NotPSDError, match="add_diagonal"):
        cholesky(torch.diag(torch.tensor([1.0, -1.0])), 2, pivoting=pivoting)
    with pytest.raises(NotPSDError, match="Schur complement"):
        cholesky(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), 2, pivoting=pivoting, generator=generator())
