"""The mode of the linear model f* + J(θ − θ*) under the likelihood and the prior, by Newton–CG.

Antorán et al. 2022: the weights of a network are seldom a mode of its linear model (early stopping, normalisation
layers), and the evidence of that model belongs to its own mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checkpoint import current, digest
from curvops.linalg import Reason, cg
from curvops.linalg.core.matrix_identity import problem_of
from curvops.linalg.core.memory import holding, vector_bytes
from curvops.linalg.core.solve_routes import SOLVE_VECTORS
from curvops.linalg.core.symmetry import is_psd
from curvops.linalg.core.vectors import describe, inner, norm
from curvops.network.likelihoods import Gaussian
from curvops.operators import GGN, Linearization
from curvops.operators.curvatures.ggn import DisplacedGGN
from curvops.posterior.core.curvature_cache import CurvatureCache
from curvops.posterior.core.priors import PrecisionTerms, Prior
from curvops.posterior.solves.newton import ROUNDINGS, Point, minimise
from curvops.posterior.solves.precision import preconditioner, solving_kernel
from curvops.summary import Summarised

REMEDIES = {
    Reason.ITERATION_LIMIT: (
        "The iterations of an inner solve were spent before its tolerance was reached. A larger prior precision, "
        "weights nearer to a mode, or float64 make it shorter."
    ),
    Reason.STAGNATION: (
        "The residual stopped shrinking far above the rounding level. A larger prior precision, or float64, "
        "improves the conditioning; a curvature made from random draws must give the same product each time."
    ),
    Reason.NOT_POSITIVE_DEFINITE: (
        "Curvature plus prior is not positive definite. Use a larger prior precision, or co.GGN as curvature."
    ),
    Reason.SINGULAR: "Curvature plus prior is singular in this dtype. Use a larger prior precision, or float64.",
}
"""The remedies for solves inside posteriors and their tuning, where callers cannot pass options to the solvers."""


@dataclass(frozen=True, eq=False, repr=False)
class LinearMode(Summarised):
    """The mode θ̄ of the linear model: the weights that maximise its posterior density.

    ``log_likelihood`` is that of the linear model at θ̄, in nats; ``gradient`` the norm of the gradient there,
    relative to the norms of the likelihood's and the prior's gradients together; ``steps`` the number of Newton
    steps; ``matvecs`` the number of products with a curvature.

    Examples:
        >>> mode = post.linear_mode()
        >>> mode.theta.shape, mode.gradient < 1e-3
        (torch.Size([17]), True)
    """

    theta: Float[Tensor, " D"]
    log_likelihood: Float[Tensor, ""]
    gradient: float
    reason: Reason
    steps: int
    matvecs: int

    @property
    def converged(self) -> bool:
        """Whether the gradient reached the tolerance, or the limit of the dtype."""
        return self.reason in (Reason.CONVERGED, Reason.PRECISION_LIMIT)


NEWTON_VECTORS = 8
"""Vectors of the size of the weights in a step, beside those of its solve: two points, and what the next is made of."""


class _LinearModel(Point):
    """The objective −power · log p(y | f* + Jδ) + ½‖θ* + δ − m‖²_A at one δ."""

    def __init__(self, lins: Sequence[Linearization], prior: Prior, power: float, delta: Tensor) -> None:
        self.lins, self.power = lins, power
        self.prior, self.delta = prior, delta
        self.eps = torch.finfo(delta.dtype).eps
        self.parts = [DisplacedGGN.at(lin, lin.push(delta)) for lin in lins]
        of_data = power * reduce(add, (part.gradient() for part in self.parts))
        of_prior = prior.gradient(self.theta)
        scale = float(_norm(of_data) + _norm(of_prior))
        self.gradient = of_data.add_(of_prior)
        self.relative = float(_norm(self.gradient)) / scale if scale else 0.0

    @property
    def theta(self) -> Float[Tensor, " D"]:
        """The weights, made anew on each access."""
        return self.lins[0].theta + self.delta

    def precision(self) -> Any:
        """Return the loss's Hessian, or the GGN plus the prior if the likelihood's Fisher is not its Hessian."""
        total: LinearOperator = reduce(add, self.parts)
        return self.prior.plus(total if self.power == 1 else self.power * total).precision

    def log_likelihood(self, steps: Sequence[Tensor | float] = ()) -> float:
        given = steps or [0.0] * len(self.parts)
        return self.power * sum(float(part.log_likelihood(step)) for part, step in zip(self.parts, given))

    @cached_property
    def loss(self) -> float:
        """The loss at this point. One pass over the data."""
        return self._loss()

    @property
    def rounding(self) -> float:
        """The rounding of the loss: each log-likelihood is rounded in units of one, however small it is itself."""
        terms = sum(part.lin.num_data * part.lin.num_outputs for part in self.parts)
        return ROUNDINGS * self.eps * (abs(self.loss) + math.sqrt(terms))

    def slope(self, step: Tensor) -> float:
        return float(inner(self.gradient.unsqueeze(1), step.unsqueeze(1)))

    def losses(self, step: Tensor) -> Callable[[float], float]:
        pushes = [lin.push(step) for lin in self.lins]
        return lambda share: self._loss([share * each for each in pushes], share * step)

    def move(self, step: Tensor, share: float) -> _LinearModel:
        return _LinearModel(self.lins, self.prior, self.power, self.delta + share * step)

    def _loss(self, steps: Sequence[Tensor | float] = (), direction: Tensor | None = None) -> float:
        """Return the loss after a step whose product with J is already known."""
        theta = self.theta if direction is None else self.theta + direction
        return -self.log_likelihood(steps) + 0.5 * float(self.prior.quadratic(theta))


def _norm(vector: Float[Tensor, " D"]) -> Tensor:
    return norm(vector.unsqueeze(1))


@torch.no_grad()
def find_mode(
    terms: PrecisionTerms, start: Float[Tensor, " D"] | None, rtol: float = 1e-6, maxiter: int = 50
) -> LinearMode:
    """Find θ̄ from `start` (None: θ*), preconditioned by the posterior's own precision if that is known.

    If J Jᵀ is formed, Newton's method starts at the mode in function space, and its steps are solved there if memory
    has no room for CG. The current run saves the steps.
    """
    kept, cache, prior, theta = current(), terms.cache, terms.prior, terms.lin.theta
    lins = cache.known_data("the mode of the linear model")
    for lin in lins if kept else ():
        lin.memory.expect_many()  # one engine is used from the first product of the run to the last
    J = terms.lin.jacobian()
    beside = NEWTON_VECTORS * vector_bytes(describe(J))

    def counted() -> AbstractContextManager[None]:
        # Bits of a run that is saved must not depend on which engines are freed.
        return nullcontext() if kept else holding(J, beside)

    def at(delta: Tensor) -> _LinearModel:
        with counted():
            return _LinearModel(lins, prior, cache.power, delta)

    matvecs, steps = 2, 0
    if kept.state is not None:
        delta, steps, matvecs = (kept.state[name] for name in ("delta", "steps", "matvecs"))
    elif (kernel := solving_kernel(terms)) is not None:
        near, products = kernel.mode(float(prior.precision), prior.mean, 0.01 * rtol)
        delta, matvecs = near - theta, products + 2
        del near
    else:
        delta = torch.zeros_like(theta) if start is None else start - theta
    model = at(delta)
    del delta  # the model's own alone
    if kept.state is None:
        kept.save(lambda: {"delta": model.delta, "steps": 0, "matvecs": matvecs}, now=True)
    ours = is_psd(terms.curvature) and terms.closed_form is None
    few = None if kept or theta.nbytes * SOLVE_VECTORS <= terms.lin.memory_budget else solving_kernel(terms)
    sketch = None

    def step_at(model: _LinearModel, steps: int) -> Tensor:
        nonlocal matvecs, sketch
        if few is not None:
            matvecs += 3
            return few.newton_step(model.parts[0], float(prior.precision), model.gradient)
        precision = model.precision()
        # The first step for a Gaussian is its last, and is solved to the end; any other is solved as far as it pays.
        worth = 0.0 if all(isinstance(lin.likelihood, Gaussian) for lin in lins) else math.sqrt(model.relative)
        goal = min(0.1, max(0.1 * rtol / model.relative, worth))
        if not ours:
            M, spent = precision.preconditioner(1), 0
        else:
            if sketch is None or not kept:  # one for all steps of a run with a checkpoint
                with kept.name_part("preconditioner"):
                    sketch = _preconditioner(terms)
            M, spent = sketch
            spent = 0 if kept and steps else spent
        found = cg(precision, -model.gradient, preconditioner=M, rtol=goal)
        found.raise_if_failed(goal, REMEDIES)
        matvecs += found.matvecs + spent + 2
        return found.x

    def save(model: _LinearModel, steps: int) -> None:
        kept.save(lambda: {"delta": model.delta, "steps": steps, "matvecs": matvecs})

    with counted():
        model, reason, steps = minimise(model, step_at, rtol, maxiter, steps, save)
    log_likelihood = torch.tensor(model.log_likelihood(), dtype=torch.float64, device=theta.device)
    return LinearMode(model.theta, log_likelihood, model.relative, reason, steps, matvecs)


def _preconditioner(terms: PrecisionTerms) -> tuple[Any, int]:
    """Return M ≈ P⁻¹ at θ*, and the number of products it took."""
    if (kernel := solving_kernel(terms)) is not None:
        return kernel.inverse_of_weights(float(terms.prior.precision)), 0
    return preconditioner(terms, 1)


def problem_of_mode(terms: PrecisionTerms) -> dict[str, Any]:
    """Return by name what distinguishes this problem from others in a checkpoint."""
    total: LinearOperator = reduce(add, map(GGN, terms.cache.known_data("the mode of the linear model")))
    P, prior = terms.prior.plus(total).precision, terms.prior
    given = {"the prior's mean": digest([prior.mean]), "the power": terms.cache.power}
    return terms.lin.facts() | problem_of(P) | given


def linear_log_likelihood(cache: CurvatureCache, theta: Float[Tensor, " D"]) -> Float[Tensor, ""]:
    """Return the log-likelihood of the linear model at other weights, with its gradient in hyperparameters."""
    delta = theta - cache.lin.theta
    parts = [DisplacedGGN.at(lin, lin.push(delta)) for lin in cache.known_data("the log evidence")]
    return cache.power * torch.stack([part.log_likelihood() for part in parts]).sum()
