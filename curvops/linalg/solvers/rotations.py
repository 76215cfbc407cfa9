"""Reflections of two numbers per column on the host, and the state that a short recurrence keeps of each column."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

State = TypeVar("State", bound="ColumnState")


def reflection(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """c, s, r with [c s; s −c] [a; b] = [r; 0], r ≥ 0; the identity's first column for a = b = 0."""
    r = torch.hypot(a, b)
    size = torch.where(r > 0, r, 1.0)
    return torch.where(r > 0, a / size, 1.0), b / size, r


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, 0 where b is 0."""
    return torch.where(b == 0, 0.0, a / torch.where(b == 0, 1.0, b))


@dataclass(eq=False)
class ColumnState:
    """Fields of one float64 number per column each."""

    @classmethod
    def beginning(cls: type[State], **known: Tensor) -> State:
        """The state with these fields, the others 0."""
        nothing = torch.zeros_like(next(iter(known.values())))
        return cls(**{field.name: known.get(field.name, nothing).clone() for field in fields(cls)})

    def select(self: State, index: Int[Tensor, " j"]) -> State:
        """The columns that remain."""
        return type(self)(**{name: value[index] for name, value in vars(self).items()})

    def put(self: State, index: Int[Tensor, " j"], other: State) -> None:
        """Write the state of other columns over these."""
        for name, value in vars(self).items():
            value[index] = getattr(other, name)
