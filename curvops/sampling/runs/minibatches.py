"""Minibatches drawn from the points of all ranks, each of which holds some of them; or of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset, default_collate

from curvops.checks import check_generator, checked_whole
from curvops.network.data.batches import holds_all, parts_of
from curvops.network.data.inputs import normalise, take
from curvops.sampling.core.log_density import LogPosterior, Share


class Minibatches:
    """Passes over the points of all ranks in random order, cut into minibatches; see `co.sampling.minibatches`."""

    def __init__(
        self,
        choose: Callable[[Tensor], Any],
        points: range,
        count: int,
        size: int,
        seed: int,
        shared: bool,
    ) -> None:
        self._choose, self._points, self._count, self._size, self._shared = choose, points, count, size, shared
        self.generator = torch.Generator().manual_seed(seed)
        """The source of the orders, which `co.sampling.run` saves in checkpoints."""

    def __len__(self) -> int:
        """Return the number of minibatches of a pass."""
        return -(-self._count // self._size)

    def __iter__(self) -> Iterator[Any]:
        first, last = self._points.start, self._points.stop
        for chosen in torch.randperm(self._count, generator=self.generator).split(self._size):
            own = self._choose(chosen[(chosen >= first) & (chosen < last)] - first)
            yield Share(own, len(chosen)) if self._shared else own


def minibatches(
    log_posterior: LogPosterior, data: Any, size: int, generator: torch.Generator | None = None
) -> Minibatches:
    """Shuffle the points of all ranks anew in each pass, and cut them into minibatches of which each rank has its own.

    Equal seeds give equal minibatches for any number of ranks, which hold any parts of the data: points are numbered in
    the order of the ranks. In one process they are minibatches like those of a DataLoader.

    Args:
        log_posterior: the result of `co.sampling.log_posterior`, of a linearisation over a process group or not.
        data: the points of this rank: tensors (X, y), as in `co.linearize`, or a Dataset of such points, of which only
            the chosen ones are read.
        size: the number of points of a minibatch, of all ranks together; the last one of a pass may have fewer.
        generator: source of the orders, with equal seeds on all ranks; None uses torch's default generator.

    Returns:
        The `batches` for `co.sampling.run`: an iterable that can be read again and again.

    Raises:
        TypeError, ValueError: another kind of log posterior or data, another number of points than those of the
            linearisation, or a size that is not a whole number from 1 to N.
        RanksDiffer: unequal seeds or sizes.

    Cost: no messages after this call; the order of N points on each rank.
    """
    if not isinstance(log_posterior, LogPosterior):
        raise TypeError(
            "minibatches needs co.sampling.log_posterior(...), which knows the points of all ranks, got "
            f"{type(log_posterior).__name__}; for your own density pass a DataLoader."
        )
    check_generator(generator)
    shard, count = log_posterior.shard, log_posterior.data_size
    size = checked_whole("size", size)
    if size > count:
        raise ValueError(f"size={size} is more than the {count} points: pass all data in each step, [(X, y)].")
    held, choose = _reader(data, log_posterior.weighted)
    expected = count if shard is None else shard.num_own
    if held != expected:
        whose = "N" if shard is None else f"those of this rank ({shard.ranks.names})"
        raise ValueError(f"data have {held} points, but the log posterior was built for {expected}, {whose}.")
    device = None if generator is None else generator.device
    seed = int(torch.randint(2**62, (), generator=generator, device=device))
    if shard is None:
        return Minibatches(choose, range(count), count, size, seed, False)
    shard.ranks.require_equal({"the size of minibatches": size, "the seed of minibatches": seed})
    return Minibatches(choose, range(shard.start, shard.start + held), count, size, seed, True)


def _reader(data: Any, weights: bool) -> tuple[int, Callable[[Tensor], Any]]:
    """Return the number of points, and a function that reads those at some positions as a batch."""
    if holds_all(data):
        given, targets, w = parts_of(data, weights)
        inputs, rest = normalise(given), (targets,) if w is None else (targets, w)
        return len(targets), lambda chosen: (take(inputs, chosen), *(each[chosen] for each in rest))
    if not isinstance(data, Dataset) or not hasattr(data, "__len__"):
        raise TypeError(
            "data must be tensors (X, y) or a Dataset with a length, whose points can be read in any order, got "
            f"{type(data).__name__}."
        )

    def read(chosen: Tensor) -> Any:
        if not len(data):
            return None
        if not len(chosen):  # of the form that other batches have
            return tree_map_only(Tensor, lambda each: each[:0], default_collate([data[0]]))
        return default_collate([data[i] for i in chosen.tolist()])

    return len(data), read
