"""Class probabilities from Gaussian logits: E[softmax(f)] and E[σ(f)] under f ~ N(mean, covariance)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checks import check_choice
from curvops.network.likelihoods import Bernoulli, BradleyTerry, Categorical, Likelihood
from curvops.posterior.predictions.uncertainty import LABELS, NUMBERS

LINKS = ("probit", "mc", "bridge", "bridge_norm", "network")


def check_link(link: str, likelihood: Likelihood) -> None:
    """Raise ValueError for an unknown link, one that does not fit the likelihood, or one without probabilities."""
    check_choice("link", link, LINKS)
    if not isinstance(likelihood, LABELS):
        instead = (
            "predict, or uncertainty(x).mean for the targets' mean"
            if isinstance(likelihood, NUMBERS)
            else "predict or functions(x, k), or for logits the likelihood nn.CrossEntropyLoss() or Bernoulli()"
        )
        raise ValueError(f"{likelihood!r} has no class probabilities; use {instead}.")
    if link.startswith("bridge") and not isinstance(likelihood, Categorical):
        raise ValueError(f"link={link!r} needs classes; for {likelihood!r} use 'probit', 'mc' or 'network'.")


def normal_probabilities(
    link: str, likelihood: Likelihood, mean: Callable[[], Float[Tensor, "N C"]], covariance: LinearOperator
) -> Float[Tensor, "N C"]:
    """Return the probabilities of normal logits by "probit", "bridge" or "bridge_norm".

    `mean` is called after the covariance is computed, whose passes may have found the outputs, too.
    """
    if link.startswith("bridge"):
        blocks = covariance.to_dense()
        return bridge(mean(), blocks, normalised=link == "bridge_norm")
    logits = probit_logits(likelihood, mean, covariance)
    return logits.sigmoid() if isinstance(likelihood, Bernoulli) else logits.softmax(-1)


def probit_logits(
    likelihood: Likelihood, mean: Callable[[], Float[Tensor, "N C"]], covariance: LinearOperator
) -> Float[Tensor, "N C"]:
    """Return the logits of the probabilities by "probit"."""
    if isinstance(likelihood, BradleyTerry):
        blocks = covariance.to_dense()
        return preference(mean(), blocks)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    return scale_logits(mean(), variance)


def scale_logits(mean: Float[Tensor, "*N"], variance: Float[Tensor, "*N"]) -> Float[Tensor, "*N"]:
    """Return the logits times κ = (1 + π v / 8)^-½ each: σ(κ f) is close to E[σ(f)] (MacKay 1992; Gibbs 1997)."""
    return mean * (1 + math.pi / 8 * variance).rsqrt()


def preference(mean: Float[Tensor, "N 2"], covariance: Float[Tensor, "N 2 2"]) -> Float[Tensor, "N 2"]:
    """Return logits of each of two rewards being the larger, from their difference."""
    apart = covariance[:, 0, 0] + covariance[:, 1, 1] - covariance[:, 0, 1] - covariance[:, 1, 0]
    first = scale_logits(mean[:, 0] - mean[:, 1], apart)
    return torch.stack([first, -first], -1) / 2


def average(mean_of: Callable[[Float[Tensor, "m C"]], Tensor], draws: Float[Tensor, "k n C"]) -> Float[Tensor, "n C"]:
    """Average `mean_of` over draws of the outputs; the standard error of probabilities is at most ½ / √k."""
    return mean_of(draws.flatten(0, 1)).unflatten(0, draws.shape[:2]).mean(0)


def bridge(
    mean: Float[Tensor, "N C"], covariance: Float[Tensor, "N C C"], normalised: bool = False
) -> Float[Tensor, "N C"]:
    """Return the mean of the Laplace bridge's Dirichlet (Hobbhahn et al. 2022), for logits that sum to zero.

    The approximation fails for large variances. `normalised` scales logits and variances to a mean variance of √(C/2)
    if it is above that, as the authors advise.
    """
    c, eps, least = mean.shape[-1], torch.finfo(mean.dtype).eps, torch.finfo(mean.dtype).tiny
    rows = covariance.sum(-1)
    total = rows.sum(-1, keepdim=True)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    known = total > c * eps * variance.sum(-1, keepdim=True)
    share = torch.where(known, rows / torch.where(known, total, 1.0), 1 / c)
    f = mean - share * mean.sum(-1, keepdim=True)
    v = torch.maximum(variance - share * rows, eps * variance).clamp_min(least)  # the rounding error of the difference
    if normalised:
        scale = (v.mean(-1, keepdim=True) / math.sqrt(c / 2)).clamp_min(1.0)
        f, v = f / scale.sqrt(), v / scale
    log_sum = torch.logsumexp(-f, -1, keepdim=True)
    log_alpha = f + log_sum - 2 * math.log(c)  # in logs, because e^f overflows at 89 in float32
    if c > 2:
        log_alpha = torch.logaddexp(log_alpha, log_alpha.new_tensor(math.log(1 - 2 / c)))
    return (log_alpha - v.log()).softmax(-1)
