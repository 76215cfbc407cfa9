"""Test points split over the ranks of a process group: each gives its own, and gets predictions for its own or all.

| the points of the ranks are | what a prediction needs     | each rank computes for | and then               |
|-----------------------------|-----------------------------|------------------------|------------------------|
| the same                    |                             | them                   |                        |
| different                   | weights and structure alone | its own                | gathers all on demand  |
| different                   | the training data           | those of all ranks     | keeps its own, or all  |

A product with a curvature of sharded data is one call of all ranks, with the same vectors. So all ranks must take the
same steps there: if each took those for its own points, ranks with fewer points would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from curvops.errors import RanksDifferError
from curvops.fingerprints import fingerprint
from curvops.network import TrainedNetwork
from curvops.network.data.inputs import num_points, rows_of
from curvops.ranks.process_group import Ranks
from curvops.ranks.shard import over_ranks

MEANT = (
    "Each rank gives its own test points, x[rank::size], and gets their predictions; gather=True gives the "
    "predictions for the points of all ranks, in their order, to each."
)


@dataclass(frozen=True, eq=False)
class SplitPoints:
    """The test points for which this rank computes predictions, and how the results are returned."""

    x: Any
    ranks: Ranks | None = None
    """The ranks, if they exchange inputs or results; otherwise None."""
    counts: tuple[int, ...] = ()
    """The number of points of each rank."""
    start: int = 0
    """The position of the first point of x among the points of all ranks."""
    is_whole: bool = False
    """Whether x has the points of all ranks."""
    gather: bool = False
    targets: Tensor | None = None
    """Data that belong to the points of x (targets, for example), with a row for each."""

    @property
    def is_split(self) -> bool:
        """Whether other ranks have other points, or targets, than this one."""
        return bool(self.counts)

    @property
    def is_done(self) -> bool:
        """Whether results for x are those that the caller asked for."""
        return self.ranks is None or (self.is_whole and self.gather)

    def rows_asked_for(self, rows: Tensor, dim: int = 0) -> Tensor:
        """Return the rows for the points that the caller asked for, from those for x."""
        if self.ranks is None or self.is_done:
            return rows
        if self.gather:
            return self.ranks.line_up(rows, dim)
        length, total, rank = rows.shape[dim], max(1, sum(self.counts)), self.ranks.rank
        start, count = sum(self.counts[:rank]), self.counts[rank]
        return rows.narrow(dim, length * start // total, length * count // total)


def split_points(
    lin: TrainedNetwork,
    x: Any,
    gather: bool,
    call: str,
    needs_data: Callable[[], bool] = lambda: False,
    targets: Callable[[], Tensor] | None = None,
) -> SplitPoints:
    """Return how test points are split over the ranks, after exchanging their numbers and requests.

    Args:
        lin: the linearised network.
        x: this rank's inputs, as the model takes them.
        gather: whether each rank is to have the results for the points of all.
        call: what is computed, with all options that must not differ between ranks.
        needs_data: a function that returns whether the training data of all ranks, or all points at once, are needed.
        targets: a function that checks and returns the other data that belong to the points.

    Raises:
        ValueError: gather is given without a process group, or a rank rejects its inputs (on all ranks, with its
            message).
        RanksDifferError: ranks ask for different things, or inputs that have to be gathered do not fit together.
    """
    shard = lin.passes.shard
    if shard is None:
        if gather:
            raise ValueError("gather=True is for linearisations over several ranks, by process_group=: omit it.")
        return SplitPoints(x, targets=None if targets is None else targets())
    inputs, labels, error = x, None, None
    try:
        inputs, labels = lin.admit(x, differentiable=True), None if targets is None else targets()
        named = rows_of(inputs)
        form = [(name, str(tensor.dtype), tuple(tensor.shape[1:])) for name, tensor in named]
        values = [tensor.detach() for _, tensor in named] + ([] if labels is None else [labels])
        points = num_points(inputs), form, int(fingerprint([value.to(lin.theta.device) for value in values]))
    except Exception as refused:
        points, error = (0, [], 0), refused
    request = f"{call}, gather={gather}"
    every = shard.ranks.gather((request, points, error and f"{type(error).__name__}: {error}"))
    for rank, (other, _, refusal) in enumerate(every):
        if error is not None:
            raise error
        if refusal is not None:
            raise ValueError(f"rank {rank} rejected its test points. {refusal}")
        if other != request:
            raise RanksDifferError(f"rank {rank} asks for {other}, but rank {shard.ranks.rank} for {request}. {MEANT}")
    if not gather and all(others == points for _, others, _ in every):
        return SplitPoints(inputs, targets=labels)
    counts = tuple(others[0] for _, others, _ in every)
    if not needs_data():
        start, ranks = sum(counts[: shard.ranks.rank]), shard.ranks if gather else None
        return SplitPoints(inputs, ranks, counts, start, gather=gather, targets=labels)
    for rank, (_, others, _) in enumerate(every):
        if others[1] != points[1]:
            raise RanksDifferError(
                f"the test points of rank {rank} are of {others[1]}, those of rank {shard.ranks.rank} of {points[1]}: "
                "pass inputs of one form, or samples=post.sample(k), with which each rank predicts by itself."
            )
    whole = over_ranks(shard.ranks, inputs)
    labels = None if labels is None else shard.ranks.line_up(labels)
    return SplitPoints(whole, shard.ranks, counts, is_whole=True, gather=gather, targets=labels)
