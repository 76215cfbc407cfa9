"""The common part of `minres` and `lsmr`: short recurrences in lock-step, checked by true residuals.

The numbers of each column are on the CPU, and so are the reflections of two numbers per column.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from curvops.linalg.core.results import Reason, Solution
from curvops.linalg.solvers.systems import CHECK_EVERY, Records

Numbers: TypeAlias = NDArray[np.float64]
"""One number per column; for so few numbers, NumPy takes a quarter of the time that torch takes."""
Marks: TypeAlias = NDArray[np.bool_]
AnyColumnState = TypeVar("AnyColumnState", bound="ColumnState")


def to_host(*values: Tensor) -> Numbers:
    """Copy numbers per column to the CPU, one row each, in a single transfer."""
    rows: Numbers = torch.stack(values).cpu().numpy()
    return rows


def to_device(values: Numbers, like: Tensor) -> Tensor:
    """Copy numbers per column to the vectors' device and dtype, without waiting for pending work there."""
    return torch.from_numpy(values).to(like.device, like.dtype, non_blocking=True)


def marked_positions(marks: Marks) -> set[int]:
    """Return the positions that are marked."""
    return set(marks.nonzero()[0].tolist())


def not_finite(packet: Numbers) -> set[int]:
    """Return the positions of columns with NaN or Inf in any row."""
    return set((~np.isfinite(packet)).nonzero()[1].tolist())


def positive(sizes: Numbers) -> Numbers:
    """Return norms to divide by, 1 for those that are 0."""
    return np.where(sizes > 0, sizes, 1.0)


def reflection(a: Numbers, b: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return c, s, r with [c s; s −c] [a; b] = [r; 0], r ≥ 0; the identity's first column for a = b = 0."""
    r = np.hypot(a, b)
    size = positive(r)
    return np.where(r > 0, a / size, 1.0), b / size, r


def ratio(a: Numbers, b: Numbers) -> Numbers:
    """Return a / b, or 0 if b is 0."""
    zero = b == 0
    return np.where(zero, 0.0, a / np.where(zero, 1.0, b))


@dataclass(eq=False)
class ColumnState:
    """A state of one float64 number per column in each field, on the CPU."""

    @classmethod
    def with_fields(cls: type[AnyColumnState], **values: Numbers) -> AnyColumnState:
        """Return the state with these fields, and with zeros in the others."""
        nothing = np.zeros_like(next(iter(values.values())))
        return cls(**{field.name: values.get(field.name, nothing).copy() for field in fields(cls)})

    def select(self: AnyColumnState, index: Sequence[int]) -> AnyColumnState:
        """Return the columns that remain."""
        return type(self)(**{name: value[index] for name, value in vars(self).items()})

    def put(self: AnyColumnState, index: Sequence[int], other: AnyColumnState) -> None:
        """Write the state of other columns over these."""
        for name, value in vars(self).items():
            value[index] = getattr(other, name)


class ColumnCheck(NamedTuple):
    """The outcome of a check of one column by true products."""

    size: float
    """The number that should decrease; not finite after NaN or Inf."""
    solved: bool
    over: bool
    """Whether the recurrence cannot improve the size further."""
    null: bool
    """Whether the residual is a null vector."""


class ShortRecurrence(ABC):
    """An iteration on K systems of unit norm in lock-step; columns in ``active`` have no reason yet."""

    def __init__(self, records: Records, residuals: Float[Tensor, " K"]) -> None:
        self.records, self.B, K = records, records.B, records.B.shape[1]
        records.start(residuals.tolist())
        records.matvecs = K if records.warm else 0
        self.eps = torch.finfo(self.B.dtype).eps
        self.active = list(range(K))
        self.norm_A = 0.0

    def solve(self) -> Solution:
        """Iterate until every column has a reason; check true residuals periodically and when they may end it."""
        records, ended = self.records, set[int]()
        while self.active:
            due = self.note() | ended
            everyone = set(range(len(self.active)))
            if records.iteration >= records.maxiter:
                self.inspect(everyone, ended, Reason.ITERATION_LIMIT)
                break
            periodic = records.iteration and records.iteration % CHECK_EVERY == 0
            self.inspect(everyone if periodic else due, ended)
            while self.active:
                ended, broken = self.step()
                if not broken:
                    break
                self.inspect(broken, set(), Reason.NON_FINITE)
        return records.solution(least_squares=True)

    def inspect(self, which: set[int], ended: set[int], forced: Reason | None = None) -> None:
        """Check some columns; they stop with a reason, restart, or continue."""
        if not which:
            return
        records, (checks, restart) = self.records, self.check(sorted(which), ended)
        again: list[int] = []
        for i, (j, check) in enumerate(zip(sorted(which), checks)):
            column = self.active[j]
            patience = 3 * CHECK_EVERY if check.null else records.patience
            if forced is not None or check.solved:
                self.stop(column, forced or Reason.CONVERGED)
            elif not math.isfinite(check.size):
                self.stop(column, Reason.NON_FINITE)
            elif check.over and check.size < 0.5 * records.reference[column]:
                records.reference[column] = check.size
                again.append(i)
            elif check.over or records.idle(column) > patience:
                self.stop(column, Reason.STAGNATION)
        if again:
            restart(again)
        remaining = [j for j, column in enumerate(self.active) if column not in records.reasons]
        if len(remaining) < len(self.active):
            self.active = [self.active[j] for j in remaining]
            self.select(remaining)

    @abstractmethod
    def note(self) -> set[int]:
        """Add a row to the history; return the positions to be checked."""

    @abstractmethod
    def step(self) -> tuple[set[int], set[int]]:
        """Take one step; return the positions that have ended, and those that met NaN or Inf."""

    @abstractmethod
    def check(self, positions: list[int], ended: set[int]) -> tuple[list[ColumnCheck], Callable[[list[int]], None]]:
        """Compute true residuals, store the best solutions; return a check for each, and a function to restart some."""

    @abstractmethod
    def stop(self, column: int, reason: Reason) -> None:
        """Give a column its reason, by its best solution."""

    @abstractmethod
    def select(self, remaining: list[int]) -> None:
        """Drop all but these positions."""
