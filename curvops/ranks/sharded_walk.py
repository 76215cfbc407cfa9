"""The walk over data if each rank holds its data, a slice of every parameter, and rows of every vector.

A product goes through the layers twice. For each layer, its part of the vectors is gathered, multiplied by J of this
rank's points, and freed; on the way back, the layer's part of Jᵀ u is summed over the ranks, and each keeps its slice.
So no rank ever holds more than one layer's part of K whole vectors. Passes through the model gather its parameters, so
all ranks make the same number of passes: a rank with fewer batches repeats its first point, which does not count.

No engine but layer rules can be used for a parameter here, since it would gather all parameters on a rank at once. So
a parameter that has no rule, or a wrong one, is rejected by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from curvops.ambient import SMALL_BYTES
from curvops.network.data.batches import Batch
from curvops.network.data.inputs import copy as copy_of
from curvops.network.data.inputs import take
from curvops.network.engines.layer_calls import Recording, never_ran, owners_of, record
from curvops.network.engines.layerwise import Layerwise, Rows
from curvops.network.engines.self_check import mismatches, path_of
from curvops.network.likelihoods.output_fisher import IDENTITY, OutputFisher, Root
from curvops.network.model.parameters import Blocks
from curvops.network.walks.layer_roots import Group, group_calls, unlike
from curvops.network.walks.row_squares import squares_of
from curvops.network.walks.walk import Walk
from curvops.ranks.shard import Shard, joined
from curvops.ranks.sharded_model import ShardedModel

KNOWN = "Linear, convolution, embedding and normalisation layers of torch, without hooks, each called by itself"


class ShardedWalk(Walk):
    """The walk over the data of all ranks with the layers of a sharded model.

    Vectors are this rank's rows (d, K) of blocks; see `ShardedParameters`. All ranks make the same calls. The engines
    of the last root that was used are kept, if they fit into half of the memory budget. A walk `with_root` multiplies
    by Lᵀ J.
    """

    model: ShardedModel
    shard: Shard
    progress = None

    def __init__(self, layers: ShardedLayers, shard: Shard, memory_budget: int) -> None:
        self.layers, self.shard, self.model, self.memory_budget = layers, shard, layers.model, memory_budget
        local_counts = (0, 0) if shard.borrows else (len(shard), sum(shard.sizes))
        counts = shard.ranks.gather(local_counts)
        self._rounds, self._most_points = max(batches for batches, _ in counts), max(points for _, points in counts)
        self._own_batches = local_counts[0]
        first = next(iter(shard))
        self._spare = copy_of(take(first.inputs, slice(0, 1))), first.labels(torch.zeros(1, dtype=torch.long))
        self._root: OutputFisher | None = None
        self._kept: list[tuple[OutputFisher | None, ShardedJacobian]] = []  # at most one, shared by walks with roots

    def with_root(self, fisher: OutputFisher) -> ShardedWalk:
        """Return the walk that multiplies by Lᵀ J, with H = L Lᵀ, instead of J."""
        walk = copy(self)
        walk._root = fisher
        return walk

    def each(self, columns: int, root: OutputFisher | None = None) -> Iterator[tuple[Batch, Any]]:
        """Yield (labels, J) for all batches together, or for one after the other if they do not fit into the budget.

        All ranks yield equally often, unless they walk over outputs only.
        """
        root = self._root if root is None else root
        if not columns:
            with torch.no_grad():
                for index, (inputs, labels, counts) in enumerate(self._each_batch()):
                    f = self.model({}, inputs)
                    if counts or (self.shard.borrows and not index):
                        yield labels, SimpleNamespace(outputs=f)
            return
        if self._kept and self._kept[0][0] is root:
            J = self._kept[0][1]
            yield J.labels, J
            return
        rows = self.layers.num_outputs if root is None else root.num_columns(self.layers.num_outputs)
        fits = self._most_points * self.layers.bytes_a_point(rows) <= self.memory_budget // 2
        if fits:
            self._kept.clear()  # freed before others are built
        together: list[tuple[Batch, bool, Layerwise]] = []
        for inputs, labels, counts in self._each_batch():
            batch_root = IDENTITY if root is None else Root(root, labels)
            together.append((labels, counts, self.layers.build(inputs, self.chunk_bytes, batch_root)))
            if not fits:
                J = ShardedJacobian(self.layers, together)
                yield J.labels, J
                together = []
        if fits:
            J = ShardedJacobian(self.layers, together)
            self._kept.append((root, J))
            yield J.labels, J

    def total(
        self, term: Callable[[Any, Any], Tensor], columns: int, root: OutputFisher | None = None, own_part: bool = False
    ) -> Tensor:
        """Return Σ over batches of `term(labels, J)`: of vectors, this rank's rows, which J adds up over the ranks."""
        return self.own_sum(term, columns, root) if columns else super().total(term, columns, root)

    @torch.no_grad()
    def squared_rows(self) -> Float[Tensor, " d"]:
        """Return Σ_n Σ_r g[n, r]², elementwise, for the rows g[n, r] of J, or of Lᵀ J."""
        return self.total(lambda _, J: J.squared_rows(self.chunk_bytes), 1).squeeze(1)

    @property
    def chunk_bytes(self) -> int:
        """The bytes that sensitivities may take at a time."""
        return max(SMALL_BYTES, self.memory_budget // 8)

    def _each_batch(self) -> Iterator[tuple[Any, Batch, bool]]:
        """Yield (inputs, labels, whether they count), equally often on each rank."""
        batches, start = iter(self.shard), self.shard.start
        for i in range(self._rounds):
            if i >= self._own_batches:
                yield *self._spare, False
                continue
            batch = next(batches)
            yield batch.inputs, replace(batch, inputs=(), start=start), True
            start += batch.num_points
        if not self.shard.borrows:
            next(batches, None)  # detects more data


class ShardedJacobian:
    """J of some batches of each rank, or Lᵀ J, on rows of vectors: a push (d, K) -> (K, n, R), a pull back to (d, K).

    A pull adds up over the ranks. A batch that does not count serves the other ranks alone; a rank that has no other
    contributes nothing.
    """

    def __init__(self, layers: ShardedLayers, batches: Sequence[tuple[Batch, bool, Layerwise]]) -> None:
        self.layers, self.shards, theta = layers, layers.model.shards, layers.model.theta
        self.counts = any(counts for _, counts, _ in batches)
        used = [(labels, engine) for labels, counts, engine in batches if counts or not self.counts]
        used = used if self.counts else used[:1]
        self.labels, self.engines = joined([labels for labels, _ in used]), [engine for _, engine in used]
        self._zeros = theta.new_zeros

    @property
    def outputs(self) -> Float[Tensor, "n C"]:
        """The outputs f(θ, inputs)."""
        outputs = [engine.outputs for engine in self.engines]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    @property
    def points(self) -> slice:
        """The positions of the points among those of all ranks."""
        return slice(self.labels.start, self.labels.start + sum(self._sizes))

    @property
    def _sizes(self) -> list[int]:
        return [len(engine.outputs) for engine in self.engines]

    def push(self, block: Float[Tensor, "d K"]) -> Float[Tensor, "K n R"]:
        """Return J V, layer by layer, some columns at a time."""
        pushed = self._zeros(block.shape[1], sum(self._sizes), self.engines[0].num_columns)
        for names, columns in self._panels(block.shape[1]):
            tangents = self.shards.gather(block[:, columns], names)
            for jacobians, total in zip(self._layer_jacobians(names), pushed.split(self._sizes, 1)):
                for jacobian in jacobians:
                    total[columns] += jacobian.times(tangents)
            del tangents  # before the next ones are gathered
        return pushed

    def pull(self, cotangents: Float[Tensor, "K n R"]) -> Float[Tensor, "d K"]:
        """Return this rank's rows of Jᵀ U of all ranks."""
        K = len(cotangents)
        total = self._zeros(K, len(self.shards.own)).mT
        each_u = [u.contiguous() for u in cotangents.split(self._sizes, 1)]
        for names, columns in self._panels(K):
            pulled = [
                {jacobian.layer.names[local]: gradient}
                for jacobians, u in zip(self._layer_jacobians(names), each_u)
                for jacobian in jacobians
                for local, gradient in jacobian.pull(u[columns]).items()
            ]
            self._add(pulled, names, total[:, columns])
        return total

    def squared_rows(self, chunk_bytes: int) -> Float[Tensor, "d 1"]:
        """Return this rank's part of the elementwise sum of squares of the rows of all ranks."""
        total = self._zeros(1, len(self.shards.own)).mT
        for names in self.layers.groups:
            self._add(
                [_squares(jacobians, names, chunk_bytes) for jacobians in self._layer_jacobians(names) if jacobians],
                names,
                total,
            )
        return total

    def _layer_jacobians(self, names: Sequence[str]) -> list[list[Any]]:
        """Return, for each engine, the calls of the layers that hold these parameters."""
        wanted = set(names) if self.counts else set[str]()
        return [[jacobian for jacobian in J.parts if wanted & set(jacobian.layer.names.values())] for J in self.engines]

    def _panels(self, columns: int) -> Iterator[tuple[tuple[str, ...], slice]]:
        """Yield the parameters of each layer with the columns that are gathered at a time, of its part of K vectors."""
        itemsize = self.layers.model.theta.element_size()
        for names in self.layers.groups:
            width = max(1, SMALL_BYTES // (self.layers.model.selection.size_of(names) * itemsize))
            for start in range(0, columns, width):
                yield names, slice(start, min(columns, start + width))

    def _add(self, terms: Sequence[Blocks], names: Sequence[str], total: Float[Tensor, "d k"]) -> None:
        """Add blocks (K, *shape) of one layer, from all ranks, to this rank's rows."""
        whole = {}
        for name in names:
            blocks = [term[name] for term in terms if name in term]
            zero = total.shape[1], *self.shards.shapes[name]
            whole[name] = sum(blocks[1:], blocks[0]) if blocks else total.new_zeros(zero)
        self.shards.add_scattered(total, whole)


def _squares(jacobians: Sequence[Any], names: tuple[str, ...], chunk_bytes: int) -> Blocks:
    """Return Σ_n Σ_r g[n, r]² of one layer's rows, (1, *shape) by name."""
    if not any(isinstance(jacobian, Rows) for jacobian in jacobians):
        squares = squares_of(Group(names, tuple(jacobians)), chunk_bytes)
        return {name: block.unsqueeze(0) for name, block in squares.items()}
    total: Blocks = {}
    for jacobian in jacobians:
        rows = jacobian.named_rows() if isinstance(jacobian, Rows) else jacobian.rows(slice(None))
        for name, row in rows.items():
            total[name] = total[name] + row if name in total else row
    return {name: rows.flatten(0, 1).square().sum(0, keepdim=True) for name, rows in total.items()}


class ShardedLayers:
    """The layers that hold the selected parameters; they are proven to multiply by J at the first points.

    `groups` are the parameters of each layer, or of layers that share some, in the same order on all ranks.

    Raises ValueError, with the parameters' names, if a selected parameter has no layer rule or a wrong one.
    """

    def __init__(self, model: ShardedModel, few: Any) -> None:
        self.model, self._owners = model, owners_of(model)
        served = {name for names in self._owners.values() for name in names.values()}
        _refuse_if(set(model.selection.names) - served, "have no layer rule")
        self._paths = {self._prove(few)}
        self._paths.add(self._prove(take(few, slice(0, 1))))

    def _prove(self, few: Any) -> int:
        """Check the rules against autograd's gradients, some layers at a time; return the path of the pass."""
        edges: dict[str, GradientEdge] = {}

        def note(module: nn.Module, _: Any) -> None:  # while the module's parameters are whole
            edges.update((name, get_gradient_edge(getattr(module, k))) for k, name in self._owners[module].items())

        handles = [module.register_forward_pre_hook(note) for module in self._owners]
        try:
            with self.model.at_snapshot():
                recording = record(self.model, few, self._owners)
                outputs, calls, misfits = recording
                silent = never_ran(calls, self._owners)
                _refuse_if(silent, "belong to layers that do not run")
                _refuse_if(misfits, "belong to layers that run differently from their rules")
                engine = Layerwise(self.model, recording, None, SMALL_BYTES)
                reached = {name for jacobian in engine.parts for name in jacobian.layer.names.values()}
                _refuse_if(set(self.model.selection.names) - reached, "have no effect on the outputs")
                self.groups = tuple(group_calls(calls))
                self.num_outputs = outputs.shape[1]
                self._sizes = [(call.layer_input[:1].nbytes, call.layer.output[1:].numel()) for call in calls]
                bad: set[str] = set()
                for names in self._together():
                    some = copy(engine)
                    some.parts = [jacobian for jacobian in engine.parts if names & set(jacobian.layer.names.values())]
                    by_autograd = partial(_gradients, self.model, outputs, {name: edges[name] for name in names})
                    bad |= mismatches(some, by_autograd)[0]
        finally:
            for handle in handles:
                handle.remove()
        _refuse_if(bad, "have gradients that differ from those of their layers' rules")
        path = path_of(self.model, recording)
        if path is None:
            raise ValueError("the model moves points within a batch, which a sharded model must not do.")
        return path

    def _together(self) -> Iterator[set[str]]:
        """Yield the parameters of some layers at a time, together no larger than the largest group."""
        size_of = self.model.selection.size_of
        most, some = max(map(size_of, self.groups)), set[str]()
        for names in self.groups:
            if some and size_of(some | set(names)) > most:
                yield some
                some = set()
            some = some | set(names)
        yield some

    def bytes_a_point(self, columns: int) -> int:
        """Return the most bytes that an engine keeps for a point with this number of rows."""
        itemsize = self.model.theta.element_size()
        return sum(input_bytes + columns * output * itemsize for input_bytes, output in self._sizes)

    def build(self, inputs: Any, chunk_bytes: int, root: Root = IDENTITY) -> Layerwise:
        """Return J of some points, or Lᵀ J. All ranks call it together; a rank whose layers run differently raises."""
        with self.model.at_snapshot():
            recording: Recording = record(self.model, inputs, self._owners)
            if recording[2] or path_of(self.model, recording) not in self._paths:
                raise RuntimeError(unlike(recording[2] or self.model.selection.names))
            return Layerwise(self.model, recording, None, chunk_bytes, root)


def _gradients(
    model: ShardedModel, outputs: Tensor, edges: Mapping[str, GradientEdge], cotangents: Float[Tensor, "1 n C"]
) -> Blocks:
    """Return Jᵀ u of a recorded pass by autograd, for a few parameters, of this rank's points alone."""
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    with model.differentiating(), model.holding({}):
        gradients = torch.autograd.grad(outputs, [*edges.values()], cotangents[0], **options)
    zero = outputs.new_zeros(())
    return {
        name: (zero.expand(model.shards.shapes[name]) if gradient is None else gradient.detach()).unsqueeze(0)
        for name, gradient in zip(edges, gradients)
    }


def _refuse_if(names: Collection[str], why: str) -> None:
    if names:
        raise ValueError(
            f"the parameters {sorted(names)} {why}. If parameters are sharded over ranks, only layer rules can be "
            f"used ({KNOWN}): leave these parameters out of parameters=, or linearise an unsharded copy of the model."
        )
