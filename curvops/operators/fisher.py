"""Fishers from residuals: the empirical one at the true targets, and draws of targets for the Monte-Carlo one."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.network.output_fisher import Empirical, Exact, Kind, OutputFisher, Sampled, check_kind
from curvops.operators.curvature import Curvature
from curvops.operators.linearization import Linearization


class EmpiricalFisher(Curvature):
    """F = Σ_n g_n g_nᵀ (D, D) with g_n = J_nᵀ r_n the gradient of point n's negative log-likelihood.

    `co.EmpiricalFisher(lin)`. It is *not* an estimate of the GGN (Kunstner, Hennig & Balles 2019): use it for the second
    moments of gradients. Sequences sum over their positions first. Class and sample weights multiply r_n, once.
    Cost: a product is one push and one pull of J, as for the GGN.
    """

    @property
    def output(self) -> OutputFisher:
        """H_n = r_n r_nᵀ."""
        return Empirical(self.likelihood)


def sampled_residuals(lin: Linearization, mc_samples: int, generator: torch.Generator | None) -> Float[Tensor, "M N C"]:
    """Residuals at M targets a point drawn from the model, divided by √M. One forward pass."""
    if mc_samples < 1:
        raise ValueError(f"mc_samples={mc_samples} must be at least 1.")
    with torch.no_grad():
        found = [
            torch.stack(
                [
                    lin.likelihood.mc_residual(J.outputs, batch.targets, batch.weights, generator)
                    for _ in range(mc_samples)
                ]
            )
            for batch, J in lin.passes.each(0)
        ]
    return torch.cat(found, 1) / mc_samples**0.5


def output_fisher(lin: Linearization, kind: Kind, mc_samples: int, generator: torch.Generator | None) -> OutputFisher:
    """The H that `fisher=` names: "exact", "mc" with `mc_samples` targets a point, or "empirical"."""
    check_kind(kind)
    if kind == "mc":
        return Sampled(lin.likelihood, sampled_residuals(lin, mc_samples, generator))
    return Exact(lin.likelihood) if kind == "exact" else Empirical(lin.likelihood)
