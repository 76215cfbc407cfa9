"""The engines of one model: probed once, planned once, built for any batch, and checked before use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from copy import copy
from typing import Any, Protocol

import torch
from torch import Tensor

from curvops.ambient import SMALL_BYTES
from curvops.network.data.inputs import copy as copied
from curvops.network.data.inputs import first_of, in_pieces, num_points
from curvops.network.data.objects import WholeBatch
from curvops.network.engines.autodiff import KeptRows, Recorded, Streamed, record_replay
from curvops.network.engines.layer_calls import Call, Owners, Recording, never_ran, owners_of, record
from curvops.network.engines.layerwise import Layerwise
from curvops.network.engines.plan import CPU, GPU, EngineChoice, EngineKind, Plan, Routes
from curvops.network.engines.rows_of_points import SharedLayers, find_shared_layers
from curvops.network.engines.self_check import (
    bypassed,
    find_routes,
    mismatches,
    path_of,
    proves_itself,
    random_root,
    try_recording,
)
from curvops.network.likelihoods.output_fisher import IDENTITY, Root, RootJacobian
from curvops.network.model.model import Model
from curvops.network.model.parameters import PIECE_BYTES, Blocks

# On a CPU passes without a graph are over at least so many points at a time, for which weights are read only once.
FORWARD_POINTS = 32
NO_LAYER = "its layer does not run as a layer"
WRONG = "the self-check failed"


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

    The probe determines the number of outputs, which derivatives exist and are right (`self_check.py`), which layers
    run as layers, and how many bytes an engine keeps. The layer rules are checked on some points of the first batch,
    and on all points of a later one whose recorded pass takes another path. With `whole`, the pass over all of `first`
    is kept for a caller that needs its rows (`pop_first`).
    """

    plan: Plan

    def __init__(self, model: Model, first: Any, choice: EngineChoice, memory_budget: int, whole: bool = False) -> None:
        self._choice, self.memory_budget = choice, memory_budget
        self._owned = owners_of(model)
        self.ragged: frozenset[str] = frozenset()  # parameters of layers whose rows belong to points unevenly
        self._shared: SharedLayers | None = None  # layers called once for all points; None if it was not asked
        self._run: Any = None
        self._probe(model, first, whole)

    def at(self, model: Model, first: Any) -> Engines:
        """Return the engines of the same network at other weights, with the pass over all of these inputs kept."""
        other = copy(self)
        other._routes = dict(self._routes)  # each changes its own routes together with its plan
        other._probe(model, first, True)
        return other

    def _probe(self, model: Model, first: Any, whole: bool) -> None:
        seen = first if whole else first_of(first)
        recording = self._record(model, seen, self._owned)
        outputs, calls, misfits = recording
        self.model, self._first = model, (seen, recording) if whole else None
        path = path_of(model, recording) if whole else None
        run = None if path is None else (path, outputs.shape[1], [call.layer.output[1:] for call in calls], misfits)
        if run is not None and run == self._run:
            return  # the network runs as it did at the weights before: what was found then holds
        self._run, self._num_outputs = run, outputs.shape[1]
        self._few = copied(first_of(first)) if whole else seen  # engines may outlive the batch
        self._unlike: frozenset[str] = frozenset()
        self._first_differs: bool | None = None
        self._recorded_verified: set[tuple[str, ...]] = set()
        self.differentiated: set[frozenset[str]] = set()  # inputs in which J is known to have derivatives
        self._checked: set[bool] = set()  # whether products with J (True), or with rows of Lᵀ J, were checked
        self._paths: dict[int, frozenset[str]] = {}  # the parameters with wrong layers, by the path of a checked pass
        names = model.selection.names
        self._routes = {names: find_routes(model, self._few, names)}
        # One point in addition to two: a dimension of length two is not mistaken for the points, nor one squeezed.
        of_one = first_of(self._few, 1)
        _, of_alone, alone = (
            self._record(model, of_one, self._owned, ragged=()) if self._owned else (outputs, [], set())
        )
        if ragged := {name for call in (*calls, *of_alone) if call.rows for name in call.layer.names.values()}:
            self.ragged |= ragged
            _, calls, misfits = self._record(model, self._few, self._owned)
        if self._shared is None and (left := misfits | alone):
            layers = [module for module, names in self._owned.items() if not left.isdisjoint(names.values())]
            self._shared = find_shared_layers(model, self._few, layers)
            if self._shared:
                self.ragged, self._run = frozenset(), None
                return self._probe(model, first, whole)
        self._rejected = dict.fromkeys(misfits | alone | never_ran(calls, self._owned), NO_LAYER)
        self._make_plan(calls)

    def pop_first(self) -> tuple[Tensor, list[Call]] | None:
        """Return the outputs and calls of the pass over all first points, once; None without right rules for all."""
        first, self._first = self._first, None
        if self.checked_others(self._few) or first is None:
            return None
        inputs, recording = first
        if self._first_differs is None:
            self._first_differs = bool(self._wrong_in(inputs, recording))
        return None if self._first_differs else recording[:2]

    def record(self, inputs: Any, graph: bool = False) -> Recording:
        """Return a pass over these points as `layerwise.record` does; layers that ran differently are misfits, too.

        Without layer rules the pass has no graph.
        """
        with self.model.lock:
            if not self.plan.layers:
                with torch.no_grad():
                    return self.model(self.model.values, inputs), [], set()
            (outputs, calls, misfits), wrong = self._record_checked(inputs, graph)
            return outputs, calls, misfits | wrong

    def _record(
        self, model: Model, inputs: Any, owners: Owners, graph: bool = False, ragged: Collection[str] | None = None
    ) -> Recording:
        """Return a pass over these points, unchecked; by default with the ragged rows known so far."""
        return record(model, inputs, owners, graph, self.ragged if ragged is None else ragged, self._shared)

    def _record_checked(
        self, inputs: Any, graph: bool = False, whole: bool | None = None
    ) -> tuple[Recording, Set[str]]:
        """Return a pass and the parameters whose layers are wrong in it, as `_wrong_in` finds them.

        The rows of a layer may be as many as the points by chance, with two of one point and none of another: a layer
        that is wrong with a row for each point in their order may be right with the point of each row.
        """
        recording = self._record(self.model, inputs, self._served, graph)
        wrong = self._wrong_in(inputs, recording, whole)
        if not recording[2] and not wrong <= self.ragged:
            again = self._record(self.model, inputs, self._served, graph, self.ragged | wrong)
            if not self._wrong_in(inputs, again, whole):
                recording, wrong = again, frozenset()
        self.ragged |= {name for call in recording[1] if call.rows for name in call.layer.names.values()}
        return recording, wrong

    def _wrong_in(self, inputs: Any, recording: Recording, whole: bool | None = None) -> Set[str]:
        """Return the parameters whose layers are wrong in this pass: looked up by its path, or checked by rows.

        With `whole`, True or False, they are checked anew, by products with J or by rows.
        """
        outputs, _, misfits = recording
        if misfits:
            return misfits
        path = path_of(self.model, recording)
        if whole is None:
            if path is not None and path in self._paths:
                return self._paths[path]
            with torch.no_grad():
                alone = self.model(self.model.values, first_of(inputs, 1))
                self.model.require_points_apart(outputs.detach(), alone)
        wrong, shown = self._check(inputs, recording, bool(whole))
        if not shown:
            return wrong | bypassed(self.model, recording, self._in_layers)
        if path is not None and (whole is None or not wrong):
            self._paths[path] = frozenset(wrong)
        return wrong

    def _check(self, inputs: Any, recording: Recording, whole: bool) -> tuple[set[str], bool]:
        """Find the layers that are wrong in products with J (`whole`), or with one random column per point.

        The column is random, since a check with zero residuals would show nothing.
        """
        others, reference = tuple(self.plan.others), self._build_streamed(inputs)
        reference.record()  # a root needs the outputs, too
        rest = Streamed(self.model, inputs, others) if others else None
        root = IDENTITY if whole else random_root(num_points(inputs), self._num_outputs, self.model.theta)
        engine = Layerwise(self.model, recording, rest, SMALL_BYTES, root)
        pull = reference.pull if whole else RootJacobian(reference, root).pull
        reached = {name for jacobian in engine.parts for name in jacobian.layer.names.values()}
        wrong, shown = mismatches(engine, pull, reached)
        unreached = {*self._in_layers} - reached  # such as the branch of another output
        return wrong | (bypassed(self.model, recording, unreached) if unreached else set()), shown

    @property
    def _in_layers(self) -> list[str]:
        """The names of parameters with a layer rule."""
        served = (name for names in self._owned.values() for name in names.values())
        return sorted({name for name in served if name not in self.plan.others})

    def try_keeping(self) -> Plan:
        """Return the plan after trying whether and how a recorded pass may be kept; a single product needs no trial."""
        with self.model.lock:
            if not self.plan.routes.tried and self._choice != "streamed":
                names, plan = self.model.selection.names, self.plan
                self._routes[names] = try_recording(self._routes_of(names), self.model, self._few, names)
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
            return KeptRows(self.model, inputs, self.forward_points, self.plan.together, root)
        names = self.model.selection.names
        engine = self._build_recorded(inputs, names) if kind == "recorded" else self._build_streamed(inputs)
        return RootJacobian(engine, root) if root is not IDENTITY else engine

    def _prove_layerwise(self, inputs: Any, room: int, root: Root) -> Engine:
        """Return the layerwise engine without the layers that prove wrong; a streamed engine if none is left.

        If layers that were proven run differently in this batch, autodiff computes products from now on, but not rows:
        these are computed for fewer points at a time, so that Kronecker factors do not depend on earlier calls.
        """
        self.checked_others(inputs, whole=root is IDENTITY)
        if self.plan.layers:
            alone = self.plan.is_last_layer and root is IDENTITY
            recording = self._record_last_layer(inputs) if alone else self.record(inputs)
            if not recording[2]:
                others = tuple(self.plan.others)
                rest = self._build_recorded(inputs, others) if others else None
                return Layerwise(self.model, recording, rest, max(SMALL_BYTES, room // 8), root)
            self._unlike = frozenset(recording[2])
            self._make_plan()
        return self.build("streamed", inputs, room, root)

    def checked_others(self, inputs: Any, whole: bool = False) -> tuple[str, ...]:
        """Return the parameters that are left to autodiff, after checking the others' layers on some points, once.

        Products with J (`whole`) or rows are checked; layers that are wrong are left to autodiff, at least one a time.
        A layer that is right at single points stays: with several points their order or the layer's calls may change,
        and `record` finds the batches in which this happens. A pass at points without a gradient proves nothing: there
        the graph tells which layers are left out by a path.
        """
        with self.model.lock:
            while self.plan.layers and not self._checked & {True, whole}:
                few = first_of(inputs, 8)
                wrong = self._wrong_at([few], whole) and self._wrong_at([*in_pieces(few, 1)], whole)
                if wrong is None:
                    self._checked.add(whole)
                else:
                    names, why = wrong
                    # Without a wrong layer, the part by autodiff is wrong beside the layers: it computes everything.
                    self._reject(names & {*self._in_layers} or self._in_layers, why)
            return tuple(self.plan.others)

    def agree(self, inputs: Any, gather: Callable[[tuple[str, ...]], list[tuple[str, ...]]]) -> None:
        """Check layers on some points, and leave to autodiff those that this or another process rejects.

        `gather` returns the result of each process. Otherwise sums by layers would be over different layers on each.
        """
        with self.model.lock:
            self.checked_others(inputs, whole=True)
            while len(set(of_ranks := gather(tuple(self.plan.others)))) > 1:
                self._reject({name for others in of_ranks for name in others} - self.plan.others.keys(), WRONG)

    def _wrong_at(self, parts: Sequence[Any], whole: bool) -> tuple[Set[str], str] | None:
        """Return the parameters whose layers are wrong at some points, and why; note the paths that are right."""
        for few in parts:
            ragged = self.ragged
            recording, wrong = self._record_checked(few, whole=whole)
            if wrong:
                return wrong, NO_LAYER if recording[2] else WRONG
            if ragged != self.ragged:
                self._make_plan()
        return None

    def _reject(self, names: Iterable[str], why: str) -> None:
        """Leave these parameters to autodiff from now on."""
        self._rejected = self._rejected | dict.fromkeys(names, why)
        self._make_plan()

    @property
    def forward_points(self) -> int:
        """The number of points in a pass that keeps no graph; 0 for all.

        On a CPU, where the results of all operations then fit into memory that is used again.
        """
        made = self.plan.routes.made_bytes
        return 0 if self.model.theta.is_cuda else max(FORWARD_POINTS, PIECE_BYTES // max(1, made))

    def _build_streamed(self, inputs: Any) -> Streamed:
        return Streamed(self.model, inputs, self.model.selection.names, self.plan.routes.pushes, self.forward_points)

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
            anew = try_recording(find_routes(self.model, inputs, names), self.model, inputs, names)
            again = anew.recordable and anew.replayed is routes.replayed
            self._routes[names] = dataclasses.replace(anew, recordable=False) if again else anew
            self._make_plan()
        return Streamed(self.model, inputs, names, routes.pushes)

    def _record_last_layer(self, inputs: Any) -> Recording:
        """Return a pass over all points from passes over some at a time, of which only the last layer's inputs stay."""
        passes = [self.record(subset) for subset in in_pieces(inputs, self.forward_points)]
        if len(passes) == 1:
            return passes[0]
        if any(misfits or len(calls) != 1 or not calls[0].layer.is_last for _, calls, misfits in passes):
            return self.record(inputs)  # the layer is not the last one in some pass
        outputs, call = torch.cat([outputs.detach() for outputs, _, _ in passes]), passes[0][1][0]
        shape = torch.Size((len(outputs), *call.shape[1:]))
        layer_input = torch.cat([calls[0].layer_input for _, calls, _ in passes])
        layer = dataclasses.replace(call.layer, output=shape)
        return outputs, [dataclasses.replace(call, layer=layer, layer_input=layer_input, shape=shape)], set()

    def _routes_of(self, names: tuple[str, ...]) -> Routes:
        """Return the routes for some of the selected parameters: those for all, or better ones for these alone."""
        routes = self._routes.get(names) or self._routes[self.model.selection.names]
        if routes.pushes == "rows" and names not in self._routes:
            routes = self._routes[names] = find_routes(self.model, self._few, names)
        return routes

    def _owners(self, left_out: Mapping[str, str]) -> Owners:
        """Return layers and their parameters among those that are left to the layer rules."""
        if not left_out:
            return self._owned
        left = {m: {k: n for k, n in names.items() if n not in left_out} for m, names in self._owned.items()}
        return {module: names for module, names in left.items() if names}

    def _make_plan(self, calls: Sequence[Call] | None = None) -> None:
        """Make the plan for layers that made these calls at the first points; without calls, make them."""
        # Rows and factors come from the rules with every engine, so that no result depends on the engine.
        rejected, names = self._rejected, self.model.selection.names
        if calls is None:
            calls = self._record(self.model, self._few, self._owners(rejected))[1]
        layers = [call.layer for call in calls if rejected.keys().isdisjoint(call.layer.names.values())]
        served = {name for layer in layers for name in layer.names.values()}
        others = {name: rejected.get(name, "no layer rule") for name in names if name not in served}
        layerwise = self._choice in ("auto", "layerwise")
        self._served = self._owners(others)
        self.plan = Plan(
            engine=self._choice,
            layers=tuple(layers),
            others=others,
            num_outputs=self._num_outputs,
            itemsize=self.model.theta.element_size(),
            size=self.model.selection.size,
            routes=self._routes_of(names),
            rest=self._routes_of(tuple(others)) if layers and others and layerwise else None,
            memory_budget=self.memory_budget,
            rates=CPU if self.model.theta.device.type == "cpu" else GPU,
            single=not isinstance(self._few, WholeBatch),
            half_base=self.model.eps > torch.finfo(self.model.theta.dtype).eps,
            unlike=self._unlike,
        )
