"""What is compared: one table of methods, one of preconditioners. A new row is the whole change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from curvops.cli.bench.measure import Trail
from curvops.cli.bench.problem import EIGENVALUES, Problem, Unfit
from curvops.linalg import (
    Estimate,
    FactoredPreconditioner,
    Solution,
    as_preconditioner,
    block_jacobi,
    cg,
    cholesky,
    diagonal,
    diagonal_preconditioner,
    dual_descent,
    effective_dimension,
    eigsh,
    frobenius_norm,
    logdet,
    lsmr,
    minres,
    nystrom,
    trace,
)
from curvops.linalg.estimators.diagonal import METHODS as DIAGONALS
from curvops.linalg.estimators.trace import METHODS as TRACES
from curvops.linalg.solvers.dual_descent import EPOCHS

Made = FactoredPreconditioner | None


@dataclass(frozen=True)
class Settings:
    """What every run shares. ``rank`` None lets each preconditioner choose."""

    size: int = 600
    columns: int = 8
    dtype: torch.dtype = torch.float64
    rtol: float = 1e-6
    maxiter: int = 2000
    rank: int | None = None
    budgets: tuple[int, ...] = (30, 100, 300)
    seeds: int = 5
    seed: int = 0


@dataclass(frozen=True)
class OwnSolver:
    """Solves A X = B, leaving a trail. ``needs`` is the least that A must be for it to be tried, of `STRENGTH`."""

    run: Callable[[Problem, Made, Settings, Trail], Solution]
    needs: str = "symmetric"
    preconditioned: bool = True


@dataclass(frozen=True)
class OwnEstimator:
    """Estimates ``quantity`` (a name in `Problem.exact`) of A within a budget of products.

    The preconditioner may be "auto": the estimator's own choice.
    """

    run: Callable[[Problem, Made | str, int, torch.Generator], Estimate]
    quantity: str
    needs: str = "square"
    preconditioned: bool = False


def _cg(problem: Problem, P: Made, settings: Settings, trail: Trail, **options: Any) -> Solution:
    return cg(
        problem.A,
        problem.B,
        preconditioner=P,
        rtol=settings.rtol,
        maxiter=settings.maxiter,
        callback=trail,
        **options,
    )


def _minres(problem: Problem, P: Made, settings: Settings, trail: Trail) -> Solution:
    return minres(problem.A, problem.B, preconditioner=P, rtol=settings.rtol, maxiter=settings.maxiter, callback=trail)


def _lsmr(problem: Problem, P: Made, settings: Settings, trail: Trail) -> Solution:
    return lsmr(
        problem.A,
        problem.B,
        consistent=problem.square,
        rtol=settings.rtol,
        maxiter=settings.maxiter,
        callback=trail,
    )


def _dual_descent(problem: Problem, P: Made, settings: Settings, trail: Trail) -> Solution:
    """It reads rows, so nothing counts them but itself: they are spread evenly over the epochs."""
    if problem.tensor is None:
        raise Unfit("it reads rows, which only a tensor has for nothing")
    counter, before = trail.counter, trail.counter.count
    solution = dual_descent(
        problem.tensor,
        problem.B,
        noise=problem.shift,
        rtol=settings.rtol,
        maxiter=min(settings.maxiter, EPOCHS),
        generator=torch.Generator(problem.B.device).manual_seed(settings.seed),
        callback=trail,
    )
    counter.count = before + solution.matvecs
    share = solution.matvecs / max(len(trail.products) - 1, 1)
    trail.products = [before + round(i * share) for i in range(len(trail.products))]
    return solution


def _by(function: Any, method: str, problem: Problem, P: Any, budget: int, generator: torch.Generator) -> Estimate:
    return function(problem.A, method=method, max_matvecs=budget, generator=generator)


def _frobenius(problem: Problem, P: Made | str, budget: int, generator: torch.Generator) -> Estimate:
    return frobenius_norm(problem.A, max_matvecs=budget, generator=generator)


def _effective(problem: Problem, P: Made | str, budget: int, generator: torch.Generator) -> Estimate:
    return effective_dimension(problem.G, problem.shift, rtol=1e-12, max_matvecs=budget, generator=generator)


def _eigsh(problem: Problem, P: Made | str, budget: int, generator: torch.Generator) -> Estimate:
    """What it claims are the residuals, within which there is an eigenvalue, and rounding."""
    k, eps = min(EIGENVALUES, len(problem.B)), torch.finfo(problem.B.dtype).eps
    pairs = eigsh(problem.A, k, rtol=1e-12, max_matvecs=budget, generator=generator)
    bound = pairs.residuals + 10 * eps * pairs.values.abs().max()
    return Estimate.exact(pairs.values, pairs.matvecs, bound)


def _logdet(problem: Problem, P: Made | str, budget: int, generator: torch.Generator) -> Estimate:
    of_all: dict[str, Any] = {"max_matvecs": budget, "rtol": 1e-12, "generator": generator, "preconditioner": P}
    if problem.shift and problem.shift >= problem.lower:
        return logdet(problem.G, shift=problem.shift, **of_all)
    if not problem.lower and budget < len(problem.B):
        raise Unfit("it needs a positive lower bound of the spectrum, which operator.add_diagonal(shift) gives")
    return logdet(problem.A, lower_bound=problem.lower or None, **of_all)


def _least(method: str) -> str:
    return "psd" if method.startswith("xnys") else "square"


METHODS: dict[str, OwnSolver | OwnEstimator] = {
    "cg": OwnSolver(partial(_cg, block=False)),
    "block-cg": OwnSolver(_cg),
    "cg-refine": OwnSolver(partial(_cg, refine=True)),
    "cg-refine32": OwnSolver(partial(_cg, refine=torch.float32)),
    "minres": OwnSolver(_minres),
    "lsmr": OwnSolver(_lsmr, needs="any", preconditioned=False),
    "dual-descent": OwnSolver(_dual_descent, needs="psd", preconditioned=False),
    **{f"trace-{m}": OwnEstimator(partial(_by, trace, m), "trace", _least(m)) for m in TRACES if m != "exact"},
    **{
        f"diagonal-{m}": OwnEstimator(partial(_by, diagonal, m), "diagonal", _least(m))
        for m in DIAGONALS
        if m != "exact"
    },
    "frobenius": OwnEstimator(_frobenius, "Frobenius norm", needs="any"),
    "logdet": OwnEstimator(_logdet, "logdet", needs="psd", preconditioned=True),
    "effective-dimension": OwnEstimator(_effective, "effective dimension", needs="damped"),
    "eigsh": OwnEstimator(_eigsh, "largest eigenvalues", needs="symmetric"),
}
"""Conjugate gradients are tried on indefinite matrices too: the outcome is the reason they give."""


def _rank(problem: Problem, settings: Settings) -> int:
    return max(1, len(problem.B) // 10) if settings.rank is None else settings.rank


def _nystrom(problem: Problem, settings: Settings, generator: torch.Generator) -> Made:
    sketch = nystrom(
        problem.G,
        settings.rank,
        shift=problem.shift or problem.lower,
        rhs=problem.B.shape[1],
        max_rank=len(problem.B) // 2,
        generator=generator,
    )
    return sketch.preconditioner(problem.shift)


def _cholesky(pivoting: Any, problem: Problem, settings: Settings, generator: torch.Generator) -> Made:
    found = cholesky(
        problem.G,
        _rank(problem, settings),
        pivoting=pivoting,
        shift=problem.shift,
        diagonal=problem.diagonal,
        generator=generator,
    )
    return found.preconditioner()


def _jacobi(problem: Problem, settings: Settings, generator: torch.Generator) -> Made:
    return diagonal_preconditioner(problem.G if problem.diagonal is None else problem.diagonal, problem.shift)


def _block_jacobi(problem: Problem, settings: Settings, generator: torch.Generator) -> Made:
    if problem.layers is not None:
        return as_preconditioner(problem.layers.add_diagonal(problem.shift))
    return block_jacobi(problem.G, max(1, len(problem.B) // 10), problem.shift)


PRECONDITIONERS: dict[str, Callable[[Problem, Settings, torch.Generator], Made]] = {
    "none": lambda problem, settings, generator: None,
    "nystrom": _nystrom,
    "cholesky": partial(_cholesky, "greedy"),
    "rp-cholesky": partial(_cholesky, "random"),
    "jacobi": _jacobi,
    "block-jacobi": _block_jacobi,
}
