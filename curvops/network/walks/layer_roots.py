"""Rows g[n, r] = J_nᵀ s[n, r] of a square root of the curvature, layer by layer and in chunks, never all at once.

One forward pass, and a backward pass for each column r, give every layer's sensitivity δ. Operators sum what they need
from these (squares, second moments, Kronecker factors) chunk by chunk. The rows of parameters without a layer rule take
a pass for each point alone, which is right for any model, but slow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.network.data.batches import Batch
from curvops.network.data.inputs import num_points, take
from curvops.network.engines.autodiff import point_rows
from curvops.network.engines.engine import Engines
from curvops.network.engines.layer_calls import (
    Call,
    Layer,
    bytes_of_one,
    positions_of_rows,
    sensitivities,
)
from curvops.network.engines.layerwise import Factors, Features, at_once, push_some
from curvops.network.likelihoods.likelihood import HessianParts
from curvops.network.likelihoods.output_fisher import OutputFisher
from curvops.network.model.model import Model
from curvops.network.model.parameters import Blocks

Score = Callable[[Float[Tensor, "n C"], Batch], None]


def _push(factors: Factors, tangents: Mapping[str, Tensor]) -> Float[Tensor, "K n r"]:
    """Return the rows of one call times K tangents by name, in whichever way takes fewer multiply-adds."""
    layer, delta = factors.layer, factors.delta
    block = {local: tangents[name] for local, name in layer.names.items()}
    (n, count), columns = delta.shape[:2], len(next(iter(block.values())))
    outputs, size = delta[0, 0].numel(), layer.size * delta.element_size()
    by_rows = count * (layer.multiply_adds + layer.size * columns)
    if by_rows < columns * (layer.multiply_adds + count * outputs):
        step = min(n, at_once(count * size, delta.is_cuda))
        rows = (factors.rows(slice(start, start + step)) for start in range(0, n, step))
        return torch.cat([_push_rows(some, tangents) for some in rows], 1)
    # A layer's part of a vector is scattered over it and has to be copied: some vectors at a time.
    width = at_once(max(size, factors.work * delta.element_size()), delta.is_cuda)
    return factors.push(block) if columns <= width else push_some(factors.push, block, width)


def _push_rows(rows: Blocks, tangents: Mapping[str, Tensor]) -> Float[Tensor, "K m r"]:
    """Push through rows (m, r, *shape) parameter by parameter, since rows side by side would be a copy."""
    pushed = [tangents[name].flatten(1) @ row.flatten(2).flatten(0, 1).mT for name, row in rows.items()]
    return torch.stack(pushed).sum(0).unflatten(1, next(iter(rows.values())).shape[:2])


def _concatenated(calls: Sequence[Factors]) -> Factors:
    inside = [factors.inside for factors in calls if factors.inside is not None]
    inputs = torch.cat([factors.layer_input for factors in calls])
    delta = torch.cat([factors.delta for factors in calls])
    return Factors(calls[0].layer, inputs, delta, inside=torch.cat(inside) if inside else None)


@dataclass(frozen=True, eq=False)
class Group:
    """Rows for the parameters of one layer, or of layers that share weights.

    `first` says whether these are the first columns of their points; `start` is the position of the first point in its
    batch; `positions` (n,) or (n, T) says which points, or which positions of a sequence, count (None if all do);
    `weights` are those of the batch. With `hessian`, a last layer has its H (m, p) of all m positions in place of the
    columns of a root: δ (n, 1, *out) is only the diagonal of H.
    """

    names: tuple[str, ...]
    parts: tuple[Factors, ...]
    first: bool = True
    rows_by_name: Blocks = field(default_factory=dict)
    start: int = 0
    positions: Tensor | None = None
    weights: Tensor | None = None
    hessian: HessianParts | None = None

    @property
    def num_points(self) -> int:
        """The number n of points."""
        return self._sample.shape[0]

    @property
    def num_columns(self) -> int:
        """The number r of columns of each point."""
        return self._sample.shape[1]

    @property
    def num_rows(self) -> int:
        """The number n·r of rows."""
        return self._sample.shape[:2].numel()

    @property
    def first_row(self) -> int:
        """The position of the first row among those of the batch."""
        return self.start * self.num_columns

    @property
    def _sample(self) -> Tensor:
        return self.parts[0].delta if self.parts else next(iter(self.rows_by_name.values()))

    @property
    def nbytes(self) -> int:
        """The bytes that these rows take in memory."""
        return sum(factors.nbytes for factors in self.parts) + sum(rows.nbytes for rows in self.rows_by_name.values())

    def is_like(self, other: Group) -> bool:
        """Return whether rows of other points belong to the same layers and have the same sizes."""
        return self._sizes == other._sizes

    @property
    def _sizes(self) -> tuple[Any, ...]:
        sizes = [(factors.layer.path, factors.layer_input.shape[1:], factors.delta.shape[1:]) for factors in self.parts]
        return self.names, sizes, {name: rows.shape[1:] for name, rows in self.rows_by_name.items()}

    def take(self, points: slice) -> Group:
        """Return the rows of some of the points."""
        parts = tuple(factors.at(points) for factors in self.parts)
        rows_by_name = {name: rows[points] for name, rows in self.rows_by_name.items()}
        start = self.start + points.indices(self.num_points)[0]
        return Group(self.names, parts, self.first, rows_by_name, start)

    def to(self, dtype: torch.dtype) -> Group:
        """Return the same rows from a and δ in another dtype, in which their products then add up."""
        if self._sample.dtype == dtype:
            return self
        parts = tuple(factors.to(dtype) for factors in self.parts)
        return replace(self, parts=parts, rows_by_name={name: v.to(dtype) for name, v in self.rows_by_name.items()})

    def of(self, names: Sequence[str]) -> Group:
        """Return the rows for some of the parameters."""
        if len(names) == len(self.names):
            return self
        layer_names = (
            {local: name for local, name in factors.layer.names.items() if name in names} for factors in self.parts
        )
        parts = [
            replace(factors, layer=replace(factors.layer, names=n)) for factors, n in zip(self.parts, layer_names) if n
        ]
        rows_by_name = {name: rows for name, rows in self.rows_by_name.items() if name in names}
        return replace(self, names=tuple(names), parts=tuple(parts), rows_by_name=rows_by_name)

    @cached_property
    def layer(self) -> Layer | None:
        """The layer to which these rows belong, if it is only one and has an outer-product structure."""
        paths = {factors.layer.path for factors in self.parts}
        return self.parts[0].layer if len(paths) == 1 and not self.rows_by_name else None

    def lefts(self) -> list[Tensor] | None:
        """Return the left side of each call with gradient Σ_t left ⊗ right (see `Rule.left`), views of δ, or None."""
        if self.layer is None:
            return None
        lefts = []
        for factors in self.parts:
            if (left := factors.left()) is None:
                return None
            lefts.append(left)
        return lefts

    def matrices(self) -> list[tuple[Tensor, Tensor]] | None:
        """Return (left, right) of each call; None if there is no left side."""
        lefts = self.lefts()
        return None if lefts is None else [(left, factors.right()) for left, factors in zip(lefts, self.parts)]

    def rows(self, points: slice = slice(None)) -> Blocks:
        """Return the gradients by parameter name, (n, r, *shape); calls that share weights add up."""
        total = {name: rows[points] for name, rows in self.rows_by_name.items()}
        for factors in self.parts:
            for name, rows in factors.rows(points).items():
                total[name] = total[name] + rows if name in total else rows
        return total

    def push(self, tangents: Mapping[str, Tensor]) -> Float[Tensor, "K n r"]:
        """Return the rows times K tangents by name, (K, *shape) each."""
        pushed = [_push(factors, tangents) for factors in self.parts]
        for name, rows in self.rows_by_name.items():  # a parameter may be 0-d
            V = tangents[name].reshape(len(tangents[name]), -1)
            pushed.append((rows.reshape(*rows.shape[:2], -1) @ V.mT).movedim(2, 0))
        return torch.stack(pushed).sum(0) if len(pushed) > 1 else pushed[0]

    @classmethod
    def concatenate(cls, groups: Sequence[Group]) -> Group:
        """Return the rows of consecutive points as one group; all must be like the first."""
        first = groups[0]
        if len(groups) == 1:
            return first
        if not all(group.is_like(first) for group in groups):
            groups = _alike(groups)
            first = groups[0]
        rows_by_name = {name: torch.cat([group.rows_by_name[name] for group in groups]) for name in first.rows_by_name}
        parts = tuple(_concatenated(calls) for calls in zip(*(group.parts for group in groups)))
        return cls(first.names, parts, first.first, rows_by_name)

    @classmethod
    def joined(cls, groups: Iterable[Group]) -> list[Group]:
        """Return one group per layer from groups of consecutive points."""
        layers: dict[tuple[str, ...], list[Group]] = {}
        for group in groups:
            layers.setdefault(group.names, []).append(group)
        return [cls.concatenate(layer_groups) for layer_groups in layers.values()]

    def pieces(self, most_bytes: int, first: int = 0, together: int = 1) -> Iterator[Blocks]:
        """Yield `rows` of some points at a time from a point on: at least `together`, otherwise up to `most_bytes`."""
        size = sum(factors.layer.size for factors in self.parts[:1]) or sum(
            v[0, 0].numel() for v in self.rows_by_name.values()
        )
        step = most_bytes // max(1, size * self.num_columns * self._sample.element_size())
        step = max(1, step // together) * together
        for start in range(first, self.num_points, step):
            yield self.rows(slice(start, start + step))

    def side_by_side(self, rows: Blocks) -> Float[Tensor, "n r p"]:
        """Return rows of the group's tensors, some of which may be 0-d, next to one another."""
        return torch.cat([rows[name].reshape(*rows[name].shape[:2], -1) for name in self.names], 2)

    def put_columns(self, matrix: Float[Tensor, "r S"], positions: Mapping[str, Tensor]) -> None:
        """Put the rows of some weights into a matrix of zeros.

        `positions` are the columns of each tensor's entries, negative for an entry that has none.
        """
        here = matrix[self.first_row : self.first_row + self.num_rows]
        for columns, rows in _columns(self, positions):
            here.index_copy_(1, columns.to(here.device), rows.flatten(0, 1).to(here.dtype))


def _alike(groups: Sequence[Group]) -> Sequence[Group]:
    """Return rows of one layer with equal sizes: tables of ragged rows of one width, or else the rows themselves."""
    if len({len(group.parts) for group in groups}) == 1:
        calls = zip(*(group.parts for group in groups))
        most = [max((p.inside.shape[1] for p in factors if p.inside is not None), default=0) for factors in calls]
        wide = [replace(g, parts=tuple(p.widened(width) for p, width in zip(g.parts, most))) for g in groups]
        if all(group.is_like(wide[0]) for group in wide):
            return wide
    return [replace(group, parts=(), rows_by_name=group.rows()) for group in groups]


def groups_of(features: Features, outputs: int) -> list[Group]:
    """Return the rows of the last layer, whose δ is one identity for all points.

    If a position of the model has as many `outputs` as the layer, each position is a point. If positions are flattened
    into the outputs of one point, with covariances between them, the point keeps them together.
    """
    layer, a, outputs_each = features.layer, features.layer_input, features.outputs_each
    if outputs_each == outputs:
        a, delta = a.flatten(0, -2), torch.eye(outputs_each, dtype=a.dtype, device=a.device)
    else:
        delta = torch.eye(features.outputs, dtype=a.dtype, device=a.device).unflatten(1, layer.output[1:])
    factors = Factors(layer, a, delta.expand(len(a), *delta.shape))
    return [Group(tuple(sorted(layer.names.values())), (factors,))]


def each_group(
    engines: Engines,
    batch: Batch,
    inputs: Any,
    fisher: OutputFisher,
    others: Sequence[str],
    chunk: int,
    score: Score | None = None,
    advance: Callable[[int], None] | None = None,
    sums: bool = False,
) -> Iterator[Group]:
    """Yield all groups of a batch, some columns at a time; `chunk` bounds the bytes of δ (at least one column).

    With `sums`, a last layer comes with H itself, if its parts are known, in place of columns (`Group.hessian`).
    `score` is called with the outputs and the batch, `advance` with the number of rows, whenever some are done. If a
    layer runs differently for this many points than for those that were checked, half of them are computed at a time:
    the row of a point does not depend on the others.
    """
    model, n = engines.model, num_points(inputs)
    outputs, calls, misfits = engines.record(inputs)
    if misfits:
        if n == 1:
            raise RuntimeError(unlike(misfits))
        del outputs, calls
        for points in (slice(0, n // 2), slice(n // 2, n)):
            half = batch.labels(points), take(inputs, points)
            for group in each_group(engines, *half, fisher, others, chunk, score, advance, sums):
                yield replace(group, start=group.start + points.start)
        return
    f = outputs.detach()
    if score is not None:
        score(f, batch)
    positions, weights = fisher.counted(batch), fisher.weights_of_points(batch)
    if positions is not None and bool(positions.all()):
        positions = None
    columns, last = fisher.num_columns(f.shape[1]), _last_alone(calls) if sums else None
    H = None if last is None else _hessian_of(last.layer, fisher, f, batch)
    calls = calls if H is None else [call for call in calls if call is not last]
    step = max(1, chunk // max(1, bytes_of_one(calls, f.element_size()))) if calls or others else columns
    for start in range(0, columns, step):
        stop = min(columns, start + step)
        if calls or others:
            with torch.no_grad():
                cotangents = fisher.columns(f, batch, start, stop)
            deltas = sensitivities(model, outputs, calls, cotangents)
            tables = None
            if start == 0 and engines.ragged and (by := _by_position(positions, weights)):
                tables = positions_of_rows(model, outputs, calls, by)
            yield from groups_of_calls(calls, deltas, start == 0, positions, weights, tables)
            if engines.ragged and not sums:
                yield from _without_rows(engines, calls, deltas, cotangents, start == 0)
            if others:
                yield from _others(engines, inputs, f, cotangents, others, start == 0, chunk)
            del deltas, cotangents  # before the next ones are made
        if advance is not None:
            advance((stop - start) * n)
    if last is not None and H is not None:
        factors = Factors(last.layer, last.layer_input, H.diagonal.to(f.dtype).reshape(n, 1, *last.layer.output[1:]))
        layer_names = tuple(sorted(last.layer.names.values()))
        yield Group(layer_names, (factors,), positions=positions, weights=weights, hessian=H)


def _by_position(*values: Tensor | None) -> int:
    """Return the number of positions of a mask or weights (n, T); 0 if none of them differs between positions."""
    return max(0 if value is None or value.ndim == 1 else value.shape[1] for value in values)


def _without_rows(
    engines: Engines,
    calls: Sequence[Call],
    deltas: Sequence[Tensor | None],
    cotangents: Float[Tensor, "r n C"],
    first: bool,
) -> Iterator[Group]:
    """Yield rows of zeros for layers of ragged rows that have none at these points, as an expert has for some."""
    ran = {name for call, delta in zip(calls, deltas) if delta is not None for name in call.layer.names.values()}
    model, shape = engines.model, (cotangents.shape[1], cotangents.shape[0])
    for layer in engines.plan.layers:
        layer_names = tuple(sorted(layer.names.values()))
        if layer.is_ragged and ran.isdisjoint(layer_names):
            zeros = {name: cotangents.new_zeros(()).expand(*shape, *model.values[name].shape) for name in layer_names}
            yield Group(layer_names, (), first, zeros)
            ran.update(layer_names)


def _last_alone(calls: Sequence[Call]) -> Call | None:
    """Return the call of the last layer, if its weight is selected and no other call shares its parameters."""
    alone = (calls[members[0]] for members in group_calls(calls).values() if len(members) == 1)
    return next((call for call in alone if call.layer.is_last and "weight" in call.layer.names), None)


def _hessian_of(layer: Layer, fisher: OutputFisher, f: Float[Tensor, "n C"], batch: Batch) -> HessianParts | None:
    """Return H at all positions of the last layer, if its parts are known and couple no two positions."""
    with torch.no_grad():
        H, width = fisher.hessian_parts(f, batch), layer.output[-1]
    if H is None or not (H.column is None or H.column.shape[1] == width):
        return None
    return HessianParts(H.diagonal.double().reshape(-1, width), H.column)


def unlike(names: Iterable[str]) -> str:
    """Return the message for layers that run differently from the first points."""
    return (
        f"the layers of {sorted(names)} did not run as they did on the first points: call them in the same way for all "
        "points (on rows of one point each, in one dtype; their weights nowhere else), or leave "
        "their parameters out of the selection."
    )


def groups_of_calls(
    calls: Sequence[Call],
    deltas: Sequence[Tensor | None],
    first: bool = True,
    positions: Tensor | None = None,
    weights: Tensor | None = None,
    tables: Sequence[Tensor | None] | None = None,
) -> Iterator[Group]:
    """Yield the rows of calls by the parameters that they share, without calls whose branch misses the outputs.

    `tables` are the positions of ragged rows, if these are needed.
    """
    for names, members in group_calls(calls).items():
        some = [(calls[i], deltas[i], None if tables is None else tables[i]) for i in members]
        factors = [
            Factors(call.layer, call.layer_input, delta, None, None if call.rows is None else call.rows.inside, of_rows)
            for call, delta, of_rows in some
            if delta is not None
        ]
        if factors:
            yield Group(names, tuple(factors), first, positions=positions, weights=weights)


def group_calls(calls: Sequence[Call]) -> Mapping[tuple[str, ...], list[int]]:
    """Return the indices of calls grouped by the parameters that they share, directly or through one another."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, call in enumerate(calls):
        names, members = set(call.layer.names.values()), [i]
        for other in tuple(groups):
            if names.intersection(other):
                names, members = names.union(other), groups.pop(other) + members
        groups[tuple(sorted(names))] = members
    return groups


def _others(
    engines: Engines,
    inputs: Any,
    outputs: Float[Tensor, "n C"],
    cotangents: Float[Tensor, "r n C"],
    names: Sequence[str],
    first: bool,
    chunk: int,
) -> Iterator[Group]:
    """Yield rows of the parameters without a layer rule, a group for each module that owns some."""
    model = engines.model
    size = sum(model.values[name].numel() for name in names) * len(cotangents) * cotangents.element_size()
    step, total = max(1, chunk // max(1, size)), num_points(inputs)
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names)
    together = min(engines.plan.together, step * len(cotangents))
    each = point_rows(model, inputs, names, cotangents, together, outputs=outputs)
    for start in range(0, total, step):
        some = [*islice(each, step)]
        rows = {name: torch.stack([point[name] for point in some]) for name in names}
        for owner in owners:
            owner_rows = {name: row for name, row in rows.items() if name.rpartition(".")[0] == owner}
            yield Group(tuple(owner_rows), (), first, owner_rows, start)


class JacobianRows(ABC):
    """The rows of J at some points, by layer: of a walk over batches, or of a recorded pass with its graph."""

    model: Model
    chunk_bytes: int
    """The bytes that rows may take at a time."""

    @abstractmethod
    def features(self) -> list[Features] | None:
        """Return the last layer's inputs, batch by batch, if only that layer is selected."""

    @abstractmethod
    def jacobian_rows(self) -> Iterable[tuple[int, int, list[Group]]]:
        """Yield (first row, how many, groups) of some points at a time."""

    def groups_together(self, rows: int) -> Iterator[tuple[int, list[Group]]]:
        """Yield (first row, groups) so that each run of `rows` consecutive rows is in one piece.

        Points at the end of a piece whose rows are incomplete are moved to the next piece.
        """
        rest: list[Group] = []
        for first, _, pieces in self.jacobian_rows():
            groups = Group.joined(pieces)
            del pieces
            if rest:
                first, groups = (
                    first - rest[0].num_rows,
                    [Group.concatenate(pair) for pair in zip(rest, groups, strict=True)],
                )
            num_points = groups[0].num_points if groups else 0
            over = num_points % max(1, rows // groups[0].num_columns) if groups else 0
            rest = [group.take(slice(num_points - over, None)) for group in groups] if over else []
            if not over or over < num_points:
                yield first, [group.take(slice(num_points - over)) for group in groups] if over else groups
            del groups  # before the next ones are made

    def selected_rows(self) -> Iterator[Float[Tensor, "r D"]]:
        """Yield the rows of J as a matrix, some points at a time."""
        for _, count, groups in self.jacobian_rows():
            yield self.as_matrix(count, groups)
            del groups  # before the next ones are made

    def as_matrix(self, count: int, groups: Iterable[Group]) -> Float[Tensor, "r D"]:
        """Return `count` rows, given by layer, as a matrix; for a subnetwork only its S columns."""
        selection, theta = self.model.selection, self.model.theta
        if selection.index is not None:
            matrix, positions = theta.new_zeros(count, len(theta)), selection.positions()
            for group in groups:
                group.put_columns(matrix, positions)
            return matrix
        blocks: dict[str, list[Tensor]] = {name: [] for name in selection.names}
        for group in groups:
            for name, rows in group.rows().items():
                blocks[name].append(rows.reshape(group.num_rows, -1))
        zero = theta.new_zeros(())
        sizes = zip(blocks.values(), selection.sizes)
        return torch.cat([torch.cat(some) if some else zero.expand(count, size) for some, size in sizes], 1)


def _columns(group: Group, positions: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Float[Tensor, "n r s"]]]:
    """Yield some columns of the group's rows, and their positions in the vector.

    A few entries of a layer's matrix are computed as products of its two sides, so that no others are formed.
    """
    matrices = group.matrices()
    if matrices is not None and all(right.is_floating_point() for _, right in matrices):
        assert group.layer is not None
        places = group.layer.to_matrix(positions)
        g, i, j = (places >= 0).nonzero().unbind(1)
        if len(g) * sum(right.shape[2] for _, right in matrices) <= places.numel():
            device = matrices[0][0].device
            index, first, second = (indices.to(device) for indices in (g, i, j))
            pairs = ((left[:, :, index, :, first], right[:, index, :, second]) for left, right in matrices)
            yield places[g, i, j], torch.stack([(a * b.unsqueeze(2)).sum(-1) for a, b in pairs]).sum(0).movedim(0, -1)
            return
    for name, rows in group.rows().items():
        places = positions[name].flatten()
        inside = (places >= 0).nonzero().squeeze(1)
        yield places[inside], rows.reshape(*rows.shape[:2], -1)[..., inside.to(rows.device)]
