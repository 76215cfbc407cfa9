"""Positions of a vector divided among blocks, and how vectors are split into blocks and joined again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor

Bordered = tuple[range, range]
"""The positions of a matrix (weights) and of a column to its right (biases), of which a part consists row by row."""


class ColumnMap(NamedTuple):
    """A map of the columns (p, K) of a part; with `rows`, also of a table, which it may overwrite.

    A table (rows, K, p / rows) holds the columns as matrices: its i-th entry has row i of each.
    """

    apply: Callable[[Tensor], Tensor]
    rows: int = 0


@dataclass(frozen=True, eq=False)
class Partition:
    """Disjoint sets of positions that together cover a vector, each a range or an index tensor; see `partition`."""

    parts: tuple[range | Tensor, ...]

    @cached_property
    def sizes(self) -> list[int]:
        """The number of positions of each part."""
        return [len(part) for part in self.parts]

    @property
    def size(self) -> int:
        """The length n of the vector."""
        return sum(self.sizes)

    @cached_property
    def in_order(self) -> bool:
        """Whether the parts are consecutive ranges, so that splitting and joining need no index."""
        start = 0
        for part in self.parts:
            if not isinstance(part, range) or part.start != start:
                return False
            start = part.stop
        return True

    def split(self, rows: Tensor) -> list[Tensor]:
        """Return the parts of each row, (..., n) -> (..., p_i), as views if the positions are ranges."""
        if self.in_order:
            return list(torch.split(rows, self.sizes, dim=-1))
        return [_take(rows, part, pair) for part, pair in zip(self.parts, self._bordered)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the parts again, the inverse of `split`."""
        if all(isinstance(part, range) or pair for part, pair in zip(self.parts, self._bordered)):
            pieces: dict[int, Tensor] = {}
            for values, part, pair in zip(parts, self.parts, self._bordered):
                pieces |= _cut(values, pair) if pair else {cast(range, part).start: values}
            return torch.cat([pieces[start] for start in sorted(pieces)], dim=-1)
        return torch.index_select(torch.cat(list(parts), dim=-1), -1, self._places)

    def split_columns(self, block: Tensor) -> list[Tensor]:
        """Return the parts of each column, (n, K) -> (p_i, K)."""
        return [part.mT for part in self.split(block.mT)]

    def join_columns(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the parts of columns again, the inverse of `split_columns`."""
        return self.join([part.mT for part in parts]).mT

    def map_columns(self, maps: Sequence[ColumnMap], block: Tensor, in_place: bool = False) -> Tensor:
        """Return the block whose parts are those of `block`, (p_i, K), each under its own map of columns.

        If `in_place`, results on a CPU are written in place, for long parts a few columns at a time.
        """
        n, K = block.shape
        if not (in_place and K) or block.device.type != "cpu":
            return self.join_columns([map_.apply(part) for map_, part in zip(maps, self.split_columns(block))])
        rows, images = block.mT.contiguous(), block.new_empty(K, n)
        for map_, part, pair in zip(maps, self.parts, self._bordered):
            # Copies of a panel stay in the cache.
            panels = max(1, min(K, -(-K * len(part) * block.dtype.itemsize // 2**20)))
            for panel, result in zip(rows.chunk(panels), images.chunk(panels)):
                _map_panel(map_, part, pair, panel, result)
        return images.mT

    @cached_property
    def _bordered(self) -> list[Bordered | None]:
        """The matrix and the column that each index tensor on a CPU consists of, if it does: copies, not gathers."""
        if self.size < 2**13:  # few calls count more than few numbers
            return [None] * len(self.parts)
        return [_matrix_and_column(part) if isinstance(part, Tensor) else None for part in self.parts]

    @cached_property
    def _places(self) -> Tensor:
        """The place of each position in the concatenated parts."""
        device = next(part.device for part in self.parts if isinstance(part, Tensor))
        order = [p if isinstance(p, Tensor) else torch.arange(p.start, p.stop, device=device) for p in self.parts]
        return torch.cat(order).argsort()

    def to(self, device: torch.device | None) -> Partition:
        """Return the partition with its index tensors on a device."""
        return Partition(tuple(p.to(device) if isinstance(p, Tensor) else p for p in self.parts))


def _matrix_and_column(index: Tensor) -> Bordered | None:
    """Return what these positions consist of; None for other positions, and on an accelerator, which would wait."""
    jumps = (index.diff() != 1).nonzero() if index.device.type == "cpu" else index[:0]
    if not len(jumps):
        return None
    columns = int(jumps[0]) + 1
    rows = len(index) // (columns + 1)
    start, beside = int(index[0]), int(index[columns])
    matrix = torch.arange(start, start + rows * columns).view(rows, columns)
    bordered = torch.cat([matrix, torch.arange(beside, beside + rows).unsqueeze(1)], 1).flatten()
    pair = range(start, start + rows * columns), range(beside, beside + rows)
    return pair if torch.equal(bordered, index) else None


def _take(rows: Tensor, part: range | Tensor, pair: Bordered | None) -> Tensor:
    """Return a part of each row, (..., n) -> (..., p)."""
    if isinstance(part, range):
        return rows.narrow(-1, part.start, len(part))
    if pair is None:
        return rows.index_select(-1, part)
    return torch.cat(_views(rows, pair, len(pair[1])), -1).flatten(-2)


def _views(rows: Tensor, pieces: Sequence[range], lines: int) -> list[Tensor]:
    """Return these positions of each row as matrices of so many lines, (..., n) -> (..., lines, columns)."""
    shape = *rows.shape[:-1], lines
    return [rows.narrow(-1, piece.start, len(piece)).view(*shape, len(piece) // lines) for piece in pieces]


def _cut(values: Tensor, pair: Bordered) -> dict[int, Tensor]:
    """Return the matrix and the column of a part by the positions at which they start."""
    matrix, column = pair
    table = values.unflatten(-1, (len(column), -1))
    return {matrix.start: table[..., :-1].flatten(-2), column.start: table[..., -1]}


def _map_panel(map_: ColumnMap, part: range | Tensor, pair: Bordered | None, rows: Tensor, images: Tensor) -> None:
    """Write a part of each row (K, n) under the map."""
    pieces = (part,) if isinstance(part, range) else pair or ()
    if map_.rows and pieces and (pair is None or len(pair[1]) == map_.rows):
        widths = [len(piece) // map_.rows for piece in pieces]
        table = rows.new_empty(map_.rows, len(rows), sum(widths))
        for values, view in zip(table.split_with_sizes(widths, -1), _views(rows, pieces, map_.rows)):
            values.copy_(view.transpose(0, 1))
        for values, view in zip(map_.apply(table).split_with_sizes(widths, -1), _views(images, pieces, map_.rows)):
            view.copy_(values.transpose(0, 1))
        return
    values = map_.apply(_take(rows, part, pair).mT).mT
    if isinstance(part, Tensor) and pair is None:
        images.index_copy_(-1, part, values)
        return
    for start, piece in (_cut(values, pair) if pair else {cast(range, part).start: values}).items():
        images.narrow(-1, start, piece.shape[-1]).copy_(piece)


def partition(positions: Sequence[Tensor | range], device: torch.device | None = None) -> Partition:
    """Check positions, each a LongTensor (p_i,) or a range, and turn consecutive ones into ranges.

    Raises ValueError if they overlap, leave a gap, or are not one-dimensional integers.
    """
    parts = _as_parts(positions, device)
    n = sum(map(len, parts))
    if not _cover(parts, n):
        raise ValueError(f"positions must be disjoint and cover 0..{n - 1}, as they are {n} in all.")
    return Partition(parts)


def whole_partition(positions: Sequence[Tensor], device: torch.device | None = None) -> Partition:
    """Return a `partition` of positions known to be disjoint and complete, without the pass that checks it."""
    return Partition(_as_parts(positions, device))


def _as_parts(positions: Sequence[Tensor | range], device: torch.device | None) -> tuple[range | Tensor, ...]:
    return tuple(_as_part(indices, device) for indices in positions)


def _cover(parts: Sequence[Tensor | range], n: int) -> bool:
    """Return whether n positions are all of 0..n − 1, none out of range or missing; a sort takes 20 times as long."""
    seen = torch.zeros(n, dtype=torch.bool)
    for part in parts:
        low, high = (part.start, part.stop - 1) if isinstance(part, range) else map(int, torch.aminmax(part))
        if low < 0 or high >= n:
            return False
        if isinstance(part, range):
            seen[part.start : part.stop] = True
        else:
            seen.index_fill_(0, part.cpu(), True)
    return bool(seen.all())


def _as_part(positions: Tensor | range, device: torch.device | None) -> range | Tensor:
    if isinstance(positions, range):
        return positions
    if positions.ndim != 1 or positions.dtype != torch.long:
        raise ValueError(f"positions must be a LongTensor (p,), got {positions.dtype} of {tuple(positions.shape)}.")
    middle = len(positions) // 2  # excludes most other cases without a pass over them
    start, stop = int(positions[0]), int(positions[-1]) + 1
    consecutive = stop - start == len(positions) and int(positions[middle]) == start + middle
    if not consecutive or not bool((positions[1:] > positions[:-1]).all()):
        return positions.to(device)
    return range(start, stop)
