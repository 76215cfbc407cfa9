"""A walk over the data has three verbs: a sum over batches, rows over points, and each batch.

Data that ranks share enter here alone: every sum over the data ends in `add_up`, every concatenation in `line_up`, what
all ranks have enters a sum through `replicated`, for the sake of its gradient, and what must not differ is in `agree`.

`Passes` is the walk with all parameters on each rank: engines and rows by layer, within the memory budget. Of another
walk it takes a few points at a time, chosen ones, or minibatches (`by_points`, `at_points`, `shuffled`).
"""

from __future__ import annotations

import dataclasses
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from curvops.ambient import CACHE_BYTES, SMALL_BYTES, Progress, Steps, in_force, progress_bar
from curvops.network.data.batches import Batch
from curvops.network.data.inputs import copy, cut, in_pieces, join, num_points, take
from curvops.network.data.randomness import PointNormals
from curvops.network.engines.engine import Engine, Engines
from curvops.network.engines.layerwise import Features, Layerwise
from curvops.network.engines.plan import EngineChoice, Plan
from curvops.network.likelihoods.output_fisher import IDENTITY, OutputFisher, Root, RootJacobian, Unit
from curvops.network.model.model import Model
from curvops.network.walks.budget import BatchMap, Budget
from curvops.network.walks.layer_roots import Group, JacobianRows, Score, each_group, groups_of
from curvops.ranks.shard import Shard

CACHES = ("_kept", "_has_multiplied", "_every", "_gathered")
# On a CPU larger pieces are slower, since memory for them is allocated anew, page by page, for each layer.
MOST_CHUNK = 2**27
FEW_POINTS, SHARE = 16, 16
"""On a CPU pieces of more points than these take a share of a chunk, which is as fast: their activations and rows, and
what is made of them, are then a few blocks of memory that are used again."""
NO_LABELS = Batch((), torch.empty(0))
"""The labels of a walk over rows of J, which needs none."""


class Walk(ABC):
    """A sum over batches (`total`), rows over their points (`rows`), or each batch in turn (`each`).

    A term is a function of (label, J of a batch). If the data are a `shard`, sums and rows are those of all ranks.
    """

    model: Model
    shard: Shard | None

    @abstractmethod
    def each(self, columns: int, root: OutputFisher | None = None) -> Iterator[tuple[Any, Any]]:
        """Yield (label, J of the batch) for every batch, for a product with `columns` vectors (0: for outputs only).

        With a `root` it is Lᵀ J, with H = L Lᵀ.
        """

    def total(
        self, term: Callable[[Any, Any], Tensor], columns: int, root: OutputFisher | None = None, own_part: bool = False
    ) -> Tensor:
        """Return Σ over batches of `term(label, J of the batch)`, for `columns` vectors; with a root Lᵀ J.

        With `own_part` the result is this rank's part.
        """
        return self.add_up(self.own_sum(term, columns, root), own_part)

    def own_sum(self, term: Callable[[Any, Any], Tensor], columns: int, root: OutputFisher | None = None) -> Tensor:
        """Return the sum of the terms over this process's batches."""
        total: Tensor | None = None
        for label, J in self.each(columns, root):  # a loop: a generator would hold one vector more
            total = accumulate(total, term(label, J))
        assert total is not None  # linearize rejects empty data
        return total

    def rows(
        self, term: Callable[[Any, Any], Float[Tensor, "K n R"]], columns: int, root: OutputFisher | None = None
    ) -> Float[Tensor, "NR K"]:
        """Return the terms of all points, with those of each point together."""
        terms = [term(label, J).flatten(1) for label, J in self.each(columns, root)]
        return self.line_up([self.model.theta.new_zeros(max(1, columns), 0), *terms], 1).mT

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

    def draw(self, draws: range, columns: int, seed: int, root: OutputFisher | None = None) -> Float[Tensor, "D k"]:
        """Draw samples of Σ over batches of Jᵀ z, z standard normal with `columns` per point; with a root Jᵀ L z."""
        like, normals = self.model.theta, PointNormals(seed)
        return self.total(lambda _, J: J.pull(normals.block(draws, J.points, columns, like)), len(draws), root)

    def add_up(self, total: Tensor, own_part: bool = False) -> Tensor:
        """Return the sum of a tensor over all ranks, or with `own_part` this rank's part of it."""
        if self.shard is None:
            return total
        return self.shard.own_part(total) if own_part else self.shard.add_up(total)

    def line_up(self, tensors: list[Tensor], dim: int = 0) -> Tensor:
        """Concatenate the parts of all batches in the order of the points."""
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
        return whole if self.shard is None else self.shard.line_up(whole, dim)

    @property
    def is_shared(self) -> bool:
        """Whether several ranks share the data, each with its own."""
        return self.shard is not None

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raise RanksDifferError, on all ranks that share the data, if a fact differs between them."""
        if self.shard is not None:
            self.shard.ranks.require_equal(facts)

    def replicated(self, tensor: Tensor) -> Tensor:
        """Return a tensor that all ranks have; its gradient is the sum of the gradients from each rank."""
        return tensor if self.shard is None else self.shard.ranks.replicate(tensor)


def accumulate(total: Tensor | None, term: Tensor) -> Tensor:
    """Return total + term, in place if no gradient is recorded; a total of None means that there is none yet."""
    if total is None:
        return term
    if total.requires_grad or term.requires_grad:
        return total + term
    return total.add_(term)


class Passes(Walk, JacobianRows):
    """The walk over a source of batches, which multiplies by engines, and gives rows of J or of a curvature's root.

    Engines are chosen when they are built, by the plan's cost rule, and kept if the budget allows. Within an algorithm,
    and from the second product on, they are built as for many products; a first product alone builds nothing that it
    does not pay for. Those of walks that are `alike` on all ranks do not depend on what a rank keeps of its shard,
    since their rounding differs.

    `source` is a re-iterable of (inputs, label); labels are passed through (targets, or None). `engines` may be
    shared by walks over different inputs of one model, and `memory_budget`, bytes or a `Budget`, by any walks.
    `points`, if known, determine what keeping all engines would take; `few` are inputs to probe the model on if the
    source has none. A walk `with_root` multiplies by Lᵀ J. Thread-safe: engines are built and run under the model's
    lock.
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
        fisher: OutputFisher | None = None,
    ) -> None:
        self.source, self._choice, self._few, self.progress, self.shard = source, engine, few, progress, shard
        self._engines = engines
        self._whole: Passes | None = None  # the walk whose engines this one uses, if it has a root
        self.model, self._points, self._fisher = model, points, fisher
        self.memory = memory_budget if isinstance(memory_budget, Budget) else Budget(memory_budget)
        self.chunk_bytes = chunk_bytes_within(self.memory.budget, model.theta)
        self._alike = self.memory.of_ranks is not None and shard is None
        self.forget()

    def forget(self) -> None:
        """Start without engines, as after unpickling."""
        self._kept: dict[int, tuple[Any, BatchMap]] = {}  # (label, J) by the number of the batch
        self._has_multiplied = False
        self._every: list[tuple[Any, BatchMap]] | None = None  # (label, J) of all batches in order, if all are kept
        self._gathered: Passes | None = None
        self.memory.register(self)

    def with_root(self, fisher: OutputFisher) -> Passes:
        """Return the walk that multiplies by Lᵀ J, with H = L Lᵀ, instead of J; its labels must be batches.

        It keeps its own engines, within what this walk and all others leave of the memory budget that they share.
        """
        arguments = self.model, self.source, self._choice, self.memory
        walk = Passes(*arguments, progress=self.progress, shard=self.shard, fisher=fisher)
        walk._whole = self
        return walk

    @property
    def engines(self) -> Engines:
        """The builder of the engines, probed on the first batch unless it was given."""
        if self._whole is not None:
            return self._whole.engines
        with self.model.lock:
            if self._engines is None:
                few = next(iter(self.source))[0] if self._few is None else self._few
                self._engines = Engines(self.model, few, self._choice, self.memory_budget)
            return self._engines

    @property
    def wanted_bytes(self) -> int:
        """The bytes that engines for all points would take, of the kind that takes most."""
        plan = None if self._engines is None else self._engines.try_keeping()
        return 0 if plan is None else self._points * plan.most_bytes

    @property
    def memory_budget(self) -> int:
        """The bytes for engines and vectors together."""
        return self.memory.budget

    def each(self, columns: int, root: OutputFisher | None = None) -> Iterator[tuple[Any, Any]]:
        """Yield (label, J of the batch) for every batch; a walk over kept engines does not read the data again."""
        self.model.refuse_modes()
        kept = self._every
        for label, J in self._pass(columns) if kept is None else kept:
            yield label, J if root is None else RootJacobian(J, Root(root, label))

    def _pass(self, columns: int) -> Iterator[tuple[Any, BatchMap]]:
        """Yield (label, J of the batch) from a pass over the data, and keep what the budget has room for."""
        # Outputs alone are no reason to build an engine, unless its first pass is all that it needs.
        many = columns > 0 and (self._has_multiplied or in_force.get() is not None)
        self._has_multiplied |= columns > 0
        count, start = 0, 0 if self.shard is None else self.shard.start
        try:
            with self._steps("pass over the data") as steps:
                for index, (inputs, label) in enumerate(self.source):
                    points = slice(start, start + num_points(inputs))
                    with self.model.lock:
                        J = self._jacobian_of(index, inputs, label, points, None if many else columns)
                    yield label, J
                    steps.advance(points.stop - start, J.engine.kind)
                    count, start = index + 1, points.stop
        except Exception:  # the data changed, so the kept engines are invalid
            with self.model.lock:
                self._kept.clear()
                self._every = None
            raise
        with self.model.lock:
            self._every = [self._kept[i] for i in range(count)] if len(self._kept) == count else None

    def _jacobian_of(self, index: int, inputs: Any, label: Any, points: slice, single: int | None) -> BatchMap:
        """Return J of a batch: the one that is kept, or a new one, for many products or a `single` one."""
        if index in self._kept:
            return self._kept[index][1]
        room = self.memory.budget // 8 - self.kept_bytes if self._alike else self.memory.for_engines
        count = points.stop - points.start
        kind = self._rule.choose(count, room, single)
        if self._rule.records(kind) and not self._rule.routes.tried:  # again, once a recorded pass was tried
            self.engines.try_keeping()
            kind = self._rule.choose(count, room, single)
        if kind != "streamed":
            inputs = copy(inputs)  # kept engines must not change with the user's tensors
        root = IDENTITY if self._fisher is None else Root(self._fisher, label)
        engine = self.engines.build(kind, inputs, room, root)
        J = BatchMap(engine, self.model, points)
        if engine.kind != "streamed" and engine.nbytes <= room:
            self._kept[index] = (label, J)
        return J

    @property
    def kept_engines(self) -> list[Engine]:
        """The engines that are kept now, in the order of their batches."""
        return [J.engine for _, (_, J) in sorted(self._kept.items(), key=itemgetter(0))]

    @property
    def plan(self) -> Plan:
        """The plan, with the engines now in use for the batches."""
        with self.model.lock:
            self.engines.try_keeping()
            kinds = [engine.kind for engine in self.kept_engines]
            return dataclasses.replace(self._rule, in_use={kind: kinds.count(kind) for kind in set(kinds)})

    @property
    def _rule(self) -> Plan:
        plan = self.engines.plan
        return plan if self._fisher is None else plan.for_rows(self._fisher.num_columns(plan.num_outputs))

    @property
    def kept_bytes(self) -> int:
        """The bytes of the engines that are kept now."""
        return sum([J.engine.nbytes for _, J in list(self._kept.values())])

    def shrink(self, most: int) -> None:
        """Free engines of the last batches until at most this many bytes are kept."""
        with self.model.lock:
            while not self._alike and self._kept and self.kept_bytes > most:
                self._kept.popitem()
                self._every = None

    def over(self, source: Iterable[tuple[Any, Any]], model: Model | None = None) -> Passes:
        """Return a walk over other batches with the same kinds of engines, or with those of another model."""
        if model is not None:
            memory = self.memory.on(model.theta.device)
            return Passes(model, source, self._choice, memory, progress=self.progress)
        return Passes(self.model, source, self._choice, self.memory, self.engines)

    def root_pieces(
        self,
        fisher: OutputFisher,
        chunk: int,
        apart: bool = False,
        first: int = 0,
        score: Score | None = None,
        names: Container[str] | None = None,
    ) -> Iterator[tuple[slice, Iterator[Group]]]:
        """Yield rows of a square root of the curvature by layer: one forward pass, and one backward pass per column.

        They come some points at a time, as (these points, rows). Pieces take about `chunk` bytes (their use takes
        several times that); those that end at or before point `first` are left out. `apart` is for sums over columns:
        these may come in several groups, for more points at a time, and a last layer may come with H itself
        (`Group.hessian`). With `names`, all columns of a point come together, and parameters without layer rules only
        if they are among the names. `score` is called with the outputs of each piece and its batch.
        """
        start, columns = 0, fisher.num_columns(self.engines.plan.num_outputs)
        of_J = isinstance(fisher, Unit)
        with self._steps("rows of the Jacobian" if of_J else "rows of the curvature's root", columns) as steps:
            for inputs, batch in self.source:
                others = [n for n in self.engines.checked_others(inputs) if names is None or n in names]
                width, most, held = (columns, chunk, []) if names is None else (columns, sys.maxsize, others)
                if apart and not others and not self.model.theta.is_cuda:
                    width, most = 1, min(chunk, CACHE_BYTES)
                for some, subset in self._pieces(inputs, width, chunk, held):
                    points = slice(start + some.start, start + some.stop)
                    if points.stop > first:
                        labels = NO_LABELS if of_J else batch.labels(some)
                        arguments = self.engines, labels, subset, fisher, others, most, score
                        yield points, each_group(*arguments, advance=steps.advance, sums=apart)
                    else:
                        steps.advance((some.stop - some.start) * columns)
                start += num_points(inputs)

    def jacobian_rows(self, least: int = 0, root: OutputFisher | None = None) -> Iterator[tuple[int, int, list[Group]]]:
        """Yield the rows of J by layer, some points at a time: (first row, how many, groups), all columns of each.

        Pieces before the row `least`, at which a piece ends, are left out. With a `root` L they are the rows of Lᵀ J.
        """
        fisher, last = root or Unit(), self.features() if root is None else None
        C = fisher.num_columns(self.engines.plan.num_outputs)
        if last is None:
            names = self.model.selection.names
            for points, groups in self.root_pieces(fisher, self.chunk_bytes, first=least // C, names=names):
                yield points.start * C, (points.stop - points.start) * C, list(groups)
            return
        outputs, start = C if self.model.layout is None else self.model.layout.num_outputs, 0
        for features in last:
            step = max(1, self.chunk_bytes // max(1, self.engines.plan.sensitivity_bytes * features.outputs))
            for first in range(0, count := len(features.layer_input), step):
                if (start + first) * C >= least:
                    some = features.at(slice(first, first + step))
                    yield (start + first) * C, len(some.layer_input) * C, groups_of(some, outputs)
            start += count

    def outputs(self) -> Float[Tensor, "n C"]:
        """Return the outputs of all points by one forward pass; for a last layer, J needs no other pass."""
        if self.engines.plan.is_last_layer:
            return self.rows(lambda _, J: J.outputs.unsqueeze(0), 0).view(-1, self.engines.plan.num_outputs)
        outputs, most = [self.model.theta.new_zeros(0, self.engines.plan.num_outputs)], self.engines.forward_points
        with torch.no_grad(), self._steps("pass over the data") as steps:
            for inputs, _ in self.source:
                outputs += [self.model(self.model.values, subset) for subset in in_pieces(inputs, most)]
                steps.advance(num_points(inputs))
        return self.line_up(outputs)

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
            engines = [] if self._every is None else self.kept_engines
            batch_features = [engine.features for engine in engines if isinstance(engine, Layerwise)]
            whole = [features for features in batch_features if features is not None]
            return whole if whole and len(whole) == len(engines) else None

    def _pieces(self, inputs: Any, columns: int, chunk: int, others: Collection[str]) -> Iterator[tuple[slice, Any]]:
        """Yield (some points, their inputs), as many at a time as fit into a chunk with their graph and columns.

        Columns are those of δ, and of the rows of `others`.
        """
        plan = self.engines.plan
        a_column = plan.sensitivity_bytes + self.model.selection.size_of(others) * plan.itemsize
        step = max(1, chunk // max(1, a_column * columns + plan.routes.saved_bytes))
        if not self.model.theta.is_cuda:
            step = min(max(min(step, FEW_POINTS), step // SHARE), self.engines.forward_points)
        yield from cut(inputs, step)

    def _steps(self, what: str, rows: int | None = None) -> AbstractContextManager[Steps]:
        """Return steps that count points, or the number of rows per point times points."""
        self.model.refuse_modes()
        return progress_bar(what, self._points * (rows or 1) or None, self.progress, " rows" if rows else " points")

    def at_points(self, chosen: Int[Tensor, " m"]) -> Passes:
        """Return a walk over some points, in ascending order."""
        batches, start = [], 0
        for inputs, _ in self.source:
            count = num_points(inputs)
            inside = chosen[(chosen >= start) & (chosen < start + count)] - start
            if len(inside):
                batches.append((take(inputs, inside), None))
            start += count
        return self.over(batches)

    @property
    def own_rows(self) -> slice:
        """The rows of J at this rank's own points, among those of all ranks."""
        if self.shard is None:
            return slice(0, None)
        C, start = self.engines.plan.num_outputs, self.shard.start
        return slice(C * start, C * (start + self.shard.num_own))

    def gathered(self) -> Passes:
        """Return a walk over the inputs of all ranks on this one alone; this walk itself if it has no shard.

        This is for function space, where points are few. It keeps a copy of the inputs as long as it exists.
        """
        if self.shard is None:
            return self
        with self.model.lock:
            if self._gathered is None:
                subsets = cut(self.shard.gathered().inputs, self.shard.largest)
                self._gathered = self.over([(subset, None) for _, subset in subsets])
            return self._gathered

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without caches, which are dropped when a linearisation is pickled or copied."""
        state = {key: value for key, value in self.__dict__.items() if key not in CACHES}
        return state | {"_engines": None, "progress": None}  # a function may not be picklable

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.forget()


def chunk_bytes_within(memory_budget: int, like: Tensor) -> int:
    """Return the bytes that rows may take at a time, on the device of `like`."""
    return max(SMALL_BYTES, min(memory_budget if like.is_cuda else MOST_CHUNK, memory_budget // 16))


def by_points(walk: Passes, count: int, together: int = 1) -> Iterator[tuple[Passes, int]]:
    """Yield walks over `count` points each (fewer at the end of a batch), and their number.

    Each run of `together` points is in one walk, whatever the batches are.
    """
    for inputs in _batches_of_whole(walk, together):
        for _, subset in cut(inputs, count):
            yield walk.over([(subset, None)]), num_points(subset)


def _batches_of_whole(walk: Passes, together: int) -> Iterator[Any]:
    """Yield the inputs of each batch, a multiple of so many points: the rest is joined to the next batch."""
    rest = None
    for inputs, _ in walk.source:
        inputs = inputs if rest is None else join([rest, inputs])
        whole = num_points(inputs) - num_points(inputs) % together
        rest = take(inputs, slice(whole, None)) if whole < num_points(inputs) else None
        yield take(inputs, slice(whole))


def shuffled(walk: Passes, size: int, generator: torch.Generator | None) -> Iterator[tuple[Int[Tensor, " n"], Passes]]:
    """Yield (positions of some points, a walk over them): all points once, in random order within each batch."""
    device = None if generator is None else generator.device
    for inputs, batch in walk.source:
        order = torch.randperm(num_points(inputs), generator=generator, device=device)
        for chosen in order.to(batch.any_targets.device).split(size):
            yield chosen + batch.start, walk.over([(take(inputs, chosen), batch.labels(chosen))])
