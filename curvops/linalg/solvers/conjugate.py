"""The conjugate-gradient iteration: steps, checks against true residuals, and who may stop when."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.core.results import Reason
from curvops.linalg.core.vectors import Vectors, as_block, columns, gram, norm, part, put, put_columns
from curvops.linalg.solvers.directions import Directions, Step
from curvops.linalg.solvers.verdicts import CHECK_EVERY
from curvops.progress import remark

SKEWED = 0.01
"""⟨x, Aq⟩ − ⟨Ax, q⟩ relative to ‖A‖‖x‖‖q‖ from which on a failure is put down to Aᵀ ≠ A, not to noisy products."""
Block = Callable[[Vectors], Vectors]


@dataclass(eq=False)
class Run:
    """State of K systems with right-hand sides of unit norm, of which some are still active.

    ``x``, ``r`` are the active columns; ``X`` holds the best answer of every column, by true residual.
    The arrays of floats are Python lists on the host: K numbers, looked at once per iteration.
    """

    multiply: Block
    precondition: Block
    directions: Directions
    B: Float[Vectors, "n K"]
    X: Float[Vectors, "n K"]
    r: Float[Vectors, "n k"]
    rtol: float
    maxiter: int
    callback: Callable[[int, Tensor], object] | None = None
    iteration: int = 0
    matvecs: int = 0
    reasons: dict[int, Reason] = field(default_factory=dict)
    history: list[list[float]] = field(default_factory=list)
    normal: None = None
    last: Step | None = None
    null_met: bool = False
    """Whether a direction was left out of a step since rounding is all of its image."""

    def __post_init__(self) -> None:
        n, K = self.B.shape
        self.eps = torch.finfo(self.B.dtype).eps
        self.level = 10 * self.eps * math.sqrt(n)
        self.patience = max(500, self.maxiter // 2)
        self.active = list(range(K))
        self.x = as_block(self.X)
        self.norm_A = torch.zeros((), dtype=torch.float64, device=self.B.device)
        self.best: list[float] = norm(self.r).tolist()
        self.backward = list(self.best)
        self.nearest = list(self.best)
        self.current = list(self.best)
        self.gained = [0] * K
        self.reference = [math.inf] * K
        self.strikes = [0] * K
        self.limited = [False] * K

    def solve(self) -> None:
        """Iterate until every column has a reason."""
        step: Step | None = None
        P = self.propose(step)
        while self.active:
            recursion, sound, overlap = self.fetch(P, step)
            if step is not None and not sound:
                step, failed = self.directions.repair(step, self.r, self.norm_A)
                if failed:
                    self.inspect(sorted(failed), failed)
                    step = self.directions.keep(step, self.shrink(sorted(failed)))
                    if not self.active:
                        self.history.append(list(self.current))
                        break
                else:
                    self.null_met = True
                    self.advance(step)
                P = self.propose(step)
                recursion, _, overlap = self.fetch(P, None)
            self.record(recursion)
            due = self.due(recursion)
            if due:
                replaced = self.inspect(due, {})
                kept = self.shrink([j for j, column in enumerate(self.active) if column in self.reasons])
                step = step and self.directions.keep(step, kept)
                if replaced:
                    P = self.propose(step)
                    _, _, overlap = self.fetch(P, None)
                else:
                    P, overlap = columns(P, kept), _select(overlap, kept)
            if not self.active:
                break
            if self.iteration >= self.maxiter:
                self.stop_all(Reason.ITERATION_LIMIT)
            elif not bool(torch.isfinite(overlap).all()):
                self.stop_all(Reason.NON_FINITE)
            elif not (Q := self.directions.basis(P, overlap)).shape[1]:
                self.stop_all(Reason.STAGNATION)
            else:
                step = self.take_step(Q)
                P = self.propose(step)

    def take_step(self, Q: Vectors) -> Step:
        AQ = self.multiply(Q)
        self.matvecs += Q.shape[1]
        self.iteration += 1
        sizes = norm(AQ)
        self.norm_A = torch.maximum(self.norm_A, torch.where(torch.isfinite(sizes), sizes, 0.0).amax())
        step = self.last = self.directions.step(Q, AQ, self.r, self.norm_A)
        self.advance(step)
        return step

    def advance(self, step: Step) -> None:
        self.directions.move(self.x, step.Q, step.alpha, 1)
        self.directions.move(self.r, step.AQ, step.alpha, -1)

    def propose(self, step: Step | None) -> Vectors:
        Z = self.precondition(self.r)
        return Z if step is None else self.directions.conjugate(Z, step)

    def fetch(self, P: Vectors, step: Step | None) -> tuple[list[float], bool, Tensor]:
        """The one small transfer of an iteration: residual norms, soundness of the step, overlap of the directions."""
        overlap = self.directions.overlap(P)
        sound = torch.ones((), device=P.device) if step is None else step.sound.all()
        k = self.r.shape[1]
        packet = torch.cat([norm(self.r), sound.double().reshape(1), overlap.flatten()]).cpu()
        return packet[:k].tolist(), bool(packet[k]), packet[k + 1 :].view(overlap.shape)

    def record(self, recursion: list[float]) -> None:
        for column, value in zip(self.active, recursion):
            self.current[column] = value
        self.history.append(list(self.current))
        remark(lambda: f"residual {max(self.current):.1e}")
        if self.callback is not None:
            self.callback(self.iteration, torch.tensor(self.current, dtype=torch.float64))

    def due(self, recursion: list[float]) -> list[int]:
        """Active positions whose true residual must be looked at now."""
        if self.iteration and self.iteration % CHECK_EVERY == 0:
            return list(range(len(recursion)))
        trigger = max(0.95 * self.rtol, self.eps / 4)
        return [j for j, value in enumerate(recursion) if not value > trigger]

    def inspect(self, positions: list[int], failed: dict[int, Reason]) -> bool:
        """Compare with the true residual; give reasons to columns that stop. True if a residual was replaced."""
        index = torch.tensor(positions)
        x, r = columns(self.x, index), columns(self.r, index)
        image = self.multiply(x)
        self.matvecs += len(positions)
        true = columns(self.B, torch.tensor([self.active[j] for j in positions])) - image
        sizes = norm(x)
        growth = torch.nan_to_num(norm(image) / sizes, nan=0.0, posinf=0.0).amax()
        self.norm_A = torch.maximum(self.norm_A, growth)
        gap = self.asymmetry(x, image)
        facts = torch.stack([norm(true), norm(true - r), sizes, self.norm_A.expand(len(positions)), gap]).cpu()
        replaced = []
        for i, j in enumerate(positions):
            residual, drift, size, norm_A, gap_here = facts[:, i].tolist()
            column = self.active[j]
            backward = residual / (norm_A * size + 1)
            skewed = gap_here > SKEWED * norm_A * size
            stopped = failed.get(j) or self.verdict(column, residual, drift, backward)
            if stopped is None and skewed and residual >= self.best[column]:
                stopped = Reason.STAGNATION
            self.keep_best(column, part(x, i, i + 1), residual, backward)
            if stopped is not None:
                reason = self.classify(column, stopped)
                unsolved = reason in (Reason.STAGNATION, Reason.ITERATION_LIMIT)
                self.reasons[column] = Reason.NOT_SYMMETRIC if unsolved and skewed else reason
                self.current[column] = self.best[column]
            elif drift > 0.1 * residual:
                replaced.append(i)
        if replaced:
            put_columns(self.r, index[replaced], columns(true, torch.tensor(replaced)))
        return bool(replaced)

    def asymmetry(self, x: Vectors, image: Vectors) -> Tensor:
        """The largest of |xᵀAq − (Ax)ᵀq| over the last directions q: no product is spent on it."""
        if self.last is None or not self.last.Q.shape[1]:
            return torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
        return (gram(x, self.last.AQ) - gram(image, self.last.Q)).abs().amax(1)

    def keep_best(self, column: int, x: Float[Vectors, "n 1"], residual: float, backward: float) -> None:
        # The residual may first grow by √κ while the error shrinks: the backward error shows progress then.
        if residual < 0.99 * self.best[column] or backward < 0.99 * self.nearest[column]:
            self.gained[column] = self.iteration
            self.nearest[column] = min(backward, self.nearest[column])
        if residual <= self.best[column]:
            self.best[column], self.backward[column] = residual, backward
            put(self.X, column, x)

    def verdict(self, column: int, residual: float, drift: float, backward: float) -> Reason | None:
        """Whether a column may stop: converged, or checks that show drift and no gain by half.

        At the rounding level one such check is enough, elsewhere it takes three in a row.
        """
        if not math.isfinite(residual):
            return Reason.NON_FINITE
        if residual <= self.rtol:
            return Reason.CONVERGED
        if drift > 0.1 * residual or residual <= self.eps:
            self.limited[column] = True
            self.strikes[column] = self.strikes[column] + 1 if residual > 0.5 * self.reference[column] else 0
            self.reference[column] = min(residual, self.reference[column])
            if self.strikes[column] >= (1 if backward <= self.level else 3):
                return Reason.STAGNATION
        if self.iteration - self.gained[column] > self.patience:
            return Reason.STAGNATION
        return None

    def classify(self, column: int, reason: Reason) -> Reason:
        """The reason of a stop, from the best true residual and its backward error."""
        if self.best[column] <= self.rtol:
            return Reason.CONVERGED
        at_limit = self.backward[column] <= self.level
        idle = 2 * self.gained[column] <= self.iteration or self.best[column] > 0.1
        if reason is Reason.ITERATION_LIMIT and self.null_met and idle:
            reason = Reason.SINGULAR
        if reason is Reason.STAGNATION and min(self.backward[column], self.nearest[column]) <= self.level:
            return Reason.PRECISION_LIMIT if at_limit and self.best[column] <= 0.1 else Reason.SINGULAR
        if reason in (Reason.ITERATION_LIMIT, Reason.SINGULAR) and at_limit and self.limited[column]:
            return Reason.PRECISION_LIMIT if self.best[column] <= 0.1 else reason
        return reason

    def stop_all(self, reason: Reason) -> None:
        everyone = list(range(len(self.active)))
        self.inspect(everyone, dict.fromkeys(everyone, reason))
        self.shrink(everyone)

    def shrink(self, stopped: list[int]) -> Tensor:
        """Drop active positions; returns those kept."""
        gone = set(stopped)
        kept = torch.tensor([j for j in range(len(self.active)) if j not in gone], dtype=torch.long)
        if gone:
            self.active = [self.active[j] for j in kept.tolist()]
            self.x, self.r = columns(self.x, kept), columns(self.r, kept)
        return kept


def _select(overlap: Tensor, kept: Tensor) -> Tensor:
    return overlap[kept][:, kept] if overlap.ndim == 2 else overlap[kept]
