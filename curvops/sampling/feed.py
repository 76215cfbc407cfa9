"""Endless batches, and minibatches drawn from the points of one process or of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from curvops.argument_types import Collate, Data
from curvops.checks import check_kind, checked_whole, drawn_seed
from curvops.network.data.point_sources import with_collate
from curvops.ranks.shard import ChosenPoints
from curvops.sampling.log_density import LogPosterior, Share, SharedLogPosterior


class Feed:
    """An endless sequence of batches; `Feed(batches, position)` continues from a `position`.

    batches: an iterable that can be read again (a list, a DataLoader), or None for a density without data.
    """

    def __init__(self, batches: Any, position: Any = None) -> None:
        self._batches = _checked(batches)
        self._index = 0 if position is None else position["index"]
        self._generator: Tensor | None = None if position is None else position["generator"]
        self._pass: Iterator[Any] | None = None

    @property
    def position(self) -> dict[str, Any]:
        """The number of batches used in this pass, and the state of the loader's generator when the pass began."""
        return {"index": self._index, "generator": self._generator}

    def next(self) -> Any:
        """Return the next batch."""
        if self._batches is None:
            return None
        if self._pass is None:
            self._pass = self._open_pass()
        batch = next(self._pass, self)
        if batch is self:
            if self._index == 0:
                raise ValueError(f"the data are empty: a pass over this {type(self._batches).__name__} gave no batch.")
            self._index, self._generator, self._pass = 0, None, None
            return self.next()
        self._index += 1
        return batch

    def _open_pass(self) -> Iterator[Any]:
        """Begin a pass at the batch where the last run stopped."""
        source = getattr(self._batches, "generator", None)
        if isinstance(source, torch.Generator):
            if self._generator is None:
                self._generator = source.get_state()
            else:
                source.set_state(self._generator.cpu())
        assert self._batches is not None
        batches = iter(self._batches)
        for _ in range(self._index):
            next(batches, None)
        return batches


def require_repeatable(batches: Any) -> None:
    """Raise ValueError if passes are shuffled by a generator that a later run cannot restore."""
    if isinstance(batches, DataLoader) and isinstance(batches.sampler, RandomSampler) and batches.generator is None:
        raise ValueError("a checkpoint needs the same batches again: give the DataLoader a generator=.")


def _checked(batches: Any) -> Iterable[Any] | None:
    """Return the batches; raise TypeError unless they can be read again in every pass."""
    pair = isinstance(batches, tuple) and len(batches) in (2, 3) and isinstance(batches[0], Tensor)
    if isinstance(batches, Iterator | Tensor | str) or pair or not (batches is None or isinstance(batches, Iterable)):
        raise TypeError(
            "batches must be a list of batches, [(inputs, targets)] if each step uses all data, or a DataLoader, got "
            f"{type(batches).__name__}. Pass torch.utils.data.DataLoader(dataset, batch_size=..., shuffle=True)."
        )
    return batches


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
        for batch, points in self._points.minibatches(self._size, self.generator):
            yield Share(batch, points) if self._shared else batch


def minibatches(
    log_posterior: LogPosterior,
    data: Data,
    size: int,
    generator: torch.Generator | None = None,
    *,
    collate: Collate | None = None,
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
        collate: as in `co.linearize`, for data with a list of points.

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
    shard = log_posterior.shard if isinstance(log_posterior, SharedLogPosterior) else None
    count = log_posterior.data_size
    size = checked_whole("size", size, 1, count)
    data = with_collate(data, collate)
    points = ChosenPoints.of(data, log_posterior.weighted, shard, count)
    seed = drawn_seed(generator)
    if shard is not None:
        shard.ranks.require_equal({"the size of minibatches": size, "the seed of minibatches": seed})
    return Minibatches(points, size, seed, shard is not None)
