"""The Gram matrix J(x) A⁻¹ J(x')ᵀ of the rows of two Jacobians, layer by layer, each in its cheapest form.

A weight with inputs a_t and sensitivities δ_t at positions t has the rows Σ_t δ_t ⊗ a_t. Two of them have the inner
product Σ_tu (δ_t·δ'_u)(a_t·a'_u), which takes less work than the rows do if positions are few and the layer is large.
Two points with t positions, p × q weights and C columns each take

- by rows: C²pq multiply-adds, after each row has been formed once, in tpq;
- by pairs of positions, Σ_tu (δ_t·δ'_u)(a_t·a'_u): t²q + C²t²p, and passes over C²t² numbers.

Matrix products of a few columns run more slowly than large ones, which constants take into account.

Rows are formed for some output channels at a time. Channels add up independently: however little memory there is, every
row is formed once, and once more for a gradient.

With gradients in x, x' and A, both sets of inputs pass through the network together, once. The inner products of each
layer's rows are recorded in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.ambient import CACHE_BYTES
from curvops.checks import carries_graph
from curvops.linalg.core.structure import add_gram, mirror
from curvops.network import Group, Layer, Passes, Plan
from curvops.operators.linearized.network_operator import Jacobian

STRIPES = 16
"""The most steps in which pairs of points of a symmetric matrix are walked over, each from the diagonal on."""
TOUCHED = 100.0
"""Multiply-adds of large matrix products in the time of a pass over one number, which memory limits."""
SLOWER = 2.0
"""Multiply-adds of large matrix products in the time of one of many small products."""
HELD, WORK = 1 / 2, 1 / 4
"""The shares of the memory for rows at x, which are held, and for products of rows; rows at x' take the rest."""

Piece = tuple[int, Group]
"""The number of the first row, and the rows of one layer from that row on."""


def gram_matrix(left: Jacobian, right: Jacobian, prior: Tensor) -> Float[Tensor, "nC mC"]:
    """Return J(x) A⁻¹ J(x')ᵀ, or its upper half if x is x', with sums in the dtype of A.

    If the rows of all points do not fit into memory, x' is walked over once for each group of rows at x that takes half
    of the memory.
    """
    return gram_terms(left, right, prior, dict.fromkeys(left.passes.model.selection.names, 0)).squeeze(0)


@torch.no_grad()
def gram_terms(left: Jacobian, right: Jacobian, prior: Tensor, term_of: Mapping[str, int]) -> Float[Tensor, "T nC mC"]:
    """Return the terms of `gram_matrix`, J_t(x) A⁻¹ J_t(x')ᵀ, one for each set of parameters (numbered from 0).

    If the inputs x belong to several ranks, each computes the rows of its own.
    """
    if left.passes.is_shared:
        own_rows = gram_terms(left.apart(), right.gathered(), prior, term_of)
        lined_up = left.passes.line_up([own_rows], 1)
        return mirror(lined_up) if left.passes is right.passes else lined_up
    right = right.gathered()
    passes, most_bytes, same = left.passes, max(0, left.passes.memory.room()), left.passes is right.passes
    total, scales = left.shape[-2], scales_by_name(passes, prior)
    result = prior.new_zeros(1 + max(term_of.values()), total, right.shape[-2])

    def add(piece: Piece, other: Piece) -> None:
        (row, group), (column, partner) = piece, other
        if same and row > column:
            return
        # Two Jacobians may group tensors differently: a layer rule may suit some outputs, or some points, and not all.
        shared = [name for name in group.names if name in partner.names]
        for term in {term_of[name] for name in shared}:
            target = result[term, row : row + group.num_rows, column : column + partner.num_rows]
            names = [name for name in shared if term_of[name] == term]
            first = group.of(names)
            _add(target, first, first if group is partner else partner.of(names), scales, int(WORK * most_bytes))

    with passes.memory.holding(most_bytes):
        for end, panel in _panels(passes.jacobian_rows(), HELD * most_bytes, prior.dtype):
            for piece, other in product(panel, panel if same else ()):
                add(piece, other)
            if not same or end < total:
                for _, others in _panels(
                    right.passes.jacobian_rows(end if same else 0), WORK * most_bytes, prior.dtype
                ):
                    for piece, other in product(panel, others):
                        add(piece, other)
    return mirror(result) if same else result


def _panels(
    walk: Iterable[tuple[int, int, list[Group]]], most_bytes: float, dtype: torch.dtype
) -> Iterator[tuple[int, list[Piece]]]:
    """Yield (the row after them, pieces that together take at most `most_bytes`), with at least one piece."""
    panel: list[Piece] = []
    held = end = 0
    for start, count, groups in walk:
        groups = [_as_rows(group.to(dtype)) for group in groups]
        size = sum(group.nbytes for group in groups)
        if panel and held + size > most_bytes:
            yield end, _joined(panel)
            held = 0
        panel += [(start + group.first_row, group) for group in groups]
        held, end = held + size, start + count
    if panel:
        yield end, _joined(panel)


def _as_rows(group: Group) -> Group:
    """Return rows themselves where they take less memory than δ and a, as those of norms do."""
    sizes = {name: call.layer.shape_of(local) for call in group.parts for local, name in call.layer.names.items()}
    held = sum(call.delta.numel() + call.layer_input.numel() for call in group.parts)
    if group.num_rows * sum(size.numel() for size in sizes.values()) > held:
        return group
    return replace(group, parts=(), rows_by_name=group.rows()) if group.parts else group


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
    joined = []
    while runs:
        run = runs.pop()  # frees its parts
        joined.append((run[0][0], Group.concatenate([group for _, group in run])))
    return joined


def scales_by_name(passes: Passes, prior: Tensor) -> dict[str, Tensor]:
    """Return A⁻¹ by parameter name, one number if it is constant there and has no graph; zero outside a subnetwork."""
    selection = passes.model.selection
    if prior.ndim == 0 and selection.index is None:
        return dict.fromkeys(selection.names, prior.reciprocal())
    scales = selection.unflatten(prior.reciprocal().expand(selection.num_parameters))
    if carries_graph((prior,)):
        return scales
    constant = [name for name, scale in scales.items() if scale.ndim and bool((scale == scale.flatten()[0]).all())]
    return scales | {name: scales[name].flatten()[0] for name in constant}


def _add(target: Tensor, group: Group, partner: Group, scales: Mapping[str, Tensor], most_bytes: int) -> None:
    """Add the inner products of one layer's rows; for a group with itself, at least those on and above the diagonal."""
    layer, one, other, same = group.layer, sides_of(group), sides_of(partner), group is partner
    if layer is None or one is None or other is None:
        _add_by_all_rows(target, group, partner, scales, most_bytes // 3, same)
        return
    scale = matrix_of_scales(layer, scales)
    if form_of(one, other) == "rows" or any(scales[name].ndim for name in group.names):
        _add_by_rows(target, one, one if same else other, scale, most_bytes)
        return
    piece_bytes = most_bytes // 4  # for a on each side, while one is made contiguous, and for products
    one = one.held(piece_bytes, contiguous=True)
    other = one if same else other.held(piece_bytes, contiguous=True)
    _add_by_pairs(target, one, other, scale[0, 0], piece_bytes, same)


def sides_of(group: Group) -> Sides | None:
    """Return the two sides of the rows of a layer that is applied once, to numbers; None for others."""
    if len(group.parts) != 1 or not group.parts[0].layer_input.is_floating_point():
        return None
    (factors,) = group.parts
    left = factors.left()
    if left is None:
        return None
    return Sides(left, lambda points: factors.at(points).right(), factors.layer.width)


def form_of(one: Sides, other: Sides) -> Literal["rows", "pairs"]:
    """Return the form that takes least work if the scales are constant on each tensor."""
    (n, r, g, t, p), (m, s, _, u, _) = one.left.shape, other.left.shape
    return _least_work(n, m, g, t, u, p, one.width, r, s)[1]


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
                here = target[start : start + height, column : column + len(against)]
                add_gram(here, row, against, half and column == start)
            column += len(against)
        start += height


def flat_rows(rows: Tensor) -> Float[Tensor, "nr p"]:
    """Return the rows of all points and columns, each as a vector."""
    return rows.reshape(rows.shape[0] * rows.shape[1], -1)


def _add_by_pairs(
    target: Float[Tensor, "nr ms"], one: Sides, other: Sides, scale: Float[Tensor, " q"], most_bytes: int, half: bool
) -> None:
    """Add to target Σ over pairs of positions of (a a'ᵀ) ∘ (δ δ'ᵀ), group by group and some points at a time."""
    (n, r, g, t, _), (m, s, _, u, _) = one.left.shape, other.left.shape
    single, is_cuda = t * u == 1, one.left.is_cuda
    limit = most_bytes if is_cuda else min(most_bytes, CACHE_BYTES)
    pairs = max(1, limit // max(1, r * t * s * u * one.left.element_size()))
    step = max(1, min(-(-n // STRIPES) if half else n, math.isqrt(pairs)))
    for start in range(0, n, step):
        some = slice(start, min(n, start + step))
        # Points come last, so that passes over products run over contiguous numbers.
        a = (one.right(some) * scale).movedim(0, -2).flatten(1, 2)  # (g, t n, q)
        for column in range(start if half else 0, m, across := max(1, pairs // step)):
            against = slice(column, min(m, column + across))
            b, points, others = other.right(against), some.stop - start, against.stop - column
            b = b.movedim(0, -2).flatten(1, 2)
            here = target[some.start * r : some.stop * r, against.start * s : against.stop * s]
            here = here.view(points, r, others, s).permute(1, 0, 3, 2)
            for i in range(g):
                d = one.left[some, :, i].permute(2, 1, 0, 3).flatten(0, 2)
                e = other.left[against, :, i].permute(2, 1, 0, 3).flatten(0, 2)
                outer = (d @ e.mT).view(t, r, points, u, s, others)
                outer.mul_((a[i] @ b[i].mT).view(t, 1, points, u, 1, others))
                here += outer.view(here.shape) if single else outer.sum((0, 3))


def _least_work(
    n: int, m: int, g: int, t: int, u: int, p: int, q: int, r: int, s: int
) -> tuple[float, Literal["rows", "pairs"]]:
    """Return the least multiply-adds, or their time's worth, of the rows of n points with those of m, and the form.

    A layer has g groups, t and u positions, p × q weights, and r and s columns.
    """
    rows = g * p * q * (n * m * r * s + n * r * (SLOWER * t + TOUCHED) + m * s * (SLOWER * u + TOUCHED))
    pairs = g * n * m * t * u * (q + r * s * (p + 2 * TOUCHED))
    return (rows, "rows") if rows <= pairs else (pairs, "pairs")


class Sides(NamedTuple):
    """δ (n, r, g, t, p), and a function from some of the points to their a (m, g, t, q); see `Rule.left`."""

    left: Tensor
    right: Callable[[slice], Tensor]
    width: int
    """q."""

    @property
    def num_rows(self) -> int:
        """n·r."""
        return self.left.shape[0] * self.left.shape[1]

    @property
    def point_bytes(self) -> int:
        """The bytes of a for one point."""
        return self.left.shape[2] * self.left.shape[3] * self.width * self.left.element_size()

    def held(self, most_bytes: int, contiguous: bool = False) -> Sides:
        """Return these sides with a for all points in memory, if it fits; the q numbers of one position contiguous."""
        if len(self.left) * self.point_bytes > most_bytes:
            return self
        a = self.right(slice(None))
        return self._replace(right=(a.contiguous() if contiguous else a).__getitem__)


class Block(NamedTuple):
    """Some of a layer's groups, and some of their output channels."""

    groups: slice
    channels: slice

    def of(self, matrices: Float[Tensor, "g p q"]) -> Tensor:
        """Return the entries of a layer's matrices that are in the block, as a vector."""
        return matrices[self.groups, self.channels].flatten()


def _add_by_rows(
    target: Float[Tensor, "nr ms"], one: Sides, other: Sides, scale: Float[Tensor, "g p q"], most_bytes: int
) -> None:
    """Add Σ_ij rows_ij scale_ij rows'_ij; if both sides are the same object, only on and above the diagonal.

    Args:
        target: the matrix to add to.
        one: the sides of the rows.
        other: the sides of the columns.
        scale: the scale of each weight, in the order of `Layer.to_matrix`; not negative.
        most_bytes: the memory for what is formed at a time.
    """
    same, side_bytes = one is other, most_bytes // (2 if one is other else 4)
    one = one.held(side_bytes)
    other = one if same else other.held(side_bytes)
    for block in _blocks(one, other, most_bytes):
        rows = _rows(one, block, most_bytes)
        if same:
            rows.mul_(block.of(scale).sqrt())
            add_gram(target, rows, rows, half=True)
        else:
            target.addmm_(rows.mul_(block.of(scale)), _rows(other, block, most_bytes).mT)
        del rows  # before the next ones are made


def _recorded_by_rows(
    one: Sides, other: Sides, scale: Float[Tensor, "g p q"], most_bytes: int
) -> Float[Tensor, "nr ms"]:
    """Return Σ_ij rows_ij scale_ij rows'_ij with its graph; the backward pass forms the rows of each block again."""
    from torch.utils.checkpoint import checkpoint  # torch 2.7 imports sympy with it

    total = scale.new_zeros(one.num_rows, other.num_rows)
    for block in _blocks(one, other, most_bytes):
        total = total + checkpoint(_block_products, one, other, block, scale, use_reentrant=False)
    return total


def _block_products(one: Sides, other: Sides, block: Block, scale: Tensor) -> Float[Tensor, "nr ms"]:
    rows = _recorded_rows(one, block)
    others = rows if other is one else _recorded_rows(other, block)
    return (rows * block.of(scale)) @ others.mT


def matrix_of_scales(layer: Layer, scales: Mapping[str, Tensor]) -> Float[Tensor, "g p q"]:
    """Return the scales of a layer's weights, given by parameter name and 0-d if constant, as its matrices."""
    shapes = {name: layer.shape_of(local) for local, name in layer.names.items()}
    return layer.to_matrix({name: scales[name].expand(shape) for name, shape in shapes.items()})


def _blocks(one: Sides, other: Sides, most_bytes: int) -> Iterator[Block]:
    """Yield blocks whose rows, of both sides, take at most a quarter of `most_bytes`, or one channel."""
    _, _, g, _, p = one.left.shape
    # On a CPU, 128 MiB hold enough channels for matrix products at full speed.
    most = most_bytes // 4 if one.left.is_cuda else min(most_bytes // 4, 2**27)
    total = one.num_rows if one is other else one.num_rows + other.num_rows
    many = max(1, most // max(1, total * one.width * one.left.element_size()))
    for start in range(0, g, step := max(1, many // p)):
        some = slice(start, start + step)
        yield from (Block(some, slice(first, first + many)) for first in range(0, p, many))


def _rows(sides: Sides, block: Block, most_bytes: int) -> Float[Tensor, "nr pq"]:
    """Return these entries of all rows, formed for some points at a time."""
    n, r, *_ = sides.left.shape
    left = sides.left
    size = left[0, 0, block.groups, 0, block.channels].numel() * sides.width
    rows = left.new_empty(n, r, size)
    most = most_bytes // 4 if left.is_cuda else min(most_bytes // 4, CACHE_BYTES)
    step = max(1, most // max(1, sides.point_bytes))
    for points in (slice(start, start + step) for start in range(0, n, step)):
        first, second, here = _positions(left[points], block), sides.right(points)[:, block.groups], rows[points]
        if first.shape[1] == 1:
            torch.bmm(first[:, 0], second[:, 0], out=here.view(len(here), -1, sides.width))
        else:
            here.copy_((first @ second).unflatten(2, (r, -1)).transpose(1, 2).flatten(2))
    return rows.flatten(0, 1)


def _recorded_rows(sides: Sides, block: Block) -> Float[Tensor, "nr pq"]:
    rows = _positions(sides.left, block) @ sides.right(slice(None))[:, block.groups]
    return rows.unflatten(2, (sides.left.shape[1], -1)).transpose(1, 2).flatten(2).flatten(0, 1)


def _positions(left: Tensor, block: Block) -> Float[Tensor, "n g rp t"]:
    return left[:, :, block.groups, :, block.channels].permute(0, 2, 1, 4, 3).flatten(2, 3)


def gram_cost(plan: Plan, points: int) -> float:
    """Return how many gradients of the data J Jᵀ costs, under a prior that is constant on each tensor.

    It counts the passes for δ, once for each panel of points, and the products. Parameters without a
    layer rule take passes over each point alone instead. The result is ∞ if the work of a gradient is unknown.
    """
    if not plan.forward:
        return math.inf
    columns, room = plan.num_outputs, plan.memory_budget // 2
    ruled = {name: layer.shape_of(local).numel() for layer in plan.layers for local, name in layer.names.items()}
    others = plan.size - sum(ruled.values())
    held = (columns * others + sum(_numbers(layer, columns) for layer in plan.layers)) * 8 * points  # in float64
    panels = min(points, math.ceil(held / max(1, HELD * room)))  # a point at a time if there is room for none
    walks, together = (panels + 1) / 2, math.ceil(points / max(1, panels))
    pairs = sum(_least(layer, columns, together) for layer in plan.layers) * (points / together) ** 2 / 2
    pairs += others * (columns * points) ** 2 / 2
    gradient = points * (3 * plan.forward + TOUCHED * sum(layer.output[1:].numel() for layer in plan.layers))
    walk_cost = (1 + columns) / 2  # a pass for δ takes half a gradient
    if plan.others:
        walk_cost += plan.cost_to_build("formed", points) / (1 + plan.overhead(1.0, points))
    return walks * walk_cost + pairs / gradient


def _numbers(layer: Layer, columns: int) -> int:
    """Return the numbers per point that are held of a layer: its rows, or a and δ."""
    return columns * layer.size if layer.as_rows(columns) else columns * layer.output[1:].numel() + layer.inputs


def _least(layer: Layer, columns: int, points: int) -> float:
    """Return the multiply-adds of one layer for all pairs of points."""
    positions = layer.multiply_adds // layer.shape_of("weight").numel() if "weight" in layer.names else 0
    if layer.as_rows(columns) or not positions:
        return float(columns * (points**2 * columns * layer.size + 2 * points * layer.multiply_adds))
    groups = getattr(layer.module, "groups", 1)
    weights = layer.height // groups, layer.width
    return _least_work(points, points, groups, positions, positions, *weights, columns, columns)[0]


def gram_with_graph(left: Jacobian, right: Jacobian, scales: Mapping[str, Tensor]) -> Float[Tensor, "nC mC"]:
    """Return J(x) S J(x')ᵀ with its gradients in x, x' and S, as far as these require one.

    Args:
        left: J(x), made with `differentiable=True`.
        right: J(x'), made in the same way; J(x) itself if x' is x.
        scales: S = A⁻¹ by parameter name: 0-d if it is constant, otherwise of the parameter's shape.

    Cost: that of the matrix without a graph; with the gradient, about three times as much.
    """
    same, rows, most_bytes = left.passes is right.passes, left.shape[-2], left.passes.chunk_bytes
    points = left.graph if same else left.graph.followed_by(right.graph)

    def compute(walk: Any, *values: Tensor) -> Tensor:
        products = left.theta.new_zeros(rows, right.shape[-2])
        by_name = dict(zip(scales, values))
        for group in walk.by_layer():
            group_scales = {name: by_name[name] for name in group.names}
            cut = rows // group.num_columns
            first, second = (group, group) if same else (group.take(slice(cut)), group.take(slice(cut, None)))
            products = products + _recorded_products(first, second, group_scales, most_bytes)
        return products

    result: Tensor = points.by_rows(compute, most_bytes, *scales.values())
    return result


def _recorded_products(
    first: Group, second: Group, scales: Mapping[str, Tensor], most_bytes: int
) -> Float[Tensor, "nr ms"]:
    """Return the inner products of the rows of one layer, by pairs of positions if that is less work."""
    layer, left, right = first.layer, sides_of(first), sides_of(second)
    if layer is None or left is None or right is None:
        from torch.utils.checkpoint import checkpoint  # torch 2.7 imports sympy with it

        products: Tensor = checkpoint(_by_all_rows, first, second, scales, use_reentrant=False)
        return products
    scale = matrix_of_scales(layer, scales)
    if form_of(left, right) == "rows" or any(value.ndim for value in scales.values()):
        return _recorded_by_rows(left, left if second is first else right, scale, most_bytes)
    one = left.left, left.right(slice(None))
    other = one if second is first else (right.left, right.right(slice(None)))
    return _by_positions(one, other, scale[0, 0])


def _by_positions(
    one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], scale: Float[Tensor, " q"]
) -> Float[Tensor, "nr ms"]:
    outer = torch.einsum("nrgtp,msgup->nrmsgtu", one[0], other[0])
    inner = torch.einsum("ngtq,mguq->nmgtu", one[1] * scale, other[1])
    return torch.einsum("nrmsgtu,nmgtu->nrms", outer, inner).flatten(2).flatten(0, 1)


def _by_all_rows(first: Group, second: Group, scales: Mapping[str, Tensor]) -> Float[Tensor, "nr ms"]:
    rows, others = first.rows(), first.rows() if second is first else second.rows()
    products = (flat_rows(rows[name] * scale) @ flat_rows(others[name]).mT for name, scale in scales.items())
    return torch.stack(list(products)).sum(0)
