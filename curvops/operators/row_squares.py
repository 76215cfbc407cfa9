"""Sums over the squares of rows of J, or of a curvature's root: their diagonals, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.network.likelihoods.output_fisher import OutputFisher
from curvops.network.model.model import Model
from curvops.network.model.parameters import Blocks
from curvops.network.walks.layer_roots import Group
from curvops.operators.jacobian import Jacobian
from curvops.operators.layer_matrix import as_tensors, width_of
from curvops.operators.linearization import Linearization
from curvops.operators.moments import second_moments


@torch.no_grad()
def curvature_diagonal(lin: Linearization, fisher: OutputFisher) -> Float[Tensor, " D"]:
    """Σ_n Σ_r g[n, r]², elementwise."""
    return _summed(lin.model, lin.root_rows(fisher), lin.passes.chunk_bytes)


@torch.no_grad()
def squared_columns(jacobian: Jacobian) -> Float[Tensor, " D"]:
    """Σ_n Σ_c J[n·C + c, d]² for each weight d: the diagonal of JᵀJ."""
    passes = jacobian.passes
    groups = (group for *_, groups in passes.jacobian_rows() for group in groups)
    return _summed(passes.model, groups, passes.chunk_bytes)


def _summed(model: Model, groups: Iterable[Group], chunk_bytes: int) -> Float[Tensor, " D"]:
    total = {name: torch.zeros_like(value) for name, value in model.values.items()}
    for group in groups:
        for name, squares in _squares(group, chunk_bytes).items():
            total[name] += squares
    return model.selection.flatten(total)


def _squares(group: Group, chunk_bytes: int) -> Blocks:
    matrices = group.matrices()
    if matrices is not None:
        assert group.layer is not None
        return as_tensors(group.layer, second_moments(matrices, width_of(group.layer), chunk_bytes))
    total: Blocks = {}
    for rows in group.pieces(chunk_bytes):
        for name, row in rows.items():
            squares = row.flatten(0, 1).square().sum(0)
            total[name] = total[name] + squares if name in total else squares
    return total
