"""Checks of the tolerances and budgets that callers give, and levels of rounding."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection

import torch

NEAR_ZERO = 100.0
"""Eigenvalues within this many eps ‖A‖ of zero count as zero."""


def check_limits(
    rtol: float | int | None = None,
    maxiter: int | None = None,
    max_matvecs: int | None = None,
    memory_budget: int | None = None,
    *,
    sampled: bool = False,
) -> None:
    """None stands for no limit. ``sampled`` is for estimators, whose error bar no budget brings down to 0.

    Raises:
        ValueError: a limit is negative, rtol not finite, or an estimator's rtol 0.
    """
    if rtol is not None and not (0 < rtol < math.inf if sampled else 0 <= rtol < math.inf):
        wanted = "positive and finite" if sampled else "finite and not negative"
        raise ValueError(f"rtol must be {wanted}, got {rtol}.")
    for name, value in (("maxiter", maxiter), ("max_matvecs", max_matvecs), ("memory_budget", memory_budget)):
        if value is not None and value < 0:
            raise ValueError(f"{name} must not be negative, got {value}.")


def check_generator(generator: object) -> None:
    """TypeError for what is neither a torch.Generator nor None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator or None, got {generator!r}; for a seed write "
            "torch.Generator().manual_seed(0)."
        )


def check_within(name: str, given: object, interval: str) -> None:
    """TypeError for what is no number, ValueError outside the interval: "[0, 1)" holds its left end alone."""
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise TypeError(f"{name} must be a number, got {given!r}.")
    value, (low, high) = float(given), map(float, interval[1:-1].split(","))
    at_end = (interval[0] == "[" and value == low) or (interval[-1] == "]" and value == high)
    if not (low < value < high or at_end):
        raise ValueError(f"{name} must lie in {interval}, got {given!r}.")


def checked_whole(name: str, given: object, least: int) -> int:
    """TypeError for what is no whole number, ValueError below the least."""
    if isinstance(given, bool) or not isinstance(given, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, got {given!r}.")
    if given < least:
        raise ValueError(f"{name} must be at least {least}, got {given}.")
    return int(given)


def check_flag(name: str, given: object) -> None:
    """TypeError unless ``given`` is True or False."""
    if not isinstance(given, bool):
        raise TypeError(f"{name} must be True or False, got {given!r}.")


def check_choice(name: str, given: object, known: Collection[str]) -> None:
    """ValueError, naming what there is, unless ``given`` is one of them."""
    if not isinstance(given, str) or given not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {given!r}.")
