"""The Poisson likelihood of counts: the outputs are log rates."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.network.likelihoods.likelihood import Independent, Outputs, Weights, check_rows, weigh


class Poisson(Independent):
    """The Poisson likelihood of counts with rate e^f: the residual is e^f - y, and H = diag(e^f).

    Targets (n, C) are whole numbers, at least 0, of any dtype. For counts with different exposures (areas, times), let
    the model add the log exposure to its outputs. Rates must be representable: f < 88 in float32.

    Examples:
        >>> counts = torch.arange(8.0)[:, None]
        >>> lin = co.linearize(nn.Linear(2, 1), (x, counts), co.likelihoods.Poisson())
    """

    always_curved = True

    def __repr__(self) -> str:
        return "Poisson()"

    def log_prob(self, f: Outputs, y: Tensor, w: Weights = None) -> Float[Tensor, " n"]:
        counts = y.to(f.dtype)
        return weigh(counts * f - f.exp() - (counts + 1).lgamma(), w).sum(-1)

    def residual(self, f: Outputs, y: Tensor, w: Weights = None) -> Outputs:
        return weigh(f.exp() - y.to(f.dtype), w)

    def curvature(self, f: Outputs, y: Tensor) -> Tensor:
        return f.exp()

    def curvature_root(self, f: Outputs, y: Tensor) -> Tensor:
        return (0.5 * f).exp()

    def sample(self, f: Outputs, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(f.detach().exp(), generator=generator)

    def mean(self, f: Outputs) -> Outputs:
        return f.exp()

    def check_targets(self, y: Tensor, num_outputs: int | None = None) -> None:
        if y.is_complex() or y.dtype == torch.bool:
            raise TypeError(f"Poisson targets are counts; given {y.dtype}. For yes or no use Bernoulli.")
        check_rows(y, num_outputs, "Poisson")
        if y.numel() and not bool(((y >= 0) & (y == y.round()) & y.isfinite()).all()):
            raise ValueError(
                "Poisson targets are whole numbers, at least 0. For counts with exposures keep the counts, and let the "
                "model add the log exposure to its outputs."
            )
