"""Tangents of group norms and layer norms, by the kernels of their backward and forward passes.

At each point the Jacobian of x̂ = (x − μ) / σ is symmetric, so that the kernel of the backward pass multiplies a tangent
by it, too. With the tangents w', b' of the parameters, that of y = x̂ ∘ w + b is x̂' ∘ w + (x̂ ∘ w' + b'), where the norm
itself computes the sum in brackets. torch takes a dozen operations for the same, each over all numbers of the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

INPUT_ALONE = [True, False, False]


class NormTangents(TorchFunctionMode):
    """A mode for passes in forward mode, without gradients, whose norms take their tangents from these kernels."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rules: dict[Any, Callable[..., Tensor | None]] = {F.group_norm: _group_norm, F.layer_norm: _layer_norm}
        found = rules[func](*args, **kwargs) if func in rules else None
        return func(*args, **kwargs) if found is None else found


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor | None:
    n, channels, *rest = input.shape
    sizes = n, channels, math.prod(rest), num_groups

    def norm(x: Tensor, w: Tensor | None, b: Tensor | None) -> Any:
        # Copies, since the kernel does not look at strides; those of tangents differ from replay to replay.
        w, b = (None if part is None else part.clone(memory_format=torch.contiguous_format) for part in (w, b))
        return torch.native_group_norm(x, w, b, *sizes, eps)

    def adjoint(s: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Any:
        return torch.ops.aten.native_group_norm_backward(s, x, mean, scale, None, *sizes, INPUT_ALONE)

    return _dual(input, weight, bias, norm, adjoint, (-1, *(1 for _ in rest)))


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    shape = list(normalized_shape)

    def norm(x: Tensor, w: Tensor | None, b: Tensor | None) -> Any:
        return torch.native_layer_norm(x, shape, w, b, eps)

    def adjoint(s: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Any:
        return torch.ops.aten.native_layer_norm_backward(s, x, shape, mean, scale, None, None, INPUT_ALONE)

    return _dual(input, weight, bias, norm, adjoint, tuple(shape))


def _dual(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Callable[..., Any],
    adjoint: Callable[..., Any],
    shape: tuple[int, ...],
) -> Tensor | None:
    """Return the norm with its tangent; None where the kernels do not serve, or the input has no tangent.

    The parameters take this shape to spread over the input.
    """
    given = [(None, None) if part is None else forward_ad.unpack_dual(part) for part in (input, weight, bias)]
    (x, along), (w, w_along), (b, b_along) = given
    assert x is not None
    parts = [part for part in (x, along, w, b) if part is not None]
    if along is None or along._is_zerotensor() or not x.is_contiguous() or not x.numel():
        return None
    if any(part.dtype != x.dtype for part in parts):
        return None
    y, mean, scale = norm(x, w, b)
    # A copy, since in a replay the tangent may have other strides, with which the kernels are wrong.
    tangent = adjoint(along.clone(memory_format=torch.contiguous_format), x, mean, scale)[0]
    if w is not None and w_along is not None:
        tangent = torch.addcmul(norm(x, w_along, b_along)[0], tangent, w.reshape(shape))
    else:
        tangent = tangent if w is None else tangent * w.reshape(shape)
        tangent = tangent if b_along is None else tangent + b_along.reshape(shape)
    dual: Tensor = forward_ad.make_dual(y, tangent)
    return dual
