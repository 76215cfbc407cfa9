"""What a short recurrence believes and what a true residual shows: who goes on, who begins anew, who stops and why."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor

from curvops.linalg.results import Reason

CHECK_EVERY = 50
"""Iterations between two looks at the true residual."""


class Verdict(Enum):
    """What a column does after its true residual was looked at."""

    CONTINUE = auto()
    RESTART = auto()
    STOP = auto()


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
    reference: list[float] = field(init=False)
    reasons: dict[int, Reason] = field(default_factory=dict)
    history: list[list[float]] = field(default_factory=list)
    iteration: int = 0
    matvecs: int = 0

    def __post_init__(self) -> None:
        K = len(self.best)
        self.backward, self.current, self.reference = list(self.best), list(self.best), list(self.best)
        self.normal, self.gained = [math.nan] * K, [0] * K

    def keep(self, column: int, x: Tensor, residual: float, backward: float, normal: float) -> None:
        """Remember the answer if it is the best, by its true residual; of equals, the one of the least ‖Aᵀr‖."""
        if residual < 0.99 * self.best[column]:
            self.gained[column] = self.iteration
        closer = normal < self.normal[column] or (math.isnan(self.normal[column]) and not math.isnan(normal))
        if residual <= self.best[column] or (closer and residual <= (1 + self.level) * self.best[column]):
            self.best[column], self.backward[column], self.normal[column] = residual, backward, normal
            self.X[:, column] = x

    def judge(self, column: int, residual: float, ended: bool) -> Verdict:
        """``ended`` says that the recurrence itself has no more to give."""
        if ended and residual < 0.5 * self.reference[column]:
            self.reference[column] = residual
            return Verdict.RESTART
        if ended or not math.isfinite(residual) or self.iteration - self.gained[column] > self.patience:
            return Verdict.STOP
        return Verdict.CONTINUE

    def stop(self, column: int, reason: Reason) -> None:
        """Give a column its reason: the honest name of a stop, from the best answer and its backward error."""
        if self.best[column] <= self.rtol:
            reason = Reason.CONVERGED
        elif reason is Reason.STAGNATION and self.backward[column] <= self.level and self.best[column] <= 0.1:
            reason = Reason.PRECISION_LIMIT
        elif reason is Reason.STAGNATION and (self.backward[column] <= self.level or self.minimal(column)):
            reason = Reason.SINGULAR
        self.give(column, reason)

    def give(self, column: int, reason: Reason) -> None:
        """Write down a reason, and the true residual as the last of the history."""
        self.reasons[column] = reason
        self.current[column] = self.best[column]

    def minimal(self, column: int) -> bool:
        """Whether Aᵀr vanishes, as far as r, a difference, can show it."""
        return self.normal[column] <= math.sqrt(torch.finfo(self.X.dtype).eps)

    def record(self, active: list[int], estimates: list[float]) -> Tensor:
        """A row of the history, as a tensor for the callback."""
        for column, value in zip(active, estimates):
            self.current[column] = value
        self.history.append(list(self.current))
        return torch.tensor(self.current, dtype=torch.float64)
