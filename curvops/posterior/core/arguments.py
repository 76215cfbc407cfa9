"""Checks of the arguments of posteriors; each error names the argument."""

from __future__ import annotations

import inspect
import numbers
from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checks import check_choice, checked_whole, shown
from curvops.linalg.core.spaces import common, spaces_of
from curvops.linalg.core.symmetry import is_symmetric
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
from curvops.operators.linearized.sharded_linearization import KNOWN_OF_SHARDS

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


def checked_count(k: Any) -> int:
    """Return a number of draws as an int; raise TypeError unless it is whole, ValueError below 1."""
    return checked_whole("k", k, kind="a whole number of draws")


def checked_draws(samples: Any, mean: Tensor, name: str = "samples", count: int | None = None) -> Tensor:
    """Return draws of the weights (k, D), k = `count`; raise unless their shape, dtype and device fit."""
    size = f"({'k' if count is None else count}, {len(mean)})"
    if not isinstance(samples, Tensor):
        raise TypeError(
            f"{name} must be draws of the weights {size}, as from post.sample(k), not {samples!r}."
            if isinstance(samples, numbers.Real)
            else f"{name} must be a tensor of draws {size}, as from post.sample(k), not {type(samples).__name__}."
        )
    if samples.ndim != 2 or samples.shape[1] != len(mean) or len(samples) != (count or max(len(samples), 1)):
        raise ValueError(f"{name} must be {size}, as from post.sample(k), not {tuple(samples.shape)}.")
    if samples.dtype != mean.dtype or samples.device != mean.device:
        raise ValueError(
            f"{name} is {samples.dtype} on {samples.device}, but the weights are {mean.dtype} on {mean.device}; "
            f"convert with {name}.to(post.mean)."
        )
    return samples


def checked_curvature(curvature: Any, lin: Linearization) -> LinearOperator:
    """Return the operator (D, D) that `curvature` is, names or builds; raise TypeError or ValueError for others."""
    if isinstance(curvature, str):
        check_choice("curvature", curvature, CURVATURES)
        curvature = CURVATURES[curvature]
    if isinstance(curvature, type):
        if not issubclass(curvature, LinearOperator):
            raise TypeError(f"curvature={curvature.__name__} is not an operator class; expected co.GGN, co.KFAC, …")
        operator: Any = curvature(lin)
    else:
        operator = curvature
    if isinstance(operator, Tensor):
        raise TypeError(
            f"curvature is a tensor {tuple(operator.shape)}; wrap it as an operator: co.linalg.Dense(matrix, psd=True) "
            "or co.linalg.Diagonal(vector)."
        )
    if not isinstance(operator, LinearOperator):
        hint = ""
        if inspect.isroutine(operator):
            hint = ", a function: call it, curvature=f(lin)"
        elif isinstance(operator, numbers.Real) and not isinstance(operator, bool):
            hint = f"; a prior precision is named: co.laplace(lin, prior_precision={operator})"
        raise TypeError(
            f"curvature must be a name ('kfac', …), an operator class (co.KFAC, …) or an operator "
            f"({lin.num_parameters}, {lin.num_parameters}), got {shown(operator)}{hint}."
        )
    check_operator("curvature", operator, lin.model)
    if not is_symmetric(operator):
        raise ValueError(
            f"curvature {type(operator).__name__} is not known to be symmetric; pass an operator of curvops, "
            "co.linalg.Dense(matrix) of a symmetric matrix, or a subclass of co.linalg.Operator with symmetric = True."
        )
    return operator


def check_operator(name: str, operator: LinearOperator, network: Model) -> None:
    """Raise ValueError unless it is an operator (D, D) on these parameters, made at their current values or at none."""
    common(network.tangent_space, *spaces_of(operator))
    if tuple(operator.shape) != (network.num_parameters,) * 2:
        raise ValueError(
            f"{name} must be an operator of shape ({network.num_parameters}, {network.num_parameters}), got "
            f"{type(operator).__name__} {tuple(operator.shape)}."
        )
    if operator.dtype != network.theta.dtype or operator.device != network.theta.device:
        raise ValueError(
            f"{name} is {operator.dtype} on {operator.device}, but the parameters are {network.theta.dtype} on "
            f"{network.theta.device}; convert it with {name}.to(...)."
        )


def require_linearized(lin: Any) -> None:
    """Raise TypeError unless it is a linearised network."""
    if isinstance(lin, ShardedLinearization):
        raise TypeError(
            f"posteriors of a model whose parameters are sharded over ranks are not available: {KNOWN_OF_SHARDS}."
        )
    if not isinstance(lin, Linearization):
        raise TypeError(
            f"lin must be a linearised network, co.linearize(model, data, likelihood), got {type(lin).__name__}."
        )


def check_linearization(lin: Any) -> None:
    """Raise TypeError unless it is a linearised network in a dtype that a posterior supports."""
    require_linearized(lin)
    dtype = lin.theta.dtype
    if torch.finfo(dtype).bits < 32:
        raise TypeError(
            f"the selected parameters are in {dtype}, which is too coarse for a posterior (its rounding is "
            f"{torch.finfo(dtype).eps:.1g}): pass lin.cast(torch.float32), or linearise model.float(). A frozen base "
            "may stay in half precision if the selected parameters (adapters) are float32."
        )
