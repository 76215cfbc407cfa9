"""How far a reparametrised posterior is from its prior, without a Markov chain: by draws of the prior."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from curvops.linalg import Estimate
from curvops.linalg.core.results import Reason
from curvops.linalg.core.summary import Summarised

FEWEST = 20.0
"""Below so many effective draws, the few largest weights e^h are the estimate, and it is too low."""


class FewEffectiveDraws(UserWarning):
    """The weights e^h of draws of the prior rest on a few of them, so that an average with these is no estimate."""


@dataclass(frozen=True, eq=False, repr=False)
class GradientGap(Summarised):
    """E ‖∇ log p̃(φ) + φ‖² under p̃, which is 0 where p̃ is N(0, I): of all weights, and the readout's part of it.

    `readout` is None for a form without one.
    """

    total: Estimate
    readout: Estimate | None


def effective_draws(ratios: Float[Tensor, " S"]) -> float:
    """(Σ e^h)²/Σ e^2h."""
    return float((2 * ratios.logsumexp(0) - (2 * ratios).logsumexp(0)).exp())


def divergence(ratios: Float[Tensor, " S"]) -> Estimate:
    """log E e^h − E h from draws h, its standard error by the delta method; warns where a few draws decide."""
    S = len(ratios)
    value = ratios.logsumexp(0) - math.log(S) - ratios.mean()
    warn_of_few(ratios, "KL(prior ‖ p̃) is too low: it is a bound from below")
    terms = (ratios - ratios.logsumexp(0) + math.log(S)).exp() - ratios
    return Estimate(value, terms.std() / math.sqrt(S), S, 0, reason=Reason.BUDGET_SPENT)


def weighted_mean(values: Float[Tensor, " S"], ratios: Float[Tensor, " S"]) -> Estimate:
    """Σ w g / Σ w with w = e^h, and the standard error of that ratio."""
    w = ratios.softmax(0)
    mean = w @ values
    stderr = (w * (values - mean)).square().sum().sqrt()
    return Estimate(mean, stderr, len(values), 0, reason=Reason.BUDGET_SPENT)


def plain_mean(values: Float[Tensor, " S"]) -> Estimate:
    """The mean of independent draws."""
    stderr = values.std() / math.sqrt(len(values))
    return Estimate(values.mean(), stderr, len(values), 0, reason=Reason.BUDGET_SPENT)


def warn_of_few(ratios: Float[Tensor, " S"], what: str) -> None:
    """Warn where the weights e^h of draws rest on fewer than `FEWEST` of them."""
    effective = effective_draws(ratios)
    if effective < FEWEST:
        warnings.warn(
            f"{what}, since {effective:.1f} of {len(ratios)} draws of the prior carry the weights e^h (standard "
            f"deviation of h {float(ratios.std()):.1f} nats). Take more samples, a wider network, or draws of p̃ from a "
            "sampler.",
            FewEffectiveDraws,
            stacklevel=4,
        )
