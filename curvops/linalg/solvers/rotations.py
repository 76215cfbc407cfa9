"""Reflections of two numbers per column on the host, and the state that a short recurrence keeps of each column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers: TypeAlias = NDArray[np.float64]
"""One for each column. On so few, NumPy's operations take a quarter of the time of torch's."""
Marks: TypeAlias = NDArray[np.bool_]
AnyColumnState = TypeVar("AnyColumnState", bound="ColumnState")


def on_host(*values: Tensor) -> Numbers:
    """Numbers per column from where the vectors are, one row each: one transfer for all of them."""
    found: Numbers = torch.stack(values).cpu().numpy()
    return found


def to_device(values: Numbers, like: Tensor) -> Tensor:
    """Numbers per column where the vectors are, in their dtype. The host does not wait for what is under way there."""
    return torch.from_numpy(values).to(like.device, like.dtype, non_blocking=True)


def marked(marks: Marks) -> set[int]:
    """The positions that are marked."""
    return set(marks.nonzero()[0].tolist())


def not_finite(packet: Numbers) -> set[int]:
    """The positions of columns with NaN or Inf in any row."""
    return set((~np.isfinite(packet)).nonzero()[1].tolist())


def positive(sizes: Numbers) -> Numbers:
    """Norms to divide by, 1 for those that are 0."""
    return np.where(sizes > 0, sizes, 1.0)


def reflection(a: Numbers, b: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """c, s, r with [c s; s −c] [a; b] = [r; 0], r ≥ 0; the identity's first column for a = b = 0."""
    r = np.hypot(a, b)
    size = positive(r)
    return np.where(r > 0, a / size, 1.0), b / size, r


def ratio(a: Numbers, b: Numbers) -> Numbers:
    """a / b, 0 where b is 0."""
    zero = b == 0
    return np.where(zero, 0.0, a / np.where(zero, 1.0, b))


@dataclass(eq=False)
class ColumnState:
    """Fields of one float64 number per column each, on the host."""

    @classmethod
    def beginning(cls: type[AnyColumnState], **known: Numbers) -> AnyColumnState:
        """The state with these fields, the others 0."""
        nothing = np.zeros_like(next(iter(known.values())))
        return cls(**{field.name: known.get(field.name, nothing).copy() for field in fields(cls)})

    def select(self: AnyColumnState, index: Sequence[int]) -> AnyColumnState:
        """The columns that remain."""
        return type(self)(**{name: value[index] for name, value in vars(self).items()})

    def put(self: AnyColumnState, index: Sequence[int], other: AnyColumnState) -> None:
        """Write the state of other columns over these."""
        for name, value in vars(self).items():
            value[index] = getattr(other, name)
