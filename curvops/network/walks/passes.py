"""The walk over data with all parameters on each rank: engines of the batches, within the memory budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from curvops.network.data.inputs import cut, num_points
from curvops.network.engines.engine import Engine, Engines
from curvops.network.engines.plan import EngineChoice
from curvops.network.likelihoods.output_fisher import OutputFisher, Root, RootJacobian
from curvops.network.model.model import Model
from curvops.network.walks.batch_rows import BatchRows
from curvops.network.walks.budget import Budget
from curvops.network.walks.engine_cache import BatchMap
from curvops.progress import Progress
from curvops.ranks.shard import Shard

CACHES = ("_kept", "_vectors_by_width", "_vectors_when_chosen", "_complete", "_recorded", "_outputs", "_gathered")


class Passes(BatchRows):
    """The walk over a source of batches, which multiplies by engines.

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
        with self.model.lock:
            vectors_by_width = Counter(self._vectors_by_width)
            self._vectors_by_width[max(1, columns)] += columns
            engines = self._chosen_engines(vectors_by_width, columns)
        count, start = 0, 0 if self.shard is None else self.shard.start
        if engines is not None:
            for label, engine in engines:
                stop = start + len(engine.outputs)
                yield label, self._map(engine, slice(start, stop), label, root)
                start = stop
            return
        try:
            with self._steps("pass over the data") as steps:
                for index, (inputs, label) in enumerate(self.source):
                    with self.model.lock:
                        engine = self._engine_for(index, inputs, label, vectors_by_width, columns)
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

    def over(
        self, source: Iterable[tuple[Any, Any]], model: Model | None = None, engine: Engine | None = None
    ) -> Passes:
        """Return a walk over other batches with the same kinds of engines, or with those of another model.

        `engine` is J of the only batch, if it is known.
        """
        if model is not None:
            memory = self.memory.on(model.theta.device)
            return Passes(model, source, self._choice, memory, progress=self.progress)
        walk = Passes(self.model, source, self._choice, self.memory, self.engines)
        if engine is not None:
            walk._kept, walk._complete = {0: (None, engine)}, True
        return walk

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
