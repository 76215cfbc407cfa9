"""A layer's parameters as one matrix for each group, (g, p, q), and back: what Kronecker factors act on."""

from __future__ import annotations

import torch
from torch import Tensor

from curvops.network.engines.layerwise import Layer
from curvops.network.model.parameters import Blocks


def as_tensors(layer: Layer, matrix: Tensor) -> Blocks:
    """(g, p, q) as tensors by parameter name: the weight row-major or transposed, a last column the bias.

    The layout is that of `Rule.left` and `Rule.right`.
    """
    found = {}
    if "bias" in layer.names:
        matrix, bias = matrix.tensor_split((-1,), -1)
        found[layer.names["bias"]] = bias.flatten()
    turned = matrix[0].mT if layer.rule.matrix_is_transposed else matrix
    found[layer.names["weight"]] = turned.reshape(layer.shape_of("weight"))
    return found


def as_matrix(layer: Layer, tensors: Blocks) -> Tensor:
    """The inverse of `as_tensors` for tensors of one layer: (g, p, q)."""
    weight, groups = tensors[layer.names["weight"]], getattr(layer.module, "groups", 1)
    if layer.rule.matrix_is_transposed:
        weight = weight.mT
    matrix = weight.reshape(groups, weight.shape[0] // groups, -1)
    if "bias" not in layer.names:
        return matrix
    bias = tensors[layer.names["bias"]].reshape(groups, -1, 1)
    return torch.cat([matrix, bias], -1)


def width_of(layer: Layer) -> int:
    """q, the columns of the layer's matrix."""
    shape = layer.shape_of("weight")
    return (shape[0] if layer.rule.matrix_is_transposed else shape[1:].numel()) + ("bias" in layer.names)


def height_of(layer: Layer) -> int:
    """g·p, the rows of all its groups."""
    return layer.shape_of("weight")[1 if layer.rule.matrix_is_transposed else 0]
