"""Walks over the data: sums over batches, rows over points, and each batch, over all ranks if there are several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils._pytree import tree_map

from curvops.network.data.inputs import move, num_points, take
from curvops.network.data.point_normals import PointNormals
from curvops.network.data.shard import Shard
from curvops.network.engines.engine import Engine, Engines
from curvops.network.engines.layerwise import Layerwise
from curvops.network.engines.plan import EngineChoice
from curvops.network.likelihoods.output_fisher import OutputFisher, Root, RootJacobian
from curvops.network.model.model import Model
from curvops.network.walks.batch_rows import BatchRows
from curvops.network.walks.budget import Budget
from curvops.network.walks.engine_cache import BatchMap
from curvops.network.walks.input_graphs import InputGraph
from curvops.progress import Progress

CACHES = ("_kept", "_asked", "_asked_when_chosen", "_complete", "_recorded", "_outputs", "_gathered")


class Passes(BatchRows):
    """Walks over batches: a sum over them (`total`), rows over their points (`rows`), or each in turn (`each`).

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
        fisher: OutputFisher | None = None,
    ) -> None:
        self._source, self._choice, self._few, self.progress, self.shard = source, engine, few, progress, shard
        self._engines: Engines | None = None
        self._whole: Passes | None = None  # the walk whose engines this one uses, if it has a root
        memory = memory_budget if isinstance(memory_budget, Budget) else Budget(memory_budget)
        super().__init__(model, memory, points, memory.of_ranks is not None and shard is None, fisher)
        self._engines = engines  # set after registering: type checks read `wanted_bytes`, which probes

    def forget(self) -> None:
        super().forget()
        self._gathered: Passes | None = None

    def with_root(self, fisher: OutputFisher) -> Passes:
        """Return the walk that multiplies by Lᵀ J, with H = L Lᵀ, instead of J; its labels must be batches.

        It keeps its own engines, within what this walk and all others leave of the memory budget that they share.
        """
        given = self.model, self._source, self._choice, self.memory
        walk = Passes(*given, progress=self.progress, shard=self.shard, fisher=fisher)
        walk._whole = self
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
    def wanted_bytes(self) -> int:
        """The bytes that engines for all points would take, of the kind that takes most."""
        plan = None if self._engines is None else self._engines.try_keeping()
        return 0 if plan is None else self._points * plan.most_bytes

    @property
    def memory_budget(self) -> int:
        """The bytes for engines and vectors together."""
        return self.memory.budget

    # The three verbs

    def each(self, columns: int, root: OutputFisher | None = None) -> Iterator[tuple[Any, Any]]:
        """Yield (label, J of the batch) for every batch, for a product with `columns` vectors (0: for outputs only).

        With a `root` it is Lᵀ J, with H = L Lᵀ. A walk over kept engines does not read the data again.
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
                yield label, self._map(engine, slice(start, stop), label, root)
                start = stop
            return
        try:
            with self._steps("pass over the data") as steps:
                for index, (inputs, label) in enumerate(self._source):
                    with self.model.lock:
                        engine = self._engine_for(index, inputs, label, asked, columns)
                    stop = start + num_points(inputs)
                    yield label, self._map(engine, slice(start, stop), label, root)
                    steps.advance(stop - start, engine.kind)
                    count, start = index + 1, stop
        except Exception:  # the data changed, so the kept engines are invalid
            with self.model.lock:
                self._kept.clear()
                self._complete = False
            raise
        with self.model.lock:
            self._complete = len(self._kept) == count

    def _map(self, engine: Engine, points: slice, label: Any, root: OutputFisher | None) -> BatchMap | RootJacobian:
        J = BatchMap(engine, self.model, points)
        return J if root is None else RootJacobian(J, Root(root, label))

    def total(
        self, term: Callable[[Any, Any], Tensor], columns: int, root: OutputFisher | None = None, own: bool = False
    ) -> Tensor:
        """Return Σ over batches of `term(label, J of the batch)`, for `columns` vectors; with a root Lᵀ J.

        With `own` the result is this rank's part.
        """
        total: Tensor | None = None
        for label, J in self.each(columns, root):
            total = accumulate(total, term(label, J))
        assert total is not None  # linearize rejects empty data
        return total if self.shard is None else self.add_up(total, own)

    def rows(
        self,
        term: Callable[[Any, Any], Float[Tensor, "K n R"]],
        columns: int,
        root: OutputFisher | None = None,
    ) -> Float[Tensor, "NR K"]:
        """Return the terms of all points, with those of each point together."""
        parts = [term(label, J).flatten(1) for label, J in self.each(columns, root)]
        return self.line_up([self.model.theta.new_zeros(max(1, columns), 0), *parts], 1).mT

    def add_up(self, total: Tensor, own: bool = False) -> Tensor:
        """Return the sum of a tensor over all ranks (or this rank's `own` part); every sum over the data ends here."""
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

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield (inputs, label) of every batch, for uses that need no J."""
        return iter(self._source)

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

    def input_graph(self) -> InputGraph:
        """Return the inputs of all batches as one, none of which requires a gradient."""
        inputs = tree_map(lambda *parts: torch.cat(parts), *(inputs for inputs, _ in self.gathered()._source))
        return InputGraph(self.engines, inputs)

    def cast(self, dtype: torch.dtype | None, device: torch.device | None) -> Passes:
        """Return this walk, unlabelled, with the model and the inputs converted."""
        parts = [(move(inputs, device, dtype), None) for inputs, _ in self._source]
        walk = self.model.cast(dtype, device)
        return Passes(walk, parts, self._choice, self.memory.on(device), progress=self.progress)

    def _over(self, source: Iterable[tuple[Any, Any]]) -> Passes:
        """Return a walk over other batches, with the same kinds of engines."""
        return Passes(self.model, source, self._choice, self.memory, self.engines)

    def apart(self) -> Passes:
        """Return a walk over this rank's own inputs, without the other ranks."""
        return self._over(self._source)

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

    def in_turn(self) -> Iterator[Passes | None]:
        """Yield a walk over each rank's points in turn, for ranks that have points; None for this rank's own."""
        assert self.shard is not None
        for inputs in self.shard.in_turn():
            yield None if inputs is None else self._over([(inputs, None)])

    @property
    def num_own(self) -> int:
        """The number of this rank's points in a sharded walk."""
        assert self.shard is not None
        return self.shard.num_own

    @property
    def first_own(self) -> int:
        """The position of this rank's first point among those of all ranks."""
        return 0 if self.shard is None else self.shard.start

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without caches, which are dropped when a linearisation is pickled or copied."""
        kept = {key: value for key, value in self.__dict__.items() if key not in CACHES}
        return kept | {"_engines": None, "progress": None}  # a function may not be picklable

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.forget()


def accumulate(total: Tensor | None, part: Tensor) -> Tensor:
    """Return total + part, in place if no gradient is recorded; a total of None means that there is none yet."""
    if total is None:
        return part
    if total.requires_grad or part.requires_grad:
        return total + part
    return total.add_(part)
