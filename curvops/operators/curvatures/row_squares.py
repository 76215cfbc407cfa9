"""Sums over the squares of rows of J, or of a curvature's root: their diagonals, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.network.data.batches import Batch
from curvops.network.engines.engine import Engines
from curvops.network.engines.layerwise import Layer
from curvops.network.engines.rules.linear import LinearRule
from curvops.network.likelihoods.likelihood import Likelihood
from curvops.network.likelihoods.output_fisher import Empirical, OutputFisher
from curvops.network.model.model import Model
from curvops.network.model.parameters import Blocks
from curvops.network.walks.layer_roots import Group, groups_at
from curvops.network.walks.passes import Passes, chunk_bytes_within
from curvops.operators.layers.moments import second_moments, sum_of_squares
from curvops.operators.linearized.jacobian import Jacobian
from curvops.operators.linearized.linearization import Linearization


@torch.no_grad()
def curvature_diagonal(lin: Linearization, fisher: OutputFisher) -> Float[Tensor, " D"]:
    """Σ_n Σ_r g[n, r]², elementwise."""
    chunk = lin.passes.chunk_bytes
    groups = (group for _, groups in lin.root_pieces(fisher, chunk) for group in groups)
    return _summed(lin.passes, groups, chunk)


def score_and_diagonal(
    engines: Engines, likelihood: Likelihood, batch: Batch, fisher: OutputFisher
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The log-likelihood, the gradient of its negative, and `curvature_diagonal`: from the pass that `engines` kept.

    To be called under `no_grad`, once for each pass.
    None where no pass over the batch serves: some parameters have no layer rule, or δ is larger than a chunk.
    """
    found, model = engines.pop_first(), engines.model
    columns = fisher.num_columns(engines.plan.num_outputs)
    chunk_bytes = chunk_bytes_within(engines.memory_budget, batch.targets)
    if found is None or engines.plan.sensitivity_bytes * batch.num_points * (1 + columns) > chunk_bytes:
        return None
    f = found[0].detach()
    score = likelihood.log_prob(f, batch.targets, batch.weights).sum()
    residual = likelihood.residual(f, batch.targets, batch.weights).unsqueeze(0)
    same = isinstance(fisher, Empirical) and batch.weights is None  # a weight enters the root by its own root
    wanted = residual if same else torch.cat([residual, fisher.columns(f, batch, 0, columns)])
    gradient: Blocks = {}
    total: Blocks = {}
    for group in groups_at(model, *found, wanted):
        slopes, squares = _of_first_and_others(group, same, chunk_bytes)
        _add(gradient, slopes)
        _add(total, squares)
    return score, _flat(model, gradient), _flat(model, total)


@torch.no_grad()
def squared_columns(jacobian: Jacobian) -> Float[Tensor, " D"]:
    """Σ_n Σ_c J[n·C + c, d]² for each weight d: the diagonal of JᵀJ."""
    passes = jacobian.passes
    groups = (group for *_, groups in passes.jacobian_rows() for group in groups)
    return _summed(passes, groups, passes.chunk_bytes)


def _summed(passes: Passes, groups: Iterable[Group], chunk_bytes: int) -> Float[Tensor, " D"]:
    total: Blocks = {}
    for group in groups:
        _add(total, _squares(group, chunk_bytes))
    return passes.add_up([_flat(passes.model, total)])


def _add(total: Blocks, blocks: Blocks) -> None:
    for name, block in blocks.items():
        total[name] = total[name] + block if name in total else block


def _flat(model: Model, blocks: Blocks) -> Float[Tensor, " D"]:
    """One vector, with zeros for what no row is of."""
    if len(blocks) < len(model.selection.names):
        blocks = {name: torch.zeros_like(value) for name, value in model.values.items()} | blocks
    return model.selection.flatten(blocks)


def _of_first_and_others(group: Group, same: bool, chunk_bytes: int) -> tuple[Blocks, Blocks]:
    """Σ_n of the rows of a group's first column, and `_squares` of the others, or where `same` of this one."""
    slopes: Blocks = {}
    for part in group.parts:
        _add(slopes, _pulled(part.layer, part.kept, part.delta[:, :1]))
    rest = group.parts if same else tuple(replace(part, delta=part.delta[:, 1:]) for part in group.parts)
    first = rest[0]
    if len(rest) > 1 or first.kept.ndim != 2 or not isinstance(first.layer.rule, LinearRule):
        return slopes, _squares(replace(group, parts=rest), chunk_bytes)
    # Rows of a linear layer at one position are outer products, and their squares those of the sides' squares.
    return slopes, _pulled(first.layer, first.kept.square(), sum_of_squares(first.delta).unsqueeze(1))


def _pulled(layer: Layer, kept: Tensor, delta: Float[Tensor, "n 1 *out"]) -> Blocks:
    found = layer.rule.pull(layer.module, kept, delta, tuple(layer.names))
    return {layer.names[local]: block.squeeze(0) for local, block in found.items()}


def _squares(group: Group, chunk_bytes: int) -> Blocks:
    matrices = group.matrices()
    if matrices is not None:
        assert group.layer is not None
        return group.layer.from_matrix(second_moments(matrices, group.layer.width, chunk_bytes))
    total: Blocks = {}
    for rows in group.pieces(chunk_bytes):
        _add(total, {name: row.flatten(0, 1).square().sum(0) for name, row in rows.items()})
    return total
