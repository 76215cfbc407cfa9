"""Output Fishers by name, and the Monte-Carlo Fisher, whose targets are drawn from the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checkpoint import Checkpoint
from curvops.checks import check_choice, check_options
from curvops.network.data.batches import Batch
from curvops.network.likelihoods.likelihood import Likelihood
from curvops.network.likelihoods.output_fisher import (
    Empirical,
    Exact,
    FisherKind,
    FromColumns,
    OutputFisher,
    Sampled,
)
from curvops.network.walks.walk import Walk


class DrawnFisher(FromColumns):
    """`Sampled` with targets drawn on first use, in the walk's own pass if that covers all points at once."""

    def __init__(
        self, passes: Walk, num_data: int, likelihood: Likelihood, mc_samples: int, generator: torch.Generator | None
    ) -> None:
        check_options(mc_samples=mc_samples, generator=generator)
        self.passes, self.num_data, self.likelihood = passes, num_data, likelihood
        self.mc_samples, self.generator = mc_samples, generator
        self.draws: Tensor | None = None

    def resume(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self.generator = checkpoint.source("generator", self.generator, device)
        saved_draws = checkpoint.attach("draws", lambda: self.draws)
        self.draws = self.draws if saved_draws is None else saved_draws

    def num_columns(self, num_outputs: int) -> int:
        return self.mc_samples

    def all_columns(self, f: Tensor, batch: Batch) -> Tensor:
        if self.draws is None:
            whole = not self.passes.is_shared and len(f) == self.num_data
            self.draws = self._draw(f.detach(), batch.any_targets, batch.weights) if whole else self.draw()
        return Sampled(self.likelihood, self.draws).all_columns(f, batch)

    def draw(self) -> Float[Tensor, "M N C"]:
        """Return residuals at M targets per point drawn from the model, divided by √M. One forward pass."""
        with torch.no_grad():
            walked = [(batch.any_targets, batch.weights, J.outputs) for batch, J in self.passes.each(0)]
            line_up = self.passes.line_up
            f, y = line_up([f for _, _, f in walked]), line_up([y for y, _, _ in walked])
            weights = [w for _, w, _ in walked if w is not None]
            return self._draw(f, y, line_up(weights) if weights else None)

    @torch.no_grad()
    def _draw(self, f: Tensor, y: Tensor, w: Tensor | None) -> Float[Tensor, "M N C"]:
        """Draw for all points at once: equal seeds give equal draws, however the data are batched."""
        draws = [self.likelihood.mc_residual(f, y, w, self.generator) for _ in range(self.mc_samples)]
        return torch.stack(draws) / self.mc_samples**0.5


def output_fisher(
    kind: str, likelihood: Likelihood, mc_samples: int, drawn: Callable[[], OutputFisher]
) -> OutputFisher:
    """Return the H named by `fisher=`: "exact", "mc", which is `drawn` with `mc_samples` targets, or "empirical".

    Raises ValueError for another name, for `mc_samples` below 1, and for more than 1 if nothing is drawn.
    """
    check_choice("fisher", kind, get_args(FisherKind))
    if kind != "mc" and mc_samples != 1:
        raise ValueError(f"mc_samples={mc_samples} with fisher={kind!r}, which draws nothing; use fisher='mc'.")
    if kind == "mc":
        return drawn()
    return Exact(likelihood) if kind == "exact" else Empirical(likelihood)
