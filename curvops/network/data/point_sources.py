"""Sources of single points that are joined for the model: a DataLoader's, or the user's own with `collate=`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from curvops.argument_types import Collate
from curvops.network.data.batch_parts import holds_all, parts_of, targets_of
from curvops.network.data.contents import with_tensors
from curvops.network.data.loaders import LoaderPasses, in_order, iterates_as_torch
from curvops.network.data.objects import Objects, PointPairs, WholeBatch


class LoaderOfPoints(LoaderPasses):
    """The batches of a DataLoader as single points, which its own collate_fn joins.

    An item of its dataset is (point, target), possibly with a weight, or itself the point. Where the model runs, the
    points are joined with a target of the first item each: the model's inputs do not depend on targets.
    """

    def __init__(self, loader: DataLoader[Any], weights: bool) -> None:
        self._given, self._weights = loader, weights
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
            _, *others = parts_of(self._given.collate_fn(items), self._weights)
            pairs = isinstance(items[0], tuple | list) and len(items[0]) in (2, 3)
            points = [item[0] for item in items] if pairs else items
            collate = OfLoader(self._given.collate_fn, self._weights, tuple(items[0][1:]) if pairs else None)
            yield (Objects(points, collate), *(part for part in others if part is not None))

    def __reduce__(self) -> Any:
        return LoaderOfPoints, (self._given, self._weights)


class OfLoader:
    """The inputs that a loader's collate_fn makes of points, each with the same `rest` of an item, if there is one."""

    def __init__(self, collate_fn: Collate, weights: bool, rest: tuple[Any, ...] | None) -> None:
        self.collate_fn, self.weights, self.rest = collate_fn, weights, rest

    def __call__(self, points: list[Any]) -> Any:
        if self.rest is not None:
            return parts_of(self.collate_fn([(point, *self.rest) for point in points]), self.weights)[0]
        joined = self.collate_fn(points)
        try:
            return parts_of(joined, self.weights)[0]
        except TypeError:  # points to predict at have no labels
            if isinstance(joined, tuple | list):
                raise
            return joined


def _packed(items: list[Any]) -> Any:
    """Return items as they are or, from a worker, as bytes: each tensor would take one of the open files allowed."""
    if get_worker_info() is None:
        return items
    own = with_tensors(items, lambda tensor: tensor.clone() if _is_part(tensor) else tensor)
    return pickle.dumps(own)


def _is_part(tensor: Tensor) -> bool:
    """Return whether a tensor is a view of a larger memory, all of which would be packed."""
    return tensor.layout == torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes


def with_collate(data: Any, collate: Collate | None) -> Any:
    """Return a user's data as points that `collate` joins: (points, targets[, weights]), or items of a list or Dataset.

    Without a collate these are the data themselves. Raises TypeError for data of another form.
    """
    if collate is None:
        return data
    if not callable(collate):
        raise TypeError(f"collate must be a function of a list of points, got {type(collate).__name__}.")
    if isinstance(data, DataLoader):
        raise TypeError("a DataLoader joins points by its own collate_fn: leave collate= out, or pass its dataset.")
    if isinstance(data, Mapping) and "inputs" in data:
        return {**data, "inputs": _points_of(data["inputs"], collate)}
    if isinstance(data, tuple) or (isinstance(data, list) and holds_all(data)):
        if not all(part is None or targets_of(part) is not None for part in data[1:]):
            raise TypeError("targets must be a tensor (or None): convert a list of numbers with torch.tensor.")
        return (_points_of(data[0], collate), *data[1:])
    if isinstance(data, Dataset | list) and hasattr(data, "__len__"):
        return PointPairs(data, collate)
    raise TypeError(
        "with collate= data are (points, targets), a list of (point, target) or a Dataset of these with a length; got "
        f"{type(data).__name__}."
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
    return with_collate(data, example.collate)
