"""Operators on vectors that are sharded over a device mesh: any operator, or a formed matrix whose rows are shared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.ambient import Memories, Memory
from curvops.linalg.core.algorithm import memories_of
from curvops.linalg.core.structure import columns_of, rows
from curvops.linalg.core.vectors import Description, described_for_ranks, entries, gram, product, transposed_product
from curvops.linalg.operators.base import Operator, UnaryOperator, by_columns
from curvops.linalg.operators.closed_form import ClosedForm, closed_form
from curvops.linalg.operators.given_matrix import Dense, Diagonal
from curvops.ranks.process_group import Ranks, is_dtensor
from curvops.ranks.sharded_vectors import (
    LaidOut,
    Layouts,
    OverSharedData,
    RowLayout,
    Sharded,
    layouts_of,
    over_ranks,
    ranks_together,
    times_block,
    transposed_times_block,
    unwrapped,
    wrapped,
)


def form_on_shards(A: OnShards, shift: Tensor) -> ClosedForm | None:
    """Return the closed form of A + diag(d) for whole vectors, applied to sharded ones some columns at a time."""
    form = closed_form(A.base, shift)
    if form is not None:
        for name in ("solve", "inverse_root"):
            setattr(form, name, partial(_applied, getattr(form, name)))
    return form


def _applied(function: Callable[[Tensor], Tensor], block: Tensor) -> Tensor:
    return block.multiplied(function) if isinstance(block, Sharded) else function(block)


class OnShards(UnaryOperator):
    """The matrix A on sharded vectors: for each product some columns are gathered, and each rank keeps its rows.

    `op.sharded(mesh)` makes it. Operators built from it (sums, multiples, with a prior) take sharded vectors, too.
    """

    _damped_form: ClassVar[Any] = staticmethod(form_on_shards)

    def __init__(self, base: LinearOperator, row_layout: RowLayout, column_layout: RowLayout) -> None:
        super().__init__(base, row_layout=row_layout, column_layout=column_layout)

    @property
    def layouts(self) -> Layouts:
        return self._kwargs["row_layout"], self._kwargs["column_layout"]

    @property
    def memories(self) -> Memories:
        memories, layout = memories_of(self.base), self._kwargs["row_layout"]
        return frozenset(memory if memory.of_ranks else Agreed(memory, layout) for memory in memories)

    def _transpose_nonbatch(self) -> LinearOperator:
        transposed, rows, columns = self.base.mT, self._kwargs["row_layout"], self._kwargs["column_layout"]
        return self if transposed is self.base else OnShards(transposed, columns, rows)

    def _matmul(self, rhs: Tensor) -> Tensor:
        if isinstance(self.base, Operator) or not isinstance(rhs, Sharded):
            return self.base._matmul(rhs)
        return rhs.multiplied(product(self.base), self._kwargs["row_layout"])

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        if isinstance(self.base, Operator) or not isinstance(rhs, Sharded):
            return self.base._t_matmul(rhs)
        return rhs.multiplied(transposed_product(self.base), self._kwargs["column_layout"])

    def _diagonal(self) -> Tensor:
        return self.base._diagonal()

    @property
    def definite(self) -> bool:
        return self.base.definite if isinstance(self.base, Operator) else self.psd

    @property
    def at_hand(self) -> bool:
        return isinstance(self.base, Operator) and self.base.at_hand

    def to_dense(self) -> Tensor:
        """Form the matrix on each rank."""
        return self.base.to_dense()

    def exact_solver(self) -> Callable[[Tensor], Tensor] | None:
        solver = self.base.exact_solver() if isinstance(self.base, Operator) else None
        return None if solver is None else partial(_applied, solver)

    def _lower_bound(self) -> float | None:
        return self.base._lower_bound() if isinstance(self.base, Operator) else None


@dataclass(frozen=True)
class Agreed:
    """A budget that each rank has its own share of; the bytes left are the least over all ranks."""

    memory: Memory
    layout: RowLayout
    of_ranks: Ranks | None = None

    @property
    def budget(self) -> int:
        """All bytes of this rank's budget."""
        return self.memory.budget

    def room(self) -> int:
        """Return the bytes left on every rank. One all-reduce."""
        local_room = torch.tensor([self.memory.room()], dtype=torch.float64, device=self.layout.mesh.device_type)
        return int(self.layout.stacked(local_room).min())

    def holding(self, nbytes: int) -> AbstractContextManager[None]:
        """Count bytes as used on this rank."""
        return self.memory.holding(nbytes)

    def keep(self, owner: object, nbytes: int) -> None:
        """Count bytes as used on this rank."""
        self.memory.keep(owner, nbytes)


@times_block.register
@transposed_times_block.register
def _(A: Diagonal, block: Sharded) -> Any:
    return block * (A.entries.unsqueeze(1) if block.ndim == 2 else A.entries)


@described_for_ranks.register
def _(A: Operator, facts: Description) -> Description:
    layouts, ranks = A.layouts, ranks_together(A)
    if layouts is not None:
        return LaidOut.of(facts, *layouts)
    return facts if ranks is None else OverSharedData.of(facts, ranks)


@over_ranks.register
def _(A: LinearOperator, layout: RowLayout) -> LinearOperator:
    layouts = layouts_of(A)
    if layouts is not None:
        for operator_layout in layouts:
            if operator_layout.length == layout.length:
                operator_layout.require(layout)
        return A
    rows, columns = (layout.beside(size) for size in A.shape[-2:])
    return A.on_layouts(rows, columns) if isinstance(A, Operator) else OnShards(A, rows, columns)


@over_ranks.register
def _(A: Tensor, layout: RowLayout) -> LinearOperator:
    return over_ranks(Dense(A.detach()), layout)


class BlockRows(Operator):
    """A matrix (m, n) of which each rank holds its rows; a product gathers only the sharded vectors.

    `co.TangentKernel(lin).formed(mesh)` and `BlockRows.of(tensor)` make one; a DTensor with `Shard(0)`, given as the
    matrix of a solver, becomes one.

    Args:
        own: the rows of this rank, (m_rank, n).
        layout: the rows of all ranks.
        psd: a promise that the matrix is symmetric positive semi-definite.

    Raises:
        ValueError: `own` is not a matrix with as many rows as the layout gives this rank.

    Examples:
        >>> A = co.linalg.Dense(torch.eye(4), psd=True)
        >>> A.shape, A @ torch.ones(4)  # on the ranks of a mesh, A.sharded(mesh) has its DTensors in blocks of rows
        (torch.Size([4, 4]), tensor([1., 1., 1., 1.]))
    """

    def __init__(self, own: Float[Tensor, "own n"], *, layout: RowLayout, psd: bool = False) -> None:
        super().__init__(own, layout=layout, psd=psd)

    @classmethod
    def of(cls, matrix: Any, psd: bool = False) -> BlockRows:
        """Make it from a DTensor (m, n) with `Shard(0)` over a one-dimensional device mesh.

        Args:
            matrix: the DTensor.
            psd: a promise that the matrix is symmetric positive semi-definite.

        Returns:
            The matrix.

        Raises:
            TypeError: the argument is not a DTensor.
            ValueError: the DTensor has another placement, or is not a matrix.
        """
        if not is_dtensor(matrix) or matrix.ndim != 2:
            raise TypeError(f"BlockRows.of takes a DTensor (m, n) with Shard(0), got {type(matrix).__name__}.")
        block = unwrapped(matrix)
        return cls(block.local, layout=block.rows, psd=psd)

    @property
    def own(self) -> Float[Tensor, "own n"]:
        """The rows of this rank."""
        return self._args[0]

    @property
    def matrix(self) -> Any:
        """The matrix as a DTensor (m, n) with `Shard(0)`."""
        return wrapped(self._shared)

    @property
    def _shared(self) -> Sharded:
        return Sharded(self.own, self._kwargs["layout"])

    @property
    def psd(self) -> bool:
        return self._kwargs["psd"]

    @property
    def symmetric(self) -> bool:
        return self.psd

    @property
    def layouts(self) -> Layouts:
        layout = self._kwargs["layout"]
        return layout, layout.beside(self.own.shape[-1])

    def _size(self) -> torch.Size:
        return torch.Size((self._kwargs["layout"].length, self.own.shape[-1]))

    def _made_of(self) -> str:
        return f"shared by {len(self._kwargs['layout'].counts)} ranks"

    def _transpose_nonbatch(self) -> LinearOperator:
        return self if self.psd else super()._transpose_nonbatch()

    def _matmul(self, rhs: Tensor) -> Tensor:
        if isinstance(rhs, Sharded):
            return Sharded(self.own @ rhs.whole(), self._kwargs["layout"])
        return by_columns(lambda block: Sharded(self.own @ block, self._kwargs["layout"]).whole(), rhs)

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        if self.psd:
            return self._matmul(rhs)
        if isinstance(rhs, Sharded):
            column_layout = self.layouts[1]  # type: ignore[index]
            if rhs.ndim == 1:
                return self._t_matmul(rhs.unsqueeze(1)).squeeze(1)
            return Sharded(
                column_layout.ranks.scatter_rows(self.own.mT @ rhs.local, column_layout.counts), column_layout
            )
        row_slice = self._kwargs["layout"].own
        return by_columns(lambda block: self._kwargs["layout"].ranks.add_up(self.own.mT @ block[row_slice]), rhs)

    def _times(self, factor: Tensor) -> LinearOperator:
        return BlockRows(self.own * factor, layout=self._kwargs["layout"], psd=self.psd and bool(factor >= 0))

    def _diagonal(self) -> Float[Tensor, " n"]:
        layout = self._kwargs["layout"]
        return Sharded(self.own.diagonal(layout.own.start), layout).whole()

    def to_dense(self) -> Float[Tensor, "m n"]:
        """Return all rows, gathered on each rank."""
        return self._shared.whole()


class SharedRows:
    """Rows of a symmetric matrix, stored as its columns with entries spread over the ranks, for dual descent."""

    def __init__(self, columns: Sharded) -> None:
        self._columns = columns

    def __matmul__(self, block: Sharded) -> Float[Tensor, "b K"]:
        return gram(self._columns, block).to(block.dtype)

    def diagonal(self) -> Float[Tensor, " b"]:
        """Return entry i of row i."""
        first = torch.arange(self._columns.shape[1], device=self._columns.device)
        return entries(self._columns, first).diagonal()


@functools.singledispatch
def columns_over_ranks(A: Any, index: Int[Tensor, " b"], layout: RowLayout) -> Sharded:
    """Return some columns of a matrix, with their rows over ranks in this layout."""
    return Sharded(columns_of(A, index)[layout.own], layout)


@functools.singledispatch
def formed_over_ranks(A: LinearOperator, layout: RowLayout) -> BlockRows:
    """Form a positive semi-definite matrix with its rows over ranks in this layout."""
    return BlockRows(A.to_dense()[layout.own].clone(), layout=layout, psd=True)


@rows.register
def _(A: OnShards) -> Callable[[Tensor], SharedRows]:
    base, layout = A.base, A._kwargs["row_layout"]

    @torch.no_grad()
    def take(index: Tensor) -> SharedRows:
        return SharedRows(columns_over_ranks(base, index, layout))

    return take


@rows.register
def _(A: BlockRows) -> Callable[[Tensor], SharedRows]:
    layout = A._kwargs["layout"]
    return lambda index: SharedRows(Sharded(A.own[:, index], layout))


@over_ranks.register
def _(A: Sharded, layout: RowLayout) -> LinearOperator:
    return BlockRows(A.local, layout=A.rows)
