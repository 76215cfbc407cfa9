"""Vectors over the outputs of points that are shared among ranks: J, Jᵀ and kernels multiply a rank's own rows.

A sharded vector is spread evenly over ranks, as a DTensor is, whereas the rows of J are on the ranks of their points.
If the shards of the data differ in size, rows move between the two layouts: as many numbers as these vectors have, far
fewer than there are weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.network import Passes, accumulate
from curvops.ranks.sharded_vectors import PANEL_BYTES, RowLayout, Sharded


def layout_of_points(passes: Passes, beside: RowLayout) -> RowLayout:
    """Return how the rows of J lie, with their points, over the ranks of sharded vectors.

    Raises ValueError if these are not the ranks of the points.
    """
    shard = passes.shard
    assert shard is not None
    shard.ranks.require_ranks_of(beside.ranks)
    return RowLayout(
        beside.ranks, tuple(count * passes.engines.plan.num_outputs for count in shard.counts), beside.mesh
    )


def by_panels(
    block: Sharded,
    layout: RowLayout,
    length: int,
    multiply: Callable[[Float[Tensor, "own w"]], Float[Tensor, "rows w"]],
) -> Sharded:
    """Return this rank's rows of a product, computed from its rows of some columns at a time.

    `length` is the length of the longest vectors that are gathered whole for each column; together they stay as small
    as in `Sharded.multiplied`.
    """
    if block.ndim == 1:
        return by_panels(block.unsqueeze(1), layout, length, multiply).squeeze(1)
    ranks, K = layout.ranks, block.shape[1]
    result = Sharded(block.local.new_empty(K, layout.counts[ranks.rank]).mT, layout)
    width = max(1, -(-K // ranks.size), PANEL_BYTES // (length * block.dtype.itemsize))
    for start in range(0, K, width):
        panel = slice(start, start + width)
        result.local[:, panel] = multiply(block.local[:, panel])
    return result


def push_own(passes: Passes, block: Float[Tensor, "D K"]) -> Float[Tensor, "own K"]:
    """Return J V for the points of this rank alone."""
    if passes.shard is None or not passes.shard.num_own:
        return block.new_zeros(block.shape[1], 0).mT
    return torch.cat([J.push(block).flatten(1) for _, J in passes.each(block.shape[1])], 1).mT


def pull_own(passes: Passes, block: Float[Tensor, "own K"]) -> Float[Tensor, "D K"]:
    """Return Jᵀ U over the points of this rank alone: its part of the sum over ranks."""
    shard, K = passes.shard, block.shape[1]
    if shard is None or not shard.num_own:
        return block.new_zeros(K, len(passes.model.theta)).mT
    z, start = block.mT.unflatten(1, (-1, passes.engines.plan.num_outputs)), shard.start
    return reduce(accumulate, (J.pull(z[:, J.points.start - start : J.points.stop - start]) for _, J in passes.each(K)))


def push(passes: Passes, V: Sharded) -> Sharded:
    """Return J V for V sharded over weights: each rank gathers some columns and multiplies for its own points."""
    points = layout_of_points(passes, V.rows)
    found = by_panels(V, points, V.shape[0], lambda own: push_own(passes, V.like(own).whole()))
    return found.moved(V.rows.beside(points.length))


def pull(passes: Passes, U: Sharded) -> Sharded:
    """Return Jᵀ U, sharded over weights: one reduce-scatter for some columns of U."""
    weights, ranks = U.rows.beside(len(passes.model.theta)), U.rows.ranks
    own = U.moved(layout_of_points(passes, U.rows))
    return by_panels(
        own, weights, weights.length, lambda part: ranks.scatter_rows(pull_own(passes, part), weights.counts)
    )


def push_pulled(passes: Passes, U: Sharded, scale: Callable[[Float[Tensor, "D w"]], Tensor]) -> Sharded:
    """Return J S Jᵀ U for a map `scale` of weights: one all-reduce for some columns of U."""
    points, ranks = layout_of_points(passes, U.rows), U.rows.ranks
    found = by_panels(
        U.moved(points),
        points,
        len(passes.model.theta),
        lambda part: push_own(passes, scale(ranks.add_up(pull_own(passes, part)))),
    )
    return found.moved(U.rows)
