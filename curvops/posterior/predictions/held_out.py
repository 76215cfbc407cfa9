"""The log-likelihood of test data under a predictive distribution, per point and for pairs of points."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checks import shown
from curvops.linalg import Estimate
from curvops.network.data.inputs import as_inputs, num_points, tensor_of
from curvops.network.likelihoods import Likelihood, Sequences
from curvops.operators import Linearization

COPIES = 10
"""The number of copies of its two points in each pair of the dyadic score."""


ErrorOfMean = Callable[[Float[Tensor, "k *N"]], Float[Tensor, "*N"]]
"""A function from the series that is averaged over draws to the standard error of its mean."""


def error_of_mean(series: Float[Tensor, "k *N"]) -> Float[Tensor, "*N"]:
    """Return the standard error of the mean over independent draws."""
    k = len(series)
    return series.std(0) / k**0.5 if k > 1 and series.numel() else torch.full_like(series[0], math.inf)


def log_mean_exp(log_p: Float[Tensor, "k N"], error: ErrorOfMean = error_of_mean) -> Estimate:
    """Return log mean_k exp(log_p) per point, with its standard error by the delta method."""
    k = len(log_p)
    value = log_p.logsumexp(0) - math.log(k)
    return Estimate(value, error((log_p - value).exp()), k, 0)


def targets_by_position(lin: Linearization, x: Any, y: Any) -> Tensor:
    """Return the targets of test data by position; raise TypeError or ValueError for unsuitable ones."""
    y = tensor_of(y)
    if not isinstance(y, Tensor) or not y.ndim:
        raise TypeError(f"y must be a tensor of targets as the likelihood takes them, got {shown(y)}.")
    device, dtype = lin.theta.device, lin.theta.dtype
    y = y.to(device=device, dtype=dtype if y.is_floating_point() else None)
    points = num_points(as_inputs(x, device, dtype))
    if len(y) != points:
        raise ValueError(f"there are {points} inputs, but {len(y)} targets: pass one target per point.")
    layout = lin.model.layout
    y = y if layout is None else layout.targets(y)
    lin.likelihood.check_targets(y, lin.num_outputs)
    return y.flatten(0, 1) if isinstance(lin.likelihood, Sequences) else y


def log_likelihoods(
    likelihood: Likelihood, drawn: Iterable[Float[Tensor, "k n C"]], targets: Tensor
) -> Float[Tensor, "k N"]:
    """Yield log p(y | f_k) of each target under draws of the outputs, some points at a time."""
    start, parts = 0, []
    for draws in drawn:
        some = targets[start : start + draws.shape[1]]
        together = some.repeat(len(draws), *[1] * (some.ndim - 1))  # all draws in one call
        parts.append(likelihood.log_prob(draws.flatten(0, 1), together).unflatten(0, draws.shape[:2]))
        start += len(some)
    return torch.cat(parts, 1)


def draw_pairs(n: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Draw ⌊n/2⌋ random pairs of points (2, m) and the copies of each in its pair: n₁ ~ U{1, …, 9}, n₂ = 10 − n₁."""
    device = None if generator is None else generator.device
    order = torch.randperm(n, generator=generator, device=device)[: n - n % 2].view(2, -1)
    first = torch.randint(1, COPIES, order.shape[1:], generator=generator, device=device)
    return order, torch.stack([first, COPIES - first])


def dyadic_score(
    log_p: Float[Tensor, "k N"], generator: torch.Generator | None, error: ErrorOfMean = error_of_mean
) -> Estimate:
    """Return log mean_k p_k(y₁|x₁)^n₁ p_k(y₂|x₂)^n₂ of random pairs of points (Osband et al. 2022), (⌊N/2⌋,).

    It measures how predictions vary together, which a mean over points does not show.
    """
    order, copies = (index.to(log_p.device) for index in draw_pairs(log_p.shape[1], generator))
    return log_mean_exp((log_p[:, order] * copies).sum(1), error)


def gaussian_log_density(
    mean: Float[Tensor, "N C"], covariance: Float[Tensor, "N C C"], y: Float[Tensor, "N C"]
) -> Float[Tensor, " N"]:
    """Return log N(y; mean, covariance) of each point, in nats."""
    L = torch.linalg.cholesky(covariance)
    whitened = torch.linalg.solve_triangular(L, (y - mean).unsqueeze(-1), upper=False).squeeze(-1)
    half_logdet = L.diagonal(dim1=-2, dim2=-1).log().sum(-1) + mean.shape[-1] * math.log(2 * math.pi) / 2
    return -whitened.square().sum(-1) / 2 - half_logdet
