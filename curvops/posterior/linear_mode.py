"""The mode of the linear model f* + J(θ − θ*) under the likelihood and the prior, by Newton–CG.

Antorán et al. 2022: the weights of a network are seldom a mode of its linear model (early stopping, normalisation
layers), and the evidence of that model belongs to its own mode.

In function space (`dual_mode`) the mode of the outputs is f = f₀ + K u, and the weights' m + A⁻¹Jᵀu, where u is the
gradient of log p(y | f): as many numbers as there are outputs. A Newton step is −(I + HK)⁻¹(u + r), r = −∇ log p: by
Woodbury's identity −(u + r) + L (I + LᵀKL)⁻¹ LᵀK (u + r), which takes no inverse of K or of H, and no jitter
(algorithms 3.1 and 3.3 of Rasmussen & Williams 2006, for any likelihood with a root of its output Fisher). The last
steps take the outputs at the weights themselves and correct their rounding.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.ambient import as_step
from curvops.checkpoint import current, digest
from curvops.errors import ModeWarning, warn
from curvops.linalg import Reason, cg
from curvops.linalg.core.algorithm import PRODUCT_VECTORS, holding
from curvops.linalg.core.matrix_identity import problem_of
from curvops.linalg.core.results import ACCEPTED
from curvops.linalg.core.vectors import ROUNDINGS, describe, inner, norm
from curvops.network.likelihoods import Gaussian
from curvops.operators import Linearization
from curvops.operators.curvatures.ggn import DisplacedGGN
from curvops.operators.function_space.function_space import FunctionSpace
from curvops.posterior.precision import REMEDIES, kernel_of_mode, preconditioner
from curvops.posterior.terms import CurvatureCache, PrecisionTerms, Prior
from curvops.summary import Summarised


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
    def along(self, step: Tensor) -> tuple[float, Callable[[float], float]]:
        """Return the loss's derivative along a step, and a function that returns the loss after a fraction of it."""

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
    while not point.relative <= rtol:
        if steps == most_steps or not math.isfinite(point.relative):
            return point, Reason.ITERATION_LIMIT if steps == most_steps else Reason.NON_FINITE, steps
        step = step_at(point, steps)
        steps += 1
        (slope, losses), share = point.along(step), 1.0
        # The decrease that a Newton step predicts can still be gained, unless it is less than the loss's rounding.
        promised = -0.5 * slope
        for _ in range(30):
            if losses(share) <= point.loss + 1e-4 * share * slope + point.rounding:  # a sufficient decrease (Armijo)
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


BESIDE = PRODUCT_VECTORS + 2
"""The number of vectors of the size of the weights that finding a mode takes: a product's, θ and θ − θ*."""


class _LinearModel(Point):
    """The objective −power · log p(y | f* + Jδ) + ½‖θ* + δ − m‖²_A at one δ."""

    def __init__(self, lins: Sequence[Linearization], prior: Prior, power: float, delta: Tensor) -> None:
        self.lins, self.power = lins, power
        self.prior, self.delta = prior, delta
        self.eps = torch.finfo(delta.dtype).eps
        self.parts = [DisplacedGGN.at(lin, lin.push(delta)) for lin in lins]
        of_data = power * reduce(add, (displaced.gradient() for displaced in self.parts))
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
        shifts = steps or [0.0] * len(self.parts)
        return self.power * sum(float(displaced.log_likelihood(step)) for displaced, step in zip(self.parts, shifts))

    @cached_property
    def loss(self) -> float:
        """The loss at this point. One pass over the data."""
        return self._loss()

    @property
    def rounding(self) -> float:
        """The rounding of the loss: each log-likelihood is rounded in units of one, however small it is itself."""
        terms = sum(displaced.lin.num_data * displaced.lin.num_outputs for displaced in self.parts)
        return ROUNDINGS * self.eps * (abs(self.loss) + math.sqrt(terms))

    def along(self, step: Tensor) -> tuple[float, Callable[[float], float]]:
        pushes = [lin.push(step) for lin in self.lins]
        slope = float(inner(self.gradient.unsqueeze(1), step.unsqueeze(1)))
        return slope, lambda share: self._loss([share * push for push in pushes], share * step)

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

    If J Jᵀ is formed, the mode is found in function space, unless rounding keeps it from there. The current run saves
    the steps.
    """
    saved, cache, prior, theta = current(), terms.cache, terms.prior, terms.lin.theta
    lins = cache.known_data("the mode of the linear model")
    J, kernel = terms.lin.jacobian(), kernel_of_mode(terms)
    beside = 8 * describe(J).vector_bytes  # two points, and what the next is made of

    def counted() -> AbstractContextManager[None]:
        # Bits of a run that is saved must not depend on which engines are freed.
        return nullcontext() if saved else holding(J, beside)

    def at(delta: Tensor) -> _LinearModel:
        with counted():
            return _LinearModel(lins, prior, cache.power, delta)

    matvecs, steps, is_mode = 2, 0, False
    if saved.state is not None:
        delta, steps, matvecs, is_mode = (saved.state[name] for name in ("delta", "steps", "matvecs", "is_mode"))
    elif kernel is not None:
        near = dual_mode(kernel, float(prior.precision), prior.mean, 0.01 * rtol, most_steps=50)
        delta, matvecs, is_mode = near.theta - theta, near.matvecs + 3, near.reason in ACCEPTED
        del near
    else:
        delta = torch.zeros_like(theta) if start is None else start - theta
    model = at(delta)
    del delta  # the model's own alone
    if saved.state is None:
        saved.save(lambda: {"delta": model.delta, "steps": 0, "matvecs": matvecs, "is_mode": is_mode}, now=True)

    def sketched() -> tuple[Any, int]:
        """Return M ≈ P⁻¹ at θ*, and the number of products it took."""
        with saved.name_part("preconditioner"):
            return preconditioner(terms.of_mode, 1)

    # A run that goes on has its first step's sketch even where no step is left, since what comes next uses it, too.
    M = sketched()[0] if saved and steps else None

    def step_at(model: _LinearModel, steps: int) -> Tensor:
        nonlocal matvecs, M
        # The first step for a Gaussian is its last, and is solved to the end; any other is solved as far as it pays.
        worth = 0.0 if all(isinstance(lin.likelihood, Gaussian) for lin in lins) else math.sqrt(model.relative)
        goal = min(0.1, max(0.1 * rtol / model.relative, worth))
        if M is None:
            M, spent = sketched()
            matvecs += spent
        solution = cg(model.precision(), -model.gradient, preconditioner=M, rtol=goal)
        if not bool(solution.x.any()):  # rounding may end a solve early: a step as far as it came leads to the next one
            solution.raise_if_failed(goal, REMEDIES)
        matvecs += solution.matvecs + 2
        return solution.x

    def save(model: _LinearModel, steps: int) -> None:
        saved.save(lambda: {"delta": model.delta, "steps": steps, "matvecs": matvecs, "is_mode": False})

    if is_mode:  # what its own gradient lacks is rounding
        reason = Reason.CONVERGED if model.relative <= rtol else Reason.PRECISION_LIMIT
    else:
        with counted():
            model, reason, steps = minimise(model, step_at, rtol, maxiter, steps, save)
    log_likelihood = torch.tensor(model.log_likelihood(), dtype=torch.float64, device=theta.device)
    return LinearMode(model.theta, log_likelihood, model.relative, reason, steps, matvecs)


@dataclass(frozen=True, eq=False)
class DualMode:
    """The mode f₀ + K u of the outputs."""

    u: Float[Tensor, " NC"]
    theta: Float[Tensor, " D"]
    """The weights m + A⁻¹Jᵀu."""
    outputs: Float[Tensor, "N C"]
    log_likelihood: Tensor
    gradient: float
    """The relative gradient ‖u + r‖ / ‖r‖."""
    reason: Reason
    steps: int
    matvecs: int
    """The number of products with J A⁻¹ Jᵀ by passes over the data."""


@torch.no_grad()
def dual_mode(space: FunctionSpace, prior: float, mean: Tensor, rtol: float, most_steps: int) -> DualMode:
    """Find the mode by Newton's method with a line search, from u = 0.

    The gradient at the weights m + A⁻¹Jᵀu is Jᵀ(u + r). The outputs of K are used first. Then those of J at the weights
    themselves, whose rounding further steps correct until u + r stops shrinking.

    Cost: a factorisation per step (one for all if the likelihood is Gaussian), and a product with J for each of the
    last steps.
    """
    lin, J = space.lin, space.lin.jacobian()
    mean, precision = mean.expand_as(lin.theta), (space.metric * prior).to(lin.theta)

    def product(v: Float[Tensor, " NC"]) -> Float[Tensor, " NC"]:
        return space.kernel @ v / prior

    def step_of_weights(v: Float[Tensor, " NC"]) -> Float[Tensor, " D"]:
        return J._t_matmul(v.to(J.theta).unsqueeze(1)).squeeze(1) / precision

    L = factor = mean.new_empty(0)

    def step_at(point: DualPoint, steps: int) -> Tensor:
        nonlocal L, factor
        root = space.root(point.outputs)
        if not torch.equal(root, L):  # a Gaussian's is the same at all outputs
            L, factor = root, root.new_empty(0)  # the last factor is freed first
            factor = space.factor(root, prior)
        image = torch.einsum("ncr,nc->nr", L, product(point.gap).view_as(point.outputs)).reshape(-1, 1)
        solved = torch.cholesky_solve(image, factor).view(len(L), -1)
        return torch.einsum("ncr,nr->nc", L, solved).flatten() - point.gap

    with holding(J, BESIDE * describe(J).vector_bytes):
        start = space.outputs_at(mean)
        zero = start.new_zeros(start.numel())
        point, reason, steps = minimise(DualPoint(space, product, start, zero, zero), step_at, rtol, most_steps)
        u, relative, matvecs = point.u, math.inf, 0
        theta = mean + step_of_weights(u)
        while reason in ACCEPTED:
            image, before = (as_step(1, space.outputs_at, theta) - start).flatten(), relative
            point, matvecs = DualPoint(space, product, start, u, image), matvecs + 1
            relative = point.relative
            if relative <= rtol:
                break
            if not relative <= 0.5 * before:  # what is left is rounding, if it is small
                reason = Reason.PRECISION_LIMIT if relative < 0.01 else Reason.STAGNATION
                break
            step = step_at(point, steps)
            u, theta, steps = u + step, theta + step_of_weights(step), steps + 1
    return DualMode(u, theta, point.outputs, -point.misfit, point.relative, reason, steps, matvecs)


class DualPoint(Point):
    """−log p(y | f₀ + K u) + ½ uᵀK u at one u, with its gradient u + r in the metric of K."""

    def __init__(
        self,
        space: FunctionSpace,
        product: Callable[[Tensor], Tensor],
        start: Float[Tensor, "N C"],
        u: Float[Tensor, " NC"],
        image: Float[Tensor, " NC"],
    ) -> None:
        self._given, self.u, self._image = (space, product, start), u, image
        self.outputs = start + self._image.view_as(start)
        self.misfit, residual = space.loss(self.outputs)
        self.gap, self.eps = u + residual, torch.finfo(u.dtype).eps
        self._value = float(self.misfit + 0.5 * u @ self._image)
        self._tried: dict[float, DualPoint] = {}
        scale = float(residual.norm())
        self.relative = float(self.gap.norm()) / scale if scale else math.inf if bool(self.gap.any()) else 0.0

    @property
    def loss(self) -> float:
        return self._value

    def along(self, step: Tensor) -> tuple[float, Callable[[float], float]]:
        moved = self._given[1](step)  # K times the step

        def after(share: float) -> float:
            self._tried = {share: DualPoint(*self._given, self.u + share * step, self._image + share * moved)}
            return self._tried[share].loss

        return float(self.gap @ moved), after

    def move(self, step: Tensor, share: float) -> DualPoint:
        return self._tried[share]


def problem_of_mode(terms: PrecisionTerms) -> dict[str, Any]:
    """Return by name what distinguishes this problem from others in a checkpoint."""
    P, prior = terms.prior.plus(terms.cache.ggn()).precision, terms.prior
    facts = {"the prior's mean": digest([prior.mean]), "the power": terms.cache.power}
    return terms.lin.identified_by | problem_of(P) | facts


def linear_log_likelihood(cache: CurvatureCache, theta: Float[Tensor, " D"]) -> Float[Tensor, ""]:
    """Return the log-likelihood of the linear model at other weights, with its gradient in hyperparameters.

    Raises ValueError if a tensor inside a likelihood's function requires a gradient, which the curvature lacks.
    """
    delta = theta - cache.lin.theta
    parts = [DisplacedGGN.at(lin, lin.push(delta)) for lin in cache.known_data("the log evidence")]
    total = torch.stack([displaced.log_likelihood() for displaced in parts]).sum()
    if total.requires_grad and not any(tensor.requires_grad for _, tensor in cache.hyperparameters):
        raise ValueError(
            f"the log evidence has no gradient for the tensors inside {cache.lin.likelihood!r}, one of which requires "
            "one: detach it, or use torch.no_grad()."
        )
    return cache.power * total


TOLERATED = 1.0
"""Nats by which an evidence may be too low before there is a warning: a factor e in the probability of the data."""


@torch.no_grad()
def nats_below_mode(terms: PrecisionTerms, enough: float) -> tuple[float, float]:
    """Return bounds of ½ gᵀP⁻¹g, the gain of the log posterior's quadratic model from θ* to its mode; NaN without data.

    Costs a gradient, and a solve unless the prior alone bounds the result by `enough`. Conjugate gradients approach it
    from below, and what their residual r leaves is at most ½ rᵀA⁻¹r, since P is A plus a curvature. Under a prior
    that is an operator the upper bound is an estimate.
    """
    of_data, A = terms.cache.gradient(), terms.A
    if of_data is None:
        return math.nan, math.nan
    gradient = of_data + terms.prior.gradient(terms.lin.theta)
    bound = nats_of_prior(terms.prior, gradient)
    if bound <= enough:
        return 0.0, bound
    rtol = 1e-3 if A is None else min(0.1, math.sqrt(0.1 * enough / bound))
    M = None if terms.closed_form is None else terms.precision.preconditioner(1)
    solution = cg(terms.precision, gradient, preconditioner=M, rtol=rtol, maxiter=1000)
    lower = 0.5 * float(inner(gradient.unsqueeze(1), solution.x.unsqueeze(1)))
    if A is None:
        return lower, lower
    residual = solution.relative_residuals.to(gradient.device) * norm(gradient.unsqueeze(1))
    return lower, min(bound, lower + 0.5 * float((residual.square() / A.min()).sum()))


def nats_of_prior(prior: Prior, gradient: Float[Tensor, " D"]) -> float:
    """Return ½ gᵀA⁻¹g, an upper bound of the nats to the mode; ∞ for a prior that is an operator."""
    A = prior.diagonal
    return math.inf if A is None else 0.5 * float((gradient.double().square() / A.detach().double()).sum())


def in_words(nats: float) -> str:
    """Return a number of nats with two digits, and no exponent."""
    return f"{nats:.1f}" if nats < 10 else f"{nats:,.0f}"


def warn_of_mode(post: Any) -> None:
    """Warn once for a linearisation and a curvature if the evidence at these weights is too low by `TOLERATED`."""
    if not post.cache.checks_mode or not (nats := nats_below_mode(post.terms, TOLERATED)[0]) > TOLERATED:
        return
    post.cache.checks_mode = False
    warn(
        f"the log evidence is about {in_words(nats)} nats too low, because the weights are not a mode of the posterior "
        "under this prior: training under another prior or with AdamW, early stopping and the kinks of a ReLU leave "
        "them elsewhere. A prior chosen by it may harm predictions. Either train on to a mode under this prior, "
        "co.fit_mode(model, data, likelihood, prior_precision); or take the evidence at the mode of the linearised "
        'network, mode="linear"; or choose the prior by held-out data, co.evidence.validate.',
        ModeWarning,
    )
