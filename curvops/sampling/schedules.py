"""Schedules of step sizes and temperatures as functions of the number of steps made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from curvops.checks import checked_number, checked_whole

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """A schedule with the same value at every step.

    Args:
        value: the value at every step.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> sampler = co.sampling.sgld(density, co.sampling.Constant(1e-3))  # as sgld(density, 1e-3)
    """

    value: float

    def __call__(self, step: int) -> float:
        return self.value


@dataclass(frozen=True)
class RobbinsMonro:
    """The schedule a (b + t)^−γ: for γ in (½, 1] steps sum to ∞, but their squares do not (Robbins & Monro 1951).

    Args:
        a: a > 0, the scale.
        b: b > 0, the offset of the step.
        gamma: γ, the exponent.

    Raises:
        TypeError, ValueError: a number is of another kind or out of range.

    Examples:
        >>> schedule = co.sampling.RobbinsMonro(a=1e-2, b=10.0)
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> sampler = co.sampling.sgld(density, schedule)
    """

    a: float
    b: float = 1.0
    gamma: float = 0.55

    def __post_init__(self) -> None:
        checked_number("a", self.a)
        checked_number("b", self.b)
        if not 0.5 < checked_number("gamma", self.gamma) <= 1:
            raise ValueError(
                f"gamma must lie in (½, 1], got {self.gamma}: at ½ or below, the squared steps add up to ∞."
            )

    def __call__(self, step: int) -> float:
        return self.a * (self.b + step) ** -self.gamma


@dataclass(frozen=True)
class Cosine:
    """A schedule from `first` to `last` along half a cosine, restarted every `period` steps (Zhang et al. 2020).

    Args:
        first: the value at the start of each period.
        period: the number of steps of a period.
        last: the value towards its end.

    Examples:
        >>> schedule = co.sampling.Cosine(first=1e-2, period=100)
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> sampler = co.sampling.sgld(density, schedule)
    """

    first: float
    period: int
    last: float = 0.0

    def __post_init__(self) -> None:
        checked_number("first", self.first)
        checked_number("last", self.last, "[0, inf)")
        checked_whole("period", self.period, kind="a whole number of steps")

    def __call__(self, step: int) -> float:
        share = (1 + math.cos(math.pi * (step % self.period) / self.period)) / 2
        return self.last + (self.first - self.last) * share


def as_schedule(name: str, given: Any, zero: bool = False) -> Schedule:
    """Return the schedule for a number, which is checked, or for a function of the step, whose values `at` checks."""
    if callable(given) and not isinstance(given, type):
        return given
    kind = "a number or a function of the step, such as RobbinsMonro(a)"
    return Constant(checked_number(name, given, "[0, inf)" if zero else "(0, inf)", kind))


def at(name: str, schedule: Schedule, step: int) -> float:
    """Return the schedule's value at a step, 0 or more; the value is checked unless the schedule is constant."""
    if isinstance(schedule, Constant):
        return schedule.value
    return checked_number(f"{name} at step {step}", schedule(step), "[0, inf)")
