"""Checks of the arguments of posteriors; each error names the argument."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checks import check_choice, check_kind, check_like, check_shape, shown
from curvops.linalg.core.matrix_identity import common, spaces_of
from curvops.linalg.core.structure import is_symmetric
from curvops.network import Model
from curvops.operators import (
    EKFAC,
    GGN,
    KFAC,
    BlockDiagonal,
    DiagonalGGN,
    EmpiricalFisher,
    Hessian,
    Linearization,
    ShardedLinearization,
)
from curvops.ranks.sharded_linearization import KNOWN_OF_SHARDS

CURVATURES: dict[str, type[LinearOperator]] = {
    "kfac": KFAC,
    "ekfac": EKFAC,
    "ggn": GGN,
    "diagonal": DiagonalGGN,
    "block_diagonal": BlockDiagonal,
    "empirical_fisher": EmpiricalFisher,
    "hessian": Hessian,
}
"""Curvatures by name."""


def checked_draws(samples: Any, mean: Tensor, name: str = "samples", count: int | None = None) -> Tensor:
    """Return draws of the weights (k, D), k = `count`; raise unless their shape, dtype and device fit."""
    size = f"({'k' if count is None else count}, {len(mean)})"
    check_kind(name, samples, Tensor, f"draws of the weights {size}, as from post.sample(k)")
    if samples.ndim != 2 or samples.shape[1] != len(mean) or len(samples) != (count or max(len(samples), 1)):
        raise ValueError(f"{name} must be {size}, as from post.sample(k), not {tuple(samples.shape)}.")
    check_like(name, samples, mean, "the weights")
    return samples


def checked_curvature(curvature: Any, lin: Linearization) -> LinearOperator:
    """Return the operator (D, D) that `curvature` is, names or builds; raise TypeError or ValueError for others."""
    if isinstance(curvature, str):
        check_choice("curvature", curvature, CURVATURES)
        curvature = CURVATURES[curvature]
    operator: Any = curvature(lin) if isinstance(curvature, type) else curvature
    if not isinstance(operator, LinearOperator):
        hint = "; wrap a tensor as co.linalg.Dense(matrix, psd=True)"
        if isinstance(operator, numbers.Real):
            hint = f"; a prior precision is named: co.laplace(lin, prior_precision={operator})"
        elif callable(operator):
            hint = "; of a function, pass what it makes: curvature(lin)"
        raise TypeError(
            f"curvature must be a name ('kfac', …), a class (co.KFAC, …) or an operator, got {shown(operator)}{hint}."
        )
    check_operator("curvature", operator, lin.model)
    if not is_symmetric(operator):
        raise ValueError(
            f"curvature {type(operator).__name__} is not known to be symmetric: a class of your own says so by "
            "symmetric = True or psd = True, a matrix by co.linalg.Dense(matrix, psd=True)."
        )
    return operator


def check_operator(name: str, operator: LinearOperator, network: Model) -> None:
    """Raise ValueError unless it is an operator (D, D) on these parameters, made at their current values or at none."""
    common(network.tangent_space, *spaces_of(operator))
    check_shape(name, operator, (network.num_parameters,) * 2)
    check_like(name, operator, network.theta, "the parameters")


def require_linearized(lin: Any) -> None:
    """Raise TypeError unless it is a linearised network that has all its weights on each rank."""
    if isinstance(lin, ShardedLinearization):
        raise TypeError(
            "this needs all weights on each rank, got a ShardedLinearization: pass co.linearize of an unsharded copy "
            f"of the model. Of the sharded one {KNOWN_OF_SHARDS}."
        )
    check_kind("lin", lin, Linearization, "a linearised network, co.linearize(model, data, likelihood)")


def check_linearization(lin: Any) -> None:
    """Raise TypeError unless it is a linearised network in a dtype that a posterior supports."""
    require_linearized(lin)
    dtype = lin.theta.dtype
    if torch.finfo(dtype).bits < 32:
        raise TypeError(f"{dtype} is too coarse: pass lin.cast(torch.float32), or linearise model.float().")
