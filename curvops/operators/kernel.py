"""The tangent kernel: inner products of the outputs' gradients."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg.base import Operator
from curvops.network.parameters import Blocks
from curvops.network.roots import Group
from curvops.operators.jacobian import Jacobian
from curvops.operators.linearization import Linearization


class TangentKernel(Operator):
    """K = J(x) A⁻¹ J(x')ᵀ (n·C, n'·C) for a diagonal prior precision A: the covariance of f under the prior.

    `co.TangentKernel(lin, prior=1.0, x=None, x2=None)`: prior a positive number or a vector (D,); x defaults to the
    training inputs, x2 to x, which makes K symmetric positive semi-definite (Jacot et al. 2018). Rows point by point.

    A product costs a pull at x' and a push at x. `to_dense` (the Gram matrix) costs a forward pass and C backward
    passes each side, and for each layer (a aᵀ) ∘ (δ δᵀ) where it is applied at one position and A is constant on it,
    else one product of its own Jacobian, in chunks within the memory budget. Carries no gradient for A. Raises
    ValueError for a prior of another size or that is not positive.
    """

    def __init__(self, source: Any, prior: Any = 1.0, *rest: Any, x: Any = None, x2: Any = None) -> None:
        if isinstance(source, Linearization):
            rest = (_checked(prior, source),)
            source, prior = _jacobians(source, x, x2)
        super().__init__(source, prior, *rest)

    @property
    def prior(self) -> Tensor:
        """A, 0-d or (D,)."""
        return self._args[2]

    @property
    def psd(self) -> bool:
        return self._args[0] is self._args[1] or self._args[0].passes is self._args[1].passes

    def _size(self) -> torch.Size:
        return torch.Size((self._args[0].shape[-2], self._args[1].shape[-2]))

    def _product(self, block: Tensor) -> Tensor:
        left, right, prior = self._args
        pulled = right._transposed_product(block)
        return left._product(pulled / (prior if prior.ndim == 0 else prior.unsqueeze(-1)))

    def _transposed_product(self, block: Tensor) -> Tensor:
        left, right, prior = self._args
        pulled = left._transposed_product(block)
        return right._product(pulled / (prior if prior.ndim == 0 else prior.unsqueeze(-1)))

    def _transpose_nonbatch(self) -> LinearOperator:
        left, right, prior = self._args
        return self if self.psd else TangentKernel(right, left, prior)

    def to_dense(self) -> Float[Tensor, "nC mC"]:
        """The Gram matrix."""
        left, right, prior = self._args
        return gram(left, right, prior)


def _jacobians(lin: Linearization, x: Any, x2: Any) -> tuple[Jacobian, Jacobian]:
    left = lin.jacobian(x)
    return left, left if x2 is None else lin.jacobian(x2)


def _checked(prior: Any, lin: Linearization) -> Tensor:
    scale = torch.as_tensor(prior, dtype=lin.theta.dtype, device=lin.theta.device)
    if scale.ndim > 1 or (scale.ndim == 1 and len(scale) != lin.num_parameters):
        raise ValueError(f"prior must be a number or a vector of {lin.num_parameters}, got {tuple(scale.shape)}.")
    if not bool(((scale > 0) & scale.isfinite()).all()):
        raise ValueError(f"prior must be positive and finite, got {float(scale.min()):.3g}.")
    return scale


@torch.no_grad()
def gram(left: Jacobian, right: Jacobian, prior: Tensor) -> Float[Tensor, "nC mC"]:
    """J(x) A⁻¹ J(x')ᵀ, layer by layer and points by points; where x is x', half of it."""
    selection = left.passes.model.selection
    scales = _scales(selection.positions(), prior)
    result = left.theta.new_zeros(left.shape[-2], right.shape[-2])
    same = left.passes is right.passes
    for start, groups in left.passes.jacobian_rows():
        for other, others in right.passes.jacobian_rows():
            if same and other < start:
                continue
            for group in groups:
                for partner in (g for g in others if g.names == group.names):
                    part = _block(group, partner, scales, left.passes.chunk_bytes)
                    rows = slice(start + group.start * part.shape[1], start + (group.start + len(part)) * part.shape[1])
                    columns = slice(
                        other + partner.start * part.shape[3],
                        other + (partner.start + part.shape[2]) * part.shape[3],
                    )
                    part = part.flatten(2).flatten(0, 1)
                    result[rows, columns] += part
                    if same and other > start:
                        result[columns, rows] += part.mT
    return result


def _scales(positions: dict[str, Tensor], prior: Tensor) -> dict[str, Tensor]:
    """A⁻¹ by name: 0-d where it is constant on all of a tensor, else of its shape, zero outside the selection."""
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


def _block(group: Group, other: Group, scales: dict[str, Tensor], chunk_bytes: int) -> Float[Tensor, "n r m r"]:
    """Inner products of the rows of one layer at two sets of points."""
    scale = [scales[name] for name in group.names]
    if all(s.ndim == 0 for s in scale) and bool((torch.stack(scale) == scale[0]).all()):
        first, second = _at_one_position(group), _at_one_position(other)
        if first is not None and second is not None:
            return scale[0] * _separable(first, second)
    found = []
    for rows in group.pieces(chunk_bytes):
        weighted = _flat({name: rows[name] * scales[name] for name in group.names})
        parts = [
            torch.einsum("nrp,msp->nrms", weighted, _flat({name: r[name] for name in group.names}))
            for r in other.pieces(chunk_bytes)
        ]
        found.append(torch.cat(parts, 2))
    return torch.cat(found)


def _at_one_position(group: Group) -> tuple[Tensor, Tensor] | None:
    """Left and right of a layer that is applied once, at one position."""
    matrices = group.matrices()
    if matrices is None or len(matrices) > 1 or not matrices[0][1].is_floating_point() or matrices[0][1].shape[2] > 1:
        return None
    return matrices[0]


def _separable(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Float[Tensor, "n r m r"]:
    """(a a'ᵀ) ∘ (δ δ'ᵀ) for a layer applied at one position; a sum of them over groups."""
    (left, a), (other, b) = first, second
    inner = torch.einsum("ngq,mgq->gnm", a[:, :, 0], b[:, :, 0])
    outer = torch.einsum("nrgp,msgp->gnrms", left[:, :, :, 0], other[:, :, :, 0])
    return (outer * inner[:, :, None, :, None]).sum(0)


def _flat(rows: Blocks) -> Float[Tensor, "n r p"]:
    return torch.cat([row.reshape(*row.shape[:2], -1) for row in rows.values()], 2)
