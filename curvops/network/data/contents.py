"""Tensors, arrays, numbers and words inside any Python value: to find them, to replace tensors, to compare values.

A value is looked into through mappings, lists, tuples, sets and the attributes of other objects; what NumPy reads as an
array (an image, a table) is one. What an extension keeps in its own memory (a graph of DGL), functions, classes and
modules of Python are not seen.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from numbers import Number
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvops.fingerprints import fingerprint

WORDS: tuple[type, ...] = (str, bytes, bytearray, Number, type(None), PurePath, np.dtype, torch.dtype, torch.device)
LEAVES = (Tensor, np.ndarray, *WORDS)
ARRAYS = ("__array_interface__", "__array__")
BUFFERS = (array, memoryview)
UNSEEN = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
LARGE = 2**14
"""The bytes from which on the fingerprint of a tensor takes less time than a hash of its bytes."""


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
    tensors = {id(tensor): _cloned(tensor) for tensor in tensors_inside(value)}
    try:
        return copy.deepcopy(value, tensors)
    except TypeError:
        return value


def _cloned(tensor: Tensor) -> Tensor:
    return _as_leaf(tensor.detach().clone(), tensor)


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
    if tensor.is_cpu and tensor.nbytes < LARGE:
        return tensor.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return int(fingerprint([tensor])).to_bytes(8, "little", signed=True)
