"""Inputs in the form of gpytorch and BoTorch, (..., n, d), converted to the form of the network."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checks import carries_graph, check_kind, check_tensor
from curvops.operators import Linearization

OUTPUTS = ("joint", "independent")
"""How a kernel and a mean treat the network's outputs: as a multi-output process, or as a batch of processes."""


def as_points(lin: Linearization, x: Tensor) -> Tensor:
    """Return the points (..., n, d) as one row of points, each in the shape of the network's input.

    Raises TypeError if x is not a tensor or the network takes several, ValueError if d is not the size of its input.
    """
    few: Any = lin.data.few
    check_kind("the network's input", few, Tensor, "one tensor: wrap the network in a module that splits it")
    check_tensor("inputs", x)
    shape = few.shape[1:]
    if x.ndim < 2 or x.shape[-1] != math.prod(shape):
        raise ValueError(f"inputs must have shape (..., n, {math.prod(shape)}), a row per point, got {tuple(x.shape)}.")
    points = x.reshape(-1, *shape)
    return points if few.is_floating_point() else points.to(few.dtype)


def own_outputs(values: Float[Tensor, "*b C *rest"], rest: int) -> Float[Tensor, "*b2 C *rest"]:
    """Return each output's values at its own inputs, whose last batch dimension is that of the outputs.

    Inputs without a batch, or with a last batch dimension of 1, are shared by all outputs. Raises ValueError for
    others.
    """
    at = values.ndim - rest - 1
    outputs = values.shape[at]
    if at == 0:
        return values
    if values.shape[at - 1] == 1:
        return values.squeeze(at - 1)
    if values.shape[at - 1] != outputs:
        raise ValueError(f"inputs of {outputs} independent outputs have a last batch dimension of 1 or {outputs}.")
    return values.diagonal(dim1=at - 1, dim2=at).movedim(-1, at - 1)


def same_points(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors hold the same points, so that gradients treat them as one tensor given twice."""
    if x is y or (
        x._base is not None and x._base is y._base and x.data_ptr() == y.data_ptr() and _layout(x) == _layout(y)
    ):
        return True
    return x.shape == y.shape and not carries_graph((x, y)) and torch.equal(x, y)


def _layout(x: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    return x.shape, x.stride()
