"""The training data of this process: those of a rank in batches with counts and fingerprints of all, and minibatches.

A `Shard` is the part of one rank of a process group. `ChosenPoints` reads minibatches of all points in random order, in
one process as over ranks: each reads its own part of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import Dataset, default_collate

from curvops.errors import NoDataError, RanksDifferError, SharedPointsWarning, warn
from curvops.fingerprints import in_64_bits, join_sums
from curvops.network.data.batches import Batch, Batches, DataPrints, Reading
from curvops.network.data.inputs import (
    ACCEPTED,
    BatchParts,
    Inputs,
    first_of,
    holds_all,
    join,
    map_inputs,
    move,
    normalise,
    num_points,
    parts_of,
    rows_of,
    take,
)
from curvops.network.data.objects import NEEDS_POINTS, Objects, PointPairs, WholeBatch
from curvops.ranks.process_group import Ranks

COMPARED = 2**13
"""The number of points of each rank that are compared with those of other ranks."""


class Shard(Batches):
    """The batches of one rank; counts and fingerprints cover the data of all ranks.

    A rank without points holds a copy of the first point of all (`borrows`), so that its sums have the same form as
    those of the others; its walks leave out the contribution of this point.
    """

    def __init__(self, source: Iterable[object], reading: Reading, ranks: Ranks) -> None:
        self.ranks, self._lowest = ranks, torch.empty(0, dtype=torch.int64)
        try:
            super().__init__(source, reading)
            count_and_point: Any = sum(self.sizes), _first_point(reading.parts(next(iter(self._items()))))
        except NoDataError:
            count_and_point = 0, None
        counts, firsts = zip(*ranks.gather(count_and_point))
        if not any(counts):
            raise NoDataError(f"The data are empty: the shards of all {ranks.size} ranks hold no point. {ACCEPTED}")
        self.borrows = counts[ranks.rank] == 0
        lent = next(point for point in firsts if point is not None)
        if self.borrows:
            super().__init__([lent], reading)
        self._own_prints = DataPrints(0, 0) if self.borrows else self.prints
        contents, order, largest = zip(*ranks.gather((self.own_prints.contents, self.own_prints.order, self.largest)))
        self.prints = DataPrints(in_64_bits(sum(contents)), join_sums(order, counts))
        self.counts, self.largest = counts, max(largest)
        self.start = 0 if self.borrows else sum(counts[: ranks.rank])

    @property
    def num_data(self) -> int:
        """The number N of points of all ranks."""
        return sum(self.counts)

    @property
    def own_prints(self) -> DataPrints:
        return self._own_prints

    @property
    def num_own(self) -> int:
        """The number of points of this rank."""
        return 0 if self.borrows else sum(self.sizes)

    def add_up(self, total: Tensor) -> Tensor:
        """Return the sum over the points of all ranks; see `Ranks.add_up`."""
        return self.ranks.add_up(self.own_part(total))

    def own_part(self, total: Tensor) -> Tensor:
        """Return this rank's part of the sum over the points of all ranks."""
        # Not zeros: backward passes, too, need every rank.
        return total * 0 if self.borrows else total

    def line_up(self, rows: Tensor, dim: int = 0) -> Tensor:
        """Return the rows of the points of all ranks, in the order of the points; see `Ranks.line_up`."""
        return self.ranks.line_up(rows.narrow(dim, 0, 0) if self.borrows else rows, dim)

    def gathered(self) -> Batch:
        """Return the points of all ranks as one batch."""
        local_batch = joined(list(self))
        self._require_one_form(local_batch.rows.items())
        return replace(
            local_batch,
            inputs=over_ranks(self.ranks, local_batch.inputs, slice(0) if self.borrows else slice(None)),
            any_targets=self.line_up(local_batch.any_targets),
            weights=None if local_batch.weights is None else self.line_up(local_batch.weights),
        )

    def whole(self, like: Tensor) -> Batches:
        """Return the points of all ranks on this one, in batches, in the dtype and on the device of `like`."""
        points, step = self.gathered(), self.largest
        items = []
        for start in range(0, points.num_points, step):
            labels = points.labels(slice(start, start + step))
            targets = labels.targets if labels.labelled else None
            items.append(BatchParts(take(points.inputs, slice(start, start + step)), targets, labels.weights))
        return Batches(items, self.reading_again(like, self.weighted))

    def restrict(self, chosen: Tensor, factor: float, like: Tensor) -> Batches:
        local_batches = [] if self.borrows else self._chosen(chosen, factor, like)
        return Shard(local_batches, self.reading_again(like, weights=True), self.ranks)

    def in_turn(self) -> Iterator[Inputs | None]:
        """Yield the inputs of each rank's points in turn, for ranks that have points; None for this rank's own."""
        local_inputs = join([batch.inputs for batch in self])
        self._require_one_form(rows_of(local_inputs))
        for rank in (rank for rank, count in enumerate(self.counts) if count):
            count = self.counts[rank] if rank == self.ranks.rank else 0
            lent = over_ranks(self.ranks, local_inputs, slice(count))
            yield None if count else lent

    def _require_one_form(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Raise RanksDifferError unless the points of all ranks have the same shape and dtype."""
        forms = {f"the form of a point, {name}": f"{tuple(tensor.shape[1:])}, {tensor.dtype}" for name, tensor in named}
        self.ranks.require_equal(forms)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Batches:
        raise ValueError("data of a process group cannot be converted: linearise the converted model on each rank.")

    def _note_points(self, prints: Tensor, start: int) -> None:
        lowest = torch.cat([self._lowest, prints.cpu()])
        self._lowest = lowest.topk(COMPARED, largest=False).values if len(lowest) > 2 * COMPARED else lowest
        super()._note_points(prints, start)

    def require_apart(self) -> None:
        """Raise RanksDifferError if ranks hold the same points; warn if the data themselves may repeat these points.

        Compares the points of lowest fingerprints, at most `COMPARED` of each rank, which are the same points on all
        ranks, in one message of 8 bytes for each. If a random split had dealt out repeated points, many copies would be
        on the same rank; if hardly any are, the shards overlap.
        """
        local_prints = self._lowest[:0] if self.borrows else self._lowest.sort().values[:COMPARED]
        prints, counts = self.ranks.line_up_counted(local_prints)
        by_rank = list(prints.split(counts))
        cut = min(
            [int(lowest[-1]) for lowest, count in zip(by_rank, self.counts) if count > len(lowest)], default=2**63 - 1
        )
        held = [Counter(lowest[lowest <= cut].tolist()) for lowest in by_rank]
        again = sum(held, Counter())
        repeated = again.total() - len(again)
        within = sum(counter.total() - len(counter) for counter in held)
        if repeated == within:
            return
        pairs = [(i, j) for i, j in permutations(range(len(held)), 2) if held[i]]
        i, j = max(pairs, key=lambda pair: _shared(held, *pair) / held[pair[0]].total())
        shared, total = _shared(held, i, j), held[i].total()
        what = f"{shared:,} of the {total:,} compared points of rank {i} are also on rank {j}, and would count twice"
        together = sum((count / self.num_data) ** 2 for count in self.counts)
        if (within == 0 and shared == total) or _unlikely(within, repeated, together):
            raise RanksDifferError(
                f"ranks {min(i, j)} and {max(i, j)} hold the same data: {what}. Give each rank its own shard."
            )
        if within == 0:
            warn(f"{what}. Ignore this if the data repeat these points.", SharedPointsWarning)


def joined(batches: Sequence[Batch]) -> Batch:
    """Return batches that follow one another as one batch."""
    first = batches[0]
    if len(batches) == 1:
        return first
    inputs, targets = join([batch.inputs for batch in batches]), torch.cat([batch.any_targets for batch in batches])
    weights = [batch.weights for batch in batches if batch.weights is not None]
    return replace(first, inputs=inputs, any_targets=targets, weights=torch.cat(weights) if weights else None)


def _shared(held: list[Counter[int]], i: int, j: int) -> int:
    """Return how many points of one rank are also on another."""
    return sum(count for point, count in held[i].items() if point in held[j])


def _unlikely(within: int, repeated: int, together: float) -> bool:
    """Return whether so few repeated points on one rank would have a chance below 1e-6 (Chernoff's bound)."""
    share = within / repeated
    if share >= together:
        return False
    divergence = (1 - share) * math.log((1 - share) / (1 - together)) if together < 1 else math.inf
    divergence += share * math.log(share / together) if share else 0.0
    return repeated * divergence > -math.log(1e-6)


def over_ranks(ranks: Ranks, inputs: Inputs, local_slice: slice = slice(None)) -> Inputs:
    """Return the points of all ranks in their order, of this rank those in a slice; objects are pickled.

    Raises ValueError for what only the model can read.
    """
    if not isinstance(inputs, Objects):
        return map_inputs(lambda tensor: ranks.line_up(tensor[local_slice]), inputs)
    if isinstance(inputs, WholeBatch):
        raise ValueError(f"{NEEDS_POINTS}.")
    return inputs.with_points([point for points in ranks.gather(inputs.points[local_slice]) for point in points])


def _first_point(parts: BatchParts) -> BatchParts:
    """Return the first point of a batch, or what only the model can read, on the CPU."""
    _, targets, weights = parts
    inputs = first_of(parts.inputs, 1)
    n = num_points(inputs)
    return BatchParts(
        move(inputs, "cpu"),
        None if targets is None else move(take(targets, slice(n)), "cpu"),
        None if weights is None else move(take(weights, slice(n)), "cpu"),
    )


@dataclass(frozen=True)
class ChosenPoints:
    """The points of this process among `total` points, beginning at position `start`."""

    read: Callable[[Tensor], Any]
    """Return the batch of the points at some positions among those of this process; None if it has no points at all."""
    held: int
    start: int
    total: int

    @classmethod
    def of(cls, data: Any, weights: bool, shard: Shard | None, total: int | None = None) -> ChosenPoints:
        """Return the points of data in the form of `co.linearize`, which are those of a shard.

        Raises TypeError for data that are neither tensors nor a Dataset with a length, and ValueError if their number
        of points differs from the shard's or, in a single process, from `total`.
        """
        held, read = _reader(data, weights)
        expected = total if shard is None else shard.num_own
        if expected is not None and held != expected:
            whose = "N" if shard is None else f"those of this rank ({shard.ranks.names})"
            raise ValueError(f"data have {held} points, but the log posterior was built for {expected}, {whose}.")
        return cls(read, held, 0, held) if shard is None else cls(read, held, shard.start, shard.num_data)

    def minibatches(self, size: int, generator: torch.Generator | None) -> Iterator[tuple[Any, int]]:
        """Yield minibatches of all points in random order: this process's part of each, and its number of points."""
        device = None if generator is None else generator.device
        for chosen in torch.randperm(self.total, generator=generator, device=device).cpu().split(size):
            local_positions = chosen[(chosen >= self.start) & (chosen < self.start + self.held)]
            yield self.read(local_positions - self.start), len(chosen)


def _reader(data: Any, weights: bool) -> tuple[int, Callable[[Tensor], Any]]:
    """Return the number of points, and a function that reads those at some positions as a batch."""
    if holds_all(data):
        x, targets, w = parts_of(data, weights)
        inputs, rest = normalise(x), (targets,) if w is None else (targets, w)

        def take_points(chosen: Tensor) -> Any:
            at = chosen.to(tree_leaves(targets)[0].device)
            return (take(inputs, at), *(take(labels, at) for labels in rest))

        return num_points(targets), take_points
    if not isinstance(data, Dataset) or not hasattr(data, "__len__"):
        raise TypeError(f"data must be tensors (X, y) or a Dataset with a length, got {type(data).__name__}.")

    gather = data.gather if isinstance(data, PointPairs) else default_collate

    def read(chosen: Tensor) -> Any:
        if not len(data):
            return None
        if not len(chosen):  # of the same form as other batches
            return tree_map_only(Tensor | Objects, lambda points: take(points, slice(0)), gather([data[0]]))
        return gather([data[i] for i in chosen.tolist()])

    return len(data), read
