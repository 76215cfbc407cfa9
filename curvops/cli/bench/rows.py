"""The rows of tables, CSV and figures: one measured solve, and one estimator at one budget."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from curvops.cli.bench.measure import Trail, measure
from curvops.cli.bench.methods import PRECONDITIONERS, BenchEstimator, BenchSolver, Settings
from curvops.cli.bench.problem import Problem
from curvops.linalg import Estimate, Solution


@dataclass(frozen=True, eq=False)
class SolveRow:
    """The record of one solve; products and seconds are totals, with the preconditioner's also listed separately."""

    problem: str
    m: int
    n: int
    columns: int
    method: str
    preconditioner: str
    iterations: int | None
    products: int
    setup_products: int
    seconds: float
    setup_seconds: float
    true_residual: float
    memory_bytes: int | None
    outcome: str
    trail: Trail = field(repr=False)


@dataclass(frozen=True, eq=False)
class EstimateRow:
    """The record of one estimator at one budget, over several seeds; errors are relative, NaN without a true value.

    ``inside`` is the share of runs and entries (``entries``, 1 for a number) whose interval contains the true value.
    """

    problem: str
    n: int
    quantity: str
    method: str
    preconditioner: str
    budget: int
    products: float
    seconds: float
    error: float
    claimed: float
    inside: float | None
    entries: int
    runs: int
    memory_bytes: int | None
    errors: list[float] = field(repr=False)


def solve(problem: Problem, name: str, solver: BenchSolver, preconditioner: str, settings: Settings) -> SolveRow:
    """Warm up with two iterations, build the preconditioner, solve, and compute the true residual."""
    counter, device = problem.G.counter, problem.B.device
    solver.run(problem, None, replace(settings, maxiter=2, rtol=0.5), Trail(counter))
    counter.count = 0
    generator = torch.Generator().manual_seed(settings.seed)
    setup = measure(lambda: PRECONDITIONERS[preconditioner](problem, settings, generator), device)
    setup_products = counter.count
    trail = Trail(counter, problem.worst)

    def call() -> Any:
        trail.start()
        return solver.run(problem, setup.value, settings, trail)

    run = measure(call, device)
    products, answer = counter.count, run.value
    if isinstance(answer, Solution):
        outcome = ", ".join(sorted({reason.name.lower().replace("_", " ") for reason in answer.reasons}))
        if answer.exact_matvecs:
            outcome += f"; {answer.exact_matvecs} products in float64"
    else:
        outcome = answer.verdict
    last = problem.worst(problem.relative_residuals(answer.x))
    # The last point is the end of the run, with the true residual.
    seconds = trail.seconds[-1] if solver.module is not None and trail.seconds else run.seconds
    trail.put(products, seconds, last)
    trail.seconds = [setup.seconds + s for s in trail.seconds]
    peaks = [peak for peak in (setup.peak_bytes, run.peak_bytes) if peak is not None]
    m, n = problem.G.shape
    return SolveRow(
        problem.name, m, n, problem.B.shape[1], name, preconditioner, answer.iterations, products, setup_products,
        setup.seconds + seconds, setup.seconds, problem.residual(answer.x), max(peaks, default=None), outcome, trail,
    )  # fmt: skip


def estimate(
    problem: Problem,
    name: str,
    estimator: BenchEstimator,
    preconditioner: str,
    budget: int,
    settings: Settings,
    advance: Callable[[], Any],
) -> EstimateRow:
    """Run an estimator with each seed; the error and the stated half-width are relative to the true value."""
    truth, device = problem.exact.get(estimator.quantity), problem.B.device
    errors, claims, seconds, products, peaks, inside = [], [], [], [], [], 0.0
    for turn in range(settings.seeds):
        generator = torch.Generator().manual_seed(settings.seed + turn)
        problem.G.counter.count = 0
        run = measure(partial(_run, problem, estimator, preconditioner, budget, settings, generator), device)
        e: Estimate = run.value
        low, high = e.interval()
        size = float((e.value if truth is None else truth).norm())
        claims.append(float(((high - low) / 2).norm()) / size)
        errors.append(math.nan if truth is None else float((e.value - truth).norm()) / size)
        if truth is not None:
            inside += float(((low <= truth) & (truth <= high)).double().mean()) / settings.seeds
        seconds.append(run.seconds)
        products.append(problem.G.counter.count)
        peaks += [] if run.peak_bytes is None else [run.peak_bytes]
        advance()
    known = truth is not None and not any(math.isnan(claim) for claim in claims)
    return EstimateRow(
        problem.name, problem.G.shape[1], estimator.quantity, name, preconditioner, budget,
        sum(products) / len(products), statistics.median(seconds), statistics.mean(errors), statistics.mean(claims),
        inside if known else None, e.value.numel(), settings.seeds, max(peaks, default=None), errors,
    )  # fmt: skip


def _run(
    problem: Problem,
    estimator: BenchEstimator,
    preconditioner: str,
    budget: int,
    settings: Settings,
    generator: torch.Generator,
) -> Estimate:
    """Run an estimator with a preconditioner paid from the same budget; the estimator chooses the Nyström rank."""
    if not estimator.preconditioned or preconditioner == "none":
        return estimator.run(problem, None, budget, generator)
    if preconditioner == "nystrom" and settings.rank is None:
        return estimator.run(problem, "auto", budget, generator)
    limited = replace(settings, rank=min(settings.rank or len(problem.B), max(1, budget // 4)))
    P = PRECONDITIONERS[preconditioner](problem, limited, generator)
    left = budget - problem.G.counter.count
    if left < budget // 4:
        raise BudgetSpentError(str(problem.G.counter.count))
    return estimator.run(problem, P, left, generator)


class BudgetSpentError(ValueError):
    """Raised if a preconditioner leaves too little of the budget for the estimate."""
