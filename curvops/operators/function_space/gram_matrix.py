"""The Gram matrix J(x) A⁻¹ J(x')ᵀ of the rows of two Jacobians, layer by layer and some points at a time.

A weight with inputs a_t and sensitivities δ_t at positions t has the rows Σ_t δ_t ⊗ a_t. Two of them have the inner
product Σ_tu (δ_t·δ'_u)(a_t·a'_u), which takes less work than the rows do if positions are few and the layer is large.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checkpoint import NOTHING, Checkpoint
from curvops.linalg.core.symmetry import mirror
from curvops.network import Group, Layer, Passes, Plan
from curvops.operators.function_space.row_products import Sides, add_row_products, matrix_of_scales
from curvops.operators.linearized.jacobian import Jacobian

BLOCK_BYTES = 16 * 2**20
"""Bytes, on a CPU, of a block (δ δ'ᵀ) over all pairs of positions; three passes go over it."""
PASSES = 8
"""Cost of these passes per entry of the block, in multiply-adds."""

Piece = tuple[int, Group]
"""The number of the first row, and the rows of one layer from that row on."""


def gram_matrix(left: Jacobian, right: Jacobian, prior: Tensor, kept: Checkpoint = NOTHING) -> Float[Tensor, "nC mC"]:
    """Return J(x) A⁻¹ J(x')ᵀ, or its upper half if x is x'.

    x' is walked over once for each group of rows at x that takes 3/8 of the available memory.

    `kept` saves the sums of these walks and how far they have come; with as much memory, a resumed run gives the same
    bits.
    """
    return gram_terms(left, right, prior, dict.fromkeys(left.passes.model.selection.names, 0), kept).squeeze(0)


@torch.no_grad()
def gram_terms(
    left: Jacobian, right: Jacobian, prior: Tensor, term_of: Mapping[str, int], kept: Checkpoint = NOTHING
) -> Float[Tensor, "T nC mC"]:
    """Return the terms of `gram_matrix`, J_t(x) A⁻¹ J_t(x')ᵀ, one for each set of parameters (numbered from 0).

    If the inputs x belong to several ranks, each computes the rows of its own, and nothing is saved.
    """
    if left.is_sharded:
        own = gram_terms(left.apart(), right.gathered(), prior, term_of)
        lined_up = left.passes.line_up([own], 1)
        return mirror(lined_up) if left.passes is right.passes else lined_up
    right = right.gathered()
    passes, begin, most_bytes = left.passes, 0, max(0, left.passes.memory.room())
    result = left.theta.new_zeros(1 + max(term_of.values()), left.shape[-2], right.shape[-2])
    if kept.state is not None and _begins_a_piece(passes, kept.state["rows"], left.shape[-2]):
        begin, most_bytes = kept.state["rows"], min(kept.state["bytes"], most_bytes)
        result = kept.state["sums"].view_as(result)
    scales, same = _scales(passes.model.selection.positions(), prior), passes is right.passes

    def add(piece: Piece, other: Piece) -> None:
        (row, group), (column, partner) = piece, other
        if group.names != partner.names or (same and row > column):
            return
        for term in {term_of[name] for name in group.names}:
            target = result[term, row : row + group.num_rows, column : column + partner.num_rows]
            own = [name for name in group.names if term_of[name] == term]
            first = group.of(own)
            _add(target, first, first if group is partner else partner.of(own), scales, most_bytes // 8)

    with passes.memory.holding(most_bytes):
        for end, panel in _panels(passes.jacobian_rows(begin), 3 * most_bytes // 8):
            for piece, other in product(panel, panel if same else ()):
                add(piece, other)
            for _, others in _panels(right.passes.jacobian_rows(end if same else 0), most_bytes // 4):
                for piece, other in product(panel, others):
                    add(piece, other)
            kept.save(partial(dict, rows=end, sums=result, bytes=most_bytes))
    return mirror(result) if same else result


def _begins_a_piece(passes: Passes, row: int, total: int) -> bool:
    """Return whether this row begins a piece of the walk; if not, batches or chunks have been cut differently."""
    return next((start for start, _, _ in passes.jacobian_rows(row)), total) == row


def _panels(walk: Iterable[tuple[int, int, list[Group]]], most_bytes: int) -> Iterator[tuple[int, list[Piece]]]:
    """Yield (the row after them, pieces that together take at most `most_bytes`), with at least one piece."""
    panel: list[Piece] = []
    held = end = 0
    for start, count, groups in walk:
        size = sum(group.nbytes for group in groups)
        if panel and held + size > most_bytes:
            yield end, _joined(panel)
            held = 0
        panel += [(start + group.first_row, group) for group in groups]
        held, end = held + size, start + count
    if panel:
        yield end, _joined(panel)


def _joined(panel: list[Piece]) -> list[Piece]:
    """Empty the panel; return its pieces with consecutive ones joined, which makes larger matrix products."""
    runs: list[list[Piece]] = []
    for row, group in panel:
        before = [run for run in runs if run[-1][0] + run[-1][1].num_rows == row and run[-1][1].is_like(group)]
        if before:
            before[0].append((row, group))
        else:
            runs.append([(row, group)])
    panel.clear()
    found = []
    while runs:
        run = runs.pop()  # frees its parts
        found.append((run[0][0], Group.concatenate([group for _, group in run])))
    return found


def _scales(positions: dict[str, Tensor], prior: Tensor) -> dict[str, Tensor]:
    """Return A⁻¹ by name: 0-d if constant on a tensor, otherwise of its shape, with zeros outside the selection."""
    found = {}
    for name, index in positions.items():
        inside = index >= 0
        if prior.ndim == 0 and bool(inside.all()):
            found[name] = 1 / prior
            continue
        values = prior.expand(int(index.max()) + 1) if prior.ndim == 0 else prior
        scale = torch.where(inside.to(prior.device), 1 / values[index.clamp_min(0).to(prior.device)], 0)
        constant = bool((scale == scale.flatten()[0]).all())
        found[name] = scale.flatten()[0] if constant else scale
    return found


def _add(target: Tensor, group: Group, partner: Group, scales: Mapping[str, Tensor], most_bytes: int) -> None:
    """Add the inner products of one layer's rows; for a group with itself, at least those on and above the diagonal."""
    layer, one, other = group.layer, _sides(group), _sides(partner)
    if layer is None or one is None or other is None:
        _add_by_all_rows(target, group, partner, scales, most_bytes, group is partner)
        return
    scale = matrix_of_scales(layer, scales)
    if all(scales[name].ndim == 0 for name in group.names) and pays_by_positions(group, partner):
        _add_by_positions(target, sides_of(group), sides_of(partner), scale[0, 0], most_bytes, group is partner)
    else:
        add_row_products(target, one, one if group is partner else other, scale, most_bytes)


def _sides(group: Group) -> Sides | None:
    left = _left(group)
    part = group.parts[0] if left is not None else None
    return (
        None if left is None or part is None else Sides(left, lambda points: part.at(points).right(), part.layer.width)
    )


def pays_by_positions(group: Group, partner: Group) -> bool:
    """Return whether inner products by pairs of positions are available and take less work than by rows."""
    left, other = _left(group), _left(partner)
    if left is None or other is None:
        return False
    (_, r, _, t, p), (_, s, _, u, _) = left.shape, other.shape
    q = group.parts[0].layer.size // (left.shape[2] * p)
    return t * u == 1 or _by_positions(t, u, p, q, r * s) < _by_rows(p, q, r * s)


def _by_positions(t: int, u: int, p: int, q: int, columns: int) -> int:
    """Return the multiply-adds for a pair of points by pairs of positions."""
    return t * u * (q + columns * (p + PASSES))


def _by_rows(p: int, q: int, columns: int) -> int:
    """Return the multiply-adds for a pair of points by rows."""
    return columns * p * q


def gram_cost(plan: Plan, points: int) -> float:
    """Return roughly how many gradients of the data J Jᵀ costs under a constant prior.

    The result is ∞ if a parameter has no layer rule.
    """
    if plan.others or not plan.forward:
        return math.inf
    columns = plan.num_outputs
    pairs = sum(_least(layer, columns**2) for layer in plan.layers)
    return (1 + 2 * columns) / 3 + points * pairs / (6 * plan.forward)


def _least(layer: Layer, columns: int) -> int:
    """Return the fewest multiply-adds for a pair of points at one layer."""
    by_rows = _by_rows(layer.size, 1, columns)
    positions = layer.multiply_adds // layer.shape_of("weight").numel() if "weight" in layer.names else 0
    if not positions:
        return by_rows
    height = layer.height
    return min(by_rows, _by_positions(positions, positions, height, layer.size // height, columns))


def _left(group: Group) -> Tensor | None:
    """Return δ (n, r, g, t, p) of a layer that is applied once, to numbers."""
    if len(group.parts) != 1 or not group.parts[0].kept.is_floating_point():
        return None
    return group.parts[0].left()


def has_sides(group: Group) -> bool:
    """Return whether the rows are sums of outer products, for a layer that is applied once, to numbers."""
    return _left(group) is not None


def sides_of(group: Group) -> tuple[Tensor, Tensor]:
    """Return δ (n, r, g, t, p) and the inputs (n, g, t, q) of a layer that is applied once."""
    left = _left(group)
    assert left is not None
    return left, group.parts[0].right()


def _add_by_all_rows(
    target: Float[Tensor, "nr ms"],
    group: Group,
    partner: Group,
    scales: Mapping[str, Tensor],
    most_bytes: int,
    half: bool,
) -> None:
    start = 0
    for rows in group.pieces(most_bytes):
        weighted = {name: flat_rows(row * scales[name]) for name, row in rows.items()}
        height, column = len(next(iter(weighted.values()))), start if half else 0
        for others in partner.pieces(most_bytes, column // partner.num_columns):
            for name, row in weighted.items():
                against = flat_rows(others[name])
                target[start : start + height, column : column + len(against)].addmm_(row, against.mT)
            column += len(against)
        start += height


def flat_rows(rows: Tensor) -> Float[Tensor, "nr p"]:
    """Return the rows of all points and columns, each as a vector."""
    return rows.reshape(rows.shape[0] * rows.shape[1], -1)


def _add_by_positions(
    target: Float[Tensor, "nr ms"],
    first: tuple[Tensor, Tensor],
    second: tuple[Tensor, Tensor],
    scale: Float[Tensor, " q"],
    most_bytes: int,
    half: bool,
) -> None:
    """Add to target Σ over pairs of positions of (a a'ᵀ) ∘ (δ δ'ᵀ), group by group and some points at a time."""
    for (left, a), (other, b) in zip(_by_group(*first), _by_group(*second)):
        (n, r, t, _), (m, s, u, _) = left.shape, other.shape
        single = t * u == 1
        limit = most_bytes if single or left.is_cuda else min(most_bytes, BLOCK_BYTES)
        pairs = max(1, limit // max(1, r * t * s * u * left.element_size()))
        step = max(1, min(n, math.isqrt(pairs)))
        for start in range(0, n, step):
            deltas = left[start : start + step].flatten(0, 2)
            inputs = (a[start : start + step] * scale).flatten(0, 1)
            for column in range(start if half else 0, m, across := max(1, pairs // step)):
                against = slice(column, min(m, column + across))
                outer = (deltas @ other[against].flatten(0, 2).mT).view(-1, r, t, against.stop - column, s, u)
                inner = inputs @ b[against].flatten(0, 1).mT
                outer.mul_(inner.view(len(outer), 1, t, against.stop - column, 1, u))
                summed = outer.view(len(outer) * r, -1) if single else outer.sum((2, 5)).flatten(2).flatten(0, 1)
                target[start * r : start * r + len(summed), column * s : against.stop * s] += summed


def _by_group(left: Tensor, right: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield δ (n, r, t, p) and a (n, t, q) of each group."""
    return zip(left.unbind(2), right.unbind(1))
