"""Embeddings: the input is indices, and the weight's gradient is a sum into the rows that they name.

The padding row has no gradient. `right` is an integer tensor (n, 1, t) of indices that stand for one-hot rows. The
matrix is the TRANSPOSED weight: the weight is (V, E), and the matrix Σ_t left ⊗ onehot(right) is (E, V).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvops.network.engines.rules.rule import Local, Rule, SingleRows


class TableRule(Rule):
    """The base of layers that look up rows of a table by indices."""

    matrix_is_transposed = True

    def keep(self, layer: Any, a: Tensor) -> Tensor:
        return a.long()  # torch counts, scatters and fills only with this dtype

    def right(self, layer: Any, inputs: Tensor, names: tuple[str, ...]) -> Tensor:
        """Return the indices (n, 1, t)."""
        return inputs.reshape(inputs.shape[0], 1, -1)


class EmbeddingRule(TableRule):
    """The rule of rows of a table; its Jacobian (n, K, V, E) is formed only if V is below t."""

    def single_rows(self, layer: nn.Embedding, *args: Tensor) -> SingleRows | None:
        (indices,) = args
        return SingleRows(self, self.keep(layer, indices).flatten(), lambda s: s.reshape(len(s), -1, s.shape[-1]))

    def push(self, layer: nn.Embedding, inputs: Tensor, tangents: Mapping[str, Tensor]) -> Tensor:
        looked_up = tangents["weight"][:, inputs].transpose(0, 1)
        counted = _find_padding(layer, inputs)
        return looked_up if counted is None else looked_up.masked_fill(~counted[:, None, ..., None], 0)

    def pull(self, layer: nn.Embedding, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        left = _per_position(layer, inputs, s).transpose(0, 1).flatten(1, 2)
        return {"weight": s.new_zeros(s.shape[1], *layer.weight.shape).index_add_(1, inputs.flatten(), left)}

    def rows(self, layer: Any, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        left = _per_position(layer, inputs, s)
        index = self.right(layer, inputs, names).unsqueeze(-1).expand(-1, s.shape[1], -1, s.shape[-1])
        return {"weight": s.new_zeros(*s.shape[:2], *layer.weight.shape).scatter_add_(2, index, left)}

    def left(self, layer: Any, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Tensor:
        """Return the left side (n, R, 1, t, E), zero at padding."""
        return _per_position(layer, inputs, s).unsqueeze(2)


class EmbeddingBagRule(TableRule):
    """The rule of sums or means of rows of a table, (n, t) indices to (n, E): one bag per point."""

    def supports(self, layer: nn.EmbeddingBag) -> bool:
        return layer.mode in ("sum", "mean")

    def single_rows(self, layer: nn.EmbeddingBag, *args: Tensor) -> SingleRows | None:
        """Return the looked-up rows one by one: bags may have any sizes, and weights of their own."""
        indices, offsets, weights = self.keep(layer, args[0]).flatten(), None, None
        for further in args[1:]:
            offsets, weights = (offsets, further) if further.is_floating_point() else (further, weights)
        positions = torch.arange(len(indices), device=indices.device)
        if offsets is None:
            bags = positions // max(1, args[0].shape[1])
        else:
            bags = torch.searchsorted(offsets.long(), positions, right=True) - 1
        counted, dtype = _find_padding(layer, indices), layer.weight.dtype
        shares = torch.ones_like(indices, dtype=dtype) if counted is None else counted.to(dtype)
        if layer.mode == "mean":
            sizes = shares.new_zeros(int(bags.max()) + 1 if len(bags) else 0).index_add(0, bags, shares)
            shares = shares / sizes.clamp_min(1)[bags]
        if weights is not None:
            shares = shares * weights.flatten()
        return SingleRows(EmbeddingRule(), indices, lambda s: s[:, bags] * shares.unsqueeze(1))

    def push(self, layer: nn.EmbeddingBag, inputs: Tensor, tangents: Mapping[str, Tensor]) -> Tensor:
        mode, padding = layer.mode, layer.padding_idx
        return torch.stack([F.embedding_bag(inputs, v, mode=mode, padding_idx=padding) for v in tangents["weight"]], 1)

    def pull(self, layer: nn.EmbeddingBag, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        total = s.new_zeros(s.shape[1], *layer.weight.shape)
        columns, weights = s.transpose(0, 1), _weights(layer, inputs, s.dtype)
        for index, weight in zip(inputs.unbind(1), weights.unbind(1)):  # one by one: less memory
            total.index_add_(1, index, columns * weight.unsqueeze(1))
        return {"weight": total}

    def rows(self, layer: nn.EmbeddingBag, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        counts = s.new_zeros(len(inputs), layer.weight.shape[0])
        counts.scatter_add_(1, inputs, _weights(layer, inputs, s.dtype))
        return {"weight": counts[:, None, :, None] * s.unsqueeze(2)}

    def left(self, layer: nn.EmbeddingBag, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Tensor:
        """Return the left side (n, R, 1, t, E), s at every position with its share of the mean."""
        return s[:, :, None, None] * _weights(layer, inputs, s.dtype)[:, None, None, :, None]


def _find_padding(layer: Any, indices: Tensor) -> Tensor | None:
    """Return a mask of the indices that are not padding; None if there is no padding row."""
    return None if layer.padding_idx is None else indices != layer.padding_idx % layer.weight.shape[0]


def _per_position(layer: Any, inputs: Tensor, s: Tensor) -> Tensor:
    """Return s (n, K, *positions, E) as (n, K, t, E), zero at padding."""
    flat, counted = s.reshape(*s.shape[:2], -1, s.shape[-1]), _find_padding(layer, inputs)
    return flat if counted is None else flat * counted.reshape(len(inputs), 1, -1, 1)


def _weights(layer: nn.EmbeddingBag, inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight of each position in its bag (n, t), zero at padding."""
    counted = _find_padding(layer, inputs)
    weights = torch.ones_like(inputs, dtype=dtype) if counted is None else counted.to(dtype)
    return weights / weights.sum(1, keepdim=True).clamp_min(1) if layer.mode == "mean" else weights
