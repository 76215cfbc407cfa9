"""The mode of the linear model f* + J(θ − θ*) under the likelihood and the prior, by Newton–CG.

Antorán et al. 2022: weights of a network are seldom a mode of its linear model (early stopping, normalisation layers),
and the evidence of that model belongs to its own mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checkpoint import current, digest
from curvops.linalg import Reason, cg
from curvops.linalg.core.same_matrix import problem_of
from curvops.linalg.core.summary import Summarised
from curvops.network.likelihoods import Gaussian
from curvops.operators import GGN, Linearization
from curvops.operators.curvatures.displaced_ggn import DisplacedGGN, pushed
from curvops.posterior.priors import Prior

MOST_HALVINGS = 30
ROUNDINGS = 10
"""Units of rounding by which a loss is off."""
SUFFICIENT = 1e-4
"""Share of the decrease that a Newton step promises which a step must give (Armijo)."""

REMEDIES = {
    Reason.ITERATION_LIMIT: (
        "The iterations of a solve inside were spent before its tolerance. A larger prior precision, weights nearer to "
        "a mode, or float64 make it shorter."
    ),
    Reason.STAGNATION: (
        "The residual stopped shrinking far above the rounding level. A larger prior precision, or float64, makes it "
        "better conditioned; a curvature of random draws must give one product each time."
    ),
    Reason.NOT_POSITIVE_DEFINITE: (
        "Curvature plus prior is not positive definite. Take a larger prior precision, or co.GGN as curvature."
    ),
    Reason.SINGULAR: "Curvature plus prior is singular in this dtype. Take a larger prior precision, or float64.",
}
"""Of solves inside posteriors and their tuning, whose callers have no options of the solvers."""


@dataclass(frozen=True, eq=False, repr=False)
class LinearMode(Summarised):
    """θ̄, the weights that maximise the linear model's posterior density.

    ``log_likelihood`` is the linear model's at θ̄, in nats, ``gradient`` the norm of the gradient there relative to
    those of likelihood and prior together, ``steps`` the Newton steps, ``matvecs`` the products with a curvature.
    """

    theta: Float[Tensor, " D"]
    log_likelihood: Float[Tensor, ""]
    gradient: float
    reason: Reason
    steps: int
    matvecs: int

    @property
    def converged(self) -> bool:
        """Whether the gradient reached the tolerance, or what the dtype allows."""
        return self.reason in (Reason.CONVERGED, Reason.PRECISION_LIMIT)


class _LinearModel:
    """−power · log p(y | f* + Jδ) + ½‖θ* + δ − m‖²_A at one δ."""

    def __init__(self, lins: Sequence[Linearization], prior: Prior, power: float, delta: Tensor) -> None:
        self.power = power
        self.prior, self.delta, self.theta = prior, delta, lins[0].theta + delta
        self.parts = [DisplacedGGN.at(lin, pushed(lin, delta)) for lin in lins]
        of_data = power * sum((part.gradient() for part in self.parts[1:]), self.parts[0].gradient())
        of_prior = prior.gradient(self.theta)
        self.gradient = of_data + of_prior
        scale = float(of_data.double().norm() + of_prior.double().norm())
        self.relative = float(self.gradient.double().norm()) / scale if scale else 0.0

    def precision(self) -> Any:
        """Its Hessian, for a likelihood whose Fisher is that; else the GGN's."""
        total: LinearOperator = self.parts[0]
        for part in self.parts[1:]:
            total = total + part
        return self.prior.plus(total if self.power == 1 else self.power * total)

    def log_likelihood(self, steps: Sequence[Tensor | float] = ()) -> float:
        given = steps or [0.0] * len(self.parts)
        return self.power * sum(float(part.log_likelihood(step)) for part, step in zip(self.parts, given))

    @cached_property
    def present(self) -> float:
        """The loss here. One pass over the data."""
        return self.loss()

    @property
    def rounding(self) -> float:
        """Of the loss: each log-likelihood in it is rounded in units of one, however small it is itself."""
        terms = sum(part.lin.num_data * part.lin.num_outputs for part in self.parts)
        return ROUNDINGS * torch.finfo(self.theta.dtype).eps * (abs(self.present) + math.sqrt(terms))

    def loss(self, steps: Sequence[Tensor | float] = (), direction: Tensor | None = None) -> float:
        """With J times the step already known."""
        theta = self.theta if direction is None else self.theta + direction
        return -self.log_likelihood(steps) + 0.5 * float(self.prior.quadratic(theta))


@torch.no_grad()
def linear_mode(
    lins: Sequence[Linearization],
    prior: Prior,
    start: Float[Tensor, " D"] | None,
    rtol: float,
    maxiter: int,
    preconditioner: Callable[..., tuple[Any, int]] | None = None,
    begun: Callable[[], tuple[Tensor, int] | None] = lambda: None,
    power: float = 1.0,
) -> LinearMode:
    """θ̄ from `start` (θ* where there is none), by a preconditioner of the posterior's own precision if it has one.

    `begun` may find weights nearer to it, with the products that it took; it is asked once in a run. `power` is that of
    a tempered likelihood. The run in force keeps the steps.
    """
    kept, theta = current(), lins[0].theta
    for lin in lins if kept else ():
        lin.memory.expect_many()  # the engine that serves the run from its first product to its last
    at = partial(_LinearModel, lins, prior, power)
    model = at(torch.zeros_like(theta) if start is None else start - theta)
    matvecs, steps, reason = 2, 0, Reason.CONVERGED
    if kept.state is None:
        if (near := begun()) is not None:
            model, matvecs = at(near[0] - theta), matvecs + near[1] + 2
        kept.save(lambda: {"delta": model.delta, "steps": 0, "matvecs": matvecs}, now=True)
    else:
        delta, steps, matvecs = (kept.state[name] for name in ("delta", "steps", "matvecs"))
        model = at(delta)
    made = None if preconditioner is None else cache(preconditioner) if kept else preconditioner  # of all steps
    while model.relative > rtol:
        if steps == maxiter:
            reason = Reason.ITERATION_LIMIT
            break
        precision = model.precision()
        # A Gaussian's first step is its last, and solved to the end; any other as far as it pays.
        worth = 0.0 if _quadratic(lins) else math.sqrt(model.relative)
        goal = min(0.1, max(0.1 * rtol / model.relative, worth))
        if made is None:
            M, spent = precision.preconditioner(1), 0
        else:
            with kept.naming("preconditioner"):
                M, spent = made(1)
            spent = 0 if kept and steps else spent
        found = cg(precision, -model.gradient, preconditioner=M, rtol=goal)
        found.raise_if_failed(goal, REMEDIES)
        moved, length = _searched(lins, model, found.x)
        matvecs, steps = matvecs + found.matvecs + spent + 2, steps + 1
        # What a Newton step promises is what the loss has left; less than its rounding cannot be had.
        promised = -0.5 * float(model.gradient.double() @ found.x.double())
        eps = torch.finfo(theta.dtype).eps
        if not length:
            limited = model.relative < math.sqrt(eps) or promised <= model.rounding
            reason = Reason.PRECISION_LIMIT if limited else Reason.STAGNATION
            break
        rounding, nothing = model.rounding, promised <= ROUNDINGS * eps * abs(model.present)
        before, model = model.relative, at(moved)
        stuck = model.relative > 0.5 * before and (model.relative < math.sqrt(eps) or promised <= rounding)
        if stuck or nothing:
            reason = Reason.CONVERGED if model.relative <= rtol else Reason.PRECISION_LIMIT
            break
        kept.save(lambda: {"delta": model.delta, "steps": steps, "matvecs": matvecs})  # noqa: B023
    log_likelihood = torch.tensor(model.log_likelihood(), dtype=torch.float64, device=theta.device)
    return LinearMode(model.theta, log_likelihood, model.relative, reason, steps, matvecs)


def problem_of_mode(lins: Sequence[Linearization], prior: Prior, power: float) -> dict[str, Any]:
    """What a checkpoint keeps of it, by name."""
    total: LinearOperator = GGN(lins[0])
    for lin in lins[1:]:
        total = total + GGN(lin)
    return problem_of(prior.plus(total)) | {"the prior's mean": digest([prior.mean]), "the power": power}


def _quadratic(lins: Sequence[Linearization]) -> bool:
    return all(isinstance(lin.likelihood, Gaussian) for lin in lins)


def _searched(lins: Sequence[Linearization], model: _LinearModel, p: Tensor) -> tuple[Tensor, float]:
    """δ after a step along p that lowers the loss enough, and its length as a share of p; 0 where none does."""
    steps = [pushed(lin, p) for lin in lins]
    slope, loss = float(model.gradient.double() @ p.double()), model.present
    length = 1.0
    for _ in range(MOST_HALVINGS):
        there = model.loss([length * step for step in steps], length * p)
        if there <= loss + SUFFICIENT * length * slope + model.rounding:
            return model.delta + length * p, length
        length /= 2
    return model.delta, 0.0
