import math

import pytest
import torch

from curvops.linalg import Reason, lanczos
from tests.linalg.matrices import SPECTRA, generator, symmetric


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


def test_nan_in_a_product_is_a_reason():
    A = symmetric(SPECTRA["flat"])
    A[0, 0] = math.nan
    r = lanczos(A, 5)
    assert r.reason is Reason.NON_FINITE and r.T.isfinite().all()
