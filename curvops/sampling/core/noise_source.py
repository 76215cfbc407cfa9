"""The random numbers of a step, from generators whose states are part of a sampler's state."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from jaxtyping import Float, UInt8
from torch import Tensor


class NoiseSource:
    """Random numbers for each chain from a generator of its own, so that k chains draw as k single ones would.

    `keep` writes the advanced states back into `states` (*k, bytes), in place.
    """

    def __init__(self, states: UInt8[Tensor, "*k bytes"], device: torch.device) -> None:
        self._states = states.unsqueeze(0) if states.ndim == 1 else states
        self._single, self._device = states.ndim == 1, device

    @cached_property
    def _generators(self) -> list[torch.Generator]:
        """One generator for each chain, made at the first draw: a filter or an optimiser seldom draws."""
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
        """Draw a number in [0, 1) for each chain, in float64."""
        return self.each(lambda g: torch.rand((), generator=g, dtype=torch.float64, device=like.device))

    def keep(self) -> None:
        """Write the generators' states back, if anything was drawn."""
        if "_generators" not in self.__dict__:
            return
        for generator, state in zip(self._generators, self._states):
            state.copy_(generator.get_state())
