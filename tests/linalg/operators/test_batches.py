"""Batches beyond the size that is formed: a loop over their members, or what the members share.

Tests `apply_function.py`.
"""

import pytest
import torch

from curvops.linalg import Dense, LowRank, solve
from tests.linalg.known import Rooted

N = 260


def matrices():
    root = torch.randn(2, N, N, dtype=torch.float64)
    return root @ root.mT / (4 * N) + torch.eye(N)  # a condition of 2: few steps to ten digits


def shift():
    return torch.linspace(0.5, 2, 2 * N, dtype=torch.float64).reshape(2, N)


def low_rank():
    vectors = torch.linalg.qr(torch.randn(N, 5, dtype=torch.float64)).Q
    return LowRank(vectors, torch.linspace(1, 5, 5, dtype=torch.float64))


BATCHES = {
    "dense": lambda: Dense(matrices(), psd=True),
    "dense without a promise": lambda: Dense(matrices()),
    "dense and shifts": lambda: Dense(matrices(), psd=True).add_diagonal(shift()),
    "copies": lambda: Dense(matrices()[0], psd=True).expand(2, N, N),
    "low rank and shifts": lambda: low_rank().add_diagonal(shift()),
    "products and shifts": lambda: Rooted(matrices()[0]).add_diagonal(shift()),
    "copies of low rank and a shift": lambda: low_rank().add_diagonal(shift()[0]).expand(2, N, N),
}


def symmetric_inverse_root(A):
    values, vectors = torch.linalg.eigh(A)
    return vectors @ (values.rsqrt().unsqueeze(-1) * vectors.mT)


@pytest.mark.parametrize("name", BATCHES)
def test_logdet_quadratic_and_roots_of_each_member(name):
    operator = BATCHES[name]()
    A, B = operator.to_dense(), torch.randn(2, N, 3, dtype=torch.float64)
    stochastic = name == "products and shifts"
    quadratic, logdet = operator.inv_quad_logdet(B, logdet=True)
    L = torch.linalg.cholesky(A)
    known = 2 * L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    torch.testing.assert_close(logdet, known, rtol=0.05 if stochastic else 1e-9, atol=0)
    torch.testing.assert_close(quadratic, (B * torch.cholesky_solve(B, L)).sum((-2, -1)), rtol=1e-6, atol=0)
    root = symmetric_inverse_root(A)
    torch.testing.assert_close(operator.sqrt_inv_matmul(B), root @ B, rtol=1e-8, atol=1e-8)
    L = torch.randn(4, N, dtype=torch.float64)
    product, squares = operator.sqrt_inv_matmul(B, L)
    torch.testing.assert_close(product, L @ root @ B, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(squares, (L @ root).square().sum(-1), rtol=1e-8, atol=1e-8)


def test_each_member_is_solved_on_several_threads(two_threads):
    """On a CPU with several threads torch's own LU of such a batch is wrong."""
    A, B = matrices(), torch.randn(2, N, 3, dtype=torch.float64)
    expected = torch.cholesky_solve(B, torch.linalg.cholesky(A))
    torch.testing.assert_close(solve(Dense(A), B), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", BATCHES)
def test_draws_of_each_member(name):
    """Mean squares of 400 draws of N(0, 1) along one direction a member: false alarms in 1e-6 of runs, seed fixed."""
    operator = BATCHES[name]()
    draws = operator.zero_mean_mvn_samples(400)
    assert draws.shape == (400, 2, N)
    direction = torch.randn(2, N, dtype=torch.float64)
    variance = (direction * (operator.to_dense() @ direction.unsqueeze(-1)).squeeze(-1)).sum(-1)
    ratio = (draws * direction).sum(-1).square().mean(0) / variance
    assert bool(((ratio - 1).abs() < 5.2 * (2 / 400) ** 0.5).all())
    assert not torch.equal(draws[:, 0], draws[:, 1])
