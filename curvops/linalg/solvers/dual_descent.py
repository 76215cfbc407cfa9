"""Stochastic dual descent: (K + noise I) α = y from a few rows of K at a time.

>>> import torch
>>> from curvops.linalg import dual_descent
>>> x = torch.linspace(0, 1, 200, dtype=torch.float64)
>>> K = torch.exp(-50 * (x[:, None] - x).square())
>>> solution = dual_descent(K, torch.sin(9 * x), noise=1.0, rtol=1e-2, generator=torch.Generator().manual_seed(0))
>>> solution.reasons[0].name
'CONVERGED'
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped

from curvops.ambient import Progress, as_step
from curvops.checks import check_options, checked_number
from curvops.linalg.core import vectors as vec
from curvops.linalg.core.algorithm import algorithm
from curvops.linalg.core.results import Reason, Solution
from curvops.linalg.core.structure import rows
from curvops.linalg.core.vectors import Matrix, Vectors
from curvops.linalg.solvers.systems import Callback, Goal, Records, check, raise_norm, solve_in_groups


@algorithm
def dual_descent(
    K: Matrix,
    B: Shaped[Vectors, "n *K"],
    *,
    noise: float | int = 0.0,
    batch_size: int = 512,
    step_size: float | None = None,
    momentum: float = 0.9,
    rtol: float | int = 1e-2,
    maxiter: int | None = None,
    x0: Vectors | None = None,
    generator: torch.Generator | None = None,
    callback: Callback | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> Solution:
    """Solve (K + noise I) α = y for every column y of B by stochastic gradient steps on the dual objective.

    Args:
        K: (n, n), symmetric positive semidefinite with cheap rows: a tensor, or an operator whose ``K[index, :]``
            evaluates only those rows (a row of an operator known by its products costs a product).
        B: (n,) or (n, K).
        noise: added to the diagonal.
        batch_size: the number of rows per step, drawn without replacement.
        step_size: β; None is 1/L, with L the smoothness of the sampled objective, estimated by 12 power iterations and
            the diagonal of one batch. If the residual grows tenfold, the step is halved and the best iterate restored.
        momentum: ρ of Nesterov's method.
        rtol: stop once the true residual, computed after each epoch, is at most rtol ‖y‖. Only a few digits can be
            reached.
        maxiter: the maximum number of epochs, 200 by default. An epoch passes over the rows and reads n of them, as a
            product does.
        x0: initial guess, with the shape of B.
        generator: the source of the batches.
        callback: called as ``callback(epoch, relative_residuals (K,))``.
        memory_budget: bytes for the working vectors; columns are solved in groups that fit, at least one at a time.
            None is the rest of the budget of the linearisation behind K.
        progress: as in `cg`.

    Returns:
        A Solution with true residuals. ``iterations`` counts epochs, and ``matvecs`` products with one vector, with
        rows counted as their share of a product. STAGNATION: steps of this size no longer lower the residual.
        ITERATION_LIMIT: more epochs would still lower it.

    Raises:
        TypeError: K, B and x0 do not share one real dtype, float32 or float64.
        ValueError: shapes or devices do not fit, or an option is out of range.

    Source: Lin, Padhy, Antorán, Tripp, Terenin, Szepesvári, Hernández-Lobato & Janz 2024, algorithm 1, with geometric
    averaging of the iterates.

    Examples:
        >>> K, b = torch.tensor([[2.0, 1.0], [1.0, 3.0]]), torch.tensor([3.0, 4.0])
        >>> solution = co.linalg.dual_descent(K, b, noise=0.1, generator=torch.Generator().manual_seed(0))
        >>> solution.reasons[0].name, bool(solution.relative_residuals[0] < 0.01)
        ('CONVERGED', True)
    """
    facts = vec.describe_square(K)
    n = facts.rows
    check(facts, B, rtol, maxiter, x0, callback)
    check_options(batch_size=batch_size, step_size=step_size)
    checked_number("momentum", momentum, "[0, 1)")
    noise = checked_number("noise", noise, "[0, inf)")
    goal = Goal(float(rtol), 200 if maxiter is None else maxiter, callback)

    def solve(B: Vectors, X0: Vectors | None, *_: object) -> Solution:
        records = Records(B, X0, facts, goal)
        return DualDescent(K, records, noise, min(batch_size, n), step_size, momentum, generator).solve()

    return solve_in_groups(solve, facts, B, x0, vectors=8)  # the working vectors of a column, temporaries included


class DualDescent:
    """The descent on K systems with right-hand sides of unit norm that share their batches; see ``records``."""

    def __init__(
        self,
        K: Matrix,
        records: Records,
        noise: float,
        batch: int,
        step_size: float | None,
        momentum: float,
        generator: torch.Generator | None,
    ) -> None:
        self.B, self.records, self.noise, self.batch = records.B, records, noise, batch
        self.step_size, self.momentum, self.generator = step_size, momentum, generator
        self.n, k = self.B.shape
        self.rows, self.plain = rows(K), vec.product(K)
        self.alpha, self.average = vec.as_block(records.X), vec.as_block(records.X)
        self.velocity = vec.zero_block(records.X, k)
        self.norm_A = 0.0

    def multiply(self, V: Vectors) -> Vectors:
        """Return (K + noise I) V."""
        return self.plain(V) + self.noise * V

    def solve(self) -> Solution:
        """Run epochs until every column has converged, the solutions no longer change, or the limit is reached."""
        records, k = self.records, self.B.shape[1]
        finite = self.inspect(self.alpha)
        if k and finite and not self.done():
            self.beta = self.step_size or self.default_step()
        # The descent ends after so many epochs, or 400 steps, unless the residual fell by a hundredth.
        halvings, patience = 0, max(20, 400 * self.batch // self.n)
        while k and finite and not self.done() and records.iteration < records.maxiter:
            as_step(k, self.epoch)
            records.iteration += 1
            records.matvecs += k
            steady = self.inspect(self.average) and self.inspect(self.alpha)
            if not steady:
                halvings += 1
                self.beta /= 2
                self.alpha, self.average = (vec.as_block(records.X) for _ in range(2))
                self.velocity = vec.zero_block(self.alpha, k)
            finite = halvings <= 20
            if records.iteration - max(records.gained) > patience:
                break
        for column in range(k):
            if not finite:
                reason = Reason.NON_FINITE
            else:
                reason = Reason.ITERATION_LIMIT if records.iteration >= records.maxiter else Reason.STAGNATION
            records.stop(column, reason)
        return records.solution()

    def done(self) -> bool:
        """Return whether every column has converged."""
        return all(residual <= self.records.rtol for residual in self.records.best)

    def epoch(self) -> None:
        """Pass once over the rows in random batches."""
        n, source = self.n, self.generator
        home = self.B.device if source is None else source.device
        order = torch.randperm(n, generator=source, device=home).to(self.B.device)
        # ᾱ ← r α + (1 − r) ᾱ with r = 100 / T, at most a tenth.
        share = min(0.1, 100 * self.batch / (n * self.records.maxiter))
        for index in order.split(self.batch):
            ahead = self.alpha + self.momentum * self.velocity
            gradient = self.rows(index) @ ahead + self.noise * vec.entries(ahead, index) - vec.entries(self.B, index)
            self.velocity *= self.momentum
            step = self.beta * (n / len(index)) * gradient
            vec.put_entries(self.velocity, index, vec.entries(self.velocity, index) - step)
            self.alpha += self.velocity
            self.average += share * (self.alpha - self.average)

    def inspect(self, alpha: Float[Vectors, "n k"]) -> bool:
        """Compute the true residuals, a product each; return False if one is not finite or ten times the best."""
        records, k = self.records, self.B.shape[1]
        image = self.multiply(alpha)
        records.matvecs += k
        norms = [vec.norm(block) for block in (self.B - image, alpha, image)]
        residuals, sizes, images = torch.stack(norms).cpu().tolist()
        self.norm_A = raise_norm(self.norm_A, images, sizes)
        for column, (residual, size) in enumerate(zip(residuals, sizes)):
            records.measure(column, residual)
            if residual <= records.best[column]:
                records.keep(column, vec.part(alpha, column, column + 1), residual, residual / (self.norm_A * size + 1))
        records.record(range(k), records.best)
        return all(residual <= 10 * best for residual, best in zip(residuals, records.best))

    def default_step(self) -> float:
        """Return 1/L, L = λ_max + (n/b) max_i (K_ii + noise): batches of b coordinates (Richtárik & Takáč 2016)."""
        n, b = self.n, self.batch
        V = vec.random_block(self.B, 1, generator=self.generator)
        size, steps = 0.0, 12
        for _ in range(steps):
            V = self.multiply(V)
            size = float(vec.norm(V)[0])
            V = V / size if size > 0 else V
        self.records.matvecs += steps + 1
        probe = torch.arange(min(n, b), device=self.B.device)
        height = float(as_step(1, self.rows, probe).diagonal().max()) + self.noise
        share = (n - b) / max(n - 1, 1)
        return 1 / (size + n / b * share * height) if size > 0 else 1.0
