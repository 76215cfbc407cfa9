"""Points of any kind (graphs, images of several sizes, texts, dicts), with the function that joins them for the model.

The form of inputs beside tensors and their tuples and dicts. `Objects` are single points, of which any can be taken; a
`WholeBatch` is what only the model can read, with one output for each target.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from curvops.argument_types import Collate
from curvops.network.data.contents import copied_deep, digest_of, leaves_of, placed

NEEDS_POINTS = (
    "this needs single points, and a batch of the data can be read by the model only: pass the points and the function "
    "that joins some of them into what the model takes, co.linearize(model, (points, targets), ..., collate=function), "
    "or a DataLoader with that collate_fn"
)


class Objects:
    """Some points of any kind, and the function that joins a list of them into what the model takes.

    device, dtype: where the result is moved, and the dtype of its floating-point tensors; None keeps each.
    """

    joining = "collate="
    joins = "points, without targets"
    """Names of the function and of what it is called with, for messages."""

    def __init__(
        self,
        points: Sequence[Any],
        collate: Collate,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.points, self.collate, self.device, self.dtype = tuple(points), collate, device, dtype

    @property
    def size(self) -> int | None:
        """The number of points; None if it is not known."""
        return len(self.points)

    def __len__(self) -> int:
        if self.size is None:
            raise ValueError(f"the number of points of {self!r} is known only once the model has run on it.")
        return self.size

    def __repr__(self) -> str:
        kinds = " or ".join(sorted({type(point).__name__ for point in self.points}))
        return f"{len(self)} points of type {kinds}" if kinds else "no points"

    def with_points(self, points: Sequence[Any]) -> Objects:
        """Return other points that are joined in the same way."""
        return type(self)(points, self.collate, self.device, self.dtype)

    def like(self, x: Any) -> Any:
        """Return a user's inputs as such points, if they are a list or a Dataset; anything else as a whole batch.

        Raises TypeError for a single point.
        """
        if isinstance(x, Objects):
            return x
        listed = list | Dataset if issubclass(self._input_type, tuple) else list | tuple | Dataset
        if isinstance(x, listed) or (isinstance(x, np.ndarray) and x.dtype == object):
            return self.with_points([x[i] for i in range(len(x))])
        if type(x) in set(map(type, self.points)) and not issubclass(self._input_type, type(x)):
            raise TypeError(f"inputs are a list of points; given one {type(x).__name__}: pass [x].")
        return WholeBatch(x, None, self.device, self.dtype)

    @cached_property
    def _input_type(self) -> type:
        """The type of what the model takes; that of None if there is no point to make it of."""
        return type(self.copy().value() if self.points else None)

    def take(self, index: slice | Tensor) -> Objects:
        """Return the points in a slice or at given positions."""
        if isinstance(index, slice):
            return self.with_points(self.points[index])
        return self.with_points([self.points[i] for i in index.tolist()])

    def value(self) -> Any:
        """Return what the model takes; raise TypeError or ValueError, with the points, if they cannot be joined."""
        try:
            joined = self.collate(list(self.points))
        except Exception as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(
                f"{self.joining} failed on {self!r} ({type(error).__name__}: {error}); it is called with a list of "
                f"{self.joins}, and returns what the model takes."
            ) from error
        return placed(joined, self.device, self.dtype)

    def move(self, device: torch.device | str | None, dtype: torch.dtype | None) -> Objects:
        """Return the same points for another device or dtype; None keeps either."""
        return type(self)(self.points, self.collate, device or self.device, dtype or self.dtype)

    def copy(self) -> Objects:
        """Return a deep copy of the points."""
        return self.with_points(copied_deep(self.points))

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Return the dense tensors among the points and in mappings, lists and tuples, by name."""
        named = [(f"inputs{way}", leaf) for way, leaf in leaves_of(self.points, False) if isinstance(leaf, Tensor)]
        return [(name, tensor) for name, tensor in named if tensor.layout == torch.strided and not tensor.is_nested]

    def prints(self) -> Tensor:
        """Return a 64-bit number for each point, (n,): what is seen of it (`contents`), whatever device and dtype."""
        return torch.tensor([digest_of(point) for point in self.points], dtype=torch.int64)

    @property
    def form(self) -> tuple[Any, ...]:
        """The kinds of points, with the dtypes and dimensions of their tensors, on which a model may depend."""
        leaves = [leaf for _, leaf in leaves_of(self.points[:1]) if isinstance(leaf, Tensor)]
        kinds = sorted({f"{type(point).__module__}.{type(point).__qualname__}" for point in self.points})
        return (*kinds, *((leaf.dtype, leaf.ndim) for leaf in leaves))


class WholeBatch(Objects):
    """A batch of n points that only the model can read, so that none can be taken alone.

    n is None until it is known.
    """

    def __init__(
        self,
        batch: Any,
        size: int | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__((batch,), _only, device, dtype)
        self._size = size

    @property
    def size(self) -> int | None:
        return self._size

    def __repr__(self) -> str:
        kind = type(self.points[0]).__name__
        # Of an unknown size are inputs that the user passes to predict and the like.
        return f"{kind} (points go in a list)" if self.size is None else f"a {kind} of {self.size} points"

    def with_points(self, points: Sequence[Any]) -> WholeBatch:
        return WholeBatch(points[0], self.size, self.device, self.dtype)

    def of_size(self, size: int) -> WholeBatch:
        """Return the batch with its number of points."""
        return WholeBatch(self.points[0], size, self.device, self.dtype)

    def like(self, x: Any) -> Any:
        return x if isinstance(x, Objects) else WholeBatch(x, None, self.device, self.dtype)

    def take(self, index: slice | Tensor) -> WholeBatch:
        """Return the batch itself if these are all points in their order; otherwise raise ValueError."""
        positions = range(len(self))
        chosen = [*positions[index]] if isinstance(index, slice) else index.tolist()
        if chosen != [*positions]:
            raise ValueError(f"{NEEDS_POINTS}.")
        return self

    def move(self, device: torch.device | str | None, dtype: torch.dtype | None) -> WholeBatch:
        return WholeBatch(self.points[0], self.size, device or self.device, dtype or self.dtype)

    def prints(self) -> Tensor:
        return digest_of(self.points[0]) + torch.arange(len(self))


def _stacked(labels: Sequence[Any]) -> Any:
    """Return targets or weights of some points as tensors; None if there are none."""
    return None if all(label is None for label in labels) else default_collate(list(labels))


def _only(points: list[Any]) -> Any:
    return points[0]


def join_objects(parts: Sequence[Objects]) -> Objects:
    """Return the points of several parts in one; raise ValueError for whole batches, unless there is one."""
    if len(parts) > 1 and any(isinstance(objects, WholeBatch) for objects in parts):
        raise ValueError(f"{NEEDS_POINTS}.")
    return parts[0].with_points([point for objects in parts for point in objects.points])


class PointPairs(Dataset[Any]):
    """Items (point, target) or (point, target, weight) of a list or a Dataset, whose points `collate` joins."""

    def __init__(self, items: Any, collate: Collate) -> None:
        self.items, self.collate = items, collate

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        item = self.items[i]
        if not isinstance(item, tuple | list) or len(item) not in (2, 3):
            raise TypeError(
                f"with collate= each item of the data is (point, target) or (point, target, weight); item {i} is a "
                f"{type(item).__name__}. Or pass (points, targets), or (points, None) without labels."
            )
        return item

    def gather(self, items: Sequence[Any]) -> Any:
        """Return the batch of some items: their points, and targets (and weights) as tensors."""
        points, *others = zip(*items)
        return (Objects(points, self.collate), *map(_stacked, others))
