"""The engines of one model: probed once, planned once, built for any batch, and checked before use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from copy import copy
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from curvops.network.data.inputs import copy as copied
from curvops.network.data.inputs import in_pieces, num_points, take
from curvops.network.engines.autodiff import KeptRows, Recorded, Streamed, record_replay
from curvops.network.engines.layerwise import (
    MAPPED_BYTES,
    Call,
    Layerwise,
    Owners,
    Recording,
    never_ran,
    owners_of,
    record,
)
from curvops.network.engines.plan import EngineChoice, EngineKind, Plan, rates_of
from curvops.network.engines.proofs import Proof, forget, key_of, path_of, proof_of
from curvops.network.engines.routes import Routes, find_routes, proves_itself, try_recording
from curvops.network.engines.self_check import Checked, bypassed, mismatches, random_root, wrong_layers
from curvops.network.likelihoods.output_fisher import IDENTITY, Root, RootJacobian
from curvops.network.model.model import Model
from curvops.network.model.parameters import Blocks

# The least number of bytes of sensitivities used at a time while a layerwise engine is built.
LEAST_CHUNK = 16 * 2**20
# The number of points on which layer rules are checked before use.
CHECKED_POINTS = 8
# On a CPU passes without a graph are over at least so many points at a time, for which weights are read only once.
FORWARD_POINTS = 32
NO_LAYER = "its layer does not run as a layer"
WRONG = "the self-check failed"
# The checked uses of layer rules: products with J, products with J and some columns, rows.
WHOLE, COLUMNS, ROWS = "whole", "columns", "rows"


@runtime_checkable
class Engine(Protocol):
    """J of one batch of n points, by parameter name: the interface of both engines."""

    kind: Any
    nbytes: int

    @property
    def outputs(self) -> Tensor: ...
    def push(self, tangents: Any) -> Tensor: ...
    def pull(self, cotangents: Tensor) -> Blocks: ...


class Engines:
    """A builder of engines for batches of a model, which is probed on the first two points of the inputs `first`.

    The probe determines the number of outputs, which derivatives exist and are right (see `routes`), which layers run
    as layers, and how many bytes an engine keeps. An engine that is kept is checked on the first batch that it is used
    for. The layer rules are checked on some of its points, or on all if its recorded pass has another path than those.
    Checks are not repeated for a network of the same structure (see `proofs`). With `whole`, the pass over all of
    `first` is kept for a caller that needs its rows (`pop_first`).
    """

    def __init__(self, model: Model, first: Any, choice: EngineChoice, memory_budget: int, whole: bool = False) -> None:
        self._choice, self.memory_budget = choice, memory_budget
        self._key: Hashable = None
        self._owned = owners_of(model)
        self._served = tuple(sorted(name for own in self._owned.values() for name in own.values()))
        self._probe(model, first, whole)

    def at(self, model: Model, first: Any) -> Engines:
        """Return the engines of the same network at other weights, with the pass over all of these inputs kept."""
        other = copy(self)
        other._probe(model, first, True)
        return other

    def _probe(self, model: Model, first: Any, whole: bool) -> None:
        seen = first if whole else take(first, slice(0, 2))
        outputs, calls, misfits = record(model, seen, self._owned)
        self.model, self._first = model, (seen, (outputs, calls, misfits)) if whole else None
        key = key_of(model, seen, (self._choice, self._served, frozenset(misfits)), outputs)
        if key is not None and key == self._key:
            return  # this includes rules found wrong after they were proven
        self._key, self._num_outputs = key, outputs.shape[1]
        self._few = copied(take(first, slice(0, 2))) if whole else seen  # engines may outlive the batch
        self._unlike: frozenset[str] = frozenset()
        self._first_differs: bool | None = None
        self._recorded_verified: set[tuple[str, ...]] = set()
        self.differentiated: set[frozenset[str]] = set()  # inputs in which J is known to have derivatives

        def prove() -> Proof:
            names = model.selection.names
            routes = find_routes(model, self._few, names, keep=False)
            # One point in addition to two, so that a dimension of length two is not mistaken for the points.
            owned = self._owned
            alone = record(model, take(self._few, slice(0, 1)), owned)[2] if owned else set()
            return Proof({names: routes}, dict.fromkeys(misfits | alone | never_ran(calls, owned), NO_LAYER))

        self._proof = proof_of(key, prove)
        self.plan = self._make_plan(calls)

    def pop_first(self) -> tuple[Tensor, list[Call]] | None:
        """Return the outputs and calls of the pass over all first points, once; None without right rules for all."""
        found, self._first = self._first, None
        if self.checked_others(self._few) or found is None:
            return None
        inputs, recording = found
        if self._first_differs is None:
            self._first_differs = bool(self._differing(inputs, recording))
        return None if self._first_differs else recording[:2]

    def record(self, inputs: Any, graph: bool = False) -> Recording:
        """Return a pass over these points as `layerwise.record` does; layers that ran differently are misfits, too.

        Without layer rules the pass has no graph.
        """
        with self.model.lock:
            if not self.plan.layers:
                with torch.no_grad():
                    return self.model(self.model.values, inputs), [], set()
            outputs, calls, misfits = record(self.model, inputs, self._owners(self.plan.others), graph)
            return outputs, calls, misfits | self._differing(inputs, (outputs, calls, misfits))

    def _differing(self, inputs: Any, recording: Recording) -> Set[str]:
        """Return the parameters whose layers are wrong in this pass; looked up by its path, or checked."""
        outputs, _, misfits = recording
        if misfits:
            return misfits
        paths, path = self._proof.paths, path_of(self.model, recording)
        if path is None or path not in paths:
            with torch.no_grad():
                alone = self.model(self.model.values, take(inputs, slice(0, 1)))
                self.model.require_points_apart(outputs.detach(), alone)
            found = wrong_layers(self.model, recording, self._in_layers, self._build_streamed(inputs))
            if not found.shown:
                return found.wrong | bypassed(self.model, recording)
            if path is None:
                return found.wrong
            paths[path] = frozenset(found.wrong)
        return paths[path]

    @property
    def _in_layers(self) -> list[str]:
        """The names of parameters with a layer rule."""
        return [name for name in self._served if name not in self.plan.others]

    def try_keeping(self) -> Plan:
        """Return the plan after trying whether and how a recorded pass may be kept; a single product needs no trial."""
        with self.model.lock:
            if not self.plan.routes.tried and self._choice != "streamed":
                names, plan = self.model.selection.names, self.plan
                self._proof.routes[names] = try_recording(self._routes_of(names), self.model, self._few, names)
                rest = None if plan.rest is None else self._routes_of(tuple(plan.others))
                self.plan = dataclasses.replace(plan, routes=self._routes_of(names), rest=rest)
            return self.plan

    def build(self, kind: EngineKind, inputs: Any, room: int, root: Root = IDENTITY) -> Engine:
        """Return an engine of this kind for a batch, within `room` bytes; a streamed one if the engine proves wrong.

        With a root L it multiplies by Lᵀ J.
        """
        if kind == "layerwise":
            return self._prove_layerwise(inputs, room, root)
        if kind == "formed":
            return KeptRows(self.model, inputs, self.forward_points, root)
        engine = self._autodiff(kind, inputs, room)
        return RootJacobian(engine, root) if root is not IDENTITY else engine

    def _autodiff(self, kind: EngineKind, inputs: Any, room: int) -> Streamed | Recorded:
        if kind == "recorded":
            return self._build_recorded(inputs, self.model.selection.names)
        return self._build_streamed(inputs, room)

    def _prove_layerwise(self, inputs: Any, room: int, root: Root) -> Engine:
        """Return the layerwise engine without the layers that prove wrong; a streamed engine if none is left.

        If layers that were proven run differently in this batch, autodiff computes products from now on, but not rows:
        these are computed for fewer points at a time, so that Kronecker factors do not depend on earlier calls.
        """
        self._prove_on_few(inputs, whole=root is IDENTITY)
        if self.plan.is_last_layer and root is IDENTITY and (found := self._build_last_layer(inputs)):
            return found
        if self.plan.layers:
            recording = self.record(inputs)
            if not recording[2]:
                return self._build_layerwise(inputs, room, root, recording)
            self._unlike = frozenset(recording[2])
            self.plan = self._make_plan()
        return self.build("streamed", inputs, room, root)

    def _prove_on_few(self, inputs: Any, whole: bool) -> None:
        """Check on some points that the rules multiply by J (`whole`), or by J and some columns, as autograd does.

        The column is random: with zero residuals a check would show nothing.
        """

        def check(few: Any, recording: Recording) -> Checked:
            names, others = self.model.selection.names, tuple(self.plan.others)
            rest = Streamed(self.model, few, others, self._routes_of(others).pushes) if others else None
            reference: Streamed | RootJacobian = Streamed(self.model, few, names, self._routes_of(names).pushes)
            root = IDENTITY
            if not whole:
                root = random_root(num_points(few), self._num_outputs, self.model.theta)
                reference = RootJacobian(reference, root)
            return mismatches(Layerwise(self.model, recording, rest, LEAST_CHUNK, root), reference)

        self._prove(inputs, WHOLE if whole else COLUMNS, check)

    def checked_others(self, inputs: Any) -> tuple[str, ...]:
        """Return the parameters without a layer rule, with those whose rows prove to be wrong on some points."""

        def check(few: Any, recording: Recording) -> Checked:
            return wrong_layers(self.model, recording, self._in_layers, self._build_streamed(few))

        with self.model.lock:
            self._prove(inputs, ROWS, check)
            return tuple(self.plan.others)

    def agree(self, inputs: Any, gather: Callable[[tuple[str, ...]], list[tuple[str, ...]]]) -> None:
        """Check layers on some points, and leave to autodiff those that this or another process rejects.

        `gather` returns the result of each process. Otherwise sums by layers would be over different layers on each.
        """
        with self.model.lock:
            self._prove_on_few(inputs, whole=True)
            while len(set(found := gather(tuple(self.plan.others)))) > 1:
                self._reject({name for others in found for name in others} - self.plan.others.keys(), WRONG)

    def _prove(self, inputs: Any, what: str, check: Callable[[Any, Recording], Checked]) -> None:
        """Leave to autodiff the layers that a check rejects, at least one a time; note what was checked.

        A layer that is right at single points stays: with several points their order or the layer's calls may change,
        and `record` finds the batches in which this happens. A pass at points without a gradient proves nothing: there
        the graph tells which layers are left out by a path.
        """
        count = min(CHECKED_POINTS, num_points(inputs))
        while self.plan.layers and not self._proof.checked & {WHOLE, what}:
            alone = [take(inputs, slice(i, i + 1)) for i in range(count)]
            wrong = self._wrong_at([take(inputs, slice(0, count))], check) and self._wrong_at(alone, check)
            if wrong is None:
                self._proof.checked.add(what)
            else:
                names, why = wrong
                # Without a wrong layer, the part by autodiff is wrong beside the layers: then it computes everything.
                self._reject(names & {*self._in_layers} or self._in_layers, why)

    def _wrong_at(
        self, parts: Sequence[Any], check: Callable[[Any, Recording], Checked]
    ) -> tuple[Set[str], str] | None:
        """Return the parameters whose layers a check rejects at some points, and why; note the paths that are right."""
        for few in parts:
            recording = record(self.model, few, self._owners(self.plan.others))
            if recording[2]:
                return recording[2], NO_LAYER
            wrong, shown = check(few, recording)
            if not shown:
                wrong |= bypassed(self.model, recording)
            if wrong:
                return wrong, WRONG
            if shown and (path := path_of(self.model, recording)) is not None:
                self._proof.paths[path] = frozenset()
        return None

    def _reject(self, names: Iterable[str], why: str) -> None:
        """Leave these parameters to autodiff from now on."""
        self._proof = forget(self._proof)
        self._proof.rejected |= dict.fromkeys(names, why)
        self.plan = self._make_plan()

    @property
    def forward_points(self) -> int:
        """The number of points in a pass that keeps no graph; 0 for all.

        On a CPU, where the results of all operations then fit into memory that is used again.
        """
        made = self._routes_of(self.model.selection.names).made_bytes
        return 0 if self.model.theta.is_cuda else max(FORWARD_POINTS, MAPPED_BYTES // max(1, made))

    def _build_streamed(self, inputs: Any, room: int = 0) -> Streamed:
        routes = self._routes_of(self.model.selection.names)
        roomy = routes.shared_bytes > 0 and 2 * routes.shared_bytes * num_points(inputs) <= room
        return Streamed(self.model, inputs, self.model.selection.names, routes.pushes, roomy, self.forward_points)

    def _build_recorded(self, inputs: Any, names: tuple[str, ...]) -> Recorded | Streamed:
        """Return the engine that keeps a recorded pass, once a batch has proved it right; otherwise a streamed one."""
        while (routes := self._routes_of(names)).recordable:
            replay = record_replay(self.model, inputs, names) if routes.replayed else None
            if routes.replayed is (replay is not None):
                engine = Recorded(self.model, inputs, names, replay)
                if names in self._recorded_verified or proves_itself(engine):
                    self._recorded_verified.add(names)
                    return engine
            # The batch shows the fault: from now on, use routes found on this batch, without the one that failed.
            found = find_routes(self.model, inputs, names)
            again = found.recordable and found.replayed is routes.replayed
            self._proof = forget(self._proof)
            self._proof.routes[names] = dataclasses.replace(found, recordable=False) if again else found
            self.plan = self._make_plan()
        return Streamed(self.model, inputs, names, routes.pushes)

    def _build_last_layer(self, inputs: Any) -> Layerwise | None:
        """Return the engine of a last layer from passes over some points at a time, of which only its inputs are kept.

        Return None if all points are in one pass, or if the layer was not the last one in some pass.
        """
        found: list[Layerwise] = []
        for part in in_pieces(inputs, self.forward_points):
            if part is inputs:
                return None
            recording = self.record(part)
            if recording[2]:
                return None
            found.append(Layerwise(self.model, recording, None, LEAST_CHUNK))
            if found[-1].features is None:
                return None
        return Layerwise.of_last_layers(found)

    def _build_layerwise(self, inputs: Any, room: int, root: Root, recording: Recording) -> Layerwise:
        others = tuple(self.plan.others)
        rest = self._build_recorded(inputs, others) if others else None
        return Layerwise(self.model, recording, rest, max(LEAST_CHUNK, room // 8), root)

    def _routes_of(self, names: tuple[str, ...]) -> Routes:
        """Return the routes for some of the selected parameters: those for all, or better ones for these alone."""
        known = self._proof.routes
        found = known.get(names) or known[self.model.selection.names]
        if found.pushes == "rows" and names not in known:
            found = known[names] = find_routes(self.model, self._few, names)
        return found

    def _owners(self, left_out: Mapping[str, str]) -> Owners:
        """Return layers and their parameters among those that are left to the layer rules."""
        if not left_out:
            return self._owned
        kept = {m: {k: n for k, n in names.items() if n not in left_out} for m, names in self._owned.items()}
        return {module: names for module, names in kept.items() if names}

    def _make_plan(self, calls: Sequence[Call] | None = None) -> Plan:
        """Return the plan for layers that made these calls at the first points; without calls, make them."""
        # Rows and factors come from the rules with every engine, so that no result depends on the engine.
        rejected, names = self._proof.rejected, self.model.selection.names
        if calls is None:
            calls = record(self.model, self._few, self._owners(rejected))[1]
        calls = [call for call in calls if not set(call.layer.names.values()) & rejected.keys()]
        served = {name for call in calls for name in call.layer.names.values()}
        others = {name: rejected.get(name, "no layer rule") for name in names if name not in served}
        layerwise = self._choice in ("auto", "layerwise")
        return Plan(
            engine=self._choice,
            layers=tuple(call.layer for call in calls),
            others=others,
            num_outputs=self._num_outputs,
            itemsize=self.model.theta.element_size(),
            size=self.model.selection.size,
            routes=self._routes_of(names),
            rest=self._routes_of(tuple(others)) if calls and others and layerwise else None,
            memory_budget=self.memory_budget,
            rates=rates_of(self.model.theta.device),
            half_base=self.model.eps > torch.finfo(self.model.theta.dtype).eps,
            unlike=self._unlike,
        )
