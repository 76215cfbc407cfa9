"""The Gram matrix J(x) A⁻¹ J(x')ᵀ with its gradients in x, x' and the prior precision A.

Both sets of inputs pass through the network together, once. The inner products of each layer's rows are recorded in
the graph; rows that have to be formed are formed again in the backward pass, some channels at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from curvops.network import Group
from curvops.operators.function_space.gram_matrix import flat_rows, form_of, sides_of
from curvops.operators.function_space.row_products import matrix_of_scales, row_products
from curvops.operators.linearized.jacobian import Jacobian


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
        found = left.theta.new_zeros(rows, right.shape[-2])
        by_name = dict(zip(scales, values))
        for group in walk.by_layer():
            own = {name: by_name[name] for name in group.names}
            cut = rows // group.num_columns
            first, second = (group, group) if same else (group.take(slice(cut)), group.take(slice(cut, None)))
            found = found + _inner_products(first, second, own, most_bytes)
        return found

    result: Tensor = points.by_rows(compute, most_bytes, *scales.values())
    return result


def _inner_products(
    first: Group, second: Group, scales: Mapping[str, Tensor], most_bytes: int
) -> Float[Tensor, "nr ms"]:
    """Return the inner products of the rows of one layer, by pairs of positions if that is less work."""
    layer, left, right = first.layer, sides_of(first), sides_of(second)
    if layer is None or left is None or right is None:
        found: Tensor = checkpoint(_by_all_rows, first, second, scales, use_reentrant=False)
        return found
    one, scale = (left.left, left.right(slice(None))), matrix_of_scales(layer, scales)
    other = one if second is first else (right.left, right.right(slice(None)))
    if all(value.ndim == 0 for value in scales.values()) and form_of(left, right) != "rows":
        return _by_positions(one, other, scale[0, 0])
    return row_products(one, other, scale, most_bytes)


def _by_positions(
    one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], scale: Float[Tensor, " q"]
) -> Float[Tensor, "nr ms"]:
    outer = torch.einsum("nrgtp,msgup->nrmsgtu", one[0], other[0])
    inner = torch.einsum("ngtq,mguq->nmgtu", one[1] * scale, other[1])
    return torch.einsum("nrmsgtu,nmgtu->nrms", outer, inner).flatten(2).flatten(0, 1)


def _by_all_rows(first: Group, second: Group, scales: Mapping[str, Tensor]) -> Float[Tensor, "nr ms"]:
    rows, others = first.rows(), first.rows() if second is first else second.rows()
    each = (flat_rows(rows[name] * scale) @ flat_rows(others[name]).mT for name, scale in scales.items())
    return torch.stack(list(each)).sum(0)
