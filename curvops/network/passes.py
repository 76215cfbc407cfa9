"""The one place that walks over the data: streaming, the cache of linearisations, and its memory budget."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from curvops.network.autodiff import Recorded, Streamed, forward_mode_works, replay_works, saved_bytes
from curvops.network.inputs import move, num_points, take
from curvops.network.layerwise import Layerwise, mismatches, owners_of, record, unfit
from curvops.network.model import Model
from curvops.network.parameters import Blocks
from curvops.network.plan import Kind, Plan

# Never less than this many bytes of sensitivities at a time while a layerwise engine is built.
LEAST_CHUNK = 16 * 2**20


@runtime_checkable
class Engine(Protocol):
    """J of one batch of n points: what both engines offer."""

    kind: Any
    nbytes: int

    @property
    def outputs(self) -> Tensor: ...
    def push(self, tangents: Any) -> Tensor: ...
    def pull(self, cotangents: Tensor) -> Blocks: ...


class BatchMap:
    """J of one batch on flat vectors: `push` (D, K) -> (K, n, C) and `pull` (K, n, C) -> (D, K), both differentiable."""

    def __init__(self, engine: Engine, model: Model, lock: threading.RLock) -> None:
        self._engine, self._selection, self._lock = engine, model.selection, lock

    @property
    def outputs(self) -> Float[Tensor, "n C"]:
        """f(θ, inputs)."""
        with self._lock:
            return self._engine.outputs

    def push(self, vectors: Float[Tensor, "D K"]) -> Float[Tensor, "K n C"]:
        """J V."""
        return _linear(vectors, self._push, self._pull)

    def pull(self, cotangents: Float[Tensor, "K n C"]) -> Float[Tensor, "D K"]:
        """Jᵀ U."""
        return _linear(cotangents, self._pull, self._push)

    def _push(self, vectors: Tensor) -> Tensor:
        with self._lock:
            return self._engine.push(self._selection.split(vectors))

    def _pull(self, cotangents: Tensor) -> Tensor:
        with self._lock:
            return self._selection.join(self._engine.pull(cotangents))


class Passes:
    """Walks over batches with an engine for each, built and kept as the plan's cost rule and the budget allow.

    `source` is a re-iterable of (inputs, label); labels are handed through (targets, or None). Thread-safe.
    """

    def __init__(self, model: Model, source: Iterable[tuple[Any, Any]], engine: str, memory_budget: int) -> None:
        self.model, self._source, self._engine_choice, self.memory_budget = model, source, engine, memory_budget
        self._lock = threading.RLock()
        self._kept: dict[int, tuple[Any, Engine]] = {}
        self._done = 0
        self._complete = False
        self._plan: Plan | None = None
        self._forward_mode = True
        self._verified = False
        self._rejected: dict[str, str] = {}

    @property
    def plan(self) -> Plan:
        """The plan, made from the first batch when it is first needed."""
        with self._lock:
            if self._plan is None:
                inputs, _ = next(iter(self._source))
                self._plan = self._make_plan(inputs)
            return dataclasses.replace(self._plan, in_use=self._in_use())

    def each(self, columns: int) -> Iterator[tuple[Any, BatchMap]]:
        """(label, J of the batch) for every batch, for a product with `columns` vectors.

        A walk over cached batches does not read the data again.
        """
        with self._lock:
            cached = [self._kept[i] for i in range(len(self._kept))] if self._complete else None
            done, self._done = self._done, self._done + columns
            columns = max(1, columns)  # outputs alone are asked for with 0
        if cached is not None and all(self._settled(engine, done, columns) for _, engine in cached):
            for label, engine in cached:
                yield label, BatchMap(engine, self.model, self._lock)
            return
        count = 0
        for index, (inputs, label) in enumerate(self._source):
            with self._lock:
                engine = self._engine_for(index, inputs, label, done, columns)
            yield label, BatchMap(engine, self.model, self._lock)
            count = index + 1
        with self._lock:
            self._complete = len(self._kept) == count

    def _settled(self, engine: Engine, done: int, columns: int) -> bool:
        points = engine.outputs.shape[0]
        kind: Kind = engine.kind
        return self.plan.choose(kind, done, columns, points, self._free() + engine.nbytes) == kind

    def _engine_for(self, index: int, inputs: Any, label: Any, done: int, columns: int) -> Engine:
        if self._plan is None:
            self._plan = self._make_plan(inputs)
        _, present = self._kept.get(index, (None, None))
        built: Kind = present.kind if present is not None else "streamed"
        room = self._free() + (present.nbytes if present is not None else 0)
        kind = self._plan.choose(built, done, columns, num_points(inputs), room)
        if present is not None and present.kind == kind:
            return present
        engine = self._build(kind, inputs, room)
        if kind != "streamed" and engine.nbytes <= room:
            self._kept[index] = (label, engine)
        return engine

    def _build(self, kind: Kind, inputs: Any, room: int) -> Engine:
        assert self._plan is not None
        names = self.model.selection.names
        if kind == "streamed":
            return Streamed(self.model, inputs, names, self._forward_mode)
        if kind == "recorded":
            return Recorded(self.model, inputs, names, self._plan.replayable)
        engine = self._build_layerwise(inputs, room)
        if not self._verified:
            wrong = mismatches(engine, Streamed(self.model, inputs, names, self._forward_mode))
            if wrong:
                self._plan = None
                self._rejected |= dict.fromkeys(wrong, "the self-check on the first batch failed")
                self._plan = self._make_plan(inputs)
                return self._build(self._plan.choose("streamed", self._done, 1, num_points(inputs), room), inputs, room)
            self._verified = True
        return engine

    def _build_layerwise(self, inputs: Any, room: int) -> Layerwise:
        assert self._plan is not None
        others = tuple(self._plan.others)
        rest = Recorded(self.model, inputs, others, self._plan.replayable) if others else None
        return Layerwise(self.model, inputs, self._owners(), rest, max(LEAST_CHUNK, room // 8))

    def _owners(self) -> Any:
        """Layers and what they own of the parameters that are left to the layerwise engine."""
        left_out = self._rejected.keys() | (self._plan.others.keys() if self._plan is not None else set())
        owners = owners_of(self.model)
        kept = {m: {k: n for k, n in names.items() if n not in left_out} for m, names in owners.items()}
        return {module: names for module, names in kept.items() if names}

    def _make_plan(self, inputs: Any) -> Plan:
        """Probe the first points of a batch: derivatives that exist and agree, layers that run, bytes that are kept."""
        model, names = self.model, self.model.selection.names
        few = take(inputs, slice(0, 2))
        self._forward_mode = _forward_mode_allowed(model) and forward_mode_works(model, few, names)
        with torch.no_grad():
            num_outputs = model(model.values, few).shape[1]
        layers, others = self._layers(few)
        return Plan(
            engine=self._engine_choice,  # type: ignore[arg-type]
            layers=layers,
            others=others,
            num_outputs=num_outputs,
            itemsize=model.theta.element_size(),
            saved_bytes=saved_bytes(model, few) // num_points(few),
            replayable=self._forward_mode and replay_works(model, few, names),
            memory_budget=self.memory_budget,
        )

    def _layers(self, few: Any) -> tuple[Any, dict[str, str]]:
        names = self.model.selection.names
        owners = self._owners() if self._engine_choice != "autodiff" else {}
        if not owners:
            return (), dict.fromkeys(names, "no layer rule")
        _, calls = record(self.model, few, owners)
        self._rejected |= dict.fromkeys(unfit(self.model, calls, owners), "its layer does not run as a layer")
        calls = [call for call in calls if not set(call.layer.names.values()) & self._rejected.keys()]
        served = {name for call in calls for name in call.layer.names.values()}
        others = {name: self._rejected.get(name, "no layer rule") for name in names if name not in served}
        return tuple(call.layer for call in calls), others

    def cast(self, dtype: torch.dtype | None, device: torch.device | None) -> Passes:
        """The same walk, unlabelled, with the model and the inputs converted."""
        parts = [(move(inputs, device, dtype), None) for inputs, _ in self._source]
        return Passes(self.model.cast(dtype, device), parts, self._engine_choice, self.memory_budget)

    def _free(self) -> int:
        return self.memory_budget - sum(engine.nbytes for _, engine in self._kept.values())

    def _in_use(self) -> dict[str, int]:
        kinds = [engine.kind for _, engine in self._kept.values()]
        return {kind: kinds.count(kind) for kind in set(kinds)}

    def __getstate__(self) -> dict[str, Any]:
        """Caches and the lock stay behind when a linearisation is pickled or copied."""
        state = self.__dict__ | {"_kept": {}, "_complete": False, "_done": 0}
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()


def _forward_mode_allowed(model: Model) -> bool:
    """False for an embedding with a padding row: its forward derivative is not the adjoint of its backward one."""
    if model.module is None:
        return True
    parts = (part for part in model.module.modules() if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag))
    return all(part.padding_idx is None for part in parts)


class _Linear(Function):
    """A linear map with its adjoint, for autograd."""

    @staticmethod
    def forward(ctx: Any, argument: Tensor, apply: Any, adjoint: Any) -> Tensor:
        ctx.maps = apply, adjoint
        return apply(argument)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        apply, adjoint = ctx.maps
        return _linear(gradient, adjoint, apply), None, None


def _linear(argument: Tensor, apply: Any, adjoint: Any) -> Tensor:
    if torch.is_grad_enabled() and argument.requires_grad:
        return _Linear.apply(argument, apply, adjoint)  # type: ignore[no-any-return, no-untyped-call]
    return apply(argument.detach())  # type: ignore[no-any-return]
