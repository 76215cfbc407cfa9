"""Rows of a curvature by layer, Σ_t left ⊗ right, as matrices of weight and bias: squares and outer products."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.operators.dense import round_with_rest
from curvops.linalg.operators.kronecker import Details
from curvops.network.walks.passes import Passes

# On a CPU rows are squared in blocks that stay in its cache: 3 times as fast as through its memory.
CACHE_BYTES = 2**23
FEW = 2**14
"""Numbers whose squares are summed at once on a CPU, too."""
# From this size on a wide symmetric product is made of blocks on and above its diagonal: six tenths of the time.
LEAST_SYMMETRIC = 320
MOST_EXACT = 512
"""Columns up to which outer products are summed in float64; beyond, that would be most of the time of a build."""
ELEMENTS = 2**18
"""Numbers of few columns that are converted to float64 at a time: they stay in a CPU's cache."""
ELEMENTS_A_SUM = 2**21
"""Numbers that are converted to float64 for one product of many columns."""
ROWS_A_SUM = 2048
"""Rows that are summed at a time in single precision: as many as lose little."""
ROUNDING_UNITS = 1
"""Rounding units of its largest eigenvalue that the eigenvalues of a wide sum in single precision are off by at most:
0.8 were seen (600 columns of sizes 1 to 1e-5, 3,000 rows), 0.02 and less for columns of like sizes."""
ROWS_ROUNDING_UNITS = 4
"""Rounding units that rows are off by at most, relative to all of them, as a forward and a backward pass make them:
3.8 were seen (8 layers of 64)."""
TILE = 256
"""Columns that are mirrored at a time."""


def second_moments(
    matrices: Sequence[tuple[Tensor, Tensor]], width: int, most_bytes: int
) -> Float[Tensor, "g p {width}"]:
    """Σ_n Σ_r (Σ_t left ⊗ right)², elementwise, of the sides in `Rule.left`, those of several calls added up first.

    At one position (t = 1) the columns share one product, (Σ_r l²) ⊗ a². Elsewhere rows are formed and squared in
    blocks of at most `most_bytes`, one point's R·q numbers at least. `width` is q, which indices do not tell.
    """
    left, right = matrices[0]
    if len(matrices) == 1 and not right.is_floating_point():
        return embedding_squares(left, right, width)
    if len(matrices) == 1 and right.shape[2] == 1:
        return torch.einsum("ngp,ngq->gpq", sum_of_squares(left)[:, :, 0], right.square()[:, :, 0])
    pairs = [(a, b if b.is_floating_point() else F.one_hot(b, width).to(a.dtype)) for a, b in matrices]
    return _squares_by_blocks(pairs, block_bytes(most_bytes, left))


def sum_of_squares(left: Float[Tensor, "n r *out"]) -> Float[Tensor, "n *out"]:
    """Σ_r left², on a CPU column by column: what is added to stays in its cache, and no squares are stored."""
    if left.is_cuda or left.numel() <= FEW:
        return left.square().sum(1)
    total = left[:, 0].square()
    for column in left.unbind(1)[1:]:
        total.addcmul_(column, column)
    return total


def _squares_by_blocks(pairs: Sequence[tuple[Tensor, Tensor]], most_bytes: int) -> Tensor:
    g, p, q = pairs[0][0].shape[2], pairs[0][0].shape[4], pairs[0][1].shape[-1]
    total = pairs[0][0].new_zeros(g, p, q)
    for _, lines, block in row_blocks(pairs, most_bytes):
        total[:, lines] += block.square_().sum((0, 2))
    return total


def row_blocks(
    pairs: Sequence[tuple[Tensor, Tensor]], most_bytes: int
) -> Iterator[tuple[slice, slice, Float[Tensor, "n g r w q"]]]:
    """The rows Σ_t left ⊗ right, summed over all calls, in blocks of at most `most_bytes`: (points, lines of p, block).

    One point's and line's R·q numbers at least. Each block is written over by the next.
    """
    left, right = pairs[0]
    (n, r, g, _, p), q = left.shape, right.shape[-1]
    line = r * g * q * left.element_size()  # of one point and one of p
    points, lines = max(1, most_bytes // (line * p)), min(p, max(1, most_bytes // line))
    memory = left.new_empty(min(points, n) * lines * r * g * q)  # the same for all: new pages cost more than sums
    for start in range(0, n, points):
        for first in range(0, p, lines):
            some, part = slice(start, start + points), slice(first, first + lines)
            yield some, part, _block([(a[some, ..., part], b[some]) for a, b in pairs], memory)


def _block(pairs: Sequence[tuple[Tensor, Tensor]], memory: Tensor) -> Float[Tensor, "n g r w q"]:
    (n, r, g, _, w), q = pairs[0][0].shape, pairs[0][1].shape[-1]
    block = memory[: n * g * r * w * q].view(n * g, r * w, q)
    for i, (a, b) in enumerate(pairs):
        t = a.shape[3]
        sides = a.permute(0, 2, 1, 4, 3).reshape(n * g, r * w, t), b.reshape(n * g, t, q)
        torch.baddbmm(block, *sides, beta=min(i, 1), out=block)
    return block.view(n, g, r, w, q)


def block_bytes(most_bytes: int, like: Tensor) -> int:
    """Return the bytes that a block of rows may take: on a CPU at most its cache."""
    return most_bytes if like.is_cuda else min(most_bytes, CACHE_BYTES)


def embedding_squares(
    left: Float[Tensor, "n r 1 t E"], indices: Tensor, num_embeddings: int
) -> Float[Tensor, "1 E {num_embeddings}"]:
    """Σ_n Σ_r (Σ_t δ[t] ⊗ onehot(index[t]))²: a token's positions within a point add up before they are squared."""
    tokens = indices[:, 0]
    same = (tokens.unsqueeze(2) == tokens.unsqueeze(1)).to(left.dtype)  # (n, t, t)
    summed = torch.einsum("nts,nrse->nrte", same, left[:, :, 0])
    # Each of the k positions of a token holds the whole sum: k equal squares, of which 1/k each are counted.
    squares = summed.square().sum(1) / same.sum(2, keepdim=True)
    total = left.new_zeros(num_embeddings, left.shape[-1]).index_add_(0, tokens.flatten(), squares.flatten(0, 1))
    return total.mT.unsqueeze(0)


@dataclass(eq=False)
class OuterSum:
    """Σ side ⊗ side over all dimensions of (*m, g, t, p) but g and the last, (g, p, p), as it is added up.

    A softmax's factor is singular, and the rounding of a sum in single precision would fill its null space with
    eigenvalues far above a weak prior. So up to `MOST_EXACT` columns the sum is one in float64, and as long as rows are
    few (no more than twice the columns; of wider sides fewer than the columns) they are kept themselves: of them all
    eigenvalues are known, while products need the sum in the sides' own dtype alone. Only wide sums over many rows are
    in that dtype.
    """

    total: Tensor | None = None  # on and above the diagonal
    rows: list[Tensor] = field(default_factory=list)
    count: int = 0

    def add(self, side: Float[Tensor, "*m g t p"]) -> None:
        """Read in the order in which the side lies in memory."""
        if self._lies_by_points(side):
            self._add_by_points(side.squeeze(-3).flatten(0, -3).mT)
            return
        rows = _rows(side)
        p = rows.shape[-1]
        self.count += rows.shape[1]
        few = 2 * p if p <= MOST_EXACT else p - 1
        half = rows.dtype in (torch.float16, torch.bfloat16)  # a sum in it would lose most digits
        if self.total is None and self.count <= few and not half:
            self.rows.append(rows.clone())
            return
        self._add_kept()
        self._add_rows(rows)

    def _lies_by_points(self, side: Tensor) -> bool:
        """Whether columns are few and lie apart (channels): rows would have to be copied."""
        p, t = side.shape[-1], side.shape[-2]
        few = side.shape[-3] == 1 and p < min(t, LEAST_SYMMETRIC, MOST_EXACT)
        return few and side.stride(-2) == 1 and not side.is_cuda

    def _add_by_points(self, points: Float[Tensor, "m p t"]) -> None:
        """A product for each point."""
        m, p, t = points.shape
        self.count += m * t
        self._add_kept()
        if self.total is None:
            self.total = points.new_zeros(1, p, p, dtype=torch.float64)
        for piece in points.split(max(1, ELEMENTS // (p * t))):
            double = piece.to(torch.float64)
            self.total[0] += torch.bmm(double, double.mT).sum(0)

    def _add_kept(self) -> None:
        """Sum the rows that were kept until now."""
        kept, self.rows = self.rows, []
        for rows in kept:
            self._add_rows(rows)

    def _add_rows(self, rows: Float[Tensor, "g m p"]) -> None:
        p, beta = rows.shape[-1], 0 if self.total is None else 1
        exact = p <= MOST_EXACT
        if self.total is None:
            self.total = rows.new_empty(len(rows), p, p, dtype=torch.float64 if exact else rows.dtype)
        if not exact:
            _add_upper(self.total, rows, beta)
            return
        for piece in rows.split(max(1, ELEMENTS_A_SUM // p), 1):
            double = piece.to(torch.float64)
            self.total.baddbmm_(double.mT, double, beta=beta)
            beta = 1

    def join(self, passes: Passes) -> None:
        """End the walk: what is added up is of all its points."""
        self.rows = [passes.line_up(self.rows, 1)] if self.rows else []
        self.total = None if self.total is None else passes.add_up([self.total])

    def matrix(self, divisor: int, dtype: torch.dtype) -> tuple[Float[Tensor, "g p p"], Details]:
        """The sum divided by a number, in a dtype, and what that dtype does not hold.

        It ends the sum: call it once, after `join`.
        """
        if self.rows:
            rows, self.rows = self.rows[0] if len(self.rows) == 1 else torch.cat(self.rows, 1), []
            p = rows.shape[-1]
            if rows.shape[1] < p or dtype != torch.float64:
                total = rows.new_empty(len(rows), p, p)
                _add_upper(total, rows, 0)
                root = _divided(rows, math.sqrt(divisor))
                return _divided(mirrored(total), divisor), Details(root=root, of_rows=rounding_of_rows(rows.dtype))
            self._add_rows(rows)
        assert self.total is not None
        total, self.total = _divided(mirrored(self.total), divisor), None
        found, rest = round_with_rest(total, dtype)
        rounding = ROUNDING_UNITS * torch.finfo(dtype).eps if total.dtype != torch.float64 else 0.0
        return found, Details(rest, rounding=rounding, of_rows=rounding_of_rows(dtype))


def rounding_of_rows(dtype: torch.dtype) -> float:
    """Return the error of rows in this dtype, relative to the root of their squares' sum."""
    return ROWS_ROUNDING_UNITS * torch.finfo(dtype).eps


def _divided(tensor: Tensor, divisor: float | int) -> Tensor:
    """In place."""
    return tensor if divisor == 1 else tensor.div_(divisor)


def _rows(side: Float[Tensor, "*m g t p"]) -> Float[Tensor, "g m p"]:
    group, last = side.ndim - 3, side.ndim - 1
    summed = sorted((i for i in range(last) if i != group), key=side.stride, reverse=True)
    if side.stride(last) == 1 or side.shape[last] == 1:
        return side.permute(group, *summed, last).flatten(1, -2)
    return side.permute(group, last, *summed).flatten(2).mT


def _add_upper(total: Float[Tensor, "g p p"], rows: Float[Tensor, "g m p"], beta: int) -> None:
    """beta·total + rowsᵀ rows on and above the diagonal, in halves for as long as they are not too small."""
    p = rows.shape[-1]
    if p < LEAST_SYMMETRIC and rows.shape[1] <= ROWS_A_SUM:
        total.baddbmm_(rows.mT, rows, beta=beta)
        return
    if p < LEAST_SYMMETRIC:
        part = _outer_sum(rows)
        total.copy_(part.add_(total) if beta else part)
        return
    half = p // 2
    _add_upper(total[:, :half, :half], rows[..., :half], beta)
    total[:, :half, half:].baddbmm_(rows[..., :half].mT, rows[..., half:], beta=beta)
    _add_upper(total[:, half:, half:], rows[..., half:], beta)


def _outer_sum(rows: Float[Tensor, "g m p"]) -> Float[Tensor, "g p p"]:
    """rowsᵀ rows, of single precision in float64 from sums over few rows."""
    if rows.dtype == torch.float64:
        return rows.mT @ rows
    total = rows.new_zeros(len(rows), rows.shape[-1], rows.shape[-1], dtype=torch.float64)
    for piece in rows.split(ROWS_A_SUM, 1):
        total += piece.mT @ piece
    return total


def mirrored(total: Tensor) -> Tensor:
    """(g, p, p) with what is below the diagonal copied from above it, in place; diagonals (g, p) as they are."""
    p = total.shape[-1]
    for start in range(0, p if total.ndim == 3 else 0, TILE):
        here, after = slice(start, start + TILE), slice(start + TILE, None)
        corner = total[:, here, here].triu()
        total[:, here, here] = corner + corner.triu(1).mT
        if start + TILE < p:
            total[:, after, here] = total[:, here, after].mT
    return total
