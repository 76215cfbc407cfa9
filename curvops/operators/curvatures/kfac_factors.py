"""Kronecker factors and exact small blocks of a curvature, layer by layer, from which KFAC and EKFAC are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from curvops.ambient import CACHE_BYTES
from curvops.checkpoint import current, digest
from curvops.errors import NoFactorsWarning, warn
from curvops.linalg import Dense, Diagonal, EigenKronecker, Kronecker, Operator
from curvops.linalg.core.solve_routes import MOST_DECOMPOSED
from curvops.linalg.core.structure import LEAST_HALVED, mirror
from curvops.linalg.operators.given_matrix import round_with_rest
from curvops.linalg.operators.kronecker import decompose
from curvops.linalg.operators.kronecker_factors import Details
from curvops.network import Group, Layer, OuterRows, OutputFisher, Passes
from curvops.operators.linearized.linearization import Linearization
from curvops.storage import from_record

Sharing = Literal["expand", "reduce"]
Bias = Literal["joint", "separate"]
FactorPair = tuple[Tensor, Tensor]
MaskedInput = tuple[Tensor, Tensor | None]
PARTS = {"weight": slice(None, -1), "bias": slice(-1, None)}
"""The columns of a layer's matrix that belong to its weight and to its bias."""
MOST_EXACT = 513
"""The most columns, 512 inputs and a bias, whose outer products are summed in float64: for 1,025 it doubles a build."""
ROWS_A_SUM = 2048
"""How many rows are summed at a time in single precision: few enough to lose little."""


@dataclass(eq=False)
class OuterSum:
    """The running sum (g, p, p) of Σ side ⊗ side for sides (*m, g, t, p), over all dimensions but g and the last.

    A softmax's factor is singular, and the rounding of a sum in single precision would fill its null space with
    eigenvalues far above a weak prior. So up to `MOST_EXACT` columns the sum is in float64. As long as rows are few (no
    more than twice the columns; for wider sides, fewer than the columns) the rows themselves are kept: they determine
    all eigenvalues, while products need the sum in the sides' own dtype only. Only wide sums over many rows are in that
    dtype.
    """

    total: Tensor | None = None  # on and above the diagonal
    rows: list[Tensor] = field(default_factory=list)
    count: int = 0

    def add(self, side: Float[Tensor, "*m g t p"]) -> None:
        """Add the outer products of a side, read in the order in which it is stored in memory."""
        rows = _rows(side)
        p = rows.shape[-1]
        self.count += rows.shape[1]
        few = 2 * p if p <= MOST_EXACT else p - 1
        half = rows.dtype in (torch.float16, torch.bfloat16)  # a sum in this dtype would lose most digits
        if self.total is None and self.count <= few and not half:
            self.rows.append(rows.clone())
            return
        self._add_waiting_rows()
        self._add_rows(rows)

    def add_hessian(self, h: Float[Tensor, "m p"], u: Float[Tensor, "m p"] | None) -> None:
        """Add the sum over all positions of H, given by its diagonal and −u uᵀ beside it, by one product."""
        self._add_waiting_rows()
        p = h.shape[1]
        total = h.new_zeros(1, p, p) if self.total is None else self.total.double()
        diagonal = total[0].diagonal() + h.sum(0)
        if u is not None:
            total[0].addmm_(u.mT, u, alpha=-1)
        total[0].diagonal().copy_(diagonal)
        self.total = total

    def _add_waiting_rows(self) -> None:
        """Sum the rows that have been kept so far."""
        blocks, self.rows = self.rows, []
        for rows in blocks:
            self._add_rows(rows)

    def _add_rows(self, rows: Float[Tensor, "g m p"]) -> None:
        p = rows.shape[-1]
        exact = p <= MOST_EXACT
        if self.total is None:
            self.total = rows.new_zeros(len(rows), p, p, dtype=torch.float64 if exact else rows.dtype)
        if not exact:
            _add_upper(self.total, rows)
            return
        for piece in rows.split(max(1, CACHE_BYTES // (8 * p)), 1):
            double = piece.to(torch.float64)
            self.total.baddbmm_(double.mT, double)

    def join(self, passes: Passes) -> None:
        """End the walk: extend the sum, or the kept rows, over all points of all ranks."""
        if passes.is_shared:
            self._add_waiting_rows()  # ranks with many points keep none
        self.rows = [passes.line_up(self.rows, 1)] if self.rows else []
        self.total = None if self.total is None else passes.add_up(self.total)

    def matrix(self, divisor: float | int, dtype: torch.dtype) -> tuple[Float[Tensor, "g p p"], Details]:
        """Return the sum divided by a number, in a dtype, and the details which that dtype cannot hold.

        This ends the sum: call it once, over ranks after `join`.
        """
        if self.rows:
            rows, self.rows = self.rows[0] if len(self.rows) == 1 else torch.cat(self.rows, 1), []
            p, of_rows = rows.shape[-1], rounding_of_rows(rows.dtype)
            if dtype != torch.float64 or rows.shape[1] < p:
                total = rows.new_zeros(len(rows), p, p)
                _add_upper(total, rows)
                root = _divided(rows, math.sqrt(divisor))
                return _divided(mirror(total), divisor), Details(root=root, of_rows=of_rows)
            self._add_rows(rows)
        assert self.total is not None
        total, self.total = _divided(mirror(self.total), divisor), None
        matrix, rest = round_with_rest(total, dtype)
        # Eigenvalues of a wide sum in single precision are wrong by one unit of rounding of the largest: 0.8 was
        # measured (600 columns of sizes 1 to 1e-5, 3,000 rows), and 0.02 and less for columns of similar sizes.
        rounding = torch.finfo(dtype).eps if total.dtype != torch.float64 else 0.0
        return matrix, Details(rest, rounding=rounding, of_rows=rounding_of_rows(dtype))


def rounding_of_rows(dtype: torch.dtype) -> float:
    """Return the error of the rows of a forward and a backward pass, relative to the root of the sum of their squares.

    It is four units of rounding: 3.8 was measured (8 layers of 64).
    """
    return 4 * torch.finfo(dtype).eps


def _divided(tensor: Tensor, divisor: float | int) -> Tensor:
    """Divide a tensor in place."""
    return tensor if divisor == 1 else tensor.div_(divisor)


def _rows(side: Float[Tensor, "*m g t p"]) -> Float[Tensor, "g m p"]:
    group, last = side.ndim - 3, side.ndim - 1
    summed = sorted((i for i in range(last) if i != group), key=side.stride, reverse=True)
    if side.stride(last) == 1 or side.shape[last] == 1:
        return side.permute(group, *summed, last).flatten(1, -2)
    return side.permute(group, last, *summed).flatten(2).mT


def _add_upper(total: Float[Tensor, "g p p"], rows: Float[Tensor, "g m p"]) -> None:
    """Add rowsᵀ rows to total, at least on and above the diagonal."""
    p = rows.shape[-1]
    if p <= LEAST_HALVED:
        exact = total.double()  # `baddbmm_` would round at the size of the total again and again
        for piece in rows.split(ROWS_A_SUM, 1):
            exact += piece.mT @ piece
        total.copy_(exact)
        return
    half = p // 2
    for some in (slice(0, half), slice(half, None)):
        _add_upper(total[:, some, some], rows[..., some])
    for group_total, group in zip(total, rows):
        group_total[:half, half:].addmm_(group[:, :half].mT, group[:, half:])


class KroneckerBlock(NamedTuple):
    """A block of KFAC as an operator, with its parameters and their positions in the flat vector."""

    names: tuple[str, ...]
    positions: Int[Tensor, " p"]
    operator: Operator


@dataclass(eq=False)
class BlockSums:
    """One block while it is summed: sums of outer products of the layer's two sides, or of its whole gradients."""

    names: tuple[str, ...]
    positions: Tensor  # (g, p, q) of a layer's matrix, or of the tensors one after the other
    dtype: torch.dtype
    left: OuterSum = field(default_factory=OuterSum)
    right: OuterSum = field(default_factory=OuterSum)
    tokens: Tensor | None = None
    count: float | int = 0
    exact: Tensor | None = None
    apart: Mapping[str, str] = field(default_factory=dict)  # names of weight and bias if both are in one matrix

    @property
    def kind(self) -> str:
        """The parameters and what is summed, in words; sums of equal kinds can be added up over processes."""
        what = "tokens" if self.tokens is not None else "factors" if self.exact is None else f"exact {self.exact.ndim}"
        return f"{', '.join(self.names)}: {what}"

    def join(self, passes: Passes) -> None:
        """End the walk: extend sums and concatenations over all points of all ranks."""
        self.left.join(passes)
        self.right.join(passes)
        self.count = float(passes.add_up(self.positions.new_tensor(self.count, dtype=torch.float64)))
        self.tokens = None if self.tokens is None else passes.add_up(self.tokens)
        self.exact = None if self.exact is None else passes.add_up(self.exact)

    def kronecker_blocks(self, separate: bool) -> Iterator[KroneckerBlock]:
        """Return B ⊗ A / positions for a layer with factors, else the exact block or its diagonal.

        With `separate`, yield one for a layer's weight and one for its bias. Call it once: it consumes the sums.
        """
        if self.exact is not None:
            exact = Diagonal(self.exact) if self.exact.ndim == 1 else exact_block(self.exact, self.dtype)
            yield KroneckerBlock(self.names, self.positions.flatten(), exact)
            return
        divisor = self.count or 1.0
        left, of_left = self.left.matrix(1, self.dtype)
        if self.tokens is not None:
            right, of_right = self.tokens.to(self.dtype) / divisor, Details()
        else:
            right, of_right = self.right.matrix(divisor, self.dtype)
        if not (separate and self.apart):
            whole = Kronecker(left, right, details=(of_left, of_right))
            yield KroneckerBlock(self.names, self.positions.flatten(), whole)
            return
        for local, columns in PARTS.items():
            its_right, of_its_right = of_right.block(right, columns)
            product = Kronecker(left, its_right, details=(of_left, of_its_right))
            yield KroneckerBlock((self.apart[local],), self.positions[..., columns].flatten(), product)


def exact_block(total: Tensor, dtype: torch.dtype) -> Dense:
    """Return a float64 sum as the block of a layer without factors, in this dtype plus the digits it cannot hold."""
    tensor, rest = round_with_rest(total, dtype)
    return Dense(tensor, psd=True, rest=rest)


@torch.no_grad()
def kfac_blocks(lin: Linearization, fisher: OutputFisher, sharing: str, bias: str) -> list[KroneckerBlock]:
    """Return the blocks of KFAC, one per layer (or set of layers that share weights), from one walk over the data."""
    walk = SummedWalk(lin, fisher, "factors")
    blocks = {block.names: block for block in (from_record(BlockSums, state) for state in walk.sums or ())}
    positions, partial = lin.model.selection.positions(), lin.model.selection.index is not None
    for group in walk.groups(lambda: list(blocks.values()), apart=True):
        lefts = group.lefts()
        if group.names not in blocks:
            places = _positions(positions, group, lefts is not None, partial)
            blocks[group.names] = BlockSums(group.names, places, lin.theta.dtype)
        block = blocks[group.names]
        if lefts is None:
            _add_exact(block, group, positions, walk.chunk)
            continue
        layer = layer_with_bias(group)
        block.apart = {} if layer is None else {local: layer.names[local] for local in PARTS}
        if group.first:
            _add_inputs(block, group, sharing)
        if group.hessian is not None:  # no two positions are coupled, so that both ways of sharing have one factor
            block.left.add_hessian(*group.hessian)
            continue
        if sharing == "reduce" and block.tokens is None:
            lefts = [torch.stack([left.sum(3, keepdim=True) for left in lefts]).sum(0)]
        for left in lefts:
            block.left.add(left)
    lin.passes.agree({"the layers that ran": [block.kind for block in blocks.values()]})
    for block in blocks.values():
        block.join(lin.passes)
    _warn_of_diagonals(lin, blocks.values())
    sums = [*blocks.values(), *_silent(lin, positions, blocks)]
    return [kronecker_block for block in sums for kronecker_block in block.kronecker_blocks(bias == "separate")]


class SummedWalk:
    """A walk over the rows of a curvature's root; a checkpoint keeps its sums and everything they depend on.

    `sums` are those of an earlier run, or None.
    """

    def __init__(self, lin: Linearization, fisher: OutputFisher, name: str) -> None:
        self.lin, self.fisher = lin, fisher
        # These are sums over this process's own points; they can be reused for the same points in the same batches.
        prints = lin.data.own_prints
        mark = digest([torch.tensor([prints.order, *lin.data.sizes])])[:16]
        self.saved = saved = current().step(f"{name} {mark}", lin.theta.device, alone=True)
        state = saved.state or {"points": 0, "chunk": lin.passes.chunk_bytes, "sums": saved.outcome}
        self.points, self.chunk, self.sums = (state[name] for name in ("points", "chunk", "sums"))
        fisher.resume(saved)

    def groups(self, sums: Callable[[], Any], apart: bool = False) -> Iterator[Group]:
        """Yield the groups that were not summed before; `sums` holds the sums whenever some points are done."""
        if self.saved.done:
            return
        # A resumed run does not compute the log-likelihoods of the earlier one, and must give the same bits.
        walk = self.lin.passes if self.saved else self.lin
        for points, groups in walk.root_pieces(self.fisher, self.chunk, apart, self.points):
            yield from groups
            self.saved.save(lambda: {"points": points.stop, "chunk": self.chunk, "sums": sums()})  # noqa: B023
        self.saved.finish(sums())


def _warn_of_diagonals(lin: Linearization, blocks: Iterable[BlockSums]) -> None:
    """Warn once of all blocks that are diagonal for want of factors, with their names, reasons and sizes."""
    named = []
    for block in blocks:
        if block.exact is not None and block.exact.ndim == 1:
            why = next((lin.plan.others[name] for name in block.names if name in lin.plan.others), "no outer products")
            named.append(f"{list(block.names)} ({why}; {len(block.positions):,} parameters)")
    if named:
        warn(
            f"{', '.join(named)} have no Kronecker factors and more than {MOST_DECOMPOSED:,} parameters: they get "
            "only the exact diagonal of their block; use co.GGN(lin) if that is too crude.",
            NoFactorsWarning,
        )


def _at_inputs(values: Tensor | None, right: Shaped[Tensor, "n g t *q"]) -> Shaped[Tensor, "n t"] | None:
    """Return values of points (n,), or of positions (n, T), at the layer's inputs; if t ≠ T, the largest of a point."""
    if values is None:
        return None
    if values.ndim == 1 or values.shape[1] != right.shape[2]:
        values = (values if values.ndim == 1 else values.amax(1)).unsqueeze(1)
    return values.expand(-1, right.shape[2])


def _counted(mask: Tensor | None, values: Shaped[Tensor, "n g t *q"]) -> Shaped[Tensor, "m g s *q"]:
    """Return the values at the inputs that count."""
    return values if mask is None else values.transpose(1, 2)[mask].unsqueeze(2)


def _mean_input(mask: Tensor | None, right: Float[Tensor, "n g t q"]) -> Float[Tensor, "n g 1 q"]:
    """Return the mean over the positions that count."""
    if mask is None:
        return right.mean(2, keepdim=True)
    inside = mask[:, None, :, None].to(right.dtype)
    return (right * inside).sum(2, keepdim=True) / inside.sum(2, keepdim=True).clamp_min(1)


def _add_inputs(block: BlockSums, group: Group, sharing: str) -> None:
    """Add the inputs of all calls: position by position (expand), or averaged over calls and positions (reduce).

    Indices always expand. Ragged rows are the positions of their points, and each point has its own number of them; a
    row counts, with its weight, as the one position of the outputs that depends on it, otherwise as its point does. A
    point of weight two counts as two.
    """
    assert group.layer is not None
    inputs: list[MaskedInput] = []
    for call in group.parts:
        right = call.right()
        inside = _at_inputs(call.inside, right)  # of ragged rows, those inside the table of their points
        mask = None if group.positions is None else _at_inputs(call.of_rows(group.positions), right)
        inputs.append((right, mask if inside is None else inside if mask is None else inside & mask))
    weights = [None if group.weights is None else call.of_rows(group.weights) for call in group.parts]
    if sharing == "reduce" and inputs[0][0].is_floating_point():
        inputs = _mean_inputs(inputs, any(call.inside is not None for call in group.parts))
    for (right, mask), of_rows in zip(inputs, weights):
        counted, of_inputs = _counted(mask, right), _at_inputs(of_rows, right)
        of_inputs = None if of_inputs is None else _counted(mask, of_inputs.unsqueeze(1))
        if counted.is_floating_point():
            block.count += counted.shape[0] * counted.shape[2] if of_inputs is None else float(of_inputs.sum())
            block.right.add(counted if of_inputs is None else counted * of_inputs.sqrt().unsqueeze(-1))
        else:
            counts = _token_counts(counted, group.layer.module, of_inputs)
            block.count += float(counts.sum())
            block.tokens = _plus(block.tokens, counts.unsqueeze(0))


def _mean_inputs(inputs: Sequence[MaskedInput], ragged: bool) -> list[MaskedInput]:
    """Return the mean of each point's inputs over positions, then calls; of ragged rows over all rows of a point."""
    if ragged:
        rights, masks = [right for right, _ in inputs], [mask for _, mask in inputs]
        rows = [r.new_ones(len(r), r.shape[2], dtype=torch.bool) if m is None else m for r, m in zip(rights, masks)]
        inputs = [(torch.cat(rights, 2), torch.cat(rows, 1))]
    mean = torch.stack([_mean_input(mask, right) for right, mask in inputs]).mean(0)
    return [(mean, _at_inputs(inputs[0][1], mean))]


def _token_counts(tokens: Int[Tensor, "n 1 t"], table: Any, weights: Tensor | None = None) -> Shaped[Tensor, " V"]:
    """Return how often each row of the table is looked up; the padding row, which has no gradient, does not count."""
    token_weights = None if weights is None else weights.flatten()
    counts = torch.bincount(tokens.flatten(), token_weights, minlength=table.weight.shape[0])
    return counts if table.padding_idx is None else counts.index_fill(0, tokens.new_tensor([table.padding_idx]), 0)


def _add_exact(block: BlockSums, group: Group, positions: dict[str, Tensor], chunk_bytes: int) -> None:
    entries = selected_entries(positions, group.names)
    for rows in group.pieces(chunk_bytes):
        flat = group.side_by_side(rows).flatten(0, 1)[:, entries]
        if flat.shape[1] <= MOST_DECOMPOSED:
            flat = flat.double()
            if block.exact is None:
                block.exact = flat.new_zeros(flat.shape[1], flat.shape[1])
            block.exact.addmm_(flat.mT, flat)
        else:
            block.exact = _plus(block.exact, flat.square().sum(0))


@torch.no_grad()
def eigenvalue_corrected(
    lin: Linearization, fisher: OutputFisher, operators: dict[tuple[str, ...], Operator]
) -> list[Operator]:
    """Return blocks with exact second moments on the diagonal of each Kronecker eigenbasis, by a second walk.

    This empties `operators`: factors are freed once they are decomposed.
    """
    walk, others = SummedWalk(lin, fisher, "second moments"), dict(operators)
    factored = {names: others.pop(names) for names, block in operators.items() if isinstance(block, Kronecker)}
    order, roundings = list(operators), {names: block.rounding for names, block in factored.items()}
    operators.clear()
    if walk.sums is None:
        decompose(factored.values(), lin.passes.progress, lin.memory)
        bases = [block.eigen() for block in factored.values()]
        sums = [(base.left_vectors, base.right_vectors, torch.zeros_like(base.values)) for base in bases]
    else:  # keep the bases, too: another machine may find other bases for equal eigenvalues
        sums = walk.sums
    of_rows = 3 * rounding_of_rows(lin.theta.dtype)  # the errors of two sides and of their rotation
    factored.clear()
    corrected = {
        names: EigenKronecker(*tensors, rounding, of_rows)
        for (names, rounding), tensors in zip(roundings.items(), sums)
    }
    for group in walk.groups(lambda: sums):
        for names, matrices in members(group, corrected):
            corrected[names].values.add_(_second_moments(matrices, corrected[names], walk.chunk))
    for block in corrected.values():
        block.values.copy_(lin.passes.add_up(block.values))
    blocks = others | corrected
    return [blocks[names] for names in order]


def layer_with_bias(group: Group) -> Layer | None:
    """Return the layer of a group with one matrix for weight and bias, or None."""
    return group.layer if group.layer is not None and {"weight", "bias"} <= set(group.layer.names) else None


def members(group: Group, blocks: Container[tuple[str, ...]]) -> list[tuple[tuple[str, ...], list[FactorPair]]]:
    """Yield the blocks of a group's rows with the sides of each: one block, or those of its weight and its bias."""
    matrices = group.matrices()
    if matrices is None:
        return []
    if group.names in blocks:
        return [(group.names, matrices)]
    layer = layer_with_bias(group)
    if layer is None or (layer.names["weight"],) not in blocks:
        return []
    return [((layer.names[name],), [(l, r[..., columns]) for l, r in matrices]) for name, columns in PARTS.items()]


def _second_moments(matrices: list[FactorPair], base: EigenKronecker, chunk_bytes: int) -> Float[Tensor, "g p q"]:
    """Return Σ_n Σ_r (U_lᵀ g U_r)² with g = Σ_t left ⊗ right over all calls."""
    pairs = (fewer_positions(left, right) for left, right in matrices)
    rotated = [(rotate(left, base.left_vectors), rotate(right, base.right_vectors)) for left, right in pairs]
    return OuterRows(rotated).second_moments(base.values.shape[2], chunk_bytes)


def fewer_positions(left: Float[Tensor, "n r g t p"], right: Shaped[Tensor, "n g t *q"]) -> FactorPair:
    """Return two sides with the same rows Σ_t left ⊗ right at no more positions than either side has columns.

    At more of them, such as the tokens beside an adapter of low rank, one side becomes the rows themselves, and the
    other one unit vectors: a rotation takes a product for each position.
    """
    n, r, g, t, p = left.shape
    if not right.is_floating_point() or t <= min(r * p, right.shape[3]):
        return left, right
    rows = left.movedim(1, 2).mT.flatten(2, 3) @ right.to(left.dtype)  # (n, g, r p, q), one product a point
    if right.shape[3] <= r * p:
        units = torch.eye(right.shape[3], dtype=rows.dtype, device=rows.device)
        return rows.unflatten(2, (r, p)).transpose(1, 2).mT, units.expand(n, g, -1, -1)
    units = torch.eye(r * p, dtype=rows.dtype, device=rows.device).view(r, p, r * p).mT
    return units.unsqueeze(1).expand(n, r, g, r * p, p), rows


def rotate(side: Tensor, vectors: Tensor) -> Tensor:
    """Return a tensor (*m, g, t, p) with its last dimension in the eigenbasis of its group.

    Vectors (g, p) instead of eigenvectors mean the unit basis.
    """
    if vectors.ndim == 2:
        return side
    by_group = side.movedim(-3, 0)  # one product a group: a batch of few rows each would read the vectors as often
    return torch.bmm(by_group.flatten(1, -2), vectors).unflatten(1, by_group.shape[1:-1]).movedim(0, -3)


def _plus(total: Tensor | None, term: Tensor) -> Tensor:
    return term if total is None else total + term


def _positions(positions: dict[str, Tensor], group: Group, kronecker: bool, partial: bool) -> Tensor:
    """Return the positions of a group's entries in the flat vector, in the order of its matrix or of its names.

    `partial` means that the selection may take some entries of a tensor and leave others.
    """
    if not kronecker:
        return torch.cat([positions[name].flatten() for name in group.names])[selected_entries(positions, group.names)]
    assert group.layer is not None
    matrix = group.layer.to_matrix(positions)
    if partial and bool((matrix < 0).any()):
        raise ValueError("the selection splits a Kronecker block: select whole layers, or use co.DiagonalGGN(lin).")
    return matrix


def selected_entries(positions: dict[str, Tensor], names: tuple[str, ...]) -> Tensor:
    """Return which entries of these tensors, concatenated, are selected."""
    return torch.cat([positions[name].flatten() for name in names]) >= 0


def _silent(
    lin: Linearization, positions: dict[str, Tensor], blocks: dict[tuple[str, ...], BlockSums]
) -> list[BlockSums]:
    """Return zero blocks for the parameters that no output depends on."""
    seen = {name for names in blocks for name in names}
    silent = []
    for name in (name for name in positions if name not in seen):
        entries = positions[name][positions[name] >= 0]
        if len(entries):
            silent.append(BlockSums((name,), entries, lin.theta.dtype, exact=lin.theta.new_zeros(len(entries))))
    return silent
