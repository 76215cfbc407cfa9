"""Inner products of the rows Σ_t δ_t ⊗ a_t of one layer, which are formed for some output channels at a time.

Channels add up independently: however little memory there is, every row is formed once, and once more for the gradient
in δ, a and the scales of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from curvops.ambient import CACHE_BYTES
from curvops.linalg.core.structure import add_gram, mirror
from curvops.network import Layer


class Sides(NamedTuple):
    """δ (n, r, g, t, p), and a function from some of the points to their a (m, g, t, q); see `Rule.left`."""

    left: Tensor
    right: Callable[[slice], Tensor]
    width: int
    """q."""

    @property
    def num_rows(self) -> int:
        """n·r."""
        return self.left.shape[0] * self.left.shape[1]

    @property
    def point_bytes(self) -> int:
        """The bytes of a for one point."""
        return self.left.shape[2] * self.left.shape[3] * self.width * self.left.element_size()

    def held(self, most_bytes: int, contiguous: bool = False) -> Sides:
        """Return these sides with a for all points in memory, if it fits; the q numbers of one position contiguous."""
        if len(self.left) * self.point_bytes > most_bytes:
            return self
        a = self.right(slice(None))
        return self._replace(right=(a.contiguous() if contiguous else a).__getitem__)


class Block(NamedTuple):
    """Some of a layer's groups, and some of their output channels."""

    groups: slice
    channels: slice

    def of(self, matrices: Float[Tensor, "g p q"]) -> Tensor:
        """Return the entries of a layer's matrices that are in the block, as a vector."""
        return matrices[self.groups, self.channels].flatten()


def add_row_products(
    target: Float[Tensor, "nr ms"], one: Sides, other: Sides, scale: Float[Tensor, "g p q"], most_bytes: int
) -> None:
    """Add Σ_ij rows_ij scale_ij rows'_ij; if both sides are the same object, only on and above the diagonal.

    Args:
        target: the matrix to add to.
        one: the sides of the rows.
        other: the sides of the columns.
        scale: the scale of each weight, in the order of `Layer.to_matrix`; not negative.
        most_bytes: the memory for what is formed at a time.
    """
    same, side_bytes = one is other, most_bytes // (2 if one is other else 4)
    one = one.held(side_bytes)
    other = one if same else other.held(side_bytes)
    for block in _blocks(one, other, most_bytes):
        rows = _rows(one, block, most_bytes)
        if same:
            rows.mul_(block.of(scale).sqrt())
            add_gram(target, rows, rows, half=True)
        else:
            target.addmm_(rows.mul_(block.of(scale)), _rows(other, block, most_bytes).mT)
        del rows  # before the next ones are made


def row_products(
    one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], scale: Float[Tensor, "g p q"], most_bytes: int
) -> Float[Tensor, "nr ms"]:
    """Return products of rows given by δ and a, with their gradient; symmetric if both are the same object."""
    result: Tensor = _RowProducts.apply(most_bytes, scale, *one, *(() if other is one else other))  # type: ignore[no-untyped-call]
    return result


class _RowProducts(Function):
    """Products whose rows are formed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, most_bytes: int, scale: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(scale, *tensors)
        ctx.most_bytes = most_bytes
        one, other = _sides_of(tensors)
        result = scale.new_zeros(one.num_rows, other.num_rows)
        add_row_products(result, one, other, scale, most_bytes)
        return mirror(result.unsqueeze(0)).squeeze(0) if one is other else result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        scale, *tensors = ctx.saved_tensors
        one, other = _sides_of(tensors)
        same, needed = one is other, ctx.needs_input_grad
        gradient = gradient + gradient.mT if same else gradient
        gradients = [torch.zeros_like(tensor) if wanted else None for tensor, wanted in zip(tensors, needed[2:])]
        of_scale = torch.zeros_like(scale) if needed[1] else None
        for block in _blocks(one, other, ctx.most_bytes):
            rows, factor = _rows(one, block, ctx.most_bytes), block.of(scale)
            against = gradient @ (rows if same else _rows(other, block, ctx.most_bytes))
            if of_scale is not None:
                view = of_scale[block.groups, block.channels]
                view += (rows * against).sum(0).view_as(view) / (2 if same else 1)
            _add_gradient(gradients[:2], tensors[:2], block, against.mul_(factor))
            if not same:
                _add_gradient(gradients[2:], tensors[2:], block, (gradient.mT @ rows).mul_(factor))
        return None, of_scale, *gradients


def matrix_of_scales(layer: Layer, scales: Mapping[str, Tensor]) -> Float[Tensor, "g p q"]:
    """Return the scales of a layer's weights, given by parameter name and 0-d if constant, as its matrices."""
    shapes = {name: layer.shape_of(local) for local, name in layer.names.items()}
    return layer.to_matrix({name: scales[name].expand(shape) for name, shape in shapes.items()})


def _sides_of(tensors: Any) -> tuple[Sides, Sides]:
    one, *rest = (Sides(left, a.__getitem__, a.shape[3]) for left, a in zip(tensors[::2], tensors[1::2]))
    return one, rest[0] if rest else one


def _blocks(one: Sides, other: Sides, most_bytes: int) -> Iterator[Block]:
    """Yield blocks whose rows, of both sides, take at most a quarter of `most_bytes`, or one channel."""
    _, _, g, _, p = one.left.shape
    # On a CPU, 128 MiB hold enough channels for matrix products at full speed.
    most = most_bytes // 4 if one.left.is_cuda else min(most_bytes // 4, 2**27)
    total = one.num_rows if one is other else one.num_rows + other.num_rows
    many = max(1, most // max(1, total * one.width * one.left.element_size()))
    for start in range(0, g, step := max(1, many // p)):
        some = slice(start, start + step)
        yield from (Block(some, slice(first, first + many)) for first in range(0, p, many))


def _rows(sides: Sides, block: Block, most_bytes: int) -> Float[Tensor, "nr pq"]:
    """Return these entries of all rows, formed for some points at a time."""
    n, r, *_ = sides.left.shape
    left = sides.left
    size = left[0, 0, block.groups, 0, block.channels].numel() * sides.width
    rows = left.new_empty(n, r, size)
    most = most_bytes // 4 if left.is_cuda else min(most_bytes // 4, CACHE_BYTES)
    step = max(1, most // max(1, sides.point_bytes))
    for points in (slice(start, start + step) for start in range(0, n, step)):
        first, second, here = _positions(left[points], block), sides.right(points)[:, block.groups], rows[points]
        if first.shape[1] == 1:
            torch.bmm(first[:, 0], second[:, 0], out=here.view(len(here), -1, sides.width))
        else:
            here.copy_((first @ second).unflatten(2, (r, -1)).transpose(1, 2).flatten(2))
    return rows.flatten(0, 1)


def _positions(left: Tensor, block: Block) -> Float[Tensor, "n g rp t"]:
    return left[:, :, block.groups, :, block.channels].permute(0, 2, 1, 4, 3).flatten(2, 3)


def _add_gradient(
    into: list[Tensor | None], tensors: list[Tensor], block: Block, rows: Float[Tensor, "nr gpq"]
) -> None:
    """Add the contribution of these entries of the rows to the gradients in δ and a."""
    (left, a), (of_left, of_a) = tensors, into
    shape = len(a[0, block.groups]), -1, a.shape[3]
    rows = rows.unflatten(0, left.shape[:2]).unflatten(2, shape).transpose(1, 2).flatten(2, 3)  # (n, g, r·p, q)
    if of_left is not None:
        of_block = (rows @ a[:, block.groups].mT).unflatten(2, (left.shape[1], -1))  # (n, g, r, p, t)
        of_left[:, :, block.groups, :, block.channels] += of_block.permute(0, 2, 1, 4, 3)
    if of_a is not None:
        of_a[:, block.groups] += _positions(left, block).mT @ rows
