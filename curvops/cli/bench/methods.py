"""The methods that are compared: a table of solvers and estimators, and one of preconditioners; add rows to extend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvops import linalg
from curvops.cli.bench.measure import Trail
from curvops.cli.bench.problem import EIGENVALUES, BenchError, NotApplicableError, Problem
from curvops.cli.bench.problems import import_module_here
from curvops.linalg import Estimate, FactoredPreconditioner, Solution
from curvops.linalg.estimators.diagonal import METHODS as DIAGONALS
from curvops.linalg.estimators.trace import METHODS as TRACES
from curvops.linalg.solvers.dual_descent import EPOCHS

MaybePreconditioner = FactoredPreconditioner | None
ADAPTERS = ("benchmarks.peer_solvers", "benchmarks.peer_estimators")
"""Modules of a clone, not of the installed package; each has a table PEERS."""


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
    seed: int = 0


class Answer(NamedTuple):
    """The result of another library's solver: the solution and the solver's own verdict."""

    x: Tensor
    verdict: str
    iterations: int | None = None


@dataclass(frozen=True)
class BenchSolver:
    """A method that solves A X = B and leaves a trail.

    ``needs`` is the weakest kind of A on which it is tried, a key of `STRENGTH`. ``module`` is the library it comes
    from, None for curvops.
    """

    run: Callable[[Problem, MaybePreconditioner, Settings, Trail], Solution | Answer]
    needs: str = "symmetric"
    preconditioned: bool = True
    module: str | None = None


@dataclass(frozen=True)
class BenchEstimator:
    """A method that estimates ``quantity`` (a name in `Problem.exact`) of A within a budget of products.

    The preconditioner may be "auto", the estimator's own choice. ``module`` is the library it comes from, None for
    curvops.
    """

    run: Callable[[Problem, MaybePreconditioner | str, int, torch.Generator], Estimate]
    quantity: str
    needs: str = "square"
    preconditioned: bool = False
    module: str | None = None


def _solve(
    solver: Any, problem: Problem, P: MaybePreconditioner, settings: Settings, trail: Trail, **options: Any
) -> Solution:
    options |= {"rtol": settings.rtol, "maxiter": settings.maxiter, "callback": trail}
    options |= {} if P is None else {"preconditioner": P}
    return solver(problem.A, problem.B, **options)


def _lsmr(problem: Problem, P: MaybePreconditioner, settings: Settings, trail: Trail) -> Solution:
    return _solve(linalg.lsmr, problem, P, settings, trail, consistent=problem.square)


def _dual_descent(problem: Problem, P: MaybePreconditioner, settings: Settings, trail: Trail) -> Solution:
    """Solve by dual descent, which reads rows and counts them itself; the count is spread evenly over the epochs."""
    if problem.tensor is None:
        raise NotApplicableError("it reads rows, which are free only for a tensor")
    counter, before = trail.counter, trail.counter.count
    generator, epochs = torch.Generator(problem.B.device).manual_seed(settings.seed), min(settings.maxiter, EPOCHS)
    options: dict[str, Any] = {"rtol": settings.rtol, "maxiter": epochs, "generator": generator, "callback": trail}
    solution = linalg.dual_descent(problem.tensor, problem.B, noise=problem.shift, **options)
    counter.count = before + solution.matvecs
    share = solution.matvecs / max(len(trail.products) - 1, 1)
    trail.products = [before + round(i * share) for i in range(len(trail.products))]
    return solution


def _estimate(function: Any, problem: Problem, P: Any, budget: int, generator: Any, **options: Any) -> Estimate:
    return function(problem.A, max_matvecs=budget, generator=generator, **options)


def _effective(problem: Problem, P: Any, budget: int, generator: torch.Generator) -> Estimate:
    return linalg.effective_dimension(problem.G, problem.shift, rtol=1e-12, max_matvecs=budget, generator=generator)


def _eigsh(problem: Problem, P: Any, budget: int, generator: torch.Generator) -> Estimate:
    """Estimate the largest eigenvalues; the error bounds are the residuals plus rounding."""
    k, eps = min(EIGENVALUES, len(problem.B)), torch.finfo(problem.B.dtype).eps
    pairs = linalg.eigsh(problem.A, k, "LA", rtol=1e-12, max_matvecs=budget, generator=generator)
    bound = pairs.residuals + 10 * eps * pairs.values.abs().max()
    return Estimate.exact(pairs.values, pairs.matvecs, bound)


def _logdet(problem: Problem, P: Any, budget: int, generator: torch.Generator) -> Estimate:
    options: dict[str, Any] = {"max_matvecs": budget, "rtol": 1e-12, "generator": generator, "preconditioner": P}
    if problem.shift and problem.shift >= problem.lower:
        return linalg.logdet(problem.G, shift=problem.shift, **options)
    if not problem.lower and budget < len(problem.B):
        raise NotApplicableError(
            "it needs a positive lower bound of the spectrum, which operator.add_diagonal(shift) gives"
        )
    return linalg.logdet(problem.A, lower_bound=problem.lower or None, **options)


def _probing(function: Any, quantity: str, methods: Any) -> dict[str, BenchSolver | BenchEstimator]:
    """Return a row of the table for each stochastic method of an estimator."""
    return {
        f"{quantity}-{name}": BenchEstimator(
            partial(_estimate, function, method=name), quantity, "psd" if name.startswith("xnys") else "square"
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
    "lsmr": BenchSolver(_lsmr, needs="any", preconditioned=False),
    "dual-descent": BenchSolver(_dual_descent, needs="psd", preconditioned=False),
    **_probing(linalg.trace, "trace", TRACES),
    **_probing(linalg.diagonal, "diagonal", DIAGONALS),
    "frobenius": BenchEstimator(partial(_estimate, linalg.frobenius_norm), "Frobenius norm", needs="any"),
    "logdet": BenchEstimator(_logdet, "logdet", needs="psd", preconditioned=True),
    "effective-dimension": BenchEstimator(_effective, "effective dimension", needs="damped"),
    "eigsh": BenchEstimator(_eigsh, "largest eigenvalues", needs="symmetric"),
}
"""Conjugate gradients also run on indefinite matrices: the outcome is the reason that they report."""


def load_peers() -> dict[str, BenchSolver | BenchEstimator]:
    """Load the methods of other libraries by name, whether or not those libraries are installed.

    Raises:
        BenchError: The adapters are missing, as outside a clone.
    """
    peers: dict[str, BenchSolver | BenchEstimator] = {}
    for name in ADAPTERS:
        try:
            peers |= import_module_here(name).PEERS
        except (ImportError, AttributeError) as error:
            raise BenchError(
                f"--peers needs the adapters {' and '.join(ADAPTERS)} to other libraries, which are not installed "
                f"with curvops: run it in the root of a clone of the project ({type(error).__name__}: {error})."
            ) from error
    return peers


def _nystrom(problem: Problem, settings: Settings, generator: torch.Generator) -> MaybePreconditioner:
    shift, most = problem.shift or problem.lower, len(problem.B) // 2
    options: dict[str, Any] = {"rhs": problem.B.shape[1], "max_rank": most, "generator": generator}
    return linalg.nystrom(problem.G, settings.rank, shift=shift, **options).preconditioner(problem.shift)


def _cholesky(pivoting: Any, problem: Problem, settings: Settings, generator: torch.Generator) -> MaybePreconditioner:
    rank = max(1, len(problem.B) // 10) if settings.rank is None else settings.rank
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
