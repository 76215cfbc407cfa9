"""Walks over some points of another walk: a few at a time, chosen ones, or minibatches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from curvops.network.data.inputs import cut, join, num_points, take
from curvops.network.engines.layerwise import Layerwise
from curvops.network.walks.passes import Passes


def by_points(walk: Passes, count: int, together: int = 1) -> Iterator[tuple[Passes, int]]:
    """Yield walks over `count` points each (fewer at the end of a batch), and their number.

    If a batch's layer inputs and sensitivities are kept, its walks share them. Each run of `together` points is in one
    walk, whatever the batches are.
    """
    for index, inputs in _batches_of_whole(walk, together):
        engine = walk.kept_engine(index)
        for points, subset in cut(inputs, count):
            view = engine.at(points) if isinstance(engine, Layerwise) else None
            yield walk.over([(subset, None)], engine=view), num_points(subset)


def _batches_of_whole(walk: Passes, together: int) -> Iterator[tuple[int, Any]]:
    """Yield the inputs of each batch by its number, which is −1 if points of two batches are joined."""
    if together == 1:
        yield from ((index, inputs) for index, (inputs, _) in enumerate(walk.source))
        return
    rest = None
    for inputs, _ in walk.source:
        inputs = inputs if rest is None else join([rest, inputs])
        whole = num_points(inputs) - num_points(inputs) % together
        rest = take(inputs, slice(whole, None))
        yield -1, take(inputs, slice(whole))


def at_points(walk: Passes, chosen: Int[Tensor, " m"]) -> Passes:
    """Return a walk over some points, in ascending order."""
    batches, start = [], 0
    for inputs, _ in walk.source:
        count = num_points(inputs)
        inside = chosen[(chosen >= start) & (chosen < start + count)] - start
        if len(inside):
            batches.append((take(inputs, inside), None))
        start += count
    return walk.over(batches)


def shuffled(walk: Passes, size: int, generator: torch.Generator | None) -> Iterator[tuple[Int[Tensor, " n"], Passes]]:
    """Yield (positions of some points, a walk over them): all points once, in random order within each batch."""
    device = None if generator is None else generator.device
    for inputs, batch in walk.source:
        order = torch.randperm(num_points(inputs), generator=generator, device=device)
        for chosen in order.to(batch.any_targets.device).split(size):
            yield chosen + batch.start, walk.over([(take(inputs, chosen), batch.labels(chosen))])
