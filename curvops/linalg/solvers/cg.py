"""Solutions of A X = B for symmetric positive definite A by block conjugate gradients.

>>> import torch
>>> from curvops.linalg import cg
>>> solution = cg(torch.diag(torch.tensor([1.0, 2.0, 4.0])), torch.tensor([1.0, 2.0, 4.0]))
>>> solution.x.round(decimals=4), solution.reasons[0].name
(tensor([1., 1., 1.]), 'CONVERGED')
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from curvops.ambient import Progress, current_run, hold
from curvops.checkpoint import NOTHING, Place, begin
from curvops.linalg.core import vectors as vec
from curvops.linalg.core.algorithm import Multiply, algorithm
from curvops.linalg.core.matrix_identity import problem_of
from curvops.linalg.core.results import Reason, Solution
from curvops.linalg.core.vectors import Description, Given, Matrix, Vectors
from curvops.linalg.solvers.refinement import Refinement
from curvops.linalg.solvers.systems import (
    ANSWERED,
    CHECK_EVERY,
    UNDECIDED,
    Callback,
    Goal,
    Preconditioner,
    Records,
    Save,
    as_function,
    check,
    raise_norm,
    solve_in_groups,
)
from curvops.storage import restore, state_of

STATE = (
    *("active", "x", "r", "norm_A", "last", "most", "nearest", "energies", "checked", "strikes", "drifted"),
    *("null_met", "renewed", "renewals"),
)
DRIFT = 0.1
"""The share of the true residual by which the recursion's residual may differ before it is replaced."""


@algorithm
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
        residual is recomputed every 50 iterations and at its end, by one product each. A column that ends before it
        converges has the x of smallest residual; at ``maxiter``, or at a direction of negative curvature, that of least
        energy ½xᵀAx − bᵀx, as a truncated Newton step needs, whose residual may be above 1 (not with ``refine``).

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
    A = vec.as_matrix(A, B)
    facts = vec.describe_square(A)
    goal = check(facts, B, rtol, maxiter, x0, callback)
    if refine not in (True, False, torch.float32, torch.float64):
        raise ValueError(f"refine must be True, False, torch.float32 or torch.float64, got {refine}.")
    if checkpoint is not None and refine is not False:
        raise ValueError(f"cg saves no checkpoint of iterative refinement: omit checkpoint or refine={refine}.")
    vectors = 12 if refine is False else 28  # the working vectors of a column; refinement holds them in float64, too
    if (most := keep_directions) is None:
        most = _directions_worth_keeping(facts, vectors * (1 if B.ndim == 1 else B.shape[1])) if block else 0
    precondition = None if preconditioner is None else as_function(preconditioner, facts)
    saved = begin("cg", checkpoint, lambda: problem_of(A), facts.device)
    if saved is not NOTHING:
        if saved.done:
            return saved.result(Solution)
        B, x0, most = saved.attach("right-hand sides, guess and directions", lambda: [B, x0, most]) or (B, x0, most)

    def solve(B: Vectors, X0: Vectors | None, state: Mapping[str, Any] | None, save: Save | None) -> Solution:
        records = Records(B, X0, B, goal)
        return ConjugateGradients(vec.product(A), precondition, block, most, records, state).solve(save)

    def solve_refined(B: Vectors, X0: Vectors | None, *_: object) -> Solution:
        low = facts.dtype if isinstance(refine, bool) else refine
        multiply = vec.product(A.to(low))
        M = None if precondition is None else lambda V: precondition(V.to(facts.dtype)).to(V.dtype)

        def correct(R: Vectors, goal: Goal) -> Solution:
            return ConjugateGradients(multiply, M, block, most, Records(R, None, R, goal)).solve()

        exact, B = A.to(torch.float64), B.to(torch.float64)
        return Refinement(exact, low, Records(B, None if X0 is None else X0.to(torch.float64), B, goal)).solve(correct)

    with hold(current_run().memories, 2 * most * facts.vector_bytes):
        solution = solve_in_groups(solve if refine is False else solve_refined, facts, B, x0, vectors, saved)
        return saved.finish(solution)


def _directions_worth_keeping(facts: Description, vectors: int) -> int:
    """Return how many directions are kept, in a quarter of the bytes left beside the working vectors."""
    run = current_run()
    if not run.memories or (room := run.room()) is None:
        return 0
    fitting = (room - vectors * facts.vector_bytes) // (4 * 2 * facts.vector_bytes)  # each has an image, too
    # Fewer than 64 save no more than a tenth of the products; what is left of a small space is rounding.
    return min(1024, fitting, facts.rows // 2) if fitting >= 64 else 0


class ConjugateGradients:
    """The iteration on K systems with right-hand sides of unit norm; columns in ``active`` have no reason yet.

    ``x`` and ``r`` are the active columns; ``records`` holds the best solution of every column, by true residual. A
    block shares its directions, and small matrices are (K, K); without ``block`` each column has its own, and (K,)
    numbers take their place. Numbers per column are Python lists on the CPU.
    """

    def __init__(
        self,
        multiply: Multiply,
        precondition: Multiply | None,
        block: bool,
        most: int,
        records: Records,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.multiply, self.precondition, self.block, self.most = multiply, precondition, block, most
        self.products = vec.gram if block else vec.inner
        self.records, self.B, K = records, records.B, records.B.shape[1]
        self.active = list(range(K))
        self.x, self.r = vec.as_block(records.X), vec.as_block(self.B)
        if records.warm and K and state is None:
            self.r -= multiply(records.X)
        self.energies: list[float] = (-(vec.inner(records.X, self.B) + vec.inner(records.X, self.r)) / 2).tolist()
        """The energy ½xᵀAx − bᵀx of each column's best solution."""
        records.start(vec.norm(self.r).tolist())
        records.matvecs = K if records.warm else 0
        self.eps = torch.finfo(self.B.dtype).eps
        self.norm_A = 0.0
        self.last: list[Vectors] = []
        """The directions W of the last step, scaled so that WᵀAW = I, and their images AW."""
        self.panels: list[tuple[Vectors, Vectors]] = []
        """The first directions of the solve and their images, at most ``most``: rounding loses conjugacy to these."""
        self.last_panel: tuple[Vectors, ...] = ()
        """The memory of the last panel, with room for more."""
        self.count = 0
        """The number of directions in the panels."""
        self.nearest = list(self.records.best)
        """The smallest backward error of each column."""
        self.checked = [math.inf] * K
        """The smallest residual of each column in checks that showed drift; `strikes`: checks that did not halve it."""
        self.strikes = [0] * K
        self.drifted = [False] * K
        self.null_met = False
        """Whether a direction was left out of a step because its image is only rounding."""
        self.renewed = list(self.active)
        """Columns whose directions are their residuals, and so are conjugate to nothing."""
        self.renewals = [0] * K
        if state is not None:
            restore(self, STATE, state)
            self.records.recall(state["records"])
            for W, AW in state["panels"]:
                self.append(W, AW)

    def solve(self, save: Save | None = None) -> Solution:
        """Iterate until every column has a reason, saving the state after each step; return the solution."""
        records = self.records
        while self.active:
            P, residuals, overlap = self.propose()
            records.record(self.active, residuals)
            periodic = records.iteration and records.iteration % CHECK_EVERY == 0
            due = [j for j, size in enumerate(residuals) if periodic or not size > records.trigger]
            if due:
                del P  # the product does not need it, and most columns end here
                self.inspect(due, {})
                if not self.active:
                    break
                P, _, overlap = self.propose()
            if records.iteration >= records.maxiter:
                self.stop_all(Reason.ITERATION_LIMIT)
            elif not bool(torch.isfinite(overlap).all()):
                self.stop_all(Reason.NON_FINITE)
            elif not (Q := self.basis(P, overlap)).shape[1]:
                self.stop_all(Reason.STAGNATION)
            else:
                del P
                self.step(Q)
                if save is not None:
                    save(self.state)
        return records.solution()

    def state(self) -> dict[str, Any]:
        """Return the state from which a run continues."""
        return state_of(self, STATE) | {"records": self.records.state(), "panels": self.panels}

    def propose(self) -> tuple[Vectors, list[float], Tensor]:
        """Return preconditioned residuals, conjugate to the last directions, with ‖r‖ and their products on the CPU."""
        P = self.r if self.precondition is None else self.precondition(self.r)
        if self.last:
            W, AW = self.last
            P = vec.axpy(vec.as_block(P), W, -self.products(AW, P))
        overlap = self.products(P, P)
        packet = torch.cat([vec.norm(self.r), overlap.flatten()]).cpu()
        k = self.r.shape[1]
        return P, packet[:k].tolist(), packet[k:].view(overlap.shape)

    def basis(self, P: Vectors, overlap: Tensor) -> Vectors:
        """Return unit directions that span P, and are conjugate to those that are kept."""
        if not self.block:
            sizes = torch.where(overlap > 0, overlap.sqrt(), 1.0)
            return P / sizes.to(P.device, P.dtype, non_blocking=True)
        Q = vec.independent_basis(P, overlap)
        for W, AW in self.panels:  # as late as this, since a basis of nearly dependent columns magnifies its error
            vec.axpy(Q, W, -vec.gram(AW, Q))
        return Q

    def step(self, Q: Vectors) -> None:
        """Minimise the energy of every column along these directions, with the one block product of an iteration."""
        records, self.last = self.records, []  # two blocks that the product does not need
        AQ = self.multiply(Q)
        records.matvecs += Q.shape[1]
        records.iteration += 1
        curvature = self.products(Q, AQ)
        packet = torch.cat([vec.norm(AQ), curvature.flatten()]).cpu()
        images, curvature = packet[: Q.shape[1]], packet[Q.shape[1] :].view(curvature.shape)
        self.norm_A = max(self.norm_A, float(torch.where(torch.isfinite(images), images, 0.0).max()))
        scale, failed = (self.block_scale if self.block else self.column_scales)(Q, AQ, curvature, images)
        renewed = []
        for j, column in enumerate(self.active):
            if failed.get(j) is Reason.SINGULAR and self.may_restart(column):
                renewed.append(column)
                self.renewals[column] += 1
                del failed[j]
        self.renewed = renewed
        scale = scale.to(Q.device, Q.dtype, non_blocking=True)
        W, AW = (vec.combine(Q, scale), vec.combine(AQ, scale)) if self.block else (Q * scale, AQ * scale)
        del Q, AQ
        alpha = self.products(W, self.r)
        vec.axpy(self.x, W, alpha)
        vec.axpy(self.r, AW, -alpha)
        self.last = [W, AW]
        if self.block:
            self.append(W, AW)
        if failed:
            self.inspect(sorted(failed), failed)
            if not self.active:
                records.history.append(list(records.current))

    def block_scale(
        self, Q: Vectors, AQ: Vectors, curvature: Tensor, images: Tensor
    ) -> tuple[Tensor, dict[int, Reason]]:
        """Return S with (QS)ᵀA(QS) = I, without unsafe directions, and reasons if A proves unfit."""
        everyone, noise = range(self.r.shape[1]), 20 * self.eps
        curvature = (curvature + curvature.mT) / 2
        identity = torch.eye(len(curvature), dtype=torch.float64)
        none = identity[:, :0]
        if not bool(torch.isfinite(curvature).all() & torch.isfinite(images).all()):
            return none, dict.fromkeys(everyone, Reason.NON_FINITE)
        _, unsafe = torch.linalg.cholesky_ex(curvature - noise * self.norm_A * identity)
        L, info = torch.linalg.cholesky_ex(curvature)
        if not bool(unsafe) and not bool(info):
            return torch.linalg.solve_triangular(L, identity, upper=False).mT, {}
        # Too close to singular for directions that are kept; after a step along the safe ones, a column may restart.
        self.most, self.count, self.panels = 0, 0, []
        values, V = torch.linalg.eigh(curvature)
        sizes = vec.norm(vec.combine(AQ, V.to(AQ.device))).cpu()
        sound, indefinite = classify_directions(values, sizes, self.norm_A, noise)
        if self.precondition is not None and bool(indefinite.any()):  # for want of the largest eigenvalues, it may be
            self.norm_A = raise_norm(self.norm_A, vec.norm(self.multiply(AQ)).tolist(), vec.norm(AQ).tolist())
            self.records.matvecs += AQ.shape[1]
            sound, indefinite = classify_directions(values, sizes, self.norm_A, noise)
        if bool(indefinite.any()):
            return none, dict.fromkeys(everyone, Reason.NOT_POSITIVE_DEFINITE)
        self.null_met = True
        if not bool(sound.any()):
            return none, dict.fromkeys(everyone, Reason.SINGULAR)
        return V[:, sound] / values[sound].sqrt(), {}

    def column_scales(
        self, Q: Vectors, AQ: Vectors, curvature: Tensor, images: Tensor
    ) -> tuple[Tensor, dict[int, Reason]]:
        """Return qᵀAq^-½ of each column, 0 where it is not safely positive, and the reasons of those columns."""
        sound, indefinite = classify_directions(curvature, images, self.norm_A, 20 * self.eps)
        failed = {}
        for j in (~sound).nonzero().squeeze(1).tolist():
            finite = math.isfinite(curvature[j]) and math.isfinite(images[j])
            null = Reason.SINGULAR if finite else Reason.NON_FINITE
            failed[j] = Reason.NOT_POSITIVE_DEFINITE if bool(indefinite[j]) else null
        self.null_met = self.null_met or Reason.SINGULAR in failed.values()
        return torch.where(sound, curvature, math.inf).rsqrt(), failed

    def may_restart(self, column: int) -> bool:
        """Return whether a column's small residual was not itself the direction, and the column has restarts left.

        After a direction of nearly no curvature has made a residual larger, conjugation may leave only rounding of a
        residual that A can still reduce.
        """
        small = self.records.current[column] <= ANSWERED
        return small and column not in self.renewed and self.renewals[column] < 4  # two suffice

    def append(self, W: Vectors, AW: Vectors) -> None:
        """Keep these directions for all later steps, if there is room for all of them."""
        r = W.shape[1]
        if not r or self.count + r > self.most:
            return
        filled = self.panels[-1][0].shape[1] if self.panels else 0
        if self.panels and filled + r <= self.last_panel[0].shape[1]:
            self.panels.pop()
        else:
            filled, width = 0, min(max(64, r), self.most - self.count)
            self.last_panel = vec.empty_block(W, width), vec.empty_block(W, width)
        directions, images = self.last_panel
        vec.put(directions, filled, W)
        vec.put(images, filled, AW)
        self.panels.append((vec.part(directions, 0, filled + r), vec.part(images, 0, filled + r)))
        self.count += r

    def inspect(self, positions: Sequence[int], failed: Mapping[int, Reason]) -> None:
        """Compare with the true residual; drop columns that stop, with reasons, and replace residuals that drifted."""
        records, index = self.records, torch.tensor(positions)
        whole = len(positions) == self.x.shape[1]
        x, r = (self.x, self.r) if whole else (vec.columns(self.x, index), vec.columns(self.r, index))
        image = self.multiply(x)
        records.matvecs += len(positions)
        gaps = torch.zeros(len(positions), dtype=torch.float64, device=self.B.device)
        if self.last and self.last[0].shape[1]:  # |xᵀAw − (Ax)ᵀw| / ‖w‖ shows Aᵀ ≠ A without a further product
            W, AW = self.last
            lengths = vec.norm(W)
            gaps = ((vec.gram(x, AW) - vec.gram(image, W)).abs() / torch.where(lengths > 0, lengths, 1.0)).amax(1)
        true = vec.columns(self.B, torch.tensor([self.active[j] for j in positions]))
        true = vec.axpy(true, image, -torch.ones_like(gaps))
        energies = -(vec.inner(x, true) + vec.inner(x, image) / 2)
        facts = torch.stack([vec.norm(true), vec.norm(true - r), vec.norm(x), vec.norm(image), gaps, energies]).cpu()
        del image
        growth = torch.nan_to_num(facts[3] / facts[2], nan=0.0, posinf=0.0)
        self.norm_A = max(self.norm_A, float(growth.max()))
        replaced = []
        for i, j in enumerate(positions):
            residual, drift, size, _, gap, energy = facts[:, i].tolist()
            column = self.active[j]
            backward = residual / (self.norm_A * size + 1)
            # Above this, a failure is attributed to Aᵀ ≠ A, not to noisy products.
            skewed = gap > 0.01 * self.norm_A * size
            stopped = failed.get(j) or self.verdict(column, residual, drift, backward)
            if stopped is None and skewed and residual >= records.best[column]:
                stopped = Reason.STAGNATION
            self.keep(column, vec.part(x, i, i + 1), residual, backward, energy)
            if stopped is not None:
                if stopped is Reason.STAGNATION and self.precondition is not None:
                    self.sharpen_norm(column, vec.part(true, i, i + 1), residual)
                reason = self.classify(column, stopped)
                # The energy of every iterate is the least so far, while its residual may grow by √κ on the way.
                truncated = reason in (Reason.ITERATION_LIMIT, Reason.NOT_POSITIVE_DEFINITE)
                if truncated and energy < self.energies[column]:
                    records.keep(column, vec.part(x, i, i + 1), residual, backward)
                records.give(column, Reason.NOT_SYMMETRIC if reason in UNDECIDED and skewed else reason)
            elif drift > DRIFT * residual:
                replaced.append(i)
        if replaced:
            vec.put_columns(self.r, index[replaced], vec.columns(true, torch.tensor(replaced)))
            for W, AW in self.panels:  # these components are in no later direction
                alpha = vec.gram(W, self.r)
                vec.axpy(self.x, W, alpha)
                vec.axpy(self.r, AW, -alpha)
        remaining = [j for j, column in enumerate(self.active) if column not in records.reasons]
        if len(remaining) < len(self.active):
            index = torch.tensor(remaining, dtype=torch.long)
            self.active = [self.active[j] for j in remaining]
            self.x, self.r = vec.columns(self.x, index), vec.columns(self.r, index)
            if not self.block:
                self.last = [vec.columns(V, index) for V in self.last]

    def keep(self, column: int, x: Float[Vectors, "n 1"], residual: float, backward: float, energy: float) -> None:
        """Store the solution if it is the best, and note an improvement."""
        # The residual may first grow by √κ while the error shrinks: the backward error then shows the progress.
        best = self.records.best[column]
        if residual < 0.99 * best or backward < 0.99 * self.nearest[column]:
            self.records.gained[column] = self.records.iteration
            self.nearest[column] = min(backward, self.nearest[column])
        if residual <= best:
            self.energies[column] = energy
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
        if self.null_met and idle > 3 * CHECK_EVERY:
            return Reason.SINGULAR
        return Reason.STAGNATION if idle > self.records.patience else None

    def sharpen_norm(self, column: int, r: Float[Vectors, "n 1"], length: float) -> None:
        """Raise the estimate of ‖A‖ by one product, with a residual that rounding may have left.

        Preconditioned directions avoid the largest eigenvalues, along which products round most.
        """
        records = self.records
        if 0 < length <= ANSWERED and not records.limited(column):
            records.matvecs += 1
            self.norm_A = raise_norm(self.norm_A, vec.norm(self.multiply(r)).tolist(), [length])
            size = float(vec.norm(vec.part(records.X, column, column + 1)))
            records.backward[column] = records.best[column] / (self.norm_A * size + 1)

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


def classify_directions(
    curvature: Float[Tensor, " r"], image: Float[Tensor, " r"], norm_A: float, noise: float
) -> tuple[Bool[Tensor, " r"], Bool[Tensor, " r"]]:
    """Return which directions are sound, and which prove that A is not positive definite; curvature is qᵀAq.

    For positive semidefinite A, ‖Aq‖² ≤ ‖A‖ qᵀAq: a direction without curvature has no image. An image without
    curvature therefore disproves semidefiniteness (a nilpotent matrix), whatever the sign of the rounding error.
    Curvature below ``noise`` ‖A‖ is rounding.
    """
    finite = torch.isfinite(curvature) & torch.isfinite(image)
    floor = noise * norm_A
    sound = finite & ((curvature > floor) | ((curvature > 0.1 * image) & (curvature > 0)))
    indefinite = finite & ~sound & ((curvature < -floor) | (image.square() > 100 * noise * norm_A**2))
    return sound, indefinite
