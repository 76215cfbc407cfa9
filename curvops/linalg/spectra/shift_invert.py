"""(A − σ)⁻¹ by an iterative solver, whose largest eigenvalues belong to the eigenvalues of A nearest to σ."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from curvops.linalg.core.orthogonal import tall_qr
from curvops.linalg.core.results import ACCEPTED, Solution
from curvops.linalg.core.vectors import Matrix, combine, gram, product
from curvops.linalg.solvers.minres import minres
from curvops.linalg.solvers.systems import shifted
from curvops.linalg.spectra.projection import CountedProduct

Solver: TypeAlias = Callable[..., Solution]

# Solves are more accurate than the pairs asked for by this factor.
INNER = 0.1


def invert_shifted(A: Matrix, sigma: float, rtol: float, most: float | int, solver: Solver | None) -> ShiftInverse:
    """Return the inverse of A − σ, solved for to a tenth of ``rtol`` and within ``most`` products of A in all."""
    inner = max(INNER * rtol, 4 * torch.finfo(A.dtype).eps)
    return ShiftInverse(A, shifted(A.detach(), -sigma), inner, most, minres if solver is None else solver)


class ShiftInverse(CountedProduct):
    """The map V → (A − σ)⁻¹ V, counting products with A; ``failure`` is the last reason of a failed solve."""

    def __init__(self, A: Matrix, shifted: Matrix, rtol: float, most: float | int, solver: Solver) -> None:
        super().__init__(product(A))
        self.shifted, self.rtol, self.most, self.solver = shifted, rtol, most, solver

    def __call__(self, V: Tensor) -> Tensor:
        """Solve for a block."""
        left = None if math.isinf(self.most) else max(1, int(self.most - self.matvecs) // V.shape[1] - 1)
        solution = self.solver(self.shifted, V, rtol=self.rtol, maxiter=left)
        self.matvecs += solution.matvecs
        failed = [reason for reason in solution.reasons if reason not in ACCEPTED]
        self.failure = failed[0] if failed else self.failure
        return solution.x

    def polish(self, V: Tensor) -> tuple[Tensor, Tensor, float]:
        """Return Ritz vectors X of A in the span of (A − σ)⁻¹ V, A X, and the size of A seen.

        A Ritz pair of the inverse has a residual in A that is larger by ‖A − σ‖ |λ − σ|⁻¹; one more solve removes that
        factor (Ericsson & Ruhe 1980).
        """
        Q, _ = tall_qr(self(V))
        W = super().__call__(Q)
        T = gram(Q, W)
        values, Y = torch.linalg.eigh((T + T.mT) / 2)
        return combine(Q, Y), combine(W, Y), float(values.abs().amax())
