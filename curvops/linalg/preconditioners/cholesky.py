"""Pivoted Cholesky of a positive semidefinite matrix from a few of its columns, and the preconditioner it gives.

>>> import torch
>>> from curvops.linalg import cg, cholesky
>>> x = torch.linspace(0, 1, 200, dtype=torch.float64)
>>> K = torch.exp(-50 * (x[:, None] - x).square())
>>> P = cholesky(K, rank=20, shift=1e-3).preconditioner()
>>> cg(K + 1e-3 * torch.eye(200), x, preconditioner=P).iterations < cg(K + 1e-3 * torch.eye(200), x).iterations / 4
True
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from curvops.ambient import Progress, current_run
from curvops.checks import check_choice, check_options, check_shape, checked_number
from curvops.errors import NotPositiveSemidefiniteError
from curvops.linalg.core import vectors as vec
from curvops.linalg.core.algorithm import algorithm
from curvops.linalg.core.results import Reason, indefinite
from curvops.linalg.core.structure import columns_of, diagonal_of, require_symmetric, skew_tolerance
from curvops.linalg.core.vectors import Matrix
from curvops.linalg.preconditioners.factored import LowRankPreconditioner
from curvops.summary import Summarised


@dataclass(frozen=True, eq=False, repr=False)
class PivotedCholesky(Summarised):
    """A partial Cholesky factor, A ≈ F Fᵀ, exact in the rows and columns of the pivots.

    A − F Fᵀ is positive semidefinite; ``trace_left`` is its trace, a bound of its largest eigenvalue. ``reason`` is
    CONVERGED if the requested rank or accuracy was reached or the range of A is exhausted, and RANK_CAPPED if a budget
    ended the growth. ``matvecs`` counts columns of A, and the diagonal if that takes products.

    Examples:
        >>> A = torch.diag(torch.tensor([9.0, 4.0, 1e-9]))
        >>> factor = co.linalg.cholesky(A, rank=2)
        >>> factor.pivots, factor.F[:, 0]
        (tensor([0, 1]), tensor([3., 0., 0.]))
    """

    F: Float[Tensor, "n r"]
    pivots: Int[Tensor, " r"]
    trace_left: float
    shift: float
    matvecs: int
    reason: Reason

    def preconditioner(self, shift: float | None = None) -> LowRankPreconditioner:
        """Make P = F Fᵀ + shift I (Woodbury, in F Fᵀ's eigenbasis); the shift defaults to that of ``cholesky``.

        With shift 0, the mean of the eigenvalues left out takes its place outside the range of F. With a positive
        shift, P^-½(A + shift)P^-½ has condition number at most 1 + trace_left/shift.

        Args:
            shift: a number that is not negative; None means that of ``cholesky``.

        Returns:
            The preconditioner.

        Raises:
            ValueError: the shift is negative, or zero although F Fᵀ is singular and nothing was left out.
        """
        shift = self.shift if shift is None else shift
        checked_number("shift", shift, "[0, inf)")
        n = len(self.F)
        Q, R = vec.tall_qr(self.F)
        V, S, _ = torch.linalg.svd(R)
        rank = int((S[:1] * n * torch.finfo(self.F.dtype).eps < S).sum())
        values = S[:rank].square()
        if rank == n:
            level = shift + float(values[-1])
        else:
            level = shift if shift > 0 else self.trace_left / (n - rank)
        if level <= 0:
            raise ValueError("a preconditioner from an operator of low rank needs a positive shift; got 0.")
        added = values + shift
        return LowRankPreconditioner(vec.combine(Q, V[:, :rank]), values, added, level, self.matvecs)

    def __matmul__(self, V: Float[Tensor, "n *k"]) -> Float[Tensor, "n *k"]:
        """Multiply the approximation by a vector or a block."""
        return vec.shaped_as(vec.combine(self.F, vec.gram(self.F, vec.as_columns(V))), V)


@algorithm
def cholesky(
    A: Matrix,
    rank: int | None = None,
    *,
    pivoting: Literal["greedy", "random"] = "greedy",
    shift: float | int = 0.0,
    rtol: float | int | None = None,
    diagonal: Float[Tensor, " n"] | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> PivotedCholesky:
    """Approximate positive semidefinite A by F Fᵀ from its diagonal and ``rank`` of its columns.

    Args:
        A: (n, n). A column is read from a tensor or a kernel, and costs one product with any other operator.
        rank: the number of columns; None stops by the remaining trace, after at most 1024.
        pivoting: "greedy" uses the largest remaining diagonal entry, one column at a time; "random" draws entries in
            proportion to the remaining diagonal, in blocks: it is robust to outliers, and gives the better
            preconditioner.
        shift: the shift of the preconditioner; with rank=None columns are added until its condition number is at most
            28.
        rtol: stop when the remaining trace is at most this share of A's.
        diagonal: A's diagonal if it is known, such as ``co.DiagonalGGN(lin)`` of a GGN; otherwise it may take n
            products.
        generator: source of the random pivots.
        memory_budget: bytes for F and its orthonormal basis, which limit the rank; None is the rest of the budget of
            the linearisation behind A.
        progress: as in `cg`.

    Returns:
        A PivotedCholesky with F (n, rank), its pivots and the remaining trace.

    Raises:
        ValueError: A is not square, an option is out of range, or an entry is not finite.
        NotPositiveSemidefiniteError: an entry of the diagonal or of a Schur complement's is clearly negative.

    Source: Harbrecht, Peters & Schneider 2012 (greedy); Chen, Epperly, Tropp & Webber 2023, algorithm 2.2 (random).

    Examples:
        >>> A = torch.diag(torch.tensor([9.0, 4.0, 1e-9]))
        >>> P = co.linalg.cholesky(A, rank=2, shift=1.0).preconditioner()
        >>> co.linalg.cg(A + torch.eye(3), torch.ones(3), preconditioner=P).iterations
        1
    """
    n, _, dtype, _ = vec.describe_square(A)
    check_choice("pivoting", pivoting, ("greedy", "random"))
    check_options(rank=rank)
    if rtol is not None:
        checked_number("rtol", rtol, "[0, inf)")
    checked_number("shift", shift, "[0, inf)")
    size = torch.finfo(dtype).bits // 8
    budget = current_run().room(6 * n * size)  # what a rank of one takes
    room = n if budget is None else budget // max(1, 2 * n * size)
    wanted = min(n, 1024 if rank is None else rank)
    with torch.no_grad():
        left, spent = diagonal_of(A) if diagonal is None else (diagonal.detach().to(dtype), 0)
        check_shape("the diagonal", left, (n,))
        scale = _scale(left)
        aim = 27.0 * shift if rank is None else 0.0  # the trace that may remain
        aim = aim if rtol is None else rtol * float(left.double().sum())
        block = 1 if pivoting == "greedy" else 16
        F, pivots, trace, read, exhausted = _grow(A, left.clone(), min(room, wanted), block, aim, scale, generator)
    done = len(pivots) >= (wanted if rank is not None else n) or trace <= aim or exhausted
    reason = Reason.CONVERGED if done else Reason.RANK_CAPPED
    return PivotedCholesky(F, pivots, 0.0 if exhausted else trace, float(shift), spent + read, reason)


def _scale(diagonal: Tensor) -> float:
    """Return the largest entry of a diagonal; raise an error if it is not finite or negative."""
    ends = torch.stack([diagonal.amin(), diagonal.amax()]).cpu()
    vec.check_finite(ends, "the diagonal of A")
    low, high = ends.tolist()
    if low < 0:
        raise _indefinite(low)
    return high


def _grow(
    A: Matrix, left: Tensor, limit: int, block: int, aim: float, scale: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, float, int, bool]:
    """Add columns in blocks up to ``limit``, the goal, or rounding, at one small transfer per block.

    Returns F, the pivots, the trace left, the number of columns read, and whether the range of A is exhausted.
    """
    n = len(left)
    F = vec.empty_block(left, min(limit, 64))
    floor = n * torch.finfo(left.dtype).eps * scale
    pivots: list[Tensor] = []
    r, spent, trace = 0, 0, float(left.double().sum())
    exhausted = scale == 0
    while r < limit and trace > aim and not exhausted:
        if block == 1:
            chosen = left.argmax().reshape(1)
        else:
            chosen = vec.draw_positions(left, min(block, limit - r), generator)
        G = vec.axpy(columns_of(A, chosen).clone(), F[:, :r], -vec.entries(F[:, :r], chosen).mT)
        # The rows of earlier pivots vanish if A is symmetric.
        strays = vec.entries(G, torch.cat(pivots)) if pivots else G[:0]
        spent += len(chosen)
        core = torch.cat([vec.entries(G, chosen), left[chosen].unsqueeze(1)], 1).double().cpu()
        core, expected = core[:, :-1], core[:, -1]
        _check_core(core, expected, scale, left.dtype)
        require_symmetric(core, torch.finfo(left.dtype).eps, scale)
        accepted, L = _factor((core + core.mT) / 2, floor)
        if len(accepted):
            where = accepted.to(G.device)
            inverse = torch.linalg.solve_triangular(L, torch.eye(len(L), dtype=L.dtype), upper=False)
            fresh = vec.combine(G[:, where], inverse.mT.to(G.device))
            if r + len(accepted) > F.shape[1]:
                F = vec.join(F, vec.empty_block(F, min(limit - F.shape[1], F.shape[1])))
            F[:, r : r + len(accepted)] = fresh
            left = left - fresh.square().sum(1)
            pivots.append(chosen[where])
            r += len(accepted)
        left[chosen] = 0
        stray = torch.cat([strays.flatten(), strays.new_zeros(1)]).abs().amax()
        seen = torch.stack([left.amin().double(), left.amax().double(), left.double().sum(), stray.double()])
        low, high, total, skew = seen.tolist()
        if skew > skew_tolerance(torch.finfo(left.dtype).eps) * scale:
            raise ValueError(Reason.NOT_SYMMETRIC.value)
        if not low >= -1e2 * floor:
            raise _indefinite(low) if math.isfinite(low) else ValueError("a column of A holds NaN or Inf.")
        left = left.clamp_min(0)
        trace, exhausted = total, high <= floor
    order = torch.cat(pivots) if pivots else torch.zeros(0, dtype=torch.long, device=left.device)
    return F[:, :r], order, max(trace, 0.0), spent, exhausted


def _check_core(core: Tensor, expected: Tensor, scale: float, dtype: torch.dtype) -> None:
    """Raise ValueError if the columns and the diagonal disagree."""
    vec.check_finite(core, "a column of A")
    gap = (core.diagonal() - expected).abs().amax()
    if not bool(gap <= math.sqrt(torch.finfo(dtype).eps) * scale):
        raise ValueError(f"diagonal and columns of A differ by {float(gap):.3e}: pass the exact diagonal.")


def _factor(core: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Return independent rows of a small matrix, in order of pivots, and their Cholesky factor."""
    rest = core.clone()
    order: list[int] = []
    while len(order) < len(core):
        pivot = int(rest.diagonal().argmax())
        value = float(rest[pivot, pivot])
        if value <= floor or pivot in order:
            break
        order.append(pivot)
        rest = rest - torch.outer(rest[:, pivot], rest[pivot]) / value
        rest[pivot] = rest[:, pivot] = 0
    index = torch.tensor(order, dtype=torch.long)
    return index, torch.linalg.cholesky(core[index][:, index])


def _indefinite(value: float) -> NotPositiveSemidefiniteError:
    return indefinite(
        f"A is not positive semidefinite: a diagonal entry, of A or of a Schur complement, is {value:.3e}."
    )
