"""Minibatches drawn from the points of all ranks, each of which holds some of them, or of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from curvops.argument_types import Data
from curvops.checks import check_kind, checked_whole, drawn_seed
from curvops.network.data.chosen_points import ChosenPoints
from curvops.sampling.core.log_density import LogPosterior, Share


class Minibatches:
    """Passes over the points of all ranks in random order, cut into minibatches; see `co.sampling.minibatches`.

    Args:
        points: the points, chosen by their index.
        size: the number of points of a minibatch.
        seed: the seed of the order.
        shared: whether the ranks share the points.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> batches = co.sampling.minibatches(density, (x, y), 4)
        >>> type(batches).__name__
        'Minibatches'
    """

    def __init__(self, points: ChosenPoints, size: int, seed: int, shared: bool) -> None:
        self._points, self._size, self._shared = points, size, shared
        self.generator = torch.Generator().manual_seed(seed)
        """The generator of the orders, whose state `co.sampling.run` saves in checkpoints."""

    def __repr__(self) -> str:
        return f"Minibatches({len(self)} of {self._size} points, {self._points.total} in all)"

    def __len__(self) -> int:
        """Return the number of minibatches of a pass."""
        return -(-self._points.total // self._size)

    def __iter__(self) -> Iterator[Any]:
        for own, points in self._points.minibatches(self._size, self.generator):
            yield Share(own, points) if self._shared else own


def minibatches(
    log_posterior: LogPosterior, data: Data, size: int, generator: torch.Generator | None = None
) -> Minibatches:
    """Shuffle the points of all ranks anew in each pass, and cut them into minibatches; each rank gets its own part.

    Equal seeds give equal minibatches for any number of ranks, which may hold any parts of the data: points are
    numbered in the order of the ranks. In one process they are minibatches like those of a DataLoader.

    Args:
        log_posterior: the result of `co.sampling.log_posterior`, for a linearisation over a process group or not.
        data: the points of this rank: tensors (X, y), as in `co.linearize`, or a Dataset of such points, of which only
            the chosen ones are read.
        size: the number of points of a minibatch, on all ranks together; the last one of a pass may have fewer.
        generator: the source of the orders, with equal seeds on all ranks; None uses torch's default generator.

    Returns:
        The `batches` for `co.sampling.run`: an iterable that can be read any number of times.

    Raises:
        TypeError, ValueError: the log posterior or the data are of another kind, the number of points differs from that
            of the linearisation, or size is not a whole number from 1 to N.
        RanksDifferError: seeds or sizes differ.

    Cost: no messages after this call; the order of N points on each rank.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> batches = co.sampling.minibatches(density, (x, y), 4, generator=torch.Generator().manual_seed(0))
        >>> co.sampling.run(co.sampling.sgld(density, 1e-3), density.params, batches, steps=5).theta.shape
        torch.Size([1, 5, 17])
    """
    check_kind("log_posterior", log_posterior, LogPosterior, "co.sampling.log_posterior(...)")
    shard, count = log_posterior.shard, log_posterior.data_size
    size = checked_whole("size", size)
    if size > count:
        raise ValueError(f"size={size} is more than the {count} points: pass all data in each step, [(X, y)].")
    points = ChosenPoints.of(data, log_posterior.weighted, shard, count)
    seed = drawn_seed(generator)
    if shard is not None:
        shard.ranks.require_equal({"the size of minibatches": size, "the seed of minibatches": seed})
    return Minibatches(points, size, seed, shard is not None)
