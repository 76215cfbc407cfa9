"""The protocol of samplers: `init` makes a state, `update` takes a step with a batch; methods are interchangeable.

A sampler evaluates `log_posterior` and its gradient at the vectors of a state: one point, or k points together or one
by one (`Evaluation`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from curvops.argument_types import GivenBatch, Preconditioning, StepSizes
from curvops.checkpoint import digest
from curvops.checks import check_generator, checked_whole
from curvops.errors import DivergenceError, NotVectorizedWarning, warn
from curvops.ranks.process_group import Ranks
from curvops.ranks.spread_chains import Spread
from curvops.sampling.log_density import LogPosterior
from curvops.sampling.state import Info, NoiseSource, State, Structure, flatten, flatten_starts, generator_states
from curvops.sampling.step_options import Constant, Isotropic, Schedule, as_metric, as_schedule, at
from curvops.summary import Summarised, summary

LogDensity = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """A log posterior at one point or at k points: together (`torch.vmap`), one by one, or (None) as possible."""

    log_posterior: LogDensity
    vectorized: bool | None = None
    _together: list[bool] = field(default_factory=lambda: [True], repr=False)

    def __repr__(self) -> str:
        return summary(self.log_posterior)

    def value(self, theta: Float[Tensor, "*k d"], structure: Structure, batch: Any) -> Float[Tensor, "*k"]:
        """Return the value of log_posterior."""
        if theta.ndim > 1 and not self._together[0]:
            return torch.stack([self.value(row, structure, batch) for row in theta])
        f, at_one, parts = self.log_posterior, partial(self._at_one, structure, batch), structure.parts(theta)
        try:
            with torch.no_grad():
                value: Tensor = at_one(*parts) if theta.ndim == 1 else torch.vmap(at_one)(*parts)
        except (RuntimeError, NotImplementedError) as error:
            self._fall_back(error, theta)
            return self.value(theta, structure, batch)
        return f.completed(value, None, theta)[0] if isinstance(f, LogPosterior) else value

    def gradient(
        self, theta: Float[Tensor, "*k d"], structure: Structure, batch: Any
    ) -> tuple[Float[Tensor, "*k"], Float[Tensor, "*k d"]]:
        """Return log_posterior and its gradient, each in new memory."""
        if theta.ndim > 1 and not self._together[0]:
            values, gradients = zip(*[self.gradient(row, structure, batch) for row in theta])
            return torch.stack(values), torch.stack(gradients)
        f, at_one, leaves = self.log_posterior, partial(self._at_one, structure, batch), structure.parts(theta.detach())
        for leaf in leaves:
            leaf.requires_grad_()
        of_network = isinstance(f, LogPosterior)  # its prior depends on all parameters
        try:
            with torch.enable_grad():
                value = at_one(*leaves) if theta.ndim == 1 else torch.vmap(at_one)(*leaves)
            if value.requires_grad:
                ones = torch.ones_like(value)
                slopes = torch.autograd.grad(value, leaves, ones, allow_unused=True, materialize_grads=of_network)
            elif of_network:
                slopes = tuple(map(torch.zeros_like, leaves))
            else:
                raise ValueError(
                    "log_posterior has no gradient in params: compute it from the params that it receives."
                )
        except (RuntimeError, NotImplementedError) as error:
            self._fall_back(error, theta)
            return self.gradient(theta, structure, batch)
        if any(slope is None for slope in slopes):
            missing = ", ".join(name for name, slope in zip(structure.names, slopes) if slope is None)
            raise ValueError(f"log_posterior does not depend on {missing}: leave them out of params.")
        value, gradient = value.detach(), structure.concatenate(slopes, theta.ndim - 1)
        return f.completed(value, gradient, theta) if isinstance(f, LogPosterior) else (value, gradient)

    def _fall_back(self, error: Exception, theta: Tensor) -> None:
        """Evaluate k points one by one from now on; raise the error if that is no remedy."""
        if theta.ndim == 1 or isinstance(error, torch.OutOfMemoryError):
            raise error
        if "running_mean" in str(error):
            raise ValueError("the model normalises by batch statistics in train mode: call model.eval().") from error
        if self.vectorized:
            raise ValueError(f"vectorized=True, but torch.vmap cannot run log_posterior: {error}") from error
        warn(
            f"torch.vmap cannot run log_posterior, so the chains are computed one by one, with the same draws: {error} "
            "To choose this from the start, pass chains(..., vectorized=False).",
            NotVectorizedWarning,
        )
        self._together[:] = [False]

    def _at_one(self, structure: Structure, batch: Any, *parts: Tensor) -> Tensor:
        """Return what is differentiated at one point; raise TypeError unless it is one real number."""
        f = self.log_posterior.differentiated if isinstance(self.log_posterior, LogPosterior) else self.log_posterior
        value = f(pytree.tree_unflatten(parts, structure.spec), batch)
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim:
            kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"log_posterior must return one real number (), the mean log-likelihood of the batch + log prior / N, "
                f"got {kind}: take the mean over the batch."
            )
        return value


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

    def __post_init__(self) -> None:
        if self.cold and self.temperature == Constant(0.0):
            raise ValueError(self.cold)

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
            TypeError, ValueError: params have another form, are integer or not finite, or do not fit the
                preconditioner.
        """
        check_generator(generator)
        if isinstance(self.log_posterior, LogPosterior):
            listed = isinstance(params, list)
            params = [self.log_posterior.ordered(start) for start in (params if listed else [params])]
            params = params if listed else params[0]
        if self.chains is not None and isinstance(params, list):
            theta, structure = flatten_starts(params, self.chains)
        else:
            theta, structure = flatten(params)
        self.metric.check(structure, theta)
        random = generator_states(generator, theta.device, self.chains)
        if self.ranks is not None:
            starts = {"the params to start from": digest([theta])}
            self.ranks.require_equal(starts | {"the chains' seeds, from generator": digest([random])})
        if self.chains is not None:
            theta = theta.expand(self.chains, -1).clone()
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
            TypeError, ValueError: the state belongs to another sampler, or the log posterior is not one number per
                chain or does not depend on the parameters.
        """
        self._check_state(state)
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
        what = "NaN or Inf" if value.ndim == 0 else f"NaN or Inf in {_named_chains(~value.isfinite())}"
        if step == 0:
            return ValueError(
                f"log_posterior is {what} at the initial params: start where it is finite, and check the batch."
            )
        name, epsilon = self.step_length(step)
        measured = " (co.sampling.run measures the curvature and names the limit.)"
        return DivergenceError(
            f"log_posterior is {what} at step {step} with {name}={epsilon:g}, which is probably beyond stability; "
            f"try {name}={epsilon / 4:.2g}.{'' if self.stability_limit(1.0) is None else measured}"
        )

    def _check_state(self, state: Any) -> None:
        kind, actual = self.state_type, type(state)
        if not isinstance(state, kind):
            raise TypeError(f"state must be a {kind.__name__}, from init of this sampler, got {actual.__name__}.")
        chains = self.chains if self.spread is None else self.spread.count
        if state.theta.shape[:-1] != (() if chains is None else (chains,)):
            got = tuple(state.theta.shape[:-1])
            raise ValueError(f"the state has chains {got}, not {chains}: make it with init of this sampler.")


def _named_chains(bad: Tensor) -> str:
    """Count and name chains, at most five of them by number."""
    which = bad.nonzero().flatten().tolist()
    names = ", ".join(map(str, which[:5])) + (", …" if len(which) > 5 else "")
    return f"{len(which)} of {len(bad)} chains ({names})"


def common_arguments(
    log_posterior: Any, step_size: Any, temperature: Any, data_size: Any, preconditioner: Any
) -> dict[str, Any]:
    """Check the arguments shared by all samplers, and return their fields."""
    if not callable(log_posterior):
        hint = " Pass co.sampling.log_posterior(lin)." if hasattr(log_posterior, "log_likelihood") else ""
        raise TypeError(
            "log_posterior must be a function (params, batch) -> number, or co.sampling.log_posterior(...), got "
            f"{type(log_posterior).__name__}.{hint}"
        )
    own_size = getattr(log_posterior, "data_size", None)
    if data_size is None and own_size is None and isinstance(log_posterior, nn.Module):
        raise TypeError(
            f"log_posterior is a module, {type(log_posterior).__name__}: pass co.sampling.log_posterior(model, "
            "likelihood, data_size=N)."
        )
    if data_size is None and own_size is None:
        raise ValueError(
            "data_size is missing: log_posterior is a mean over N points, and temperature 1 is the posterior only "
            "if N is known. Pass data_size=N (1 for a density that is not a mean over data), or build log_posterior "
            "with co.sampling.log_posterior(...), which carries it."
        )
    if data_size is None:
        data_size = own_size
    size = checked_whole("data_size", data_size, kind="a whole number of points")
    if own_size is not None and data_size != own_size:
        raise ValueError(f"data_size={data_size}, but log_posterior was built for {own_size} points: leave it out.")
    return {
        "density": Evaluation(log_posterior),
        "step_size": as_schedule("step_size", step_size),
        "temperature": as_schedule("temperature", temperature, zero=True),
        "data_size": size,
        "metric": as_metric(preconditioner),
    }
