import math

import pytest
import torch

from curvops.linalg.core.results import Reason
from curvops.linalg.spectra.block_lanczos import block_lanczos
from curvops.linalg.spectra.lanczos import LockStep, lanczos
from tests.linalg.matrices import SPECTRA, symmetric


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SPECTRA)
def test_tridiagonal_identity_and_orthogonality(name, dtype):
    A = symmetric(SPECTRA[name]).to(dtype)
    r = lanczos(A, 60, generator=generator())
    Q, eps, size = r.Q.double(), torch.finfo(dtype).eps, SPECTRA[name].max()
    m = len(r.alphas)
    torch.testing.assert_close(Q.mT @ Q, torch.eye(m, dtype=torch.float64), rtol=0, atol=30 * eps)
    torch.testing.assert_close(Q.mT @ A.double() @ Q, r.T, rtol=0, atol=float(100 * eps * size))
    residual = A.double() @ Q - Q @ r.T
    assert residual[:, :-1].norm() < 200 * eps * size
    torch.testing.assert_close(residual[:, -1].norm(), r.residual_norm, rtol=1e-3, atol=float(100 * eps * size))
    assert r.matvecs == m


def test_full_depth_gives_all_eigenvalues():
    A = symmetric(SPECTRA["flat"])
    r = lanczos(A, 500, generator=generator())
    assert len(r.alphas) == 120 and r.reason is Reason.BREAKDOWN and r.residual_norm == 0
    torch.testing.assert_close(torch.linalg.eigvalsh(r.T), SPECTRA["flat"], rtol=1e-10, atol=1e-10)


def test_breakdown_is_a_result():
    A = symmetric(SPECTRA["step"])
    r = lanczos(A, 50, generator=generator())
    assert r.reason is Reason.BREAKDOWN and len(r.alphas) == 2 and r.matvecs == 2
    torch.testing.assert_close(torch.linalg.eigvalsh(r.T), torch.tensor([1.0, 100.0]).double(), rtol=1e-12, atol=0)


def test_start_vector_is_the_first_column_at_any_scale():
    A, start = symmetric(SPECTRA["flat"]).float(), torch.zeros(120)
    start[3] = 1e-30
    r = lanczos(A, 4, start=start)
    assert r.Q[3, 0] == 1 and r.reason is Reason.CONVERGED


def test_zero_operator_and_one_by_one():
    assert lanczos(torch.zeros(5, 5), 3).T.tolist() == [[0.0]]
    r = lanczos(torch.tensor([[3.0]]), 3)
    assert r.T.tolist() == [[3.0]] and r.reason is Reason.BREAKDOWN


def test_memory_budget_caps_the_depth_and_says_so():
    r = lanczos(symmetric(SPECTRA["flat"]), 50, memory_budget=120 * 8 * 12)
    assert r.reason is Reason.RANK_CAPPED and len(r.alphas) == 10


def test_nan_in_a_product_is_a_reason():
    A = symmetric(SPECTRA["flat"])
    A[0, 0] = math.nan
    r = lanczos(A, 5)
    assert r.reason is Reason.NON_FINITE and r.T.isfinite().all()


def test_lock_step_equals_single_runs_and_can_be_extended():
    A, starts = symmetric(SPECTRA["kappa 1e4"]), torch.randn(120, 3, dtype=torch.float64)
    starts[:, 1] = torch.linalg.eigh(A).eigenvectors[:, 5]
    batch = LockStep(lambda V: A @ V, starts, 20)
    batch.extend(8)
    batch.extend(20)
    assert batch.depths.tolist() == [20, 1, 20] and batch.matvecs == 41
    for k in (0, 2):
        single = lanczos(A, 20, start=starts[:, k])
        torch.testing.assert_close(batch.alphas[k], single.alphas, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(batch.betas[k], single.betas, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 0}, "at least 1"),
        ({"steps": 2, "start": torch.zeros(4)}, "not zero"),
        ({"steps": 2, "start": torch.ones(5)}, r"\(5,\)"),
        ({"steps": 2, "start": torch.ones(4).double()}, "float64"),
        ({"steps": 2, "start": torch.tensor([1.0, math.nan, 0, 0])}, "finite"),
    ],
)
def test_errors_at_the_door(options, words):
    with pytest.raises(ValueError, match=words):
        lanczos(torch.eye(4), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize(("block_size", "steps"), [(1, 20), (3, 10), (7, 40)])
def test_block_identity_and_orthogonality(name, dtype, block_size, steps):
    A = symmetric(SPECTRA[name]).to(dtype)
    r = block_lanczos(A, steps, block_size=block_size, generator=generator())
    Q, V, eps, size = r.Q.double(), r.V.double(), torch.finfo(dtype).eps, float(SPECTRA[name].max())
    basis = torch.cat([Q, V], 1)
    eye = torch.eye(basis.shape[1], dtype=torch.float64)
    torch.testing.assert_close(basis.mT @ basis, eye, rtol=0, atol=30 * eps)
    torch.testing.assert_close(Q.mT @ A.double() @ Q, r.T, rtol=0, atol=100 * eps * size)
    torch.testing.assert_close(A.double() @ Q, Q @ r.T + V @ r.C, rtol=0, atol=100 * eps * size)
    # Banded: a block meets only its neighbours.
    assert r.T.triu(2 * block_size).abs().max() < 100 * eps * size or r.reason is Reason.BREAKDOWN
    assert r.matvecs == Q.shape[1] <= 120


def test_block_of_one_is_the_single_vector():
    A, start = symmetric(SPECTRA["kappa 1e4"]), torch.randn(120, 1, dtype=torch.float64)
    single, block = lanczos(A, 15, start=start[:, 0]), block_lanczos(A, 15, start=start)
    torch.testing.assert_close(torch.linalg.eigvalsh(block.T), torch.linalg.eigvalsh(single.T), rtol=0, atol=1e-14)
    torch.testing.assert_close(block.C.norm(), single.residual_norm, rtol=1e-10, atol=0)
    assert block.reason is single.reason is Reason.CONVERGED


def test_block_sees_a_multiple_eigenvalue_once_a_column_and_breaks_down():
    r = block_lanczos(symmetric(SPECTRA["step"]), 50, block_size=3, generator=generator())
    assert r.reason is Reason.BREAKDOWN and r.V.shape[1] == 0 and r.matvecs == 6
    expected = torch.tensor([1.0] * 3 + [100.0] * 3).double()
    torch.testing.assert_close(torch.linalg.eigvalsh(r.T), expected, rtol=1e-12, atol=0)


def test_dependent_start_columns_are_dropped_and_a_short_residual_block_goes_on():
    A = symmetric(SPECTRA["kappa 1e4"])
    V = torch.linalg.eigh(A).eigenvectors
    start = torch.stack([V[:, 0], V.sum(1), 1e-20 * V.sum(1), torch.zeros(120).double()]).mT
    r = block_lanczos(A, 10, start=start)
    assert r.matvecs == 11 and r.reason is Reason.CONVERGED  # two columns, of which one is an eigenvector
    assert (torch.linalg.eigvalsh(r.T) - 1e-4).abs().min() < 1e-14


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_block_at_any_scale(size):
    A = symmetric(SPECTRA["flat"])
    r = block_lanczos((A * size).float(), 8, block_size=2, generator=generator())
    torch.testing.assert_close(r.T / size, r.Q.double().mT @ A @ r.Q.double(), rtol=0, atol=1e-5)
    assert block_lanczos(torch.zeros(5, 5), 3, block_size=2).reason is Reason.BREAKDOWN


def test_block_budget_nan_and_errors():
    A = symmetric(SPECTRA["flat"])
    r = block_lanczos(A, 50, block_size=2, memory_budget=120 * 8 * (10 + 4 * 2), generator=generator())
    assert r.reason is Reason.RANK_CAPPED and r.Q.shape[1] == 10
    A[0, 0] = math.nan
    r = block_lanczos(A, 5, block_size=2)
    assert r.reason is Reason.NON_FINITE and r.Q.shape[1] == 0
    for options, words in (
        ({"steps": 0}, "at least 1"),
        ({"steps": 1, "block_size": 5}, r"1\.\.4"),
        ({"steps": 1, "start": torch.zeros(4, 2)}, "not zero"),
        ({"steps": 1, "start": torch.ones(5, 1)}, r"\(4, b\)"),
    ):
        with pytest.raises(ValueError, match=words):
            block_lanczos(torch.eye(4), **options)
