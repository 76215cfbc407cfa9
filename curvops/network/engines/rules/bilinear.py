"""Bilinear layers: linear in the outer product of their two inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from curvops.network.engines.rules.linear import LinearRule
from curvops.network.engines.rules.rule import Local

OUTER = LinearRule()


class BilinearRule:
    """y = x₁ᵀ W x₂ + b; the two inputs are kept side by side on the last dimension."""

    operands = 2
    matrix_is_transposed = False

    def supports(self, layer: nn.Bilinear) -> bool:
        return True

    def keep(self, layer: nn.Bilinear, a: Tensor, second: Tensor) -> Tensor:
        return torch.cat([a, second], -1)

    def push(self, layer: nn.Bilinear, kept: Tensor, tangents: Mapping[str, Tensor]) -> Tensor:
        flat = {name: tangent.flatten(2) if name == "weight" else tangent for name, tangent in tangents.items()}
        return OUTER.push(layer, _outer(layer, kept), flat)

    def pull(self, layer: nn.Bilinear, kept: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        return _shaped(layer, OUTER.pull(layer, _outer(layer, kept), s, names))

    def rows(self, layer: nn.Bilinear, kept: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        return _shaped(layer, OUTER.rows(layer, _outer(layer, kept), s, names))

    def left(self, layer: nn.Bilinear, kept: Tensor, s: Tensor, names: tuple[str, ...]) -> None:
        """None: of an outer product of inputs the factors would be those inputs' sizes squared."""
        return None

    def right(self, layer: nn.Bilinear, kept: Tensor, names: tuple[str, ...]) -> Tensor:
        raise NotImplementedError  # there is no left side

    def multiply_adds(self, layer: nn.Bilinear, output: Tensor) -> int:
        return output[0].numel() * layer.weight[0].numel()


def _outer(layer: nn.Bilinear, kept: Tensor) -> Tensor:
    first, second = kept.split([layer.in1_features, layer.in2_features], -1)
    return (first.unsqueeze(-1) * second.unsqueeze(-2)).flatten(-2)


def _shaped(layer: nn.Bilinear, gradients: Local) -> Local:
    """Gradients with the weight's two input dimensions apart."""
    return {
        name: value.unflatten(-1, layer.weight.shape[1:]) if name == "weight" else value
        for name, value in gradients.items()
    }
