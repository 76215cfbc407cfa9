"""Sources of points: passes over a user's DataLoader, and single points that are joined for the model.

A pass reads each point once, in order, and does not change the loader's own state. Single points are those of a
DataLoader, or of the user's own with `collate=`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from numbers import Number
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from curvops.argument_types import Collate
from curvops.errors import MissingLabelsError
from curvops.network.data.inputs import holds_all, parts_of
from curvops.network.data.objects import Objects, PointPairs, WholeBatch, copied_deep, digest_of, with_tensors


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
            f"the items of the Dataset cannot be stacked ({error}): pass collate=, a function of a list of points."
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


class LoaderOfPoints(LoaderPasses):
    """The batches of a DataLoader as single points, its dataset's items, which its own collate_fn joins."""

    def __init__(self, loader: DataLoader[Any], weights: bool) -> None:
        self._loader, self._weights = loader, weights
        self._collate: OfLoader | None = None
        items = copy.copy(in_order(loader))
        items.collate_fn = _packed
        super().__init__(items)

    @classmethod
    def of(cls, loader: object, weights: bool) -> LoaderOfPoints | None:
        """Return the points of a loader; None if it is none, or one that makes its batches in a way of its own."""
        if not isinstance(loader, DataLoader) or not iterates_as_torch(loader) or loader.batch_sampler is None:
            return None
        return cls(loader, weights)

    def __iter__(self) -> Iterator[object]:
        for packed in super().__iter__():
            items: Any = pickle.loads(packed) if isinstance(packed, bytes) else packed
            collate = self._collate = self._collate or OfLoader.of(self._loader, self._weights, items)
            joined = self._loader.collate_fn(copied_deep(items) if collate.writes else items)
            _, *others = parts_of(joined, self._weights)
            yield (Items(items, collate), *(labels for labels in others if labels is not None))

    def __reduce__(self) -> Any:
        return LoaderOfPoints, (self._loader, self._weights)


class OfLoader:
    """The inputs that a loader's collate_fn makes of items of its dataset.

    item: one of them. alone: whether the inputs depend on the first entry of an item only, and not on its label.
    writes: whether the function changes the items.
    """

    def __init__(self, collate_fn: Collate, weights: bool, item: Any, writes: bool) -> None:
        self.collate_fn, self.weights, self.item, self.writes, self.alone = collate_fn, weights, item, writes, False

    @classmethod
    def of(cls, loader: DataLoader[Any], weights: bool, items: list[Any]) -> OfLoader:
        """Return them for a loader, of which these are some items.

        That labels have no effect is seen by exchanging those of these items, and of the first, middle and last one.
        """
        loader.collate_fn(copies := copied_deep(items))
        collate = cls(loader.collate_fn, weights, items[0], digest_of(copies) != digest_of(items))
        if not _is_entries(items[0]):
            return collate
        dataset: Any = loader.dataset
        if not isinstance(dataset, IterableDataset) and (n := len(dataset)):
            items = [*items, *(dataset[i] for i in (0, n // 2, n - 1))]
        rests = [item[1:] for item in items]
        try:
            if len({digest_of(rest) for rest in rests}) > 1:
                turned = [(item[0], *rest) for item, rest in zip(items, [*rests[1:], rests[0]])]
                collate.alone = digest_of(collate(copied_deep(items))) == digest_of(collate(copied_deep(turned)))
        except Exception:  # a collate_fn may refuse items that are not of its dataset
            collate.alone = False
        return collate

    def __call__(self, points: list[Any]) -> Any:
        joined = self.collate_fn(points)
        try:
            return parts_of(joined, self.weights)[0]
        except (TypeError, MissingLabelsError):  # points to predict at have no labels
            if isinstance(joined, tuple | list):
                raise
            return joined

    def of_points(self, points: list[Any]) -> Any:
        """Return the inputs for points of a user's, which are items or, if labels have no effect, without them."""
        return self([self.item_of(point) for point in points])

    def item_of(self, point: Any) -> Any:
        """Return an item for a point, which is one or, if labels have no effect, the first entry of one.

        Raises TypeError for other points. An item's first entry is never of the same kind as the item itself.
        """
        if not _is_entries(self.item):
            return point
        if _is_entries(point) and len(point) == len(self.item):
            entries = 1 if self.alone else len(point)  # labels may come in other types
            if list(map(_kind_of, point[:entries])) == list(map(_kind_of, self.item[:entries])):
                return (point[0], *self.item[1:]) if self.alone else point  # test points may have None for a label
        if not self.alone:
            raise TypeError(
                "points are here items of the DataLoader's dataset, with their labels, since the inputs that its "
                f"collate_fn makes depend on more than an item's first entry. Given {point!r:.60}."
            )
        return (point, *self.item[1:])


class Items(Objects):
    """Items of the dataset of a DataLoader, as points that its collate_fn joins."""

    collate: OfLoader
    joining = "the DataLoader's collate_fn"
    joins = "items of its dataset"

    @cached_property
    def _alone(self) -> Objects:
        """The points without their labels, if these have no effect: targets have fingerprints of their own."""
        points = [item[0] for item in self.points] if self.collate.alone else self.points
        return Objects(points, self.collate.of_points, self.device, self.dtype)

    def like(self, x: Any) -> Any:
        points = self._alone.like(x)
        if points is x or isinstance(points, WholeBatch):
            return points
        return self.with_points([self.collate.item_of(point) for point in points.points])

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        # Labels among the others may be NaN; what the model makes of NaN is seen in its outputs.
        return [pair for pair in self._alone.named_tensors() if self.collate.alone or pair[1].requires_grad]

    def prints(self) -> Tensor:
        return self._alone.prints()


def _is_entries(item: Any) -> bool:
    return isinstance(item, tuple | list) and len(item) in (2, 3)


def _kind_of(value: Any) -> Any:
    """Return the types of the entries of tuples, and of any other value; all numbers and arrays are of one."""
    if type(value) is tuple:
        return tuple(map(_kind_of, value))
    return Tensor if isinstance(value, Tensor | np.ndarray | Number) else type(value)


def _packed(items: list[Any]) -> Any:
    """Return items as they are or, from a worker, as bytes: each tensor would take one of the open files allowed."""
    if get_worker_info() is None:
        return items
    copies = with_tensors(items, lambda tensor: tensor.clone() if _is_part(tensor) else tensor)
    return pickle.dumps(copies)


def _is_part(tensor: Tensor) -> bool:
    """Return whether a tensor is a view of a larger memory, all of which would be packed."""
    return tensor.layout == torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes


def with_collate(data: Any, collate: Collate) -> Any:
    """Return a user's data as points that `collate` joins: (points, targets[, weights]), or items of a list or Dataset.

    Raises TypeError for data of another form.
    """
    if isinstance(data, DataLoader):
        raise TypeError("a DataLoader joins points by its own collate_fn: leave collate= out, or pass its dataset.")
    if isinstance(data, Mapping) and "inputs" in data:
        return {**data, "inputs": _points_of(data["inputs"], collate)}
    if isinstance(data, tuple) or (isinstance(data, list) and holds_all(data)):
        return (_points_of(data[0], collate), *data[1:])
    if isinstance(data, Dataset | list) and hasattr(data, "__len__"):
        return PointPairs(data, collate)
    raise TypeError(
        f"with collate= data are (points, targets), or a list or Dataset of (point, target); got {type(data).__name__}."
    )


def _points_of(points: Any, collate: Collate) -> Objects:
    if isinstance(points, str | bytes | Mapping) or not (hasattr(points, "__len__") and hasattr(points, "__getitem__")):
        raise TypeError(f"with collate= inputs are a list of points or a Dataset of them; got {type(points).__name__}.")
    return Objects([points[i] for i in range(len(points))], collate)


def data_like(data: Any, example: Objects, weights: bool = False) -> Any:
    """Return a user's data, such as held-out ones, with inputs of the same kind as the objects of the training data."""
    if isinstance(data, DataLoader):
        return LoaderOfPoints.of(data, weights) or data
    if isinstance(example, WholeBatch) or not isinstance(data, tuple | list | Dataset | Mapping):
        return data
    if not isinstance(example, Items):
        return with_collate(data, example.collate)
    if isinstance(data, tuple | Mapping) or holds_all(data):
        return with_collate(data, example.collate.of_points)
    return LoaderOfPoints(DataLoader(data, 64, collate_fn=example.collate.collate_fn), weights)  # type: ignore[arg-type]
