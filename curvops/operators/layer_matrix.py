"""A layer's parameters as one matrix for each group, (g, p, q), and back: what Kronecker factors act on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from curvops.network.layerwise import Layer
from curvops.network.parameters import Blocks

TABLES = (nn.Embedding, nn.EmbeddingBag)
"""Layers whose matrix is their weight transposed (see `network.rules.embedding`)."""


def as_tensors(layer: Layer, matrix: Tensor) -> Blocks:
    """(g, p, q) as tensors by parameter name: the weight row-major, a last column the bias; an embedding's transposed.

    The layout is that of `Rule.matrices`.
    """
    if isinstance(layer.module, TABLES):
        return {layer.names["weight"]: matrix[0].mT}
    found = {}
    if "bias" in layer.names:
        matrix, found[layer.names["bias"]] = matrix[..., :-1], matrix[..., -1].flatten()
    found[layer.names["weight"]] = matrix.reshape(layer.shape_of("weight"))
    return found


def as_matrix(layer: Layer, tensors: Blocks) -> Tensor:
    """The inverse of `as_tensors` for tensors of one layer: (g, p, q)."""
    weight = tensors[layer.names["weight"]]
    if isinstance(layer.module, TABLES):
        return weight.mT.unsqueeze(0)
    groups = getattr(layer.module, "groups", 1)
    matrix = weight.reshape(groups, weight.shape[0] // groups, -1)
    if "bias" not in layer.names:
        return matrix
    bias = tensors[layer.names["bias"]].reshape(groups, -1, 1)
    return torch.cat([matrix, bias], -1)


def width_of(layer: Layer) -> int:
    """q, the columns of the layer's matrix."""
    if isinstance(layer.module, TABLES):
        return int(layer.module.num_embeddings)
    weight = layer.shape_of("weight")
    return weight[1:].numel() + ("bias" in layer.names)
