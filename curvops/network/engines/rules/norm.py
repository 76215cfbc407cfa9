"""Layers that normalise, then scale and shift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from curvops.network.engines.rules.rule import Local, Rule, SingleRows


class ScaleRule(Rule):
    """The rule of y = x̂ ∘ w + b for a layer that first normalises its input: x̂ is kept, the rest is elementwise.

    `leading` says whether the parameters run along dimension 1 (channels) or along the last dimensions.
    """

    def __init__(self, leading: bool) -> None:
        self.leading = leading

    def supports(self, layer: Any) -> bool:
        tracked = getattr(layer, "running_mean", None) is not None
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            return tracked and not layer.training
        return not tracked or not layer.training

    def keep(self, layer: Any, a: Tensor) -> Tensor:
        if isinstance(layer, nn.GroupNorm):
            return F.group_norm(a, layer.num_groups, eps=layer.eps)
        if isinstance(layer, nn.LayerNorm):
            return F.layer_norm(a, layer.normalized_shape, eps=layer.eps)
        if isinstance(layer, nn.RMSNorm):
            return F.rms_norm(a, layer.normalized_shape, eps=layer.eps)
        instance = isinstance(layer, nn.modules.instancenorm._InstanceNorm) and not layer.track_running_stats
        if layer.running_mean is None or instance:
            return F.group_norm(a, a.shape[1], eps=layer.eps)  # groups of one channel each
        return F.batch_norm(a, layer.running_mean, layer.running_var, eps=layer.eps)

    def single_rows(self, layer: Any, *args: Tensor) -> SingleRows | None:
        inputs, last = self.keep(layer, *args), 1
        if not self.leading:
            last = len(layer.normalized_shape)
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
        weight: Tensor = layer.weight
        if self.leading:
            shared = tuple(range(3, s.ndim))
        else:
            shared = tuple(range(2, s.ndim - weight.ndim))
        return {name: _sum(s * inputs.unsqueeze(1) if name == "weight" else s, shared) for name in names}


def _sum(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    return tensor.sum(dims) if dims else tensor
