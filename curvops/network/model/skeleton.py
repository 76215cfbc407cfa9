"""A copy of a module with its own settings, which later changes to the user's module do not affect.

Parameters and buffers are shared, since every call replaces them by those of the snapshot. Everything else is copied as
`copy.deepcopy` does: flags, numbers, lists, other tensors, hooks, configurations. What it cannot copy is shared.
"""

from __future__ import annotations

import io
import operator
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

HeldTensor = tuple[Any, Any, Tensor]
"""A module, list or mapping, the attribute, position or key there, and the tensor that it holds."""
Entries = list[tuple[Any, Any]]
"""Modules, lists and mappings, each with a copy of its entries."""


def entries_of(container: Any) -> Any:
    """Return what holds the entries: a list or a mapping, for a module that of its attributes."""
    return vars(container) if isinstance(container, nn.Module) else container


def containers_in(module: nn.Module) -> list[Any]:
    """Return all modules, and the lists and mappings among their attributes and inside each other."""
    containers: list[Any] = [*module.modules()]
    seen = set[int]()
    for container in containers:  # the list grows
        entries = entries_of(container)
        for value in entries if isinstance(entries, list) else entries.values():
            if type(value) in (dict, OrderedDict, list) and id(value) not in seen:
                seen.add(id(value))
                containers.append(value)
    return containers


def state_of(containers: Sequence[Any]) -> Entries:
    """Return these containers with their present entries."""
    held = [entries_of(container) for container in containers]
    return [*zip(containers, [[*entries] if isinstance(entries, list) else dict(entries) for entries in held])]


def changed_in(state: Entries) -> list[Any]:
    """Return the containers of which an entry is another object now."""
    changed = []
    for container, before in state:
        entries = entries_of(container)
        if isinstance(entries, list):
            same = len(entries) == len(before) and all(map(operator.is_, entries, before))
        else:
            same = entries.keys() == before.keys()
            same = same and all(map(operator.is_, entries.values(), map(before.get, entries)))
        if not same:
            changed.append(container)
    return changed


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


def skeleton_of(module: nn.Module) -> tuple[nn.Module, list[HeldTensor], list[tuple[Tensor, Tensor]]]:
    """Return a copy of the module with its own settings and shared parameters and buffers, to be called instead.

    Also return the places outside `_parameters` and `_buffers` that hold those tensors: attributes of modules, and
    entries of lists and mappings among these. A pass that reads them from other objects is refused, see `TensorUse`,
    as is one that reads what was computed from them earlier: such tensors come last, each with its origin.
    """
    held = {
        id(tensor): tensor
        for submodule in module.modules()
        for tensor in (*submodule._parameters.values(), *submodule._buffers.values())
        if tensor is not None
    }
    memo: dict[int, Any] = {**held}
    memo[id(memo)] = []  # where deepcopy keeps alive what it has copied
    shells: list[tuple[nn.Module, nn.Module]] = []
    for submodule in module.modules():
        if id(submodule) in memo:
            continue  # inside a TorchScript module
        if isinstance(submodule, torch.jit.ScriptModule):
            memo.update(zip(map(id, submodule.modules()), _script(submodule).modules()))
        else:
            memo[id(submodule)] = shell = submodule.__class__.__new__(submodule.__class__)
            shells.append((submodule, shell))
    with _DetachedCopies() as copies:
        for original, shell in shells:
            for value in vars(original).values():
                for entry in value.values() if isinstance(value, dict) else (value,):  # attributes and hooks
                    if isinstance(entry, FunctionType):
                        memo[id(entry)] = _over_copies(entry, memo)
            for name, value in vars(original).items():
                shell.__dict__[name] = _copied(value, memo)
            if isinstance(original, fx.GraphModule):  # a class made for it alone, which `recompile` changes
                type(shell).forward = type(original).forward
            if "_orig_mod" in original._modules:
                shell.__dict__["forward"] = shell._modules["_orig_mod"]
            shell.__dict__["_compiled_call_impl"] = None  # compiled for the original
    other = memo[id(module)]
    named = {id(tensors) for submodule in other.modules() for tensors in (submodule._parameters, submodule._buffers)}
    places: list[HeldTensor] = []
    for container in containers_in(other):
        entries = entries_of(container)
        if id(entries) in named:
            continue
        for key, entry in enumerate(entries) if isinstance(entries, list) else entries.items():
            if id(entry) in held:
                places.append((container, key, entry))
    computed = [(copy, held[leaf]) for copy, leaves in copies.computed for leaf in leaves & held.keys()]
    return other, places, computed


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy, or what can be copied of it: a lock, say, is shared."""
    size = len(memo)
    try:
        return deepcopy(value, memo)
    except Exception:
        while len(memo) > size:  # copies that were begun
            memo.popitem()
        return copy(value) if isinstance(value, dict | list) else value


class _DetachedCopies(TorchFunctionMode):
    """A mode in which tensors in a graph, such as cached features, can be copied, too.

    `computed` lists these copies, each with the identities of the leaves of its graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[tuple[Tensor, set[int]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **kwargs or {})
        copied: Tensor = args[0].detach().clone()
        if args[0].grad_fn is not None:
            leaves = {id(getattr(node, "variable", None)) for node in nodes_behind(args[0])}
            self.computed.append((copied, leaves))
        return copied


def nodes_behind(tensor: Tensor) -> list[Node]:
    """Return the nodes of a tensor's graph. Needs no pass."""
    nodes = [] if tensor.grad_fn is None else [tensor.grad_fn]
    seen = {*nodes}
    for node in nodes:  # the list grows
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                nodes.append(parent)
    return nodes


def _over_copies(function: FunctionType, memo: Mapping[int, Any]) -> FunctionType:
    """Return a function that refers to the copies of the modules in its closure and among its global names."""
    cells = function.__closure__ or ()
    named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    ours = {name: memo[id(value)] for name, value in named.items() if id(value) in memo}
    closed = tuple(CellType(_copy_in(cell, memo)) if _copy_in(cell, memo) is not None else cell for cell in cells)
    if not ours and closed == cells:
        return function
    spaces = {**function.__globals__, **ours} if ours else function.__globals__
    other = FunctionType(function.__code__, spaces, function.__name__, function.__defaults__, closed)
    other.__kwdefaults__ = function.__kwdefaults__
    other.__dict__.update(function.__dict__)
    return other


def _copy_in(cell: CellType, memo: Mapping[int, Any]) -> Any:
    """Return the copy of the module, or of its method, that a closure's cell holds; None if it holds neither."""
    try:
        value = cell.cell_contents
    except ValueError:  # not assigned yet
        return None
    if isinstance(value, MethodType):
        return MethodType(value.__func__, memo[id(value.__self__)]) if id(value.__self__) in memo else None
    return memo.get(id(value)) if isinstance(value, nn.Module) else None


def _script(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """Return a copy of a TorchScript module that shares parameters and buffers, but no code that was optimised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch deprecates TorchScript, which the user chose
        file = io.BytesIO()
        torch.jit.save(module, file)
        file.seek(0)
        other: torch.jit.ScriptModule = torch.jit.load(file)
    for mine, theirs in zip(other.modules(), module.modules()):
        for name, parameter in theirs._parameters.items():
            mine._parameters[name] = parameter
        for name, tensor in theirs._buffers.items():
            mine._buffers[name] = tensor
    return other


class TensorUse(TorchFunctionMode):
    """A mode that records which functions are called, and the names of tensors, by their identities, that they use."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
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
