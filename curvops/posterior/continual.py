"""Tasks one after another: yesterday's posterior as a penalty for today's training, and as today's prior."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg import Damped, low_rank
from curvops.linalg.core.sources import sources_of
from curvops.operators import Linearization


def quadratic(precision: LinearOperator, gap: Float[Tensor, " D"]) -> Float[Tensor, ""]:
    """½ gapᵀ P gap with its gradient P gap, at one product with P."""
    with torch.no_grad():
        product = precision._matmul(gap.detach().unsqueeze(-1)).squeeze(-1)
    value = gap @ product
    return value - 0.5 * value.detach()


def flat(lin: Linearization, params: Any) -> Float[Tensor, " D"]:
    """Weights by name, or a vector (D,), as a vector that keeps its graph."""
    if isinstance(params, Mapping):
        params = lin.flatten(params)
    if not isinstance(params, Tensor):
        raise TypeError(
            "params must be named tensors, dict(model.named_parameters()), or a vector "
            f"({lin.num_parameters},), got {type(params).__name__}."
        )
    if params.shape != (lin.num_parameters,):
        raise ValueError(f"params must be a vector ({lin.num_parameters},), got shape {tuple(params.shape)}.")
    if params.dtype != lin.theta.dtype or params.device != lin.theta.device:
        raise ValueError(
            f"params are {params.dtype} on {params.device}, the posterior {lin.theta.dtype} on {lin.theta.device}; "
            "convert them with params.to(post.mean)."
        )
    return params


def require_new_data(lin: Linearization, curvature: LinearOperator) -> None:
    """Raise ValueError where the curvature of an earlier posterior is of the same data: they would count twice."""
    known = sources_of(curvature)
    if known is not None and lin.source in known.counts:
        raise ValueError(
            "the earlier posterior is of the data of this linearisation, which would count twice: linearise at the "
            "new data alone, or take the earlier posterior's own prior, prior_precision=earlier.prior_precision."
        )


def compressed(precision: LinearOperator, rank: int | None, generator: torch.Generator | None) -> LinearOperator:
    """P with its curvature replaced by one of low rank, whose `error` says how close it is; P itself without a rank."""
    if rank is None:
        return precision
    if not isinstance(precision, Damped):
        raise ValueError(
            f"rank={rank} compresses a curvature plus a number or a vector; this precision is a "
            f"{type(precision).__name__}: compress the prior operator with co.low_rank, or leave rank out."
        )
    return low_rank(precision.base, rank, generator=generator).add_diagonal(precision.shift)
