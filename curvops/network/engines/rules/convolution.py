"""Convolutions and transposed convolutions in any number of dimensions; K kernels run as one with K times the channels.

The channels of such a wide convolution are ordered by group, column and channel, so that groups stay groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from curvops.ambient import CACHE_BYTES
from curvops.network.engines.rules.layer_rules import Local, Rule, SingleRows, with_ones
from curvops.network.model.fused_kernels import unfused


class ConvolutionRule(Rule):
    """The rule of convolutions (cross-correlations); inputs with unequal padding on the two sides are kept padded."""

    transposed = False

    def keep(self, layer: _ConvNd, a: Tensor) -> Tensor:
        if not _is_kept_padded(layer):
            return a
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        return F.pad(a, _sides(layer), mode)

    def single_rows(self, layer: _ConvNd, *args: Tensor) -> SingleRows | None:
        """Return the output's pixels one by one, with their patches: images may differ in size."""
        (a,) = args
        batched = a.ndim == layer.weight.ndim
        patches = _grouped_patches(layer, self.keep(layer, a if batched else a.unsqueeze(0)), False)

        def split(s: Tensor) -> Tensor:
            s = (s if batched else s.unsqueeze(1)).flatten(3).unflatten(2, (layer.groups, -1))
            return s.permute(0, 1, 4, 2, 3).flatten(1, 2)

        return SingleRows(PatchRule(), patches.transpose(1, 2).flatten(0, 1), split)

    def push(self, layer: _ConvNd, inputs: Tensor, tangents: Mapping[str, Tensor]) -> Tensor:
        weight, bias = tangents.get("weight"), tangents.get("bias")
        if weight is None:
            bias, size = tangents["bias"], self._output_size(layer, inputs.shape[2:])
            return bias.view(1, *bias.shape, *(1,) * len(size)).expand(inputs.shape[0], *bias.shape, *size)
        with unfused():  # in full precision, as the passes that J is made of
            z = torch.convolution(inputs, self._wide(layer, weight), None, *self._geometry(layer))
        z = z.unflatten(1, (layer.groups, weight.shape[0], -1)).transpose(1, 2).flatten(2, 3)
        return z if bias is None else z + bias.view(1, *bias.shape, *(1,) * (z.ndim - 3))

    def _geometry(self, layer: _ConvNd) -> tuple[Any, ...]:
        """Return the arguments of torch's convolution that follow input, weight and bias."""
        stride, dilation = _per_dimension(layer, layer.stride), _per_dimension(layer, layer.dilation)
        output_padding = _per_dimension(layer, getattr(layer, "output_padding", 0))
        return stride, _padding(layer), dilation, self.transposed, output_padding, layer.groups

    def _wide(self, layer: _ConvNd, weight: Tensor) -> Tensor:
        """Return K kernels (K, *shape) as one."""
        return weight.unflatten(1, (layer.groups, -1)).transpose(0, 1).flatten(0, 2)

    def _output_size(self, layer: _ConvNd, size: Sequence[int]) -> tuple[int, ...]:
        sides = zip(size, _padding(layer), _spans(layer), _per_dimension(layer, layer.stride))
        return tuple((length + 2 * pad - span) // stride + 1 for length, pad, span, stride in sides)

    def pull(self, layer: _ConvNd, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        sums = (0, *range(3, s.ndim))
        return {name: self._weight_gradient(layer, inputs, s) if name == "weight" else s.sum(sums) for name in names}

    def _weight_gradient(self, layer: _ConvNd, inputs: Tensor, s: Tensor) -> Tensor:
        gradient = self._adjoint(layer, inputs, s, (s.shape[1] * layer.weight.shape[0], *layer.weight.shape[1:]))
        return gradient.unflatten(0, (layer.groups, s.shape[1], -1)).transpose(0, 1).flatten(1, 2)

    def _adjoint(self, layer: _ConvNd, inputs: Tensor, s: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the gradient of a wide weight of that shape."""
        wide = s.unflatten(2, (layer.groups, -1)).transpose(1, 2).flatten(1, 3).contiguous()
        weight = s.new_empty(shape)  # only its shape is read, and a view of one number would be copied to memory
        return torch.ops.aten.convolution_backward(
            wide, inputs, weight, None, *self._geometry(layer), (False, True, False)
        )[1]

    def rows(self, layer: _ConvNd, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        sums = tuple(range(3, s.ndim))
        return {name: self._weight_rows(layer, inputs, s) if name == "weight" else s.sum(sums) for name in names}

    def _weight_rows(self, layer: _ConvNd, inputs: Tensor, s: Tensor) -> Tensor:
        patches = _patches(layer, inputs)
        n, columns, groups = s.shape[0], s.shape[1], layer.groups
        patches = patches.view(n * groups, -1, patches.shape[-1])
        s = s.flatten(3).unflatten(2, (groups, -1)).transpose(1, 2).reshape(n * groups, -1, patches.shape[-1])
        rows = torch.bmm(s, patches.mT).view(n, groups, columns, -1, *layer.weight.shape[1:])
        return rows.transpose(1, 2).flatten(2, 3)

    def left(self, layer: _ConvNd, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Tensor | None:
        """Return the left side: groups as in the layer, t the output's pixels, p the group's channels."""
        return s.flatten(3).unflatten(2, (layer.groups, -1)).mT if "weight" in names else None

    def right(self, layer: _ConvNd, inputs: Tensor, names: tuple[str, ...]) -> Tensor:
        """Return the right side, with q the entries of a patch."""
        return _grouped_patches(layer, inputs, "bias" in names)

    def multiply_adds(self, layer: _ConvNd, output: Tensor) -> int:
        return output.shape[1:].numel() * layer.weight[0].numel()


class PatchRule(Rule):
    """The rule of a convolution at T pixels a point, from their patches (n, T, g, q) and s (n, K, T, g, p)."""

    def push(self, layer: _ConvNd, inputs: Tensor, tangents: Mapping[str, Tensor]) -> Tensor:
        weight, bias = tangents.get("weight"), tangents.get("bias")
        terms = []
        if weight is not None:
            kernels = weight.flatten(2).unflatten(1, (layer.groups, -1))
            terms.append(torch.einsum("ntgq,kgpq->nktgp", inputs, kernels))
        if bias is not None:
            spread = bias.view(1, len(bias), 1, layer.groups, -1)
            terms.append(spread.expand(len(inputs), -1, inputs.shape[1], -1, -1))
        return terms[0] + terms[1] if len(terms) == 2 else terms[0]

    def pull(self, layer: _ConvNd, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        gradients: Local = {}
        if "weight" in names:
            gradients["weight"] = torch.einsum("nktgp,ntgq->kgpq", s, inputs).reshape(-1, *layer.weight.shape)
        if "bias" in names:
            gradients["bias"] = s.sum((0, 2)).flatten(1)
        return gradients

    def left(self, layer: _ConvNd, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Tensor | None:
        return s.transpose(2, 3) if "weight" in names else None

    def right(self, layer: _ConvNd, inputs: Tensor, names: tuple[str, ...]) -> Tensor:
        right = inputs.transpose(1, 2)
        return with_ones(right) if "bias" in names else right


class TransposedConvolutionRule(ConvolutionRule):
    """The rule of transposed convolutions, the adjoints; the weight is (in, out / groups, *kernel)."""

    transposed = True

    def single_rows(self, layer: _ConvNd, *args: Tensor) -> None:
        """Return None: a pixel of the output belongs to several of the input's."""
        return None

    def _wide(self, layer: _ConvNd, weight: Tensor) -> Tensor:
        return weight.transpose(0, 1).flatten(1, 2)

    def _output_size(self, layer: _ConvNd, size: Sequence[int]) -> tuple[int, ...]:
        return tuple(
            (length - 1) * stride + one
            for length, stride, one in zip(size, _per_dimension(layer, layer.stride), _of_one(layer))
        )

    def _weight_gradient(self, layer: _ConvNd, inputs: Tensor, s: Tensor) -> Tensor:
        in_channels, out_channels, *kernel = layer.weight.shape
        gradient = self._adjoint(layer, inputs, s, (in_channels, s.shape[1] * out_channels, *kernel))
        return gradient.unflatten(1, (s.shape[1], out_channels)).transpose(0, 1)

    def _weight_rows(self, layer: _ConvNd, inputs: Tensor, s: Tensor) -> Tensor:
        """Return each input pixel paired with the window of s that it writes to, some columns at a time (in cache)."""
        a = inputs.flatten(2).unflatten(1, (layer.groups, -1))
        last_first = reversed([*zip(_padding(layer), _per_dimension(layer, layer.output_padding))])
        sides = [side for pad, further in last_first for side in (pad, pad - further)]
        step, rows = max(1, CACHE_BYTES // max(1, s[:, :1].nbytes)), []
        for some in s.split(step, 1):
            windows = _windows(layer, F.pad(some.flatten(0, 1), sides))
            windows = windows.reshape(*some.shape[:2], layer.groups, -1, a.shape[-1])
            rows.append(torch.einsum("ngip,nkgop->nkgio", a, windows))
        return torch.cat(rows, 1).reshape(*s.shape[:2], *layer.weight.shape)

    def left(self, layer: _ConvNd, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> None:
        """Return None: the input's pixels do not share the windows of s that they write to."""
        return None

    def multiply_adds(self, layer: _ConvNd, output: Tensor) -> int:
        sides = zip(output.shape[2:], _per_dimension(layer, layer.stride), _of_one(layer))
        pixels = math.prod((length - one) // stride + 1 for length, stride, one in sides)
        return pixels * layer.weight.numel()


def _kernel(layer: _ConvNd) -> tuple[int, ...]:
    return tuple(layer.weight.shape[2:])


def _per_dimension(layer: _ConvNd, setting: Any) -> tuple[int, ...]:
    """Return a setting for each dimension; if it was set after construction, one number may stand for all."""
    numbers = (setting,) if isinstance(setting, int) else tuple(setting)
    return numbers * len(_kernel(layer)) if len(numbers) == 1 else numbers


def _sides(layer: _ConvNd) -> list[int]:
    """Return what the layer pads its input by, in the form of `F.pad`."""
    if layer.padding_mode != "zeros":
        return list(layer._reversed_padding_repeated_twice)  # torch does not read `padding`, which may have changed
    if layer.padding == "same":
        return [side for span in reversed(_spans(layer)) for side in ((span - 1) // 2, span // 2)]
    return _both_sides(_per_dimension(layer, 0 if layer.padding == "valid" else layer.padding))


def _is_kept_padded(layer: _ConvNd) -> bool:
    sides = _sides(layer)
    return layer.padding_mode != "zeros" or sides[::2] != sides[1::2]


def _padding(layer: _ConvNd) -> tuple[int, ...]:
    """Return the number of zeros that the convolution itself adds to both sides of each dimension."""
    sides = _sides(layer)[::2]
    return (0,) * len(sides) if _is_kept_padded(layer) else tuple(reversed(sides))


def _spans(layer: _ConvNd) -> tuple[int, ...]:
    """Return the number of pixels from a kernel's first to its last entry, both included."""
    return tuple(
        dilation * (kernel - 1) + 1 for dilation, kernel in zip(_per_dimension(layer, layer.dilation), _kernel(layer))
    )


def _of_one(layer: Any) -> tuple[int, ...]:
    """Return the size of the output of a transposed convolution for one pixel."""
    sides = zip(_spans(layer), _padding(layer), _per_dimension(layer, layer.output_padding))
    return tuple(span - 2 * pad + further for span, pad, further in sides)


def _patches(layer: _ConvNd, inputs: Tensor) -> Tensor:
    """Return the patch of the kept input under each output pixel, (n, channels · kernel, pixels)."""
    windows = _windows(layer, F.pad(inputs, _both_sides(_padding(layer))))
    return windows.flatten(1, 1 + len(_kernel(layer))).flatten(2)


def _grouped_patches(layer: _ConvNd, inputs: Tensor, ones: bool) -> Tensor:
    """Return the patches by group, (n, g, pixels, q), with a last column of ones where `ones` is set.

    Points and pixels lie next to each other in memory, so that products summed over both copy nothing.
    """
    kernel = _kernel(layer)
    windows = _windows(layer, F.pad(inputs, _both_sides(_padding(layer)))).transpose(0, 1)
    windows = windows.unflatten(0, (layer.groups, -1))  # (g, channels, n, *kernel, *pixels)
    windows = windows.movedim(2, 2 + len(kernel))
    entries, pixels = math.prod(layer.weight.shape[1:]), windows.shape[-len(kernel) :]
    result = inputs.new_empty(layer.groups, entries + ones, inputs.shape[0], math.prod(pixels))
    result[:, entries:] = 1
    result[:, :entries].unflatten(1, (-1, *kernel)).unflatten(-1, pixels).copy_(windows)
    return result.permute(2, 0, 3, 1)


def _windows(layer: _ConvNd, a: Tensor) -> Tensor:
    """Return the windows of the kernel in a padded tensor (n, channels, *size), (n, channels, *kernel, *pixels)."""
    dims = len(_kernel(layer))
    steps = zip(_spans(layer), _per_dimension(layer, layer.stride), _per_dimension(layer, layer.dilation))
    for i, (span, stride, dilation) in enumerate(steps):
        a = a.unfold(2 + i, span, stride)[..., ::dilation]
    return a.permute(0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims))


def _both_sides(padding: Sequence[int]) -> list[int]:
    """Return the padding in the form of `F.pad`: the last dimension first."""
    return [side for pad in reversed(padding) for side in (pad, pad)]
