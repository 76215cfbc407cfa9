"""Sums over the squares of rows of J, or of a curvature's root: their diagonals, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from curvops.ambient import CACHE_BYTES
from curvops.network.data.batches import Batch
from curvops.network.engines.engine import Engines
from curvops.network.engines.layer_calls import Layer, sensitivities
from curvops.network.engines.rules.layer_rules import LinearRule
from curvops.network.likelihoods.likelihood import Likelihood
from curvops.network.likelihoods.output_fisher import Empirical, OutputFisher
from curvops.network.model.model import Model
from curvops.network.model.parameters import Blocks
from curvops.network.walks.layer_roots import Group, groups_of_calls
from curvops.network.walks.walk import Passes, chunk_bytes_within


def score_and_diagonal(
    engines: Engines, likelihood: Likelihood, batch: Batch, fisher: OutputFisher
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return log-likelihood, gradient of its negative and curvature diagonal, from the pass that `engines` kept.

    Call it under `no_grad`, once for each pass. Returns None if no pass over the batch serves: some parameters have no
    layer rule, or δ is larger than a chunk.
    """
    recording, model = engines.pop_first(), engines.model
    columns = fisher.num_columns(engines.plan.num_outputs)
    chunk_bytes = chunk_bytes_within(engines.memory_budget, batch.targets)
    if recording is None or engines.plan.sensitivity_bytes * batch.num_points * (1 + columns) > chunk_bytes:
        return None
    f = recording[0].detach()
    score = likelihood.log_prob(f, batch.targets, batch.weights).sum()
    residual = likelihood.residual(f, batch.targets, batch.weights).unsqueeze(0)
    same = isinstance(fisher, Empirical) and batch.weights is None  # a weight enters the root by its own root
    wanted = residual if same else torch.cat([residual, fisher.columns(f, batch, 0, columns)])
    gradient: Blocks = {}
    total: Blocks = {}
    for group in groups_of_calls(recording[1], sensitivities(model, *recording, wanted)):
        slopes, squares = _of_first_and_others(group, same, chunk_bytes)
        _add(gradient, slopes)
        _add(total, squares)
    return score, _flat(model, gradient), _flat(model, total)


@torch.no_grad()
def squared_columns(passes: Passes) -> Float[Tensor, " D"]:
    """Return Σ_n Σ_c J[n·C + c, d]² for each weight d, the diagonal of JᵀJ."""
    return sum_squares(passes, (group for *_, groups in passes.jacobian_rows() for group in groups), passes.chunk_bytes)


@torch.no_grad()
def sum_squares(passes: Passes, groups: Iterable[Group], chunk_bytes: int) -> Float[Tensor, " D"]:
    """Add up the squares of rows, elementwise."""
    total: Blocks = {}
    for group in groups:
        _add(total, squares_of(group, chunk_bytes))
    return passes.add_up(_flat(passes.model, total))


def _add(total: Blocks, blocks: Blocks) -> None:
    for name, block in blocks.items():
        total[name] = total[name] + block if name in total else block


def _flat(model: Model, blocks: Blocks) -> Float[Tensor, " D"]:
    """Return one vector, with zeros where no row exists."""
    if len(blocks) < len(model.selection.names):
        blocks = {name: torch.zeros_like(value) for name, value in model.values.items()} | blocks
    return model.selection.flatten(blocks)


def _of_first_and_others(group: Group, same: bool, chunk_bytes: int) -> tuple[Blocks, Blocks]:
    """Return Σ_n of the rows of a group's first column, and `squares_of` of the others (with `same`, of this one)."""
    slopes: Blocks = {}
    for factors in group.parts:
        _add(slopes, _pull(factors.layer, factors.layer_input, factors.delta[:, :1]))
    rest = group.parts if same else tuple(replace(factors, delta=factors.delta[:, 1:]) for factors in group.parts)
    first = rest[0]
    if len(rest) > 1 or first.layer_input.ndim != 2 or not isinstance(first.layer.rule, LinearRule):
        return slopes, squares_of(replace(group, parts=rest), chunk_bytes)
    # Rows of a linear layer at one position are outer products, and their squares are those of the sides' squares.
    return slopes, _pull(first.layer, first.layer_input.square(), sum_of_squares(first.delta).unsqueeze(1))


def _pull(layer: Layer, inputs: Tensor, delta: Float[Tensor, "n 1 *out"]) -> Blocks:
    gradients = layer.rule.pull(layer.module, inputs, delta, tuple(layer.names))
    return {layer.names[local]: block.squeeze(0) for local, block in gradients.items()}


def squares_of(group: Group, chunk_bytes: int) -> Blocks:
    """Return Σ_n Σ_r of the squares of a group's rows, elementwise, by name."""
    matrices = group.matrices()
    if matrices is not None:
        assert group.layer is not None
        if group.hessian is not None:  # the rows of different outputs and positions do not overlap
            (_, right), h = matrices[0], group.hessian.diagonal
            squares = h.to(right.dtype).mT @ right.flatten(0, 2).square()
            return group.layer.from_matrix(squares.unsqueeze(0))
        return group.layer.from_matrix(OuterRows(matrices).second_moments(group.layer.width, chunk_bytes))
    total: Blocks = {}
    for rows in group.pieces(chunk_bytes):
        _add(total, {name: row.flatten(0, 1).square().sum(0) for name, row in rows.items()})
    return total


@dataclass(frozen=True, eq=False)
class OuterRows:
    """The rows Σ_t left ⊗ right of some points, summed over the calls of a layer, from the sides of each call."""

    sides: Sequence[tuple[Tensor, Tensor]]

    def second_moments(self, width: int, most_bytes: int) -> Float[Tensor, "g p {width}"]:
        """Return Σ_n Σ_r of the rows' squares, elementwise.

        At one position (t = 1) the columns share one product, (Σ_r l²) ⊗ a². Otherwise rows are formed and squared in
        blocks of at most `most_bytes`, and at least one point's R·q numbers. `width` is q, which indices do not show.
        """
        left, right = self.sides[0]
        if len(self.sides) == 1 and not right.is_floating_point():
            return embedding_squares(left, right, width)
        if len(self.sides) == 1 and right.shape[2] == 1:
            return torch.einsum("ngp,ngq->gpq", sum_of_squares(left)[:, :, 0], right.square()[:, :, 0])
        pairs = [(a, b if b.is_floating_point() else F.one_hot(b, width).to(a.dtype)) for a, b in self.sides]
        total = left.new_zeros(left.shape[2], left.shape[4], width)
        for _, lines, block in OuterRows(pairs).blocks(most_bytes):
            total[:, lines] += block.square_().sum((0, 2))
        return total

    def blocks(self, most_bytes: int) -> Iterator[tuple[slice, slice, Float[Tensor, "n g r w q"]]]:
        """Yield the rows in blocks: (points, lines of p, block).

        A block takes at most `most_bytes`, and on a CPU at most its cache, which is 3 times as fast as its memory, but
        at least the R·q numbers of one point and line. The next block overwrites it.
        """
        left, right = self.sides[0]
        most_bytes = most_bytes if left.is_cuda else min(most_bytes, CACHE_BYTES)
        (n, r, g, _, p), q = left.shape, right.shape[-1]
        line = r * g * q * left.element_size()  # of one point and one of p
        points, lines = max(1, most_bytes // (line * p)), min(p, max(1, most_bytes // line))
        memory = left.new_empty(min(points, n) * lines * r * g * q)  # reused: new pages cost more than sums
        for start in range(0, n, points):
            for first in range(0, p, lines):
                some, line_slice = slice(start, start + points), slice(first, first + lines)
                yield some, line_slice, _block([(a[some, ..., line_slice], b[some]) for a, b in self.sides], memory)


def sum_of_squares(left: Float[Tensor, "n r *out"]) -> Float[Tensor, "n *out"]:
    """Return Σ_r left², on a CPU column by column: the sum stays in its cache, and no squares are stored."""
    if left.is_cuda or left[:, 0].numel() < left.shape[1]:  # many short columns
        return left.square().sum(1)
    total = left[:, 0].square()
    for column in left.unbind(1)[1:]:
        total.addcmul_(column, column)
    return total


def _block(pairs: Sequence[tuple[Tensor, Tensor]], memory: Tensor) -> Float[Tensor, "n g r w q"]:
    (n, r, g, _, w), q = pairs[0][0].shape, pairs[0][1].shape[-1]
    block = memory[: n * g * r * w * q].view(n * g, r * w, q)
    for i, (a, b) in enumerate(pairs):
        t = a.shape[3]
        sides = a.permute(0, 2, 1, 4, 3).reshape(n * g, r * w, t), b.reshape(n * g, t, q)
        _ = block.baddbmm_(*sides) if i else torch.bmm(*sides, out=block)
    return block.view(n, g, r, w, q)


def embedding_squares(
    left: Float[Tensor, "n r 1 t E"], indices: Tensor, num_embeddings: int
) -> Float[Tensor, "1 E {num_embeddings}"]:
    """Return Σ_n Σ_r (Σ_t δ[t] ⊗ onehot(index[t]))²: positions of a token within a point are summed before squaring."""
    tokens = indices[:, 0]
    same = (tokens.unsqueeze(2) == tokens.unsqueeze(1)).to(left.dtype)  # (n, t, t)
    summed = torch.einsum("nts,nrse->nrte", same, left[:, :, 0])
    # Each of the k positions of a token holds the whole sum: these are k equal squares, each counted as 1/k.
    squares = summed.square().sum(1) / same.sum(2, keepdim=True)
    total = left.new_zeros(num_embeddings, left.shape[-1]).index_add_(0, tokens.flatten(), squares.flatten(0, 1))
    return total.mT.unsqueeze(0)
