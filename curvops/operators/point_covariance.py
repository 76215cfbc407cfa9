"""J P⁻¹ Jᵀ of each point under KFAC and EKFAC, from each layer's a and δ in the eigenbases: no row of J is solved."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg import Damped, EigenKronecker, Inverse
from curvops.linalg.operators.direct_sum import OfDirectSum
from curvops.linalg.operators.kronecker import OfEigenKronecker
from curvops.network.walks.layer_roots import Group
from curvops.operators.jacobian import Jacobian
from curvops.operators.kfac import EKFAC, KFAC
from curvops.operators.kfac_factors import Sides, kept_entries, members, rotate
from curvops.operators.moments import block_bytes, row_blocks


@torch.no_grad()
def point_covariances(jacobian: LinearOperator, inverse: LinearOperator, outputs: int) -> Float[Tensor, "m C C"] | None:
    """The diagonal blocks of J P⁻¹ Jᵀ of `outputs` rows each, for P = KFAC or EKFAC plus a prior.

    A forward pass, C backward passes and, for each layer, two rotations; where it is applied at one position
    Σ_i δ̃_ci δ̃_di Σ_j ã_j² / p_ij, at few the same for each pair of them, elsewhere the layer's own Jacobian, in chunks.
    None for other operators, and where parameters have no layer rule.
    """
    precision = inverse.base if isinstance(inverse, Inverse) else None
    if not (isinstance(precision, Damped) and isinstance(precision.base, KFAC | EKFAC)):
        return None
    form = precision._closed_form()
    if not isinstance(form, OfDirectSum) or not isinstance(jacobian, Jacobian) or jacobian.passes.engines.plan.others:
        return None
    passes, rows = jacobian.passes, dict(zip(precision.base.names, form.forms))
    positions = passes.model.selection.positions()
    total = jacobian.theta.new_zeros(jacobian.shape[0] // outputs, outputs, outputs)
    for first, groups in passes.jacobian_rows():
        for group in groups:
            start, count = (first + group.first_row) // outputs, group.num_rows // outputs
            target = total[start : start + count]
            whole, parts = rows.get(group.names), members(group, rows)
            if whole is not None and not isinstance(whole, OfEigenKronecker):
                _add_solved(target, group, whole, kept_entries(positions, group.names), passes.chunk_bytes)
            elif not parts:  # the layers were found otherwise when the curvature was built
                return None
            for names, matrices in parts:
                row = rows[names]
                assert isinstance(row, OfEigenKronecker)
                _add(target, matrices, row, passes.chunk_bytes)
    return total


def _add(target: Float[Tensor, "m C C"], matrices: list[Sides], row: OfEigenKronecker, most_bytes: int) -> None:
    """target += the blocks of one layer, or of layers that share weights."""
    base = row.eigen
    weights = row.definite_spectrum.reshape(base.values.shape).reciprocal()
    sides = [(rotate(left, base.left_vectors), right) for left, right in matrices]
    if len(sides) == 1 and not sides[0][1].is_floating_point():
        _add_embedded(target, *sides[0], weights)
        return
    # Calls that share weights add up their rows: to a sum over the positions of all of them.
    left = torch.cat([left for left, _ in sides], 3)
    right = torch.cat([_rotated(right, base).to(left.dtype) for _, right in sides], 2)
    columns, positions, outputs = left.shape[1], left.shape[3], target.shape[1]
    if positions * (positions + 1) // 2 <= columns * (positions + outputs):
        _add_pairs(target, left, right, weights, most_bytes)
    else:
        _add_rows(target, left, right, weights.sqrt(), block_bytes(most_bytes, left))


def _rotated(right: Tensor, base: EigenKronecker) -> Tensor:
    right = right if right.is_floating_point() else F.one_hot(right, base.values.shape[2]).to(base.dtype)
    return rotate(right, base.right_vectors)


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


def _add_solved(target: Tensor, group: Group, row: Any, kept: Tensor, most_bytes: int) -> None:
    """A small layer without Kronecker factors: its rows, and their solves with its own block."""
    start = 0
    for rows in group.pieces(most_bytes):
        flat = torch.cat([rows[name].flatten(2) for name in group.names], 2)[..., kept]
        solved = row.solve(flat.flatten(0, 1).mT).mT.reshape(flat.shape)
        count = flat.shape[0] * flat.shape[1] // target.shape[1]
        _add_products(target[start : start + count], solved, flat)
        start += count


def _add_products(target: Float[Tensor, "m C C"], one: Float[Tensor, "n R s"], other: Float[Tensor, "n R s"]) -> None:
    """target += one otherᵀ within each point; of sequences, within each position."""
    m, outputs, _ = target.shape
    target.baddbmm_(one.reshape(m, outputs, -1), other.reshape(m, outputs, -1).mT)
