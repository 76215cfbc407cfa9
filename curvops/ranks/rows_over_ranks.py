"""Vectors over the outputs of points that are shared among ranks: J, Jᵀ and kernels multiply a rank's own rows.

A sharded vector is spread evenly over ranks, as a DTensor is, whereas the rows of J are on the ranks of their points.
If the shards of the data differ in size, rows move between the two layouts: as many numbers as these vectors have, far
fewer than there are weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from curvops.network import Passes
from curvops.operators.curvatures.ggn import Curvature
from curvops.operators.function_space.gram_matrix import gram_matrix
from curvops.operators.function_space.tangent_kernel import TangentKernel
from curvops.operators.linearized.network_operator import Jacobian
from curvops.ranks.on_shards import BlockRows, columns_over_ranks, formed_over_ranks
from curvops.ranks.sharded_vectors import PANEL_BYTES, RowLayout, Sharded, times_block, transposed_times_block


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
    return passes.own_sum(lambda _, J: J.pull(z[:, J.points.start - start : J.points.stop - start]), K)


@times_block.register
def _(A: Curvature, block: Sharded) -> Sharded:
    """Add up the products of the ranks' own points: one reduce-scatter for some columns."""
    if A.passes.shard is None or type(A)._product is not Curvature._product:
        return block.multiplied(A._product)
    return block.multiplied(partial(A._product, own=True), partial=True)


@times_block.register
def _(J: Jacobian, block: Sharded) -> Sharded:
    """Multiply for a rank's own points, with some columns gathered."""
    passes = J.passes
    if passes.shard is None:
        return block.multiplied(J._product)
    points = layout_of_points(passes, block.rows)
    point_rows = by_panels(block, points, block.shape[0], lambda V: push_own(passes, block.like(V).whole()))
    return point_rows.moved(block.rows.beside(points.length))


@transposed_times_block.register
def _(J: Jacobian, block: Sharded) -> Sharded:
    """Add up the products of the ranks' own points: one reduce-scatter for some columns."""
    passes = J.passes
    if passes.shard is None:
        return block.multiplied(J._transposed_product)
    weights, ranks = block.rows.beside(len(J.theta)), block.rows.ranks
    point_rows = block.moved(layout_of_points(passes, block.rows))
    return by_panels(
        point_rows, weights, weights.length, lambda U: ranks.scatter_rows(pull_own(passes, U), weights.counts)
    )


def _is_of_ranks(kernel: TangentKernel) -> bool:
    """Return whether a kernel is of the training points of several ranks, each of which holds its own."""
    return kernel.psd and kernel._args[0].passes.is_shared


@transposed_times_block.register
def _(K: TangentKernel, block: Sharded) -> Sharded:
    return times_block(K, block) if K.psd else block.multiplied(K._transposed_product)


@times_block.register
def _(K: TangentKernel, block: Sharded) -> Sharded:
    """Return J A⁻¹ Jᵀ U: one all-reduce for some columns."""
    if not _is_of_ranks(K):
        return block.multiplied(K._product)
    passes, ranks = K._args[0].passes, block.rows.ranks
    points = layout_of_points(passes, block.rows)

    def multiply(U: Tensor) -> Tensor:
        return push_own(passes, K.scaled(ranks.add_up(pull_own(passes, U))))

    return by_panels(block.moved(points), points, len(passes.model.theta), multiply).moved(block.rows)


@columns_over_ranks.register
def _(K: TangentKernel, index: Int[Tensor, " b"], layout: RowLayout) -> Sharded:
    """Return columns from a rank's own points: one all-reduce of D·b numbers."""
    if not _is_of_ranks(K):
        return columns_over_ranks.dispatch(object)(K, index, layout)
    J = K._args[0]
    return Sharded(push_own(J.passes, K.scaled(J.rows_at(index))), layout_of_points(J.passes, layout)).moved(layout)


@formed_over_ranks.register
def _(K: TangentKernel, layout: RowLayout) -> BlockRows:
    """Form the rows of a rank's own points, beside the points of one other rank at a time."""
    if not _is_of_ranks(K):
        return formed_over_ranks.dispatch(object)(K, layout)
    J, shard = K._args[0], K._args[0].passes.shard
    points, own_jacobian, rows = layout_of_points(J.passes, layout), J.apart(), []
    for inputs, count in zip(shard.in_turn(), filter(None, points.counts), strict=True):
        other = own_jacobian if inputs is None else J.at(J.passes.over([(inputs, None)]), count)
        rows.append(gram_matrix(own_jacobian, other, K.prior))
    whole = Sharded(torch.cat(rows, 1)[: points.counts[points.ranks.rank]], points)
    return BlockRows(whole.moved(layout).local, layout=layout, psd=True)
