"""Reasons to end an iteration: the thresholds of every solver, and the records of each column."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

import torch
from torch import Tensor

from curvops.linalg.core.results import Reason
from curvops.linalg.core.vectors import Vectors, put
from curvops.progress import as_step, remark, time_left
from curvops.records import restore, state_of

Callback: TypeAlias = Callable[[int, Tensor], object]
CHECK_EVERY = 50
"""The number of iterations between two checks of the true residual."""
STEADY = 10
"""The smallest number of iterations over which a rate is measured."""
ANSWERED = 0.1
"""If the residual is above this share of b, x is not a solution, however small the backward error is."""
STATE = ("X", "best", "backward", "current", "reference", "normal", "mark", "gained", "iteration", "matvecs")
UNDECIDED = frozenset({Reason.STAGNATION, Reason.ITERATION_LIMIT})
"""Reasons that tell how the iteration ended, but nothing about the operator."""


@dataclass(frozen=True)
class Goal:
    """The tolerance of a solve, its maximum number of iterations, and the function called in each."""

    rtol: float
    maxiter: int
    callback: Callback | None = None


def precision_limited(residual: float, backward: float, level: float) -> bool:
    """Return whether a solution is as good as the dtype allows: exact up to rounding, and not merely zero."""
    return backward <= level and residual <= ANSWERED


def raise_norm(norm_A: float, images: Sequence[float], sizes: Sequence[float]) -> float:
    """Raise the estimate of ‖A‖ to the largest finite ratio of a product's norm to that of its vector."""
    return max([norm_A, *(a / s for a, s in zip(images, sizes) if s > 0 and a < math.inf)])


class Verdict(Enum):
    """The next action for a column after a check of its true residual."""

    CONTINUE = auto()
    RESTART = auto()
    STOP = auto()


class Records:
    """The best solutions so far and their quality, a number per column on the CPU.

    A recurrence that has ended restarts from the true residual as long as that gains a factor of two, which is
    iterative refinement in the vectors' own precision. ``X`` holds the best solutions by true residuals, which are
    ``best``; ``current`` are the recurrence's residuals, the next row of ``history``; at ``trigger`` the true residual
    is checked. ``normal`` are ‖Aᵀr‖/(‖A‖‖r‖), NaN if unknown. A column stops after ``patience`` iterations without a
    gain of a hundredth.
    """

    def __init__(self, X: Vectors, residuals: list[float], level: float, goal: Goal) -> None:
        K = len(residuals)
        self.X, self.level, self.rtol, self.maxiter, self.callback = X, level, goal.rtol, goal.maxiter, goal.callback
        self.patience = max(500, goal.maxiter // 2)
        self.trigger = max(0.95 * goal.rtol, torch.finfo(X.dtype).eps / 4)
        self.best, self.backward = list(residuals), list(residuals)
        self.current, self.reference = list(residuals), list(residuals)
        self.normal, self.mark, self.gained = [math.nan] * K, [math.inf] * K, [0] * K
        self.reasons: dict[int, Reason] = {}
        self.history: list[list[float]] = []
        self.iteration = self.matvecs = 0
        self.started = 0, time.monotonic()

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
        put(self.X, column, x)

    def judge(self, column: int, size: float, ended: bool, null: bool) -> Verdict:
        """Decide the next action by ``size``, which should fall, and by whether the recurrence can continue."""
        # ended: the recurrence cannot improve size further; null: r is a null vector.
        if ended and size < 0.5 * self.reference[column]:
            self.reference[column] = size
            return Verdict.RESTART
        most = 3 * CHECK_EVERY if null else self.patience
        if ended or not math.isfinite(size) or self.idle(column) > most:
            return Verdict.STOP
        return Verdict.CONTINUE

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
        if steps < STEADY or not self.rtol < worst < max(self.history[-1 - steps]) or self.iteration <= first:
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
            as_step(0, self.callback, self.iteration, torch.tensor(self.current, dtype=torch.float64))
