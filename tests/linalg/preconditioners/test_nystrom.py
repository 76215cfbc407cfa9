import pytest
import torch

from curvops.linalg import Reason, cg, nystrom
from tests.linalg.matrices import SPECTRA, generator, log_spaced, symmetric
from tests.linalg.systems import Counted


def low_rank(rank, dtype=torch.float64):
    values = torch.zeros(60, dtype=torch.float64)
    values[:rank] = torch.linspace(1, 5, rank) if rank else 0
    return symmetric(values).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [0, 5, 30, 500])
@pytest.mark.parametrize("name", ["decaying", "clustered", "kappa 1e4"])
def test_orthonormal_descending_and_below_the_matrix(name, rank, dtype):
    A = symmetric(SPECTRA[name]).to(dtype)
    N = nystrom(A, rank, generator=generator())
    U, eps = N.U.double(), torch.finfo(dtype).eps
    r = len(N.eigenvalues)
    torch.testing.assert_close(U.mT @ U, torch.eye(r, dtype=torch.float64), rtol=0, atol=100 * eps)
    assert (N.eigenvalues > 0).all() and (N.eigenvalues.diff() <= 0).all() and N.matvecs == min(rank, 120)
    rest = torch.linalg.eigvalsh(A.double() - (U * N.eigenvalues) @ U.mT)
    assert rest.min() > -1e3 * eps * SPECTRA[name].max()
    expected = ((U * N.eigenvalues) @ U.mT).to(dtype)
    torch.testing.assert_close(
        N @ torch.eye(120, dtype=dtype), expected, rtol=0, atol=float(100 * eps * SPECTRA[name].max())
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [0, 7])
@pytest.mark.parametrize("asked", [None, 12])
def test_exact_low_rank_and_zero(rank, asked, dtype):
    A = low_rank(rank, dtype)
    N = nystrom(A, asked, shift=1e-3, generator=generator())
    assert len(N.eigenvalues) == rank and N.tail == 0 and N.reason is Reason.CONVERGED
    torch.testing.assert_close((N.U * N.eigenvalues.to(dtype)) @ N.U.mT, A, rtol=0, atol=2e3 * torch.finfo(dtype).eps)
    P = N.preconditioner()
    B = torch.randn(60, 2, dtype=dtype)
    s = cg(A + 1e-3 * torch.eye(60, dtype=dtype), B, preconditioner=P, rtol=1e-4)
    assert s.accepted and (s.iterations <= 4 or dtype == torch.float32)


def test_rank_is_chosen_by_cost():
    A = symmetric(SPECTRA["decaying"])
    chosen = nystrom(A, shift=1e-3, rhs=8, generator=generator())
    assert chosen.tail <= 2e-2 and chosen.matvecs < 120
    # A flat spectrum gains nothing from more rank, nor does a large shift.
    assert nystrom(symmetric(SPECTRA["flat"]), shift=1.0, generator=generator()).matvecs == 8
    assert nystrom(A, shift=100.0, rhs=8, generator=generator()).matvecs == 8


def test_doubling_keeps_the_earlier_products():
    A = Counted(symmetric(log_spaced(300, 1e8)))
    N = nystrom(A, shift=1e-8, rhs=1000, generator=generator())
    assert A.log[:3] == [8, 8, 16] and sum(A.log) == N.matvecs > 32
    products, least = N.history.mT
    assert products.tolist() == torch.tensor(A.log).cumsum(0).tolist()
    assert bool((least.diff() < 0).all()) and least[-1] == N.eigenvalues[-1]


def test_budgets_cap_the_rank_and_say_so():
    A = symmetric(SPECTRA["kappa 1e8"])
    by_memory = nystrom(A, 50, memory_budget=3 * 120 * 8 * 20, generator=generator())
    assert by_memory.matvecs == 20 and by_memory.reason is Reason.RANK_CAPPED
    by_rank = nystrom(A, shift=1e-8, rhs=50, max_rank=16, generator=generator())
    assert by_rank.matvecs == 16 and by_rank.reason is Reason.RANK_CAPPED
    none = nystrom(A, shift=1e-8, max_rank=0)
    assert none.matvecs == 0 and none.reason is Reason.RANK_CAPPED and torch.equal(none.preconditioner() @ A, A)
