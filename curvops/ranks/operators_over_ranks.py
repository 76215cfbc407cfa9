"""The network's operators over ranks: products with sharded vectors, and curvatures of sharded parameters.

J, Jᵀ, curvatures and kernels of shared data multiply the rows of a rank's own points. A sharded vector is spread evenly
over ranks, as a DTensor is, whereas the rows of J are on the ranks of their points. If the shards of the data differ in
size, rows move between the two layouts: as many numbers as these vectors have, far fewer than there are weights.

`co.operators` imports this file for what it registers: a reader of an operator need not know of it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from linear_operator import LinearOperator
from torch import Tensor

from curvops.linalg import Diagonal
from curvops.network import Passes
from curvops.network.likelihoods.output_fisher import Empirical, Exact, OutputFisher, Sampled
from curvops.operators.curvatures.ggn import GGN, Curvature, DiagonalGGN, EmpiricalFisher
from curvops.operators.function_space.gram_matrix import gram_matrix
from curvops.operators.function_space.tangent_kernel import TangentKernel
from curvops.operators.linearized.network_operator import Jacobian
from curvops.operators.linearized.user_operator import SHARDED
from curvops.ranks.on_shards import BlockRows, columns_over_ranks, formed_over_ranks
from curvops.ranks.sharded_linearization import ShardedLinearization
from curvops.ranks.sharded_vectors import Layouts, RowLayout, Sharded, times_block, transposed_times_block


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
        return block.multiplied(J._product, block.rows.beside(J.shape[-2]))
    points = layout_of_points(passes, block.rows)
    point_rows = block.by_panels(lambda V: push_own(passes, V.whole()), points, block.shape[0])
    return point_rows.moved(block.rows.beside(points.length))


@transposed_times_block.register
def _(J: Jacobian, block: Sharded) -> Sharded:
    """Add up the products of the ranks' own points: one reduce-scatter for some columns."""
    passes, weights, ranks = J.passes, block.rows.beside(len(J.theta)), block.rows.ranks
    if passes.shard is None:
        return block.multiplied(J._transposed_product, weights)
    point_rows = block.moved(layout_of_points(passes, block.rows))
    return point_rows.by_panels(
        lambda U: ranks.scatter_rows(pull_own(passes, U.local), weights.counts), weights, weights.length
    )


def _is_of_ranks(kernel: TangentKernel) -> bool:
    """Return whether a kernel is of the training points of several ranks, each of which holds its own."""
    return kernel.psd and kernel._args[0].passes.is_shared


@transposed_times_block.register
def _(K: TangentKernel, block: Sharded) -> Sharded:
    return times_block(K, block) if K.psd else block.multiplied(K._transposed_product, block.rows.beside(K.shape[-1]))


@times_block.register
def _(K: TangentKernel, block: Sharded) -> Sharded:
    """Return J A⁻¹ Jᵀ U: one all-reduce for some columns."""
    if not _is_of_ranks(K):
        return block.multiplied(K._product, block.rows.beside(K.shape[-2]))
    passes, ranks = K._args[0].passes, block.rows.ranks
    points = layout_of_points(passes, block.rows)

    def multiply(U: Sharded) -> Tensor:
        return push_own(passes, K.scaled(ranks.add_up(pull_own(passes, U.local))))

    return block.moved(points).by_panels(multiply, points, len(passes.model.theta)).moved(block.rows)


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


class ShardedCurvature(Curvature):
    """A curvature Σ_n J_nᵀ H_n J_n (D, D) of a network sharded by `fully_shard`, on DTensors; see `co.GGN`.

    For each layer, a product gathers that layer's part of the vectors, and sums its part of the result over the ranks.
    Cost: that of a product, and 2·D numbers sent per vector. `to_dense` is for small networks only.
    """

    _shown: ClassVar[tuple[str, ...]] = ("lin",)

    # The stored form has this rank's slices of θ, `lin`, the `output` H, and the walk over `rows` of Lᵀ J, or None.

    @classmethod
    def with_output(cls, lin: ShardedLinearization, output: OutputFisher, by_rows: bool = True) -> ShardedCurvature:
        """Return the curvature with the given H, whose products are by rows of Lᵀ J or by J."""
        return cls(lin.model.theta, lin=lin, output=output, rows=lin.passes.with_root(output) if by_rows else None)

    @property
    def output(self) -> OutputFisher:
        return self._kwargs["output"]

    @property
    def rows(self) -> Any:
        return self._kwargs["rows"]

    @property
    def layouts(self) -> Layouts:
        return self.lin.layout, self.lin.layout

    def _size(self) -> torch.Size:
        return torch.Size((self.lin.num_parameters, self.lin.num_parameters))

    @torch.no_grad()
    def _matmul(self, rhs: Any) -> Any:
        if not isinstance(rhs, Sharded):
            self.lin.rows_of(rhs)  # raises
        if rhs.ndim == 1:
            return self._matmul(rhs.unsqueeze(1)).squeeze(1)
        return rhs.like(self._product(rhs.local))

    def _t_matmul(self, rhs: Any) -> Any:
        return self._matmul(rhs)

    def _diagonal(self) -> Tensor:
        return Sharded(self.lin.passes.with_root(self.output).squared_rows(), self.lin.layout).whole()

    @torch.no_grad()
    def _draw(self, k: int, generator: torch.Generator | None) -> Any:
        return Sharded(super()._draw(k, generator), self.lin.layout)

    def to(self, *args: Any, **kwargs: Any) -> LinearOperator:
        device, dtype = torch._C._nn._parse_to(*args, **kwargs)[:2]
        if dtype in (None, self.dtype) and device in (None, self.device):
            return self
        raise ValueError("a curvature of a sharded model cannot be converted: convert the model before fully_shard.")


def _ggn(
    lin: ShardedLinearization, mc_samples: int | None = None, generator: torch.Generator | None = None
) -> LinearOperator:
    if mc_samples is None:
        return ShardedCurvature.with_output(lin, Exact(lin.likelihood), by_rows=False)
    return ShardedCurvature.with_output(lin, Sampled(lin.likelihood, lin.draw_residuals(mc_samples, generator)))


def _empirical_fisher(lin: ShardedLinearization, per_token: bool = False) -> LinearOperator:
    lin.require_labels("the empirical Fisher")
    return ShardedCurvature.with_output(lin, Empirical(lin.likelihood, lin.positions_apart(per_token)))


def _diagonal(
    lin: ShardedLinearization, fisher: str = "exact", mc_samples: int = 1, generator: torch.Generator | None = None
) -> LinearOperator:
    """Return the diagonal of the curvature named by `fisher`, an operator on sharded vectors, whole on each rank."""
    curvature = ShardedCurvature.with_output(lin, lin.output_fisher(fisher, mc_samples, generator))
    entries = Diagonal(curvature.diagonal(), space=curvature.spaces[0], sources=curvature.sources)
    return entries.sharded(lin.model.shards.mesh)


SHARDED.update({GGN: _ggn, EmpiricalFisher: _empirical_fisher, DiagonalGGN: _diagonal})
