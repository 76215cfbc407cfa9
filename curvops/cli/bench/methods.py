"""The methods that are compared: tables of solvers, estimators and preconditioners; a new method is one more row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvops import linalg
from curvops.cli.bench.problems import KINDS, Problem
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
