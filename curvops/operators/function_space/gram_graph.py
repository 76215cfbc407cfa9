"""The Gram matrix J(x) A⁻¹ J(x')ᵀ with its gradients in x, x' and the prior precision A.

Both sets of inputs pass through the network together, once. The inner products of each layer's rows are computed with
their graph; rows that have to be formed are formed again in the backward pass, one layer at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from curvops.network import Group
from curvops.operators.function_space.gram_matrix import flat_rows, pays_by_positions, sides_of
from curvops.operators.linearized.jacobian import Jacobian


def gram_with_graph(left: Jacobian, right: Jacobian, scales: Mapping[str, Tensor]) -> Float[Tensor, "nC mC"]:
    """Return J(x) S J(x')ᵀ with its gradients in x, x' and S, as far as these require one.

    Args:
        left: J(x), made with `differentiable=True`.
        right: J(x'), likewise; J(x) itself if x' is x.
        scales: S = A⁻¹ by parameter name: 0-d where it is constant, otherwise of the parameter's shape.

    Cost: two to three times that of the matrix without a graph. Memory, where S varies within a layer: that layer's
        rows.
    """
    same, rows = left.passes is right.passes, left.shape[-2]
    points = left.graph if same else left.graph.followed_by(right.graph)

    def compute(walk: Any, *values: Tensor) -> Tensor:
        found = left.theta.new_zeros(rows, right.shape[-2])
        by_name = dict(zip(scales, values))
        for group in walk.by_layer():
            own = [by_name[name] for name in group.names]
            cut = rows // group.num_columns
            first, second = (group, group) if same else (group.take(slice(cut)), group.take(slice(cut, None)))
            found = found + _inner_products(first, second, own)
        return found

    result: Tensor = points.by_rows(compute, left.passes.chunk_bytes, *scales.values())
    return result


def _inner_products(first: Group, second: Group, scales: list[Tensor]) -> Float[Tensor, "nr ms"]:
    """Return the inner products of the rows of one layer, by pairs of positions where that is less work."""
    one_number = all(scale is scales[0] for scale in scales) and scales[0].ndim == 0
    if one_number and pays_by_positions(first, second):
        return scales[0] * _by_positions(*sides_of(first), *sides_of(second))
    found: Tensor = checkpoint(_by_rows, first, second, scales, use_reentrant=False)
    return found


def _by_positions(left: Tensor, a: Tensor, other: Tensor, b: Tensor) -> Float[Tensor, "nr ms"]:
    outer = torch.einsum("nrgtp,msgup->nrmsgtu", left, other)
    inner = torch.einsum("ngtq,mguq->nmgtu", a, b)
    return torch.einsum("nrmsgtu,nmgtu->nrms", outer, inner).flatten(2).flatten(0, 1)


def _by_rows(first: Group, second: Group, scales: list[Tensor]) -> Float[Tensor, "nr ms"]:
    rows, others = first.rows(), first.rows() if second is first else second.rows()
    each = (flat_rows(rows[name] * scale) @ flat_rows(others[name]).mT for name, scale in zip(first.names, scales))
    return torch.stack(list(each)).sum(0)
