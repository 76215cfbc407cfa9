"""Products with J if each rank holds its data, a slice of every parameter, and rows of every vector.

A product goes through the layers twice. For each layer, its part of the vectors is gathered, multiplied by J of this
rank's points, and freed; on the way back, the layer's part of Jᵀ u is summed over the ranks, and each keeps its slice.
So no rank ever holds more than one layer's part of K whole vectors. Passes through the model gather its parameters, so
all ranks make the same number of passes: a rank with fewer batches repeats its first point, with weight zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.network.data.batches import Batch
from curvops.network.data.inputs import copy, take
from curvops.network.data.point_normals import PointNormals
from curvops.network.data.shard import Shard
from curvops.network.engines.layerwise import Layerwise, Rows
from curvops.network.likelihoods.likelihood import Likelihood
from curvops.network.likelihoods.output_fisher import IDENTITY, Empirical, Exact, OutputFisher, Root
from curvops.network.model.parameters import Blocks
from curvops.network.walks.layer_roots import Group
from curvops.network.walks.row_squares import squares_of
from curvops.network.walks.sharded_layers import ShardedLayers

R = TypeVar("R")
PANEL_BYTES = 2**24
"""The bytes that one layer's part of several vectors may take on each rank; at least one vector's."""
LEAST_CHUNK = 2**20


class ShardedPasses:
    """Sums over the data of all ranks of products with the layers of a sharded model.

    Vectors are this rank's rows (d, K) of blocks; see `ShardedParameters`. All ranks make the same calls. The engines
    of the last root that was used are kept, if they fit into half of the memory budget.
    """

    def __init__(self, layers: ShardedLayers, shard: Shard, memory_budget: int) -> None:
        self.layers, self.shard, self.model, self.memory_budget = layers, shard, layers.model, memory_budget
        own = (0, 0) if shard.borrows else (len(shard), sum(shard.sizes))
        counts = shard.ranks.gather(own)
        self._rounds, self._most_points = max(batches for batches, _ in counts), max(points for _, points in counts)
        self._own_batches = own[0]
        first = next(iter(shard))
        self._spare = copy(take(first.inputs, slice(0, 1))), first.copy().labels(slice(0, 1))
        self._kept: tuple[object, list[BatchEngine]] = None, []

    @property
    def shards(self) -> Any:
        """The layout of parameters and vectors on the ranks."""
        return self.model.shards

    @property
    def chunk_bytes(self) -> int:
        """The bytes that sensitivities may take at a time."""
        return max(LEAST_CHUNK, self.memory_budget // 8)

    def _each_batch(self) -> Iterator[tuple[Any, Batch, bool]]:
        """Yield (inputs, labels, whether they count), equally often on each rank."""
        own, start = iter(self.shard), self.shard.start
        for i in range(self._rounds):
            if i >= self._own_batches:
                yield *self._spare, False
                continue
            batch = next(own)
            yield batch.inputs, Batch((), batch.targets, batch.weights, start), True
            start += batch.num_points
        if not self.shard.borrows:
            next(own, None)  # detects more data

    def _engines(self, root: OutputFisher | None, keep: bool = True) -> Iterator[list[BatchEngine]]:
        """Yield the engines of all batches together, or one after the other if they do not fit into the budget."""
        kept, engines = self._kept
        if engines and kept is root:
            yield engines
            return
        columns = self.layers.num_outputs if root is None else root.num_columns(self.layers.num_outputs)
        fits = keep and self._most_points * self.layers.bytes_a_point(columns) <= self.memory_budget // 2
        if fits:
            self._kept, engines = (None, []), []  # freed before others are built
        for inputs, labels, counts in self._each_batch():
            of = IDENTITY if root is None else Root(root, labels)
            engine = BatchEngine(labels if counts else None, self.layers.build(inputs, self.chunk_bytes, of))
            if fits:
                engines.append(engine)
            else:
                yield [engine]
        if fits:
            self._kept = root, engines
            yield engines

    @torch.no_grad()
    def product(self, block: Float[Tensor, "d K"], output: OutputFisher, by_rows: bool) -> Float[Tensor, "d K"]:
        """Return Σ over the data of all ranks of Jᵀ H J V, by the rows Lᵀ J of H = L Lᵀ or by those of J."""
        total = torch.zeros_like(block.mT).mT
        for engines in self._engines(output if by_rows else None):
            pushed = self._push(engines, block)
            if not by_rows:
                pushed = [engine.weighed(u, output) for engine, u in zip(engines, pushed)]
            self._pull(engines, pushed, total)
        return total

    @torch.no_grad()
    def gradient(self, likelihood: Likelihood) -> Float[Tensor, " d"]:
        """Return the gradient of the negative log-likelihood."""
        rows, total = Empirical(likelihood), self._zeros(1)
        for engines in self._engines(rows, keep=False):
            ones = [engine.J.outputs.new_ones(1, len(engine.J.outputs), 1) for engine in engines]
            weighed = [z if e.labels is None else rows.weigh(z, e.labels) for e, z in zip(engines, ones)]
            self._pull(engines, weighed, total)
        return total.squeeze(1)

    @torch.no_grad()
    def draw(self, draws: range, output: OutputFisher, seed: int) -> Float[Tensor, "d k"]:
        """Draw samples of Σ over the data of Jᵀ L z, z standard normal, by the position of each point among all."""
        like, normals = self.model.theta, PointNormals(seed)
        columns, total = output.num_columns(self.layers.num_outputs), self._zeros(len(draws))
        for engines in self._engines(output):
            noise = [
                normals.block(draws, slice(start, start + len(engine.J.outputs)), columns, like)
                for engine in engines
                for start in [0 if engine.labels is None else engine.labels.start]
            ]
            self._pull(engines, noise, total)
        return total

    @torch.no_grad()
    def diagonal(self, output: OutputFisher) -> Float[Tensor, " d"]:
        """Return Σ_n Σ_r g[n, r]², elementwise, for rows g[n, r] of Lᵀ J with H = L Lᵀ."""
        total = self._zeros(1)
        for engines in self._engines(output):
            for names in self.layers.groups:
                found = [_squares(engine.parts(names), names, self.chunk_bytes) for engine in engines if engine.counts]
                self._add(found, names, 1, total, slice(None))
        return total.squeeze(1)

    @torch.no_grad()
    def log_likelihood(self, likelihood: Likelihood) -> Float[Tensor, ""]:
        """Return Σ over the data of log p(y | f), in nats. One forward pass."""
        exact, total = Exact(likelihood), self.model.theta.new_zeros(())
        for inputs, labels, counts in self._each_batch():
            f = self.model({}, inputs)
            total = total + exact.log_prob(f, labels).sum() * counts
        return self.shard.ranks.add_up(total)

    @torch.no_grad()
    def outputs_and_labels(self) -> tuple[Float[Tensor, "N C"], Tensor, Tensor | None]:
        """Return the outputs, the targets and the weights of the points of all ranks. One forward pass."""
        walked = [(self.model({}, inputs), labels, counts) for inputs, labels, counts in self._each_batch()]
        line_up = self.shard.ranks.line_up
        f = line_up(torch.cat([f[: len(f) * counts] for f, _, counts in walked]))
        y = line_up(torch.cat([labels.targets[: labels.num_points * counts] for _, labels, counts in walked]))
        w = [b.weights[: b.num_points * counts] for _, b, counts in walked if b.weights is not None]
        return f, y, line_up(torch.cat(w)) if w else None

    def _push(self, engines: Sequence[BatchEngine], block: Float[Tensor, "d K"]) -> list[Float[Tensor, "K n R"]]:
        """Return J V of each engine, layer by layer, some columns at a time."""
        pushed = [engine.zeros(block.shape[1]) for engine in engines]
        for names in self.layers.groups:
            for columns in self._panels(names, block.shape[1]):
                tangents = self.shards.gather(block[:, columns], names)
                for engine, total in zip(engines, pushed):
                    for part in engine.parts(names) if engine.counts else ():
                        total[columns] += part.push(tangents)
                del tangents  # before the next ones are gathered
        return pushed

    def _pull(
        self, engines: Sequence[BatchEngine], cotangents: Sequence[Float[Tensor, "K n R"]], total: Float[Tensor, "d K"]
    ) -> None:
        """Add Jᵀ u of all engines, and of all ranks, to this rank's rows."""
        for names in self.layers.groups:
            for columns in self._panels(names, total.shape[1]):
                found = [
                    {part.layer.names[local]: gradient}
                    for engine, u in zip(engines, cotangents)
                    for part in (engine.parts(names) if engine.counts else ())
                    for local, gradient in part.pull(u[columns]).items()
                ]
                self._add(found, names, len(range(total.shape[1])[columns]), total, columns)

    def _add(self, found: Sequence[Blocks], names: Sequence[str], k: int, total: Tensor, columns: slice) -> None:
        """Add blocks (K, *shape) of one layer, from all ranks, to this rank's rows."""
        whole = {}
        for name in names:
            parts = [blocks[name] for blocks in found if name in blocks]
            whole[name] = sum(parts[1:], parts[0]) if parts else total.new_zeros(k, *self.shards.shapes[name])
        self.shards.add_scattered(total[:, columns], whole)

    def _zeros(self, columns: int) -> Float[Tensor, "d k"]:
        return self.model.theta.new_zeros(columns, len(self.shards.own)).mT

    def _panels(self, names: Sequence[str], columns: int) -> list[slice]:
        size = sum(self.shards.shapes[name].numel() for name in names) * self.model.theta.element_size()
        width = max(1, PANEL_BYTES // size)
        return [slice(start, start + width) for start in range(0, columns, width)]


class BatchEngine:
    """J of one batch, or Lᵀ J, with the batch's labels; None for labels if the batch only serves the other ranks."""

    def __init__(self, labels: Batch | None, J: Layerwise) -> None:
        self.labels, self.J = labels, J

    @property
    def counts(self) -> bool:
        """Whether the points are this rank's own."""
        return self.labels is not None

    def parts(self, names: Sequence[str]) -> list[Any]:
        """Return the calls of the layers that hold these parameters."""
        return [part for part in self.J.parts if not set(names).isdisjoint(part.layer.names.values())]

    def zeros(self, columns: int) -> Float[Tensor, "K n R"]:
        """Return zero changes of all rows, for K columns."""
        return self.J.outputs.new_zeros(columns, len(self.J.outputs), self.J.num_columns)

    def weighed(self, u: Float[Tensor, "K n C"], output: OutputFisher) -> Float[Tensor, "K n C"]:
        """Return H u."""
        return u if self.labels is None else output.product(self.J.outputs, u, self.labels)


def _squares(parts: Sequence[Any], names: tuple[str, ...], chunk_bytes: int) -> Blocks:
    """Return Σ_n Σ_r g[n, r]² of one layer's rows, (1, *shape) by name."""
    if not any(isinstance(part, Rows) for part in parts):
        found = squares_of(Group(names, tuple(parts)), chunk_bytes)
        return {name: block.unsqueeze(0) for name, block in found.items()}
    total: Blocks = {}
    for part in parts:
        rows = part.named_rows() if isinstance(part, Rows) else part.rows(slice(None))
        for name, row in rows.items():
            total[name] = total[name] + row if name in total else row
    return {name: rows.flatten(0, 1).square().sum(0, keepdim=True) for name, rows in total.items()}
