"""Newton's method with a line search, for losses that are known to rounding."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from curvops.linalg import Reason

MOST_HALVINGS = 30
ROUNDINGS = 10
"""Units of rounding by which a loss may be wrong."""
SUFFICIENT = 1e-4
"""Share of the decrease that a Newton step promises which a step must give (Armijo)."""


class Point(ABC):
    """A point of the search, with the loss and its derivatives there."""

    relative: float
    """The gradient's norm, relative to the norms of its summands."""
    eps: float
    """The rounding of the dtype that the loss is computed in."""

    @property
    @abstractmethod
    def loss(self) -> float:
        """The loss."""

    @property
    def rounding(self) -> float:
        """The rounding error of the loss."""
        return ROUNDINGS * self.eps * abs(self.loss)

    @abstractmethod
    def slope(self, step: Tensor) -> float:
        """Return the loss's derivative along a step."""

    @abstractmethod
    def losses(self, step: Tensor) -> Callable[[float], float]:
        """Return the loss after a share of the step."""

    @abstractmethod
    def move(self, step: Tensor, share: float) -> Point:
        """Return the point after a share of the step whose loss was computed before."""


At = TypeVar("At", bound=Point)


def minimise(
    point: At,
    step_at: Callable[[At, int], Tensor],
    rtol: float,
    most_steps: int,
    steps: int = 0,
    reached: Callable[[At, int], None] = lambda point, steps: None,
) -> tuple[At, Reason, int]:
    """Search for the point where the gradient is at most rtol; return it, why the search ended, and the steps in all.

    Args:
        point: the start.
        step_at: a function of a point and the number of steps so far that returns Newton's step.
        rtol: tolerance of the gradient.
        most_steps: the most steps.
        steps: the number of steps that led to the start.
        reached: called with each point but the last.
    """
    while point.relative > rtol:
        if steps == most_steps:
            return point, Reason.ITERATION_LIMIT, steps
        step = step_at(point, steps)
        steps += 1
        slope, share = point.slope(step), 1.0
        # What a Newton step promises is what the loss has left; less than its rounding cannot be had.
        promised, losses = -0.5 * slope, point.losses(step)
        for _ in range(MOST_HALVINGS):
            if losses(share) <= point.loss + SUFFICIENT * share * slope + point.rounding:
                break
            share /= 2
        else:
            limited = point.relative < math.sqrt(point.eps) or promised <= point.rounding
            return point, Reason.PRECISION_LIMIT if limited else Reason.STAGNATION, steps
        before, rounding, nothing = point.relative, point.rounding, promised <= ROUNDINGS * point.eps * abs(point.loss)
        point = point.move(step, share)  # type: ignore[assignment]
        stuck = point.relative > 0.5 * before and (point.relative < math.sqrt(point.eps) or promised <= rounding)
        if stuck or nothing:
            return point, Reason.CONVERGED if point.relative <= rtol else Reason.PRECISION_LIMIT, steps
        reached(point, steps)
    return point, Reason.CONVERGED, steps
