"""A matrix S Sᵀ with few columns, which names its root."""

import torch
from torch import Tensor

from curvops.linalg import Dense, Operator


class Rooted(Operator):
    """S Sᵀ for a stored S (n, m)."""

    psd = True

    def _size(self) -> torch.Size:
        return torch.Size((len(self._args[0]), len(self._args[0])))

    def _product(self, block: Tensor) -> Tensor:
        return self._args[0] @ (self._args[0].mT @ block)

    @property
    def narrow_root(self) -> Dense:
        return Dense(self._args[0])


def rooted(values: Tensor, n: int, dtype: torch.dtype = torch.float64) -> Rooted:
    """Return the matrix (n, n) with these eigenvalues and zeros, and random eigenvectors."""
    generator = torch.Generator().manual_seed(0)
    U, V = (
        torch.linalg.qr(torch.randn(rows, len(values), generator=generator, dtype=torch.float64)).Q
        for rows in (n, len(values))
    )
    return Rooted((U * values.sqrt() @ V.mT).to(dtype))
