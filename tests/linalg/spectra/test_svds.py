"""Singular triplets against dense ones."""

import math

import pytest
import torch

from curvops.linalg import Reason, svds
from tests.linalg.matrices import SPECTRA, generator, rotation

EXACT = {Reason.CONVERGED, Reason.PRECISION_LIMIT}
SHAPES = [(150, 120), (120, 150), (120, 120)]


def rectangular(values, m, n, seed=0):
    """A dense m × n matrix with these singular values, and zeros."""
    r = len(values)
    return rotation(m, seed)[:, :r] * values @ rotation(n, seed + 1)[:, :r].mT


def assert_honest(A, triplets, rtol):
    A, U, V = A.double(), triplets.U.double(), triplets.V.double()
    eps, size, k = torch.finfo(triplets.U.dtype).eps, torch.linalg.matrix_norm(A, 2), len(triplets.values)
    right, left = A @ V - U * triplets.values, A.mT @ U - V * triplets.values
    true = torch.cat([right, left]).norm(dim=0)
    torch.testing.assert_close(triplets.residuals, true, rtol=1e-3, atol=float(20 * eps * size))
    for X in (U, V):
        torch.testing.assert_close(X.mT @ X, torch.eye(k, dtype=torch.float64), rtol=0, atol=300 * eps)
    for j, reason in enumerate(triplets.reasons):
        if reason is Reason.CONVERGED:
            assert triplets.residuals[j] <= rtol * triplets.values[j]


@pytest.mark.parametrize("which", ["LM", "SM"])
@pytest.mark.parametrize(
    ("name", "shape"),
    [("step", SHAPES[0]), ("kappa 1e8", SHAPES[0]), ("kappa 1e4", SHAPES[1]), ("decaying", SHAPES[2])],
)
def test_against_svd(name, shape, which):
    A = rectangular(SPECTRA[name], *shape)
    triplets = svds(A, 6, which, rtol=1e-10, generator=generator())
    values = torch.linalg.svdvals(A)
    expected = values[:6] if which == "LM" else values.flip(0)[:6]
    torch.testing.assert_close(triplets.values, expected, rtol=1e-10, atol=float(1e-14 * values[0]))
    assert set(triplets.reasons) <= EXACT
    assert_honest(A, triplets, 1e-10)


def test_triplets_unpack_as_a_decomposition():
    A = rectangular(SPECTRA["decaying"], *SHAPES[0])
    U, values, V = svds(A, 3, rtol=1e-10, generator=generator())
    torch.testing.assert_close(U.mT @ A @ V, values.diag(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", [(20, 12), (12, 20)])
def test_rank_deficient_and_all_triplets(shape):
    A = rectangular(torch.tensor([3.0, 2.0, 2.0, 1e-9], dtype=torch.float64), *shape)
    triplets = svds(A, 12, rtol=1e-6, generator=generator())
    expected = torch.cat([torch.tensor([3.0, 2.0, 2.0, 1e-9]), torch.zeros(8)]).double()
    torch.testing.assert_close(triplets.values, expected, rtol=1e-10, atol=1e-14)  # squaring would lose the 1e-9
    assert set(triplets.reasons[:3]) == {Reason.CONVERGED} and set(triplets.reasons) <= EXACT
    assert_honest(A, triplets, 1e-6)
    torch.testing.assert_close(triplets.U * triplets.values @ triplets.V.mT, A, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("which", "block_size"), [("LM", 1), ("SM", 2), ("LM", 4)])
def test_multiplicities_larger_than_the_block(which, block_size):
    many = torch.full((9,), 3.0 if which == "LM" else 0.5, dtype=torch.float64)
    values = torch.cat([many, torch.linspace(1, 2, 71, dtype=torch.float64)])
    memory = (40 + 4 * block_size) * 180 * 8
    A = rectangular(values, 100, 80)
    triplets = svds(A, 11, which, block_size=block_size, memory_budget=memory, generator=generator())
    expected = values.sort(descending=which == "LM").values[:11]
    torch.testing.assert_close(triplets.values, expected, rtol=1e-10, atol=0)
    assert set(triplets.reasons) == {Reason.CONVERGED}


def test_zero_one_by_one_and_a_column():
    assert svds(torch.zeros(5, 3), 2).values.tolist() == [0.0, 0.0]
    one = svds(torch.tensor([[-2.0]]).double(), 1)
    assert one.values.tolist() == [2.0] and (one.U * one.values @ one.V.mT).tolist() == [[-2.0]]
    column = svds(torch.tensor([[3.0], [4.0]]).double(), 1)
    torch.testing.assert_close(column.values, torch.tensor([5.0]).double())
    torch.testing.assert_close(column.U.abs(), torch.tensor([[0.6], [0.8]]).double())


def test_nan_budgets_and_limits_are_reasons():
    A = rectangular(SPECTRA["kappa 1e8"], 130, 120)
    bad = A.clone()
    bad[3, 5] = math.nan
    broken = svds(bad, 2)
    assert set(broken.reasons) == {Reason.NON_FINITE} and broken.values.isnan().all() and broken.residuals.isinf().all()
    short = svds(A, 3, "SM", max_matvecs=60, generator=generator())
    assert set(short.reasons) == {Reason.ITERATION_LIMIT} and short.matvecs <= 60
    capped = svds(A, 3, "SM", maxiter=30, memory_budget=18 * 250 * 8, generator=generator())
    assert set(capped.reasons) == {Reason.RANK_CAPPED}
