"""Newton's method on losses of one number: where it ends, and why."""

import math
from itertools import pairwise

import torch

from curvops.linalg import Reason
from curvops.posterior.linear_mode import Point, minimise


class Line(Point):
    """A loss of one number, by its value and first two derivatives."""

    eps = torch.finfo(torch.float64).eps

    def __init__(self, of, x):
        self.of, self.x, self.tried = of, x, []
        self.value, self.gradient, self.curvature = of(x)
        self.relative = abs(self.gradient)

    @property
    def loss(self):
        return self.value

    def along(self, step):
        def after(share):
            self.tried.append(share)
            return self.of(self.x + share * step)[0]

        return self.gradient * step, after

    def move(self, step, share):
        return Line(self.of, self.x + share * step)


def newton(point, steps):
    return -point.gradient / point.curvature


def log_cosh(x):
    return math.log(math.cosh(x)), math.tanh(x), 1 / math.cosh(x) ** 2


def test_a_step_that_overshoots_is_halved_until_the_loss_falls():
    """Of log cosh Newton's full steps diverge from 1.1 on."""
    start, seen = Line(log_cosh, 1.5), []
    found, reason, steps = minimise(start, newton, 1e-8, 50, 2, lambda at, count: seen.append((at.loss, count)))
    assert reason is Reason.CONVERGED and abs(found.x) <= 1e-8 and start.tried[:2] == [1.0, 0.5]
    assert [count for _, count in seen] == list(range(3, steps + 1)) and steps > 3
    assert all(later[0] < earlier[0] for earlier, later in pairwise(seen))


def test_a_gradient_of_the_wrong_sign_stagnates():
    start = Line(lambda x: (math.log(math.cosh(x)), -math.tanh(x), 1.0), 1.5)
    found, reason, steps = minimise(start, newton, 1e-8, 50)
    assert found is start and reason is Reason.STAGNATION and steps == 1 and len(start.tried) == 30


def test_rounding_of_the_loss_ends_it():
    """A loss of 1e8 is known to 1e-7, so that a gradient of 1e-3 is all that can be told."""
    start = Line(lambda x: (1e8 + x * x, 2 * x, 2.0), 1e-5)
    found, reason, steps = minimise(start, lambda at, _: 0.4 * newton(at, _), 1e-12, 50)
    assert reason is Reason.PRECISION_LIMIT and steps == 1 and abs(found.x) < 1e-5
