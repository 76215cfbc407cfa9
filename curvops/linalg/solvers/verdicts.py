"""Stopping rules shared by MINRES and LSMR: from true residuals, which columns continue, restart or stop, and why."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor

from curvops.linalg.core.results import Reason
from curvops.progress import remark

CHECK_EVERY = 50
"""Iterations between two looks at the true residual."""


class Verdict(Enum):
    """What a column does after its true residual was looked at."""

    CONTINUE = auto()
    RESTART = auto()
    STOP = auto()


def grown(norm_A: float, images: Sequence[float], sizes: Sequence[float]) -> float:
    """The estimate of ‖A‖ from the norms of products and of the vectors multiplied; those not finite are ignored."""
    return max([norm_A, *(a / s for a, s in zip(images, sizes) if s > 0 and a < math.inf)])


@dataclass(eq=False)
class Records:
    """The best answers so far and what is known of them, a number per column on the host.

    A recurrence that is at its end is begun anew from the true residual as long as that gains a factor of two: what is
    iterative refinement in the vectors' own precision. ``X`` holds the best answers.
    """

    X: Tensor
    best: list[float]
    rtol: float
    level: float
    patience: int
    backward: list[float] = field(init=False)
    normal: list[float] = field(init=False)
    current: list[float] = field(init=False)
    gained: list[int] = field(init=False)
    mark: list[float] = field(init=False)
    reference: list[float] = field(init=False)
    reasons: dict[int, Reason] = field(default_factory=dict)
    history: list[list[float]] = field(default_factory=list)
    iteration: int = 0
    matvecs: int = 0

    def __post_init__(self) -> None:
        K = len(self.best)
        self.backward, self.current, self.reference = list(self.best), list(self.best), list(self.best)
        self.normal, self.gained, self.mark = [math.nan] * K, [0] * K, [math.inf] * K

    @property
    def vanishing(self) -> float:
        """The ‖Aᵀr‖/(‖A‖‖r‖) below which r is a null vector, as far as a difference can show it."""
        return 8 * math.sqrt(torch.finfo(self.X.dtype).eps)

    def idle(self, column: int) -> int:
        """Iterations since the residual last fell by a hundredth."""
        return self.iteration - self.gained[column]

    def keep(self, column: int, x: Tensor, residual: float, backward: float, normal: float) -> None:
        """Remember the answer if it is the best, by its true residual.

        Where that is a null vector, which no answer lowers but by errors along it, the least ‖Aᵀr‖ decides.
        """
        self.measure(column, residual)
        better = residual <= self.best[column]
        if self.normal[column] <= self.vanishing:
            closer = normal < self.normal[column] and residual <= 1.1 * self.best[column]
            better = closer or residual < 0.9 * self.best[column]
        elif normal <= self.vanishing:
            better = residual <= 1.1 * self.best[column]
        if better:
            self.best[column], self.backward[column], self.normal[column] = residual, backward, normal
            self.X[:, column] = x

    def measure(self, column: int, size: float) -> None:
        """Note a gain of a hundredth since the last one; slow progress adds up to it."""
        if size < 0.99 * self.mark[column]:
            self.mark[column], self.gained[column] = size, self.iteration

    def judge(self, column: int, size: float, ended: bool, null: bool) -> Verdict:
        """``size`` should fall; ``ended``: the recurrence cannot improve it further; ``null``: r is a null vector."""
        if ended and size < 0.5 * self.reference[column]:
            self.reference[column] = size
            return Verdict.RESTART
        most = 3 * CHECK_EVERY if null else self.patience
        if ended or not math.isfinite(size) or self.idle(column) > most:
            return Verdict.STOP
        return Verdict.CONTINUE

    def stop(self, column: int, reason: Reason) -> None:
        """Set a column's reason from its best answer and that answer's backward error."""
        at_level = self.backward[column] <= self.level
        if self.best[column] <= self.rtol:
            reason = Reason.CONVERGED
        elif reason in (Reason.STAGNATION, Reason.ITERATION_LIMIT) and at_level and self.best[column] <= 0.1:
            reason = Reason.PRECISION_LIMIT
        elif reason is Reason.STAGNATION and (at_level or self.normal[column] <= self.vanishing):
            reason = Reason.SINGULAR
        self.give(column, reason)

    def give(self, column: int, reason: Reason) -> None:
        """Write down a reason, and the true residual as the last of the history."""
        self.reasons[column] = reason
        self.current[column] = self.best[column]

    def record(self, active: list[int], estimates: list[float]) -> Tensor:
        """A row of the history, as a tensor for the callback."""
        for column, value in zip(active, estimates):
            self.current[column] = value
        self.history.append(list(self.current))
        remark(lambda: f"residual {max(self.current):.1e}")
        return torch.tensor(self.current, dtype=torch.float64)


class Recurrence(ABC):
    """K recurrences that run together until each column has a reason; what one step is, a subclass says."""

    records: Records
    active: list[int]
    maxiter: int

    def solve(self) -> None:
        """Iterate; compute true residuals of columns that seem to be done, and of all every 50 iterations."""
        ended: set[int] = set()
        while self.active:
            due = self.note() | ended
            if self.records.iteration >= self.maxiter:
                self.inspect(range(len(self.active)), ended, Reason.ITERATION_LIMIT)
                break
            if self.records.iteration and self.records.iteration % CHECK_EVERY == 0:
                due = set(range(len(self.active)))
            self.inspect(sorted(due), ended)
            while self.active:
                ended, broken = self.step()
                if not broken:
                    break
                self.inspect(sorted(broken), set(), Reason.NON_FINITE)

    @abstractmethod
    def note(self) -> set[int]:
        """Write a row of the history; positions whose true residual should be looked at."""

    @abstractmethod
    def step(self) -> tuple[set[int], set[int]]:
        """One step: positions whose recurrence is at its end, and those that met NaN or Inf."""

    @abstractmethod
    def inspect(self, positions: Sequence[int], ended: set[int], forced: Reason | None = None) -> None:
        """Look at true residuals: columns stop with a reason, begin anew, or go on."""
