"""A copy of a module with its own settings, which later changes to the user's module do not affect.

Parameters and buffers are shared, since every call replaces them by those of the snapshot. Everything else that a
forward pass may read is copied: training flags, numbers, strings, lists, mappings, other tensors, arrays, hooks, the
order of submodules, and objects composed of these (configurations). Other objects are shared.
"""

from __future__ import annotations

import functools
import io
import operator
import warnings
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from copy import copy
from enum import Enum
from types import CellType, FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec

NUMBERS = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device))
UNCHANGING = (type, Enum, int, float, complex, str, bytes, fx.Graph, fx.Node, TreeSpec)
"""Values of these types and of their subclasses are shared."""
CONTAINERS = (list, tuple, set, frozenset, deque)
DEEPEST = 4
"""The largest depth of nested objects and containers in a configuration."""
HeldTensor = tuple[Any, Any, Tensor]
"""A container or `Attributes`, the key or position there, and the tensor that it holds."""
Entries = list[tuple[Any, Any]]
"""Lists, mappings and `Attributes`, each with a copy of its entries."""


class Attributes(NamedTuple):
    """The attributes of an object; a copy of the object has its own, which a reference to `__dict__` would miss."""

    owner: Any


def entries_of(container: Any) -> Any:
    """Return what holds the entries: a list or a mapping."""
    return vars(container.owner) if isinstance(container, Attributes) else container


def containers_in(module: nn.Module) -> list[Any]:
    """Return the attributes of all modules, and the lists and mappings among them and inside each other."""
    found: list[Any] = [Attributes(part) for part in module.modules()]
    seen = set[int]()
    for container in found:  # the list grows
        entries = entries_of(container)
        parts = list(entries if isinstance(entries, list) else entries.values())
        new = [part for part in parts if type(part) in (dict, OrderedDict, list) and id(part) not in seen]
        seen.update(map(id, new))
        found += new
    return found


def state_of(containers: Iterable[Any]) -> Entries:
    """Return these containers with their present entries."""
    return [(container, copy(entries_of(container))) for container in containers]


def changed_in(state: Entries) -> list[Any]:
    """Return the containers of which an entry is another object now."""
    return [container for container, before in state if not _are_same(entries_of(container), before)]


def restore(state: Entries) -> None:
    """Give the containers back the entries that they had."""
    for container, before in state:
        entries = entries_of(container)
        if isinstance(entries, list):
            entries[:] = before
            continue
        for key in entries.keys() - before.keys():
            del entries[key]
        entries.update(before)


def _are_same(entries: Any, before: Any) -> bool:
    if isinstance(entries, list):
        return len(entries) == len(before) and all(map(operator.is_, entries, before))
    return entries.keys() == before.keys() and all(value is before[key] for key, value in entries.items())


def skeleton_of(module: nn.Module) -> tuple[nn.Module, list[HeldTensor]]:
    """Return a copy of the module with its own settings and shared parameters and buffers, to be called instead.

    Also return the places outside `_parameters` and `_buffers` that hold those tensors: entries of lists and mappings,
    and attributes of other objects.
    """
    held = [t for part in module.modules() for t in (*part._parameters.values(), *part._buffers.values())]
    copier = _Copier(held)
    found: nn.Module = copier.of(module)
    own = {id(named) for part in found.modules() for named in (part._parameters, part._buffers)}
    return found, [place for place in copier.places if id(place[0]) not in own]


class _Copier:
    """A copier that copies each object once, so that shared and circular references are preserved."""

    def __init__(self, held: Iterable[Tensor | None]) -> None:
        self.memo: dict[int, Any] = {id(tensor): tensor for tensor in held if tensor is not None}
        self.held = frozenset(self.memo)
        self.places: list[HeldTensor] = []
        self.alive: list[Any] = []  # otherwise the id of a temporary object could be reused

    def of(self, value: Any) -> Any:
        kind = type(value)
        if kind in NUMBERS or isinstance(value, UNCHANGING):
            return value
        if kind in (dict, OrderedDict) and not value:  # most of a module's attributes are empty mappings of hooks
            return kind()
        known = self.memo.get(id(value))
        if known is None:
            self.alive.append(value)
            self.memo[id(value)] = value  # in case the object is shared or refers to itself
            self.memo[id(value)] = known = self._copy(value)
        return known

    def _copy(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return _script(value) if isinstance(value, torch.jit.ScriptModule) else self._module(value)
        if isinstance(value, Tensor):
            return value.detach().clone()
        if isinstance(value, Mapping | list | set | frozenset | deque):
            return self._container(value)
        if isinstance(value, tuple):
            return self._tuple(value)
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self.of(value.__self__))
        if isinstance(value, functools.partial):
            return functools.partial(self.of(value.func), *map(self.of, value.args), **self.of(value.keywords))
        if isinstance(value, FunctionType):
            return self._function(value)
        if hasattr(value, "__array_interface__") or isinstance(value, array | bytearray):
            return copy(value)
        return self._object(value) if _is_plain(value, DEEPEST) else value

    def _module(self, module: nn.Module) -> nn.Module:
        other = self._object(module)
        if isinstance(module, fx.GraphModule):  # its class was made for it alone, and `recompile` changes that class
            type(other).forward = type(module).forward
        if getattr(other, "_compiled_call_impl", None) is not None:
            other.__dict__["_compiled_call_impl"] = None  # compiled for the original
        if "_orig_mod" in other._modules:
            other.__dict__["forward"] = other._modules["_orig_mod"]
        return other

    def _object(self, value: Any) -> Any:
        """Return an object of the same class with copies of the attributes."""
        try:
            other: Any = value.__class__.__new__(value.__class__)
        except TypeError:  # its constructor needs arguments
            return value
        self.memo[id(value)] = other
        self._fill(other, value)
        return other

    def _fill(self, other: Any, value: Any) -> None:
        """Copy this object's attributes to the other one."""
        for name, part in _slots(value).items():
            object.__setattr__(other, name, self.of(part))  # the object may be frozen
        if hasattr(value, "__dict__"):
            parts = vars(value).items()
            other.__dict__.update({name: part if type(part) in NUMBERS else self.of(part) for name, part in parts})
            self._note_places(Attributes(other), parts)

    def _note_places(self, container: Any, parts: Iterable[tuple[Any, Any]]) -> None:
        self.places += [(container, key, part) for key, part in parts if id(part) in self.held]

    def _container(self, value: Any) -> Any:
        try:
            other = copy(value)
        except TypeError:  # a read-only view of a mapping
            return value
        self.memo[id(value)] = other
        if isinstance(value, Mapping) and hasattr(other, "__setitem__"):
            for key, part in value.items():
                other[key] = self.of(part)
            self._note_places(other, other.items())
        elif isinstance(value, list | deque):
            for i, part in enumerate(value):
                other[i] = self.of(part)
            self._note_places(other, enumerate(other))
        return other

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        parts = [self.of(part) for part in value]
        if all(new is old for new, old in zip(parts, value)):
            return value
        try:
            other = tuple.__new__(type(value), parts)
        except TypeError:  # a class written in C, such as the result of torch.max
            return type(value)(parts)
        self._fill(other, value)
        return other

    def _function(self, function: FunctionType) -> FunctionType:
        """Return a function that refers to copies of the modules in its closure and among its global names."""
        cells = function.__closure__ or ()
        named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
        ours = {name: self.of(part) for name, part in named.items() if isinstance(part, nn.Module)}
        closed = tuple(CellType(self.of(c.cell_contents)) if _holds_module(c) else c for c in cells)
        if not ours and all(new is old for new, old in zip(closed, cells)):
            return function
        spaces = {**function.__globals__, **ours} if ours else function.__globals__
        other = FunctionType(function.__code__, spaces, function.__name__, function.__defaults__, closed)
        other.__kwdefaults__ = function.__kwdefaults__
        other.__dict__.update(function.__dict__)
        return other


def _script(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """Return a copy of a TorchScript module that shares parameters and buffers, but no code that was optimised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch deprecates TorchScript, which the user chose
        file = io.BytesIO()
        torch.jit.save(module, file)
        file.seek(0)
        other: torch.jit.ScriptModule = torch.jit.load(file)
    pairs: list[tuple[Any, Any]] = []
    for mine, theirs in zip(other.modules(), module.modules()):
        pairs += [(mine._parameters, theirs._parameters), (mine._buffers, theirs._buffers)]
    for named, tensors in pairs:
        for name, tensor in tensors.items():
            named[name] = tensor
    return other


def _holds_module(cell: CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, nn.Module | MethodType)
    except ValueError:  # not assigned yet
        return False


def _is_plain(value: Any, depth: int) -> bool:
    """Return whether an object consists of values that can be copied: its attributes, and nothing else."""
    kind = type(value)
    if kind in NUMBERS or isinstance(value, (*UNCHANGING, Tensor, nn.Module)) or hasattr(value, "__array_interface__"):
        return True
    if depth == 0:
        return False
    if isinstance(value, Mapping):
        return all(_is_plain(part, depth - 1) for pair in value.items() for part in pair)
    if isinstance(value, CONTAINERS):
        return all(_is_plain(part, depth - 1) for part in value)
    if kind is not SimpleNamespace and not all(_is_pythons(kind, name) for name in ("__reduce__", "__reduce_ex__")):
        return False  # a class written in C with its own way of pickling
    if hasattr(kind, "__getnewargs__"):  # made from arguments, and perhaps one object for each, as in SymPy
        return False
    attributes = _slots(value) | getattr(value, "__dict__", {})
    own = bool(attributes) or hasattr(value, "__dict__")
    return own and all(_is_plain(part, depth - 1) for part in attributes.values())


def _is_pythons(kind: type, name: str) -> bool:
    method = getattr(kind, name)
    return method is getattr(object, name) or isinstance(method, FunctionType)


def _slots(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that are in slots, by name."""
    found: dict[str, Any] = {}
    for kind in type(value).__mro__:
        if "__slots__" in vars(kind):
            names = (name for name, member in vars(kind).items() if isinstance(member, MemberDescriptorType))
            found |= {name: getattr(value, name) for name in names if hasattr(value, name)}
    return found


class TensorUse(TorchFunctionMode):
    """A mode that records which functions are called, and the names of given tensors (by identity) that they use."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in named.items()}
        self.names: set[str] = set()
        self.functions: set[Any] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.functions.add(func)
        values: list[Any] = [*args, *kwargs.values()]
        for value in values:  # the list grows in the loop: torch's own trees take as long as the model's pass
            if isinstance(value, list | tuple | dict):
                values += value.values() if isinstance(value, dict) else value
            elif id(value) in self._names and func not in _READINGS:
                self.names.add(self._names[id(value)])
        return func(*args, **kwargs)


_READINGS = {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "requires_grad", "is_cuda")}
