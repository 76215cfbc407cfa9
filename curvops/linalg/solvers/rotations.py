"""Reflections of two numbers per column on the host, and the state of each column in a short recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers: TypeAlias = NDArray[np.float64]
"""One number per column. On so few numbers NumPy's operations take a quarter of the time of torch's."""
Marks: TypeAlias = NDArray[np.bool_]
AnyColumnState = TypeVar("AnyColumnState", bound="ColumnState")


def to_host(*values: Tensor) -> Numbers:
    """Copy numbers per column to the host, one row each: one transfer for all of them."""
    found: Numbers = torch.stack(values).cpu().numpy()
    return found


def to_device(values: Numbers, like: Tensor) -> Tensor:
    """Copy numbers per column to the vectors' device and dtype, without waiting for work under way there."""
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
    """Return a / b, 0 where b is 0."""
    zero = b == 0
    return np.where(zero, 0.0, a / np.where(zero, 1.0, b))


@dataclass(eq=False)
class ColumnState:
    """A state of one float64 number per column in each field, on the host."""

    @classmethod
    def with_fields(cls: type[AnyColumnState], **known: Numbers) -> AnyColumnState:
        """Return the state with these fields, the others 0."""
        nothing = np.zeros_like(next(iter(known.values())))
        return cls(**{field.name: known.get(field.name, nothing).copy() for field in fields(cls)})

    def select(self: AnyColumnState, index: Sequence[int]) -> AnyColumnState:
        """Return the columns that remain."""
        return type(self)(**{name: value[index] for name, value in vars(self).items()})

    def put(self: AnyColumnState, index: Sequence[int], other: AnyColumnState) -> None:
        """Write the state of other columns over these."""
        for name, value in vars(self).items():
            value[index] = getattr(other, name)
