"""What a layer rule is, and the rules of linear layers, of normalisations and of embeddings.

An embedding's input is indices, and its weight's gradient is a sum into the rows that they name; the padding row has no
gradient. `right` is an integer tensor (n, 1, t) of indices that stand for one-hot rows. The matrix is the TRANSPOSED
weight: the weight is (V, E), and the matrix Σ_t left ⊗ onehot(right) is (E, V).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Local = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class SingleRows:
    """A call of a layer as m rows, each of which has one position: their inputs (m, *a), and their own rule.

    `split` turns sensitivities (R, *out) of the call's output into those of the rows, (R, m, *b). The rule takes rows
    in a table of points, (n, T, *a) and (n, R, T, *b), with T positions a point; rows of zeros fill it up.
    """

    rule: Rule
    layer_input: Tensor
    split: Callable[[Tensor], Tensor]


class Rule(ABC):
    """The products of a kind of layer with its own parameters, for one call with one tensor of n points.

    `inputs` is what `keep` makes of this tensor.
    """

    matrix_is_transposed = False

    def supports(self, layer: Any) -> bool:
        """Return whether a layer of this class is configured so that the rule holds."""
        return True

    def keep(self, layer: Any, a: Tensor) -> Tensor:
        """Turn the layer's input into the tensor that is stored, the `inputs` of the products."""
        return a

    def single_rows(self, layer: Any, *args: Tensor) -> SingleRows | None:
        """Return a call with these tensors row by row, whatever the number of rows; None if its rows have no rule."""
        return None

    @abstractmethod
    def push(self, layer: Any, inputs: Tensor, tangents: Mapping[str, Tensor]) -> Tensor:
        """Return the change of the output (n, K, *out) for K tangents of weight and bias, (K, *shape) each."""

    @abstractmethod
    def pull(self, layer: Any, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        """Return the gradients (K, *shape) for K sensitivities of the output, (n, K, *out)."""

    def rows(self, layer: Any, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        """Return `pull` point by point, (n, K, *shape): the layer's own Jacobian, by default from its two sides."""
        left, rows = self.left(layer, inputs, s, ("weight",)), Local()
        assert left is not None  # a layer without this structure has its own method
        if "weight" in names:
            matrix = torch.einsum("nrgtp,ngtq->nrgpq", left, self.right(layer, inputs, ("weight",)))
            matrix = matrix.mT if self.matrix_is_transposed else matrix
            rows["weight"] = matrix.reshape(*s.shape[:2], *layer.weight.shape)
        if "bias" in names:
            rows["bias"] = left.sum(3).flatten(2)
        return rows

    def multiply_adds(self, layer: Any, output: Tensor) -> int:
        """Count the multiply-adds of one forward pass of one point."""
        return output.shape[1:].numel()

    def left(self, layer: Any, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Tensor | None:
        """Return the left side of the rows as sums of outer products over positions t that share the weight, or None.

        Left (n, R, g, t, p) comes from the sensitivities (n, R, *out), `right` (n, g, t, q) from the input: for point
        n, column R and group g, the gradient of `weight.reshape(g, p, q)` is Σ_t left ⊗ right. With
        `matrix_is_transposed` the matrix is the transposed weight, (1, p, q) for a weight (q, p). The result is None if
        the names lack "weight", or if the layer has no such structure.
        """
        return None

    def right(self, layer: Any, inputs: Tensor, names: tuple[str, ...]) -> Tensor:
        """Return the right side, if a left side exists.

        If the names contain "bias", it ends in a column of ones: q is larger by one, and column q − 1 is the gradient
        of the bias, (g·p).
        """
        raise NotImplementedError  # there is no left side


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
        return z.reshape(n, -1, columns, out).transpose(1, 2).reshape(n, columns, *positions, out)

    def pull(self, layer: Any, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        a = inputs.reshape(-1, inputs.shape[-1])
        columns, out = s.shape[1], s.shape[-1]
        flat = s.reshape(s.shape[0], columns, -1, out).transpose(1, 2).reshape(-1, columns * out)
        gradients: Local = {}
        if "weight" in names:
            gradients["weight"] = (flat.mT @ a).view(columns, out, -1)
        if "bias" in names:
            gradients["bias"] = flat.sum(0).view(columns, out)
        return gradients

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


def _transpose(tensors: Mapping[str, Tensor]) -> Local:
    return {name: tensor.mT if name == "weight" else tensor for name, tensor in tensors.items()}


def with_ones(right: Tensor) -> Tensor:
    """Return `right` (n, g, t, q) with a last column of ones, which stands for the bias."""
    return torch.cat([right, right.new_ones(*right.shape[:-1], 1)], -1)


class ScaleRule(Rule):
    """The rule of y = x̂ ∘ w + b for a layer that first normalises its input: x̂ is kept, the rest is elementwise.

    `leading` says whether the parameters run along dimension 1 (channels) or along the last dimensions.
    """

    def __init__(self, leading: bool) -> None:
        self.leading = leading

    def supports(self, layer: Any) -> bool:
        tracked = getattr(layer, "running_mean", None) is not None
        return not layer.training if tracked else not isinstance(layer, nn.modules.batchnorm._BatchNorm)

    def keep(self, layer: Any, a: Tensor) -> Tensor:
        if isinstance(layer, nn.GroupNorm):
            return F.group_norm(a, layer.num_groups, eps=layer.eps)
        if isinstance(layer, nn.LayerNorm):
            return F.layer_norm(a, layer.normalized_shape, eps=layer.eps)
        instance = isinstance(layer, nn.modules.instancenorm._InstanceNorm) and not layer.track_running_stats
        if layer.running_mean is None or instance:
            return F.group_norm(a, a.shape[1], eps=layer.eps)  # groups of one channel each
        return F.batch_norm(a, layer.running_mean, layer.running_var, eps=layer.eps)

    def single_rows(self, layer: Any, *args: Tensor) -> SingleRows | None:
        inputs, last = self.keep(layer, *args), layer.weight.ndim
        if not self.leading:
            return SingleRows(self, inputs.flatten(0, -1 - last), lambda s: s.flatten(1, -1 - last))
        channels_last = ScaleRule(leading=False)
        return SingleRows(
            channels_last, inputs.movedim(1, -1).flatten(0, -2), lambda s: s.movedim(2, -1).flatten(1, -2)
        )

    def push(self, layer: Any, inputs: Tensor, tangents: Mapping[str, Tensor]) -> Tensor:
        terms = []
        for name, tangent in tangents.items():
            spread = self._spread(tangent, inputs)
            terms.append(inputs.unsqueeze(1) * spread if name == "weight" else spread.expand(-1, -1, *inputs.shape[1:]))
        return (terms[0] + terms[1] if len(terms) == 2 else terms[0]).expand(inputs.shape[0], -1, *inputs.shape[1:])

    def _spread(self, tangent: Tensor, inputs: Tensor) -> Tensor:
        trailing = inputs.ndim - 2 if self.leading else 0
        leading = 0 if self.leading else inputs.ndim - tangent.ndim
        return tangent.reshape(1, tangent.shape[0], *(1,) * leading, *tangent.shape[1:], *(1,) * trailing)

    def pull(self, layer: Any, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        return {name: rows.sum(0) for name, rows in self.rows(layer, inputs, s, names).items()}

    def rows(self, layer: Any, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        shared = tuple(range(3, s.ndim) if self.leading else range(2, s.ndim - layer.weight.ndim))
        return {name: _sum_over(s * inputs.unsqueeze(1) if name == "weight" else s, shared) for name in names}


class AnyScaleRule(ScaleRule):
    """The rule of y = x̂ ∘ w or x̂ ∘ (1 + w), whatever normalises: x̂ is the layer with w = 1, less that with w = 0."""

    def keep(self, layer: Any, a: Tensor) -> Tensor:
        alone = copy.copy(layer)  # a call of the layer itself would be watched
        alone._parameters = {"weight": a.new_ones(layer.weight.shape)}
        scaled: Tensor = alone.forward(a)
        alone._parameters = {"weight": a.new_zeros(layer.weight.shape)}
        return scaled - alone.forward(a)


class SlopeRule(ScaleRule):
    """The rule of y = max(a, 0) + w ∘ min(a, 0), with a slope for each channel, or one for all: min(a, 0) is kept."""

    def keep(self, layer: nn.PReLU, a: Tensor) -> Tensor:
        return a.clamp_max(0)

    def single_rows(self, layer: nn.PReLU, *args: Tensor) -> SingleRows | None:
        return None if layer.weight.numel() == 1 else super().single_rows(layer, *args)

    def rows(self, layer: nn.PReLU, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        rows = super().rows(layer, inputs, s, names)
        return {"weight": rows["weight"].sum(2, keepdim=True)} if layer.weight.numel() == 1 else rows


def _sum_over(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    return tensor.sum(dims) if dims else tensor


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
        columns, weights = s.transpose(0, 1), _bag_weights(layer, inputs, s.dtype)
        for index, weight in zip(inputs.unbind(1), weights.unbind(1)):  # one by one: less memory
            total.index_add_(1, index, columns * weight.unsqueeze(1))
        return {"weight": total}

    def rows(self, layer: nn.EmbeddingBag, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        counts = s.new_zeros(len(inputs), layer.weight.shape[0])
        counts.scatter_add_(1, inputs, _bag_weights(layer, inputs, s.dtype))
        return {"weight": counts[:, None, :, None] * s.unsqueeze(2)}

    def left(self, layer: nn.EmbeddingBag, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Tensor:
        """Return the left side (n, R, 1, t, E), s at every position with its share of the mean."""
        return s[:, :, None, None] * _bag_weights(layer, inputs, s.dtype)[:, None, None, :, None]


def _find_padding(layer: Any, indices: Tensor) -> Tensor | None:
    """Return a mask of the indices that are not padding; None if there is no padding row."""
    return None if layer.padding_idx is None else indices != layer.padding_idx % layer.weight.shape[0]


def _per_position(layer: Any, inputs: Tensor, s: Tensor) -> Tensor:
    """Return s (n, K, *positions, E) as (n, K, t, E), zero at padding."""
    flat, counted = s.reshape(*s.shape[:2], -1, s.shape[-1]), _find_padding(layer, inputs)
    return flat if counted is None else flat * counted.reshape(len(inputs), 1, -1, 1)


def _bag_weights(layer: nn.EmbeddingBag, inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight of each position in its bag (n, t), zero at padding."""
    counted = _find_padding(layer, inputs)
    weights = torch.ones_like(inputs, dtype=dtype) if counted is None else counted.to(dtype)
    return weights / weights.sum(1, keepdim=True).clamp_min(1) if layer.mode == "mean" else weights
