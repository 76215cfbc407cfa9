"""Newton's method in function space if memory has no room for the Gram matrix: products with J and our own CG."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg import Diagonal, cg
from curvops.operators.curvatures.curvature import CurvatureRoot
from curvops.operators.curvatures.ggn import DisplacedGGN
from curvops.posterior.solves.function_space import FunctionSpace, TrainingOutputs
from curvops.posterior.solves.linear_mode import REMEDIES


class StreamedSpace(FunctionSpace):
    """The prior covariance K = J A⁻¹ Jᵀ by products with J, and systems by conjugate gradients.

    These are solved on the shorter side: with I + LᵀKL in function space, or, if there are fewer weights than columns
    of L, with JᵀHJ + A, since (I + HK)⁻¹ = I − H J (JᵀHJ + A)⁻¹ Jᵀ.
    """

    is_formed = False

    def __init__(self, points: TrainingOutputs, precision: Tensor) -> None:
        self.points, self.precision = points, precision
        points.lin.memory.expect_many()

    def product(self, v: Float[Tensor, " NC"]) -> Float[Tensor, " NC"]:
        return self.by_passes(v)

    def step(self, f: Float[Tensor, "N C"], gap: Float[Tensor, " NC"], rtol: float) -> Float[Tensor, " NC"]:
        points, lin = self.points, self.points.lin
        curvature = DisplacedGGN.at(lin, (f - points.outputs).to(lin.theta))
        S = CurvatureRoot.of(curvature)
        image = self.product(gap)
        pulled = points.fisher_product(f, image)
        # The gradient after the step is what the system's residual ρ leaves of it: L ρ, or H J A⁻¹ρ.
        goal = min(0.1, rtol * float(gap.norm() / pulled.norm().clamp_min(torch.finfo(pulled.dtype).tiny)))
        if S.shape[-1] <= S.shape[-2]:
            inverse = Diagonal(self.precision.reciprocal().expand(len(lin.theta)))
            dual = (S.mT @ inverse @ S).add_diagonal(1.0)
            solved = self._solve(dual, points.root_transpose_product(f, image), goal)
            return points.root_product(f, solved.double()) - gap
        of_weights = lin.jacobian()._t_matmul(gap.to(lin.theta).unsqueeze(1)).squeeze(1)
        solved = self._solve(curvature.add_diagonal(self.precision), of_weights, goal)
        return points.fisher_product(f, lin.push(solved).double().flatten()) - gap

    def _solve(self, operator: Any, right: Tensor, rtol: float) -> Tensor:
        M = operator.preconditioner(1)
        found = cg(operator, right.to(self.points.lin.theta), preconditioner=M, rtol=rtol)
        found.raise_if_failed(rtol, REMEDIES)
        self.matvecs += found.matvecs + (0 if M is None else M.matvecs)
        return found.x
