"""The blocks J P⁻¹ Jᵀ of single points: from each layer's a and δ if P has structure, otherwise by solves.

Under KFAC and EKFAC, a and δ are rotated into the eigenbases; under a diagonal P they are weighted. For low rank plus
a diagonal, the result is that of the diagonal less the term of Woodbury's identity, which needs J U. Each of several
dense blocks uses the rows of its layer, and a single dense P uses all rows of the selected weights. A last layer,
whose δ is the identity, needs only its inputs. A group of points with a joint covariance counts as one point with more
outputs.

Any other P is solved with, for the rows of some points at a time.

Results are the blocks (m, C, C) of m points, or their diagonals (m, C): with thousands of outputs the blocks would
be far larger than everything else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checks import carries_graph
from curvops.linalg import Damped, Inverse, Operator
from curvops.linalg.core.algorithm import holding, solve_width
from curvops.linalg.core.vectors import unit_columns
from curvops.linalg.operators.closed_form import ClosedForm, DiagonalPlusRoot, ScaledForm
from curvops.linalg.operators.direct_sum import DirectSumForm
from curvops.linalg.operators.given_matrix import DenseForm
from curvops.network import Group, JacobianRows, Layer, OuterRows
from curvops.operators.curvatures.ggn import OutputBlocksForm
from curvops.operators.curvatures.kfac import LayerBlocksForm
from curvops.operators.curvatures.kfac_factors import PARTS, FactorPair, fewer_positions, members, rotate
from curvops.operators.function_space.function_space import DualInverse
from curvops.operators.function_space.gram_matrix import matrix_of_scales, scales_by_name
from curvops.operators.linearized.network_operator import Jacobian

LEAST_LEFT = {torch.float32: 1e-2, torch.float64: 1e-5}
"""The least share of the diagonal's variance that Woodbury's difference may leave: it loses that many digits."""
LEAST_OF_ROWS = 1e-8
"""The same for sums in float64 of rows in single precision: both terms have the rows' errors, of eps / √share."""
ROWS_AT_ONCE = 128
"""The number of rows of J that are solved for at a time, if memory has room for them."""
BLOCK_NUMBERS = 2**18
"""The most numbers in a block of rows of few weights: each solve has its own fixed cost."""

Target = Tensor
"""The blocks (m, C, C) of m points, or their diagonals (m, C)."""


class LayerMetric(NamedTuple):
    """P⁻¹ on a layer's matrix: inverse eigenvalues (g, p, q) and eigenvectors (None for the unit vectors)."""

    weights: Tensor
    left: Tensor | None = None
    right: Tensor | None = None


class Metric(ABC):
    """P⁻¹ acting on the rows of one group of layers."""

    @abstractmethod
    def add(self, target: Target, group: Group, most_bytes: int) -> bool:
        """Add to target the group's part of J P⁻¹ Jᵀ; return False if its layers do not fit the structure."""

    def add_last(self, target: Target, layer: Layer, inputs: Float[Tensor, "m q"]) -> bool:
        """Add the part of a last layer from its inputs alone; return False if P has no structure on its matrix."""
        return False


def row_covariances(J: Jacobian, W: LinearOperator, outputs: int, diagonals: bool = False) -> Target:
    """Return the diagonal blocks of J W Jᵀ, W = P⁻¹, of `outputs` rows each, or the diagonals of these blocks.

    If P has structure they come from the layers (`point_covariances`), otherwise from solves for the rows of J. They
    have a gradient in the inputs if J is recorded; otherwise in P, if a gradient in it is required.
    """
    blocks: Target | None = None
    if J.is_recorded:

        def compute(rows: JacobianRows) -> Target:
            structured = point_covariances(J, W, outputs, diagonals, rows)
            if structured is not None:
                return structured
            return _solved_with_graph(J, W, torch.cat([*rows.selected_rows()]), outputs, diagonals)

        blocks = J.graph.by_rows(compute, J.passes.chunk_bytes)
    elif not carries_graph((*J.representation(), *W.representation())):
        if J.shape[-2] > outputs or outputs == J.passes.engines.plan.num_outputs:
            blocks = point_covariances(J, W, outputs, diagonals)
        else:  # the rows of all points are needed together
            width, beside = solve_width(J, outputs)
            with holding(J, beside):
                blocks = point_covariances(J, W, outputs, diagonals) if width == outputs else None
    if blocks is None:
        blocks = _by_solves(J.gathered(), W, outputs, diagonals)
    return blocks if diagonals else (blocks + blocks.mT) / 2


def _by_solves(J: Jacobian, W: LinearOperator, outputs: int, diagonals: bool) -> Target:
    """Return the blocks by solves for the rows of J, of as many points at a time as make one block of rows.

    The rows of some points are multiplied by W and by themselves. If memory has no room for the rows of one point, or a
    gradient in P is recorded, rows come from products with unit vectors, and what they become is pushed through J
    again.
    """
    C, recorded = J.passes.engines.plan.num_outputs, carries_graph((*J.representation(), *W.representation()))
    together = max(1, outputs // C)
    width, beside = solve_width(J, max(ROWS_AT_ONCE, BLOCK_NUMBERS // J.shape[-1], together * C))
    points, blocks = max(1, width // C // together) * together, []
    for piece in J.by_points(points, together):
        rows = piece.shape[-2]
        with holding(J, beside), torch.set_grad_enabled(recorded):
            if rows <= width and not recorded:
                formed = piece.formed()
                one, other = (columns.mT.unflatten(0, (-1, outputs)) for columns in (formed, W._matmul(formed)))
                block = one @ other.mT
            else:
                images = []
                for some in torch.arange(rows, device=J.device).split(width):
                    units = unit_columns(some, rows, J.dtype)
                    images.append(piece._matmul(W._matmul(piece._t_matmul(units))))
                products = torch.cat(images, 1).unflatten(0, (-1, outputs)).unflatten(2, (-1, outputs))
                block = torch.diagonal(products, dim1=0, dim2=2).permute(2, 0, 1)
        blocks.append(block.diagonal(dim1=-2, dim2=-1) if diagonals else block)
    return torch.cat(blocks)


def _solved_with_graph(
    J: Jacobian, W: LinearOperator, rows: Float[Tensor, "r D"], outputs: int, diagonals: bool
) -> Target:
    """Return J W Jᵀ with its derivative dJ W Jᵀ + J W dJᵀ, which needs no second solve."""
    width, beside = solve_width(J, min(ROWS_AT_ONCE, len(rows)))
    with holding(J, beside), torch.no_grad():
        solved = torch.cat([W._matmul(some.mT).mT for some in rows.detach().split(width)])
    rows, solved = (matrix.unflatten(0, (-1, outputs)) for matrix in (rows, solved))
    blocks = (rows * solved).sum(-1) if diagonals else rows @ solved.mT
    return blocks + (blocks if diagonals else blocks.mT) - blocks.detach()


def point_covariances(
    jacobian: LinearOperator,
    inverse: LinearOperator,
    outputs: int,
    diagonals: bool = False,
    rows: JacobianRows | None = None,
) -> Target | None:
    """Return the diagonal blocks of J P⁻¹ Jᵀ of `outputs` rows each, if G in P = G + prior, or P⁻¹, has structure.

    A block belongs to a position, a point or several points; a single block of all rows is the joint covariance.
    With `diagonals` only the diagonals of the blocks are computed. `rows` that carry a graph replace the walk over the
    Jacobian, and give the result a graph. Returns None for other operators, and if Woodbury's difference would lose too
    many digits.

    Cost: a forward pass, C backward passes (none for a last layer; C for each point alone if a parameter has no layer
    rule) and two rotations per layer (none for a diagonal P).
    A layer that is applied at one position adds Σ_i δ̃_ci δ̃_di Σ_j ã_j² / p_ij; one that is applied at few positions
    adds the same for each pair of them; otherwise, and between points, the layer's own Jacobian is formed in chunks.
    Low rank adds J U, from the same a and δ; a `DualInverse` needs only Gram matrices.
    """
    if not isinstance(jacobian, Jacobian) or not isinstance(inverse, Operator):
        return None
    jacobian = jacobian.gathered()
    shape = (jacobian.shape[0] // outputs, outputs, outputs)[: 2 if diagonals else 3]
    with torch.no_grad() if rows is None else nullcontext():
        walk = jacobian.passes if rows is None else rows
        inverted = inverse.base if isinstance(inverse, Inverse) else None
        form: Any = inverted._closed_form() if isinstance(inverted, Damped) else None
        factor = None
        while isinstance(form, ScaledForm):
            form, factor = form.inner, form.factor if factor is None else form.factor * factor
        if isinstance(form, DenseForm):
            blocks: Target | None = _sum_by_cholesky(walk, form, shape)
        elif isinstance(inverse, DualInverse):
            blocks = None if rows is not None else _sum_by_kernel(jacobian, inverse, shape)
        elif isinstance(form, OutputBlocksForm):
            blocks = _sum_over_layers(walk, InOutputBlocks(form), shape)
        elif isinstance(form, DirectSumForm):
            blocks = _sum_over_layers(walk, InLayerBlocks(walk, form), shape)
        else:
            parts = inverse.diagonal_plus_root() if form is None else form.inverse_parts()
            of_root = parts is not None and rows is None and parts.vectors is not None and not parts.weights.any()
            blocks = None if parts is None else _sum_by_parts(walk, parts, shape, jacobian if of_root else None)
        return blocks if blocks is None or factor is None else blocks / factor


def _sum_over_layers(
    walk: JacobianRows,
    metric: Metric,
    shape: tuple[int, ...],
    tangents: dict[str, Tensor] | None = None,
    pushed: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Target | None:
    """Sum over layers, in this dtype; with tangents V, also add (J V)ᵀ to `pushed` (K, N·C) from the same a and δ."""
    total, outputs = walk.model.theta.new_zeros(shape, dtype=dtype), shape[1]
    last = walk.features() or []
    by_position = bool(last) and all(features.outputs_each == outputs for features in last)
    if by_position and _sum_of_last(total, ((features.layer, features.inputs()) for features in last), metric):
        if tangents is not None and pushed is not None:
            pushed += torch.cat([features.times(tangents).flatten(1) for features in last], 1)
        return total
    for first, groups in walk.groups_together(outputs):
        while groups:  # none is held while the next is used, or made
            group = groups.pop(0).to(total.dtype)
            row = first + group.first_row
            start, count = row // outputs, group.num_rows // outputs
            if not metric.add(total[start : start + count], group, walk.chunk_bytes):
                return None
            if tangents is not None and pushed is not None:
                columns = pushed[:, row : row + group.num_rows]
                columns += group.push(tangents).flatten(1)
            del group
    return total


def _sum_of_last(total: Target, last: Iterable[tuple[Layer, Tensor | None]], metric: Metric) -> bool:
    """Add the part that comes from the last layer's inputs, if P has a structure on its matrix."""
    start = 0
    for layer, inputs in last:
        if inputs is None or not metric.add_last(total[start : start + len(inputs)], layer, inputs.to(total.dtype)):
            return False
        start += len(inputs)
    return True


def _add_last(target: Target, layer: LayerMetric, inputs: Float[Tensor, "m q"]) -> None:
    """Add U diag(k) Uᵀ with k_i = Σ_j ã_j² / p_ij to target: δ is the identity at every point."""
    rotated = inputs if layer.right is None else rotate(inputs[:, None, None], layer.right)[:, 0, 0]
    kernel = rotated.square() @ layer.weights[0].mT
    if layer.left is None or layer.left.ndim == 2:
        (target if target.ndim == 2 else target.diagonal(dim1=1, dim2=2)).add_(kernel)
    elif target.ndim == 2:
        target.addmm_(kernel, layer.left[0].square().mT)
    else:
        target.add_((layer.left[0] * kernel.unsqueeze(1)) @ layer.left[0].mT)


def _sum_by_cholesky(walk: JacobianRows, form: DenseForm, shape: tuple[int, ...]) -> Target:
    """Compute J P⁻¹ Jᵀ = ‖L⁻¹ Jᵀ‖² from the rows of the selected weights, some points at a time."""
    total = walk.model.theta.new_zeros(shape)
    for first, groups in walk.groups_together(shape[1]):
        rows = walk.as_matrix(groups[0].num_rows if groups else 0, groups)
        half = torch.linalg.solve_triangular(form.chol, rows.to(form.chol.dtype).mT, upper=False).mT.to(rows.dtype)
        block = half.unflatten(0, (-1, shape[1]))
        _add_products(total[first // shape[1] :][: len(block)], block, block)
    return total


def _sum_by_parts(
    walk: JacobianRows, parts: DiagonalPlusRoot, shape: tuple[int, ...], jacobian: Jacobian | None
) -> Target | None:
    """Compute J diag(w) Jᵀ ± (J V M)(J V M)ᵀ, or None if the difference would lose too many digits.

    With a Jacobian w = 0, and no backward pass is taken: products of J with the columns of V give the result.
    """
    selection, like = walk.model.selection, walk.model.theta
    metric = Elementwise(selection.unflatten(parts.weights))
    if parts.vectors is None:
        return _sum_over_layers(walk, metric, shape)
    total: Target | None
    if jacobian is not None:
        total, pushed = like.new_zeros(shape), jacobian._matmul(parts.vectors).mT
    else:
        pushed = like.new_zeros(parts.vectors.shape[1], shape[0] * shape[1])
        total = _sum_over_layers(walk, metric, shape, selection.split(parts.vectors), pushed)
    added = pushed.mT if parts.mixing is None else pushed.mT @ parts.mixing
    roots = [added.unflatten(0, (-1, shape[1]))]
    return None if total is None else _with_products(total, roots, parts.sign, LEAST_LEFT[total.dtype])


def _sum_by_kernel(jacobian: Jacobian, inverse: DualInverse, shape: tuple[int, ...]) -> Target | None:
    """Return J A⁻¹ Jᵀ less what the training points explain; None if the difference would lose too many digits."""
    explained, prior = inverse.explained(jacobian, shape[1]), inverse.base.shift.double()
    if explained is None:
        return None
    metric = Elementwise(scales_by_name(jacobian.passes, prior))
    total = _sum_over_layers(jacobian.passes, metric, shape, dtype=prior.dtype)
    least = LEAST_OF_ROWS if jacobian.dtype == torch.float32 else LEAST_LEFT[torch.float64]
    blocks = None if total is None else _with_products(total, explained, -1, least)
    return None if blocks is None else blocks.to(jacobian.dtype)


def _with_products(total: Target, roots: Iterable[Tensor], sign: int, least: float) -> Target | None:
    """Return total ± R Rᵀ, R by some points at a time; None if a difference leaves less than a share of a variance."""
    blocks, start = total.clone(), 0
    for root in roots:
        _add_products(blocks[start : start + len(root)], root.to(total), root.to(total), alpha=sign)
        start += len(root)
    if sign > 0:
        return blocks
    left, before = (t if t.ndim == 2 else t.diagonal(dim1=1, dim2=2) for t in (blocks.detach(), total.detach()))
    shares = left / before.clamp_min(torch.finfo(total.dtype).tiny)
    return blocks if bool((shares > least).all()) else None


@dataclass(frozen=True, eq=False)
class Elementwise(Metric):
    """A diagonal P⁻¹, by parameter name: 0-d where it is constant, and zero outside a subnetwork."""

    scales: Mapping[str, Tensor]

    def add(self, target: Target, group: Group, most_bytes: int) -> bool:
        matrices = group.matrices()
        if matrices is not None:
            assert group.layer is not None
            _add(target, matrices, LayerMetric(matrix_of_scales(group.layer, self.scales)), most_bytes)
            return True
        for block, rows in _rows(target, group, most_bytes):
            weighted = {name: row * self.scales[name] for name, row in rows.items()}
            _add_products(block, group.side_by_side(weighted), group.side_by_side(rows))
        return True

    def add_last(self, target: Target, layer: Layer, inputs: Float[Tensor, "m q"]) -> bool:
        _add_last(target, LayerMetric(matrix_of_scales(layer, self.scales)), inputs)
        return True


class InLayerBlocks(Metric):
    """The inverse of blocks of whole layers plus a prior: Kronecker products in their eigenbases, others as stored."""

    def __init__(self, walk: JacobianRows, form: DirectSumForm) -> None:
        self.form, self._selection = form, walk.model.selection
        self.layers: dict[tuple[str, ...], LayerMetric] = {}
        if isinstance(form, LayerBlocksForm):
            self.layers = {
                names: LayerMetric(block.weights, block.eigen.left_vectors, block.eigen.right_vectors)
                for names, block in form.kronecker_forms.items()
            }

    def add(self, target: Target, group: Group, most_bytes: int) -> bool:
        """Add the group's part; return False if its weights are not those of one block."""
        products = members(group, self.layers) if self.layers else ()
        for names, matrices in products:
            if names not in self.layers:
                return False
            _add(target, matrices, self.layers[names], most_bytes)
        return bool(products) or self._add_as_stored(target, group, most_bytes)

    def _add_as_stored(self, target: Target, group: Group, most_bytes: int) -> bool:
        entries = torch.cat([self._positions[name].flatten() for name in group.names])
        if not bool((entries >= 0).any()):
            return True
        positions, form = self._blocks.get(int(entries[entries >= 0].min()), (range(0), None))
        order = _order(entries, positions)
        if order is None or form is None:
            return False
        for target_block, rows in _rows(target, group, most_bytes):
            block = group.side_by_side(rows)[..., order.to(target.device)]
            _add_products(target_block, form.solve(block.flatten(0, 1).mT).mT.reshape(block.shape), block)
        return True

    @cached_property
    def _positions(self) -> dict[str, Tensor]:
        """The position in the flat vector of each entry of the selected tensors."""
        return self._selection.positions()

    @cached_property
    def _blocks(self) -> dict[int, tuple[Tensor | range, ClosedForm]]:
        """The positions and the closed form of each block, by its first position."""
        parts = self.form.base.partition.parts
        firsts = (int(positions[0] if isinstance(positions, range) else positions.min()) for positions in parts)
        return dict(zip(firsts, zip(parts, self.form.forms)))

    def add_last(self, target: Target, layer: Layer, inputs: Float[Tensor, "m q"]) -> bool:
        names = layer.names
        if (whole := tuple(sorted(names.values()))) in self.layers:
            _add_last(target, self.layers[whole], inputs)
            return True
        if len(names) == 1 or not all((name,) in self.layers for name in names.values()):
            return False
        for local, columns in PARTS.items():
            _add_last(target, self.layers[(names[local],)], inputs[:, columns])
        return True


class InOutputBlocks(Metric):
    """The inverse of a block for each output of a last layer plus a prior."""

    def __init__(self, form: OutputBlocksForm) -> None:
        self.form = form

    def add(self, target: Target, group: Group, most_bytes: int) -> bool:
        """Return False: joint covariances of several points come from solves."""
        return False

    def add_last(self, target: Target, layer: Layer, inputs: Float[Tensor, "m q"]) -> bool:
        variances = target if target.ndim == 2 else target.diagonal(dim1=1, dim2=2)
        for column, form in zip(variances.unbind(1), self.form.forms):
            column += (form.solve(inputs.mT).mT * inputs).sum(1)
        return True


def _order(entries: Int[Tensor, " p"], block: Tensor | range) -> Int[Tensor, " s"] | None:
    """Return the position of each weight of a block among these entries; None if the weights are not the same."""
    index = torch.arange(block.start, block.stop) if isinstance(block, range) else block.cpu()
    selected = (entries >= 0).nonzero().squeeze(1)
    ascending = selected[entries[selected].argsort()]
    if not torch.equal(entries[ascending], index.sort().values):
        return None
    return ascending[index.argsort().argsort()]


def _add(target: Target, matrices: list[FactorPair], layer: LayerMetric, most_bytes: int) -> None:
    """Add to target the blocks of one layer, or of layers that share weights: Σ_t δ_t ⊗ a_t, times P^-½, squared."""
    together = len(target) < len(matrices[0][0])  # a block contains several points
    lefts, rights = [], []
    for left, right in matrices:
        if layer.left is not None:
            left, right = fewer_positions(left, right)
            left = rotate(left, layer.left)
        if not right.is_floating_point():
            if len(matrices) == 1 and not together:
                _add_embedded(target, left, right, layer.weights)
                return
            right = F.one_hot(right, layer.weights.shape[2]).to(left.dtype)
        lefts.append(left)
        rights.append((right if layer.right is None else rotate(right, layer.right)).to(left.dtype))
    # Calls that share weights add up their rows: the sum runs over the positions of all of these calls.
    left, right = (lefts[0], rights[0]) if len(lefts) == 1 else (torch.cat(lefts, 3), torch.cat(rights, 2))
    columns, positions, outputs = left.shape[1], left.shape[3], target.shape[1]
    if not together and positions * (positions + 1) // 2 <= columns * (positions + outputs):
        _add_pairs(target, left, right, layer.weights, most_bytes)
    elif together or carries_graph((left, right)):
        formed = left.mT * right.unsqueeze(1) if positions == 1 else left.mT @ right.unsqueeze(1)
        formed = (formed * layer.weights.sqrt()).flatten(2)
        _add_products(target, formed, formed)
    else:
        _add_rows(target, left, right, layer.weights.sqrt(), most_bytes)


def _add_embedded(target: Target, left: Tensor, indices: Tensor, weights: Float[Tensor, "1 E V"]) -> None:
    """Add embeddings from δ̃ (n, R, 1, t, E) and tokens (n, 1, t); sum the positions of each token before products."""
    tokens, delta = indices[:, 0], left[:, :, 0]
    same = (tokens.unsqueeze(2) == tokens.unsqueeze(1)).to(delta.dtype)
    summed = torch.einsum("nts,nrse->nrte", same, delta)
    _add_products(target, (summed * weights[0].mT[tokens].unsqueeze(1)).flatten(2), delta.flatten(2))


def _add_pairs(
    target: Target,
    left: Float[Tensor, "n R g t p"],
    right: Float[Tensor, "n g t q"],
    weights: Float[Tensor, "g p q"],
    most_bytes: int,
) -> None:
    """Add δ̃ K δ̃ᵀ with K_ts = Σ_j ã_tj ã_sj / p_ij for each i, at few positions: one product for all pairs t ≤ s."""
    n, t = left.shape[0], left.shape[3]
    by_group = right.transpose(0, 1)
    first, second = torch.triu_indices(t, t, device=right.device)
    step = max(1, most_bytes // (by_group[:, :, 0].numel() * right.element_size()))
    kernels = []
    for some, others in zip(first.split(step), second.split(step)):
        products = by_group[:, :, some].mul_(by_group[:, :, others])
        kernels.append(torch.bmm(products.flatten(1, 2), weights.mT).unflatten(1, (n, -1)))
    kernel = torch.cat(kernels, 2).transpose(0, 1)  # (n, g, pairs, p)
    if t == 1:
        weighted = left * kernel.unsqueeze(1)
    else:
        pair = torch.empty(t, t, dtype=torch.long, device=right.device)
        pair[first, second] = pair[second, first] = torch.arange(len(first), device=right.device)
        weighted = torch.einsum("nrgtp,ngtsp->nrgsp", left, kernel[:, :, pair])
    _add_products(target, weighted.flatten(2), left.flatten(2))


def _add_rows(
    target: Target,
    left: Float[Tensor, "n R g t p"],
    right: Float[Tensor, "n g t q"],
    roots: Float[Tensor, "g p q"],
    most_bytes: int,
) -> None:
    """Add with the layer's own Jacobian in the eigenbasis, divided by √p, a few lines at a time (in cache)."""
    n, outputs = len(left), target.shape[1]
    blocks = target.shape[0] // n
    for points, lines, rows in OuterRows([(left, right)]).blocks(most_bytes):
        rows.mul_(roots[:, lines].unsqueeze(1))
        flat = rows.flatten(3).unflatten(2, (blocks, outputs)).flatten(0, 2)
        products = flat @ flat.mT if target.ndim == 3 else flat.square().sum(-1)
        target.unflatten(0, (n, blocks))[points] += products.unflatten(0, (-1, roots.shape[0], blocks)).sum(1)


def _rows(target: Target, group: Group, most_bytes: int) -> Iterator[tuple[Target, dict[str, Tensor]]]:
    """Yield the group's rows by name, a few points at a time, with their part of the target."""
    start = 0
    for rows in group.pieces(most_bytes, together=max(1, target.shape[1] // group.num_columns)):
        count = next(iter(rows.values())).shape[:2].numel() // target.shape[1]
        yield target[start : start + count], rows
        start += count


def _add_products(target: Target, one: Float[Tensor, "n R s"], other: Float[Tensor, "n R s"], alpha: int = 1) -> None:
    """Add α one otherᵀ within each point, or its diagonal, to target; for sequences, within each position."""
    shape = *target.shape[:2], one.shape[-1]
    one, other = one.reshape(shape), other.reshape(shape)
    if target.ndim == 3:
        target.baddbmm_(one, other.mT, alpha=alpha)
    else:
        target.add_((one * other).sum(-1), alpha=alpha)
