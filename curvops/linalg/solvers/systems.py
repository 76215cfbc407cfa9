"""Systems A X = B in the form of the solvers: checked arguments, columns of unit norm, groups that fit in memory.

Also the reasons to end an iteration: the thresholds of every solver, and the records of each column.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float, Int
from linear_operator import LinearOperator
from torch import Tensor

from curvops.ambient import Groups, as_step, columns_at_a_time, current_run, hold, remark, time_left
from curvops.checkpoint import NOTHING, Checkpoint
from curvops.checks import check_options, check_tensor, checked_number, refuse, refuse_tangents, shown
from curvops.linalg.core import vectors as vec
from curvops.linalg.core.algorithm import Multiply
from curvops.linalg.core.results import Reason, Solution, join_histories
from curvops.linalg.core.vectors import Description, Matrix, Vectors
from curvops.storage import from_record, restore, state_of

Callback: TypeAlias = Callable[[int, Tensor], object]
Save: TypeAlias = Callable[[Callable[[], Any]], None]
CHECK_EVERY = 50
"""The number of iterations between two checks of the true residual."""
ANSWERED = 0.1
"""If the residual is above this share of b, x is not a solution, however small the backward error is."""
STATE = ("X", "best", "backward", "current", "reference", "normal", "mark", "gained", "iteration", "matvecs")
UNDECIDED = frozenset({Reason.STAGNATION, Reason.ITERATION_LIMIT})
"""Reasons that tell how the iteration ended, but nothing about the operator."""


@runtime_checkable
class Multiplies(Protocol):
    """An object that multiplies a block of vectors with ``@``."""

    def __matmul__(self, other: Vectors, /) -> Vectors:
        """Multiply a block."""


Preconditioner: TypeAlias = Multiplies | Multiply | Tensor | LinearOperator


@dataclass(frozen=True)
class Goal:
    """The tolerance of a solve, its maximum number of iterations, and the function called in each."""

    rtol: float
    maxiter: int
    callback: Callback | None = None


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
        refuse(V.device != device, f"{name} must be on A's device {device}, got {V.device}.")
    fits = B.ndim in (1, 2) and B.shape[0] == m
    refuse(not fits, f"B must have shape ({m},) or ({m}, K) for A of {m} x {n}, got {tuple(B.shape)}.")
    if x0 is not None and x0.shape != (n, *B.shape[1:]):
        raise ValueError(f"x0 must have shape {(n, *B.shape[1:])}, got {tuple(x0.shape)}.")
    check_options(maxiter=maxiter)
    return Goal(checked_number("rtol", rtol, "[0, inf)"), iterations_allowed(min(m, n), maxiter), callback)


def iterations_allowed(n: int, maxiter: int | None) -> int:
    """Return the given limit, or 10 n, at least 100 and at most 10,000."""
    return min(max(10 * n, 100), 10_000) if maxiter is None else maxiter


def shifted(A: Matrix, shift: float) -> Matrix:
    """Return A + shift I."""
    if shift == 0:
        return A
    if isinstance(A, Tensor):
        return A + shift * torch.eye(len(A), dtype=A.dtype, device=A.device)
    return A.add_diagonal(torch.tensor(shift, dtype=A.dtype, device=A.device))


def as_function(preconditioner: Preconditioner, facts: Description) -> Multiply:
    """Return a preconditioner of the matrix with these facts as a function on blocks, whose products are not counted.

    Raises:
        TypeError: it is an array of NumPy, or a curvature or a sketch of A, which would be mistaken for its inverse.
        ValueError: it has another size or dtype than A, or returns a block unlike the one it was given.
    """
    multiply: Any = preconditioner
    kind = type(preconditioner).__name__
    if getattr(preconditioner, "sources", None) is not None:  # a curvature, with or without a diagonal
        raise TypeError(f"a {kind} of a network approximates A, not A⁻¹: pass as_preconditioner(M).")
    if isinstance(preconditioner, Tensor | LinearOperator):
        if tuple(preconditioner.shape) != (facts.rows, facts.rows) or preconditioner.dtype != facts.dtype:
            given = f"{tuple(preconditioner.shape)} and {preconditioner.dtype}"
            raise ValueError(f"the preconditioner must be {(facts.rows,) * 2} and {facts.dtype}, as A is, got {given}.")
        multiply = vec.product(preconditioner)
    elif callable(getattr(preconditioner, "preconditioner", None)):
        raise TypeError(f"a {kind} approximates A, not A⁻¹: pass its preconditioner(shift).")
    elif hasattr(preconditioner, "__array_interface__"):
        raise TypeError(f"preconditioner must be a matrix of torch or a function, got {shown(preconditioner)}.")
    elif isinstance(preconditioner, Multiplies):
        multiply = preconditioner.__matmul__

    def precondition(V: Vectors) -> Vectors:
        image = as_step(0, multiply, V)
        if image.shape != V.shape or image.dtype != V.dtype:
            given, got = (f"{block.dtype} of shape {tuple(block.shape)}" for block in (V, image))
            raise ValueError(f"the preconditioner was given {given}, but returned {got}.")
        return image

    return precondition


def precision_limited(residual: float, backward: float, level: float) -> bool:
    """Return whether a solution is as good as the dtype allows: exact up to rounding, and not merely zero."""
    return backward <= level and residual <= ANSWERED


def raise_norm(norm_A: float, images: Sequence[float], sizes: Sequence[float]) -> float:
    """Raise the estimate of ‖A‖ to the largest finite ratio of a product's norm to that of its vector."""
    return max([norm_A, *(a / s for a, s in zip(images, sizes) if s > 0 and a < math.inf)])


@dataclass(frozen=True, eq=False)
class UsableColumns:
    """The columns of a block that an algorithm can use, and the reasons for the others, on the CPU."""

    heights: Float[Tensor, " K"]
    """Largest absolute entry of each column."""
    live: Int[Tensor, " k"]
    reasons: dict[int, Reason]

    @classmethod
    def of(cls, B: Float[Vectors, "n K"]) -> UsableColumns:
        """Find the usable columns by their largest entries, with one small transfer."""
        heights = vec.largest(B).cpu()
        reasons = dict.fromkeys((heights == 0).nonzero().squeeze(1).tolist(), Reason.ZERO_RIGHT_HAND_SIDE)
        reasons |= dict.fromkeys((~torch.isfinite(heights)).nonzero().squeeze(1).tolist(), Reason.NON_FINITE)
        live = ((heights != 0) & torch.isfinite(heights)).nonzero().squeeze(1)
        return cls(heights, live, reasons)

    def scale(self, B: Float[Vectors, "n K"]) -> Float[Vectors, "n k"]:
        """Return the usable columns with a largest entry of 1."""
        return vec.columns(B, self.live) / self.heights[self.live].to(B.device, B.dtype)

    def spread(self, values: Tensor | Sequence[float]) -> Float[Tensor, " K"]:
        """Put a number for each usable column in its place, and 0 for the others."""
        every = torch.zeros(len(self.heights), dtype=torch.float64)
        return every.index_copy(0, self.live, torch.as_tensor(values, dtype=torch.float64))

    def place(self, X: Float[Vectors, "n k"]) -> tuple[Float[Vectors, "n K"], list[int]]:
        """Put solutions in their places among zero (or NaN) columns, and list the columns that are not finite."""
        every = vec.zero_block(X, len(self.heights))
        vec.put_columns(every, self.live, X)
        for j, reason in self.reasons.items():
            if reason is Reason.NON_FINITE:
                vec.put(every, j, vec.part(every, j, j + 1) * math.nan)
        return every, (~torch.isfinite(vec.largest(every))).nonzero().squeeze(1).tolist()


class Records:
    """The right-hand sides that need a solve, scaled to unit norm, and the best solution of each so far.

    A column of the given B is a column of ``B`` times ``length * height``: two factors, since the norm itself may
    overflow. ``X`` holds the best solutions by true residuals, which are ``best``, at first the initial guesses
    (``warm`` says whether there are any); ``current`` are the recurrence's residuals, the next row of ``history``; at
    ``trigger`` the true residual is checked. ``normal`` are ‖Aᵀr‖/(‖A‖‖r‖), NaN if unknown. A column stops after
    ``patience`` iterations without a gain of a hundredth. A recurrence that has ended restarts from the true residual
    as long as that gains a factor of two, which is iterative refinement in the vectors' own precision. Numbers per
    column are on the CPU.
    """

    def __init__(self, B: Float[Vectors, "m K"], X0: Vectors | None, like: Vectors | Description, goal: Goal) -> None:
        """Leave out zero and non-finite columns; solutions are ``like`` these vectors."""
        self.usable = usable = UsableColumns.of(B)
        unit = usable.scale(B)
        self.length = vec.norm(unit).to(B.dtype)
        self.height = usable.heights[usable.live].to(B.device, B.dtype)
        self.B, self.warm = unit / self.length, X0 is not None
        if X0 is None:
            self.X = vec.zero_block(like, len(usable.live))
        else:
            self.X = vec.as_block(vec.columns(X0, usable.live) / self.height / self.length)
        self.rtol, self.maxiter, self.callback = goal.rtol, goal.maxiter, goal.callback
        self.level = vec.rounding_level(B.dtype, max(self.B.shape[0], self.X.shape[0]))
        self.patience = max(500, goal.maxiter // 2)
        self.trigger = max(0.95 * goal.rtol, torch.finfo(B.dtype).eps / 4)
        self.reasons: dict[int, Reason] = {}
        self.history: list[list[float]] = []
        self.iteration = self.matvecs = 0
        self.started = 0, time.monotonic()
        self.start([math.inf] * self.X.shape[1])

    def start(self, residuals: list[float]) -> None:
        """Set the residuals of the initial guesses."""
        K = len(residuals)
        self.best, self.backward = list(residuals), list(residuals)
        self.current, self.reference = list(residuals), list(residuals)
        self.normal, self.mark, self.gained = [math.nan] * K, [math.inf] * K, [0] * K

    def state(self) -> dict[str, Any]:
        """Return the state from which a run continues."""
        reasons = {str(column): reason.name for column, reason in self.reasons.items()}
        history = torch.tensor(self.history, dtype=torch.float64)
        return state_of(self, STATE) | {"reasons": reasons, "history": history}

    def recall(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        restore(self, STATE, state)
        self.reasons = {int(column): Reason[name] for column, name in state["reasons"].items()}
        self.history = state["history"].tolist()
        self.started = self.iteration, time.monotonic()

    @property
    def vanishing(self) -> float:
        """The ‖Aᵀr‖/(‖A‖‖r‖) below which r counts as a null vector, since rounding hides the difference."""
        return 8 * math.sqrt(torch.finfo(self.X.dtype).eps)

    def idle(self, column: int) -> int:
        """Return the iterations since the residual last fell by a hundredth."""
        return self.iteration - self.gained[column]

    def measure(self, column: int, size: float) -> None:
        """Record a gain of a hundredth since the last record, so that slow progress adds up."""
        if size < 0.99 * self.mark[column]:
            self.mark[column], self.gained[column] = size, self.iteration

    def keep(self, column: int, x: Vectors, residual: float, backward: float) -> None:
        """Store this solution as the best."""
        self.best[column], self.backward[column] = residual, backward
        vec.put(self.X, column, x)

    def limited(self, column: int) -> bool:
        """Return whether the best solution is as good as the dtype allows."""
        return precision_limited(self.best[column], self.backward[column], self.level)

    def stop(self, column: int, reason: Reason) -> None:
        """Set a column's reason from its best solution and that solution's backward error."""
        if self.best[column] <= self.rtol:
            reason = Reason.CONVERGED
        elif reason in UNDECIDED and self.limited(column):
            reason = Reason.PRECISION_LIMIT
        elif reason is Reason.STAGNATION and (
            self.backward[column] <= self.level or self.normal[column] <= self.vanishing
        ):
            reason = Reason.SINGULAR
        self.give(column, reason)

    def give(self, column: int, reason: Reason) -> None:
        """Set a reason, and make the true residual the last of the history."""
        self.reasons[column] = reason
        self.current[column] = self.best[column]

    def outlook(self) -> str:
        """Describe the largest residual and the time to the tolerance at the rate of the last half of iterations."""
        worst, note = max(self.current), f"residual {max(self.current):.1e}"
        first, since = self.started
        steps = len(self.history) // 2
        # Fewer steps show no rate.
        if steps < 10 or not self.rtol < worst < max(self.history[-1 - steps]) or self.iteration <= first:
            return note
        rate = math.log(max(self.history[-1 - steps]) / worst) / steps
        left = min(math.log(worst / self.rtol) / rate, self.maxiter - self.iteration) if self.rtol else math.inf
        return note if left == math.inf else f"{note}, {time_left(left / (self.iteration - first), since)}"

    def record(self, active: Sequence[int], estimates: Sequence[float]) -> None:
        """Add a row to the history and pass it to the callback."""
        for column, value in zip(active, estimates):
            self.current[column] = value
        self.history.append(list(self.current))
        remark(self.outlook)
        if self.callback is not None:
            as_step(0, self.callback, self.iteration, self.usable.spread(self.current))

    def solution(self, least_squares: bool = False) -> Solution:
        """Return the solution reached, in the order and scale of the given B."""
        usable, K = self.usable, len(self.usable.heights)
        residuals, backward = usable.spread(self.best), usable.spread(self.backward)
        history = torch.zeros(len(self.history), K, dtype=torch.float64)
        rows = torch.tensor(self.history, dtype=torch.float64)
        history[:, usable.live] = rows.reshape(len(history), len(usable.live))
        reasons = dict(usable.reasons)
        for i, j in enumerate(usable.live.tolist()):
            reasons[j] = self.reasons[i]
        x, lost = usable.place(self.X * self.length * self.height)
        for j in lost:
            reasons[j] = Reason.NON_FINITE
            residuals[j] = backward[j] = math.inf
        return Solution(
            x,
            tuple(reasons[j] for j in range(K)),
            residuals,
            backward,
            self.iteration,
            self.matvecs,
            history,
            normal_residuals=usable.spread(self.normal) if least_squares else None,
        )


def solve_in_groups(
    solve: Callable[[Vectors, Vectors | None, Mapping[str, Any] | None, Save | None], Solution],
    facts: Description,
    B: Vectors,
    x0: Vectors | None,
    vectors: int,
    saved: Checkpoint = NOTHING,
) -> Solution:
    """Run ``solve(B, x0, state, save)`` for as many columns at a time as fit into memory, at least one.

    A column needs ``vectors`` working vectors. x has the shape of B. If memory still runs out, fewer columns run at
    once. ``state`` is that of an earlier run of the group, and ``save`` takes a function that returns the present one.
    """
    run, block, X0 = current_run(), vec.as_columns(B), None if x0 is None else vec.as_columns(x0)
    K, column = block.shape[1], vectors * facts.vector_bytes
    groups = Groups("solved for", columns_at_a_time(K, column, run.room(column)))
    solutions: list[Solution] = []
    X: Vectors | None = None
    state: Mapping[str, Any] | None = None
    first = 0
    if saved is not NOTHING and saved.state is not None:
        groups.width, X, state = (saved.state[name] for name in ("width", "X", "group"))
        solutions = [from_record(Solution, record) for record in saved.state["solutions"]]
        first = sum(len(solution.reasons) for solution in solutions)

    def save(state: Callable[[], Any], now: bool = False) -> None:
        saved.save(lambda: {"width": groups.width, "X": X, "solutions": solutions, "group": state()}, now)

    def solve_group(start: int, stop: int) -> None:
        nonlocal X, state
        earlier, state = state, None
        if saved is not NOTHING:
            save(lambda: earlier, now=True)
        with hold(run.memories, groups.width * column):
            guess = None if X0 is None else vec.part(X0, start, stop)
            solution = solve(vec.part(block, start, stop), guess, earlier, None if saved is NOTHING else save)
        if stop - start < K:
            X = vec.empty_block(solution.x, K) if X is None else X
            vec.put(X, start, solution.x)
            solution = replace(solution, x=vec.zero_block(solution.x, 0))
        solutions.append(solution)

    with torch.no_grad():
        groups.each(K, solve_group, first)
    if X is None:
        return replace(solutions[0], x=vec.shaped_as(solutions[0].x, B))
    return join_solutions(solutions, vec.shaped_as(X, B))


def join_solutions(groups: Sequence[Solution], X: Vectors) -> Solution:
    """Join solutions of groups of columns, whose x are parts of X."""
    normal = [group.normal_residuals for group in groups if group.normal_residuals is not None]
    return Solution(
        X,
        tuple(reason for group in groups for reason in group.reasons),
        torch.cat([group.relative_residuals for group in groups]),
        torch.cat([group.backward_errors for group in groups]),
        max(group.iterations for group in groups),
        sum(group.matvecs for group in groups),
        join_histories([group.history for group in groups]),
        normal_residuals=torch.cat(normal) if normal else None,
        exact_matvecs=sum(group.exact_matvecs for group in groups),
        groups=len(groups),
    )
