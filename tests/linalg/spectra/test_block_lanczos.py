"""The projection that `eigsh` restarts: what it holds after some steps, whatever the start block.

Tests `thick_restart.py`.
"""

import math

import pytest
import torch

from curvops.linalg.spectra.eigsh import BlockLanczos
from curvops.linalg.spectra.lanczos import lanczos
from curvops.linalg.spectra.thick_restart import CountedProduct
from tests.linalg.matrices import SPECTRA, symmetric


def projected(A, start, steps):
    """Block Lanczos after so many steps, or as many as there are."""
    run = BlockLanczos(CountedProduct(lambda V: A @ V), start, len(A), torch.Generator().manual_seed(1))
    while steps and not run.complete:
        run.step()
        steps -= 1
    return run


def columns(n, k, dtype=torch.float64):
    return torch.randn(n, k, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize(("block_size", "steps"), [(3, 10), (7, 40)])
def test_block_identity_and_orthogonality(name, dtype, block_size, steps):
    A = symmetric(SPECTRA[name]).to(dtype)
    run = projected(A, columns(120, block_size, dtype), steps)
    Q, P, eps, size = run.basis.columns.double(), run.pending.double(), torch.finfo(dtype).eps, SPECTRA[name].max()
    T, C = run.T * run.scale, run.C * run.scale
    basis = torch.cat([Q, P], 1)
    eye = torch.eye(basis.shape[1], dtype=torch.float64)
    torch.testing.assert_close(basis.mT @ basis, eye, rtol=0, atol=30 * eps)
    torch.testing.assert_close(Q.mT @ A.double() @ Q, T, rtol=0, atol=float(100 * eps * size))
    torch.testing.assert_close(A.double() @ Q, Q @ T + P @ C, rtol=0, atol=float(100 * eps * size))
    # Banded: a block meets only its neighbours.
    assert T.triu(2 * block_size).abs().max() < 100 * eps * size
    assert run.matvecs == Q.shape[1] == min(120, steps * block_size) and not run.skewed


def test_block_of_one_is_the_single_vector():
    A, start = symmetric(SPECTRA["kappa 1e4"]), columns(120, 1)
    single, block = lanczos(A, 15, start=start[:, 0]), projected(A, start, 15)
    values = torch.linalg.eigvalsh(block.T) * block.scale
    torch.testing.assert_close(values, torch.linalg.eigvalsh(single.T), rtol=0, atol=1e-14)
    torch.testing.assert_close(block.C.norm() * block.scale, single.residual_norm, rtol=1e-10, atol=0)


def test_dependent_start_columns_are_replaced_by_random_ones():
    A = symmetric(SPECTRA["kappa 1e4"])
    V = torch.linalg.eigh(A).eigenvectors
    start = torch.stack([V[:, 0], V.sum(1), 1e-20 * V.sum(1), torch.zeros(120).double()]).mT
    run = projected(A, start, 1)
    Q = run.basis.columns
    assert Q.shape[1] == run.pending_columns == 4
    torch.testing.assert_close(Q @ (Q.mT @ start), start, rtol=0, atol=1e-14)
    assert (torch.linalg.eigvalsh(run.T) * run.scale - 1e-4).abs().min() < 1e-14


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_block_at_any_scale(size):
    A = symmetric(SPECTRA["flat"])
    run = projected((A * size).float(), columns(120, 2, torch.float32), 8)
    Q = run.basis.columns.double()
    torch.testing.assert_close(run.T * (run.scale / size), Q.mT @ A @ Q, rtol=0, atol=1e-5)


def test_nan_and_asymmetry_are_noticed():
    A = symmetric(SPECTRA["flat"])
    assert projected(A + 1e-4 * columns(120, 120), columns(120, 2), 5).skewed
    A[0, 0] = math.nan
    assert projected(A, columns(120, 2), 1).failed
