"""Blocks of long vectors whose rows are shared among the processes of a group: unwrapped DTensors with `Shard(0)`.

A DTensor rejects arithmetic with plain tensors, such as one number for each column. So an algorithm works on `Sharded`:
this rank's rows as a plain tensor, for which the primitives of `vectors` are registered. Sums over rows (inner
products, Gram matrices) are added up over the ranks and result in a plain tensor, equal on all of them to the bit, so
that all take the same decisions. At the door of an algorithm DTensors become blocks, and blocks of its result DTensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from linear_operator import LinearOperator
from torch import Tensor

from curvops.ambient import SMALL_BYTES
from curvops.checks import refuse
from curvops.fingerprints import fingerprint
from curvops.linalg.core import vectors
from curvops.linalg.core.vectors import Description, Vectors
from curvops.ranks.process_group import Ranks, even_share, is_dtensor

SEED = "the random numbers, from generator or torch.manual_seed"
"""The name under which ranks compare what they draw."""
ARITHMETIC = ("add", "addcmul", "sub", "rsub", "mul", "div", "true_divide")


@dataclass(frozen=True)
class RowLayout:
    """The number of rows on each rank, in order; `mesh` is the device mesh of DTensors in this layout."""

    ranks: Ranks
    counts: tuple[int, ...]
    mesh: Any = None

    @classmethod
    def even(cls, ranks: Ranks, length: int, mesh: Any = None) -> RowLayout:
        """Return the layout of `Shard(0)`: ⌈n/ranks⌉ rows each, fewer or none at the end."""
        return cls(ranks, tuple(len(even_share(length, ranks.size, rank)) for rank in range(ranks.size)), mesh)

    @classmethod
    def on(cls, mesh: Any, length: int) -> RowLayout:
        """Return the layout of `Shard(0)` on a device mesh; raise ValueError for one of several dimensions."""
        refuse(mesh.ndim != 1, f"vectors are sharded over a mesh of one dimension, such as mesh[name], not {mesh}.")
        ranks = _ranks_of(mesh)
        if mesh.mesh.tolist() != sorted(mesh.mesh.tolist()):  # with the same outcome on all ranks
            raise ValueError(f"the processes of a mesh of sharded vectors must come in ascending order, got {mesh}.")
        return cls.even(ranks, length, mesh)

    def beside(self, length: int) -> RowLayout:
        """Return the layout of other vectors on these ranks: this one for the same number of rows, else an even one."""
        return self if length == self.length else RowLayout.even(self.ranks, length, self.mesh)

    @property
    def length(self) -> int:
        """The number of rows of all ranks."""
        return sum(self.counts)

    @property
    def own(self) -> slice:
        """The rows of this rank among all rows."""
        starts = [0, *accumulate(self.counts)]
        return slice(*starts[self.ranks.rank : self.ranks.rank + 2])

    def require(self, other: RowLayout) -> None:
        """Raise ValueError unless another block lies on the same ranks, row by row."""
        if other is not self and (other.ranks is not self.ranks or other.counts != self.counts):
            raise ValueError("sharded vectors lie on different ranks: use one device mesh for all.")

    def stacked(self, tensor: Float[Tensor, "*s"]) -> Float[Tensor, "ranks *s"]:
        """Return a small tensor from each rank, stacked. One all-reduce."""
        every = tensor.new_zeros(self.ranks.size, *tensor.shape)
        every[self.ranks.rank] = tensor
        return self.ranks.add_up(every)


Layouts: TypeAlias = tuple[RowLayout, RowLayout] | None


def _ranks_of(mesh: Any) -> Ranks:
    """Return the ranks of a device mesh, created once; all of them must call this."""
    group = mesh.get_group(0)
    if group not in _ranks_by_group:
        _ranks_by_group[group] = Ranks(group)
    return _ranks_by_group[group]


_ranks_by_group: dict[Any, Ranks] = {}


_Block: Any = object  # for the type checker, a block is what the primitives take


class Sharded(_Block):
    """A block (n, K), or a vector (n,), of which each rank holds its rows.

    Arithmetic is with a block of the same layout, a number, a row of K numbers, or a plain column (n, 1), of which each
    rank uses its own rows.

    Args:
        local: the rows of this rank, (n_rank, K), the columns contiguous.
        layout: the rows of all ranks.
    """

    def __init__(self, local: Tensor, layout: RowLayout) -> None:
        self.local, self.rows = local, layout
        self.dtype, self.device, self.ndim = local.dtype, local.device, local.ndim

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole block."""
        return torch.Size((self.rows.length, *self.local.shape[1:]))

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient is recorded."""
        return self.local.requires_grad

    @property
    def vector_bytes(self) -> int:
        """The bytes of a column on the rank that holds most of it."""
        return max(self.rows.counts) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The bytes on this rank."""
        return self.local.nbytes

    def __repr__(self) -> str:
        return f"Sharded({tuple(self.shape)}, {self.dtype}, rows {self.rows.counts})"

    def like(self, local: Tensor) -> Sharded:
        """Return other rows in the same layout."""
        return Sharded(local, self.rows)

    def to(self, *args: Any, **kwargs: Any) -> Sharded:
        """Convert to another dtype."""
        return self.like(self.local.to(*args, **kwargs))

    def clone(self) -> Sharded:
        """Return a copy."""
        return self.like(self.local.clone())

    def detach(self) -> Sharded:
        """Return the block without its graph."""
        return self.like(self.local.detach())

    def unsqueeze(self, dim: int) -> Sharded:
        """Return a vector as a block of one column."""
        return self.like(self.local.unsqueeze(1))

    def squeeze(self, *_: Any) -> Sharded:
        """Return the only column as a vector."""
        return self.like(self.local.squeeze(1))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function.__name__.strip("_")
        block = next(argument for argument in args if isinstance(argument, Sharded))
        if name == "matmul" and isinstance(args[0], Tensor):
            return block.multiplied(lambda whole: args[0] @ whole, block.rows.beside(len(args[0])))
        if name == "to" and isinstance(args[0], Tensor):
            return args[0].to(block.local)
        if name not in ARITHMETIC:
            raise TypeError(f"torch's {name} is not available for vectors that are sharded over ranks.")
        return block.like(function(*map(block.rows_of, args), **kwargs or {}))

    def rows_of(self, other: Any) -> Any:
        """Return this rank's rows of another block or of a plain column; numbers for each column stay as they are."""
        if isinstance(other, Sharded):
            self.rows.require(other.rows)
            return other.local
        whole = isinstance(other, Tensor) and other.ndim == self.ndim and len(other) == self.rows.length
        return other[self.rows.own] if whole else other

    def whole(self) -> Float[Tensor, "n *K"]:
        """Return the rows of all ranks as a plain tensor. One all-gather."""
        if self.ndim == 1:
            return self.unsqueeze(1).whole().squeeze(1)
        if not self.local.shape[1]:
            return self.local.new_empty(self.shape)
        return self.rows.ranks.gather_rows(self.local, self.rows.counts)

    def moved(self, layout: RowLayout) -> Sharded:
        """Return the block with its rows in this layout over the same ranks; itself if they are. One all-gather."""
        return self if self.rows.counts == layout.counts else self.multiplied(lambda whole: whole, layout)

    def multiplied(
        self, multiply: Callable[[Tensor], Tensor], layout: RowLayout | None = None, partial: bool = False
    ) -> Sharded:
        """Return A V for the map V -> A V of plain blocks, some columns at a time.

        A panel of columns is gathered and multiplied, and each rank keeps its rows; if the products of the ranks are
        `partial`, they are added up on the way (reduce-scatter). A panel has 8 arrays in all: sent, received,
        multiplied, the result and copies. The rows of A are in the given layout, by default in that of V.
        """
        layout = self.rows if layout is None else layout

        def rows_of_product(panel: Sharded) -> Tensor:
            image = multiply(panel.whole())
            return layout.ranks.scatter_rows(image, layout.counts) if partial else image[layout.own]

        return self.by_panels(rows_of_product, layout, self.shape[0], 8)

    def by_panels(
        self,
        multiply: Callable[[Sharded], Float[Tensor, "rows w"]],
        layout: RowLayout,
        length: int,
        arrays: int = 1,
    ) -> Sharded:
        """Return this rank's rows of a product, in the given layout, from its rows of some columns at a time.

        `length` is that of the longest vectors that a panel holds whole, in so many `arrays`. They take no more than
        this rank's part of the block, or than `SMALL_BYTES`, or a panel is one column.
        """
        if self.ndim == 1:
            return self.unsqueeze(1).by_panels(multiply, layout, length, arrays).squeeze(1)
        K = self.shape[1]
        result = _empty(layout, K, self.local)
        width = max(1, -(-K // layout.ranks.size) // arrays, SMALL_BYTES // (length * self.dtype.itemsize))
        for start in range(0, K, width):
            panel = slice(start, start + width)
            result.local[:, panel] = multiply(self.like(self.local[:, panel]))
        return result

    def new_empty(self, rows: int, columns: int) -> Sharded:
        """Return an uninitialised block of this many rows, in this block's layout if it has as many, else even."""
        return _empty(self.rows.beside(rows), columns, self.local)


def _empty(layout: RowLayout, columns: int, like: Tensor) -> Sharded:
    return Sharded(like.new_empty(columns, layout.counts[layout.ranks.rank]).mT, layout)


def _arithmetic(name: str) -> Any:
    def apply(self: Sharded, other: Any) -> Sharded:
        return self.like(getattr(self.local, name)(self.rows_of(other)))

    return apply


for _name in ("add", "sub", "mul", "truediv"):
    for _kind in ("", "r", "i"):
        setattr(Sharded, f"__{_kind}{_name}__", _arithmetic(f"__{_kind}{_name}__"))


class LaidOut(Description):
    """The description of a matrix whose vectors are sharded."""

    row_layout: RowLayout
    column_layout: RowLayout

    @classmethod
    def of(cls, facts: Description, row_layout: RowLayout, column_layout: RowLayout) -> LaidOut:
        """Return the description with the layouts of its images and of its arguments."""
        description = cls(*facts)
        description.row_layout, description.column_layout = row_layout, column_layout
        return description

    @property
    def vector_bytes(self) -> int:
        """The bytes of a vector's rows on the longer side, on the rank that holds most of them."""
        return max(*self.row_layout.counts, *self.column_layout.counts) * self.dtype.itemsize

    @property
    def pair_bytes(self) -> int:
        """The most bytes of a rank's rows of a vector on each side."""
        return (max(self.row_layout.counts) + max(self.column_layout.counts)) * self.dtype.itemsize


def _layout_of(like: Sharded | LaidOut) -> RowLayout:
    return like.column_layout if isinstance(like, LaidOut) else like.rows


def _own_description(like: Sharded | LaidOut) -> Description:
    """Return the description from which a rank's own rows are made."""
    layout = _layout_of(like)
    rows = layout.counts[layout.ranks.rank]
    return Description(rows, rows, like.dtype, like.device)


def _made_by(primitive: Any) -> Callable[[Any, int], Sharded]:
    return lambda like, k: Sharded(primitive(_own_description(like), k), _layout_of(like))


for _primitive in (vectors.empty_block, vectors.zero_block):
    for _like in (Sharded, LaidOut):
        _primitive.register(_like, _made_by(_primitive))


@vectors.random_block.register(Sharded)
@vectors.random_block.register(LaidOut)
def _random_block(like: Any, k: int, kind: Any = "rademacher", generator: torch.Generator | None = None) -> Sharded:
    """Draw the columns as one process would, one at a time, and keep this rank's rows."""
    layout = _layout_of(like)
    block = Sharded(vectors.empty_block(_own_description(like), k), layout)
    whole = Description(layout.length, layout.length, like.dtype, like.device)
    for j, drawn in enumerate(vectors.random_columns(whole, k, kind, generator)):
        if not j:
            _require_equal_numbers(layout.ranks, drawn)
        block.local[:, j] = drawn[layout.own]
    return block


class OverSharedData(Description):
    """The description of a matrix whose products are sums over data that ranks share; its vectors are whole."""

    ranks: Ranks

    @classmethod
    def of(cls, facts: Description, ranks: Ranks) -> OverSharedData:
        """Return the description with these ranks."""
        description = cls(*facts)
        description.ranks = ranks
        return description


@vectors.random_block.register
def _(like: OverSharedData, k: int, kind: Any = "rademacher", generator: torch.Generator | None = None) -> Tensor:
    block = vectors.random_block(Description(*like), k, kind, generator)
    _require_equal_numbers(like.ranks, block[:, :1])
    return block


def _require_equal_numbers(ranks: Ranks, drawn: Tensor) -> None:
    """Raise RanksDifferError unless all ranks drew the same numbers."""
    ranks.require_equal({SEED: int(fingerprint([drawn[:64]]))})


def ranks_together(A: Any) -> Ranks | None:
    """Return the ranks that make each product with A together: they share its data, or rows of its vectors."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if (layouts := layouts_of(A)) is not None:
        return layouts[0].ranks
    ranks: Ranks | None = getattr(A, "ranks", None)
    if ranks is not None:
        return ranks
    operators = (operator for operator in (*A._args, *A._kwargs.values()) if isinstance(operator, LinearOperator))
    return next((shared for operator in operators if (shared := ranks_together(operator)) is not None), None)


# Rows are independent in these: each rank works alone, with the primitive for tensors.
for _name in ("part", "as_block", "columns", "combine", "finite_part"):
    _primitive = getattr(vectors, _name)
    _primitive.register(Sharded, lambda X, *rest, f=_primitive: X.like(f(X.local, *rest)))


@vectors.join.register
def _(first: Sharded, *others: Sharded) -> Sharded:
    return first.like(vectors.join(first.local, *map(first.rows_of, others)))


@vectors.put.register
def _(X: Sharded, start: int, V: Sharded) -> None:
    vectors.put(X.local, start, X.rows_of(V))


@vectors.put_columns.register
def _(X: Sharded, index: Tensor, V: Sharded) -> None:
    vectors.put_columns(X.local, index, X.rows_of(V))


@vectors.rotate.register
def _(X: Sharded, C: Tensor) -> None:
    vectors.rotate(X.local, C)


@vectors.axpy.register
def _(Y: Sharded, X: Sharded, C: Tensor) -> Sharded:
    vectors.axpy(Y.local, Y.rows_of(X), C)
    return Y


def _within(index: Int[Tensor, "*i"], layout: RowLayout) -> tuple[Tensor, Tensor]:
    """Return which positions are on this rank, and where they are there."""
    index = torch.where(index < 0, index + layout.length, index)
    row_slice = layout.own
    inside = (index >= row_slice.start) & (index < row_slice.stop)
    return inside, index[inside] - row_slice.start


@vectors.entries.register
def _(X: Sharded, index: Tensor) -> Tensor:
    """Return rows on every rank. One all-reduce."""
    inside, places = _within(index, X.rows)
    rows = X.local.new_zeros(*index.shape, *X.local.shape[1:])
    rows[inside] = X.local[places]
    return X.rows.ranks.add_up(rows)


@vectors.put_entries.register
def _(X: Sharded, index: Tensor, rows: Tensor) -> None:
    inside, places = _within(index, X.rows)
    X.local[places] = rows[inside]


# Results of size K are added up over the ranks, and are plain tensors.
@vectors.inner.register
def _(X: Sharded, Y: Sharded) -> Tensor:
    return X.rows.ranks.add_up(vectors.inner(X.local, X.rows_of(Y)))


@vectors.gram.register
def _(X: Sharded, Y: Sharded) -> Tensor:
    return X.rows.ranks.add_up(vectors.gram(X.local, X.local if Y is X else X.rows_of(Y)))


@vectors.norm.register
def _(X: Sharded) -> Tensor:
    return vectors.norm(X.rows.stacked(vectors.norm(X.local)))  # norms overflow later than squares


@vectors.largest.register
def _(X: Sharded) -> Tensor:
    local_largest = vectors.largest(X.local) if len(X.local) else X.local.new_zeros(X.shape[1], dtype=torch.float64)
    return X.rows.stacked(local_largest).amax(0)


@vectors.householder.register
def _(X: Sharded) -> tuple[Sharded, Tensor]:
    """Factorise on each rank, then factorise the small triangles of all ranks."""
    K, layout = X.shape[1], X.rows
    Q, R = vectors.householder(X.local)
    padded = R.new_zeros(K, K)
    padded[: len(R)] = R
    heights = [min(K, count) for count in layout.counts]
    triangles = torch.cat([triangle[:height] for triangle, height in zip(layout.stacked(padded), heights)])
    small, R = torch.linalg.qr(triangles)
    return X.like(vectors.combine(Q, small.split(heights)[layout.ranks.rank])), R


@vectors.project_out.register
def _(W: Sharded, store: Sharded, room: int, used: int, which: Tensor) -> tuple[Sharded, Tensor]:
    remainder, along = vectors.project_out_by(W.rows.ranks.add_up, W.local, W.rows_of(store), room, used, which)
    return W.like(remainder), along


@vectors.by_rows.register
def _(first: Sharded, *others: Sharded, function: Callable[..., Tensor]) -> Tensor:
    """Gather the rows of all ranks, which are a few vectors."""
    rows = [block.local if len(first.local) else block.local.new_zeros(1, block.shape[1]) for block in (first, *others)]
    return first.like(vectors.by_rows(*rows, function=function)[: len(first.local)]).whole()


def stored(block: Vectors) -> Tensor:
    """Return a block as a tensor, a DTensor if it is sharded, for an operator to store."""
    return wrapped(block) if isinstance(block, Sharded) else block


def block_of(tensor: Tensor) -> Any:
    """Return a stored tensor as a block."""
    return unwrapped(tensor) if is_dtensor(tensor) else tensor


# Products of matrices with blocks. Those that have a better way than to gather whole columns register it.


@functools.singledispatch
def times_block(A: Any, block: Sharded) -> Sharded:
    """Return A V, some columns at a time on each rank."""
    return block.multiplied(A._product, block.rows.beside(A.shape[-2]))


@functools.singledispatch
def transposed_times_block(A: Any, block: Sharded) -> Sharded:
    """Return Aᵀ U, some columns at a time on each rank."""
    return block.multiplied(A._transposed_product, block.rows.beside(A.shape[-1]))


# The doors between DTensors and blocks.


def unwrapped(tensor: Any) -> Sharded:
    """Return a DTensor of vectors, sharded over its first dimension, as a block.

    Raises:
        ValueError: it is replicated, sharded over its columns, or on a mesh of several dimensions.
        TypeError: a gradient is recorded for it.
    """
    from torch.distributed.tensor import Shard

    if tensor.requires_grad and torch.is_grad_enabled():
        raise TypeError("no gradient passes through sharded vectors: detach() them, or use torch.no_grad().")
    layout = RowLayout.on(tensor.device_mesh, tensor.shape[0]) if tensor.ndim in (1, 2) else None
    if layout is None or tuple(tensor.placements) != (Shard(0),):
        raise ValueError("vectors and blocks are sharded by rows: tensor.redistribute(placements=[Shard(0)]).")
    local = tensor.to_local().detach()
    if len(local) != layout.counts[layout.ranks.rank]:
        raise ValueError(f"rank {layout.ranks.rank} holds {len(local)} rows, unlike Shard(0): see distribute_tensor.")
    return Sharded(local, layout)


def wrapped(block: Sharded) -> Any:
    """Return a block as a DTensor with `Shard(0)`; rows in another layout are moved."""
    from torch.distributed.tensor import DTensor, Shard

    layout = block.rows
    block = block.moved(RowLayout.even(layout.ranks, layout.length, layout.mesh))
    stride = (1,) if block.ndim == 1 else (1, layout.length)
    return DTensor.from_local(block.local, layout.mesh, [Shard(0)], run_check=False, shape=block.shape, stride=stride)


def is_block(value: Any) -> bool:
    """Return whether a value is a sharded block."""
    return isinstance(value, Sharded)


def exchanged(value: Any, kind: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """Change the values of one kind inside tuples and dataclasses."""
    if kind(value):
        return change(value)
    if type(value) is tuple:
        return tuple(exchanged(entry, kind, change) for entry in value)
    if is_dataclass(value) and not isinstance(value, type):
        entries = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        changed = {name: exchanged(entry, kind, change) for name, entry in entries.items()}
        changed = {name: entry for name, entry in changed.items() if entry is not entries[name]}
        return replace(value, **changed) if changed else value
    return value


def layouts_of(A: Any) -> Layouts:
    """Return the layouts over ranks of an operator's vectors, or of a DTensor's rows; None for whole ones."""
    if is_dtensor(A):
        layout = unwrapped(A).rows
        return layout, layout
    layouts: Layouts = getattr(A, "layouts", None)
    return layouts


@functools.singledispatch
def over_ranks(A: Any, layout: RowLayout) -> Any:
    """Return a matrix as an operator whose vectors are sharded on the ranks of this layout."""
    raise TypeError(f"A must be a tensor or a linear_operator.LinearOperator, got {type(A).__name__}.")


def as_blocks(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Return arguments with blocks for DTensors, the matrix on their ranks, and whether there are any blocks."""
    blocks: list[Sharded] = []

    def unwrap(tensor: Any) -> Sharded:
        blocks.append(unwrapped(tensor))
        return blocks[-1]

    args, values = exchanged((args, tuple(options.values())), is_dtensor, unwrap)
    if blocks:
        args = over_ranks(args[0], blocks[0].rows), *args[1:]
    return args, dict(zip(options, values)), bool(blocks)


def as_dtensors(result: Any) -> Any:
    """Return an algorithm's result with DTensors for blocks."""
    return exchanged(result, is_block, wrapped)
