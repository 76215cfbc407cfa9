"""Iterative refinement: corrections solved in the operator's dtype, with residuals in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from curvops.linalg.core import vectors as vec
from curvops.linalg.core.results import ACCEPTED, Reason, Solution
from curvops.linalg.core.vectors import Matrix, Vectors
from curvops.linalg.solvers.systems import Goal, Records, raise_norm

CorrectionSolver: TypeAlias = Callable[[Vectors, Goal], Solution]


class Refinement:
    """Iterative refinement of A X = B: residuals by the float64 matrix ``exact``, corrections in ``dtype``.

    ``x`` and ``r`` are the last solutions and their residuals; ``records`` holds the best ones.

    Raises:
        ValueError: the exact matrix is not float64, so A has no float64 version.
    """

    def __init__(self, exact: Matrix, dtype: torch.dtype, records: Records) -> None:
        if exact.dtype != torch.float64:
            raise ValueError(f"refine needs A.to(torch.float64), which gave {exact.dtype}; solve without refine.")
        self.multiply, self.dtype, self.records = vec.product(exact), dtype, records
        self.x, self.r = vec.as_block(records.X), vec.as_block(records.B)
        self.reasons = [Reason.CONVERGED] * records.B.shape[1]
        """The end of each column's last correction."""
        self.digits = 1e-5
        """The relative residual that float32 reaches for well-conditioned systems; 1e-3 it reaches for nearly all."""
        self.norm_A = 0.0
        self.exact_matvecs = 0

    def solve(self, solver: CorrectionSolver) -> Solution:
        """Correct as long as this halves the residual; ``solver(B, goal)`` works in ``dtype``."""
        records = self.records
        todo = self.look(range(len(self.reasons)), moved=records.warm)
        while todo and records.iteration < records.maxiter:
            self.correct(todo, solver)
            todo = self.look(todo, moved=True)
        for column, size in enumerate(vec.norm(records.X).tolist()):
            records.backward[column] = records.best[column] / (self.norm_A * size + 1)
            records.stop(column, self.end(column))
        return replace(records.solution(), exact_matvecs=self.exact_matvecs)

    def look(self, todo: Sequence[int], moved: bool) -> list[int]:
        """Compute the residuals of these columns, known unless x `moved`; return those halved, above the tolerance."""
        records, index = self.records, torch.tensor(todo, dtype=torch.long)
        x = vec.columns(self.x, index)
        if moved and len(todo):
            image = self.multiply(x)
            self.exact_matvecs += len(todo)
            records.matvecs += len(todo)
            vec.put_columns(self.r, index, vec.columns(records.B, index) - image)
            self.norm_A = raise_norm(self.norm_A, vec.norm(image).tolist(), vec.norm(x).tolist())
        further = []
        for i, (column, residual) in enumerate(zip(todo, vec.norm(vec.columns(self.r, index)).tolist())):
            before = records.best[column]
            if residual < before:
                records.keep(column, vec.part(x, i, i + 1), residual, math.inf)
            if records.rtol < residual < 0.5 * before:
                further.append(column)
        records.record(todo, [records.best[column] for column in todo])
        return further

    def correct(self, todo: Sequence[int], solver: CorrectionSolver) -> None:
        """Solve for corrections of these columns to as many digits as the dtype has."""
        records, index = self.records, torch.tensor(todo)
        before = [records.best[column] for column in todo]
        inner = min(max(self.digits, 0.5 * records.rtol / max(before)), 0.5)
        r = vec.columns(self.r, index)
        correction = solver(r.to(self.dtype), Goal(inner, records.maxiter - records.iteration))
        records.iteration += correction.iterations
        records.matvecs += correction.matvecs
        if Reason.PRECISION_LIMIT in correction.reasons:
            self.digits = 1e-3
        for row in correction.history[1:].tolist():
            of_column = dict(zip(todo, (size * share for size, share in zip(before, row))))
            records.history.append([of_column.get(column, best) for column, best in enumerate(records.best)])
        for column, reason in zip(todo, correction.reasons):
            self.reasons[column] = reason
        self.norm_A = max(self.norm_A, _norm_seen(correction, vec.norm(r)))
        vec.put_columns(self.x, index, vec.columns(self.x, index) + vec.finite_part(correction.x.to(torch.float64)))

    def end(self, column: int) -> Reason:
        """Return why a column stopped, as far as its last correction tells."""
        records, reason = self.records, self.reasons[column]
        if not math.isfinite(records.best[column]):
            return Reason.NON_FINITE
        if reason in ACCEPTED or (reason is Reason.SINGULAR and records.limited(column)):
            return Reason.ITERATION_LIMIT if records.iteration >= records.maxiter else Reason.STAGNATION
        return reason


def _norm_seen(correction: Solution, lengths: Vectors) -> float:
    """Return ‖A‖ as estimated by a solve for a correction, from its backward errors ‖r‖/(‖A‖‖x‖ + ‖b‖).

    The products of refinement itself are close to B and show little of ‖A‖.
    """
    ratio = correction.relative_residuals / correction.backward_errors - 1
    ratio = ratio.to(correction.x.device) * lengths / vec.norm(correction.x)
    return float(torch.nan_to_num(ratio, nan=0.0, posinf=0.0).amax())
