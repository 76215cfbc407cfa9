"""Iterative refinement: corrections solved in the operator's dtype, with residuals in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from curvops.ambient import as_step
from curvops.linalg.core.results import Reason, Solution
from curvops.linalg.core.vectors import (
    Matrix,
    Vectors,
    as_block,
    columns,
    finite_part,
    norm,
    product,
    put_columns,
    rounding_level,
    zero_block,
)
from curvops.linalg.solvers.systems import Goal, UsableColumns, precision_limited

CorrectionSolver: TypeAlias = Callable[[Vectors, Goal], Solution]


class Refinement:
    """Iterative refinement of A X = B: residuals by the float64 matrix ``exact``, corrections in ``dtype``.

    ``X`` is the last solution and ``best`` the best one by true residuals, which are ``last``, relative to b.

    Raises:
        ValueError: the exact matrix is not float64, so A has no float64 version.
    """

    def __init__(self, exact: Matrix, dtype: torch.dtype, B: Vectors, X0: Vectors | None) -> None:
        if exact.dtype != torch.float64:
            raise ValueError(f"refine needs A.to(torch.float64), which gave {exact.dtype}; solve without refine.")
        self.multiply, self.dtype, self.B = product(exact), dtype, B.to(torch.float64)
        self.usable = UsableColumns.of(self.B)
        live, K = self.usable.live, B.shape[1]
        usable = self.usable.spread(torch.ones(len(live))).to(B.device) > 0
        self.sizes = torch.where(usable, norm(self.B), 1.0)
        self.X = zero_block(self.B, K)
        if X0 is not None:
            put_columns(self.X, live, columns(X0.to(torch.float64), live))
        self.best, self.residual, self.started = as_block(self.X), as_block(self.B), X0 is not None
        self.last = self.usable.spread(torch.full((len(live),), math.inf))
        self.last[[j for j, reason in self.usable.reasons.items() if reason is Reason.NON_FINITE]] = math.inf
        self.history = torch.ones(1, K, dtype=torch.float64)
        self.reasons = [self.usable.reasons.get(j, Reason.NON_FINITE) for j in range(K)]
        self.digits = 1e-5
        """The relative residual that float32 reaches for well-conditioned systems; 1e-3 it reaches for nearly all."""
        self.norm_A = torch.zeros((), dtype=torch.float64, device=B.device)
        self.iterations = self.matvecs = self.exact_matvecs = 0

    def solve(self, solver: CorrectionSolver, goal: Goal) -> Solution:
        """Correct as long as this halves the residual; ``solver(B, goal)`` works in ``dtype``."""
        todo = self.usable.live
        while len(todo):
            todo = self.look(todo, goal.rtol)
            if not len(todo) or self.iterations >= goal.maxiter:
                break
            self.correct(todo, solver, goal)
            if goal.callback is not None:
                as_step(0, goal.callback, self.iterations, self.history[-1])
        return self.solution(goal.rtol, self.iterations >= goal.maxiter)

    def look(self, todo: Int[Tensor, " k"], rtol: float) -> Int[Tensor, " j"]:
        """Compute the true residuals of these columns; return the columns above the tolerance that were halved."""
        if self.started:
            x = columns(self.X, todo)
            image = self.multiply(x)
            self.exact_matvecs += len(todo)
            put_columns(self.residual, todo, columns(self.B, todo) - image)
            self.norm_A = torch.maximum(self.norm_A, torch.nan_to_num(norm(image) / norm(x), nan=0.0).amax())
        self.started = True
        now = (norm(columns(self.residual, todo)) / self.sizes[todo.to(self.sizes.device)]).cpu()
        before = self.last[todo]
        better = todo[now < before]
        put_columns(self.best, better, columns(self.X, better))
        self.last[todo] = torch.where(now < before, now, before)
        self.history[-1] = self.last.nan_to_num(posinf=1.0)
        return todo[(now > rtol) & (now < 0.5 * before)]

    def correct(self, todo: Int[Tensor, " k"], solver: CorrectionSolver, goal: Goal) -> None:
        """Solve for corrections of these columns, scaled to unit norm, to as many digits as the dtype has."""
        sizes = self.sizes[todo.to(self.sizes.device)]
        unit = columns(self.residual, todo) / sizes
        inner = min(max(self.digits, 0.5 * goal.rtol / float(self.last[todo].amax())), 0.5)
        correction = solver(unit.to(self.dtype), Goal(inner, goal.maxiter - self.iterations))
        self.iterations += correction.iterations
        self.matvecs += correction.matvecs
        if Reason.PRECISION_LIMIT in correction.reasons:
            self.digits = 1e-3
        rows = self.history[-1].repeat(len(correction.history), 1)
        rows[:, todo] *= correction.history
        self.history = torch.cat([self.history, rows[1:], rows[-1:]])
        for j, reason in zip(todo.tolist(), correction.reasons):
            self.reasons[j] = reason
        self.norm_A = torch.maximum(self.norm_A, _scale(correction, norm(unit)))
        put_columns(self.X, todo, columns(self.X, todo) + finite_part(correction.x.to(torch.float64) * sizes))

    def solution(self, rtol: float, exhausted: bool) -> Solution:
        """Return the solution reached, with its reasons."""
        backward = self.last / ((self.norm_A * norm(self.best) / self.sizes).cpu() + 1)
        X, _ = self.usable.place(columns(self.best, self.usable.live))
        level = rounding_level(torch.float64, X.shape[0])
        facts = zip(self.reasons, self.last.tolist(), backward.tolist())
        reasons = tuple(
            _final(reason, residual <= rtol, precision_limited(residual, error, level), exhausted)
            for reason, residual, error in facts
        )
        return Solution(
            X,
            reasons,
            self.last,
            backward,
            self.iterations,
            self.matvecs + self.exact_matvecs,
            self.history,
            exact_matvecs=self.exact_matvecs,
        )


def _scale(correction: Solution, lengths: Float[Tensor, " K"]) -> Tensor:
    """Return ‖A‖ as estimated by a solve for a correction, from its backward errors ‖r‖/(‖A‖‖x‖ + ‖b‖).

    The products of refinement itself are close to B and show little of ‖A‖.
    """
    ratio = correction.relative_residuals / correction.backward_errors - 1
    ratio = ratio.to(correction.x.device) * lengths / norm(correction.x)
    return torch.nan_to_num(ratio, nan=0.0, posinf=0.0).amax()


def _final(last_solve: Reason, met: bool, limited: bool, exhausted: bool) -> Reason:
    """Return why a column stopped, from the end of its last correction and its residual in float64."""
    if last_solve is Reason.ZERO_RIGHT_HAND_SIDE:
        return last_solve
    if met:
        return Reason.CONVERGED
    if limited and last_solve not in (Reason.NON_FINITE, Reason.NOT_POSITIVE_DEFINITE, Reason.NOT_SYMMETRIC):
        return Reason.PRECISION_LIMIT
    if last_solve not in (Reason.CONVERGED, Reason.PRECISION_LIMIT):
        return last_solve
    return Reason.ITERATION_LIMIT if exhausted else Reason.STAGNATION
