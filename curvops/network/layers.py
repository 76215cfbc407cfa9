"""The table of layer rules: how a layer that is linear in its own parameters multiplies with them.

A rule sees one call of a layer on a batch of n points. `keep` turns the layer's input into what is stored. For K
tangents of the weight and bias, `push` gives the change of the layer's output, (n, K, *out); for K sensitivities of the
output, (n, K, *out), `pull` gives the gradients, (K, *shape). `rows` is `pull` point by point: the layer's own
Jacobian, (n, C, *shape).
`multiply_adds` counts one forward pass of one point. Adding a layer is adding a row to `RULES`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

Local = dict[str, Tensor]


@runtime_checkable
class Rule(Protocol):
    """What the layerwise engine asks of a kind of layer."""

    def supports(self, layer: Any) -> bool: ...
    def keep(self, layer: Any, a: Tensor) -> Tensor: ...
    def push(self, layer: Any, kept: Tensor, tangents: Mapping[str, Tensor]) -> Tensor: ...
    def pull(self, layer: Any, kept: Tensor, s: Tensor, names: tuple[str, ...]) -> Local: ...
    def rows(self, layer: Any, kept: Tensor, s: Tensor, names: tuple[str, ...]) -> Local: ...
    def multiply_adds(self, layer: Any, output: Tensor) -> int: ...


class LinearRule:
    """y = a Wᵀ + b on the last dimension, shared by the positions in between."""

    def supports(self, layer: nn.Linear) -> bool:
        return True

    def keep(self, layer: nn.Linear, a: Tensor) -> Tensor:
        return a

    def push(self, layer: nn.Linear, kept: Tensor, tangents: Mapping[str, Tensor]) -> Tensor:
        n, positions, out = kept.shape[0], kept.shape[1:-1], layer.out_features
        a = kept.reshape(-1, kept.shape[-1])
        weight, bias = tangents.get("weight"), tangents.get("bias")
        columns = (weight if weight is not None else tangents["bias"]).shape[0]
        if weight is None:
            z = tangents["bias"].reshape(1, -1).expand(a.shape[0], -1)
        elif bias is None:
            z = a @ weight.reshape(-1, weight.shape[-1]).mT
        else:
            z = torch.addmm(bias.reshape(-1), a, weight.reshape(-1, weight.shape[-1]).mT)
        if math.prod(positions) == 1:
            return z.reshape(n, columns, *positions, out)
        return z.reshape(n, -1, columns, out).transpose(1, 2).reshape(n, columns, *positions, out)

    def pull(self, layer: nn.Linear, kept: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        a = kept.reshape(-1, kept.shape[-1])
        columns, out = s.shape[1], s.shape[-1]
        flat = s.reshape(s.shape[0], columns, -1, out).transpose(1, 2).reshape(-1, columns * out)
        grads = {"weight": lambda: (flat.mT @ a).view(columns, out, -1), "bias": lambda: flat.sum(0).view(columns, out)}
        return {name: grads[name]() for name in names}

    def rows(self, layer: nn.Linear, kept: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        a = kept.reshape(kept.shape[0], -1, kept.shape[-1])
        s = s.reshape(s.shape[0], s.shape[1], -1, s.shape[-1])
        rows = {"weight": lambda: torch.einsum("ncto,nti->ncoi", s, a), "bias": lambda: s.sum(2)}
        return {name: rows[name]() for name in names}

    def multiply_adds(self, layer: nn.Linear, output: Tensor) -> int:
        return output[0].numel() * layer.in_features


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
        geometry = {key: value for key, value in _geometry(layer).items() if key != "groups"}
        patches = F.unfold(kept, layer.kernel_size, **geometry)
        n, columns, groups = s.shape[0], s.shape[1], layer.groups
        patches = patches.view(n * groups, -1, patches.shape[-1])
        s = s.flatten(3).unflatten(2, (groups, -1)).transpose(1, 2).reshape(n * groups, -1, patches.shape[-1])
        rows = torch.bmm(s, patches.mT).view(n, groups, columns, -1, *layer.weight.shape[1:])
        return rows.transpose(1, 2).flatten(2, 3)

    def multiply_adds(self, layer: nn.Conv2d, output: Tensor) -> int:
        return output[0].numel() * layer.weight[0].numel()


class ScaleRule:
    """y = x̂ ∘ w + b for a layer that normalises its input first: x̂ is kept, the rest is elementwise.

    `leading` says whether the parameters run along dimension 1 (channels) or along the last dimensions.
    """

    def __init__(self, leading: bool) -> None:
        self.leading = leading

    def supports(self, layer: Any) -> bool:
        return not isinstance(layer, nn.modules.batchnorm._BatchNorm) or not layer.training

    def keep(self, layer: Any, a: Tensor) -> Tensor:
        if isinstance(layer, nn.GroupNorm):
            return F.group_norm(a, layer.num_groups, eps=layer.eps)
        if isinstance(layer, nn.LayerNorm):
            return F.layer_norm(a, layer.normalized_shape, eps=layer.eps)
        return F.batch_norm(a, layer.running_mean, layer.running_var, eps=layer.eps)

    def push(self, layer: Any, kept: Tensor, tangents: Mapping[str, Tensor]) -> Tensor:
        terms = []
        for name, tangent in tangents.items():
            spread = self._spread(tangent, kept)
            terms.append(kept.unsqueeze(1) * spread if name == "weight" else spread.expand(-1, -1, *kept.shape[1:]))
        return (terms[0] + terms[1] if len(terms) == 2 else terms[0]).expand(kept.shape[0], -1, *kept.shape[1:])

    def _spread(self, tangent: Tensor, kept: Tensor) -> Tensor:
        trailing = kept.ndim - 2 if self.leading else 0
        leading = 0 if self.leading else kept.ndim - tangent.ndim
        return tangent.reshape(1, tangent.shape[0], *(1,) * leading, *tangent.shape[1:], *(1,) * trailing)

    def pull(self, layer: Any, kept: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        return {name: rows.sum(0) for name, rows in self.rows(layer, kept, s, names).items()}

    def rows(self, layer: Any, kept: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        weight: Tensor = layer.weight
        if self.leading:
            shared = tuple(range(3, s.ndim))
        else:
            shared = tuple(range(2, s.ndim - weight.ndim))
        return {name: _sum(s * kept.unsqueeze(1) if name == "weight" else s, shared) for name in names}

    def multiply_adds(self, layer: Any, output: Tensor) -> int:
        return output[0].numel()


RULES: dict[type, Rule] = {
    nn.Linear: LinearRule(),
    nn.Conv2d: Conv2dRule(),
    nn.LayerNorm: ScaleRule(leading=False),
    nn.GroupNorm: ScaleRule(leading=True),
    nn.BatchNorm1d: ScaleRule(leading=True),
    nn.BatchNorm2d: ScaleRule(leading=True),
    nn.BatchNorm3d: ScaleRule(leading=True),
}


def rule_for(layer: nn.Module) -> Rule | None:
    """The rule of a layer, None where there is none: a subclass, a parametrised or a hooked layer may do anything."""
    rule = RULES.get(type(layer))
    own = {name for name, _ in layer.named_parameters(recurse=False)}
    if rule is None or not own <= {"weight", "bias"} or layer._forward_hooks or layer._forward_pre_hooks:
        return None
    return rule if rule.supports(layer) else None


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


def _sum(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    return tensor.sum(dims) if dims else tensor
