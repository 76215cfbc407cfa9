"""Inner products of the rows Σ_t δ_t ⊗ a_t of one layer, which are formed for some output channels at a time.

Channels add up independently: however little memory there is, every row is formed once, and once more for a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.ambient import CACHE_BYTES
from curvops.linalg.core.structure import add_gram
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


def row_products(one: Sides, other: Sides, scale: Float[Tensor, "g p q"], most_bytes: int) -> Float[Tensor, "nr ms"]:
    """Return Σ_ij rows_ij scale_ij rows'_ij with its graph; the backward pass forms the rows of each block again."""
    from torch.utils.checkpoint import checkpoint  # torch 2.7 imports sympy with it

    total = scale.new_zeros(one.num_rows, other.num_rows)
    for block in _blocks(one, other, most_bytes):
        total = total + checkpoint(_block_products, one, other, block, scale, use_reentrant=False)
    return total


def _block_products(one: Sides, other: Sides, block: Block, scale: Tensor) -> Float[Tensor, "nr ms"]:
    rows = _recorded_rows(one, block)
    others = rows if other is one else _recorded_rows(other, block)
    return (rows * block.of(scale)) @ others.mT


def matrix_of_scales(layer: Layer, scales: Mapping[str, Tensor]) -> Float[Tensor, "g p q"]:
    """Return the scales of a layer's weights, given by parameter name and 0-d if constant, as its matrices."""
    shapes = {name: layer.shape_of(local) for local, name in layer.names.items()}
    return layer.to_matrix({name: scales[name].expand(shape) for name, shape in shapes.items()})


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


def _recorded_rows(sides: Sides, block: Block) -> Float[Tensor, "nr pq"]:
    rows = _positions(sides.left, block) @ sides.right(slice(None))[:, block.groups]
    return rows.unflatten(2, (sides.left.shape[1], -1)).transpose(1, 2).flatten(2).flatten(0, 1)


def _positions(left: Tensor, block: Block) -> Float[Tensor, "n g rp t"]:
    return left[:, :, block.groups, :, block.channels].permute(0, 2, 1, 4, 3).flatten(2, 3)
