"""Passes over a user's DataLoader that read each point once, in order, without changing the loader's own state."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from operator import length_hint
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)


class LoaderPasses:
    """The batches of a DataLoader, read again by every iterator.

    A loader with persistent workers has one iterator, and a second one would reset it: a pass that begins within
    another gets a copy of the loader, with its own workers. Worker seeds are drawn from a generator of these passes,
    so that the user's generator does not advance. They differ from pass to pass, so that random batches are detected.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self._generator = torch.Generator()
        self._idle: list[DataLoader[Any]] = []

    def __iter__(self) -> Iterator[object]:
        try:
            loader = self._idle.pop()
        except IndexError:
            loader = copy.copy(self.loader)
            loader.generator, loader._iterator = self._generator, None
        yield from loader
        self._idle.append(loader)  # after a whole pass only: the workers of any other may have died

    def __reduce__(self) -> Any:
        return LoaderPasses, (self.loader,)  # neither iterators nor their workers can be copied

    def require_parts_apart(self, prints: Tensor) -> None:
        """Raise ValueError if each worker read the whole iterable dataset, judging by the fingerprints of a pass."""
        workers = self.loader.num_workers
        if workers < 2 or not isinstance(self.loader.dataset, IterableDataset):
            return
        if not bool((prints.unique(return_counts=True)[1] % workers).any()):
            raise ValueError(
                f"a batch came {workers} times, once from each of the loader's {workers} workers: pass num_workers=1, "
                "or let the dataset's __iter__ yield a part for each worker (torch.utils.data.get_worker_info())."
            )


class InputsAlone:
    """The batches (inputs, None) of a source whose items are inputs as a whole."""

    def __init__(self, source: Iterable[object]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[tuple[object, None]]:
        return ((item, None) for item in self.source)


def in_order(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return the loader or, if it shuffles or drops a batch, one that reads each point of its dataset once, in order.

    Raises ValueError if its sampler does not draw each point once, or repeats points so that ranks have equally many.
    """
    sampler, dataset = loader.sampler, loader.dataset
    if isinstance(sampler, DistributedSampler) and sampler.total_size != len(dataset):  # type: ignore[arg-type]
        what = "repeats" if sampler.total_size > len(dataset) else "leaves out"  # type: ignore[arg-type]
        raise ValueError(
            f"this DistributedSampler {what} points, and sums over the data need each once: give each rank a "
            "torch.utils.data.Subset of its own, Subset(dataset, range(rank, len(dataset), size))."
        )
    shuffles = isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
    if not shuffles and not _leaves_points_out(loader):
        return loader
    plain = iterates_as_torch(loader) and type(loader.batch_sampler) in (BatchSampler, type(None))
    if not shuffles and (not plain or loader.batch_size is None):  # None: batches from a user's own sampler
        raise ValueError(f"this {type(loader).__name__} has drop_last=True, and sums need all: pass drop_last=False.")
    once = isinstance(sampler, SubsetRandomSampler) or (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(sampler)
        and len(sampler) == len(dataset)  # type: ignore[arg-type]
    )
    if shuffles and not (once and plain):
        raise ValueError(
            f"this {type(loader).__name__} draws its points anew in each pass, and sums over the data need each once: "
            "pass shuffle=False without a sampler, and weights if points count more than once."
        )
    names = ("batch_size", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn")
    more = ("multiprocessing_context", "prefetch_factor", "persistent_workers", "pin_memory_device")
    options = {name: getattr(loader, name) for name in (*names, *more)}
    if isinstance(sampler, SubsetRandomSampler):
        dataset = Subset(dataset, list(sampler.indices))
    elif not shuffles and not isinstance(dataset, IterableDataset):
        options["sampler"] = sampler
    return DataLoader(dataset, shuffle=False, **options)


def stacked_items(items: list[Any]) -> Any:
    """Return items of a Dataset as a batch; raise ValueError if they have no common shape, or are no tensors."""
    try:
        return default_collate(items)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"the items of the Dataset cannot be stacked ({error}). Pass collate=, a function of a list of points that "
            "returns what the model takes."
        ) from error


def iterates_as_torch(loader: DataLoader[Any]) -> bool:
    """Return whether a loader's class changes at most its options and its collate_fn, as torch_geometric's does."""
    names = ("__iter__", "_get_iterator", "__setattr__", "_index_sampler")
    return all(getattr(type(loader), name) is getattr(DataLoader, name) for name in names)


def _leaves_points_out(loader: DataLoader[Any]) -> bool:
    """Return whether a loader drops a last batch that is not full, or may do so if its length is unknown."""
    batches: Any = loader if loader.batch_sampler is None else loader.batch_sampler
    if not getattr(batches, "drop_last", False):
        return False
    size = getattr(batches, "batch_size", None)
    return not size or length_hint(getattr(batches, "sampler", loader.sampler), 1) % size != 0
