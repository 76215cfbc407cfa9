"""Proofs that a network's derivatives are right, reused for later linearisations of networks of the same structure.

Two networks have the same structure if their modules, tensors, inputs and options are alike, and if their recorded
passes at the first points are the same graph of operations. The description of a model determines which rules apply;
its graph shows that it still runs the same way. The numbers may differ, for example after further training. If this
cannot be decided (hooks, a custom `autograd.Function`, a mode that intercepts operations, attributes without an
identity), or after a failure, everything is proven again. Proofs refer weakly to classes and other objects, and keep no
model and no tensor.

A proof at a few points holds for a batch whose recorded pass has the same path (`path_of`): a model may run differently
on more points or on other points.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from curvops.network.data.inputs import components, normalise, num_points
from curvops.network.engines.layerwise import Recording
from curvops.network.engines.routes import Routes
from curvops.network.model.model import Model

MOST = 64
"""The number of structures that are remembered, the most recently used."""
COMMON = frozenset(vars(nn.Module()))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MOVING = {
    *("Index", "IndexSelect", "IndexAdd", "IndexCopy", "IndexPut", "IndexReduce", "Gather", "Take", "Sort"),
    *("Scatter", "ScatterAdd", "ScatterReduce", "MaskedSelect", "MaskedScatter"),
}
"""Operations that may reorder points, depending on the numbers they are given."""
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.memory_format, type(None))


@dataclass(eq=False)
class Proof:
    """Facts about networks of one structure: routes to J v by parameters, names without a layer rule, and checks.

    `paths` names the parameters whose layers were not right in the passes that were checked.
    """

    routes: dict[tuple[str, ...], Routes] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    checked: set[str] = field(default_factory=set)
    paths: dict[int, frozenset[str]] = field(default_factory=dict)
    key: Hashable = None

    def copy(self) -> Proof:
        """Return a copy for a single linearisation."""
        return Proof(dict(self.routes), dict(self.rejected), set(self.checked), dict(self.paths))


_proofs: OrderedDict[Hashable, Proof] = OrderedDict()
_lock = threading.Lock()


def key_of(model: Model, few: Any, options: Hashable, outputs: Tensor) -> Hashable:
    """Return a key that is equal for networks of one structure, or None; `outputs` have their graph."""
    try:
        return options, structure_of(model), inputs_of(few), graph_of(model, outputs)
    except (MismatchError, TypeError):
        return None


def proof_of(key: Hashable, prove: Callable[[], Proof]) -> Proof:
    """Return the proof for networks of this structure, which `prove` makes if there is none."""
    if key is None:
        return prove()
    known = _proofs.get(key)
    found = prove() if known is None else known
    with _lock:
        found.key = key
        _proofs[key] = found
        _proofs.move_to_end(key)
        while len(_proofs) > MOST:
            _proofs.popitem(last=False)
    return found


def forget(proof: Proof) -> Proof:
    """Drop a proof after a failure, so that other linearisations prove again; return a copy for this one."""
    with _lock:
        if _proofs.get(proof.key) is proof:
            del _proofs[proof.key]
    return proof.copy()


class MismatchError(Exception):
    """Raised if it cannot be decided whether another network has the same structure."""


def structure_of(model: Model) -> Hashable:
    """Describe modules by classes, code, modes and attributes, and tensors by name, place, dtype and shape."""
    held = {**model.frozen, **model._buffers}
    shapes = tuple((name, tensor.dtype, tensor.device, tensor.shape) for name, tensor in held.items())
    flat, selection = model.tensors()[0], model.selection
    around = _surroundings(flat.device)
    shared = selection.names, selection.shapes, flat.dtype, flat.device, shapes, around, model.layout
    if model.module is None:
        return *shared, _Same(model._function)
    parts = tuple([_part(path, part) for part, path in model.paths.items()])
    return *shared, tuple([(model.paths[part], local, name) for part, local, name in model.places]), parts


def _surroundings(device: torch.device) -> Hashable:
    """Return the settings that change what a pass computes; raise MismatchError for a mode or a global hook."""
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        raise MismatchError
    if any(getattr(torch_module, f"_global{hooks}") for hooks in HOOKS):
        raise MismatchError
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return autocast, torch.get_default_dtype()


def inputs_of(inputs: Any) -> Hashable:
    """Return the number of points, and the structure of one."""
    given = normalise(inputs)
    forms = tuple([(name, part.dtype, part.shape[1:]) for name, part in components(given)])
    return num_points(given), type(inputs), forms


def _part(path: str, part: nn.Module) -> Hashable:
    held = vars(part)
    for hooks in HOOKS:
        if held[hooks]:
            raise MismatchError
    own = tuple([(name, _plain(value)) for name, value in held.items() if name not in COMMON])
    kind = type(part)
    forward = getattr(kind, "forward", None)  # TorchScript has none: it is proven each time
    # Classes and functions equal only themselves, so references to them need no `_Same`.
    return path, weakref.ref(kind), weakref.ref(forward), getattr(forward, "__code__", None), part.training, own


def _plain(value: Any) -> Hashable:
    """Return a value that is equal for equal arguments, or the object's identity."""
    if type(value) in PLAIN:
        return type(value), value
    if isinstance(value, tuple | list | set | frozenset):
        return type(value), tuple(map(_plain, value))
    if isinstance(value, dict):
        return type(value), tuple((_plain(key), _plain(held)) for key, held in value.items())
    return _Same(value)


class _Same:
    """A key that equals only the key of the same object, as long as that object exists."""

    __slots__ = ("_hash", "_what")

    def __init__(self, what: Any) -> None:
        self._what, self._hash = weakref.ref(what), id(what)  # TypeError: an object without an identity

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and (what := self._what()) is not None and what is other._what()

    def __hash__(self) -> int:
        return self._hash


def graph_of(model: Model, outputs: Tensor) -> Hashable:
    """Return the operations behind these outputs with the sizes of their results, and the parameters they start at."""
    found: list[Hashable] = []
    for node, edges in _operations(outputs, {}):
        if hasattr(type(node), "_forward_cls"):  # a user's function may do anything
            raise MismatchError
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append((node.name(), model.place_of(variable), variable.shape))
            continue
        sizes = tuple((tuple(result.shape), result.dtype) for result in node._input_metadata)
        # The only argument that decides whether forward mode is right (see `find_routes`).
        found.append((node.name(), tuple(edges), sizes, getattr(node, "_saved_padding_idx", None)))
    return tuple(found)


def _operations(outputs: Tensor, numbers: dict[Any, int]) -> Iterator[tuple[Any, list[tuple[int | None, int]]]]:
    """Yield each operation behind the outputs, with the numbers of its parents and the places of their results.

    `numbers` is filled with the operations in the order in which they are yielded.
    """
    order = [] if outputs.grad_fn is None else [outputs.grad_fn]
    numbers.update((node, i) for i, node in enumerate(order))
    for node in order:  # the list grows
        edges = []
        for parent, place in node.next_functions:
            if parent is not None and parent not in numbers:
                numbers[parent] = len(order)
                order.append(parent)
            edges.append((None if parent is None else numbers[parent], place))
        yield node, edges


def path_of(model: Model, recording: Recording) -> int | None:
    """Return a number that is equal for passes with the same operations and calls of layers, at any number of points.

    It determines whether layer rules are right: which paths lead from the outputs to a parameter, and which of them
    lead through the call of a layer. Return None if an operation may move points, as a sort does.
    """
    outputs, calls, _ = recording
    n = len(outputs)
    found: list[Hashable] = [n == 1]
    numbers: dict[Any, int] = {}
    for node, edges in _operations(outputs, numbers):
        if not edges:
            variable = getattr(node, "variable", None)
            found.append(None if variable is None else model.place_of(variable))
            continue
        name = node.name()
        if name.partition("Backward")[0] in MOVING and _moves_points(node, n):
            return None
        found += [name, *edges]
    found += [(call.layer.path, numbers.get(call.edge.node), call.edge.output_nr) for call in calls]
    return hash(tuple(found))


def _moves_points(node: Any, n: int) -> bool:
    """Return whether an indexing operation may move points, unless it acts within each of the n leading points."""
    shape = node._input_metadata[0].shape
    if len(shape) == 0 or shape[0] != n:
        return True
    indices = getattr(node, "_saved_indices", None)
    if indices is not None:
        first = indices[0]
        return first is not None and not torch.equal(first.flatten(), torch.arange(n, device=first.device))
    dim = getattr(node, "_saved_dim", 0)
    return dim == 0 or dim == 2**64 - len(shape)
