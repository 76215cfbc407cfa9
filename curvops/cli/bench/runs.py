"""One measured solve, and one estimator at one budget: products, seconds, true and claimed errors."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvops.cli.bench.methods import PRECONDITIONERS, BenchEstimator, BenchSolver, Settings
from curvops.cli.bench.problems import Problem
from curvops.linalg import Estimate


@dataclass(frozen=True)
class SolveRow:
    """The record of one solve; products and seconds are totals, with the preconditioner's also listed separately.

    ``trail`` has the products, the seconds and the worst relative residual after each iteration; the last is the true
    residual.
    """

    problem: str
    method: str
    preconditioner: str
    iterations: int | None
    products: int
    setup_products: int
    seconds: float
    true_residual: float
    outcome: str
    trail: list[tuple[int, float, float]]


@dataclass(frozen=True)
class EstimateRow:
    """The record of one estimator at one budget, over several seeds; errors are relative, NaN without a true value.

    ``inside`` is the share of runs and entries (``entries``, 1 for a number) whose interval contains the true value.
    """

    problem: str
    quantity: str
    method: str
    preconditioner: str
    budget: int
    products: float
    seconds: float
    error: float
    claimed: float
    inside: float
    entries: int
    runs: int
    errors: list[float]


def clock(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Return the value of a call and its seconds, with the accelerator's queue empty before and after."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    start = now()
    value = call()
    return value, now() - start


def solve(problem: Problem, name: str, solver: BenchSolver, preconditioner: str, settings: Settings) -> SolveRow:
    """Warm up with two iterations, build the preconditioner, solve, and compute the true residual."""
    counter, device = problem.G.counter, problem.B.device
    solver.run(problem, None, replace(settings, maxiter=2, rtol=0.5), lambda *_: None)
    counter.count = 0
    generator = torch.Generator().manual_seed(0)
    P, setup_seconds = clock(lambda: PRECONDITIONERS[preconditioner](problem, settings, generator), device)
    setup_products, start = counter.count, time.perf_counter() - setup_seconds
    trail: list[tuple[int, float, float]] = []

    def callback(iteration: int, residuals: Tensor) -> None:
        worst = float(residuals.nan_to_num(torch.inf).max())
        trail.append((counter.count, time.perf_counter() - start, worst))

    solution, seconds = clock(lambda: solver.run(problem, P, settings, callback), device)
    products, residual = counter.count, problem.residual(solution.x)
    outcome = ", ".join(sorted({reason.name.lower().replace("_", " ") for reason in solution.reasons}))
    if solution.exact_matvecs:
        outcome += f"; {solution.exact_matvecs} products in float64"
    seconds += setup_seconds
    trail.append((products, seconds, residual))
    return SolveRow(
        problem.name, name, preconditioner, solution.iterations, products, setup_products, seconds,
        residual, outcome, trail,
    )  # fmt: skip


def estimate(
    problem: Problem, name: str, estimator: BenchEstimator, preconditioner: str, budget: int, settings: Settings
) -> EstimateRow:
    """Run an estimator with each seed; the error and the stated half-width are relative to the true value."""
    truth, counter = problem.exact.get(estimator.quantity), problem.G.counter
    errors, claims, seconds, products, inside = [], [], [], [], []
    for seed in range(settings.seeds):
        generator = torch.Generator().manual_seed(seed)
        counter.count = 0

        run = partial(_estimated, problem, estimator, preconditioner, budget, settings, generator)
        estimated, spent = clock(run, problem.B.device)
        low, high = estimated.interval()
        value = estimated.value if truth is None else truth
        claims.append(float(((high - low) / 2).norm() / value.norm()))
        errors.append(math.nan if truth is None else float((estimated.value - truth).norm() / truth.norm()))
        inside.append(math.nan if truth is None else float(((low <= truth) & (truth <= high)).double().mean()))
        seconds.append(spent)
        products.append(counter.count)
    mean = statistics.mean
    return EstimateRow(
        problem.name, estimator.quantity, name, preconditioner, budget, mean(products), statistics.median(seconds),
        mean(errors), mean(claims), mean(inside), value.numel(), settings.seeds, errors,
    )  # fmt: skip


def _estimated(
    problem: Problem,
    estimator: BenchEstimator,
    preconditioner: str,
    budget: int,
    settings: Settings,
    generator: torch.Generator,
) -> Estimate:
    """Run an estimator with a preconditioner paid from the same budget; the estimator chooses the Nyström rank."""
    if preconditioner == "none":
        return estimator.run(problem, None, budget, generator)
    if preconditioner == "nystrom" and settings.rank is None:
        return estimator.run(problem, "auto", budget, generator)
    limited = replace(settings, rank=min(settings.rank or len(problem.B), max(1, budget // 4)))
    P = PRECONDITIONERS[preconditioner](problem, limited, generator)
    return estimator.run(problem, P, budget - problem.G.counter.count, generator)
