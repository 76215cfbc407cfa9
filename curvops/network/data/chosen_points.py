"""Points read at any positions, for minibatches: tensors, or a Dataset, of which only the chosen ones are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import Dataset, default_collate

from curvops.network.data.batch_parts import holds_all, parts_of
from curvops.network.data.inputs import normalise, num_points, take
from curvops.network.data.objects import Objects, PointPairs
from curvops.ranks.shard import Shard


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
