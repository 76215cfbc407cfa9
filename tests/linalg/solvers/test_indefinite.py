"""A precision that is indefinite: whatever solves with it, draws from it or takes its root says so."""

import pytest
import torch

import curvops as co
from curvops.errors import NotPositiveDefiniteError, NotPositiveSemidefiniteError
from curvops.linalg import Dense, Diagonal, DirectSum, solve

LARGE = 300
"""Rows beyond which nothing is formed."""


def matrix(n: int) -> torch.Tensor:
    """Symmetric, eigenvalues from −3 to 5."""
    Q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))).Q
    return (Q * torch.linspace(-3, 5, n, dtype=torch.float64)) @ Q.mT


OPERANDS = {
    "products": lambda: 1.0 * Dense(matrix(20)),
    "products, large": lambda: 1.0 * Dense(matrix(LARGE)),
    "dense": lambda: Dense(matrix(20)),
    "diagonal": lambda: Diagonal(torch.linspace(-3, 5, 20, dtype=torch.float64)),
    "low rank": lambda: co.linalg.LowRank(matrix(20)[:, :2], torch.tensor([-3.0, 5.0], dtype=torch.float64)),
    "blocks": lambda: DirectSum(
        Diagonal(torch.linspace(-3, 5, 20, dtype=torch.float64)),
        Dense(matrix(9)),
        positions=(torch.arange(20), torch.arange(20, 29)),
    ),
    "negative shift": lambda: (1.0 * Dense(matrix(20) @ matrix(20), psd=True)).add_diagonal(-2.0),
}
USES = {
    "solve": lambda P, b: P.solve(b),
    "co.linalg.solve": solve,
    "block": lambda P, b: P.solve(torch.stack([b, b.flip(0)], 1)),
    "inverse": lambda P, b: P.inverse() @ b,
    "covariance": lambda P, b: (Dense(b[None]) @ P.inverse() @ Dense(b[:, None])).to_dense(),
    "inverse diagonal": lambda P, b: P.inverse().diagonal(),
    "inv_quad": lambda P, b: P.inv_quad(b),
    "logdet": lambda P, b: P.logdet(),
    "root of the inverse": lambda P, b: P.sqrt_inv_matmul(b),
    "draws": lambda P, b: P.zero_mean_mvn_samples(2),
    "draws of the inverse": lambda P, b: P.inverse().zero_mean_mvn_samples(2),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("operand", OPERANDS)
def test_an_indefinite_precision_is_an_error(operand, use):
    P = OPERANDS[operand]().add_diagonal(0.1)
    b = torch.randn(P.shape[0], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with pytest.raises((NotPositiveDefiniteError, ValueError), match=r"indefinite|positive|negative"):
        USES[use](P, b)


@pytest.mark.parametrize("decompose", ["root_decomposition", "root_inv_decomposition"])
def test_a_root_of_an_indefinite_matrix_is_an_error(decompose):
    with pytest.raises(NotPositiveSemidefiniteError, match="negative eigenvalue"):
        getattr(Dense(matrix(20)), decompose)()
