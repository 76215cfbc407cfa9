"""The base of samplers that accept or reject: the stored value of the log posterior, and the decision."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor
from torch.utils import _pytree as pytree

from curvops.sampling.core.log_density import LogPosterior
from curvops.sampling.core.state import NoiseSource, State
from curvops.sampling.core.transition import Transition


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MetropolisState(State):
    """The state of a sampler that accepts or rejects, with the value of `log_posterior` at `theta`."""

    value: Float64[Tensor, "*k"]
    seen: list[Any] = field(default_factory=list, repr=False)
    """The function and the batch of `value`; empty before the first evaluation."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Metropolis(Transition):
    """Samplers whose proposals are accepted with probability min(1, e^{−ΔH}), on all data at once."""

    state_type: ClassVar[type[State]] = MetropolisState
    metropolis: ClassVar[bool] = True
    cold: ClassVar[str] = (
        "temperature must be positive for a sampler that accepts or rejects; for temperature 0 use an optimiser."
    )

    def _refresh(self, state: MetropolisState, batch: Any) -> None:
        """Evaluate unless the state already has the value for this function and batch."""
        asked = [self.log_posterior, batch, _versions(batch)]
        if state.seen and all(old is new for old, new in zip(state.seen[:2], asked)) and state.seen[2] == asked[2]:
            return
        if isinstance(self.log_posterior, LogPosterior):
            self.log_posterior.require_all_data(batch)
        state.seen.clear()
        state.value.copy_(self._evaluate(state, batch))
        if not bool(state.value.isfinite().all()):
            raise self._not_finite(state.value, 0)
        state.seen[:] = asked

    @abstractmethod
    def _evaluate(self, state: Any, batch: Any) -> Tensor:
        """Return log_posterior at the state, and write into the state what else the method needs there."""

    def _initial_tensors(self, state: State, noise: NoiseSource) -> dict[str, Any]:
        return {"value": state.theta.new_full(state.theta.shape[:-1], math.nan, dtype=torch.float64)}  # unknown


def accept_or_reject(
    energy_error: Float[Tensor, "*k"], noise: NoiseSource, like: Tensor
) -> tuple[Tensor, Bool[Tensor, "*k"]]:
    """Return min(1, e^{−ΔH}), the probability of accepting a proposal (0 if ΔH is NaN), and whether it is accepted."""
    probability = (-energy_error).clamp_max(0).exp().nan_to_num(0.0)
    return probability, noise.uniform(like) < probability


def write_accepted(accepted: Bool[Tensor, "*k"], proposal: Tensor, present: Tensor) -> None:
    """Write the proposal over the current values of the chains that accept it."""
    if accepted.ndim == 0 and accepted.device.type == "cpu":  # does not wait for a device
        if accepted:
            present.copy_(proposal)
        return
    where = accepted if proposal.ndim == accepted.ndim else accepted.unsqueeze(-1)
    torch.where(where, proposal.to(present), present, out=present)


def _versions(batch: Any) -> list[int]:
    """Return how often each tensor of the batch was written to."""
    leaves = pytree.tree_leaves(batch)
    return [leaf._version for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
