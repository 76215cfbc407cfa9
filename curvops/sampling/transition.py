"""The protocol of samplers: `init` makes a state, `update` takes a step with a batch; methods are interchangeable.

All steps have the same options: schedules of step size and temperature, and a preconditioner D, which enters as D g in
the drift, D^½ ξ in the noise and D⁻¹ m in kinetic energies.
"""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from curvops.argument_types import GivenBatch, Preconditioning, StepSizes
from curvops.checkpoint import digest
from curvops.checks import check_kind, check_like, check_options, check_shape, checked_number, checked_whole, refuse
from curvops.errors import DivergenceError
from curvops.linalg import Diagonal, Inverse, Operator
from curvops.linalg.core.matrix_identity import spaces_of
from curvops.linalg.core.vectors import is_psd
from curvops.linalg.operators.closed_form import Eigenbasis
from curvops.linalg.operators.draws import dense_eigenpairs, draw
from curvops.network import TangentSpace
from curvops.ranks.process_group import Ranks, Spread
from curvops.sampling.log_density import Evaluation, LogDensity, LogPosterior
from curvops.sampling.state import Info, NoiseSource, State, Structure, flatten, generator_states, times_rows
from curvops.summary import Summarised, summary

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
        TypeError, ValueError: gamma is of another kind or out of range.

    Examples:
        >>> schedule = co.sampling.RobbinsMonro(a=1e-2, b=10.0)
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> sampler = co.sampling.sgld(density, schedule)
    """

    a: float
    b: float = 1.0
    gamma: float = 0.55

    def __post_init__(self) -> None:
        checked_number("gamma", self.gamma, "(0.5, 1]")  # at ½ or below, the squared steps add up to ∞

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

    def __call__(self, step: int) -> float:
        share = (1 + math.cos(math.pi * (step % self.period) / self.period)) / 2
        return self.last + (self.first - self.last) * share


def as_schedule(name: str, value: Any, zero: bool = False) -> Schedule:
    """Return the schedule for a number, which is checked, or for a function of the step, whose values `at` checks."""
    if callable(value) and not isinstance(value, type):
        return value
    kind = "a number or a function of the step, such as RobbinsMonro(a)"
    return Constant(checked_number(name, value, "[0, inf)" if zero else "(0, inf)", kind))


def at(name: str, schedule: Schedule, step: int) -> float:
    """Return the schedule's value at a step, 0 or more; the value is checked unless the schedule is constant."""
    if isinstance(schedule, Constant):
        return schedule.value
    return checked_number(f"{name} at step {step}", schedule(step), "[0, inf)")


@dataclass(frozen=True, eq=False, repr=False)
class Isotropic(Summarised):
    """The metric D = scale · I, for vectors (d,) or (k, d)."""

    scale: float = 1.0

    def check(self, structure: Structure, theta: Tensor) -> None:
        """Raise ValueError unless D is a matrix (d, d) on these parameters."""

    def product(self, v: Float[Tensor, "*k d"]) -> Float[Tensor, "*k d"]:
        """Return D v; v itself if D is the identity."""
        return v if self.scale == 1 else v * self.scale

    def solve(self, v: Float[Tensor, "*k d"]) -> Float[Tensor, "*k d"]:
        """Return D⁻¹ v; v itself if D is the identity."""
        return v if self.scale == 1 else v / self.scale

    def noise(self, source: NoiseSource, like: Float[Tensor, "*k d"]) -> Float[Tensor, "*k d"]:
        """Draw D^½ ξ for standard normal ξ, in new memory."""
        drawn = source.normal(like)
        return drawn if self.scale == 1 else drawn.mul_(self.scale**0.5)

    def kick(self, target: Tensor, g: Float[Tensor, "*k d"], drift: float, spread: float, source: NoiseSource) -> None:
        """Add drift · D g + spread · D^½ ξ to target, in place; nothing is drawn if spread is 0."""
        target.add_(g, alpha=drift * self.scale)
        if spread:
            target.add_(source.normal(g), alpha=spread * self.scale**0.5)


@dataclass(frozen=True, eq=False, repr=False)
class OperatorMetric(Isotropic):
    """A metric D given by an operator, constant between two refreshes: terms with its derivative are not needed."""

    D: Operator = field(kw_only=True)

    def check(self, structure: Structure, theta: Tensor) -> None:
        kind, d = type(self.D).__name__, structure.size
        check_shape(f"preconditioner {kind}", self.D, (d, d))
        check_like(f"preconditioner {kind}", self.D, theta, "params")
        space = spaces_of(self.D)[0]
        if isinstance(space, TangentSpace) and space.index is None and structure.shapes != space.shapes:
            raise ValueError(f"preconditioner {kind} and params have the parameters in different orders.")

    @cached_property
    def _basis(self) -> Eigenbasis | None:
        """The eigenbasis of D, if its closed form has one: drift and noise then share one rotation back."""
        inverse = isinstance(self.D, Inverse)
        form = (self.D.base if inverse else self.D)._closed_form()
        basis = None if form is None else form.eigenbasis()
        if form is None or basis is None or not inverse:
            return basis
        form.require_definite()
        return replace(basis, values=basis.values.reciprocal())

    @cached_property
    def _root(self) -> Tensor:
        """The square roots of the eigenvalues."""
        assert self._basis is not None
        return self._basis.values.clamp_min(0).sqrt()

    @cached_property
    def _dense_root(self) -> Float[Tensor, "d d"]:
        """The symmetric root of D, whose draws do not depend on how rounding turns the eigenvectors."""
        values, vectors = dense_eigenpairs(self.D)
        return (vectors * values.sqrt()) @ vectors.mT

    def product(self, v: Float[Tensor, "*k d"]) -> Float[Tensor, "*k d"]:
        return times_rows(self.D, v)

    def solve(self, v: Float[Tensor, "*k d"]) -> Float[Tensor, "*k d"]:
        return times_rows(self.D.inverse(), v)

    def noise(self, source: NoiseSource, like: Float[Tensor, "*k d"]) -> Float[Tensor, "*k d"]:
        if self._basis is None:
            if self.D._is_formed:
                return source.normal(like) @ self._dense_root
            return source.per_chain(lambda generator: draw(self.D, 1, generator).squeeze(-1))
        rows = torch.atleast_2d(source.normal(like)) * self._root
        return self._basis.rotate(rows.mT).mT.reshape(like.shape)

    def kick(self, target: Tensor, g: Float[Tensor, "*k d"], drift: float, spread: float, source: NoiseSource) -> None:
        basis = self._basis
        if basis is None:
            target.add_(self.product(g), alpha=drift)
            if spread:
                target.add_(self.noise(source, g), alpha=spread)
            return
        rotated = basis.rotate_back(g.reshape(-1, g.shape[-1]).mT).mT.mul(basis.values).mul_(drift)
        if spread:
            rotated.addcmul_(source.normal(g).reshape(rotated.shape), self._root, value=spread)
        target.add_(basis.rotate(rotated.mT).mT.reshape(g.shape))


def as_metric(D: Any, name: str = "preconditioner") -> Isotropic:
    """Return the metric for None, a number, a vector (d,) or an operator known to be positive semidefinite."""
    if D is None:
        return Isotropic()
    if isinstance(D, numbers.Real) and not isinstance(D, bool):
        return Isotropic(checked_number(name, D))
    if isinstance(D, Tensor) and D.ndim == 1:
        D = Diagonal(D.detach().clone())
    check_kind(name, D, Operator, "a number, a vector or an operator, such as co.linalg.Dense(matrix, psd=True)")
    refuse(not is_psd(D), f"{name} must be positive semidefinite: pass co.linalg.Dense(matrix, psd=True).")
    return OperatorMetric(D=D)


AnyTransition = TypeVar("AnyTransition", bound="Transition")


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Transition(Summarised, ABC):
    """A sampler or an optimiser: everything that a step needs besides the state and the batch; immutable.

    The temperature τ enters as 𝒯 = τ/N, since `log_posterior` is a mean over the N = `data_size` points: τ = 1 is the
    posterior, τ = 0 the optimiser. chains: the number of chains, None for a state without a leading dimension. spread:
    which of them this rank has, if ranks share them.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> sampler = co.sampling.sgld(density, 1e-3)
        >>> state, info = sampler.update(sampler.init(density.params, torch.Generator().manual_seed(0)), (x, y))
        >>> int(state.step)
        1
    """

    density: Evaluation
    step_size: Schedule
    temperature: Schedule
    data_size: int
    metric: Isotropic = field(default_factory=Isotropic)
    chains: int | None = None
    spread: Spread | None = None

    @property
    def log_posterior(self) -> LogDensity:
        """The function (params, batch) -> mean log-likelihood + log prior / N."""
        return self.density.log_posterior

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that make the same calls: those that share the chains, or the data of `log_posterior`."""
        return getattr(self.log_posterior, "ranks", None) if self.spread is None else self.spread.ranks

    # The protocol

    @torch.inference_mode(False)
    @torch.no_grad()
    def init(self, params: Any, generator: torch.Generator | None = None) -> Any:
        """Return a state at these parameters, which are copied.

        Args:
            params: a tree (dict, tuple, …) of floating-point tensors of one dtype and device, such as
                `dict(model.named_parameters())` or `log_posterior.params`. All chains start there; a list of such trees
                has a start for each chain.
            generator: the source of the seeds of the state's own generators, one for each chain; None uses torch's
                default generator. Initial momenta are drawn from it, too.

        Returns:
            The state.

        Raises:
            TypeError, ValueError: params have another form, are integer, in half precision or not finite, or do not
                fit the preconditioner.
        """
        check_options(generator=generator)
        trees, k = [params], self.chains
        if k is not None and isinstance(params, list):
            trees = params
            refuse(len(trees) != k, f"{len(trees)} starts for {k} chains: pass params that are a list as a tuple.")
        if isinstance(self.log_posterior, LogPosterior):
            trees = [self.log_posterior.ordered(tree) for tree in trees]
        theta, structure = flatten(trees)
        self.metric.check(structure, theta)
        random = generator_states(generator, theta.device, self.chains)
        if self.ranks is not None:
            starts = {"the params to start from": digest([theta])}
            self.ranks.require_equal(starts | {"the chains' seeds, from generator": digest([random])})
        theta = theta[0] if k is None else theta.expand(k, -1).clone()
        if self.spread is not None:
            theta, random = theta[self.spread.indices].clone(), random[self.spread.indices].clone()
        state = State(theta, torch.zeros((), dtype=torch.int64), random, structure)
        noise = NoiseSource(random, theta.device)
        further = self._initial_tensors(state, noise)
        noise.keep()
        return self.state_type(**vars(state), **further)

    @torch.inference_mode(False)
    @torch.no_grad()
    def update(self, state: Any, batch: GivenBatch = None, inplace: bool = False) -> tuple[Any, Info]:
        """Take one step from this state with this batch.

        Args:
            state: the result of `init` or an earlier `update` of the same kind of sampler.
            batch: the batch passed to `log_posterior`.
            inplace: write into the tensors of `state`, and return it, instead of copying. The numbers are the same.

        Returns:
            The next state, and information about the step.

        Raises:
            DivergenceError: the log posterior is not finite; the message suggests a step size. On an accelerator the
                check happens every 20 steps.
            TypeError, RuntimeError: the log posterior is not one number per chain, or does not depend on the
                parameters.
        """
        if not isinstance(state, self.state_type):
            kind = self.state_type.__name__
            raise TypeError(f"state must be a {kind}: make it with init(state.params), got {type(state).__name__}.")
        if (state.theta.ndim == 1) != (self.chains is None):
            raise ValueError("the state has chains, or none: make it with init of this sampler.")
        new = state if inplace else state.clone()
        noise = NoiseSource(new.random, new.theta.device)
        info = self._step(new, batch, noise)
        new.step.add_(1)
        noise.keep()
        return new, info

    def with_preconditioner(self: AnyTransition, preconditioner: Preconditioning) -> AnyTransition:
        """Return this sampler with another D, such as one of more recent curvature; states stay valid."""
        return replace(self, metric=as_metric(preconditioner))

    def with_step_size(self: AnyTransition, step_size: StepSizes) -> AnyTransition:
        """Return this sampler with another step size or schedule; states stay valid."""
        return replace(self, step_size=as_schedule("step_size", step_size))

    # Defined by each method

    state_type: ClassVar[type[State]] = State
    metropolis: ClassVar[bool] = False
    """Whether proposals are accepted or rejected."""
    alone: ClassVar[str] = ""
    """The error message for chains, of methods that have none."""
    cold: ClassVar[str] = ""
    """The error message at temperature 0, for methods that need a positive temperature."""
    largest_step: ClassVar[float] = math.inf
    check_every: ClassVar[int] = 20
    """The number of steps between two checks of the numbers, each of which waits for an accelerator."""

    def step_length(self, step: int) -> tuple[str, float]:
        """Return the name of the option that sets the step size, and its value."""
        return "step_size", self.step_size(step)

    def stability_limit(self, curvature: float) -> float | None:
        """Return the largest stable ε at this curvature (of D^½ H D^½); None if no limit is known."""
        return None

    def _initial_tensors(self, state: State, noise: NoiseSource) -> dict[str, Any]:
        """Return the tensors, by field, that the method's states keep in addition to the parameters."""
        return {}

    @abstractmethod
    def _step(self, state: Any, batch: Any, noise: NoiseSource) -> Info:
        """Take a step in place; the state may be written to only once the gradient is known to be finite."""

    # Shared by all methods

    def _now(self, state: State) -> tuple[float, float]:
        """Return ε and 𝒯 at this step."""
        step = int(state.step)
        temperature = at("temperature", self.temperature, step)
        if self.cold and temperature == 0:
            raise ValueError(self.cold)
        return at("step_size", self.step_size, step), temperature / self.data_size

    def _gradient(self, state: State, batch: Any) -> tuple[Float[Tensor, "*k"], Float[Tensor, "*k d"]]:
        """Return log_posterior and its gradient at the state; raise an error if they are not finite."""
        value, gradient = self.density.gradient(state.theta, state.structure, batch)
        step = int(state.step)
        if (state.theta.device.type == "cpu" or step % self.check_every == 0) and not bool(value.isfinite().all()):
            raise self._not_finite(value, step)
        return value, gradient

    def _not_finite(self, value: Tensor, step: int) -> Exception:
        bad = (~value.isfinite()).nonzero().flatten().tolist()
        what = "NaN or Inf" + (f" in {len(bad)} of {len(value)} chains ({summary(bad)})" if value.ndim else "")
        if step == 0:
            return ValueError(
                f"log_posterior is {what} at the initial params: start where it is finite, and check the batch."
            )
        name, epsilon = self.step_length(step)
        return DivergenceError(
            f"log_posterior is {what} at step {step} with {name}={epsilon:g}: this batch holds NaN or Inf, or the step "
            f"is beyond stability; try {name}={epsilon / 4:.2g}."
        )


INTERVALS = {"beta": "[0, inf)", "transition_noise": "[0, inf)", "refreshment": "(0, 1]"}
"""Where the numbers among a method's own options lie; all others are positive."""


def common_arguments(
    log_posterior: Any, step_size: Any, temperature: Any, data_size: Any, preconditioner: Any, **options: Any
) -> dict[str, Any]:
    """Check the arguments shared by all methods and the numbers among a method's own, and return their fields."""
    own_size = getattr(log_posterior, "data_size", None)
    if not callable(log_posterior) or (isinstance(log_posterior, nn.Module) and data_size is None and own_size is None):
        raise TypeError(
            f"log_posterior must be a function (params, batch) -> number, got {type(log_posterior).__name__}. Pass "
            "co.sampling.log_posterior(lin), or log_posterior(model, likelihood, data_size=N)."
        )
    if data_size is None and own_size is None:
        raise ValueError(
            "data_size is missing: log_posterior is a mean over N points, and temperature 1 is the posterior only "
            "if N is known. Pass data_size=N (1 for a density that is not a mean over data), or build log_posterior "
            "with co.sampling.log_posterior(...), which carries it."
        )
    size = checked_whole("data_size", own_size if data_size is None else data_size, kind="a whole number of points")
    if own_size is not None and size != own_size:
        raise ValueError(f"data_size={data_size}, but log_posterior was built for {own_size} points: leave it out.")
    return {
        "density": Evaluation(log_posterior),
        "step_size": as_schedule("step_size", step_size),
        "temperature": as_schedule("temperature", temperature, zero=True),
        "data_size": size,
        "metric": as_metric(preconditioner),
        **{name: checked_number(name, value, INTERVALS.get(name, "(0, inf)")) for name, value in options.items()},
    }


def checked_rank(rank: Any, form: str) -> int:
    """Return the rank of the form "low_rank_diagonal", by default 10; raise ValueError for one of another form."""
    if form != "low_rank_diagonal" and rank is not None:
        raise ValueError(f"rank={rank!r} is for 'low_rank_diagonal'; {form!r} has no rank: leave it out.")
    return 10 if rank is None else checked_whole("rank", rank, 1)
