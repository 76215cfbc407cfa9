"""States of samplers before and after a step, what a step says of itself, and the chain that a run leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Float64, Int, UInt8
from torch import Tensor

from curvops.linalg.core.summary import Summarised
from curvops.sampling.core.structure import Structure

AnyState = TypeVar("AnyState", bound="State")


@dataclass(frozen=True, eq=False, repr=False)
class State(Summarised):
    """Where one chain is, or k chains are: tensors alone. Two states share none, unless a step was made in place.

    theta: the parameters as one vector, (d,) or (k, d). step: updates made so far, on the CPU. random: the state of
    the generator that noise is drawn from, of each chain its own.
    """

    theta: Float[Tensor, "*k d"]
    step: Int[Tensor, ""]
    random: UInt8[Tensor, "*k bytes"]
    structure: Structure

    @property
    def params(self) -> Any:
        """The parameters as the tree that `init` was given, views of `theta`; with chains their dimension first."""
        return self.structure.unflatten(self.theta)

    def clone(self: AnyState) -> AnyState:
        """The same in memory of its own."""
        return replace(self, **{each.name: _copied(getattr(self, each.name)) for each in fields(self)})


@dataclass(frozen=True, eq=False, repr=False)
class MomentumState(State):
    """That of samplers with momenta m, a vector as `theta` is."""

    momentum: Float[Tensor, "*k d"]

    @property
    def momenta(self) -> Any:
        """The momenta as a tree like the parameters."""
        return self.structure.unflatten(self.momentum)


@dataclass(frozen=True, eq=False, repr=False)
class Info(Summarised):
    """What a step says of itself; tensors 0-d, or (k,) of chains, on the parameters' device.

    log_posterior: the sampler's `log_posterior` of this batch, where the step began; of Metropolis samplers where it
    ended. acceptance: probability that the proposal is accepted. energy_error: H(proposal) − H(start), its negative
    logarithm where positive. Both are None for samplers that accept every step.
    """

    log_posterior: Float[Tensor, "*k"]
    acceptance: Float[Tensor, "*k"] | None = None
    energy_error: Float[Tensor, "*k"] | None = None


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(value)
    return value


def seeded(generator: torch.Generator | None, device: torch.device, chains: int | None) -> UInt8[Tensor, "*k bytes"]:
    """States of new generators, seeded by draws of `generator`, or of torch's default one."""
    on = "cpu" if generator is None else generator.device
    seeds = torch.randint(2**62, (1 if chains is None else chains,), generator=generator, device=on)
    found = [torch.Generator(device).manual_seed(seed).get_state() for seed in seeds.tolist()]
    return found[0] if chains is None else torch.stack(found)


@dataclass(frozen=True, eq=False, repr=False)
class Chain(Summarised):
    """k chains of S draws, on the parameters' device; a sampler of one chain has k = 1.

    theta: the draws as vectors, (k, S, d). log_posterior, and of Metropolis samplers acceptance and energy_error: what
    each of the steps after warm-up said, (k, steps), see `Info`. thin: steps between two draws. state: the last one,
    from which a further run goes on; sampler: the one that made the draws, with the step size that warm-up found.
    """

    theta: Float[Tensor, "k S d"]
    log_posterior: Float64[Tensor, "k steps"]
    acceptance: Float64[Tensor, "k steps"] | None
    energy_error: Float64[Tensor, "k steps"] | None
    thin: int
    state: State
    sampler: Any

    @property
    def structure(self) -> Structure:
        """How the parameters lie in the vectors of `theta`."""
        return self.state.structure

    @property
    def params(self) -> Any:
        """The draws as a tree like the parameters, its tensors (k, S, *shape): views of `theta`."""
        return self.structure.unflatten(self.theta)
