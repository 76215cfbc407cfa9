"""Block Golub–Kahan bidiagonalisation with full reorthogonalisation: the search space of `svds`."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.core.vectors import Description, Vectors, as_block, empty_block, part
from curvops.linalg.spectra.basis import Basis
from curvops.linalg.spectra.projection import DROPPED, CountedProduct, Projection, rotation


class GolubKahan(Projection):
    """The projection T = UᵀAV with A V = U T and Aᵀ U = V Tᵀ + P C, for A (m, n), m ≥ n; nothing is squared.

    Random left directions take the place of those that A does not reach, so that a triplet with σ = 0 has a left
    vector, too.
    """

    def __init__(
        self,
        multiply: CountedProduct,
        adjoint: CountedProduct,
        left: Description,
        start: Float[Vectors, "n b"],
        capacity: int,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__(multiply, start, capacity, generator)
        self.adjoint = adjoint
        self.left = Basis(empty_block(left, 0), min(capacity, self.n), generator)
        self.X = self.Y

    def step(self) -> None:
        """Multiply the pending block by A, and the new directions in the result by Aᵀ. Two products per column."""
        V = self.pending
        W = self._in_units(self.multiply(V))
        if self.failed:
            return
        H, U, R = self.left.expand(W, DROPPED * self.noise)
        U = self.left.fresh(V.shape[1], as_block(U))
        Z = self._in_units(self.adjoint(U))
        if self.failed:
            return
        self.left.append(U)
        self.basis.append(V)
        old, new = self.width, V.shape[1]
        T = torch.zeros(old + new, old + new, dtype=torch.float64)
        T[:old, :old] = self.T
        T[:old, old:] = H[self.locked :]
        T[old : old + len(R), old:] = R
        _, self.pending, S = self.basis.expand(Z, DROPPED * self.noise)
        self.T = T
        self._advance(S)

    def ritz(self) -> tuple[Tensor, Tensor]:
        """Return T's singular values, ascending, and ‖Aᵀu − σv‖ for each (Av = σu holds), in units of ``scale``."""
        X, values, Yt = torch.linalg.svd(self.T)
        self.X, self.Y = X.flip(1), Yt.mT.flip(1)
        return values.flip(0), (self.C @ self.X).norm(dim=0)

    def restart(self, kept: Tensor) -> None:
        """Continue from these triplets, numbered as in the last ``ritz``, and the pending block."""
        values = (self.X[:, kept] * (self.T @ self.Y[:, kept])).sum(0)
        self._rotate(torch.arange(self.locked), kept)
        self.T, self.C = torch.diag(values), self.C @ self.X[:, kept]

    def _rotate(self, old: Tensor, found: Tensor) -> None:
        self.basis.rotate(rotation(self.basis.width, old, self.Y[:, found]))
        self.left.rotate(rotation(self.left.width, old, self.X[:, found]))

    @property
    def cost(self) -> int:
        """Products of the next step, of A and of Aᵀ."""
        return 2 * self.pending_columns

    @property
    def matvecs(self) -> int:
        """Products spent, of A and of Aᵀ."""
        return self.multiply.matvecs + self.adjoint.matvecs

    @property
    def settled_left(self) -> Float[Vectors, "m k"]:
        """The left vectors of the locked triplets."""
        return part(self.left.store, 0, self.locked)

    def krylov_value(self, value: float) -> float:
        """Return σ|σ|, since powers of AᵀA make the Krylov space."""
        return value * abs(value)
