"""Positions of a vector divided among blocks, and how vectors are split into blocks and joined again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


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
        return [
            rows.narrow(-1, part.start, len(part)) if isinstance(part, range) else rows.index_select(-1, part)
            for part in self.parts
        ]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the parts again, the inverse of `split`."""
        starts = [part.start for part in self.parts if isinstance(part, range)]
        if len(starts) == len(parts):
            return torch.cat([values for _, values in sorted(zip(starts, parts), key=lambda pair: pair[0])], dim=-1)
        return torch.index_select(torch.cat(list(parts), dim=-1), -1, self._places)

    def split_columns(self, block: Tensor) -> list[Tensor]:
        """Return the parts of each column, (n, K) -> (p_i, K)."""
        return [part.mT for part in self.split(block.mT)]

    def join_columns(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the parts of columns again, the inverse of `split_columns`."""
        return self.join([part.mT for part in parts]).mT

    def map_columns(self, maps: Sequence[Callable[[Tensor], Tensor]], block: Tensor) -> Tensor:
        """Return the block whose parts are those of `block`, (p_i, K), each under its own map."""
        return self.join_columns([map_(part) for map_, part in zip(maps, self.split_columns(block))])

    @cached_property
    def _places(self) -> Tensor:
        """The place of each position in the concatenated parts."""
        device = next(part.device for part in self.parts if isinstance(part, Tensor))
        order = [p if isinstance(p, Tensor) else torch.arange(p.start, p.stop, device=device) for p in self.parts]
        return torch.cat(order).argsort()

    def to(self, device: torch.device | None) -> Partition:
        """Return the partition with its index tensors on a device."""
        return Partition(tuple(p.to(device) if isinstance(p, Tensor) else p for p in self.parts))


def partition(positions: Sequence[Tensor | range], device: torch.device | None = None) -> Partition:
    """Check positions, each a LongTensor (p_i,) or a range, and turn consecutive ones into ranges.

    Raises ValueError if they overlap, leave a gap, or are not one-dimensional integers.
    """
    parts = tuple(_as_part(indices, device) for indices in positions)
    n = sum(map(len, parts))
    if not _cover(parts, n):
        raise ValueError(f"positions must be disjoint and cover 0..{n - 1}, as they are {n} in all.")
    return Partition(parts)


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
    middle = len(positions) // 2  # excludes most other cases without a pass over them
    start, stop = int(positions[0]), int(positions[-1]) + 1
    consecutive = stop - start == len(positions) and int(positions[middle]) == start + middle
    if not consecutive or not bool((positions[1:] > positions[:-1]).all()):
        return positions.to(device)
    return range(start, stop)
