"""The inverse of a curvature plus a prior, from the smaller matrix in function space."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg import Inverse, solve
from curvops.linalg.core.memory import holding
from curvops.linalg.operators.base import by_columns
from curvops.operators.curvatures.curvature import CurvatureRoot
from curvops.operators.function_space.gram_matrix import gram_matrix
from curvops.operators.linearized.jacobian import Jacobian

COPIES = 3
"""Numbers in float64 for each number of the cross-covariance: itself, L applied to it, and the solution."""


def woodbury(
    S: CurvatureRoot, A: Tensor, inner: Callable[[Tensor], Tensor], block: Float[Tensor, "D k"]
) -> Float[Tensor, "D k"]:
    """Return (S Sᵀ + A)⁻¹ B = A⁻¹ (B − S (I + SᵀA⁻¹S)⁻¹ SᵀA⁻¹B), in the memory of the products with S.

    Args:
        S: the root of the curvature.
        A: the prior precision, 0-d or (D,).
        inner: (I + SᵀA⁻¹S)⁻¹ as a function of blocks (N·R, k).
        block: B.
    """
    A = A if A.ndim == 0 else A.unsqueeze(-1)
    pulled = S._t_matmul(block) / A if A.ndim == 0 else S._t_matmul(block / A)
    return S._matmul(inner(pulled)).neg_().add_(block).div_(A)


class DualInverse(Inverse):
    """P⁻¹ for P = S Sᵀ + A, S = Jᵀ L: A⁻¹ − A⁻¹S (I + SᵀA⁻¹S)⁻¹ SᵀA⁻¹ with the smaller matrix factorised.

    Covariances J' P⁻¹ J'ᵀ at other points are K'' − K'L (I + LᵀKL)⁻¹ LᵀK'ᵀ, from Gram matrices alone (see
    `point_covariances`). Products solve with P itself and use this form as the preconditioner, so that they do not have
    its rounding, that of a difference.
    """

    # The stored form has P, C with C Cᵀ = I + SᵀA⁻¹S and L (N, C, R), both in float64, and rtol.

    def __init__(
        self,
        base: LinearOperator,
        factor: Float[Tensor, "NR NR"],
        output_root: Float[Tensor, "N C R"],
        rtol: float | None = None,
    ) -> None:
        LinearOperator.__init__(self, base, factor, output_root, rtol=rtol)

    @property
    def curvature(self) -> Any:
        """G = S Sᵀ."""
        return self.base.base

    @property
    def precision(self) -> Tensor:
        """A, 0-d or (D,)."""
        return self.base.shift

    def _matmul(self, rhs: Tensor) -> Tensor:
        return by_columns(self._solve_columns, rhs)

    def _solve_columns(self, block: Float[Tensor, "D K"]) -> Float[Tensor, "D K"]:
        return solve(self.base, block, rtol=self._kwargs["rtol"], preconditioner=self._by_factor)

    def _by_factor(self, block: Tensor) -> Tensor:
        factor = self._args[1]

        def inner(pulled: Tensor) -> Tensor:
            return torch.cholesky_solve(pulled.to(factor), factor).to(pulled)

        return woodbury(CurvatureRoot.of(self.curvature), self.precision, inner, block)

    def explained(self, jacobian: Jacobian, outputs: int) -> Iterator[Float[Tensor, "m r NR"]] | None:
        """Yield W with W Wᵀ = J' (A⁻¹ − P⁻¹) J'ᵀ, in blocks of `outputs` rows; None if memory is insufficient."""
        factor, L = self._args[1:]
        memory, train = jacobian.passes.memory, self.curvature.lin.jacobian()
        row = COPIES * 8 * max(factor.shape[0], L.shape[:2].numel())
        own = jacobian.passes.engines.plan.num_outputs
        together, rows = max(1, outputs // own), memory.room() // row
        if rows < max(outputs, own):
            return None

        def walk() -> Iterator[Tensor]:
            for some in jacobian.by_points(max(together, rows // own // together * together), together):
                with holding(jacobian, some.shape[0] * row), torch.no_grad():
                    cross = gram_matrix(some, train, self.precision.detach()).to(factor)
                    lifted = torch.einsum("mnc,ncr->nrm", cross.unflatten(1, L.shape[:2]), L).flatten(0, 1)
                    half = torch.linalg.solve_triangular(factor, lifted, upper=False)
                    yield half.mT.unflatten(0, (-1, outputs))

        return walk()
