"""All walks over the data: streaming, the cache of linearisations, and its memory budget."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_map

from curvops.network.data.batches import Batch
from curvops.network.data.inputs import copy, move, num_points, take
from curvops.network.data.point_normals import PointNormals
from curvops.network.data.shard import Shard
from curvops.network.engines.autodiff import Streamed
from curvops.network.engines.engine import LEAST_CHUNK, Engine, Engines
from curvops.network.engines.layerwise import COLUMN_BYTES, Features, Layerwise, Recording, Weigh
from curvops.network.engines.plan import SOLVER, EngineChoice, EngineKind, Plan
from curvops.network.likelihoods.output_fisher import IDENTITY, OutputFisher, Root, RootJacobian, Unit
from curvops.network.model.model import Model
from curvops.network.walks.budget import Budget
from curvops.network.walks.input_graphs import InputGraph
from curvops.network.walks.layer_roots import Group, JacobianRows, Score, each_group, groups_of
from curvops.progress import Progress, Steps, progress_bar

# On a CPU larger pieces are slower, since memory for them is allocated anew, page by page, for each layer.
MOST_CHUNK = 2**27
FEW_POINTS, SHARE = 16, 16
"""On a CPU pieces of more points than these take a share of a chunk, which is as fast: their activations and rows, and
what is made of them, are then a few blocks of memory that are used again."""
MANY = 10_000
"""The number of earlier products next to which those of a solve do not change an engine's share of the cost."""
CACHES = ("_kept", "_asked", "_complete", "_recorded", "_outputs")
NO_LABELS = Batch((), torch.empty(0))
"""The labels of a walk over rows of J, which needs none."""
MOST_RECORDED = 2**20
"""The bytes of a graph that may be kept until rows are used, or of outputs that a walk over rows finds."""


class BatchMap:
    """J of one batch on flat vectors: push (D, K) -> (K, n, C) and pull (K, n, C) -> (D, K), both differentiable."""

    def __init__(self, engine: Engine, model: Model, points: slice) -> None:
        self._engine, self._selection, self._lock = engine, model.selection, model.lock
        self.points = points
        """The positions of the batch's points among all points of the walk."""

    @property
    def outputs(self) -> Float[Tensor, "n C"]:
        """The outputs f(θ, inputs)."""
        with self._lock:
            return self._engine.outputs

    def pull_of(self, cotangent: Callable[[Tensor], Tensor]) -> Float[Tensor, "D 1"]:
        """Return Jᵀ u for a function u of the outputs, which one pass computes with their graph."""
        with self._lock:
            if isinstance(self._engine, Streamed):
                self._engine.record()
        return self.pull(cotangent(self.outputs)[None])

    def push(self, vectors: Float[Tensor, "D K"]) -> Float[Tensor, "K n C"]:
        """Return J V."""
        return linear(vectors, self._push, self._pull)

    def pull(self, cotangents: Float[Tensor, "K n C"]) -> Float[Tensor, "D K"]:
        """Return Jᵀ U."""
        return linear(cotangents, self._pull, self._push)

    def sandwich(self, vectors: Float[Tensor, "D K"], weigh: Weigh) -> Float[Tensor, "D K"]:
        """Return Jᵀ H J V, where `weigh` multiplies the rows of some points by H."""
        if torch.is_grad_enabled() or not isinstance(self._engine, Layerwise):
            return self.pull(weigh(self.push(vectors), slice(None)))
        with self._lock:
            return self._selection.join(self._engine.sandwich(self._selection.split(vectors), weigh))

    def _push(self, vectors: Tensor) -> Tensor:
        with self._lock:
            return self._engine.push(self._selection.split(vectors))

    def _pull(self, cotangents: Tensor) -> Tensor:
        with self._lock:
            return self._selection.join(self._engine.pull(cotangents))


def _see(seen: list[Tensor], outputs: Tensor, _: Batch) -> None:
    """Keep outputs if all that are kept are small together."""
    if sum(each.nbytes for each in (*seen, outputs)) <= MOST_RECORDED:
        seen.append(outputs)


class Passes(JacobianRows):
    """Walks over batches with an engine for each, built and kept as the plan's cost rule and the budget allow.

    `source` is a re-iterable of (inputs, label); labels are passed through (targets, or None). `engines` may be
    shared by walks over different inputs of one model, and `memory_budget`, bytes or a `Budget`, by any walks.
    `points`, if known, determine what keeping all engines would take; `few` are inputs to probe the model on if the
    source has none. If the source is a `shard` of the data, sums and rows are those of all ranks. A walk `with_root`
    multiplies by Lᵀ J. Thread-safe: engines are built and run under the model's lock.
    """

    def __init__(
        self,
        model: Model,
        source: Iterable[tuple[Any, Any]],
        engine: EngineChoice = "auto",
        memory_budget: int | Budget = 2**30,
        engines: Engines | None = None,
        points: int = 0,
        progress: Progress = None,
        few: Any = None,
        shard: Shard | None = None,
    ) -> None:
        self.model, self._source, self._choice, self._points = model, source, engine, points
        self.shard = shard
        self.memory = memory_budget if isinstance(memory_budget, Budget) else Budget(memory_budget)
        self.progress = progress
        self._engines: Engines | None = None
        self._few = few
        self._fisher: OutputFisher | None = None
        self._whole: Passes | None = None  # the walk whose engines this one uses, if it has a root
        self._forget()
        self._engines = engines  # set after registering: type checks read `wanted_bytes`, which probes

    def _forget(self) -> None:
        self._kept: dict[int, tuple[Any, Engine]] = {}
        self._recorded: Recording | None = None
        self._outputs: Tensor | None = None
        self._gathered: Passes | None = None
        self._asked: Counter[int] = Counter()
        self._asked_when_chosen = 0
        self._complete = False
        self.memory.register(self)

    def gathered(self) -> Passes:
        """Return a walk over the inputs of all ranks on this one alone; this walk itself if it has no shard.

        This is for function space, where points are few. It keeps a copy of the inputs as long as it exists.
        """
        if self.shard is None:
            return self
        with self.model.lock:
            if self._gathered is None:
                inputs, step = self.shard.gathered().inputs, self.shard.largest
                parts = [(take(inputs, slice(i, i + step)), None) for i in range(0, num_points(inputs), step)]
                self._gathered = self._over(parts)
            return self._gathered

    @property
    def num_own(self) -> int:
        """The number of this rank's points in a sharded walk."""
        assert self.shard is not None
        return self.shard.num_own

    @property
    def first_own(self) -> int:
        """The position of this rank's first point among those of all ranks."""
        return 0 if self.shard is None else self.shard.start

    def in_turn(self) -> Iterator[Passes | None]:
        """Yield a walk over each rank's points in turn, for ranks that have points; None for this rank's own."""
        assert self.shard is not None
        for inputs in self.shard.in_turn():
            yield None if inputs is None else self._over([(inputs, None)])

    def apart(self) -> Passes:
        """Return a walk over this rank's own inputs, without the other ranks."""
        return self._over(self._source)

    def _over(self, source: Iterable[tuple[Any, Any]]) -> Passes:
        """Return a walk over other batches, with the same kinds of engines."""
        return Passes(self.model, source, self._choice, self.memory, self.engines)

    def input_graph(self) -> InputGraph:
        """Return the inputs of all batches as one, none of which requires a gradient."""
        inputs = tree_map(lambda *parts: torch.cat(parts), *(inputs for inputs, _ in self.gathered()._source))
        return InputGraph(self.engines, inputs)

    @property
    def memory_budget(self) -> int:
        """The bytes for engines and vectors together."""
        return self.memory.budget

    @property
    def kept_bytes(self) -> int:
        """The bytes of the engines that are kept now."""
        return sum([engine.nbytes for _, engine in list(self._kept.values())])

    @property
    def wanted_bytes(self) -> int:
        """The bytes that engines for all points would take, of the kind that takes most."""
        plan = None if self._engines is None else self._engines.try_keeping()
        return 0 if plan is None else self._points * plan.most_bytes

    def shrink(self, most: int) -> None:
        """Free engines of the last batches until at most this many bytes are kept."""
        with self.model.lock:
            while not self._is_alike and self._kept and self.kept_bytes > most:
                self._kept.popitem()
                self._complete = False

    def expect_many(self) -> None:
        """Choose engines as after `MANY` products, whatever came before."""
        with self.model.lock:
            self._asked = Counter({SOLVER: MANY})

    def with_root(self, fisher: OutputFisher) -> Passes:
        """Return the walk that multiplies by Lᵀ J, with H = L Lᵀ, instead of J; its labels must be batches.

        It keeps its own engines, within what this walk and all others leave of the memory budget that they share.
        """
        walk = Passes(self.model, self._source, self._choice, self.memory, progress=self.progress, shard=self.shard)
        walk._fisher, walk._whole = fisher, self
        return walk

    @property
    def engines(self) -> Engines:
        """The builder of the engines, probed on the first batch unless it was given."""
        if self._whole is not None:
            return self._whole.engines
        with self.model.lock:
            if self._engines is None:
                few = next(iter(self._source))[0] if self._few is None else self._few
                self._engines = Engines(self.model, few, self._choice, self.memory_budget)
            return self._engines

    @property
    def plan(self) -> Plan:
        """The plan, with the engines now in use for the batches."""
        with self.model.lock:
            self.engines.try_keeping()
            kinds = [engine.kind for _, engine in self._kept.values()]
            return dataclasses.replace(self._rule, in_use={kind: kinds.count(kind) for kind in set(kinds)})

    @property
    def _rule(self) -> Plan:
        plan = self.engines.plan
        return plan if self._fisher is None else plan.for_rows(self._fisher.num_columns(plan.num_outputs))

    def each(self, columns: int) -> Iterator[tuple[Any, BatchMap]]:
        """Yield (label, J of the batch) for every batch, for a product with `columns` vectors (0: for outputs only).

        A walk over cached batches does not read the data again.
        """
        self.model.refuse_modes()
        with self.model.lock:
            asked = Counter(self._asked)
            self._asked[max(1, columns)] += columns
            engines = self._chosen_engines(asked, columns)
        count, start = 0, 0 if self.shard is None else self.shard.start
        if engines is not None:
            for label, engine in engines:
                stop = start + len(engine.outputs)
                yield label, BatchMap(engine, self.model, slice(start, stop))
                start = stop
            return
        try:
            with self._steps("pass over the data") as steps:
                for index, (inputs, label) in enumerate(self._source):
                    with self.model.lock:
                        engine = self._engine_for(index, inputs, label, asked, columns)
                    stop = start + num_points(inputs)
                    yield label, BatchMap(engine, self.model, slice(start, stop))
                    steps.advance(stop - start, engine.kind)
                    count, start = index + 1, stop
        except Exception:  # the data changed, so the kept engines are invalid
            with self.model.lock:
                self._kept.clear()
                self._complete = False
            raise
        with self.model.lock:
            self._complete = len(self._kept) == count

    def _each(self, columns: int, root: OutputFisher | None) -> Iterator[tuple[Any, Any]]:
        """Yield (label, J of the batch, or Lᵀ J with the root L of H = L Lᵀ) for every batch."""
        for label, J in self.each(columns):
            yield label, J if root is None else RootJacobian(J, Root(root, label))

    def total(
        self,
        term: Callable[[Any, Any], Tensor],
        columns: int,
        root: OutputFisher | None = None,
        own: bool = False,
    ) -> Tensor:
        """Return Σ over batches of `term(label, J of the batch)`, for `columns` vectors; with a root Lᵀ J.

        With `own` the result is this rank's part.
        """
        return self.add_up((term(label, J) for label, J in self._each(columns, root)), own)

    def curvature_product(
        self, block: Float[Tensor, "D K"], fisher: OutputFisher, own: bool = False
    ) -> Float[Tensor, "D K"]:
        """Return Σ over batches of Jᵀ H J V; `own` as in `total`."""
        block = self.replicated(block)

        def term(batch: Any, J: BatchMap) -> Tensor:
            return J.sandwich(block, lambda u, points: fisher.product(J.outputs[points], u, batch.labels(points)))

        return self.total(term, block.shape[1], own=own)

    def rows(
        self,
        term: Callable[[Any, Any], Float[Tensor, "K n R"]],
        columns: int,
        root: OutputFisher | None = None,
    ) -> Float[Tensor, "NR K"]:
        """Return the terms of all points, with those of each point together."""
        parts = [term(label, J).flatten(1) for label, J in self._each(columns, root)]
        return self.line_up([self.model.theta.new_zeros(max(1, columns), 0), *parts], 1).mT

    def pull(
        self,
        block: Float[Tensor, "NR K"],
        rows: int,
        term: Callable[[Any, Any, Tensor], Tensor] = lambda label, J, z: J.pull(z),
        root: OutputFisher | None = None,
    ) -> Float[Tensor, "D K"]:
        """Return Σ over batches of `term(label, J, z)`, Jᵀ z, of a block with R rows a point; z (K, n, R) per batch."""
        block = self.replicated(block)
        z = block.mT.unflatten(1, (-1, rows))
        return self.total(lambda label, J: term(label, J, z[:, J.points]), block.shape[1], root)

    def push_own(self, block: Float[Tensor, "D K"]) -> Float[Tensor, "NC K"]:
        """Return J V for the points of this rank alone."""
        if not self.num_own:
            return block.new_zeros(block.shape[1], 0).mT
        return torch.cat([J.push(block).flatten(1) for _, J in self.each(block.shape[1])], 1).mT

    def pull_own(self, block: Float[Tensor, "NC K"]) -> Float[Tensor, "D K"]:
        """Return Jᵀ U over the points of this rank alone: its part of the sum over ranks."""
        total = None if self.num_own else block.new_zeros(block.shape[1], len(self.model.theta)).mT
        z = block.mT.unflatten(1, (-1, self.engines.plan.num_outputs))
        for _, J in self.each(block.shape[1]) if self.num_own else ():
            points = slice(J.points.start - self.first_own, J.points.stop - self.first_own)
            total = accumulate(total, J.pull(z[:, points]))
        assert total is not None
        return total

    def draw(self, draws: range, columns: int, seed: int, root: OutputFisher | None = None) -> Float[Tensor, "D k"]:
        """Draw samples of Σ over batches of Jᵀ z, z standard normal with `columns` per point; with a root Jᵀ L z."""
        like = self.model.theta
        normals = PointNormals(seed)
        return self.total(lambda _, J: J.pull(normals.block(draws, J.points, columns, like)), len(draws), root)

    def add_up(self, parts: Iterable[Tensor], own: bool = False) -> Tensor:
        """Add up the parts of all batches, and of all ranks (unless it is their `own` part); every data sum ends here.

        It adds in place if no gradient is recorded: the first part becomes the sum.
        """
        total: Tensor | None = None
        for part in parts:
            total = accumulate(total, part)
            del part  # before the next one is made
        assert total is not None  # linearize rejects empty data
        if self.shard is None:
            return total
        return self.shard.own_part(total) if own else self.shard.add_up(total)

    def line_up(self, parts: list[Tensor], dim: int = 0) -> Tensor:
        """Concatenate the parts of all batches in the order of the points; every concatenation over data ends here."""
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        return whole if self.shard is None else self.shard.line_up(whole, dim)

    def replicated(self, tensor: Tensor) -> Tensor:
        """Return a tensor that all ranks have; its gradient is the sum of the gradients from each rank."""
        return tensor if self.shard is None else self.shard.ranks.replicate(tensor)

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield (inputs, label) of every batch, for uses that need no J."""
        return iter(self._source)

    def root_pieces(
        self, fisher: OutputFisher, chunk: int, apart: bool = False, first: int = 0, score: Score | None = None
    ) -> Iterator[tuple[int, Iterator[Group]]]:
        """Yield rows of a square root of the curvature by layer: one forward pass, and one backward pass per column.

        They come some points at a time, as (number of points in and before the piece, rows), with all columns, so that
        anything that depends only on a point is computed once. `apart` is for sums over columns: these may come in
        several groups, for more points at a time, and a last layer may come with H itself (`Group.hessian`). Pieces
        take about `chunk` bytes (their use takes several times that); those that end at or before point `first` are
        left out. `score` is called with the outputs of each piece and its batch.
        """
        total, columns = 0, fisher.num_columns(self.engines.plan.num_outputs)
        with self._steps("rows of the curvature's root", columns) as steps:
            for inputs, batch in self._source:
                others = self.engines.checked_others(inputs)
                held, most = columns, chunk
                if apart and not others and not self.model.theta.is_cuda:
                    held, most = 1, min(chunk, COLUMN_BYTES)
                for points, part in self._pieces(inputs, held, chunk):
                    total += points.stop - points.start
                    if total > first:
                        label = batch.labels(points)
                        groups = each_group(
                            self.engines, label, part, fisher, others, most, score, advance=steps.advance, sums=apart
                        )
                        yield total, groups
                    else:
                        steps.advance((points.stop - points.start) * columns)

    def root_blocks(self, fisher: OutputFisher, names: Container[str]) -> Iterator[list[Group]]:
        """Yield the rows of `root_pieces`, some points with all columns; without layer rules, only for `names`."""
        columns = fisher.num_columns(self.engines.plan.num_outputs)
        with self._steps("rows of the curvature's root", columns) as steps:
            for inputs, batch in self._source:
                wanted = [n for n in self.engines.checked_others(inputs) if n in names]
                for points, part in self._pieces(inputs, columns, self.chunk_bytes):
                    label = batch.labels(points)
                    each = each_group(self.engines, label, part, fisher, wanted, sys.maxsize, advance=steps.advance)
                    yield list(each)

    def jacobian_rows(
        self, least: int = 0, names: Container[str] | None = None
    ) -> Iterator[tuple[int, int, list[Group]]]:
        """Yield the rows of J by layer, some points at a time: (first row, how many, groups), all columns of each.

        Pieces whose first row is below `least`, and layers that have none of the `names`, are left out. A walk over all
        rows keeps the outputs, if they are small, for `recorded_outputs`.
        """
        total, last, seen = 0, self.features(), list[Tensor]()
        with self._steps("rows of the Jacobian") as steps:
            for index, (inputs, _) in enumerate(self._source):
                columns, points = self.engines.plan.num_outputs, num_points(inputs)
                pieces = self._groups(inputs, names, seen) if last is None else self._of_last(last[index])
                for start, count, groups in pieces:
                    if total + start * columns >= least:
                        yield total + start * columns, count * columns, list(groups())
                    steps.advance(count)
                total += points * columns
        whole = self.shard is None and sum(map(len, seen)) * self.engines.plan.num_outputs == total
        if seen and whole:
            with self.model.lock:
                self._outputs = torch.cat(seen)

    def _groups(
        self, inputs: Any, names: Container[str] | None, seen: list[Tensor]
    ) -> Iterator[tuple[int, int, Callable[[], Iterable[Group]]]]:
        """Yield (first point, how many, a function that computes their rows and appends their outputs to `seen`)."""
        others = [name for name in self.engines.checked_others(inputs) if names is None or name in names]
        for points, part in self._pieces(inputs, self.engines.plan.num_outputs, self.chunk_bytes, of_others=True):
            count = points.stop - points.start
            recorded = self._take_recorded(count)
            asked = self.engines, NO_LABELS, part, Unit(), others, sys.maxsize
            rows = partial(each_group, *asked, partial(_see, seen), recorded, names=names)
            yield points.start, count, rows

    def _of_last(self, features: Features) -> Iterator[tuple[int, int, Callable[[], Iterable[Group]]]]:
        """Yield (first point, how many, a function that computes their rows) for a last layer."""
        step = max(1, self.chunk_bytes // max(1, self.engines.plan.sensitivity_bytes * features.outputs))
        layout = self.model.layout
        outputs = features.outputs_each if layout is None else layout.num_outputs
        for start in range(0, len(features.kept), step):
            part = features.at(slice(start, start + step))
            yield start, len(part.kept), partial(groups_of, part, outputs)

    def recorded_outputs(self) -> Tensor | None:
        """Return the outputs if a pass for the rows of J has them, or makes them, or None.

        `jacobian_rows` has them after a walk over all rows; this hands them over once. Otherwise, if points are few, a
        pass is made whose graph `jacobian_rows` uses next. Few means that one batch in memory has them all, and that
        its graph takes at most `MOST_RECORDED` bytes. Every parameter needs a layer rule.
        """
        with self.model.lock:
            if self._outputs is not None:
                found, self._outputs = self._outputs, None
                return found
            plan, parts = self.engines.plan, self._source if isinstance(self._source, list) else []
            if len(parts) != 1 or plan.is_last_layer or self._fisher is not None:
                return None
            inputs = parts[0][0]
            if num_points(inputs) * plan.routes.saved_bytes > MOST_RECORDED or self.engines.checked_others(inputs):
                return None
            recorded = self.engines.record(inputs)
            self._recorded = None if recorded[2] else recorded
            return recorded[0].detach()

    def _take_recorded(self, count: int) -> Recording | None:
        """Return the pass that `recorded_outputs` made, once, if it has this number of points."""
        with self.model.lock:
            found, self._recorded = self._recorded, None
        return found if found is not None and len(found[0]) == count else None

    def features(self) -> list[Features] | None:
        """Return the last layer's inputs by batch, if only that layer is selected and the budget has room for them.

        Costs one forward pass, or none after an earlier walk.
        """
        with self.model.lock:
            plan = self.engines.plan
            if self._fisher is not None or not plan.is_last_layer or "layerwise" not in plan.candidates():
                return None
            for _ in self.each(0):  # a walk keeps the inputs
                pass
            kept = [self._kept[i][1] for i in range(len(self._kept))] if self._complete else []
            found = [engine.features for engine in kept if isinstance(engine, Layerwise)]
            whole = [features for features in found if features is not None]
            return whole if whole and len(whole) == len(kept) else None

    def _steps(self, what: str, rows: int | None = None) -> AbstractContextManager[Steps]:
        """Return steps that count points, or the number of rows per point times points."""
        self.model.refuse_modes()
        return progress_bar(what, self._points * (rows or 1) or None, self.progress, " rows" if rows else " points")

    def _pieces(self, inputs: Any, columns: int, chunk: int, of_others: bool = False) -> Iterator[tuple[slice, Any]]:
        """Yield (some points, their inputs), as many at a time as fit into a chunk with their graph and columns."""
        plan, total = self.engines.plan, num_points(inputs)
        a_column = plan.sensitivity_bytes
        if of_others:
            a_column += self.model.selection.size_of(tuple(plan.others)) * plan.itemsize
        step = max(1, chunk // max(1, a_column * columns + plan.routes.saved_bytes))
        if not self.model.theta.is_cuda:
            step = min(max(min(step, FEW_POINTS), step // SHARE), self.engines.forward_points)
        for start in range(0, total, step):
            points = slice(start, min(start + step, total))
            yield points, inputs if step >= total else take(inputs, points)

    @property
    def chunk_bytes(self) -> int:
        """The bytes that rows may take at a time."""
        return chunk_bytes_within(self.memory_budget, self.model.theta)

    def _chosen_engines(self, asked: Counter[int], columns: int) -> list[tuple[Any, Engine]] | None:
        """Return the kept engines of all batches; None if one is missing, or another kind would be better by now.

        Whether it would is asked again whenever twice as many vectors have come as at the last time.
        """
        if not self._complete:
            return None
        kept = [self._kept[i] for i in range(len(self._kept))]
        if self._asked.total() > 2 * self._asked_when_chosen:
            self._asked_when_chosen = self._asked.total()
            for _, engine in kept:
                room = self._free() + engine.nbytes
                if self._choose(engine.kind, asked, columns, engine.outputs.shape[0], room) != engine.kind:
                    return None
        return kept

    def _engine_for(self, index: int, inputs: Any, label: Any, asked: Counter[int], columns: int) -> Engine:
        _, present = self._kept.get(index, (None, None))
        built: EngineKind = present.kind if present is not None else "streamed"
        room = self._free() + (present.nbytes if present is not None else 0)
        kind = self._choose(built, asked, columns, num_points(inputs), room)
        if present is not None and present.kind == kind:
            return present
        replaced, present = present is not None, None  # freed before the next one is built, as both may not fit
        self._kept.pop(index, None)
        if kind != "streamed":
            inputs = copy(inputs)  # kept engines must not change with the user's tensors
        root = IDENTITY if self._fisher is None else Root(self._fisher, label)
        engine = self._build(kind, inputs, room, root)
        if engine.kind != "streamed" and engine.nbytes <= room:
            self._kept[index] = (label, engine)
            if replaced:
                self._asked.clear()
                self._asked_when_chosen = 0
        return engine

    def _build(self, kind: EngineKind, inputs: Any, room: int, root: Root) -> Engine:
        return self.engines.build(kind, inputs, room, root)

    def _choose(self, built: EngineKind, asked: Counter[int], columns: int, points: int, room: int) -> EngineKind:
        """Choose an engine by the cost rule, again if it keeps a recorded pass that has not been tried yet.

        Outputs alone are no reason to build an engine, unless its first pass is all that it needs.
        """
        rule = self._rule
        if columns == 0 and not rule.prefers_layerwise:
            return built
        kind = rule.choose(built, asked, max(1, columns), points, room)
        if rule.records(kind) and not rule.routes.tried:
            self.engines.try_keeping()
            kind = self._rule.choose(built, asked, max(1, columns), points, room)
        return kind

    def _free(self) -> int:
        return self.memory.budget // 8 - self.kept_bytes if self._is_alike else self.memory.for_engines

    @property
    def _is_alike(self) -> bool:
        """Whether all ranks of a group make this walk: its engines, whose rounding differs, must then be equal on all.

        Their choice does not depend on what a rank keeps of its shard.
        """
        return self.memory.of_ranks is not None and self.shard is None

    def by_points(self, count: int, together: int = 1) -> Iterator[tuple[Passes, int]]:
        """Yield walks over `count` points each (fewer at the end of a batch), and their number.

        If a batch's layer inputs and sensitivities are kept, its walks share them. Each run of `together` points is in
        one walk, whatever the batches are.
        """
        for index, inputs in self._batches_of_whole(together):
            for start in range(0, num_points(inputs), count):
                points = slice(start, start + count)
                part = take(inputs, points)
                walk = self._over([(part, None)])
                _, engine = self._kept.get(index, (None, None))
                if isinstance(engine, Layerwise) and (view := engine.at(points)) is not None:
                    walk._kept, walk._complete = {0: (None, view)}, True
                yield walk, num_points(part)

    def of_points(self, chosen: Int[Tensor, " m"]) -> Passes:
        """Return a walk over some points, in ascending order."""
        parts, start = [], 0
        for inputs, _ in self._source:
            count = num_points(inputs)
            inside = chosen[(chosen >= start) & (chosen < start + count)] - start
            if len(inside):
                parts.append((take(inputs, inside), None))
            start += count
        return self._over(parts)

    def _batches_of_whole(self, together: int) -> Iterator[tuple[int, Any]]:
        """Yield the inputs of each batch by its number, which is −1 if points of two batches are joined."""
        if together == 1:
            yield from ((index, inputs) for index, (inputs, _) in enumerate(self._source))
            return
        rest = None
        for inputs, _ in self._source:
            inputs = inputs if rest is None else tree_map(lambda *parts: torch.cat(parts), rest, inputs)
            whole = num_points(inputs) - num_points(inputs) % together
            rest = take(inputs, slice(whole, None))
            yield -1, take(inputs, slice(whole))

    def minibatches(self, size: int, generator: torch.Generator | None) -> Iterator[tuple[Int[Tensor, " n"], Passes]]:
        """Yield (positions of some points, a walk over them): all points once, shuffled within each batch."""
        device = None if generator is None else generator.device
        for inputs, batch in self._source:
            order = torch.randperm(num_points(inputs), generator=generator, device=device)
            for chosen in order.to(batch.targets.device).split(size):
                yield chosen + batch.start, self._over([(take(inputs, chosen), batch.labels(chosen))])

    def cast(self, dtype: torch.dtype | None, device: torch.device | None) -> Passes:
        """Return this walk, unlabelled, with the model and the inputs converted."""
        parts = [(move(inputs, device, dtype), None) for inputs, _ in self._source]
        walk = self.model.cast(dtype, device)
        return Passes(walk, parts, self._choice, self.memory.on(device), progress=self.progress)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without caches, which are dropped when a linearisation is pickled or copied."""
        kept = {key: value for key, value in self.__dict__.items() if key not in CACHES}
        return kept | {"_engines": None, "progress": None}  # a function may not be picklable

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


def chunk_bytes_within(memory_budget: int, like: Tensor) -> int:
    """Return the bytes that rows may take at a time, on the device of `like`."""
    return max(LEAST_CHUNK, min(memory_budget if like.is_cuda else MOST_CHUNK, memory_budget // 16))


def accumulate(total: Tensor | None, part: Tensor) -> Tensor:
    """Return total + part, in place if no gradient is recorded; a total of None means that there is none yet."""
    if total is None:
        return part
    if total.requires_grad or part.requires_grad:
        return total + part
    return total.add_(part)


class _Linear(Function):
    """A linear map with its adjoint, for autograd."""

    @staticmethod
    def forward(ctx: Any, argument: Tensor, apply: Any, adjoint: Any) -> Tensor:
        ctx.maps = apply, adjoint
        return apply(argument)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        apply, adjoint = ctx.maps
        return linear(gradient, adjoint, apply), None, None


def linear(argument: Tensor, apply: Any, adjoint: Any) -> Tensor:
    """Return a linear map's value, with derivatives of any order by its adjoint."""
    if torch.is_grad_enabled() and argument.requires_grad:
        return _Linear.apply(argument, apply, adjoint)  # type: ignore[no-untyped-call]
    return apply(argument.detach())
