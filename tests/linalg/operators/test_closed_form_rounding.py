"""The closed forms of A + diag(d) in float32: xᵀ(A + D)⁻¹x is right to three digits, or a warning says it may not be.

The hardest x lie along the eigenvectors of the large eigenvalues, as the gradients at training points do.
"""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from curvops.errors import PrecisionWarning
from curvops.linalg import EigenKronecker, Kronecker, LowRank
from curvops.network.likelihoods import Gaussian

Make = Callable[[float], tuple[co.linalg.Operator, Tensor]]
N, RANK = 144, 6
VALUES = torch.logspace(0, -2, RANK)


def orthogonal(n: int) -> Tensor:
    return torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))[0]


def low_rank(size: float) -> tuple[co.linalg.Operator, Tensor]:
    U = orthogonal(N)[:, :RANK].float()
    return LowRank(U, size * VALUES), U


def kronecker(size: float) -> tuple[co.linalg.Operator, Tensor]:
    rows = orthogonal(12)[:2].float()
    left, right = size**0.5 * rows.mT @ rows, size**0.5 * rows.mT @ rows
    return Kronecker(left[None], right[None]), torch.kron(rows.mT.contiguous(), rows.mT.contiguous())


def eigen(size: float) -> tuple[co.linalg.Operator, Tensor]:
    vectors = orthogonal(12).float()
    values = torch.zeros(12, 12)
    values[:2, :2] = size
    return EigenKronecker(vectors[None], vectors[None], values[None]), torch.kron(vectors[:, :2], vectors[:, :2])


ONE, MANY = torch.tensor(0.5), torch.linspace(0.5, 1.0, N)
CASES = [(low_rank, ONE), (low_rank, MANY), (kronecker, ONE), (eigen, ONE)]


@pytest.mark.parametrize(("make", "shift"), CASES, ids=["low rank", "low rank, many", "Kronecker", "eigenbasis"])
@pytest.mark.parametrize("size", [1.0, 1e4, 1e8, 1e12, 1e16])
def test_what_rounding_changes_comes_with_a_warning(make: Make, shift: Tensor, size: float) -> None:
    A, along = make(size)
    x = along @ torch.randn(along.shape[1], 8, generator=torch.Generator().manual_seed(0))
    P = A.to(torch.float64).to_dense() + torch.diag(shift.double().expand(N))
    expected = (x.double() * torch.linalg.solve(P, x.double())).sum(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = (x * A.add_diagonal(shift).solve(x)).sum(0)
    right = bool(((found - expected).abs() <= 2e-3 * expected).all())
    assert right or any(issubclass(each.category, PrecisionWarning) for each in caught)
    if size <= 1e4:
        assert not caught


def test_a_prediction_that_rounding_decides_comes_with_a_warning() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 20, generator=generator), torch.randn(8, 1, generator=generator)
    model = nn.Linear(20, 1)

    def variances(scale: float, noise: float, prior: float, dtype: torch.dtype) -> Tensor:
        lin = co.linearize(model.to(dtype), (scale * x.to(dtype), y.to(dtype)), Gaussian(noise=noise))
        return co.laplace(lin, co.KFAC, prior, check_mode=False).predict(scale * x.to(dtype)).variance.double()

    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        usual = variances(1.0, 0.01, 1.0, torch.float32)
        expected = variances(1.0, 0.01, 1.0, torch.float64)
        far = variances(1e4, 1e-8, 1e-8, torch.float64)
    torch.testing.assert_close(usual, expected, rtol=1e-3, atol=0)
    with pytest.warns(PrecisionWarning, match="variances and solutions .*float64"):
        found = variances(1e4, 1e-8, 1e-8, torch.float32)
    assert float((found / far).log().abs().max()) > 1  # otherwise it warned of nothing
