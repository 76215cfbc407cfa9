"""Replays of J v from one forward-mode pass: the operations that carry tangents, run again on other tangents.

The pass runs on real tensors under a dispatch mode, which intercepts the operations below automatic differentiation.
Operations with a tangent among their arguments are linear in it and become the steps of the replay; their other
arguments are constants at these inputs and weights, and are kept. Nothing is traced symbolically: recording costs about
as much as the pass itself, whereas `torch.func.linearize` takes some milliseconds for every operation.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from curvops.network.model.parameters import Blocks

V = TypeVar("V")
READS = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default
"""Operations whose results Python gets, and may decide by."""


@dataclass(frozen=True)
class _Slot:
    """A placeholder for a tangent among a step's arguments."""

    index: int


@dataclass(frozen=True, eq=False)
class _Step:
    """One operation: its arguments with slots for the tangents, and the slots of its results (None: not a tensor).

    The last of the arguments are the keyword arguments. `in_list`: it returns its results in a list or a tuple.
    """

    run: Callable[..., Any]
    args: list[Any]
    keywords: tuple[str, ...]
    results: tuple[int | None, ...]
    in_list: bool

    def __call__(self, held: Sequence[Any]) -> Sequence[Any]:
        args = _fill(self.args, held)
        if self.keywords:
            count = len(args) - len(self.keywords)
            results = self.run(*args[:count], **dict(zip(self.keywords, args[count:])))
        else:
            results = self.run(*args)
        return results if self.in_list else (results,)


class Replay:
    """The recorded steps; running them gives J v for one v, with the constants of the recorded pass."""

    def __init__(self, steps: Sequence[_Step], tangent_slots: dict[str, int], result: int, slots: int) -> None:
        self._steps, self._tangent_slots, self._result, self._slots = list(steps), tangent_slots, result, slots
        last = {slot.index: i for i, step in enumerate(self._steps) for slot in all_of(_Slot, step.args)}
        last.pop(result, None)
        self._done: list[list[int]] = [[] for _ in self._steps]
        for slot, i in last.items():
            self._done[i].append(slot)

    def __call__(self, tangents: Blocks) -> Tensor:
        """Return J v for one tangent by name."""
        held: list[Any] = [None] * self._slots
        for name, slot in self._tangent_slots.items():
            held[slot] = tangents[name]
        for step, done in zip(self._steps, self._done):
            for place, value in zip(step.results, step(held)):
                if place is not None:
                    held[place] = value
            for place in done:
                held[place] = None
        result: Tensor = held[self._result]
        return result

    def nbytes(self, apart: Iterable[Tensor]) -> int:
        """Return the bytes of the constants, without those in the memory of the tensors in `apart`."""
        return bytes_beside([tensor for step in self._steps for tensor in all_of(Tensor, step.args)], apart)


class EagerMode(TorchDispatchMode):
    """A dispatch mode that torch does not wrap for its compiler, whose 800 modules the first operation would load."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Recorder(EagerMode):
    """A context that records the operations on the tangents passed to `follow`.

    The result belongs to one pass: the constants of the steps have the values of that pass. A constant that the model
    overwrites later is copied beforehand. `replay` is None if a tangent was written into memory that is not its own,
    because a second run would find this memory changed, and if Python read its numbers.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slot_of: dict[int, int] = {}  # of tangents that exist, since the id of a freed one may be another's
        self._ends: list[weakref.ref[Tensor]] = []
        self._slots = 0
        self._tangent_slots: dict[str, int] = {}
        self._steps: list[_Step] = []
        self._kept_in: dict[int, list[list[Any]]] = defaultdict(list)
        self._broken = False

    def follow(self, name: str, tangent: Tensor) -> None:
        """Return the tangent of a parameter as an argument of the replay."""
        self._tangent_slots[name] = self._slot(tangent)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = _find_written(func, args, kwargs) if func._schema.is_mutable else []
        for tensor in written:
            self._copy_what_shares(tensor)
        result = func(*args, **kwargs)
        if not any(id(tensor) in self._slot_of for tensor in all_of(Tensor, [args, kwargs])):
            return result
        self._broken = self._broken or func in READS
        tangent_slots = set(self._tangent_slots.values())
        slots = [self._slot_of.get(id(tensor)) for tensor in written]
        self._broken = self._broken or any(slot is None or slot in tangent_slots for slot in slots)
        in_list = isinstance(result, tuple | list)
        results = result if in_list else (result,)
        if any(isinstance(result, Tensor) for result in results):
            places = tuple(self._slot(result) if isinstance(result, Tensor) else None for result in results)
            values = self._referring([*args, *kwargs.values()])
            self._steps.append(_Step(func, values, tuple(kwargs), places, in_list))
        return result

    def replay(self, result: Tensor | None) -> Replay | None:
        """Return the steps to the tangent of the outputs; None if there is none, or if they may not run again."""
        if result is None or self._broken or id(result) not in self._slot_of:
            return None
        return Replay(self._steps, self._tangent_slots, self._slot_of[id(result)], self._slots)

    def _slot(self, tensor: Tensor) -> int:
        """Return the slot of a tangent, which is its own as long as it exists."""
        key, slots = id(tensor), self._slot_of
        if key not in slots:
            slots[key] = self._slots
            self._slots += 1
            self._ends.append(weakref.ref(tensor, lambda _: slots.pop(key)))
        return slots[key]

    def _referring(self, values: list[Any]) -> list[Any]:
        """Return arguments with slots instead of tangents, recording the storage of each constant."""
        for i, value in enumerate(values):
            if isinstance(value, Tensor) and id(value) in self._slot_of:
                values[i] = _Slot(self._slot_of[id(value)])
            elif isinstance(value, Tensor) and has_memory(value):
                self._kept_in[_extent(value)[0]].append(values)
            elif isinstance(value, tuple | list) and any(isinstance(entry, Tensor) for entry in value):
                values[i] = self._referring(list(value))
        return values

    def _copy_what_shares(self, tensor: Tensor) -> None:
        """Replace constants by copies if their memory is about to be written to."""
        if not has_memory(tensor):
            return
        for values in self._kept_in.pop(_extent(tensor)[0], []):
            for i, value in enumerate(values):
                if isinstance(value, Tensor) and has_memory(value) and _extent(value)[0] == _extent(tensor)[0]:
                    values[i] = value.clone()


def _find_written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    written: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            written += all_of(Tensor, [value])
    return written


def _fill(values: Sequence[Any], held: Sequence[Any]) -> list[Any]:
    return [
        held[value.index] if type(value) is _Slot else _fill(value, held) if type(value) is list else value
        for value in values
    ]


def all_of(kind: type[V], values: Any) -> list[V]:
    """Return the values of one kind in nested tuples, lists and dicts of any class."""
    if isinstance(values, kind):
        return [values]
    entries = values.values() if isinstance(values, dict) else values if isinstance(values, list | tuple) else ()
    return [value for entry in entries for value in all_of(kind, entry)]


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has memory of its own; sparse tensors and implicit zeros of forward mode have none."""
    return tensor.layout is torch.strided and not tensor._is_zerotensor()


def bytes_beside(tensors: Iterable[Tensor], apart: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages of some tensors that are not within a storage of those in `apart`."""
    held = [(0, 0), *sorted([_extent(tensor) for tensor in apart if has_memory(tensor)])]
    total = 0
    for start, end in {_extent(tensor) for tensor in tensors if has_memory(tensor)}:
        _, end_of_held = held[bisect_right(held, start, key=itemgetter(0)) - 1]
        total += end - start if end > end_of_held else 0
    return total


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the start and the end of the memory of a tensor's storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
