"""Distances of a reparametrised posterior from its prior, estimated from draws of the prior without a Markov chain."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from curvops.errors import FewDrawsWarning, warn
from curvops.linalg import Estimate
from curvops.linalg.core.results import Reason
from curvops.summary import Summarised

FEWEST = 20.0
"""The smallest number of effective draws; below it, the largest weights e^h dominate and the estimate is too low."""


@dataclass(frozen=True, eq=False, repr=False)
class GradientGap(Summarised):
    """The gradient gap E ‖∇ log p̃(φ) + φ‖² under p̃, which is 0 if p̃ is N(0, I): in total and for the readout.

    `total` is over all weights, `readout` over those of the readout; `readout` is None for a form without one.

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
        >>> rep = co.sampling.reprior(net, (x, torch.zeros(8, 1)), noise=3.0)
        >>> float(rep.gradient_gap(samples=100, generator=torch.Generator().manual_seed(0)).total) > 0
        True
    """

    total: Estimate
    readout: Estimate | None


def effective_draws(ratios: Float[Tensor, " S"]) -> float:
    """Return the effective number of draws, (Σ e^h)²/Σ e^2h."""
    return float((2 * ratios.logsumexp(0) - (2 * ratios).logsumexp(0)).exp())


def divergence(ratios: Float[Tensor, " S"]) -> Estimate:
    """Estimate log E e^h − E h from draws h, with a delta-method standard error; warn if few draws dominate."""
    S = len(ratios)
    value = ratios.logsumexp(0) - math.log(S) - ratios.mean()
    warn_of_few(ratios, "the estimate of KL(prior ‖ p̃) is too low, a lower bound")
    terms = (ratios - ratios.logsumexp(0) + math.log(S)).exp() - ratios
    return Estimate(value, terms.std() / math.sqrt(S), S, 0, reason=Reason.BUDGET_SPENT)


def weighted_mean(values: Float[Tensor, " S"], ratios: Float[Tensor, " S"]) -> Estimate:
    """Estimate Σ w g / Σ w with w = e^h, and the standard error of this ratio."""
    w = ratios.softmax(0)
    mean = w @ values
    stderr = (w * (values - mean)).square().sum().sqrt()
    return Estimate(mean, stderr, len(values), 0, reason=Reason.BUDGET_SPENT)


def plain_mean(values: Float[Tensor, " S"]) -> Estimate:
    """Estimate a mean from independent draws."""
    stderr = values.std() / math.sqrt(len(values))
    return Estimate(values.mean(), stderr, len(values), 0, reason=Reason.BUDGET_SPENT)


def warn_of_few(ratios: Float[Tensor, " S"], what: str) -> None:
    """Warn if fewer than `FEWEST` effective draws carry the weights e^h."""
    effective = effective_draws(ratios)
    if effective < FEWEST:
        warn(
            f"{what}, since {effective:.1f} of {len(ratios)} draws of the prior carry the weights e^h (standard "
            f"deviation of h {float(ratios.std()):.1f} nats). Use more samples, a wider network, or draws of p̃ from "
            "a sampler.",
            FewDrawsWarning,
        )
