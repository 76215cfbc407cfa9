"""States of samplers with their sources of noise, and the information that a step returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from curvops.sampling.core.structure import Structure
from curvops.summary import Summarised

AnyState = TypeVar("AnyState", bound="State")


@dataclass(frozen=True, eq=False, repr=False)
class State(Summarised):
    """The state of one chain, or of k chains; two states share no tensor, unless a step was made in place.

    theta: the parameters as one vector, (d,) or (k, d). step: the number of updates so far, on the CPU. random: the
    state of the generator of each chain's noise.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> state = co.sampling.sgld(density, 1e-3).init(density.params, torch.Generator().manual_seed(0))
        >>> state.theta.shape, list(state.params)
        (torch.Size([17]), ['0.weight', '0.bias', '2.weight', '2.bias'])
    """

    theta: Float[Tensor, "*k d"]
    step: Int[Tensor, ""]
    random: UInt8[Tensor, "*k bytes"] = field(repr=False)
    structure: Structure = field(repr=False)

    @property
    def params(self) -> Any:
        """The parameters as the tree that `init` received, as views of `theta`, with the dimension of chains first."""
        return self.structure.unflatten(self.theta)

    def clone(self: AnyState) -> AnyState:
        """Return a copy in new memory."""
        return replace(self, **{each.name: _copy(getattr(self, each.name)) for each in fields(self)})


@dataclass(frozen=True, eq=False, repr=False)
class MomentumState(State):
    """The state of a sampler with momenta m, a vector like `theta`.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> state = co.sampling.sghmc(density, 1e-3).init(density.params, torch.Generator().manual_seed(0))
        >>> state.momentum.shape
        torch.Size([17])
    """

    momentum: Float[Tensor, "*k d"]

    @property
    def momenta(self) -> Any:
        """The momenta as a tree like the parameters."""
        return self.structure.unflatten(self.momentum)


@dataclass(frozen=True, eq=False, repr=False)
class Info(Summarised):
    """Information about one step: tensors 0-d, or (k,) for chains, on the parameters' device.

    log_posterior: the value of `log_posterior` for this batch at the start of the step, for Metropolis samplers at its
    end. acceptance: the probability of accepting the proposal. energy_error: H(proposal) − H(start); the acceptance
    is the exponential of its negative, at most 1. Both are None for samplers that accept every step.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> sampler = co.sampling.hmc(density, 0.01)
        >>> state, info = sampler.update(sampler.init(density.params, torch.Generator().manual_seed(0)), (x, y))
        >>> 0 <= float(info.acceptance) <= 1
        True
    """

    log_posterior: Float[Tensor, "*k"]
    acceptance: Float[Tensor, "*k"] | None = None
    energy_error: Float[Tensor, "*k"] | None = None


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _copy(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(value)
    return value


def generator_states(
    generator: torch.Generator | None, device: torch.device, chains: int | None
) -> UInt8[Tensor, "*k bytes"]:
    """Return the states of new generators, seeded by draws from `generator` or from torch's default generator."""
    on = "cpu" if generator is None else generator.device
    seeds = torch.randint(2**62, (1 if chains is None else chains,), generator=generator, device=on)
    found = [torch.Generator(device).manual_seed(seed).get_state() for seed in seeds.tolist()]
    return found[0] if chains is None else torch.stack(found)


class NoiseSource:
    """Random numbers for each chain from its own generator, so that k chains draw the same numbers as k single ones.

    `keep` writes the advanced states back into `states` (*k, bytes), in place.
    """

    def __init__(self, states: UInt8[Tensor, "*k bytes"], device: torch.device) -> None:
        self._states = states.unsqueeze(0) if states.ndim == 1 else states
        self._single, self._device = states.ndim == 1, device

    @cached_property
    def _generators(self) -> list[torch.Generator]:
        """One generator for each chain, made at the first draw, because a filter or an optimiser seldom draws."""
        found = [torch.Generator(self._device) for _ in self._states]
        for generator, state in zip(found, self._states):
            generator.set_state(state.clone())  # a view of several states would crash torch
        return found

    def normal(self, like: Float[Tensor, "*k d"]) -> Float[Tensor, "*k d"]:
        """Draw standard normal numbers in the shape of `like`."""
        found = torch.empty_like(like)
        for row, generator in zip(found.unsqueeze(0) if self._single else found, self._generators):
            row.normal_(generator=generator)
        return found

    def each(self, draw: Callable[[torch.Generator], Tensor]) -> Tensor:
        """Call `draw` with each generator and stack the results."""
        found = [draw(generator) for generator in self._generators]
        return found[0] if self._single else torch.stack(found)

    def uniform(self, like: Float[Tensor, "*k d"]) -> Float[Tensor, "*k"]:
        """Draw one number in [0, 1) for each chain, in float64."""
        return self.each(lambda g: torch.rand((), generator=g, dtype=torch.float64, device=like.device))

    def keep(self) -> None:
        """Write the generators' states back, if anything was drawn."""
        if "_generators" not in self.__dict__:
            return
        for generator, state in zip(self._generators, self._states):
            state.copy_(generator.get_state())
