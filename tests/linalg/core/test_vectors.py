"""Inner products, norms, random blocks and orthonormal bases of vectors against torch's own."""

import pytest
import torch

from curvops.linalg.core import vectors


def block(n, k, dtype=torch.float64, seed=0):
    return torch.randn(k, n, dtype=dtype, generator=torch.Generator().manual_seed(seed)).mT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reductions_are_float64_and_right(dtype):
    X, Y = block(50, 3, dtype), block(50, 3, dtype, 1)
    X64, Y64 = X.double(), Y.double()
    torch.testing.assert_close(vectors.inner(X, Y), (X64 * Y64).sum(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(vectors.gram(X, Y), X64.mT @ Y64, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(vectors.gram(X, X), X64.mT @ X64, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(vectors.norm(X), X64.norm(dim=0))
    torch.testing.assert_close(vectors.largest(X), X64.abs().amax(0))


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
@pytest.mark.parametrize("n", [5, 31, 33, 48, 4000])
def test_columns_drawn_one_at_a_time_are_those_of_the_block(n, kind):
    facts = vectors.describe(torch.empty(3, n, dtype=torch.float64))
    block = vectors.random_block(facts, 3, kind, torch.Generator().manual_seed(0))
    columns = vectors.random_columns(facts, 3, kind, torch.Generator().manual_seed(0))
    assert torch.equal(torch.stack(list(columns), 1), block)


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_random_blocks_follow_their_generator(kind):
    def draw(seed):
        g = torch.Generator().manual_seed(seed)
        return vectors.random_block(vectors.describe(torch.empty(3, 4000)), 2, kind, g)

    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    # Mean within 5 standard errors: false alarm below 1e-5.
    assert draw(3).mean().abs() < 5 / 8000**0.5
    assert draw(3).square().mean().sub(1).abs() < 0.1


# Orthonormal bases, by CholeskyQR or Householder.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kappa", [1.0, 1e3, 1e12])
@pytest.mark.parametrize("shape", [(60, 5), (4, 4), (3, 5), (5, 0)])
def test_tall_qr(dtype, kappa, shape):
    n, k = shape
    X = (block(n, k) * torch.logspace(0, -torch.tensor(kappa).log10().item(), k, dtype=torch.float64)).to(dtype)
    Q, R = vectors.tall_qr(X)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(Q.double() @ R, X.double(), rtol=0, atol=50 * eps)
    torch.testing.assert_close(Q.mT @ Q, torch.eye(Q.shape[1], dtype=dtype), rtol=0, atol=50 * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_independent_basis_drops_what_depends(dtype):
    X = block(40, 6).to(dtype)
    X = torch.stack([X[:, 0], X[:, 1], X[:, 0], 1e-9 * X[:, 2], X[:, 0] + X[:, 1], 0 * X[:, 0]], 1)
    Q = vectors.independent_basis(X, vectors.gram(X, X))
    assert Q.shape == (40, 3)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(Q.mT @ Q, torch.eye(3, dtype=dtype), rtol=0, atol=50 * eps)
    torch.testing.assert_close(Q @ (Q.mT @ X), X, rtol=0, atol=200 * eps)


def test_independent_basis_of_nothing_and_of_too_many():
    zero = torch.zeros(5, 2, dtype=torch.float64)
    assert vectors.independent_basis(zero, vectors.gram(zero, zero)).shape == (5, 0)
    wide = block(3, 7)
    assert vectors.independent_basis(wide, vectors.gram(wide, wide)).shape == (3, 3)
