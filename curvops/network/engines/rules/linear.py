"""Linear layers, and layers that store their weight transposed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from curvops.network.engines.rules.rule import Local, Rule, SingleRows


class LinearRule(Rule):
    """The rule of y = a Wᵀ + b on the last dimension, with shared weights at the positions in between."""

    def single_rows(self, layer: Any, *args: Tensor) -> SingleRows | None:
        (a,) = args
        return SingleRows(self, a.reshape(-1, a.shape[-1]), lambda s: s.reshape(len(s), -1, s.shape[-1]))

    def push(self, layer: Any, inputs: Tensor, tangents: Mapping[str, Tensor]) -> Tensor:
        n, positions = inputs.shape[0], inputs.shape[1:-1]
        a = inputs.reshape(-1, inputs.shape[-1])
        weight, bias = tangents.get("weight"), tangents.get("bias")
        columns, out = (weight if weight is not None else tangents["bias"]).shape[:2]
        if weight is None:
            z = tangents["bias"].reshape(1, -1).expand(a.shape[0], -1)
        else:
            by_column = weight.reshape(-1, weight.shape[-1]).mT
            z = a @ by_column if bias is None else torch.addmm(bias.reshape(-1), a, by_column)
        if math.prod(positions) == 1:
            return z.reshape(n, columns, *positions, out)
        return z.reshape(n, -1, columns, out).transpose(1, 2).reshape(n, columns, *positions, out)

    def pull(self, layer: Any, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        a = inputs.reshape(-1, inputs.shape[-1])
        columns, out = s.shape[1], s.shape[-1]
        if inputs.ndim > 2:
            s = s.reshape(s.shape[0], columns, -1, out).transpose(1, 2)
        flat = s.reshape(-1, columns * out)
        gradients: Local = {}
        if "weight" in names:
            gradients["weight"] = (flat.mT @ a).view(columns, out, -1)
        if "bias" in names:
            gradients["bias"] = flat.sum(0).view(columns, out)
        return gradients

    def rows(self, layer: Any, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        a = inputs.reshape(inputs.shape[0], -1, inputs.shape[-1])
        s = s.reshape(s.shape[0], s.shape[1], -1, s.shape[-1])
        rows: Local = {}
        if "weight" in names:
            rows["weight"] = torch.einsum("ncto,nti->ncoi", s, a)
        if "bias" in names:
            rows["bias"] = s.sum(2)
        return rows

    def multiply_adds(self, layer: Any, output: Tensor) -> int:
        return output.shape[1:].numel() * layer.weight.numel() // output.shape[-1]

    def left(self, layer: Any, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Tensor | None:
        """Return the left side: one group, t the product of the dimensions in between, p outputs."""
        return s.reshape(s.shape[0], s.shape[1], 1, -1, s.shape[-1]) if "weight" in names else None

    def right(self, layer: Any, inputs: Tensor, names: tuple[str, ...]) -> Tensor:
        """Return the right side with q inputs."""
        right = inputs.reshape(inputs.shape[0], 1, -1, inputs.shape[-1])
        return with_ones(right) if "bias" in names else right


class TransposedLinearRule(LinearRule):
    """The rule of y = a W + b with W (in, out), as in Hugging Face's `Conv1D`: linear, with a transposed weight."""

    matrix_is_transposed = True

    def supports(self, layer: Any) -> bool:
        return layer.weight.ndim == 2 and layer.bias.shape == layer.weight.shape[1:]

    def push(self, layer: Any, inputs: Tensor, tangents: Mapping[str, Tensor]) -> Tensor:
        return super().push(layer, inputs, _transpose(tangents))

    def pull(self, layer: Any, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        return _transpose(super().pull(layer, inputs, s, names))

    def rows(self, layer: Any, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        return _transpose(super().rows(layer, inputs, s, names))


def _transpose(tensors: Mapping[str, Tensor]) -> Local:
    return {name: tensor.mT if name == "weight" else tensor for name, tensor in tensors.items()}


def with_ones(right: Tensor) -> Tensor:
    """Return `right` (n, g, t, q) with a last column of ones, which stands for the bias."""
    return torch.cat([right, right.new_ones(*right.shape[:-1], 1)], -1)
