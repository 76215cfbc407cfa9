"""Right-hand sides, true residuals, and an operator that counts its products: what tests of every solver share."""

import torch
from linear_operator.operators import DenseLinearOperator


def right_hand_sides(n, k, dtype=torch.float64, seed=1):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def function_of(A, f, B):
    """f(A) B of a positive semidefinite or any symmetric A, by its eigenvalues."""
    values, vectors = torch.linalg.eigh(A.double())
    return (vectors * f(values)) @ (vectors.mT @ B.double())


def true_residuals(A, x, B):
    A, x, B = A.double(), x.double().reshape(len(x), -1), B.double().reshape(len(B), -1)
    sizes = B.norm(dim=0)
    return (B - A @ x).norm(dim=0) / torch.where(sizes > 0, sizes, 1.0)


class Counted(DenseLinearOperator):
    """A dense operator of another library that logs the columns of its products, and may spoil one of them."""

    def __init__(self, matrix, spoil=None):
        super().__init__(matrix)
        self.matrix, self.log, self.spoil = matrix, [], spoil

    def _matmul(self, rhs):
        return self._logged(self.matrix @ rhs)

    def _t_matmul(self, rhs):
        return self._logged(self.matrix.mT @ rhs)

    def _logged(self, product):
        self.log.append(product.shape[1])
        return product * torch.nan if len(self.log) == self.spoil else product
