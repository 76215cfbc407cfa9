"""Convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from curvops.network.rules.linear import with_ones
from curvops.network.rules.rule import Local


class Conv2dRule:
    """Cross-correlation with groups, stride, dilation, zero padding; K kernels run as one of K times the channels."""

    def supports(self, layer: nn.Conv2d) -> bool:
        low, high = layer._reversed_padding_repeated_twice[::2], layer._reversed_padding_repeated_twice[1::2]
        return layer.padding_mode == "zeros" and low == high

    def keep(self, layer: nn.Conv2d, a: Tensor) -> Tensor:
        return a

    def push(self, layer: nn.Conv2d, kept: Tensor, tangents: Mapping[str, Tensor]) -> Tensor:
        weight, bias = tangents.get("weight"), tangents.get("bias")
        if weight is None:
            bias = tangents["bias"]
            size = _output_size(layer, kept)
            return bias[None, :, :, None, None].expand(kept.shape[0], *bias.shape, *size)
        columns, groups = weight.shape[0], layer.groups
        # Output channels are ordered group, column, channel: grouped convolutions stay grouped.
        wide = weight.unflatten(1, (groups, -1)).transpose(0, 1).flatten(0, 2)
        z = F.conv2d(kept, wide, None, **_geometry(layer))
        z = z.unflatten(1, (groups, columns, -1)).transpose(1, 2).flatten(2, 3)
        return z if bias is None else z + bias[None, :, :, None, None]

    def pull(self, layer: nn.Conv2d, kept: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        return {name: self._weight_gradient(layer, kept, s) if name == "weight" else s.sum((0, 3, 4)) for name in names}

    def _weight_gradient(self, layer: nn.Conv2d, kept: Tensor, s: Tensor) -> Tensor:
        columns, groups = s.shape[1], layer.groups
        wide = s.unflatten(2, (groups, -1)).transpose(1, 2).flatten(1, 3)
        shape = (wide.shape[1], *layer.weight.shape[1:])
        gradient = conv2d_weight(kept, shape, wide.contiguous(), **_geometry(layer))
        return gradient.unflatten(0, (groups, columns, -1)).transpose(0, 1).flatten(1, 2)

    def rows(self, layer: nn.Conv2d, kept: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        rows = {"weight": lambda: self._weight_rows(layer, kept, s), "bias": lambda: s.sum((3, 4))}
        return {name: rows[name]() for name in names}

    def _weight_rows(self, layer: nn.Conv2d, kept: Tensor, s: Tensor) -> Tensor:
        patches = self._patches(layer, kept)
        n, columns, groups = s.shape[0], s.shape[1], layer.groups
        patches = patches.view(n * groups, -1, patches.shape[-1])
        s = s.flatten(3).unflatten(2, (groups, -1)).transpose(1, 2).reshape(n * groups, -1, patches.shape[-1])
        rows = torch.bmm(s, patches.mT).view(n, groups, columns, -1, *layer.weight.shape[1:])
        return rows.transpose(1, 2).flatten(2, 3)

    def _patches(self, layer: nn.Conv2d, kept: Tensor) -> Tensor:
        """(n, channels · kernel, pixels), channels first."""
        geometry = {key: value for key, value in _geometry(layer).items() if key != "groups"}
        return F.unfold(kept, layer.kernel_size, **geometry)

    def multiply_adds(self, layer: nn.Conv2d, output: Tensor) -> int:
        return output[0].numel() * layer.weight[0].numel()

    def matrices(
        self, layer: nn.Conv2d, kept: Tensor, s: Tensor, names: tuple[str, ...]
    ) -> tuple[Tensor, Tensor] | None:
        """Groups as the layer's, t the output's pixels, p the group's channels, q the entries of a patch."""
        if "weight" not in names:
            return None
        left = s.flatten(3).unflatten(2, (layer.groups, -1)).mT
        right = self._patches(layer, kept).unflatten(1, (layer.groups, -1)).mT
        return left, with_ones(right) if "bias" in names else right


def _geometry(layer: nn.Conv2d) -> dict[str, Any]:
    padding = tuple(reversed(layer._reversed_padding_repeated_twice[::2]))
    return {"stride": layer.stride, "padding": padding, "dilation": layer.dilation, "groups": layer.groups}


def _output_size(layer: nn.Conv2d, a: Tensor) -> tuple[int, ...]:
    geometry = _geometry(layer)
    return tuple(
        (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
        for size, pad, dilation, kernel, stride in zip(
            a.shape[-2:], geometry["padding"], layer.dilation, layer.kernel_size, layer.stride
        )
    )
