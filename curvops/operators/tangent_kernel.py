"""The tangent kernel: inner products of the outputs' gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, product
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg.core.cache import recorded
from curvops.linalg.operators.base import COLUMN_BLOCK, Operator, convert
from curvops.network.walks.layer_roots import Group
from curvops.operators.jacobian import Jacobian
from curvops.operators.layer_matrix import height_of
from curvops.operators.linearization import Linearization
from curvops.operators.moments import mirrored
from curvops.operators.reading import OfLinearization, Stored


class TangentKernel(OfLinearization, Operator):
    """K = J(x) A⁻¹ J(x')ᵀ (n·C, n'·C) for a diagonal prior precision A: the covariance of f under the prior.

    `co.TangentKernel(lin, prior=1.0, x=None, x2=None)`: prior a positive number or a vector (D,); x defaults to the
    training inputs, x2 to x, which makes K symmetric positive semi-definite (Jacot et al. 2018). Rows point by point.

    Cost to build: nothing. A product is a pull at x' and a push at x, 0.5–2 gradients a vector. Choose it where points
    are few and weights many: function space. `to_dense` (the Gram matrix) costs a forward pass and C backward
    passes each side, and for each layer (a aᵀ) ∘ (δ δᵀ) where it is applied at one position and A is constant on it,
    else one product of its own Jacobian. Memory: chunks within the budget, and the Gram matrix. Raises
    ValueError for a prior of another size or that is not positive.
    """

    CARRIED = True  # it does not depend on the likelihood

    @classmethod
    def _read(cls, lin: Linearization, prior: float | Tensor = 1.0, x: Any = None, x2: Any = None) -> Stored:
        scale = _checked(prior, lin)
        left = lin.jacobian(x)
        return (left, left if x2 is None else lin.jacobian(x2), scale), {}

    @classmethod
    def _is_stored(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return len(args) == 3 and isinstance(args[0], Jacobian)

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

    def _draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        """k exact draws of N(0, K): J A^-½ z. One push of J a draw."""
        left, _, prior = self._args
        if not self.psd:
            raise ValueError("a kernel between two sets of inputs is no covariance; draw from the kernel of one set.")
        z = torch.randn(k, left.shape[-1], dtype=self.dtype, device=self.device, generator=generator).mT
        return left._product(z * (prior if prior.ndim == 0 else prior.unsqueeze(-1)).rsqrt())

    def to(self, *args: Any, **kwargs: Any) -> LinearOperator:
        """The kernel in another dtype or on another device; that of one set of inputs stays one."""
        device, dtype = torch._C._nn._parse_to(*args, **kwargs)[:2]
        left, right, prior = self._args
        first = left.to(device=device, dtype=dtype)
        second = first if self.psd else right.to(device=device, dtype=dtype)
        return TangentKernel(first, second, convert(prior, device, dtype))

    def to_dense(self) -> Float[Tensor, "nC mC"]:
        """The Gram matrix, where a gradient for A is asked for by one product a column."""
        left, right, prior = self._args
        if recorded((prior,)):
            unit = torch.eye(self.shape[-1], dtype=self.dtype, device=self.device)
            return torch.cat([self._product(part.mT) for part in unit.split(COLUMN_BLOCK)], 1)
        return gram(left, right, prior)


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
    scales = _scales(left.passes.model.selection.positions(), prior)
    result = left.theta.new_zeros(left.shape[-2], right.shape[-2])
    same = left.passes is right.passes
    for start, _, groups in left.passes.jacobian_rows():
        others = right.passes.jacobian_rows(start + 1 if same else 0)
        for other, _, partners in chain([(start, 0, groups)] if same else [], others):
            for group, partner in product(groups, partners):
                if group.names == partner.names:
                    first, second = start + group.first_row, other + partner.first_row
                    if not same or first <= second:
                        target = result[first : first + group.num_rows, second : second + partner.num_rows]
                        upper = same and first == second
                        _add(target, group, partner, scales, left.passes.chunk_bytes, upper)
    return mirrored(result.unsqueeze(0)).squeeze(0) if same else result


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


def _add(
    target: Float[Tensor, "nr ms"],
    group: Group,
    other: Group,
    scales: Mapping[str, Tensor],
    most_bytes: int,
    upper: bool,
) -> None:
    """target += inner products of the rows of one layer at two sets of points; `upper`: of one set, half of them."""
    scale = [scales[name] for name in group.names]
    constant = all(s.ndim == 0 for s in scale) and bool((torch.stack(scale) == scale[0]).all())
    first, second = (_sides(group), _sides(other)) if constant else (None, None)
    if first is not None and second is not None:
        _add_separable(target, first, second, scale[0], most_bytes, upper)
        return
    start = 0
    for rows in group.pieces(most_bytes):
        weighted = {name: _flat(row * scales[name]) for name, row in rows.items()}
        height, column = len(next(iter(weighted.values()))), start if upper else 0
        for partner in other.pieces(most_bytes, column // other.num_columns):
            for name, row in weighted.items():
                against = _flat(partner[name])
                target[start : start + height, column : column + len(against)].addmm_(row, against.mT)
            column += len(against)
        start += height


def _flat(rows: Tensor) -> Float[Tensor, "nr p"]:
    return rows.reshape(rows.shape[0] * rows.shape[1], -1)


def _sides(group: Group) -> tuple[Tensor, Tensor] | None:
    """(left, right) of a layer that is applied once and at one position; None for others."""
    if len(group.parts) != 1 or "weight" not in group.parts[0].layer.names:
        return None
    part = group.parts[0]
    if part.delta[0, 0].numel() != height_of(part.layer):
        return None
    found = group.matrices()
    return found[0] if found and found[0][1].is_floating_point() and found[0][1].shape[2] == 1 else None


def _add_separable(
    target: Tensor,
    first: tuple[Tensor, Tensor],
    second: tuple[Tensor, Tensor],
    scale: Tensor,
    most_bytes: int,
    upper: bool,
) -> None:
    """target += (a a'ᵀ) ∘ (δ δ'ᵀ), group by group and some points at a time."""
    for (left, a), (other, b) in zip(_by_group(*first), _by_group(*second)):
        (n, r, _), (m, s, _) = left.shape, other.shape
        step = max(1, most_bytes // (r * m * s * left.element_size()))
        for start in range(0, n, step):
            points, kept = slice(start, start + step), slice(start if upper else 0, None)
            outer = left[points].flatten(0, 1) @ other[kept].flatten(0, 1).mT
            inner = (scale * a[points]) @ b[kept].mT
            outer.view(-1, r, m - kept.start, s).mul_(inner[:, None, :, None])
            target[start * r : start * r + len(outer), kept.start * s :] += outer


def _by_group(left: Tensor, right: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """δ (n, r, p) and a (n, q) of each group."""
    return zip(left[:, :, :, 0].unbind(2), right[:, :, 0].unbind(1))
