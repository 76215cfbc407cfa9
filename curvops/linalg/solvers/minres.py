"""Solutions of A X = B for symmetric A, indefinite or singular, by the minimum-residual method MINRES-QLP.

>>> import torch
>>> from curvops.linalg import minres
>>> solution = minres(torch.diag(torch.tensor([1.0, -2.0, 0.0])), torch.tensor([1.0, 2.0, 0.0]))
>>> solution.x.round(decimals=4) + 0.0, solution.reasons[0].name
(tensor([ 1., -1.,  0.]), 'CONVERGED')
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from curvops.ambient import Progress
from curvops.checks import checked_number
from curvops.linalg.core import vectors as vec
from curvops.linalg.core.algorithm import Multiply, algorithm
from curvops.linalg.core.results import Reason, Solution
from curvops.linalg.core.structure import beyond_rounding, most_explained, rounding_of
from curvops.linalg.core.vectors import Given, Matrix, Vectors
from curvops.linalg.solvers.short_recurrence import (
    ColumnCheck,
    ColumnState,
    Marks,
    Numbers,
    ShortRecurrence,
    marked_positions,
    not_finite,
    positive,
    ratio,
    reflection,
    to_device,
    to_host,
)
from curvops.linalg.solvers.systems import (
    CHECK_EVERY,
    UNDECIDED,
    Callback,
    Preconditioner,
    Records,
    as_function,
    check,
    raise_norm,
    solve_in_groups,
)


@algorithm
def minres(
    A: Matrix | Given,
    B: Shaped[Vectors, "n *K"],
    *,
    shift: float | int = 0.0,
    preconditioner: Preconditioner | None = None,
    rtol: float | int = 1e-6,
    maxiter: int | None = None,
    x0: Vectors | None = None,
    callback: Callback | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> Solution:
    """Solve (A + shift I) x = b for every column b of B, by least squares if there is no solution.

    Args:
        A: (n, n), symmetric; it may be indefinite or singular. A function V (n, K) -> A V or a SciPy LinearOperator
            will do, as for all solvers (see `as_operator`).
        B: (n,) or (n, K). The columns share only the block product.
        shift: added to the diagonal, of any sign.
        preconditioner: M⁻¹, symmetric positive definite, as in `cg`.
        rtol: a column has converged when its true residual is at most rtol ‖b‖; 0 means the best the dtype allows.
        maxiter: the maximum number of block products; by default 10 n, at least 100, at most 10 000.
        x0: initial guess, with the shape of B.
        callback: called as ``callback(iteration, relative_residuals (K,))`` in every iteration.
        memory_budget: bytes for the working vectors; columns are solved in groups that fit, at least one at a time.
            None is the rest of the budget of the linearisation behind A.
        progress: as in `cg`.

    Returns:
        A Solution. Among all solutions (CONVERGED), or all minimisers of the residual (SINGULAR: b is not in the
        range), x is the one nearest to x0 (without x0, of smallest norm) in the preconditioner's metric. Minimisers
        have at least a third of the digits, as ``normal_residuals`` shows. NOT_SYMMETRIC means that ⟨u, Av⟩ = ⟨Au, v⟩
        does not hold, which takes three products once a column fails (six in doubt). An iteration costs one product per
        active column; a check of the true residual, every 50 iterations and at the end, costs one more, and one for A r
        if the residual stagnates.

    Raises:
        TypeError: A, B and x0 do not share one real dtype, float32 or float64.
        ValueError: shapes or devices do not fit, A is not square, the preconditioner is not positive definite, or
            rtol, maxiter or memory_budget is negative.

    Source: Choi, Paige & Saunders 2011, MINRES-QLP, restarted from the true residual when rounding dominates.

    Examples:
        >>> A = torch.diag(torch.tensor([1.0, -2.0]))
        >>> co.linalg.minres(A, torch.ones(2)).x.round(decimals=4)
        tensor([ 1.0000, -0.5000])
    """
    A = vec.as_matrix(A, B)
    facts = vec.describe_square(A)
    goal = check(facts, B, rtol, maxiter, x0, callback)
    sigma = checked_number("shift", shift, "(-inf, inf)")
    plain, precondition = vec.product(A), None if preconditioner is None else as_function(preconditioner, facts)

    def multiply(V: Vectors) -> Vectors:
        return plain(V) + sigma * V if sigma else plain(V)

    def solve(B: Vectors, X0: Vectors | None, *_: object) -> Solution:
        return MinimalResiduals(multiply, precondition, Records(B, X0, facts, goal)).solve()

    return solve_in_groups(solve, facts, B, x0, vectors=16)  # the working vectors of a column, temporaries included


class MinimalResiduals(ShortRecurrence):
    """The iteration of MINRES-QLP.

    The vectors of the active columns are two Lanczos residuals, M⁻¹ of the last, W, and the part of x without W.
    """

    def __init__(self, multiply: Multiply, precondition: Multiply | None, records: Records) -> None:
        self.multiply, self.precondition = multiply, precondition
        K = records.B.shape[1]
        r = vec.as_block(records.B - multiply(records.X) if records.warm and K else records.B)
        super().__init__(records, vec.norm(r))
        self.origin = vec.as_block(records.X) if records.warm else None
        self.norm_T = 0.0
        self.near: set[int] = set()
        """Positions whose recurrence is near a null vector."""
        self.spoiled: dict[int, float] = {}
        """‖A z‖/(‖A‖‖z‖) of columns from which so much was removed along z that z is no longer a null vector."""
        z, beta = self.in_metric(r)
        self.before, self.wl, self.w = (vec.zero_block(r, K) for _ in range(3))
        self.last, self.z, self.x = r, vec.as_block(z), vec.as_block(records.X)
        self.scalars = QLP.start(beta)
        self.parts = torch.zeros(2, K, dtype=self.B.dtype, device=self.B.device)
        """The coefficients of the solution along wl and w."""
        self.metric = to_host(vec.norm(r))[0] / positive(beta)
        """The true residual over its norm in the preconditioner's metric, which the recurrence minimises."""

    def in_metric(self, r: Vectors) -> tuple[Vectors, Numbers]:
        """Return M⁻¹r and, on the CPU, the norm of r in that metric."""
        if self.precondition is None:
            return r, to_host(vec.norm(r))[0]
        z = self.precondition(r)
        squares = to_host(vec.inner(r, z))[0]
        return self.in_metric(r) if self.strengthen(self.precondition, r, squares) else (z, np.sqrt(squares))

    def strengthen(self, precondition: Multiply, r: Vectors, squares: Numbers) -> bool:
        """Add its rounding to a preconditioner with rᵀM⁻¹r < 0; raise ValueError if rounding does not explain that."""
        if not bool((squares < 0).any()):
            return False
        vector = vec.columns(r, torch.tensor([int(squares.argmin())]))
        size = float(vec.norm(precondition(vec.part(self.B, 0, 1))))
        explained = most_explained(max(rounding_of(precondition, vector), self.eps * size), 1)
        if not -float(squares.min()) <= explained * float(vec.inner(vector, vector)):
            raise ValueError("the preconditioner must be positive definite: a vector r with r'M⁻¹r < 0 was found.")
        self.precondition = lambda V: precondition(V) + explained * V
        self.records.reference = [math.inf] * len(self.records.reference)  # columns restart with it
        return True

    def note(self) -> set[int]:
        """Add a row to the history; return positions converged by the recurrence, or near a null vector."""
        estimates = (self.scalars.phi * self.metric).tolist()
        self.records.record(self.active, estimates)
        return {j for j, value in enumerate(estimates) if not value > self.records.trigger} | self.near

    def step(self) -> tuple[set[int], set[int]]:
        beta = self.scalars.beta
        scale = to_device(positive(beta), self.B)
        v = self.z / scale
        p = self.multiply(v)
        self.records.iteration += 1
        self.records.matvecs += len(self.active)
        image = vec.norm(p)
        p = vec.axpy(p.clone(), self.before, -scale)
        alfa = vec.inner(p, v)
        vec.axpy(p, self.last, -alfa.to(scale.dtype) / scale)
        z = p if self.precondition is None else self.precondition(p)
        square = vec.norm(p) if self.precondition is None else vec.inner(p, z)
        packet = to_host(alfa, square, image, vec.norm(v))
        broken = not_finite(packet)
        if broken:
            self.near = set()
            return set(), broken
        a, measure, height, size = packet
        if self.precondition is not None:
            self.strengthen(self.precondition, p, measure)
        betan = measure if self.precondition is None else np.sqrt(measure.clip(0))
        self.norm_A = max(self.norm_A, float((height / positive(size)).max()))
        self.norm_T = max(self.norm_T, float(np.hypot(np.hypot(a, beta * self.scalars.started), betan).max()))
        with np.errstate(all="ignore"):  # true residuals decide
            coefficients, ended = self.scalars.advance(a, betan, self.norm_T, self.eps)
        c = to_device(coefficients, self.B)
        self.turn(v, c)
        self.before, self.last, self.z, self.parts = self.last / scale, p, z, c[5:]
        # Near a null vector r, x gains errors of eps/rootl along it: earlier solutions must be checked.
        rootl, last_rootl = self.scalars.rootl, self.scalars.last_rootl
        near = (rootl <= math.sqrt(self.eps) * self.norm_T) & (rootl <= 0.1 * last_rootl)
        last_rootl[near] = rootl[near]
        self.near = marked_positions(near)
        ended |= self.scalars.rootl <= 0.1 * self.records.level * self.norm_T
        return marked_positions(ended), set()

    def turn(self, v: Vectors, c: Float[Tensor, "7 k"]) -> None:
        """Add a Lanczos vector by two right reflections; the part that no later step changes goes to x."""
        cr1, sr1, cr2, sr2, ul2, _, _ = c
        fresh = vec.axpy(self.wl * sr2, v, -cr2)
        done = vec.axpy(self.wl * cr2, v, sr2)
        self.wl = vec.axpy(self.w * cr1, fresh, sr1)
        self.w = vec.axpy(self.w * sr1, fresh, -cr1)
        done *= ul2
        done += self.x
        self.x = done

    def check(self, positions: list[int], ended: set[int]) -> tuple[list[ColumnCheck], Callable[[list[int]], None]]:
        records, index = self.records, torch.tensor(positions)
        along = self.parts[:, index.to(self.B.device)]
        x = vec.axpy(vec.columns(self.x, index), vec.columns(self.wl, index), along[0])
        x = vec.axpy(x, vec.columns(self.w, index), along[1])
        image = self.multiply(x)
        records.matvecs += len(positions)
        sizes, images = torch.stack([vec.norm(x), vec.norm(image)]).cpu().tolist()
        self.norm_A = raise_norm(self.norm_A, images, sizes)
        r = vec.columns(self.B, torch.tensor([self.active[j] for j in positions])) - image
        stalled = {j for j in positions if records.idle(self.active[j]) >= CHECK_EVERY}
        normal = self.lift(positions, x, r, [i for i, j in enumerate(positions) if j in ended | self.near | stalled])
        z, measures = self.in_metric(r)
        residuals, sizes = torch.stack([vec.norm(r), vec.norm(x)]).cpu().tolist()
        checks = []
        for i, j in enumerate(positions):
            column, residual, measure = self.active[j], residuals[i], float(measures[i])
            self.keep(column, vec.part(x, i, i + 1), residual, residual / (self.norm_A * sizes[i] + 1), normal[i])
            self.metric[j] = residual / measure if measure > 0 else 1.0
            drifted = measure > 2 * float(self.scalars.phi[j])
            null = records.normal[column] <= records.vanishing
            restarts = records.reference[column] == math.inf
            over = drifted or j in ended or restarts or (null and column in self.spoiled)
            checks.append(ColumnCheck(residual, residual <= records.rtol, over, null))

        def restart(again: list[int]) -> None:
            which = torch.tensor(again)
            for block, value in ((self.x, x), (self.last, r), (self.z, z)):
                vec.put_columns(block, index[which], vec.columns(value, which))
            for block in (self.before, self.wl, self.w):
                vec.put_columns(block, index[which], vec.zero_block(x, len(again)))
            self.scalars.put(index[which].tolist(), QLP.start(measures[again]))
            self.parts[:, index[which].to(self.B.device)] = 0.0

        return checks, restart

    def keep(self, column: int, x: Float[Vectors, "n 1"], residual: float, backward: float, normal: float) -> None:
        """Store the solution if it is the best by its true residual.

        If the residual is a null vector, and only errors along it lower it, the smallest ‖Aᵀr‖ decides.
        """
        records = self.records
        best, before = records.best[column], records.normal[column]
        records.measure(column, residual)
        if before <= records.vanishing:
            better = (normal < before and residual <= 1.1 * best) or residual < 0.9 * best
        else:
            better = residual <= (1.1 * best if normal <= records.vanishing else best)
        if better:
            records.keep(column, x, residual, backward)
            records.normal[column] = normal

    def lift(self, positions: Sequence[int], x: Vectors, r: Vectors, which: list[int]) -> list[float]:
        """Return ‖A z‖/(‖A‖‖z‖), z = M⁻¹r, of some columns, otherwise NaN; remove null vectors from x and r.

        In an inconsistent system r is the only null vector in the Krylov space (Liu, Milzarek & Roosta 2022). It is one
        up to rounding: if much of x is removed, much of its error enters x, and the numbers are those after the
        removal.
        """
        normal = [math.nan] * len(positions)
        if not which:
            return normal
        index = torch.tensor(which)
        left = vec.columns(r, index)
        z, square = self.in_metric(left)
        image, sizes, gains = self.images(z)
        moved = vec.columns(x, index)
        if self.origin is not None:
            moved -= vec.columns(self.origin, torch.tensor([self.active[positions[i]] for i in which]))
        null = (gains <= self.records.vanishing) & (square > 0)
        dots, lengths = to_host(vec.inner(left, moved), vec.norm(moved))
        along = np.where(null, dots / np.where(null, square**2, 1.0), 0.0)
        share = torch.from_numpy(along).to(self.B.device)
        vec.put_columns(x, index, vec.axpy(vec.columns(x, index), z, -share))
        vec.put_columns(r, index, vec.axpy(left, image, share))
        # More of x, along a null vector, adds errors that have to be measured.
        spoiled = (np.abs(along) * sizes > 1e-2 * lengths).nonzero()[0]
        if len(spoiled):
            z, _ = self.in_metric(vec.columns(r, index[torch.from_numpy(spoiled)]))
            _, _, gains[spoiled] = self.images(z)
        for k, (i, value) in enumerate(zip(which, gains.tolist())):
            normal[i], column = value, self.active[positions[i]]
            if k in spoiled and self.records.vanishing < value < 0.5 * self.spoiled.get(column, math.inf):
                self.spoiled[column], self.records.reference[column] = value, math.inf  # the column restarts from here
        return normal

    def images(self, z: Vectors) -> tuple[Vectors, Numbers, Numbers]:
        """Return A z, the norms of z, and ‖A z‖/(‖A‖‖z‖)."""
        image = self.multiply(z)
        self.records.matvecs += z.shape[1]
        sizes, heights = to_host(vec.norm(z), vec.norm(image))
        self.norm_A = raise_norm(self.norm_A, heights.tolist(), sizes.tolist())
        return image, sizes, heights / positive(self.norm_A * sizes)

    def stop(self, column: int, reason: Reason) -> None:
        self.records.stop(column, reason)
        if self.records.reasons[column] in UNDECIDED | {Reason.SINGULAR} and self.skewed:
            self.records.give(column, Reason.NOT_SYMMETRIC)

    @cached_property
    def skewed(self) -> bool:
        """Whether ⟨r, Av⟩ and ⟨Ar, v⟩, v = Ar, differ by more than rounding explains, r the residual of a column."""
        column = self.active[0]
        r = vec.part(self.B, column, column + 1) - self.multiply(vec.part(self.records.X, column, column + 1))
        v, sizes, _ = self.images(r)
        image, heights, _ = self.images(v)
        gap = abs(float(vec.inner(r, image) - vec.inner(v, v))) / float(positive(sizes * heights)[0])
        self.records.matvecs += 1  # for r

        def rounding() -> float:
            self.records.matvecs += 3
            return rounding_of(self.multiply, r)

        return beyond_rounding(gap, self.norm_A, self.eps, rounding, 1)

    def select(self, remaining: list[int]) -> None:
        where = torch.tensor(remaining, dtype=torch.long)
        blocks = (self.before, self.last, self.z, self.wl, self.w, self.x)
        self.before, self.last, self.z, self.wl, self.w, self.x = (vec.columns(block, where) for block in blocks)
        self.scalars = self.scalars.select(remaining)
        self.parts = self.parts[:, where.to(self.B.device)]
        self.metric = self.metric[remaining]


@dataclass(eq=False)
class QLP(ColumnState):
    """The QLP factorisation of Lanczos' tridiagonal matrices between two steps, a float64 number per column each.

    Names are those of Choi, Paige & Saunders 2011: Q_k T_k = R_k by left reflections (cs, sn), R_k = L_k P_kᵀ by two
    right ones (cr1, sr1), (cr2, sr2). x_k = W_k u_k with orthonormal W_k = V_k P_k.
    ``rootl`` is ‖A r‖/‖r‖ of the residual before the last step; ``started`` is 0 before the first step, then 1, and
    ``last_rootl`` is rootl at the last check of a residual that was nearly a null vector.
    """

    beta: Numbers
    phi: Numbers
    cs: Numbers
    sn: Numbers
    cr1: Numbers
    sr1: Numbers
    cr2: Numbers
    sr2: Numbers
    dltan: Numbers
    gama: Numbers
    gamal: Numbers
    eta: Numbers
    etal: Numbers
    vepln: Numbers
    veplnl: Numbers
    tau: Numbers
    taul: Numbers
    u: Numbers
    ul: Numbers
    ul2: Numbers
    ul3: Numbers
    rootl: Numbers
    started: Numbers
    last_rootl: Numbers

    @classmethod
    def start(cls, beta: Numbers) -> QLP:
        """Return the state before the first step, for residuals of norm beta."""
        minus = np.full_like(beta, -1.0)
        return cls.with_fields(
            beta=beta, phi=beta, cs=minus, cr1=minus, cr2=minus, last_rootl=np.full_like(beta, np.inf)
        )

    def advance(self, alfa: Numbers, betan: Numbers, norm_A: float, eps: float) -> tuple[Numbers, Marks]:
        """Advance by a step of Lanczos; return (cr1, sr1, cr2, sr2, ul2, ul, u) and which columns have ended.

        A column has ended if the Krylov space is complete, or if L_k is singular to rounding: then u is 0, which makes
        x_k the shortest minimiser.
        """
        dbar = self.dltan
        dlta = self.cs * dbar + self.sn * alfa
        gbar = self.sn * dbar - self.cs * alfa
        dltan = -self.cs * betan
        self.rootl = np.hypot(gbar, dltan)
        eplnn = self.sn * betan
        gamal2, gamal = self.gamal, self.gama
        cs, sn, gama = reflection(gbar, betan)
        taul2, self.taul, self.tau = self.taul, self.tau, cs * self.phi
        self.phi = sn * self.phi

        veplnl2, etal2, self.etal = self.veplnl, self.etal, self.eta
        self.veplnl = self.cr2 * self.vepln + self.sr2 * dlta
        dlta = self.sr2 * self.vepln - self.cr2 * dlta
        self.eta, gama = self.sr2 * gama, -self.cr2 * gama
        cr1, sr1, gamal = reflection(gamal, dlta)
        self.vepln, gama = sr1 * gama, -cr1 * gama

        ul4, self.ul3 = self.ul3, self.ul2
        self.ul2 = ratio(taul2 - etal2 * ul4 - veplnl2 * self.ul3, gamal2)
        self.ul = ratio(self.taul - self.etal * self.ul3 - self.veplnl * self.ul2, gamal)
        singular = np.abs(gama) <= 100 * eps * norm_A
        self.u = np.where(singular, 0.0, ratio(self.tau - self.eta * self.ul2 - self.vepln * self.ul, gama))
        coefficients = np.stack([cr1, sr1, self.cr2, self.sr2, self.ul2, self.ul, self.u])

        self.cr2, self.sr2, gamal = reflection(gamal, eplnn)
        self.cs, self.sn, self.cr1, self.sr1 = cs, sn, cr1, sr1
        self.dltan, self.gama, self.gamal = dltan, gama, gamal
        self.beta, self.started = betan, np.ones_like(betan)
        return coefficients, singular | (betan <= eps * norm_A)
