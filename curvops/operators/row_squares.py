"""Sums over the squares of rows of J, or of a curvature's root: their diagonals, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.network.likelihoods.output_fisher import Empirical, OutputFisher
from curvops.network.model.model import Model
from curvops.network.model.parameters import Blocks
from curvops.network.walks.layer_roots import Group, groups_at
from curvops.operators.jacobian import Jacobian
from curvops.operators.layer_matrix import as_tensors, width_of
from curvops.operators.linearization import Linearization
from curvops.operators.moments import second_moments


@torch.no_grad()
def curvature_diagonal(lin: Linearization, fisher: OutputFisher) -> Float[Tensor, " D"]:
    """Σ_n Σ_r g[n, r]², elementwise."""
    chunk = lin.passes.chunk_bytes
    groups = (group for _, groups in lin.root_pieces(fisher, chunk) for group in groups)
    return _summed(lin.model, groups, chunk)


@torch.no_grad()
def score_and_diagonal(lin: Linearization, fisher: OutputFisher) -> tuple[Tensor, Tensor, Tensor]:
    """The log-likelihood, the gradient of its negative, and `curvature_diagonal`: from one pass where it was kept."""
    engines, likelihood = lin.passes.engines, lin.likelihood
    found, columns = engines.pop_first(), fisher.num_columns(lin.num_outputs)
    bytes_ = engines.plan.sensitivity_bytes * lin.num_data * (1 + columns)
    if found is None or len(found[0]) != lin.num_data or bytes_ > lin.passes.chunk_bytes:
        return lin.log_likelihood(), lin.gradient(), curvature_diagonal(lin, fisher)
    _, batch = next(lin.passes.batches())
    f = found[0].detach()
    score = likelihood.log_prob(f, batch.targets, batch.weights).sum()
    residual = likelihood.residual(f, batch.targets, batch.weights).unsqueeze(0)
    same = isinstance(fisher, Empirical) and batch.weights is None  # a weight enters the root by its own root
    wanted = [residual] if same else [residual, fisher.columns(f, batch, 0, columns)]
    groups = list(groups_at(lin.model, *found, torch.cat(wanted)))
    gradient = {name: torch.zeros_like(value) for name, value in lin.model.values.items()}
    for part in (part for group in groups for part in group.parts):
        layer = part.layer
        for local, term in layer.rule.pull(layer.module, part.kept, part.delta[:, :1], tuple(layer.names)).items():
            gradient[layer.names[local]] += term[0]
    if not same:
        groups = [replace(g, parts=tuple(replace(part, delta=part.delta[:, 1:]) for part in g.parts)) for g in groups]
    return score, lin.model.selection.flatten(gradient), _summed(lin.model, groups, lin.passes.chunk_bytes)


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
