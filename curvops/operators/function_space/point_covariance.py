"""J P⁻¹ Jᵀ of each point from each layer's a and δ, where P has a structure: no row of J is formed and solved for.

Under KFAC and EKFAC a and δ are rotated into the eigenbases; under a diagonal P they are weighted as they are; low rank
plus a diagonal is the latter less what Woodbury's identity takes away, which needs J U; each of several dense blocks
takes the rows of its layer, and one dense P all rows of the selected weights. Of a last layer, whose δ is the identity,
everything comes from its inputs. Several points, whose covariances are asked for, too, count as one with more outputs.

What is added to is the blocks (m, C, C) of m points, or their diagonals (m, C): of thousands of outputs the blocks
would be more numbers than everything else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg import Damped, Diagonal, Inverse, LowRank
from curvops.linalg.core.cache import carries_graph
from curvops.linalg.operators.algebra import ScaledForm
from curvops.linalg.operators.dense import DenseForm
from curvops.linalg.operators.diagonal_matrix import DiagonalForm
from curvops.linalg.operators.direct_sum import DirectSumForm
from curvops.linalg.operators.kronecker import EigenKroneckerForm
from curvops.linalg.operators.low_rank import LowRankForm
from curvops.network import Group, JacobianRows, Layer, row_blocks
from curvops.operators.kfac.kfac import LayerBlocks
from curvops.operators.kfac.kfac_factors import PARTS, Sides, members, rotate
from curvops.operators.linearized.jacobian import Jacobian

LEAST_LEFT = {torch.float32: 1e-2, torch.float64: 1e-5}
"""The share of a variance under D alone that Woodbury's difference must leave: of its digits so many are lost."""


Target = Tensor
"""Blocks (m, C, C), or their diagonals (m, C)."""


class LayerMetric(NamedTuple):
    """P⁻¹ on a layer's matrix: its inverse eigenvalues (g, p, q) and eigenvectors (none: the unit vectors)."""

    weights: Tensor
    left: Tensor | None = None
    right: Tensor | None = None


class Metric(ABC):
    """P⁻¹ as far as the rows of one group of layers see it."""

    @abstractmethod
    def add(self, target: Target, group: Group, most_bytes: int) -> bool:
        """target += J P⁻¹ Jᵀ for the group's part of J; False where its layers do not fit the structure."""

    def of_last(self, layer: Layer, inputs: Float[Tensor, "m q"]) -> list[tuple[LayerMetric, Tensor]] | None:
        """The last layer's blocks with what of its inputs each takes; None where P has another structure."""
        return None


def point_covariances(
    jacobian: LinearOperator,
    inverse: LinearOperator,
    outputs: int,
    diagonals: bool = False,
    rows: JacobianRows | None = None,
) -> Target | None:
    """The diagonal blocks of J P⁻¹ Jᵀ of `outputs` rows each, for P = G + prior with a structured G, or such a P⁻¹.

    The rows are those of positions, of points, or of several points: with all rows it is the joint covariance.
    With `diagonals` their diagonals alone. A forward pass, C backward passes (of a last layer none) and, for each
    layer, two rotations (none for a diagonal P); where it is applied at one position Σ_i δ̃_ci δ̃_di Σ_j ã_j² / p_ij, at
    few the same for each pair of them, elsewhere (and between points) the layer's own Jacobian, in chunks. Low rank
    adds J U from the same a and δ. None for other operators, where parameters have no layer rule, where Woodbury's
    difference would cancel too many digits, and where the points of a block do not come in one piece. `rows` with a
    graph take the place of those of the Jacobian's walk, and give the result one.
    """
    precision = inverse.base if isinstance(inverse, Inverse) else None
    if not isinstance(jacobian, Jacobian):
        return None
    shape = (jacobian.shape[0] // outputs, outputs, outputs)[: 2 if diagonals else 3]
    with torch.no_grad() if rows is None else nullcontext():
        walk = jacobian.passes if rows is None else rows
        if not isinstance(precision, Damped):
            return None if jacobian.passes.engines.plan.others else _of_covariance(walk, inverse, shape)
        form = precision._closed_form()
        if isinstance(form, DenseForm):
            return _of_dense(walk, form, shape)
        if isinstance(form, ScaledForm):
            unscaled = Damped(form.base.base, form.shift / form.factor).inverse()
            found = point_covariances(jacobian, unscaled, outputs, diagonals, rows)
            return None if found is None else found / form.factor
        if jacobian.passes.engines.plan.others:
            return None
        if isinstance(form, LowRankForm):
            return _of_low_rank(walk, form, shape)
        metric = _metric(walk, precision, form)
        return None if metric is None else _summed(walk, metric, shape)


def _metric(walk: JacobianRows, precision: Damped, form: Any) -> Metric | None:
    if isinstance(form, DiagonalForm):
        return Elementwise(walk, form.inverse_diagonal())
    if isinstance(form, DirectSumForm) and isinstance(precision.base, LayerBlocks):
        return InEigenbases(walk, precision.base, form)
    return InDenseBlocks(walk, form) if isinstance(form, DirectSumForm) else None


def _summed(
    walk: JacobianRows,
    metric: Metric,
    shape: tuple[int, ...],
    tangents: dict[str, Tensor] | None = None,
    pushed: Tensor | None = None,
) -> Target | None:
    """The sum over layers; with tangents V, (J V)ᵀ is added to `pushed` (K, N·C) from the same a and δ."""
    total, outputs = walk.model.theta.new_zeros(shape), shape[1]
    last = walk.features() or []
    each = bool(last) and all(features.outputs_each == outputs for features in last)
    if each and _sum_of_last(total, ((features.layer, features.inputs()) for features in last), metric):
        if tangents is not None and pushed is not None:
            pushed += torch.cat([features.push(tangents).flatten(1) for features in last], 1)
        return total
    for first, rows, groups in walk.jacobian_rows():
        if rows % outputs:
            return None
        for group in groups:
            start, count = (first + group.first_row) // outputs, group.num_rows // outputs
            if not metric.add(total[start : start + count], group, walk.chunk_bytes):
                return None
            if tangents is not None and pushed is not None:
                part = pushed[:, first + group.first_row :][:, : group.num_rows]
                part += group.push(tangents).flatten(1)
    return total


def _sum_of_last(total: Target, last: Iterable[tuple[Layer, Tensor | None]], metric: Metric) -> bool:
    """Add what the last layer's inputs give, where P has a structure on its matrix."""
    start = 0
    for layer, inputs in last:
        terms = None if inputs is None else metric.of_last(layer, inputs)
        if inputs is None or terms is None:
            return False
        for term in terms:
            _add_last(total[start : start + len(inputs)], *term)
        start += len(inputs)
    return True


def _add_last(target: Target, layer: LayerMetric, inputs: Float[Tensor, "m q"]) -> None:
    """target += U diag(k) Uᵀ with k_i = Σ_j ã_j² / p_ij: δ is the identity at every point."""
    rotated = inputs if layer.right is None else rotate(inputs[:, None, None], layer.right)[:, 0, 0]
    kernel = rotated.square() @ layer.weights[0].mT
    if layer.left is None or layer.left.ndim == 2:
        (target if target.ndim == 2 else target.diagonal(dim1=1, dim2=2)).add_(kernel)
    elif target.ndim == 2:
        target.addmm_(kernel, layer.left[0].square().mT)
    else:
        target.add_((layer.left[0] * kernel.unsqueeze(1)) @ layer.left[0].mT)


def _of_dense(walk: JacobianRows, form: DenseForm, shape: tuple[int, ...]) -> Target | None:
    """J P⁻¹ Jᵀ = ‖L⁻¹ Jᵀ‖² from the rows of the selected weights, some points at a time."""
    total, start = walk.model.theta.new_zeros(shape), 0
    for rows in walk.selected_rows():
        if len(rows) % shape[1]:
            return None
        half = torch.linalg.solve_triangular(form.chol, rows.to(form.chol.dtype).mT, upper=False).mT.to(rows.dtype)
        part = half.unflatten(0, (-1, shape[1]))
        _add_products(total[start : start + len(part)], part, part)
        start += len(part)
    return total


def _of_low_rank(walk: JacobianRows, form: LowRankForm, shape: tuple[int, ...]) -> Target | None:
    """J D⁻¹ Jᵀ − (J M)(J M)ᵀ with M = D⁻¹U √S C⁻ᵀ and C Cᵀ = I + √S UᵀD⁻¹U √S."""
    base, shift = form.base, form.shift
    metric = Elementwise(walk, shift.reciprocal().expand(base.shape[-1]))
    if not bool((base.values > 0).any()):
        return _summed(walk, metric, shape)
    pushed = walk.model.theta.new_zeros(len(base.values), shape[0] * shape[1])
    vectors = form.scaled if shift.ndim else base.vectors
    total = _summed(walk, metric, shape, walk.model.selection.split(vectors), pushed)
    if total is None:
        return None
    found = total.clone()
    taken = (pushed.mT @ _whitening(form)).unflatten(0, (-1, shape[1]))
    _add_products(found, taken, taken, alpha=-1)
    left, before = (t if t.ndim == 2 else t.diagonal(dim1=1, dim2=2) for t in (found.detach(), total.detach()))
    enough = left / before.clamp_min(torch.finfo(total.dtype).tiny) > LEAST_LEFT[total.dtype]
    return found if bool(enough.all()) else None


def _of_covariance(walk: JacobianRows, covariance: LinearOperator, shape: tuple[int, ...]) -> Target | None:
    """J Σ Jᵀ for a Σ that is itself a diagonal, or low rank plus a diagonal: a sum, in which nothing cancels."""
    if isinstance(covariance, Diagonal):
        return _summed(walk, Elementwise(walk, covariance.entries), shape)
    if not isinstance(covariance, Damped) or not isinstance(covariance.base, LowRank):
        return None
    root = covariance.base.root
    pushed = walk.model.theta.new_zeros(root.shape[1], shape[0] * shape[1])
    metric = Elementwise(walk, covariance.shift.expand(len(root)))
    total = _summed(walk, metric, shape, walk.model.selection.split(root), pushed)
    if total is None:
        return None
    found, added = total.clone(), pushed.mT.unflatten(0, (-1, shape[1]))
    _add_products(found, added, added)
    return found


def _whitening(form: LowRankForm) -> Float[Tensor, "K r"]:
    """√S C⁻ᵀ, with D⁻¹ where that is a number: one product with what was pushed, in place of as many solves as rows."""
    values, kept = form.base.values, form.base.values > 0
    roots, capacitance = values[kept].sqrt(), form.capacitance[kept][:, kept]  # I + UᵀD⁻¹U S
    factor = torch.linalg.cholesky(roots.unsqueeze(-1) * capacitance / roots)
    unit = torch.eye(len(roots), dtype=roots.dtype, device=roots.device)
    own = roots.unsqueeze(-1) * torch.linalg.solve_triangular(factor.mT, unit, upper=True)
    found = values.new_zeros(len(values), len(roots)).index_copy(0, kept.nonzero().squeeze(1), own)
    return found if form.shift.ndim else found * form.inverse_shift


class Elementwise(Metric):
    """A diagonal P⁻¹ = diag(w)."""

    def __init__(self, walk: JacobianRows, weights: Float[Tensor, " D"]) -> None:
        self.weights = walk.model.selection.unflatten(weights)

    def add(self, target: Target, group: Group, most_bytes: int) -> bool:
        """Add as `Metric.add` does; entries outside a subnetwork have the weight zero."""
        matrices = group.matrices()
        if matrices is not None:
            assert group.layer is not None
            _add(target, matrices, LayerMetric(group.layer.to_matrix(self.weights)), most_bytes)
            return True
        weights = torch.cat([self.weights[name].flatten() for name in group.names])
        for part, rows in _rows(target, group, most_bytes):
            _add_products(part, rows * weights, rows)
        return True

    def of_last(self, layer: Layer, inputs: Float[Tensor, "m q"]) -> list[tuple[LayerMetric, Tensor]] | None:
        return [(LayerMetric(layer.to_matrix(self.weights)), inputs)]


class InEigenbases(Metric):
    """KFAC or EKFAC plus a prior: by name, the form of each block."""

    def __init__(self, walk: JacobianRows, blocks: LayerBlocks, form: DirectSumForm) -> None:
        self.forms: Mapping[tuple[str, ...], Any] = dict(zip(blocks.names, form.decomposed))
        self.parts = dict(zip(blocks.names, blocks.partition.parts))
        self.positions = walk.model.selection.positions()

    def add(self, target: Target, group: Group, most_bytes: int) -> bool:
        """False where the layers were found otherwise when the curvature was built."""
        whole, parts = self.forms.get(group.names), members(group, self.forms)
        if whole is not None and not isinstance(whole, EigenKroneckerForm):
            order = _order(self.positions, group.names, self.parts[group.names])
            if order is None:
                return False
            for part, rows in _rows(target, group, most_bytes):
                _add_solved(part, rows[..., order.to(rows.device)], whole)
            return True
        if not all(isinstance(self.forms[names], EigenKroneckerForm) for names, _ in parts):
            return False
        for names, matrices in parts:
            _add(target, matrices, self._of_layer(names), most_bytes)
        return bool(parts)

    def _of_layer(self, names: tuple[str, ...]) -> LayerMetric:
        form = self.forms[names]
        assert isinstance(form, EigenKroneckerForm)
        base = form.eigen
        weights = form.definite_spectrum.reshape(base.values.shape).reciprocal()
        return LayerMetric(weights, base.left_vectors, base.right_vectors)

    def of_last(self, layer: Layer, inputs: Float[Tensor, "m q"]) -> list[tuple[LayerMetric, Tensor]] | None:
        names = layer.names
        whole = tuple(sorted(names.values()))
        if isinstance(self.forms.get(whole), EigenKroneckerForm):
            return [(self._of_layer(whole), inputs)]
        if (
            not all(isinstance(self.forms.get((name,)), EigenKroneckerForm) for name in names.values())
            or len(names) == 1
        ):
            return None
        return [(self._of_layer((names[local],)), inputs[:, part]) for local, part in PARTS.items()]


class InDenseBlocks(Metric):
    """Blocks of whole layers plus a prior."""

    def __init__(self, walk: JacobianRows, form: DirectSumForm) -> None:
        self.positions = walk.model.selection.positions()
        parts = form.base.partition.parts
        self.forms = {
            int(part[0] if isinstance(part, range) else part.min()): (part, own)
            for part, own in zip(parts, form.decomposed)
        }

    def add(self, target: Target, group: Group, most_bytes: int) -> bool:
        """False where the group's weights are not those of one block."""
        entries = torch.cat([self.positions[name].flatten() for name in group.names])
        if not bool((entries >= 0).any()):
            return True
        positions, form = self.forms.get(int(entries[entries >= 0].min()), (range(0), None))
        order = _order(self.positions, group.names, positions)
        if order is None:
            return False
        for part, rows in _rows(target, group, most_bytes):
            _add_solved(part, rows[..., order.to(rows.device)], form)
        return True


def _order(positions: Mapping[str, Tensor], names: tuple[str, ...], block: Tensor | range) -> Int[Tensor, " p"] | None:
    """Where each weight of a block stands in the rows of these tensors; None where they hold others."""
    entries = torch.cat([positions[name].flatten() for name in names])
    index = torch.arange(block.start, block.stop) if isinstance(block, range) else block.cpu()
    kept = (entries >= 0).nonzero().squeeze(1)
    ascending = kept[entries[kept].argsort()]
    if not torch.equal(entries[ascending], index.sort().values):
        return None
    return ascending[index.argsort().argsort()]


def _add(target: Target, matrices: list[Sides], layer: LayerMetric, most_bytes: int) -> None:
    """target += the blocks of one layer, or of layers that share weights."""
    sides = [(left if layer.left is None else rotate(left, layer.left), right) for left, right in matrices]
    together = len(target) < len(sides[0][0])  # points in one block
    if len(sides) == 1 and not sides[0][1].is_floating_point() and not together:
        _add_embedded(target, *sides[0], layer.weights)
        return
    # Calls that share weights add up their rows: to a sum over the positions of all of them.
    left = _along([left for left, _ in sides], 3)
    right = _along([_rotated(right, layer).to(left.dtype) for _, right in sides], 2)
    columns, positions, outputs = left.shape[1], left.shape[3], target.shape[1]
    if not together and positions * (positions + 1) // 2 <= columns * (positions + outputs):
        _add_pairs(target, left, right, layer.weights, most_bytes)
    elif together or carries_graph((left, right)):
        formed = (torch.einsum("nrgtp,ngtq->nrgpq", left, right) * layer.weights.sqrt()).flatten(2)
        _add_products(target, formed, formed)
    else:
        _add_rows(target, left, right, layer.weights.sqrt(), most_bytes)


def _along(tensors: list[Tensor], dim: int) -> Tensor:
    """The tensors one after the other; one alone is not copied, as `torch.cat` would."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _rotated(right: Tensor, layer: LayerMetric) -> Tensor:
    weights = layer.weights
    right = right if right.is_floating_point() else F.one_hot(right, weights.shape[2]).to(weights.dtype)
    return right if layer.right is None else rotate(right, layer.right)


def _add_embedded(target: Target, left: Tensor, indices: Tensor, weights: Float[Tensor, "1 E V"]) -> None:
    """δ̃ (n, R, 1, t, E) and tokens (n, 1, t): positions of one token add up before they are multiplied."""
    tokens, delta = indices[:, 0], left[:, :, 0]
    same = (tokens.unsqueeze(2) == tokens.unsqueeze(1)).to(delta.dtype)
    summed = torch.einsum("nts,nrse->nrte", same, delta)
    _add_products(target, (summed * weights[0].mT[tokens].unsqueeze(1)).flatten(2), delta.flatten(2))


def _add_pairs(
    target: Target,
    left: Float[Tensor, "n R g t p"],
    right: Float[Tensor, "n g t q"],
    weights: Float[Tensor, "g p q"],
    most_bytes: int,
) -> None:
    """δ̃ K δ̃ᵀ with K_ts = Σ_j ã_tj ã_sj / p_ij for each i, of few positions: one product for all pairs t ≤ s."""
    n, t = left.shape[0], left.shape[3]
    by_group = right.transpose(0, 1)
    first, second = torch.triu_indices(t, t, device=right.device)
    step = max(1, most_bytes // (by_group[:, :, 0].numel() * right.element_size()))
    found = []
    for some, others in zip(first.split(step), second.split(step)):
        products = by_group[:, :, some].mul_(by_group[:, :, others])
        found.append((products.flatten(1, 2) @ weights.mT).unflatten(1, (n, -1)))
    kernel = torch.cat(found, 2).transpose(0, 1)  # (n, g, pairs, p)
    if t == 1:
        weighted = left * kernel.unsqueeze(1)
    else:
        pair = torch.empty(t, t, dtype=torch.long, device=right.device)
        pair[first, second] = pair[second, first] = torch.arange(len(first), device=right.device)
        weighted = torch.einsum("nrgtp,ngtsp->nrgsp", left, kernel[:, :, pair])
    _add_products(target, weighted.flatten(2), left.flatten(2))


def _add_rows(
    target: Target,
    left: Float[Tensor, "n R g t p"],
    right: Float[Tensor, "n g t q"],
    roots: Float[Tensor, "g p q"],
    most_bytes: int,
) -> None:
    """The layer's own Jacobian in the eigenbasis, divided by √p: few lines of it at a time, which stay in a cache."""
    n, outputs = len(left), target.shape[1]
    blocks = target.shape[0] // n
    for points, lines, rows in row_blocks([(left, right)], most_bytes):
        rows.mul_(roots[:, lines].unsqueeze(1))
        flat = rows.flatten(3).unflatten(2, (blocks, outputs)).flatten(0, 2)
        products = flat @ flat.mT if target.ndim == 3 else flat.square().sum(-1)
        target.unflatten(0, (n, blocks))[points] += products.unflatten(0, (-1, roots.shape[0], blocks)).sum(1)


def _rows(target: Target, group: Group, most_bytes: int) -> Iterator[tuple[Target, Float[Tensor, "n R p"]]]:
    """The group's rows of some points at a time, its tensors one after the other, with their part of the target."""
    start = 0
    for rows in group.pieces(most_bytes) if len(target) >= group.num_points else [group.rows()]:
        flat = torch.cat([rows[name].flatten(2) for name in group.names], 2)
        count = flat.shape[0] * flat.shape[1] // target.shape[1]
        yield target[start : start + count], flat
        start += count


def _add_solved(target: Target, rows: Float[Tensor, "n R p"], form: Any) -> None:
    """The rows and their solves with their own block."""
    _add_products(target, form.solve(rows.flatten(0, 1).mT).mT.reshape(rows.shape), rows)


def _add_products(target: Target, one: Float[Tensor, "n R s"], other: Float[Tensor, "n R s"], alpha: int = 1) -> None:
    """target += α one otherᵀ within each point, or its diagonal; of sequences, within each position."""
    one, other = (rows.reshape(*target.shape[:2], -1) for rows in (one, other))
    if target.ndim == 3:
        target.baddbmm_(one, other.mT, alpha=alpha)
    else:
        target.add_((one * other).sum(-1), alpha=alpha)
