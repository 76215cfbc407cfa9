"""The LSMR iteration: Golub and Kahan's bidiagonalisation, the answer from its rotations, and who stops when.

Damping is a second block of rows below A, so that every problem is of one form and may be begun anew from any x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from curvops.linalg.core.results import Reason
from curvops.linalg.core.vectors import as_block, columns, norm
from curvops.linalg.solvers.rotations import Bidiagonal
from curvops.linalg.solvers.stacked import Augmented, Stacked
from curvops.linalg.solvers.systems import Callback, Columns
from curvops.linalg.solvers.verdicts import Records, Recurrence, Verdict, grown


class Run(Recurrence):
    """K problems with right-hand sides of unit norm in lock-step; ``records`` is the outcome."""

    def __init__(
        self,
        operator: Augmented,
        system: Columns,
        warm: bool,
        consistent: bool,
        rtol: float,
        maxiter: int,
        callback: Callback | None,
    ) -> None:
        self.operator, self.B, self.consistent = operator, system.unit, consistent
        self.maxiter, self.callback = maxiter, system.spread(callback)
        (m, K), n = self.B.shape, system.X.shape[0]
        self.eps = torch.finfo(self.B.dtype).eps
        self.x = as_block(system.X)
        r = operator.residual(self.B, self.x) if warm and K else Stacked(as_block(self.B), None)
        if operator.damp and r.below is None:
            r = Stacked(r.top, torch.zeros_like(self.x))
        level, patience = 10 * self.eps * math.sqrt(max(m, n)), max(500, maxiter // 2)
        self.records = Records(system.X, norm(r.top).tolist(), rtol, level, patience)
        self.records.matvecs = K if warm else 0
        self.active = list(range(K))
        self.norm_A = 0.0
        if warm and K:  # without this ‖A‖ would not be known before the first step
            moved, sizes = torch.stack([norm(self.B - r.top), norm(self.x)]).cpu().tolist()
            self.norm_A = grown(0.0, moved, sizes)
        self.u, self.v, self.scalars = self.begin(r)
        self.h, self.hbar = as_block(self.v), torch.zeros_like(self.x)
        self.slopes, self.totals, self.noise = [math.inf] * K, [math.inf] * K, [0.0] * K
        """‖Aᵀr‖ and ‖r‖ of each column's best answer, by true products, damping included; the rounding of ‖Aᵀr‖."""
        self.records.reference = (self.scalars.zetabar * self.scalars.normr).tolist()
        self.within: set[int] = set()
        """Positions whose estimates, by the recurrence, are within the tolerance."""

    def begin(self, r: Stacked) -> tuple[Stacked, Tensor, Bidiagonal]:
        """The first pair of vectors from a residual: one transposed product."""
        beta = r.norm()
        u = r.over(torch.where(beta > 0, beta, 1.0).to(self.B))
        v = self.operator.pull(u)
        self.records.matvecs += v.shape[1]
        alpha = norm(v)
        v = v / torch.where(alpha > 0, alpha, 1.0).to(v)
        alpha, beta = torch.stack([alpha, beta]).cpu()
        self.norm_A = max([self.norm_A, *(a for a in alpha.tolist() if a < math.inf)])
        return u, v, Bidiagonal.start(alpha, beta)

    def note(self) -> set[int]:
        """A row of the history; positions whose recurrence says that they have converged."""
        s, rtol = self.scalars, max(0.95 * self.records.rtol, self.eps / 4)
        row = self.records.record(self.active, s.normr.tolist())
        if self.callback is not None:
            self.callback(self.records.iteration, row)
        small = s.normr <= rtol
        if not self.consistent:
            small |= s.zetabar.abs() <= rtol * self.norm_A * s.normr
        self.within = set(small.nonzero().squeeze(1).tolist())
        return self.within

    def step(self) -> tuple[set[int], set[int]]:
        """One step: positions whose Krylov space is complete, and those that met NaN or Inf."""
        image = self.operator.push(self.v)
        u = image.less(self.u, self.scalars.alpha.to(self.B))
        self.records.iteration += 1
        beta = u.norm()
        u = u.over(torch.where(beta > 0, beta, 1.0).to(self.B))
        v = self.operator.pull(u) - self.v * beta.to(self.B)
        self.records.matvecs += 2 * len(self.active)
        alpha = norm(v)
        v = v / torch.where(alpha > 0, alpha, 1.0).to(v)
        packet = torch.stack([alpha, beta, image.norm()]).cpu()
        broken = set((~torch.isfinite(packet).all(0)).nonzero().squeeze(1).tolist())
        if broken:
            return set(), broken
        alpha, beta, images = packet
        self.norm_A = max(self.norm_A, float(torch.maximum(images, torch.hypot(alpha, beta)).amax()))
        in_hbar, in_x, in_h = self.scalars.advance(alpha, beta).to(self.B)
        self.hbar = torch.addcmul(self.h, self.hbar, in_hbar, value=-1)
        self.x = torch.addcmul(self.x, self.hbar, in_x)
        self.h = torch.addcmul(v, self.h, in_h, value=-1)
        self.u, self.v = u, v
        ended = torch.minimum(alpha, beta) <= 10 * self.eps * self.norm_A
        ended |= self.scalars.zetabar.abs() <= 0.1 * self.records.level * self.norm_A * self.scalars.normr
        return set(ended.nonzero().squeeze(1).tolist()), set()

    def inspect(self, positions: Sequence[int], ended: set[int], forced: Reason | None = None) -> None:
        """Look at true residuals and Aᵀr, a product each; columns stop with a reason, begin anew, or go on."""
        if not positions:
            return
        index = torch.tensor(list(positions))
        x = columns(self.x, index)
        r = self.operator.residual(columns(self.B, torch.tensor([self.active[j] for j in positions])), x)
        gradient = self.operator.pull(r)
        self.records.matvecs += 2 * len(positions)
        facts = torch.stack([norm(r.top), r.norm(), norm(gradient), norm(x)]).cpu().tolist()
        self.norm_A = grown(self.norm_A, facts[2], facts[1])
        stopped: dict[int, Reason] = {}
        again: list[int] = []
        for i, j in enumerate(positions):
            column = self.active[j]
            residual, total, slope, size = (row[i] for row in facts)
            self.keep(column, x[:, i], residual, total, slope, self.norm_A * size + 1)
            if forced is not None or self.solved(column):
                stopped[i] = forced or Reason.CONVERGED
                continue
            # A recurrence that drifts by rounding still gains, until its own estimates are within the tolerance.
            drifted = total > 2 * float(self.scalars.normr[j]) or slope > 2 * abs(float(self.scalars.zetabar[j]))
            over = j in ended or (drifted and j in self.within)
            verdict = self.records.judge(column, slope * total, over, self.null(column))
            if verdict is Verdict.RESTART:
                again.append(i)
            elif verdict is Verdict.STOP:
                stopped[i] = Reason.STAGNATION if math.isfinite(slope) else Reason.NON_FINITE
        if again:
            self.restart(index[torch.tensor(again)], r.select(torch.tensor(again)))
        for i, reason in stopped.items():
            self.records.give(self.active[positions[i]], self.classify(self.active[positions[i]], reason))
        if stopped:
            self.shrink()

    def keep(self, column: int, x: Tensor, residual: float, total: float, slope: float, height: float) -> None:
        """Remember the answer if it is the best; ``height`` is ‖A‖‖x‖ + ‖b‖, of which residuals are differences.

        The residual decides. Of answers whose residuals agree, as near a minimum that is not zero, the least ‖Aᵀr‖.
        """
        records = self.records
        records.measure(column, slope * total)
        closer = slope <= self.slopes[column] and total <= 1.1 * self.totals[column]
        if closer or total < 0.9 * self.totals[column] or (residual <= records.rtol and not self.operator.damp):
            self.slopes[column], self.totals[column] = slope, total
            records.normal[column] = slope / max(self.norm_A * total, slope) if slope else 0.0
            records.best[column], records.backward[column] = residual, residual / height
            self.noise[column] = 0.1 * records.level * self.norm_A * height
            records.X[:, column] = x

    def solved(self, column: int) -> bool:
        """A small residual of an undamped system, or a small gradient of a least-squares problem."""
        records = self.records
        if records.best[column] <= records.rtol and not self.operator.damp:
            return True
        return records.normal[column] <= records.rtol and not self.consistent

    def flat(self, column: int) -> bool:
        """Whether ‖Aᵀr‖ is no more than the rounding in r and in the product, or than in A: nothing lowers it."""
        return self.slopes[column] <= self.noise[column] or self.records.normal[column] <= self.records.level

    def null(self, column: int) -> bool:
        """Whether r is a null vector of Aᵀ: flat, and by half the digits at least.

        A residual in directions of small singular values is flat long before it is all that can be reached.
        """
        return self.flat(column) and self.records.normal[column] <= math.sqrt(self.eps)

    def classify(self, column: int, reason: Reason) -> Reason:
        """The reason of a stop, from the best answer."""
        records = self.records
        if self.solved(column):
            return Reason.CONVERGED
        failed = reason in (Reason.STAGNATION, Reason.ITERATION_LIMIT)
        if failed and records.backward[column] <= records.level and records.best[column] <= 0.1:
            return Reason.PRECISION_LIMIT
        if reason is Reason.STAGNATION and self.consistent and self.null(column):
            return Reason.SINGULAR
        if reason is Reason.STAGNATION and not self.consistent and self.flat(column):
            return Reason.PRECISION_LIMIT
        return reason

    def restart(self, index: Tensor, r: Stacked) -> None:
        u, v, scalars = self.begin(r)
        where = index.to(v.device)
        self.u.place(index, u)
        self.v.mT[where], self.h.mT[where], self.hbar.mT[where] = v.mT, v.mT, 0.0
        self.scalars.restart(index, scalars.alpha, scalars.normr)

    def shrink(self) -> None:
        kept = [j for j, column in enumerate(self.active) if column not in self.records.reasons]
        where = torch.tensor(kept, dtype=torch.long)
        self.active = [self.active[j] for j in kept]
        self.u, self.scalars = self.u.select(where), self.scalars.select(where)
        self.v, self.h, self.hbar, self.x = (columns(block, where) for block in (self.v, self.h, self.hbar, self.x))
