"""Points of any kind (graphs, images of several sizes, texts, dicts), with the function that joins them for the model.

The form of inputs beside tensors and their tuples and dicts. `Objects` are single points, of which any can be taken; a
`WholeBatch` is what only the model can read, with one output for each target.

The functions below them find the tensors, arrays, numbers and words inside any Python value, replace tensors, and
compare values. A value is looked into through mappings, lists, tuples, sets and the attributes of other objects; what
NumPy reads as an array (an image, a table) is one. What an extension keeps in its own memory (a graph of DGL),
functions, classes and modules of Python are not seen.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from numbers import Number
from operator import itemgetter
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from curvops.argument_types import Collate
from curvops.fingerprints import fingerprint

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
        super().__init__((batch,), itemgetter(0), device, dtype)
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


WORDS: tuple[type, ...] = (str, bytes, bytearray, Number, type(None), PurePath, np.dtype, torch.dtype, torch.device)
LEAVES = (Tensor, np.ndarray, *WORDS)
ARRAYS = ("__array_interface__", "__array__")
BUFFERS = (array, memoryview)
UNSEEN = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


def leaves_of(value: Any, attributes: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield (the way to it, a leaf) for all tensors, arrays, numbers and words inside a value, each object once.

    Without `attributes`, only mappings, lists and tuples are looked into.
    """
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        way, node = waiting.pop()
        if isinstance(node, BUFFERS) or (attributes and _reads_as_array(node)):
            with contextlib.suppress(TypeError, ValueError):  # an array on an accelerator is looked into instead
                node = np.asarray(node)
        if isinstance(node, LEAVES) and not _holds_objects(node):
            yield way, node
        elif id(node) not in seen and not isinstance(node, UNSEEN):
            seen.add(id(node))
            waiting += reversed(_entries(way, node, attributes))


def _reads_as_array(value: Any) -> bool:
    return any(hasattr(value, name) for name in ARRAYS) and not isinstance(value, (type, *LEAVES))


def _holds_objects(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == object


def _entries(way: str, value: Any, attributes: bool) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"{way}[{key!r}]", entry) for key, entry in value.items()]
    if isinstance(value, list | tuple | deque):
        return [(f"{way}[{i}]", entry) for i, entry in enumerate(value)]
    if _holds_objects(value):
        return [(f"{way}[{i}]", entry) for i, entry in enumerate(value.flat)]
    if not attributes:
        return []
    if isinstance(value, set | frozenset):
        return [(f"{way}[{i}]", entry) for i, entry in enumerate(sorted(value, key=repr))]
    named = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name != "__weakref__" and hasattr(value, name):
                named.setdefault(name, getattr(value, name))
    return [(f"{way}.{name}", entry) for name, entry in named.items()]


def tensors_inside(value: Any) -> list[Tensor]:
    """Return all tensors inside a value."""
    return [leaf for _, leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the value with each tensor changed: a deep copy that shares arrays, or itself if no tensor changes."""
    others: dict[int, Any] = {}
    changes = False
    for _, leaf in leaves_of(value):
        if isinstance(leaf, Tensor):
            others[id(leaf)] = change(leaf)
            changes = changes or others[id(leaf)] is not leaf
        elif isinstance(leaf, np.ndarray):
            others[id(leaf)] = leaf
    return copy.deepcopy(value, others) if changes else value


def copied_deep(value: Any) -> Any:
    """Return a deep copy, with tensors as leaves without a graph; what cannot be copied (a lock, a file) is shared."""
    tensors = {id(tensor): _as_leaf(tensor.detach().clone(), tensor) for tensor in tensors_inside(value)}
    try:
        return copy.deepcopy(value, tensors)
    except TypeError:
        return value


def placed(value: Any, device: torch.device | str | None, dtype: torch.dtype | None) -> Any:
    """Return the value on a device, its floating-point tensors in `dtype` and ready to be differentiated.

    Arrays in mappings, lists and tuples become tensors. What has a method `to` moves itself.
    """
    return with_tensors(_on(value, None if device is None else torch.device(device)), partial(_ready, dtype=dtype))


def _as_leaf(new: Tensor, tensor: Tensor) -> Tensor:
    """Return a new tensor that requires a gradient if the tensor does, by which the model may differentiate itself."""
    return new.requires_grad_() if tensor.requires_grad else new


def _on(value: Any, device: torch.device | None) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(value.copy() if value.dtype.kind != "u" else value.astype(np.int64))
    if isinstance(value, Tensor):
        return value if device is None else _moved(value, device)
    if type(value) in (list, tuple):
        return type(value)(_on(entry, device) for entry in value)
    if type(value) is dict:
        return {key: _on(entry, device) for key, entry in value.items()}
    if device is None or isinstance(value, WORDS):
        return value
    inside = tensors_inside(value)
    if inside and all(tensor.device == device for tensor in inside):
        return value
    if callable(getattr(value, "to", None)):
        return copy.copy(value).to(device)  # a copy: the method may move the object itself
    return with_tensors(value, partial(_moved, device=device))


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    return _as_leaf(tensor.detach().to(device), tensor)


def _ready(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
        return _as_leaf(tensor.detach().to(dtype), tensor)
    # Tensors made in inference mode can never be differentiated.
    return tensor.clone() if tensor.is_inference() and not torch.is_inference_mode_enabled() else tensor


def digest_of(value: Any) -> int:
    """Return a 64-bit number of all that is seen inside a value, equal for equal values in all processes."""
    summed = hashlib.blake2b(digest_size=8)
    for way, leaf in leaves_of(value):
        summed.update(way.encode("utf8", "surrogatepass"))
        if isinstance(leaf, np.ndarray):
            leaf = torch.from_numpy(np.ascontiguousarray(leaf)) if leaf.dtype.kind in "biufc" else repr(leaf.tolist())
        if isinstance(leaf, Tensor):
            summed.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            for dense in _strided(leaf.detach()):
                summed.update(_bytes_of(dense))
        elif isinstance(leaf, bytes | bytearray):
            summed.update(leaf)
        else:
            summed.update(repr(leaf).encode("utf8", "surrogatepass"))
    return int.from_bytes(summed.digest(), "little", signed=True)


def _strided(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors of which a sparse or a nested one consists."""
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout == torch.strided:
        return [tensor]
    entries = tensor.to_sparse_coo().coalesce()
    return [entries.indices(), entries.values()]


def _bytes_of(tensor: Tensor) -> bytes:
    if tensor.is_cpu and tensor.nbytes < 2**14:  # a hash of so few bytes takes less time than a fingerprint
        return tensor.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return int(fingerprint([tensor])).to_bytes(8, "little", signed=True)
