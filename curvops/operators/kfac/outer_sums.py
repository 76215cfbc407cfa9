"""Second moments of the sides of a curvature's rows, Σ side ⊗ side, from which Kronecker factors are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.core.symmetry import mirror
from curvops.linalg.operators.dense import round_with_rest
from curvops.linalg.operators.kronecker_factors import Details
from curvops.network import Passes

# From this size on, a wide symmetric product is computed from blocks on and above its diagonal, in 6/10 of the time.
LEAST_SYMMETRIC = 320
MOST_EXACT = 512
"""The most columns whose outer products are summed in float64; for more, this would take most of a build's time."""
ELEMENTS = 2**18
"""How many numbers of few columns are converted to float64 at a time: they stay in a CPU's cache."""
ELEMENTS_A_SUM = 2**19
"""How many numbers are converted to float64 for one product of many columns."""
ROWS_A_SUM = 2048
"""How many rows are summed at a time in single precision: few enough to lose little."""
ROUNDING_UNITS = 1
"""The largest error of the eigenvalues of a wide sum in single precision, in rounding units of the largest eigenvalue:
0.8 was measured (600 columns of sizes 1 to 1e-5, 3,000 rows), and 0.02 and less for columns of similar sizes."""
ROWS_ROUNDING_UNITS = 4
"""The largest error of the rows that a forward and a backward pass compute, in rounding units relative to all rows:
3.8 was measured (8 layers of 64)."""


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
        if self._lies_by_points(side):
            self._add_by_points(side.squeeze(-3).flatten(0, -3).mT)
            return
        rows = _rows(side)
        p = rows.shape[-1]
        self.count += rows.shape[1]
        few = 2 * p if p <= MOST_EXACT else p - 1
        half = rows.dtype in (torch.float16, torch.bfloat16)  # a sum in this dtype would lose most digits
        if self.total is None and self.count <= few and not half:
            self.rows.append(rows.clone())
            return
        self._add_kept()
        self._add_rows(rows)

    def add_hessian(self, h: Float[Tensor, "m p"], u: Float[Tensor, "m p"] | None) -> None:
        """Add the sum over all positions of H, given by its diagonal and −u uᵀ beside it, by one product."""
        self._add_kept()
        p = h.shape[1]
        total = h.new_zeros(1, p, p) if self.total is None else self.total.double()
        diagonal = total[0].diagonal() + h.sum(0)
        if u is not None:
            total[0].addmm_(u.mT, u, alpha=-1)
        total[0].diagonal().copy_(diagonal)
        self.total = total

    def _lies_by_points(self, side: Tensor) -> bool:
        """Return whether columns are few and not contiguous (channels), so that rows would have to be copied."""
        p, t = side.shape[-1], side.shape[-2]
        few = side.shape[-3] == 1 and p < min(t, LEAST_SYMMETRIC, MOST_EXACT)
        return few and side.stride(-2) == 1 and not side.is_cuda

    def _add_by_points(self, points: Float[Tensor, "m p t"]) -> None:
        """Add a product for each point."""
        m, p, t = points.shape
        self.count += m * t
        self._add_kept()
        if self.total is None:
            self.total = points.new_zeros(1, p, p, dtype=torch.float64)
        for piece in points.split(max(1, ELEMENTS // (p * t))):
            double = piece.to(torch.float64)
            self.total[0] += torch.bmm(double, double.mT).sum(0)

    def _add_kept(self) -> None:
        """Sum the rows that have been kept so far."""
        kept, self.rows = self.rows, []
        for rows in kept:
            self._add_rows(rows)

    def _add_rows(self, rows: Float[Tensor, "g m p"]) -> None:
        p = rows.shape[-1]
        exact = p <= MOST_EXACT
        if self.total is None:
            self.total = rows.new_zeros(len(rows), p, p, dtype=torch.float64 if exact else rows.dtype)
        if not exact:
            _add_upper(self.total, rows)
            return
        for piece in rows.split(max(1, ELEMENTS_A_SUM // p), 1):
            double = piece.to(torch.float64)
            self.total.baddbmm_(double.mT, double)

    def join(self, passes: Passes) -> None:
        """End the walk: extend the sum, or the kept rows, over all points of all ranks."""
        if passes.shard is not None:
            self._add_kept()  # ranks with many points keep none
        self.rows = [passes.line_up(self.rows, 1)] if self.rows else []
        self.total = None if self.total is None else passes.add_up([self.total])

    def matrix(self, divisor: float | int, dtype: torch.dtype) -> tuple[Float[Tensor, "g r p"], Details]:
        """Return the sum divided by a number, in a dtype, and the details which that dtype cannot hold.

        Rows that are fewer than their columns stand for the sum themselves. This ends the sum: call it once, over ranks
        after `join`.
        """
        if self.rows:
            rows, self.rows = self.rows[0] if len(self.rows) == 1 else torch.cat(self.rows, 1), []
            p, of_rows = rows.shape[-1], rounding_of_rows(rows.dtype)
            if rows.shape[1] < p:
                return _divided(rows, math.sqrt(divisor)), Details(of_rows=of_rows, by_root=True)
            if dtype != torch.float64:
                total = rows.new_zeros(len(rows), p, p)
                _add_upper(total, rows)
                root = _divided(rows, math.sqrt(divisor))
                return _divided(mirror(total), divisor), Details(root=root, of_rows=of_rows)
            self._add_rows(rows)
        assert self.total is not None
        total, self.total = _divided(mirror(self.total), divisor), None
        found, rest = round_with_rest(total, dtype)
        rounding = ROUNDING_UNITS * torch.finfo(dtype).eps if total.dtype != torch.float64 else 0.0
        return found, Details(rest, rounding=rounding, of_rows=rounding_of_rows(dtype))


def rounding_of_rows(dtype: torch.dtype) -> float:
    """Return the error of rows in this dtype, relative to the root of the sum of their squares."""
    return ROWS_ROUNDING_UNITS * torch.finfo(dtype).eps


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
    """Add rowsᵀ rows to total on and above the diagonal, in halves unless they are too small."""
    p = rows.shape[-1]
    if p < LEAST_SYMMETRIC and rows.shape[1] <= ROWS_A_SUM:
        total.baddbmm_(rows.mT, rows)
        return
    if p < LEAST_SYMMETRIC:
        total.copy_(_outer_sum(rows).add_(total))
        return
    half = p // 2
    _add_upper(total[:, :half, :half], rows[..., :half])
    for each, group in zip(total, rows):
        each[:half, half:].addmm_(group[:, :half].mT, group[:, half:])
    _add_upper(total[:, half:, half:], rows[..., half:])


def _outer_sum(rows: Float[Tensor, "g m p"]) -> Float[Tensor, "g p p"]:
    """Return rowsᵀ rows; for single precision in float64, from sums over few rows."""
    if rows.dtype == torch.float64:
        return rows.mT @ rows
    total = rows.new_zeros(len(rows), rows.shape[-1], rows.shape[-1], dtype=torch.float64)
    for piece in rows.split(ROWS_A_SUM, 1):
        total += piece.mT @ piece
    return total
