"""The training data of one rank of a process group, in batches that count and tell the points of all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from curvops.fingerprints import fingerprint
from curvops.network.data.batches import ACCEPTED, Batch, Batches, NoData, Reading, parts_of
from curvops.network.data.inputs import move, normalise, take
from curvops.process_group import Ranks, RanksDiffer


class Shard(Batches):
    """The batches of one rank, which count and tell the data of all ranks.

    A rank without points holds a copy of the first point of all (`borrows`), so that its sums have the form of the
    others': its walks leave out what it gives.
    """

    def __init__(self, source: Iterable[object], reading: Reading, ranks: Ranks) -> None:
        self.ranks = ranks
        try:
            super().__init__(source, reading)
            counts = ranks.gather(sum(self.sizes))
        except NoData:
            counts = ranks.gather(0)
        if not any(counts):
            raise NoData(f"The data are empty: the shards of all {ranks.size} ranks hold no point. {ACCEPTED}")
        self.borrows = counts[ranks.rank] == 0
        first = None if self.borrows else _first_point(next(iter(self._items())), reading.weights)
        lent = next(point for point in ranks.gather(first) if point is not None)
        if self.borrows:
            super().__init__([lent], reading)
        prints = ranks.gather((0, 0) if self.borrows else (self.sizes, int(fingerprint([self._first_pass.prints]))))
        self._require_apart(ranks, prints)
        self.start = 0 if self.borrows else sum(counts[: ranks.rank])
        self._count, self.largest = sum(counts), max(ranks.gather(max(self.sizes)))
        self.fingerprint = int(fingerprint([torch.tensor([one for _, one in prints if one])]))

    @property
    def num_data(self) -> int:
        """The number N of points of all ranks."""
        return self._count

    @property
    def num_own(self) -> int:
        """The number of points of this rank."""
        return 0 if self.borrows else sum(self.sizes)

    def add_up(self, total: Tensor, told: Tensor | None = None) -> Tensor:
        """Return the sum over the points of all ranks; see `Ranks.add_up`."""
        # Not zeros: backward passes, too, need every rank.
        return self.ranks.add_up(total * 0 if self.borrows else total, told)

    def line_up(self, rows: Tensor, dim: int = 0, told: Tensor | None = None) -> Tensor:
        """Return the rows of the points of all ranks, in the order of the points; see `Ranks.add_up`."""
        return self.ranks.line_up(rows.narrow(dim, 0, 0) if self.borrows else rows, dim, told)

    def gathered(self) -> Batch:
        """Return the points of all ranks as one batch."""
        with self.ranks.guarded():
            parts = list(self)
        weights = [batch.weights for batch in parts if batch.weights is not None]
        return Batch(
            tree_map(lambda *each: self.line_up(torch.cat(each)), *(batch.inputs for batch in parts)),
            self.line_up(torch.cat([batch.targets for batch in parts])),
            self.line_up(torch.cat(weights)) if weights else None,
        )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Batches:
        raise ValueError(
            "the data of a linearisation over a process group cannot be converted: linearise the model in that dtype, "
            "and on that device, on each rank."
        )

    @staticmethod
    def _require_apart(ranks: Ranks, prints: list[Any]) -> None:
        """Raise RanksDiffer where two ranks hold the same data."""
        for rank, own in enumerate(prints):
            other = prints.index(own)
            if own[1] and other < rank:
                raise RanksDiffer(
                    f"ranks {other} and {rank} hold the same data, which would count twice: give each rank a shard of "
                    "its own, such as x[rank::size] or torch.utils.data.Subset(dataset, range(rank, N, size))."
                )


def _first_point(item: object, weights: bool) -> dict[str, object]:
    """Return the first point of an item of a source as an item of its own, on the CPU."""
    given, targets, w = parts_of(item, weights)
    point = {"inputs": take(normalise(given), slice(0, 1)), "targets": targets[:1]}
    if w is not None:
        point["weights"] = w[:1]
    return {name: move(part, "cpu") for name, part in point.items()}
