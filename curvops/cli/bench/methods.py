"""What is compared: one table of methods, one of preconditioners. A new row is the whole change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from curvops.cli.bench.measure import Trail
from curvops.cli.bench.problems import Problem
from curvops.linalg import (
    Estimate,
    FactoredPreconditioner,
    Solution,
    as_preconditioner,
    block_jacobi,
    cg,
    cholesky,
    diagonal_preconditioner,
    logdet,
    nystrom,
    trace,
)
from curvops.linalg.trace import METHODS as TRACES

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
    budgets: tuple[int, ...] = (25, 50, 100, 200, 400)
    seeds: int = 5
    seed: int = 0


@dataclass(frozen=True)
class Solver:
    """Solves A X = B, leaving a trail. ``needs`` is the least that A must be: "psd", "symmetric" or "any"."""

    run: Callable[[Problem, Made, Settings, Trail], Solution]
    needs: str = "psd"
    preconditioned: bool = True


@dataclass(frozen=True)
class Estimator:
    """Estimates ``quantity`` (a name in `Problem.exact`) of A within a budget of products.

    The preconditioner may be "auto": the estimator's own choice.
    """

    run: Callable[[Problem, Made | str, int, torch.Generator], Estimate]
    quantity: str
    needs: str = "any"
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


def _trace(method: str, problem: Problem, P: Made | str, budget: int, generator: torch.Generator) -> Estimate:
    return trace(problem.A, method=method, max_matvecs=budget, generator=generator)


def _logdet(problem: Problem, P: Made | str, budget: int, generator: torch.Generator) -> Estimate:
    of_all: dict[str, Any] = {"max_matvecs": budget, "rtol": 1e-12, "generator": generator, "preconditioner": P}
    if problem.shift and problem.shift >= problem.lower:
        return logdet(problem.G, shift=problem.shift, **of_all)
    return logdet(problem.A, lower_bound=problem.lower or None, **of_all)


METHODS: dict[str, Solver | Estimator] = {
    "cg": Solver(partial(_cg, block=False)),
    "block-cg": Solver(_cg),
    "cg-refine": Solver(partial(_cg, refine=True)),
    **{f"trace-{name}": Estimator(partial(_trace, name), "trace") for name in TRACES if name != "exact"},
    "logdet": Estimator(_logdet, "logdet", needs="psd", preconditioned=True),
}


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
