"""How a step size or a temperature changes from step to step: functions of the number of steps made."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """The same value at every step."""

    value: float

    def __call__(self, step: int) -> float:
        return self.value


@dataclass(frozen=True)
class RobbinsMonro:
    """a (b + t)^−γ: with γ in (½, 1] the steps add up to ∞ and their squares do not (Robbins & Monro 1951)."""

    a: float
    b: float = 1.0
    gamma: float = 0.55

    def __post_init__(self) -> None:
        checked("a", self.a)
        checked("b", self.b)
        if not 0.5 < checked("gamma", self.gamma) <= 1:
            raise ValueError(
                f"gamma must lie in (½, 1], got {self.gamma}: at ½ or below the squared steps add up to ∞, above 1 "
                "the steps themselves do not."
            )

    def __call__(self, step: int) -> float:
        return self.a * (self.b + step) ** -self.gamma


@dataclass(frozen=True)
class Cosine:
    """From `first` down to `last` along half a cosine, begun anew every `period` steps (Zhang et al. 2020)."""

    first: float
    period: int
    last: float = 0.0

    def __post_init__(self) -> None:
        checked("first", self.first)
        checked("last", self.last, zero=True)
        if isinstance(self.period, bool) or not isinstance(self.period, numbers.Integral) or self.period < 1:
            raise ValueError(f"period must be a whole number of steps, at least 1, got {self.period!r}.")

    def __call__(self, step: int) -> float:
        share = (1 + math.cos(math.pi * (step % self.period) / self.period)) / 2
        return self.last + (self.first - self.last) * share


def checked(name: str, value: Any, zero: bool = False) -> float:
    """A positive finite number, or 0 where that is allowed; TypeError or ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    number = float(value)
    if not (0 < number < math.inf or (zero and number == 0)):
        raise ValueError(f"{name} must be {'0 or more' if zero else 'positive'} and finite, got {value}.")
    return number


def as_schedule(name: str, given: Any, zero: bool = False) -> Schedule:
    """A number, checked, or a function of the step, whose values `at` checks."""
    if callable(given) and not isinstance(given, type):
        return given
    if not isinstance(given, numbers.Real) or isinstance(given, bool):
        raise TypeError(f"{name} must be a number or a function of the step, such as RobbinsMonro(a), got {given!r}.")
    return Constant(checked(name, given, zero))


def at(name: str, schedule: Schedule, step: int, zero: bool = False) -> float:
    """The value at a step, checked unless it was before."""
    value = schedule(step)
    return value if isinstance(schedule, Constant) else checked(f"{name} at step {step}", value, zero)
