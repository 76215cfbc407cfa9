"""Inputs in the form of gpytorch and BoTorch, (..., n, d), in the form of the network."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from curvops.linalg.core.cache import carries_graph
from curvops.operators import Linearization


def as_points(lin: Linearization, x: Tensor) -> Tensor:
    """Return the points (..., n, d) in one row, each in the shape of the network's input.

    Raises TypeError if the network takes several tensors, and ValueError if d is not the size of its input.
    """
    few = lin.data.few
    if not isinstance(few, Tensor):
        raise TypeError(
            f"a Gaussian process has inputs of one tensor (n, d), the network takes a {type(few).__name__} of them: "
            "wrap it in a module that splits one tensor."
        )
    shape = few.shape[1:]
    if x.ndim < 2 or x.shape[-1] != math.prod(shape):
        raise ValueError(
            f"inputs of shape {tuple(x.shape)} do not fit a network whose input has the shape {tuple(shape)}: expected "
            f"(..., n, {math.prod(shape)}), one row per point."
        )
    points = x.reshape(-1, *shape)
    return points if few.is_floating_point() else points.to(few.dtype)


def same_points(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors hold the same points, so that gradients may be taken as of one tensor given twice."""
    if x is y or (
        x._base is not None and x._base is y._base and x.data_ptr() == y.data_ptr() and _layout(x) == _layout(y)
    ):
        return True
    return x.shape == y.shape and not carries_graph((x, y)) and torch.equal(x, y)


def _layout(x: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    return x.shape, x.stride()
