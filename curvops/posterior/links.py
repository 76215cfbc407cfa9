"""Class probabilities from Gaussian logits: what E[softmax(f)] is under f ~ N(mean, covariance)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def probit(mean: Float[Tensor, "N C"], variance: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
    """softmax(κ f) with κ = (1 + π v / 8)^-½ per class (MacKay 1992, extended to classes as by Gibbs 1997)."""
    return (mean * (1 + math.pi / 8 * variance).rsqrt()).softmax(-1)


def monte_carlo(draws: Float[Tensor, "k N C"]) -> Float[Tensor, "N C"]:
    """Mean of softmax over draws of the logits; standard error at most 0.5 / √k."""
    return draws.softmax(-1).mean(0)


def gaussian_draws(
    mean: Float[Tensor, "N C"], covariance: Float[Tensor, "N C C"], k: int, generator: torch.Generator | None
) -> Float[Tensor, "k N C"]:
    """k draws of each point's logits, through the eigenvectors of its C × C covariance (which may be singular)."""
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    noise = torch.randn((k, *mean.shape), dtype=mean.dtype, device=mean.device, generator=generator)
    return mean + torch.einsum("nij,knj->kni", root, noise)


def bridge(mean: Float[Tensor, "N C"], variance: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
    """Mean of the Dirichlet of the Laplace bridge (Hobbhahn et al. 2022), variances normalised as they advise.

    The logits are shifted to sum to zero and the variances scaled to a mean of at most √(C/2), without which the
    approximation fails for large variances.
    """
    c = mean.shape[-1]
    scale = (variance.mean(-1, keepdim=True) / math.sqrt(c / 2)).clamp_min(1.0)
    f = (mean - mean.mean(-1, keepdim=True)) / scale.sqrt()
    v = variance / scale
    log_sum = torch.logsumexp(-f, -1, keepdim=True)
    alpha = (1 - 2 / c + (f + log_sum).exp() / c**2) / v.clamp_min(torch.finfo(v.dtype).tiny)
    return alpha / alpha.sum(-1, keepdim=True)
