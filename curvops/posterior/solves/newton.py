"""Newton's method with a line search, for losses that are known only up to rounding."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from curvops.linalg import Reason

MOST_HALVINGS = 30
ROUNDINGS = 10
"""The units of rounding by which a loss may be wrong."""
SUFFICIENT = 1e-4
"""The share of the decrease predicted by a Newton step that a step must achieve (Armijo)."""


class Point(ABC):
    """A point of the search, with the loss and its derivatives there."""

    relative: float
    """The gradient's norm, relative to the norms of its summands."""
    eps: float
    """The rounding of the dtype in which the loss is computed."""

    @property
    @abstractmethod
    def loss(self) -> float:
        """The loss at this point."""

    @property
    def rounding(self) -> float:
        """The rounding error of the loss."""
        return ROUNDINGS * self.eps * abs(self.loss)

    @abstractmethod
    def slope(self, step: Tensor) -> float:
        """Return the loss's derivative along a step."""

    @abstractmethod
    def losses(self, step: Tensor) -> Callable[[float], float]:
        """Return the loss after a fraction of the step."""

    @abstractmethod
    def move(self, step: Tensor, share: float) -> Point:
        """Return the point after a fraction of the step whose loss was computed before."""


At = TypeVar("At", bound=Point)


def minimise(
    point: At,
    step_at: Callable[[At, int], Tensor],
    rtol: float,
    most_steps: int,
    steps: int = 0,
    reached: Callable[[At, int], None] = lambda point, steps: None,
) -> tuple[At, Reason, int]:
    """Search for a point with a gradient of at most rtol; return it, the reason why the search ended, and all steps.

    Args:
        point: the starting point.
        step_at: a function of a point and the number of steps so far that returns Newton's step.
        rtol: the tolerance of the gradient.
        most_steps: the maximum number of steps.
        steps: the number of steps that led to the starting point.
        reached: called with each point except the last.
    """
    while point.relative > rtol:
        if steps == most_steps:
            return point, Reason.ITERATION_LIMIT, steps
        step = step_at(point, steps)
        steps += 1
        slope, share = point.slope(step), 1.0
        # The decrease that a Newton step predicts can still be gained, unless it is less than the loss's rounding.
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
