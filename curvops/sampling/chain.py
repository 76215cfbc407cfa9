"""What a run of a sampler leaves: the draws that it kept, and what each step said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Float64
from torch import Tensor

from curvops.linalg.core.summary import Summarised
from curvops.sampling.state import State
from curvops.sampling.structure import Structure


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
