"""The rows of J and of Lᵀ J, layer by layer, over the batches of a walk, some points at a time."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvops.network.data.batches import Batch
from curvops.network.data.inputs import num_points, take
from curvops.network.data.shard import Shard
from curvops.network.engines.engine import LEAST_CHUNK
from curvops.network.engines.layerwise import COLUMN_BYTES, Features, Layerwise, Recording
from curvops.network.likelihoods.output_fisher import OutputFisher, Unit
from curvops.network.walks.batch_map import BatchMap
from curvops.network.walks.engine_cache import EngineCache
from curvops.network.walks.layer_roots import Group, JacobianRows, Score, each_group, groups_of
from curvops.progress import Progress, Steps, progress_bar

# On a CPU larger pieces are slower, since memory for them is allocated anew, page by page, for each layer.
MOST_CHUNK = 2**27
FEW_POINTS, SHARE = 16, 16
"""On a CPU pieces of more points than these take a share of a chunk, which is as fast: their activations and rows, and
what is made of them, are then a few blocks of memory that are used again."""
NO_LABELS = Batch((), torch.empty(0))
"""The labels of a walk over rows of J, which needs none."""
MOST_RECORDED = 2**20
"""The bytes of a graph that may be kept until rows are used, or of outputs that a walk over rows finds."""


class BatchRows(EngineCache, JacobianRows):
    """The rows of the batches of a `source`, by layer: those of J, and those of a square root of the curvature."""

    _source: Iterable[tuple[Any, Any]]
    shard: Shard | None
    progress: Progress

    def forget(self) -> None:
        super().forget()
        self._recorded: Recording | None = None
        self._outputs: Tensor | None = None

    @abstractmethod
    def each(self, columns: int) -> Iterator[tuple[Any, BatchMap]]:
        """Yield (label, J of the batch) for every batch."""

    @property
    def chunk_bytes(self) -> int:
        """The bytes that rows may take at a time."""
        return chunk_bytes_within(self.memory.budget, self.model.theta)

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
            kept = self.kept_engines if self._complete else []
            found = [engine.features for engine in kept if isinstance(engine, Layerwise)]
            whole = [features for features in found if features is not None]
            return whole if whole and len(whole) == len(kept) else None

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

    def _steps(self, what: str, rows: int | None = None) -> AbstractContextManager[Steps]:
        """Return steps that count points, or the number of rows per point times points."""
        self.model.refuse_modes()
        return progress_bar(what, self._points * (rows or 1) or None, self.progress, " rows" if rows else " points")


def chunk_bytes_within(memory_budget: int, like: Tensor) -> int:
    """Return the bytes that rows may take at a time, on the device of `like`."""
    return max(LEAST_CHUNK, min(memory_budget if like.is_cuda else MOST_CHUNK, memory_budget // 16))


def _see(seen: list[Tensor], outputs: Tensor, _: Batch) -> None:
    """Keep outputs if all that are kept are small together."""
    if sum(each.nbytes for each in (*seen, outputs)) <= MOST_RECORDED:
        seen.append(outputs)
