"""The methods that are compared, a table of solvers, estimators and preconditioners, and one measured run of each."""

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

from curvops import linalg
from curvops.cli.problems import KINDS, Problem
from curvops.linalg import Estimate, FactoredPreconditioner, Solution
from curvops.linalg.estimators.diagonal import METHODS as DIAGONALS
from curvops.linalg.estimators.trace import METHODS as TRACES

MaybePreconditioner = FactoredPreconditioner | None
SQUARE, SYMMETRIC, PSD = KINDS


@dataclass(frozen=True)
class Settings:
    """The options shared by all runs. If ``rank`` is None, each preconditioner chooses its own."""

    size: int = 600
    columns: int = 8
    dtype: torch.dtype = torch.float64
    rtol: float = 1e-6
    maxiter: int = 2000
    rank: int | None = None
    budgets: tuple[int, ...] = (30, 100, 300)
    seeds: int = 5


@dataclass(frozen=True)
class BenchSolver:
    """A method that solves A X = B and calls back with (iteration, residuals); ``needs`` is one of `KINDS`."""

    run: Callable[[Problem, MaybePreconditioner, Settings, Callable[[int, Tensor], None]], Solution]
    needs: str = SYMMETRIC
    preconditioned: bool = True


@dataclass(frozen=True)
class BenchEstimator:
    """A method that estimates ``quantity`` (a name in `Problem.exact`) of A within a budget of products.

    The preconditioner may be "auto", the estimator's own choice.
    """

    run: Callable[[Problem, MaybePreconditioner | str, int, torch.Generator], Estimate]
    quantity: str
    needs: str = SQUARE
    preconditioned: bool = False


def _solve(
    solver: Any, problem: Problem, P: MaybePreconditioner, settings: Settings, callback: Any, **options: Any
) -> Solution:
    options |= {"rtol": settings.rtol, "maxiter": settings.maxiter, "callback": callback}
    options |= {} if P is None else {"preconditioner": P}
    return solver(problem.A, problem.B, **options)


def _estimate(function: Any, problem: Problem, P: Any, budget: int, generator: Any, **options: Any) -> Estimate:
    return function(problem.A, max_matvecs=budget, generator=generator, **options)


def _logdet(problem: Problem, P: Any, budget: int, generator: torch.Generator) -> Estimate:
    options: dict[str, Any] = {"max_matvecs": budget, "rtol": 1e-12, "generator": generator, "preconditioner": P}
    if problem.shift and problem.shift >= problem.lower:
        return linalg.logdet(problem.G, shift=problem.shift, **options)
    return linalg.logdet(problem.A, lower_bound=problem.lower or None, **options)


def _probing(function: Any, quantity: str, methods: Any) -> dict[str, BenchSolver | BenchEstimator]:
    """Return a row of the table for each stochastic method of an estimator."""
    return {
        f"{quantity}-{name}": BenchEstimator(
            partial(_estimate, function, method=name), quantity, PSD if name.startswith("xnys") else SQUARE
        )
        for name in methods
        if name != "exact"
    }


METHODS: dict[str, BenchSolver | BenchEstimator] = {
    "cg": BenchSolver(partial(_solve, linalg.cg, block=False)),
    "block-cg": BenchSolver(partial(_solve, linalg.cg)),
    "cg-refine": BenchSolver(partial(_solve, linalg.cg, refine=True)),
    "cg-refine32": BenchSolver(partial(_solve, linalg.cg, refine=torch.float32)),
    "minres": BenchSolver(partial(_solve, linalg.minres)),
    "lsmr": BenchSolver(partial(_solve, linalg.lsmr, consistent=True), SQUARE, preconditioned=False),
    **_probing(linalg.trace, "trace", TRACES),
    **_probing(linalg.diagonal, "diagonal", DIAGONALS),
    "logdet": BenchEstimator(_logdet, "logdet", PSD, preconditioned=True),
}
"""Conjugate gradients also run on indefinite matrices: the outcome is the reason that they report."""


def _nystrom(problem: Problem, settings: Settings, generator: torch.Generator) -> MaybePreconditioner:
    shift, most = problem.shift or problem.lower, len(problem.B) // 2
    options: dict[str, Any] = {"rhs": problem.B.shape[1], "max_rank": most, "generator": generator}
    return linalg.nystrom(problem.G, settings.rank, shift=shift, **options).preconditioner(problem.shift)


def _cholesky(pivoting: Any, problem: Problem, settings: Settings, generator: torch.Generator) -> MaybePreconditioner:
    rank = settings.rank or max(1, len(problem.B) // 10)
    options: dict[str, Any] = {"shift": problem.shift, "diagonal": problem.diagonal, "generator": generator}
    return linalg.cholesky(problem.G, rank, pivoting=pivoting, **options).preconditioner()


def _jacobi(problem: Problem, settings: Settings, generator: torch.Generator) -> MaybePreconditioner:
    return linalg.diagonal_preconditioner(problem.G if problem.diagonal is None else problem.diagonal, problem.shift)


def _block_jacobi(problem: Problem, settings: Settings, generator: torch.Generator) -> MaybePreconditioner:
    if problem.layers is not None:
        return linalg.as_preconditioner(problem.layers.add_diagonal(problem.shift))
    return linalg.block_jacobi(problem.G, max(1, len(problem.B) // 10), problem.shift)


PRECONDITIONERS: dict[str, Callable[[Problem, Settings, torch.Generator], MaybePreconditioner]] = {
    "none": lambda problem, settings, generator: None,
    "nystrom": _nystrom,
    "cholesky": partial(_cholesky, "greedy"),
    "rp-cholesky": partial(_cholesky, "random"),
    "jacobi": _jacobi,
    "block-jacobi": _block_jacobi,
}


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
