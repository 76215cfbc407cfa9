"""J P⁻¹ Jᵀ of each point from each layer's a and δ, where P has a structure: no row of J is formed and solved for.

Under KFAC and EKFAC a and δ are rotated into the eigenbases; under a diagonal P they are weighted as they are; low rank
plus a diagonal is the latter less what Woodbury's identity takes away, r products with J; each of several dense blocks
takes the rows of its layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg import Damped, Inverse
from curvops.linalg.operators.diagonal_matrix import OfDiagonal
from curvops.linalg.operators.direct_sum import OfDirectSum
from curvops.linalg.operators.kronecker import OfEigenKronecker
from curvops.linalg.operators.low_rank import OfLowRank
from curvops.network.model.parameters import Blocks
from curvops.network.walks.layer_roots import Group
from curvops.network.walks.passes import Passes
from curvops.operators.jacobian import Jacobian
from curvops.operators.kfac import LayerBlocks
from curvops.operators.kfac_factors import Sides, kept_entries, members, rotate
from curvops.operators.layer_matrix import as_matrix
from curvops.operators.moments import block_bytes, row_blocks

LEAST_LEFT = {torch.float32: 1e-2, torch.float64: 1e-5}
"""The share of a variance under D alone that Woodbury's difference must leave: of its digits so many are lost."""


class Metric(ABC):
    """P⁻¹ as far as the rows of one group of layers see it."""

    @abstractmethod
    def add(self, target: Float[Tensor, "m C C"], group: Group, most_bytes: int) -> bool:
        """target += J P⁻¹ Jᵀ for the group's part of J; False where its layers do not fit the structure."""


@torch.no_grad()
def point_covariances(jacobian: LinearOperator, inverse: LinearOperator, outputs: int) -> Float[Tensor, "m C C"] | None:
    """The diagonal blocks of J P⁻¹ Jᵀ of `outputs` rows each, for P = G + prior with a structured G.

    A forward pass, C backward passes and, for each layer, two rotations (none for a diagonal P); where it is applied at
    one position Σ_i δ̃_ci δ̃_di Σ_j ã_j² / p_ij, at few the same for each pair of them, elsewhere the layer's own
    Jacobian, in chunks. Low rank adds r products with J. None for other operators, where parameters have no layer rule,
    and where Woodbury's difference would cancel too many digits.
    """
    precision = inverse.base if isinstance(inverse, Inverse) else None
    if not isinstance(precision, Damped) or not isinstance(jacobian, Jacobian):
        return None
    if jacobian.passes.engines.plan.others:
        return None
    form = precision._closed_form()
    if isinstance(form, OfLowRank):
        return _of_low_rank(jacobian, form, outputs)
    metric = _metric(jacobian.passes, precision, form)
    return None if metric is None else _summed(jacobian, metric, outputs)


def _metric(passes: Passes, precision: Damped, form: Any) -> Metric | None:
    if isinstance(form, OfDiagonal):
        return Elementwise(passes, form.inverse_diagonal())
    if isinstance(form, OfDirectSum) and isinstance(precision.base, LayerBlocks):
        return InEigenbases(passes, dict(zip(precision.base.names, form.forms)))
    return InDenseBlocks(passes, form) if isinstance(form, OfDirectSum) else None


def _summed(jacobian: Jacobian, metric: Metric, outputs: int) -> Float[Tensor, "m C C"] | None:
    passes = jacobian.passes
    total = jacobian.theta.new_zeros(jacobian.shape[0] // outputs, outputs, outputs)
    for first, groups in passes.jacobian_rows():
        for group in groups:
            start, count = (first + group.first_row) // outputs, group.num_rows // outputs
            if not metric.add(total[start : start + count], group, passes.chunk_bytes):
                return None
    return total


def _of_low_rank(jacobian: Jacobian, form: OfLowRank, outputs: int) -> Float[Tensor, "m C C"] | None:
    """J D⁻¹ Jᵀ − (J M)(J M)ᵀ with M = D⁻¹U √S C⁻ᵀ and C Cᵀ = I + √S UᵀD⁻¹U √S."""
    base, shift = form.base, form.shift
    total = _summed(jacobian, Elementwise(jacobian.passes, shift.reciprocal().expand(base.shape[-1])), outputs)
    roots = base.values.sqrt()
    if total is None or not bool((roots > 0).any()):
        return total
    if shift.ndim:
        pushed = jacobian._matmul(form.scaled)
    else:
        pushed = form.inverse_shift * jacobian._matmul(base.vectors)
    kept = roots > 0
    roots, capacitance = roots[kept], form.capacitance[kept][:, kept]  # I + UᵀD⁻¹U S
    factor = torch.linalg.cholesky(roots.unsqueeze(-1) * capacitance / roots)
    pushed = torch.linalg.solve_triangular(factor, (pushed[:, kept] * roots).mT, upper=False).mT
    scaled = pushed.unflatten(0, (-1, outputs))
    found = torch.baddbmm(total, scaled, scaled.mT, alpha=-1)
    left = found.diagonal(dim1=1, dim2=2) / total.diagonal(dim1=1, dim2=2).clamp_min(torch.finfo(total.dtype).tiny)
    return found if bool((left > LEAST_LEFT[total.dtype]).all()) else None


class Elementwise(Metric):
    """A diagonal P⁻¹ = diag(w)."""

    def __init__(self, passes: Passes, weights: Float[Tensor, " D"]) -> None:
        self.weights: Blocks = passes.model.selection.unflatten(weights)

    def add(self, target: Float[Tensor, "m C C"], group: Group, most_bytes: int) -> bool:
        """Of entries outside a subnetwork the weight is zero."""
        matrices = group.matrices()
        if matrices is not None:
            assert group.layer is not None
            _add(target, matrices, as_matrix(group.layer, self.weights), None, most_bytes)
            return True
        weights = torch.cat([self.weights[name].flatten() for name in group.names])
        for part, rows in _rows(target, group, most_bytes):
            _add_products(part, rows * weights, rows)
        return True


class InEigenbases(Metric):
    """KFAC or EKFAC plus a prior: by name, the form of each block."""

    def __init__(self, passes: Passes, forms: Mapping[tuple[str, ...], Any]) -> None:
        self.forms, self.positions = forms, passes.model.selection.positions()

    def add(self, target: Float[Tensor, "m C C"], group: Group, most_bytes: int) -> bool:
        """False where the layers were found otherwise when the curvature was built."""
        whole, parts = self.forms.get(group.names), members(group, self.forms)
        if whole is not None and not isinstance(whole, OfEigenKronecker):
            kept = kept_entries(self.positions, group.names)
            for part, rows in _rows(target, group, most_bytes):
                _add_solved(part, rows[..., kept], whole)
            return True
        for names, matrices in parts:
            form = self.forms[names]
            assert isinstance(form, OfEigenKronecker)
            base = form.eigen
            weights = form.definite_spectrum.reshape(base.values.shape).reciprocal()
            _add(target, matrices, weights, Bases(base.left_vectors, base.right_vectors), most_bytes)
        return bool(parts)


class InDenseBlocks(Metric):
    """Blocks of whole layers plus a prior."""

    def __init__(self, passes: Passes, form: OfDirectSum) -> None:
        self.positions = passes.model.selection.positions()
        self.forms = {}
        for part, own in zip(form.base.partition.parts, form.forms):
            index = torch.arange(part.start, part.stop) if isinstance(part, range) else part.cpu()
            self.forms[int(index.min())] = index, own

    def add(self, target: Float[Tensor, "m C C"], group: Group, most_bytes: int) -> bool:
        """False where the group's weights are not those of one block."""
        entries = torch.cat([self.positions[name].flatten() for name in group.names])
        kept = (entries >= 0).nonzero().squeeze(1)
        order = kept[entries[kept].argsort()]
        index, form = self.forms.get(int(entries[kept].min()), (None, None)) if len(kept) else (None, None)
        if index is None or not torch.equal(index, entries[order]):
            return not len(kept)
        for part, rows in _rows(target, group, most_bytes):
            _add_solved(part, rows[..., order.to(rows.device)], form)
        return True


class Bases(NamedTuple):
    """Eigenvectors of a layer's two sides."""

    left: Tensor
    right: Tensor


def _add(
    target: Float[Tensor, "m C C"],
    matrices: list[Sides],
    weights: Float[Tensor, "g p q"],
    bases: Bases | None,
    most_bytes: int,
) -> None:
    """target += the blocks of one layer, or of layers that share weights, in these bases (None: as they are)."""
    sides = [(left if bases is None else rotate(left, bases.left), right) for left, right in matrices]
    if len(sides) == 1 and not sides[0][1].is_floating_point():
        _add_embedded(target, *sides[0], weights)
        return
    # Calls that share weights add up their rows: to a sum over the positions of all of them.
    left = torch.cat([left for left, _ in sides], 3)
    right = torch.cat([_rotated(right, weights, bases).to(left.dtype) for _, right in sides], 2)
    columns, positions, outputs = left.shape[1], left.shape[3], target.shape[1]
    if positions * (positions + 1) // 2 <= columns * (positions + outputs):
        _add_pairs(target, left, right, weights, most_bytes)
    else:
        _add_rows(target, left, right, weights.sqrt(), block_bytes(most_bytes, left))


def _rotated(right: Tensor, weights: Float[Tensor, "g p q"], bases: Bases | None) -> Tensor:
    right = right if right.is_floating_point() else F.one_hot(right, weights.shape[2]).to(weights.dtype)
    return right if bases is None else rotate(right, bases.right)


def _add_embedded(target: Tensor, left: Tensor, indices: Tensor, weights: Float[Tensor, "1 E V"]) -> None:
    """δ̃ (n, R, 1, t, E) and tokens (n, 1, t): positions of one token add up before they are multiplied."""
    tokens, delta = indices[:, 0], left[:, :, 0]
    same = (tokens.unsqueeze(2) == tokens.unsqueeze(1)).to(delta.dtype)
    summed = torch.einsum("nts,nrse->nrte", same, delta)
    _add_products(target, (summed * weights[0].mT[tokens].unsqueeze(1)).flatten(2), delta.flatten(2))


def _add_pairs(
    target: Tensor,
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
    target: Tensor,
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
        products = (flat @ flat.mT).unflatten(0, (-1, roots.shape[0], blocks)).sum(1)
        target.unflatten(0, (n, blocks))[points] += products


def _rows(target: Tensor, group: Group, most_bytes: int) -> Iterator[tuple[Tensor, Float[Tensor, "n R p"]]]:
    """The group's rows of some points at a time, its tensors one after the other, with their part of the target."""
    start = 0
    for rows in group.pieces(most_bytes):
        flat = torch.cat([rows[name].flatten(2) for name in group.names], 2)
        count = flat.shape[0] * flat.shape[1] // target.shape[1]
        yield target[start : start + count], flat
        start += count


def _add_solved(target: Tensor, rows: Float[Tensor, "n R p"], form: Any) -> None:
    """The rows and their solves with their own block."""
    _add_products(target, form.solve(rows.flatten(0, 1).mT).mT.reshape(rows.shape), rows)


def _add_products(target: Float[Tensor, "m C C"], one: Float[Tensor, "n R s"], other: Float[Tensor, "n R s"]) -> None:
    """target += one otherᵀ within each point; of sequences, within each position."""
    m, outputs, _ = target.shape
    target.baddbmm_(one.reshape(m, outputs, -1), other.reshape(m, outputs, -1).mT)
