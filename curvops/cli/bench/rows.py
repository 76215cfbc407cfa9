"""One measured solve, and one estimator at one budget: what the tables, CSV and figures are made of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from curvops.cli.bench.measure import Measured, Trail, measured
from curvops.cli.bench.methods import PRECONDITIONERS, Made, OwnEstimator, OwnSolver, Settings
from curvops.cli.bench.peers import Peer, PeerEstimator
from curvops.cli.bench.problem import Problem
from curvops.linalg import Estimate, Solution


@dataclass(frozen=True, eq=False)
class SolveRow:
    """One solve. Products and seconds are all there were, the preconditioner's included and also apart."""

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
    """One estimator at one budget, over several seeds. Errors are relative; NaN where the truth is not known.

    ``inside`` is the share of the entries (``entries``, 1 of a number) and runs whose interval holds the truth.
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


def make(problem: Problem, name: str, settings: Settings) -> tuple[Made, Measured, int]:
    """A preconditioner, how it was measured, and its products."""
    generator = torch.Generator().manual_seed(settings.seed)
    before = problem.G.counter.count
    found = measured(lambda: PRECONDITIONERS[name](problem, settings, generator), problem.B.device)
    return found.value, found, problem.G.counter.count - before


def solve(problem: Problem, name: str, solver: OwnSolver | Peer, preconditioner: str, settings: Settings) -> SolveRow:
    """Warm up with two iterations, make the preconditioner, solve, and look at the true residual."""
    counter = problem.G.counter
    warm = Settings(**{**vars(settings), "maxiter": 2, "rtol": 0.5})
    solver.run(problem, None, warm, Trail(counter))
    counter.count = 0
    P, setup, spent = make(problem, preconditioner, settings)
    trail = Trail(counter, problem.worst)

    def call() -> Any:
        trail.start()
        return solver.run(problem, P, settings, trail)

    found = measured(call, problem.B.device)
    products, answer = counter.count, found.value
    if isinstance(answer, Solution):
        outcome = ", ".join(sorted({reason.name.lower().replace("_", " ") for reason in answer.reasons}))
        if answer.exact_matvecs:
            outcome += f"; {answer.exact_matvecs} products in float64"
    else:
        outcome = answer.verdict
    last = problem.worst(problem.relative_residuals(answer.x))
    # The last point is the end of the run with the residual that is true.
    seconds = trail.seconds[-1] if isinstance(solver, Peer) and trail.seconds else found.seconds
    trail.put(products, seconds, last)
    trail.seconds = [setup.seconds + s for s in trail.seconds]
    peaks = [peak for peak in (setup.peak_bytes, found.peak_bytes) if peak is not None]
    m, n = problem.G.shape
    return SolveRow(
        problem.name, m, n, problem.B.shape[1], name, preconditioner, answer.iterations, products, spent,
        setup.seconds + seconds, setup.seconds, problem.residual(answer.x), max(peaks) if peaks else None, outcome,
        trail,
    )  # fmt: skip


def estimate(
    problem: Problem,
    name: str,
    estimator: OwnEstimator | PeerEstimator,
    preconditioner: str,
    budget: int,
    settings: Settings,
    advance: Callable[[], Any],
) -> EstimateRow:
    """Run it with each seed; the error and the claim are relative to the true value."""
    truth = problem.exact.get(estimator.quantity)
    errors, claims, seconds, products, peaks, inside = [], [], [], [], [], 0.0
    for turn in range(settings.seeds):
        generator = torch.Generator().manual_seed(settings.seed + turn)
        problem.G.counter.count = 0
        found = measured(
            partial(_one, problem, estimator, preconditioner, budget, settings, generator), problem.B.device
        )
        e: Estimate = found.value
        low, high = e.interval()
        size = float((e.value if truth is None else truth).norm())
        claims.append(float(((high - low) / 2).norm()) / size)
        errors.append(math.nan if truth is None else float((e.value - truth).norm()) / size)
        if truth is not None:
            inside += float(((low <= truth) & (truth <= high)).double().mean()) / settings.seeds
        seconds.append(found.seconds)
        products.append(problem.G.counter.count)
        peaks.append(found.peak_bytes)
        advance()
    known = truth is not None and not any(math.isnan(claim) for claim in claims)
    memory = [peak for peak in peaks if peak is not None]
    return EstimateRow(
        problem.name, problem.G.shape[1], estimator.quantity, name, preconditioner, budget,
        sum(products) / len(products), statistics.median(seconds), statistics.mean(errors), statistics.mean(claims),
        inside if known else None, e.value.numel(), settings.seeds, max(memory) if memory else None, errors,
    )  # fmt: skip


def _one(
    problem: Problem,
    estimator: OwnEstimator | PeerEstimator,
    preconditioner: str,
    budget: int,
    settings: Settings,
    generator: torch.Generator,
) -> Estimate:
    """One run, the preconditioner paid from the same budget; Nyström's rank is left to the estimator."""
    if isinstance(estimator, PeerEstimator):
        return estimator.run(problem, budget, generator)
    if not estimator.preconditioned or preconditioner == "none":
        return estimator.run(problem, None, budget, generator)
    if preconditioner == "nystrom" and settings.rank is None:
        return estimator.run(problem, "auto", budget, generator)
    within = Settings(**{**vars(settings), "rank": min(settings.rank or len(problem.B), max(1, budget // 4))})
    P = PRECONDITIONERS[preconditioner](problem, within, generator)
    left = budget - problem.G.counter.count
    if left < budget // 4:
        raise TooDear(str(problem.G.counter.count))
    return estimator.run(problem, P, left, generator)


class TooDear(ValueError):
    """A preconditioner leaves too little of the budget for the estimate."""
