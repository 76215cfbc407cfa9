"""Solutions of A X = B for symmetric positive definite A by block conjugate gradients.

>>> import torch
>>> from curvops.linalg import cg
>>> solution = cg(torch.diag(torch.tensor([1.0, 2.0, 4.0])), torch.tensor([1.0, 2.0, 4.0]))
>>> solution.x.round(decimals=4), solution.reasons[0].name
(tensor([1., 1., 1.]), 'CONVERGED')
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from curvops.checkpoint import NOTHING, Checkpoint, Place, begin, named_part, resumable
from curvops.checks import check_flag, checked_whole
from curvops.linalg.core.matrix_identity import problem_of, ranks_of
from curvops.linalg.core.memory import Multiply, keep
from curvops.linalg.core.orthogonal import independent_basis
from curvops.linalg.core.results import Reason, Solution
from curvops.linalg.core.sharded import on_shards
from curvops.linalg.core.vectors import (
    Given,
    Matrix,
    Vectors,
    as_block,
    as_columns,
    as_matrix,
    axpy,
    columns,
    combine,
    describe_square,
    gram,
    inner,
    largest,
    norm,
    part,
    product,
    put_columns,
)
from curvops.linalg.solvers.kept_directions import VECTORS, KeptDirections, most_directions
from curvops.linalg.solvers.refinement import Refinement
from curvops.linalg.solvers.systems import (
    Preconditioner,
    UnitSystems,
    as_function,
    check,
    goal_of,
    solve_in_groups,
)
from curvops.linalg.solvers.verdicts import ANSWERED, CHECK_EVERY, UNDECIDED, Callback, Goal
from curvops.progress import Progress
from curvops.records import from_record, restore, state_of

REFINED = 16
"""Further working vectors for iterative refinement, in float64."""
SKEWED = 0.01
"""⟨x, Aq⟩ − ⟨Ax, q⟩, relative to ‖A‖‖x‖‖q‖, above which a failure is attributed to Aᵀ ≠ A, not to noisy products."""
STATE = (
    "active",
    "x",
    "r",
    "norm_A",
    "nearest",
    "peaks",
    "checked",
    "strikes",
    "drifted",
    "null_met",
    "renewed",
    "renewals",
)
MOST_RENEWALS = 4
"""How often a column may restart; no consistent system needed more than two restarts in tests."""
DRIFT = 0.1
"""The share of the true residual by which the recursion's residual may differ before it is replaced."""
NULL_PATIENCE = 3 * CHECK_EVERY
"""The iterations without a gain after which a column stops if A has shown a null vector."""
ROUNDED = 30
"""The rounding of a residual in units of its largest predecessor's."""
MOST_ROUNDED = 0.03
"""The largest relative error that is attributed to a residual: directions less dependent than that are kept."""


@on_shards
@resumable
def cg(
    A: Matrix | Given,
    B: Shaped[Vectors, "n *K"],
    *,
    preconditioner: Preconditioner | None = None,
    rtol: float | int = 1e-6,
    maxiter: int | None = None,
    x0: Vectors | None = None,
    callback: Callback | None = None,
    block: bool = True,
    refine: bool | torch.dtype = False,
    keep_directions: int | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
    checkpoint: Place | None = None,
) -> Solution:
    """Solve A x = b for every column b of B; failures are returned as reasons, never as solutions.

    Args:
        A: (n, n), symmetric positive definite. A function V (n, K) -> A V or a SciPy LinearOperator will
            do, as for all solvers (see `as_operator`).
        B: (n,) or (n, K). Columns may be zero, dependent, of any scale, or more than n.
        preconditioner: M⁻¹ as an object with ``@``, a matrix, or a function on blocks (n, k).
        rtol: a column has converged when its true residual ‖b − Ax‖ is at most rtol ‖b‖; 0 means the best accuracy
            that the dtype allows.
        maxiter: the maximum number of block products; by default 10 n, at least 100, at most 10 000.
        x0: initial guess, with the shape of B.
        callback: called as ``callback(iteration, relative_residuals (K,))`` in every iteration.
        block: share the search directions of all columns; False gives K textbook recurrences that share the product.
        refine: iterative refinement with residuals in float64, ``A.to(torch.float64)``; the solution is float64. True
            solves for corrections in A's dtype. torch.float32 solves for them in ``A.to(torch.float32)``, so that a
            float64 operator needs only ``exact_matvecs`` products in float64, one per column and four digits.
        keep_directions: how many search directions of a block are kept, the first ones, with their images (two vectors
            each). Later ones are made conjugate to all of them: rounding loses that otherwise, which costs products.
            None keeps up to 1024 for an operator built from a network, within a quarter of the bytes left, and none for
            others, whose products may be cheaper.
        memory_budget: bytes for the working vectors; columns are solved in groups that fit, at least one at a time.
            None is the rest of the budget of the linearisation behind A.
        progress: None shows a bar of the products on a terminal after two seconds, True always on standard error, False
            never. A function (description, products so far, total or None) is called after each product.
        checkpoint: a folder for the state of the iteration, written at most every half minute. After a crash the same
            call, with an equal preconditioner, continues from there and gives bitwise the same solution, which the
            folder also keeps. Not available with ``refine``.

    Returns:
        A Solution; ``x`` has the shape of B. One iteration costs one product per active column. Each column's
        residual is recomputed every 50 iterations and at its end, by one product each.

    Raises:
        TypeError: A, B and x0 do not share one real dtype, float32 or float64 (half precision is for storage: solve
            with ``A.to(torch.float32)``, which loses nothing).
        ValueError: shapes or devices do not fit, A is not square, rtol, maxiter or memory_budget is negative, refine is
            another dtype, or the checkpoint belongs to another problem.
        OSError: the checkpoint cannot be written.

    Source: O'Leary 1980, with orthonormal directions and dependent ones dropped (Ji & Li 2017); residual replacement
    as in van der Vorst & Ye 2000; conjugation to all directions as for full orthogonalisation in Lanczos' method.

    Examples:
        >>> A = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> solution = co.linalg.cg(A, torch.tensor([3.0, 4.0]))
        >>> solution.x.round(decimals=4), solution.reasons[0].name
        (tensor([1., 1.]), 'CONVERGED')
    """
    A = as_matrix(A, B)
    facts = describe_square(A)
    check(facts, B, rtol, maxiter, x0, memory_budget)
    if not isinstance(refine, bool) and refine is not torch.float32 and refine is not torch.float64:
        raise ValueError(f"refine must be True, False, torch.float32 or torch.float64, got {refine}.")
    check_flag("block", block)
    if checkpoint is not None and refine is not False:
        raise ValueError(f"cg saves no checkpoint of iterative refinement: omit checkpoint or refine={refine}.")
    if keep_directions is not None:
        checked_whole("keep_directions", keep_directions, 0)
    goal = goal_of(facts.rows, rtol, maxiter, callback)
    kept = begin("cg", checkpoint, lambda: problem_of(A), facts.device, refine is False, ranks_of(A))
    if kept.done:
        return kept.result(Solution)
    B, x0 = kept.attach("right-hand sides", lambda: [B, x0]) or (B, x0)
    apply = as_function(preconditioner, facts)
    most = (keep_directions or 0) if block else 0
    if block and keep_directions is None:
        most = most_directions(A, as_columns(B).shape[1], memory_budget)
    most = kept.attach("directions", lambda: most) or most
    begin_directions = partial(KeptDirections, most, partial(keep, A))

    done: list[int] = []

    def solve(part: Vectors, start: Vectors | None) -> Solution:
        if refine is False:
            found = _solve(A, apply, _algebra(facts.dtype, begin_directions(), block), part, start, goal, sum(done))
            done.append(part.shape[1])
            return found
        low = facts.dtype if refine is True else refine
        inner_solve = partial(_solve, A.to(low), lambda V: apply(V.to(facts.dtype)).to(V.dtype))

        def correct(R: Vectors, X0: Vectors | None, inner_goal: Goal) -> Solution:
            return inner_solve(_algebra(low, begin_directions(), block), R, X0, inner_goal)

        return Refinement(A.to(torch.float64), low, part, start).solve(correct, goal)

    vectors = VECTORS + (0 if refine is False else REFINED)
    return kept.finish(solve_in_groups("cg", solve, A, B, x0, vectors, memory_budget, progress, kept))


def _algebra(dtype: torch.dtype, past: KeptDirections, block: bool = True) -> Directions:
    """Return the small algebra of the steps of one solve."""
    noise = 20 * torch.finfo(dtype).eps
    return BlockDirections(noise, past) if block else ColumnDirections(noise, past)


def _solve(
    A: Matrix,
    precondition: Multiply,
    directions: Directions,
    B: Vectors,
    X0: Vectors | None,
    goal: Goal,
    first: int = 0,
) -> Solution:
    """Iterate on columns of unit norm; the first of them is column `first` of all."""
    kept = named_part(f"columns-{first}-{B.shape[1]}", B.device)
    if kept.done:
        return kept.result(Solution)
    system = UnitSystems.of(B, X0, B)
    run = ConjugateGradients(product(A), precondition, directions, system, goal, kept)
    run.solve()
    return kept.finish(system.solution(run.records))


class ConjugateGradients:
    """The iteration on K systems with right-hand sides of unit norm; columns in ``active`` have no reason yet.

    ``x`` and ``r`` are the active columns; ``records`` holds the best solution of every column, by true residual.
    Numbers per column are Python lists on the CPU, read once per iteration.
    """

    def __init__(
        self,
        multiply: Multiply,
        precondition: Multiply,
        directions: Directions,
        system: UnitSystems,
        goal: Goal,
        kept: Checkpoint = NOTHING,
    ) -> None:
        self.kept = kept
        self.multiply, self.precondition, self.directions = multiply, precondition, directions
        self.B, K = system.unit, system.unit.shape[1]
        self.active = list(range(K))
        self.x, self.r = as_block(system.X), as_block(self.B)
        if system.warm and K and kept.state is None:
            self.r -= multiply(system.X)
        self.records = system.records(norm(self.r), goal)
        self.records.matvecs = K if system.warm else 0
        self.eps = torch.finfo(self.B.dtype).eps
        self.norm_A = torch.zeros((), dtype=torch.float64, device=self.B.device)
        self.nearest = list(self.records.best)
        """The smallest backward error of each column."""
        self.peaks = list(self.records.best)
        """The largest residual of each column, to whose rounding later ones are known."""
        self.checked = [math.inf] * K
        """The smallest residual of each column in checks that showed drift; `strikes`: checks that did not halve it."""
        self.strikes = [0] * K
        self.drifted = [False] * K
        self.last: Step | None = None
        self.null_met = False
        """Whether a direction was left out of a step because its image is only rounding."""
        self.renewed = list(self.active)
        """Columns whose directions are their residuals, and so are conjugate to nothing."""
        self.renewals = [0] * K

    def solve(self) -> None:
        """Iterate until every column has a reason."""
        step: Step | None = None
        if self.kept.state is None:
            P = self.propose(step)
        else:
            step, P = self.recall(self.kept.state)
        while self.active:
            recursion, sound, overlap = self.fetch(P, step)
            if step is not None and sound:
                self.renewed = []
                self.directions.past.add(step.Q, step.AQ, step.curvature)
            elif step is not None:
                step = self.repair(step)
                if not self.active:
                    self.records.history.append(list(self.records.current))
                    return
                P = self.propose(step)
                recursion, _, overlap = self.fetch(P, None)
            self.records.record(self.active, recursion)
            for column, size in zip(self.active, recursion):
                self.peaks[column] = max(self.peaks[column], size)
            due = self.due(recursion)
            if due:
                del P  # the product does not need it, and most columns end here
                self.inspect(due, {})
                kept = self.shrink()
                step = step and self.directions.keep(step, kept)
                if not self.active:
                    return
                P = self.propose(step)
                _, _, overlap = self.fetch(P, None)
            if self.records.iteration >= self.records.maxiter:
                self.stop_all(Reason.ITERATION_LIMIT)
            elif not bool(torch.isfinite(overlap).all()):
                self.stop_all(Reason.NON_FINITE)
            elif not (Q := self.directions.basis(P, overlap, self.rounding())).shape[1]:
                self.stop_all(Reason.STAGNATION)
            else:
                del P
                step = self.last = None  # three blocks that the product does not need
                step = self.take_step(Q)
                P = self.propose(step)
                self.kept.save(partial(self.state, step, P))

    def state(self, step: Step, P: Vectors) -> dict[str, Any]:
        """Return the state from which a run continues after this step, with these directions."""
        past = self.directions.past.state()
        return state_of(self, STATE) | {"records": self.records.state(), "step": step, "P": P, "past": past}

    def recall(self, state: Mapping[str, Any]) -> tuple[Step, Vectors]:
        """Continue from a state; return the last step and the next directions."""
        restore(self, STATE, state)
        self.records.recall(state["records"])
        self.last = from_record(Step, state["step"])
        self.directions.past.recall(state["past"])
        return self.last, state["P"]

    def take_step(self, Q: Vectors) -> Step:
        """Make the one block product of an iteration."""
        AQ = self.multiply(Q)
        self.records.matvecs += Q.shape[1]
        self.records.iteration += 1
        sizes = norm(AQ)
        self.norm_A = torch.maximum(self.norm_A, torch.where(torch.isfinite(sizes), sizes, 0.0).amax())
        step = self.last = self.directions.step(Q, AQ, self.r, self.norm_A)
        self.advance(step)
        return step

    def advance(self, step: Step) -> None:
        """Update x ← x + Q α, r ← r − AQ α."""
        axpy(self.x, step.Q, step.alpha)
        axpy(self.r, step.AQ, -step.alpha)

    def propose(self, step: Step | None) -> Vectors:
        """Return what the next directions span: preconditioned residuals, conjugate to the last directions."""
        Z = self.precondition(self.r)
        return Z if step is None else self.directions.conjugate(Z, step)

    def repair(self, step: Step) -> Step:
        """Take a step along its safe directions only; columns without a safe direction restart, or stop.

        After a direction of nearly no curvature has made a residual larger, conjugation may leave only rounding of a
        residual that A can still reduce: then the column restarts. If the residual itself is such a direction, the
        column stops.
        """
        self.directions.past.end()
        step, failed = self.directions.repair(step, self.r, self.norm_A)
        again = [j for j, reason in failed.items() if reason is Reason.SINGULAR and self.may_restart(self.active[j])]
        self.renewed = [self.active[j] for j in again]
        for column in self.renewed:
            self.renewals[column] += 1
        failed = {j: reason for j, reason in failed.items() if j not in again}
        if failed:
            self.inspect(sorted(failed), failed)
            return self.directions.keep(step, self.shrink())
        self.null_met = True
        self.advance(step)
        return step

    def may_restart(self, column: int) -> bool:
        """Return whether a column's small residual was not itself the direction, and the column has restarts left."""
        small = self.records.current[column] <= ANSWERED
        return small and column not in self.renewed and self.renewals[column] < MOST_RENEWALS

    def fetch(self, P: Vectors, step: Step | None) -> tuple[list[float], bool, Tensor]:
        """Transfer residual norms, soundness of the step and overlap of the directions, once per iteration."""
        overlap = self.directions.overlap(P)
        sound = torch.ones((), device=P.device) if step is None else step.sound.all()
        k = self.r.shape[1]
        packet = torch.cat([norm(self.r), sound.double().reshape(1), overlap.flatten()]).cpu()
        return packet[:k].tolist(), bool(packet[k]), packet[k + 1 :].view(overlap.shape)

    def rounding(self) -> Tensor:
        """Return the error of each active residual relative to it: it was subtracted from its largest predecessor."""
        current = torch.tensor([self.records.current[j] for j in self.active], dtype=torch.float64)
        peaks = torch.tensor([self.peaks[j] for j in self.active], dtype=torch.float64)
        return (ROUNDED * self.eps * peaks / current).clamp(max=MOST_ROUNDED)

    def due(self, recursion: list[float]) -> list[int]:
        """Return the active positions whose true residual must be checked now."""
        if self.records.iteration and self.records.iteration % CHECK_EVERY == 0:
            return list(range(len(recursion)))
        return [j for j, value in enumerate(recursion) if not value > self.records.trigger]

    def inspect(self, positions: Sequence[int], failed: Mapping[int, Reason]) -> None:
        """Compare with the true residual; give reasons to columns that stop, and replace residuals that drifted."""
        records, index = self.records, torch.tensor(positions)
        whole = len(positions) == self.x.shape[1]
        x, r = (self.x, self.r) if whole else (columns(self.x, index), columns(self.r, index))
        image = self.multiply(x)
        records.matvecs += len(positions)
        sizes = norm(x)
        growth = torch.nan_to_num(norm(image) / sizes, nan=0.0, posinf=0.0).amax()
        self.norm_A = torch.maximum(self.norm_A, growth)
        gaps = self.asymmetry(x, image)
        true = columns(self.B, torch.tensor([self.active[j] for j in positions]))
        true = axpy(true, image, -torch.ones_like(sizes))
        del image
        facts = torch.stack([norm(true), norm(true - r), sizes, self.norm_A.expand(len(positions)), gaps]).cpu()
        replaced = []
        for i, j in enumerate(positions):
            residual, drift, size, norm_A, gap = facts[:, i].tolist()
            column = self.active[j]
            backward = residual / (norm_A * size + 1)
            skewed = gap > SKEWED * norm_A * size
            stopped = failed.get(j) or self.verdict(column, residual, drift, backward)
            if stopped is None and skewed and residual >= records.best[column]:
                stopped = Reason.STAGNATION
            self.keep(column, part(x, i, i + 1), residual, backward)
            if stopped is not None:
                reason = self.classify(column, stopped)
                records.give(column, Reason.NOT_SYMMETRIC if reason in UNDECIDED and skewed else reason)
            elif drift > DRIFT * residual:
                replaced.append(i)
        if replaced:
            put_columns(self.r, index[replaced], columns(true, torch.tensor(replaced)))
            self.directions.past.project(self.x, self.r)

    def asymmetry(self, x: Vectors, image: Vectors) -> Tensor:
        """Return the largest of |xᵀAq − (Ax)ᵀq| over the last directions q, without spending a product."""
        if self.last is None or not self.last.Q.shape[1]:
            return torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
        return (gram(x, self.last.AQ) - gram(image, self.last.Q)).abs().amax(1)

    def keep(self, column: int, x: Float[Vectors, "n 1"], residual: float, backward: float) -> None:
        """Store the solution if it is the best, and return whether it is an improvement."""
        # The residual may first grow by √κ while the error shrinks: the backward error then shows the progress.
        best = self.records.best[column]
        if residual < 0.99 * best or backward < 0.99 * self.nearest[column]:
            self.records.gained[column] = self.records.iteration
            self.nearest[column] = min(backward, self.nearest[column])
        if residual <= best:
            self.records.keep(column, x, residual, backward)

    def verdict(self, column: int, residual: float, drift: float, backward: float) -> Reason | None:
        """Return a reason to stop: convergence, or checks that show drift and did not halve the residual.

        At the rounding level one such check is enough; elsewhere it takes three in a row.
        """
        if not math.isfinite(residual):
            return Reason.NON_FINITE
        if residual <= self.records.rtol:
            return Reason.CONVERGED
        if drift > DRIFT * residual or residual <= self.eps:
            self.drifted[column] = True
            self.strikes[column] = self.strikes[column] + 1 if residual > 0.5 * self.checked[column] else 0
            self.checked[column] = min(residual, self.checked[column])
            if self.strikes[column] >= (1 if backward <= self.records.level else 3):
                return Reason.STAGNATION
        idle = self.records.idle(column)
        if self.null_met and idle > NULL_PATIENCE:
            return Reason.SINGULAR
        return Reason.STAGNATION if idle > self.records.patience else None

    def classify(self, column: int, reason: Reason) -> Reason:
        """Return the reason of a stop, from the best true residual and the smallest backward error."""
        records = self.records
        best, least = records.best[column], min(records.backward[column], self.nearest[column])
        if best <= records.rtol:
            return Reason.CONVERGED
        if reason is Reason.STAGNATION and least <= records.level:
            return Reason.PRECISION_LIMIT if records.limited(column) else Reason.SINGULAR
        idle = 2 * records.gained[column] <= records.iteration or best > ANSWERED
        if reason is Reason.ITERATION_LIMIT and self.null_met and idle:
            reason = Reason.SINGULAR
        if reason in (Reason.ITERATION_LIMIT, Reason.SINGULAR) and self.drifted[column] and records.limited(column):
            return Reason.PRECISION_LIMIT
        return reason

    def stop_all(self, reason: Reason) -> None:
        """Stop every active column."""
        everyone = range(len(self.active))
        self.inspect(everyone, dict.fromkeys(everyone, reason))
        self.shrink()

    def shrink(self) -> Tensor:
        """Drop the columns that have a reason; return the active positions that remain."""
        kept = [j for j, column in enumerate(self.active) if column not in self.records.reasons]
        index = torch.tensor(kept, dtype=torch.long)
        if len(kept) < len(self.active):
            self.active = [self.active[j] for j in kept]
            self.x, self.r = columns(self.x, index), columns(self.r, index)
        return index


@dataclass(frozen=True, eq=False)
class Step:
    """One step: orthonormal directions Q, images AQ, curvature QᵀAQ (or its diagonal), and the coefficients."""

    Q: Float[Vectors, "n r"]
    AQ: Float[Vectors, "n r"]
    curvature: Float[Tensor, "..."]
    alpha: Float[Tensor, "..."]
    sound: Bool[Tensor, "..."]


@dataclass(frozen=True)
class Directions(ABC):
    """The small algebra of a step: the minimum of the energy over the directions, and the next conjugate directions.

    Curvature below ``noise`` ‖A‖ is rounding.
    """

    noise: float
    past: KeptDirections

    @abstractmethod
    def overlap(self, P: Vectors) -> Tensor:
        """Return the numbers of P that ``basis`` needs, which are sent to the CPU with the residual norms."""

    @abstractmethod
    def basis(self, P: Vectors, overlap_host: Tensor, rounding: Tensor) -> Vectors:
        """Return directions that span P, whose columns have these relative errors, conjugate to past ones."""

    @abstractmethod
    def step(self, Q: Vectors, AQ: Vectors, R: Vectors, norm_A: Tensor) -> Step:
        """Return the energy-minimising step, without directions whose curvature is not safely positive."""

    @abstractmethod
    def conjugate(self, Z: Vectors, step: Step) -> Vectors:
        """Return Z made A-conjugate to the directions of the last step."""

    @abstractmethod
    def repair(self, step: Step, R: Vectors, norm_A: Tensor) -> tuple[Step, dict[int, Reason]]:
        """Return the step without its unsafe directions, and the columns that must stop, with their reasons."""

    @abstractmethod
    def keep(self, step: Step, index: Tensor) -> Step:
        """Return the step that the remaining columns took."""


def classify_directions(
    curvature: Tensor, image: Tensor, norm_A: Tensor, noise: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which directions are sound, which prove that A is not positive definite, and which are null to rounding.

    For positive semidefinite A, ‖Aq‖² ≤ ‖A‖ qᵀAq: a direction without curvature has no image. An image without
    curvature therefore disproves semidefiniteness (a nilpotent matrix), whatever the sign of the rounding error.
    """
    finite = torch.isfinite(curvature) & torch.isfinite(image)
    floor = noise * norm_A
    sound = finite & ((curvature > floor) | ((curvature > 0.1 * image) & (curvature > 0)))
    indefinite = finite & ~sound & ((curvature < -floor) | (image.square() > 100 * noise * norm_A.square()))
    return sound, indefinite, finite & ~sound & ~indefinite


class BlockDirections(Directions):
    """One block of directions shared by all columns (O'Leary 1980)."""

    def overlap(self, P: Vectors) -> Tensor:
        return gram(P, P)

    def basis(self, P: Vectors, overlap_host: Tensor, rounding: Tensor) -> Vectors:
        # Without other directions to be conjugate to, one that is rounding costs less than one left out too early.
        Q = independent_basis(P, overlap_host, rounding if self.past.most else None)
        return self.past.conjugate(Q)  # as late as this, since a basis of nearly dependent columns magnifies its error

    def step(self, Q: Vectors, AQ: Vectors, R: Vectors, norm_A: Tensor) -> Step:
        curvature = gram(Q, AQ)
        curvature = (curvature + curvature.mT) / 2
        shifted = curvature - self.noise * norm_A * torch.eye(len(curvature), dtype=torch.float64, device=R.device)
        _, unsafe = torch.linalg.cholesky_ex(shifted)
        L, info = torch.linalg.cholesky_ex(curvature)
        alpha = torch.cholesky_solve(gram(Q, R), L)
        sound = (unsafe == 0) & (info == 0) & torch.isfinite(alpha).all() & torch.isfinite(curvature).all()
        return Step(Q, AQ, curvature, torch.where(sound, alpha, 0.0), sound)

    def conjugate(self, Z: Vectors, step: Step) -> Vectors:
        if not step.Q.shape[1]:
            return Z
        L, _ = torch.linalg.cholesky_ex(step.curvature)
        return Z - combine(step.Q, torch.cholesky_solve(gram(step.AQ, Z), L))

    def repair(self, step: Step, R: Vectors, norm_A: Tensor) -> tuple[Step, dict[int, Reason]]:
        everyone = range(R.shape[1])
        curvature = step.curvature.cpu()
        if not bool(torch.isfinite(curvature).all()) or not bool(torch.isfinite(largest(R)).all()):
            return step, dict.fromkeys(everyone, Reason.NON_FINITE)
        values, V = torch.linalg.eigh(curvature)
        V = V.to(R.device)
        Q, AQ = combine(step.Q, V), combine(step.AQ, V)
        sound, indefinite, _ = classify_directions(values, norm(AQ).cpu(), norm_A.cpu(), self.noise)
        if bool(indefinite.any()):
            return step, dict.fromkeys(everyone, Reason.NOT_POSITIVE_DEFINITE)
        failed = {} if bool(sound.any()) else dict.fromkeys(everyone, Reason.SINGULAR)
        index = sound.nonzero().squeeze(1)
        Q, AQ, values = columns(Q, index), columns(AQ, index), values[index].to(R.device)
        alpha = gram(Q, R) / values[:, None]
        return Step(Q, AQ, torch.diag(values), alpha, torch.ones((), dtype=torch.bool, device=R.device)), failed

    def keep(self, step: Step, index: Tensor) -> Step:
        return step


class ColumnDirections(Directions):
    """One direction per column: textbook CG for K systems that share the block product."""

    def overlap(self, P: Vectors) -> Tensor:
        return norm(P)

    def basis(self, P: Vectors, overlap_host: Tensor, rounding: Tensor) -> Vectors:
        sizes = torch.where(overlap_host > 0, overlap_host, 1.0)
        return P / sizes.to(P.device, P.dtype, non_blocking=True)

    def step(self, Q: Vectors, AQ: Vectors, R: Vectors, norm_A: Tensor) -> Step:
        curvature, image = inner(Q, AQ), norm(AQ)
        sound, _, _ = classify_directions(curvature, image, norm_A, self.noise)
        alpha = inner(Q, R) / torch.where(sound, curvature, 1.0)
        return Step(Q, AQ, curvature, torch.where(sound, alpha, 0.0), sound)

    def conjugate(self, Z: Vectors, step: Step) -> Vectors:
        beta = inner(step.AQ, Z) / torch.where(step.sound, step.curvature, 1.0)
        return Z - step.Q * torch.where(step.sound, beta, 0.0).to(Z.dtype)

    def repair(self, step: Step, R: Vectors, norm_A: Tensor) -> tuple[Step, dict[int, Reason]]:
        curvature, image = step.curvature.cpu(), norm(step.AQ).cpu()
        sound, indefinite, null = classify_directions(curvature, image, norm_A.cpu(), self.noise)
        failed = {}
        for j in (~sound).nonzero().squeeze(1).tolist():
            known = Reason.NOT_POSITIVE_DEFINITE if bool(indefinite[j]) else Reason.NON_FINITE
            failed[j] = Reason.SINGULAR if bool(null[j]) else known
        return replace(step, alpha=torch.zeros_like(step.alpha)), failed  # the sound columns have taken this step

    def keep(self, step: Step, index: Tensor) -> Step:
        where = index.to(step.alpha.device)
        small = (step.curvature[where], step.alpha[where], step.sound[where])
        return Step(columns(step.Q, index), columns(step.AQ, index), *small)
