"""Orthonormal bases of blocks, by CholeskyQR or Householder.

Tests `vectors.py`.
"""

import pytest
import torch

from curvops.linalg.core.vectors import gram, independent_basis, tall_qr


def block(n, k, dtype=torch.float64, seed=0):
    return torch.randn(k, n, dtype=dtype, generator=torch.Generator().manual_seed(seed)).mT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kappa", [1.0, 1e3, 1e12])
@pytest.mark.parametrize("shape", [(60, 5), (4, 4), (3, 5), (5, 0)])
def test_tall_qr(dtype, kappa, shape):
    n, k = shape
    X = (block(n, k) * torch.logspace(0, -torch.tensor(kappa).log10().item(), k, dtype=torch.float64)).to(dtype)
    Q, R = tall_qr(X)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(Q.double() @ R, X.double(), rtol=0, atol=50 * eps)
    torch.testing.assert_close(Q.mT @ Q, torch.eye(Q.shape[1], dtype=dtype), rtol=0, atol=50 * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_independent_basis_drops_what_depends(dtype):
    X = block(40, 6).to(dtype)
    X = torch.stack([X[:, 0], X[:, 1], X[:, 0], 1e-9 * X[:, 2], X[:, 0] + X[:, 1], 0 * X[:, 0]], 1)
    Q = independent_basis(X, gram(X, X))
    assert Q.shape == (40, 3)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(Q.mT @ Q, torch.eye(3, dtype=dtype), rtol=0, atol=50 * eps)
    torch.testing.assert_close(Q @ (Q.mT @ X), X, rtol=0, atol=200 * eps)


def test_independent_basis_of_nothing_and_of_too_many():
    zero = torch.zeros(5, 2, dtype=torch.float64)
    assert independent_basis(zero, gram(zero, zero)).shape == (5, 0)
    wide = block(3, 7)
    assert independent_basis(wide, gram(wide, wide)).shape == (3, 3)
