"""The rows of J and of Lᵀ J, layer by layer, over the batches of a walk, some points at a time."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from curvops.network.data.batches import Batch
from curvops.network.data.inputs import cut, num_points
from curvops.network.engines.engine import LEAST_CHUNK
from curvops.network.engines.layer_calls import COLUMN_BYTES, Recording
from curvops.network.engines.layerwise import Features, Layerwise
from curvops.network.likelihoods.output_fisher import OutputFisher, Unit
from curvops.network.walks.engine_cache import EngineCache
from curvops.network.walks.layer_roots import Group, JacobianRows, Score, each_group, groups_of
from curvops.network.walks.walk import Walk
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


class BatchRows(Walk, EngineCache, JacobianRows):
    """The rows of the batches of a `source`, by layer: those of J, and those of a square root of the curvature."""

    source: Iterable[tuple[Any, Any]]
    progress: Progress

    def forget(self) -> None:
        super().forget()
        self._recorded: Recording | None = None
        self._outputs: Tensor | None = None

    @property
    def chunk_bytes(self) -> int:
        """The bytes that rows may take at a time."""
        return chunk_bytes_within(self.memory.budget, self.model.theta)

    def root_pieces(
        self,
        fisher: OutputFisher,
        chunk: int,
        apart: bool = False,
        first: int = 0,
        score: Score | None = None,
        names: Container[str] | None = None,
    ) -> Iterator[tuple[int, Iterator[Group]]]:
        """Yield rows of a square root of the curvature by layer: one forward pass, and one backward pass per column.

        They come some points at a time, as (number of points in and before the piece, rows). Pieces take about `chunk`
        bytes (their use takes several times that); those that end at or before point `first` are left out. `apart` is
        for sums over columns: these may come in several groups, for more points at a time, and a last layer may come
        with H itself (`Group.hessian`). With `names`, all columns of a point come together, and parameters without
        layer rules only if they are among the names. `score` is called with the outputs of each piece and its batch.
        """
        total, columns = 0, fisher.num_columns(self.engines.plan.num_outputs)
        with self._steps("rows of the curvature's root", columns) as steps:
            for inputs, batch in self.source:
                others = [n for n in self.engines.checked_others(inputs) if names is None or n in names]
                width, most = columns, chunk if names is None else sys.maxsize
                if apart and not others and not self.model.theta.is_cuda:
                    width, most = 1, min(chunk, COLUMN_BYTES)
                for points, subset in self._pieces(inputs, width, chunk):
                    total += points.stop - points.start
                    if total > first:
                        arguments = self.engines, batch.labels(points), subset, fisher, others, most, score
                        yield total, each_group(*arguments, advance=steps.advance, sums=apart)
                    else:
                        steps.advance((points.stop - points.start) * columns)

    def jacobian_rows(
        self, least: int = 0, names: Container[str] | None = None
    ) -> Iterator[tuple[int, int, list[Group]]]:
        """Yield the rows of J by layer, some points at a time: (first row, how many, groups), all columns of each.

        Pieces whose first row is below `least`, and layers that have none of the `names`, are left out. A walk over all
        rows keeps the outputs, if they are small, for `recorded_outputs`.
        """
        C, last = self.engines.plan.num_outputs, self.features()
        total, seen = 0, list[Tensor]()

        def see(outputs: Tensor, _: Batch) -> None:
            if sum(tensor.nbytes for tensor in (*seen, outputs)) <= MOST_RECORDED:
                seen.append(outputs)

        def groups_at(points: slice, subset: Any) -> list[Group]:
            if last is not None:
                return groups_of(subset, C if self.model.layout is None else self.model.layout.num_outputs)
            with self.model.lock:
                recorded, self._recorded = self._recorded, None
            if recorded is not None and len(recorded[0]) != points.stop - points.start:
                recorded = None
            arguments = self.engines, NO_LABELS, subset, Unit(), others, sys.maxsize, see, recorded
            return list(each_group(*arguments, names=names))

        with self._steps("rows of the Jacobian") as steps:
            for index, (inputs, _) in enumerate(self.source):
                if last is None:
                    others = [n for n in self.engines.checked_others(inputs) if names is None or n in names]
                    pieces = self._pieces(inputs, C, self.chunk_bytes, of_others=True)
                else:
                    pieces = self._pieces_of_last(last[index])
                for points, subset in pieces:
                    first, count = total + points.start * C, points.stop - points.start
                    if first >= least:
                        yield first, count * C, groups_at(points, subset)
                    steps.advance(count)
                total += num_points(inputs) * C
        if seen and not self.is_shared and sum(map(len, seen)) * C == total:
            with self.model.lock:
                self._outputs = torch.cat(seen)

    def _pieces_of_last(self, features: Features) -> Iterator[tuple[slice, Features]]:
        """Yield (some points, their inputs of the last layer), as many at a time as fit into a chunk."""
        step = max(1, self.chunk_bytes // max(1, self.engines.plan.sensitivity_bytes * features.outputs))
        for start in range(0, len(features.kept), step):
            points = slice(start, min(start + step, len(features.kept)))
            yield points, features.at(points)

    def recorded_outputs(self) -> Tensor | None:
        """Return the outputs if a pass for the rows of J has them, or makes them, or None.

        `jacobian_rows` has them after a walk over all rows; this hands them over once. Otherwise, if points are few, a
        pass is made whose graph `jacobian_rows` uses next. Few means that one batch in memory has them all, and that
        its graph takes at most `MOST_RECORDED` bytes. Every parameter needs a layer rule.
        """
        with self.model.lock:
            if self._outputs is not None:
                outputs, self._outputs = self._outputs, None
                return outputs
            plan, batches = self.engines.plan, self.source if isinstance(self.source, list) else []
            if len(batches) != 1 or plan.is_last_layer or self._fisher is not None:
                return None
            inputs = batches[0][0]
            if num_points(inputs) * plan.routes.saved_bytes > MOST_RECORDED or self.engines.checked_others(inputs):
                return None
            recorded = self.engines.record(inputs)
            self._recorded = None if recorded[2] else recorded
            return recorded[0].detach()

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
            engines = self.kept_engines if self._complete else []
            batch_features = [engine.features for engine in engines if isinstance(engine, Layerwise)]
            whole = [features for features in batch_features if features is not None]
            return whole if whole and len(whole) == len(engines) else None

    def _pieces(self, inputs: Any, columns: int, chunk: int, of_others: bool = False) -> Iterator[tuple[slice, Any]]:
        """Yield (some points, their inputs), as many at a time as fit into a chunk with their graph and columns."""
        plan = self.engines.plan
        a_column = plan.sensitivity_bytes
        if of_others:
            a_column += self.model.selection.size_of(tuple(plan.others)) * plan.itemsize
        step = max(1, chunk // max(1, a_column * columns + plan.routes.saved_bytes))
        if not self.model.theta.is_cuda:
            step = min(max(min(step, FEW_POINTS), step // SHARE), self.engines.forward_points)
        yield from cut(inputs, step)

    def _steps(self, what: str, rows: int | None = None) -> AbstractContextManager[Steps]:
        """Return steps that count points, or the number of rows per point times points."""
        self.model.refuse_modes()
        return progress_bar(what, self._points * (rows or 1) or None, self.progress, " rows" if rows else " points")


def chunk_bytes_within(memory_budget: int, like: Tensor) -> int:
    """Return the bytes that rows may take at a time, on the device of `like`."""
    return max(LEAST_CHUNK, min(memory_budget if like.is_cuda else MOST_CHUNK, memory_budget // 16))
