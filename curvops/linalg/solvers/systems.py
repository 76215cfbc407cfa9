"""Systems A X = B in the form of the solvers: checked arguments, columns of unit norm, groups that fit in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import matmul
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from linear_operator import LinearOperator
from torch import Tensor

from curvops.checkpoint import NOTHING, Checkpoint
from curvops.checks import check_callable, check_limits, check_tensor, checked_number, refuse_tangents, shown
from curvops.linalg.core.memory import Multiply
from curvops.linalg.core.results import Reason, Solution, converged, join_histories
from curvops.linalg.core.rounding import rounding_level
from curvops.linalg.core.usable_columns import UsableColumns
from curvops.linalg.core.vectors import (
    Description,
    Matrix,
    Vectors,
    as_block,
    as_columns,
    columns,
    empty_block,
    norm,
    part,
    product,
    put,
    shaped_as,
    zero_block,
)
from curvops.linalg.solvers.verdicts import Callback, Goal, Records
from curvops.progress import aside
from curvops.records import from_record
from curvops.run import Groups, columns_at_a_time, current_run

MOST_ITERATIONS = 10_000


@runtime_checkable
class Multiplies(Protocol):
    """An object that multiplies a block of vectors with ``@``."""

    def __matmul__(self, other: Vectors, /) -> Vectors:
        """Multiply a block."""


Preconditioner: TypeAlias = Multiplies | Multiply | Tensor | LinearOperator


def check(
    facts: Description,
    B: Vectors,
    rtol: float | int | None,
    maxiter: int | None,
    x0: Vectors | None = None,
    callback: Callback | None = None,
) -> Goal:
    """Check that right-hand sides, initial guess and options fit the matrix; return the goal of the solve.

    Raises:
        TypeError: A is in half precision, or B or x0 does not have A's dtype.
        ValueError: shapes or devices do not fit, or a limit is negative or not finite.
    """
    m, n, dtype, device = facts
    for name, V in (("B", B),) if x0 is None else (("B", B), ("x0", x0)):
        check_tensor(name, V)
        refuse_tangents([V])
        if V.dtype != dtype:
            raise TypeError(f"{name} must have A's dtype {dtype}, got {V.dtype}.")
        if V.device != device:
            raise ValueError(f"{name} must be on A's device {device}, got {V.device}.")
    if B.ndim not in (1, 2) or B.shape[0] != m:
        raise ValueError(f"B must have shape ({m},) or ({m}, K) for A of {m} x {n}, got {tuple(B.shape)}.")
    if x0 is not None and x0.shape != (n, *B.shape[1:]):
        raise ValueError(f"x0 must have shape {(n, *B.shape[1:])}, got {tuple(x0.shape)}.")
    tolerance = checked_number("rtol", rtol, "[0, inf)")
    check_limits(maxiter=maxiter)
    check_callable("callback", callback)
    return Goal(tolerance, iterations_allowed(min(m, n), maxiter), callback)


def iterations_allowed(n: int, maxiter: int | None) -> int:
    """Return the given limit, or 10 n, at least 100 and at most 10,000."""
    return min(max(10 * n, 100), MOST_ITERATIONS) if maxiter is None else maxiter


def shifted(A: Matrix, shift: float) -> Matrix:
    """Return A + shift I."""
    if shift == 0:
        return A
    if isinstance(A, Tensor):
        return A + shift * torch.eye(len(A), dtype=A.dtype, device=A.device)
    return A.add_diagonal(torch.tensor(shift, dtype=A.dtype, device=A.device))


def as_function(preconditioner: Preconditioner | None, facts: Description) -> Multiply:
    """Return the preconditioner of the matrix with these facts as a function on blocks.

    Raises:
        TypeError: it cannot be applied to a block, or is a sketch of A, which would be mistaken for its inverse.
        ValueError: it has another size or dtype than A, or returns a block of another shape or dtype than it was given.
    """
    if preconditioner is None:
        return lambda V: V
    if isinstance(preconditioner, (Tensor, LinearOperator)):
        if tuple(preconditioner.shape) != (facts.rows, facts.rows) or preconditioner.dtype != facts.dtype:
            raise ValueError(
                f"the preconditioner must be ({facts.rows}, {facts.rows}) and {facts.dtype}, as A is, got "
                f"{tuple(preconditioner.shape)} and {preconditioner.dtype}."
            )
        return aside(product(preconditioner))
    if callable(getattr(preconditioner, "preconditioner", None)):
        raise TypeError(
            f"a {type(preconditioner).__name__} approximates A, and a preconditioner must approximate its "
            "inverse: pass the result of its preconditioner(shift)."
        )
    if isinstance(preconditioner, Multiplies) and not isinstance(preconditioner, np.ndarray):
        return aside(partial(_applied, partial(matmul, preconditioner)))
    if callable(preconditioner):
        return aside(partial(_applied, preconditioner))
    raise TypeError(
        f"preconditioner must be a matrix, have __matmul__, or be a function on blocks, got {shown(preconditioner)}."
    )


def _applied(function: Multiply, V: Vectors) -> Vectors:
    """Return the function's value at a block; raise ValueError unless it is like the block."""
    found = function(V)
    if getattr(found, "shape", None) != V.shape or found.dtype != V.dtype:
        dtype = getattr(found, "dtype", None)
        raise ValueError(
            f"the preconditioner was given {V.dtype} of shape {tuple(V.shape)}, but returned "
            f"{shown(found) if dtype in (None, V.dtype) else dtype}."
        )
    return found


@dataclass(frozen=True, eq=False)
class UnitSystems:
    """The right-hand sides that need a solve, scaled to unit norm, and their places in B.

    A column of B is ``unit * length * height``: two factors, since the norm itself may overflow.
    """

    unit: Float[Vectors, "m k"]
    X: Float[Vectors, "n k"]
    length: Float[Tensor, " k"]
    height: Float[Tensor, " k"]
    usable: UsableColumns
    warm: bool
    """Whether there is an initial guess."""

    @classmethod
    def of(cls, B: Float[Vectors, "m K"], X0: Vectors | None, like: Vectors | Description) -> UnitSystems:
        """Leave out zero and non-finite columns; solutions are ``like`` these vectors."""
        usable = UsableColumns.of(B)
        unit = usable.scale(B)
        length = norm(unit).to(B.dtype)
        height = usable.heights[usable.live].to(B.device, B.dtype)
        if X0 is None:
            X = zero_block(like, len(usable.live))
        else:
            X = as_block(columns(X0, usable.live) / height / length)
        return cls(unit / length, X, length, height, usable, X0 is not None)

    def records(self, residuals: Tensor, goal: Goal) -> Records:
        """Return the initial records, for the residuals of the initial guesses."""
        level, callback = rounding_level(self.unit.dtype, max(self.unit.shape[0], self.X.shape[0])), goal.callback
        if callback is not None:
            goal = replace(goal, callback=lambda iteration, values: callback(iteration, self.usable.spread(values)))
        return Records(self.X, residuals.tolist(), level, goal)

    def solution(self, records: Records, least_squares: bool = False) -> Solution:
        """Return the solution reached, in the order and scale of B."""
        usable, K = self.usable, len(self.usable.heights)
        known = usable.reasons | {j: records.reasons[i] for i, j in enumerate(usable.live.tolist())}
        residuals, backward = usable.spread(records.best), usable.spread(records.backward)
        history = torch.zeros(len(records.history), K, dtype=torch.float64)
        history[:, usable.live] = torch.tensor(records.history, dtype=torch.float64).reshape(
            len(history), len(usable.live)
        )
        x, lost = usable.place(records.X * self.length * self.height)
        for j in lost:
            known[j] = Reason.NON_FINITE
            residuals[j] = backward[j] = math.inf
        reasons = tuple(known[j] for j in range(K))
        return Solution(
            x,
            reasons,
            converged(reasons),
            residuals,
            backward,
            records.iteration,
            records.matvecs,
            history,
            normal_residuals=usable.spread(records.normal) if least_squares else None,
        )


class Resumption(NamedTuple):
    """The way in which a group of columns saves the state of its iteration and continues from it."""

    state: Mapping[str, Any] | None
    """The state of an earlier run."""
    save: Callable[[Callable[[], Any]], None]
    """The function that saves the state that it is given, if a save is due."""


def solve_in_groups(
    solve: Callable[[Vectors, Vectors | None, Resumption], Solution],
    facts: Description,
    B: Vectors,
    x0: Vectors | None,
    vectors: int,
    saved: Checkpoint = NOTHING,
) -> Solution:
    """Run ``solve(B, x0, resumption)`` for as many columns at a time as fit into memory, at least one.

    A column needs ``vectors`` working vectors. x has the shape of B. If memory still runs out, fewer columns run at
    once.
    """
    run, block, X0 = current_run(), as_columns(B), None if x0 is None else as_columns(x0)
    K, column = block.shape[1], vectors * facts.vector_bytes
    groups = Groups("solved for", columns_at_a_time(K, column, run.room(column)))
    solutions, X, state, first = list[Solution](), None, None, 0
    if saved and saved.state is not None:
        groups.width, X, state = (saved.state[name] for name in ("width", "X", "group"))
        solutions = [from_record(Solution, record) for record in saved.state["solutions"]]
        first = sum(len(solution.reasons) for solution in solutions)

    def save(state: Callable[[], Any] = lambda: None, now: bool = False) -> None:
        if saved:
            saved.save(lambda: {"width": groups.width, "X": X, "solutions": solutions, "group": state()}, now)

    def solve_group(start: int, stop: int) -> None:
        nonlocal X, state
        whole = stop - start == K
        with run.holding(groups.width * column):
            save(lambda: state, now=True)
            resumption, state = Resumption(state, save), None
            guess = None if X0 is None else part(X0, start, stop)
            solution = solve(part(block, start, stop), guess, resumption)
        if not whole:
            X = empty_block(solution.x, K) if X is None else X
            put(X, start, solution.x)
            solution = replace(solution, x=zero_block(solution.x, 0))
        solutions.append(solution)

    with torch.no_grad():
        groups.each(K, solve_group, first)
    if X is None:
        return replace(solutions[0], x=shaped_as(solutions[0].x, B))
    return join_solutions(solutions, shaped_as(X, B))


def join_solutions(parts: Sequence[Solution], X: Vectors) -> Solution:
    """Join solutions of groups of columns, whose x are parts of X."""
    normal = [part.normal_residuals for part in parts if part.normal_residuals is not None]
    return Solution(
        X,
        tuple(reason for part in parts for reason in part.reasons),
        torch.cat([part.converged for part in parts]),
        torch.cat([part.relative_residuals for part in parts]),
        torch.cat([part.backward_errors for part in parts]),
        max(part.iterations for part in parts),
        sum(part.matvecs for part in parts),
        join_histories([part.history for part in parts]),
        normal_residuals=torch.cat(normal) if normal else None,
        exact_matvecs=sum(part.exact_matvecs for part in parts),
        groups=len(parts),
    )
