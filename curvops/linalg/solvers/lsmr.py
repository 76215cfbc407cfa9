"""Least squares min ‖Ax − b‖² + damp² ‖x‖² for rectangular A, by LSMR.

>>> import torch
>>> from curvops.linalg import lsmr
>>> A = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
>>> solution = lsmr(A, torch.tensor([1.0, 2.0, 3.0]))
>>> solution.x.round(decimals=4), solution.reasons[0].name, bool(solution.relative_residuals[0] > 0.5)
(tensor([1., 1.]), 'CONVERGED', True)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from curvops.ambient import Progress
from curvops.checks import checked_number
from curvops.linalg.core import vectors as vec
from curvops.linalg.core.algorithm import Multiply, algorithm
from curvops.linalg.core.results import Reason, Solution
from curvops.linalg.core.vectors import Given, Matrix, Vectors
from curvops.linalg.solvers.short_recurrence import (
    ColumnCheck,
    ColumnState,
    Numbers,
    ShortRecurrence,
    marked_positions,
    not_finite,
    ratio,
    reflection,
    to_device,
    to_host,
)
from curvops.linalg.solvers.systems import UNDECIDED, Callback, Records, check, raise_norm, solve_in_groups


@algorithm
def lsmr(
    A: Matrix | Given,
    B: Shaped[Vectors, "m *K"],
    *,
    damp: float | int = 0.0,
    consistent: bool = False,
    rtol: float | int = 1e-6,
    maxiter: int | None = None,
    x0: Vectors | None = None,
    callback: Callback | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> Solution:
    """Minimise ‖Ax − b‖² + damp² ‖x‖² for every column b of B; among all minimisers, return the one nearest to x0.

    Args:
        A: (m, n), of any shape and rank; its transposed product is also needed.
        B: (m,) or (m, K). The columns share only the block products.
        damp: the square root of a ridge, not negative.
        consistent: require a solution of Ax = b: a minimum with a residual above rtol counts as SINGULAR (as
            STAGNATION if rounding hides the minimum: in float32, with less than about 1e-4 ‖b‖ of b outside the range).
        rtol: a column has converged when ‖b − Ax‖ ≤ rtol ‖b‖ (damp = 0) or ‖Aᵀr − damp² x‖ ≤ rtol ‖A‖ ‖(r, damp x)‖,
            by true products.
        maxiter: the maximum number of iterations; by default 10 min(m, n), at least 100, at most 10 000.
        x0: initial guess, (n,) or (n, K) like B.
        callback: called as ``callback(iteration, relative_residuals (K,))`` in every iteration.
        memory_budget: bytes for the working vectors; columns are solved in groups that fit, at least one at a time.
            None is the rest of the budget of the linearisation behind A.
        progress: as in `cg`.

    Returns:
        A Solution. ``relative_residuals`` shows whether a converged column solves Ax = b, ``normal_residuals`` its
        distance from a minimum. An iteration costs one product of A and one of Aᵀ per active column, and so does each
        check of the true residual, every 50 iterations and at the end.

    Raises:
        TypeError: A, B and x0 do not share one real dtype, float32 or float64.
        ValueError: shapes or devices do not fit, or damp, rtol, maxiter or memory_budget is negative.

    Source: Fong & Saunders 2011. Conjugate gradients on AᵀA would square the condition number in the solution's error.

    Examples:
        >>> A = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
        >>> co.linalg.lsmr(A, torch.tensor([1.0, 2.0, 3.0])).x.round(decimals=4)
        tensor([1., 1.])
    """
    A = vec.as_matrix(A, B)
    facts = vec.describe(A)
    goal = check(facts, B, rtol, maxiter, x0, callback)
    operator = AugmentedMatrix(vec.product(A), vec.transposed_product(A), checked_number("damp", damp, "[0, inf)"))

    def solve(B: Vectors, X0: Vectors | None, *_: object) -> Solution:
        return Bidiagonalisation(operator, Records(B, X0, facts, goal), consistent).solve()

    return solve_in_groups(solve, facts, B, x0, vectors=14)  # the working vectors of a column, temporaries included


LongVectors: TypeAlias = list[Vectors]
"""Vectors of rows of [A; damp I]: a block (m, k) of A's rows and, with damping, one (n, k) of the rows below it."""


def length_of(U: LongVectors) -> Float[Tensor, " k"]:
    """Return the 2-norm of each column, over all rows."""
    return reduce(torch.hypot, map(vec.norm, U))


@dataclass(frozen=True, eq=False)
class AugmentedMatrix:
    """The matrix [A; damp I], by its products and those of its transpose."""

    multiply: Multiply
    transposed: Multiply
    damp: float

    def push(self, V: Float[Vectors, "n k"]) -> LongVectors:
        """Multiply by V."""
        return [self.multiply(V), self.damp * V] if self.damp else [self.multiply(V)]

    def pull(self, U: LongVectors) -> Float[Vectors, "n k"]:
        """Multiply the transpose by U."""
        pulled = self.transposed(U[0])
        return pulled + self.damp * U[1] if self.damp else pulled

    def residual(self, B: Float[Vectors, "m k"], X: Float[Vectors, "n k"]) -> LongVectors:
        """Return [B; 0] − [A; damp I] X."""
        top, *below = self.push(X)
        return [B - top, *(-1.0 * block for block in below)]


class Bidiagonalisation(ShortRecurrence):
    """The iteration of LSMR.

    Damping is a second block of rows below A, so that every problem has one form and may restart from any x.
    """

    def __init__(self, operator: AugmentedMatrix, records: Records, consistent: bool) -> None:
        self.operator, self.consistent, self.x = operator, consistent, vec.as_block(records.X)
        K = records.B.shape[1]
        moved = records.warm and K > 0
        if moved:
            r = operator.residual(records.B, self.x)
        else:
            r = [vec.as_block(records.B), *([vec.zero_block(self.x, K)] if operator.damp else [])]
        super().__init__(records, vec.norm(r[0]))
        if moved:  # otherwise ‖A‖ is unknown before the first step
            images, sizes = torch.stack([vec.norm(self.B - r[0]), vec.norm(self.x)]).cpu().tolist()
            self.norm_A = raise_norm(0.0, images, sizes)
        self.u, self.v, self.scalars = self.begin(r)
        self.h, self.hbar = vec.as_block(self.v), vec.zero_block(self.x, K)
        self.slopes, self.totals, self.noise = [math.inf] * K, [math.inf] * K, [0.0] * K
        """‖Aᵀr‖ and ‖r‖ of each column's best solution, by true products with damping; the rounding of ‖Aᵀr‖."""
        self.records.reference = (self.scalars.zetabar * self.scalars.normr).tolist()
        self.within: set[int] = set()
        """Positions whose estimates, by the recurrence, are within the tolerance."""

    def begin(self, r: LongVectors) -> tuple[LongVectors, Vectors, Bidiagonal]:
        """Compute the first pair of vectors from a residual: one transposed product."""
        beta = length_of(r)
        u = [block / self.positive(beta) for block in r]
        v = self.operator.pull(u)
        self.records.matvecs += v.shape[1]
        alpha = vec.norm(v)
        v = v / self.positive(alpha)
        alpha, beta = to_host(alpha, beta)
        self.norm_A = max([self.norm_A, *(a for a in alpha.tolist() if a < math.inf)])
        return u, v, Bidiagonal.start(alpha, beta)

    def positive(self, sizes: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """Return norms to divide by, 1 for those that are 0."""
        return torch.where(sizes > 0, sizes, 1.0).to(self.B.device, self.B.dtype)

    def note(self) -> set[int]:
        """Add a row to the history; return the positions that have converged by the recurrence."""
        s, trigger = self.scalars, self.records.trigger
        self.records.record(self.active, s.normr.tolist())
        small = s.normr <= trigger
        if not self.consistent:
            small |= np.abs(s.zetabar) <= trigger * self.norm_A * s.normr
        self.within = marked_positions(small)
        return self.within

    def step(self) -> tuple[set[int], set[int]]:
        image = self.operator.push(self.v)
        alpha = to_device(self.scalars.alpha, self.B)
        u = [new - old * alpha for new, old in zip(image, self.u)]
        self.records.iteration += 1
        beta = length_of(u)
        u = [block / self.positive(beta) for block in u]
        v = self.operator.pull(u) - self.v * beta.to(self.B.dtype)
        self.records.matvecs += 2 * len(self.active)
        alpha = vec.norm(v)
        v = v / self.positive(alpha)
        packet = to_host(alpha, beta, length_of(image))
        broken = not_finite(packet)
        if broken:
            return set(), broken
        a, b, images = packet
        self.norm_A = max(self.norm_A, float(np.maximum(images, np.hypot(a, b)).max()))
        with np.errstate(all="ignore"):  # true residuals decide
            weights = self.scalars.advance(a, b)
        in_hbar, in_x, in_h = to_device(weights, self.B)
        self.hbar = vec.axpy(vec.as_block(self.h), self.hbar, -in_hbar)
        vec.axpy(self.x, self.hbar, in_x)
        self.h = vec.axpy(vec.as_block(v), self.h, -in_h)
        self.u, self.v = u, v
        ended = np.minimum(a, b) <= 10 * self.eps * self.norm_A
        ended |= np.abs(self.scalars.zetabar) <= 0.1 * self.records.level * self.norm_A * self.scalars.normr
        return marked_positions(ended), set()

    def check(self, positions: list[int], ended: set[int]) -> tuple[list[ColumnCheck], Callable[[list[int]], None]]:
        index = torch.tensor(positions)
        x = vec.columns(self.x, index)
        r = self.operator.residual(vec.columns(self.B, torch.tensor([self.active[j] for j in positions])), x)
        gradient = self.operator.pull(r)
        self.records.matvecs += 2 * len(positions)
        facts = torch.stack([vec.norm(r[0]), length_of(r), vec.norm(gradient), vec.norm(x)]).cpu().tolist()
        self.norm_A = raise_norm(self.norm_A, facts[2], facts[1])
        checks = []
        for i, j in enumerate(positions):
            column = self.active[j]
            residual, total, slope, size = (row[i] for row in facts)
            self.keep(column, vec.part(x, i, i + 1), residual, total, slope, self.norm_A * size + 1)
            # A recurrence that drifts by rounding still makes progress until its estimates are within the tolerance.
            drifted = total > 2 * float(self.scalars.normr[j]) or slope > 2 * abs(float(self.scalars.zetabar[j]))
            over = j in ended or (drifted and j in self.within)
            checks.append(ColumnCheck(slope * total, self.is_solved(column), over, self.null(column)))

        def restart(again: list[int]) -> None:
            where = torch.tensor(again)
            u, v, scalars = self.begin([vec.columns(block, where) for block in r])
            restarted = (*u, v, v, vec.zero_block(v, len(again)))
            for block, value in zip((*self.u, self.v, self.h, self.hbar), restarted):
                vec.put_columns(block, index[where], value)
            self.scalars.put(index[where].tolist(), scalars)

        return checks, restart

    def stop(self, column: int, reason: Reason) -> None:
        self.records.give(column, self.classify(column, reason))

    def keep(
        self, column: int, x: Float[Vectors, "n 1"], residual: float, total: float, slope: float, height: float
    ) -> None:
        """Store the solution if it is the best; ``height`` is ‖A‖‖x‖ + ‖b‖, the size of the residual's terms.

        The residual decides; if residuals agree, as near a non-zero minimum, the smallest ‖Aᵀr‖ does.
        """
        records = self.records
        records.measure(column, slope * total)
        closer = slope <= self.slopes[column] and total <= 1.1 * self.totals[column]
        if closer or total < 0.9 * self.totals[column] or (residual <= records.rtol and not self.operator.damp):
            self.slopes[column], self.totals[column] = slope, total
            records.normal[column] = slope / max(self.norm_A * total, slope) if slope else 0.0
            records.keep(column, x, residual, residual / height)
            self.noise[column] = 0.1 * records.level * self.norm_A * height

    def is_solved(self, column: int) -> bool:
        """Return whether an undamped system's residual, or a least-squares problem's gradient, is small."""
        records = self.records
        if records.best[column] <= records.rtol and not self.operator.damp:
            return True
        return records.normal[column] <= records.rtol and not self.consistent

    def flat(self, column: int) -> bool:
        """Return whether ‖Aᵀr‖ is at most the rounding in r and in the product, or in A, so that nothing lowers it."""
        return self.slopes[column] <= self.noise[column] or self.records.normal[column] <= self.records.level

    def null(self, column: int) -> bool:
        """Return whether r is a null vector of Aᵀ: flat, and by at least half of the digits.

        A residual in directions of small singular values is flat long before the smallest residual is reached.
        """
        return self.flat(column) and self.records.normal[column] <= math.sqrt(self.eps)

    def classify(self, column: int, reason: Reason) -> Reason:
        """Return the reason of a stop, from the best solution."""
        if self.is_solved(column):
            return Reason.CONVERGED
        if reason in UNDECIDED and self.records.limited(column):
            return Reason.PRECISION_LIMIT
        if reason is Reason.STAGNATION and self.consistent and self.null(column):
            return Reason.SINGULAR
        if reason is Reason.STAGNATION and not self.consistent and self.flat(column):
            return Reason.PRECISION_LIMIT
        return reason

    def select(self, remaining: list[int]) -> None:
        where = torch.tensor(remaining, dtype=torch.long)
        self.scalars = self.scalars.select(remaining)
        self.u = [vec.columns(block, where) for block in self.u]
        self.v, self.h, self.hbar, self.x = (vec.columns(block, where) for block in (self.v, self.h, self.hbar, self.x))


@dataclass(eq=False)
class Bidiagonal(ColumnState):
    """LSMR's factorisation of the bidiagonal matrices, named as in Fong & Saunders 2011; otherwise like `QLP`."""

    alpha: Numbers
    alphabar: Numbers
    rho: Numbers
    rhobar: Numbers
    cbar: Numbers
    sbar: Numbers
    zeta: Numbers
    zetabar: Numbers
    betadd: Numbers
    betad: Numbers
    rhodold: Numbers
    tautilde: Numbers
    thetatilde: Numbers
    normr: Numbers

    @classmethod
    def start(cls, alpha: Numbers, beta: Numbers) -> Bidiagonal:
        """Return the state before the first step: β u = r, α v = Aᵀu."""
        one, slope = np.ones_like(beta), alpha * beta
        sizes = {"alpha": alpha, "alphabar": alpha, "zetabar": slope, "betadd": beta, "normr": beta}
        return cls.with_fields(**sizes, rho=one, rhobar=one, cbar=one, rhodold=one)

    def advance(self, alpha: Numbers, beta: Numbers) -> Numbers:
        """Advance by β_{k+1}, α_{k+1}; return the weights of hbar in itself, of hbar in x, and of h in the next h."""
        rhoold, rhobarold, zetaold = self.rho, self.rhobar, self.zeta
        c, s, self.rho = reflection(self.alphabar, beta)
        thetanew = s * alpha
        self.alphabar = c * alpha
        thetabar = self.sbar * self.rho
        self.cbar, self.sbar, self.rhobar = reflection(self.cbar * self.rho, thetanew)
        self.zeta, self.zetabar = self.cbar * self.zetabar, -self.sbar * self.zetabar

        betahat, self.betadd = c * self.betadd, -s * self.betadd
        thetatildeold = self.thetatilde
        ctilde, stilde, rhotilde = reflection(self.rhodold, thetabar)
        self.thetatilde, self.rhodold = stilde * self.rhobar, ctilde * self.rhobar
        self.betad = -stilde * self.betad + ctilde * betahat
        self.tautilde = ratio(zetaold - thetatildeold * self.tautilde, rhotilde)
        taud = ratio(self.zeta - self.thetatilde * self.tautilde, self.rhodold)
        self.normr = np.hypot(self.betad - taud, self.betadd)
        self.alpha = alpha
        return np.stack(
            [
                ratio(thetabar * self.rho, rhoold * rhobarold),
                ratio(ratio(self.zeta, self.rho), self.rhobar),
                ratio(thetanew, self.rho),
            ]
        )
