"""Solvers of other libraries on the benchmark's problems; wrapping the matrix counts their products."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from linear_operator import LinearOperator
from torch import Tensor

from curvops.cli.bench.measure import Trail
from curvops.cli.bench.methods import Answer, BenchSolver, MaybePreconditioner, Settings
from curvops.cli.bench.problem import Counter, Problem

KEPT = 60
TOLERANCES = 12


def linear_cg(problem: Problem, P: MaybePreconditioner, settings: Settings, trail: Trail) -> Answer:
    """linear_operator's CG, run again with a tenth of its tolerance until the *true* residual is within rtol.

    Its trail has a point a run, each with the products of that run alone; what counts in the end is the last run.
    """
    solve = import_module("linear_operator.utils.linear_cg").linear_cg
    counter, setup, tolerance = problem.G.counter, problem.G.counter.count, 1.0
    most = settings.maxiter * problem.B.shape[1]
    for _ in range(TOLERANCES):
        tolerance /= 10
        counter.count = setup
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x = solve(
                problem.A._matmul,
                problem.B.contiguous(),
                tolerance=tolerance,
                eps=1e-30,  # of its own accord it stops at 1e-10 for squares, long before a tolerance of 1e-6
                max_iter=settings.maxiter,
                max_tridiag_iter=1,
                preconditioner=None if P is None else (lambda V: P @ V),
            )
        seconds = time.perf_counter() - start
        residual = problem.residual(x)
        trail.put(counter.count, seconds, residual)
        if residual <= settings.rtol or counter.count - setup >= most:
            break
    # A run passes through what one of a larger tolerance ends with, so that it cannot take less time.
    trail.seconds = list(itertools.accumulate(reversed(trail.seconds), min))[::-1]
    verdict = "reached rtol" if residual <= settings.rtol else "does not reach rtol"
    return Answer(x, f"{verdict} at tolerance {tolerance:.0e}")


def _by_columns(name: str, problem: Problem, P: MaybePreconditioner, settings: Settings, trail: Trail) -> Answer:
    """SciPy takes one right-hand side at a time; the trail shows them as if they went in step.

    Its minres and lsmr stop by criteria of their own: each column is run again with a tenth of the tolerance until the
    true residual is within rtol, and what counts is the last run.
    """
    sparse = import_module("scipy.sparse.linalg")
    B, counter = problem.B, problem.G.counter
    setup, A = counter.count, _wrapped(problem.A, B)
    options: dict[str, Any] = {} if P is None else {"M": _wrapped(P, B)}
    tracks, solutions, tightest, spent = [], [], settings.rtol, setup
    for j, b in enumerate(B.mT):
        tolerance = settings.rtol
        for _ in range(1 if name == "cg" else TOLERANCES):
            counter.count = spent
            x, kept = _column(name, sparse, A, b, options, tolerance, settings, counter)
            if problem.residual(x.unsqueeze(1), j) <= settings.rtol:
                break
            tolerance /= 10
        tightest = min(tightest, tolerance)
        spent = counter.count
        tracks.append(kept)
        solutions.append(x)
    X = torch.stack(solutions).mT
    _in_step(problem, tracks, trail, setup)
    verdict = "reached rtol" if problem.residual(X) <= settings.rtol else "does not reach rtol"
    return Answer(X, f"{verdict} at tolerance {tightest:.0e}")


def _wrapped(A: Any, B: Tensor) -> Any:
    """A matrix or preconditioner as SciPy sees it."""

    def through(multiply: Callable[[Tensor], Tensor]) -> Callable[[np.ndarray], np.ndarray]:
        def apply(v: np.ndarray) -> np.ndarray:
            block = torch.as_tensor(v.reshape(-1, 1), dtype=B.dtype, device=B.device)
            return multiply(block).cpu().numpy().reshape(-1)

        return apply

    of_matrix = isinstance(A, LinearOperator)
    forward = through(A._matmul if of_matrix else lambda V: A @ V)
    adjoint = through(A._t_matmul) if of_matrix else forward
    shape = tuple(A.shape) if of_matrix else (len(B), len(B))
    kind = torch.empty(0, dtype=B.dtype).numpy().dtype
    return import_module("scipy.sparse.linalg").LinearOperator(shape, matvec=forward, rmatvec=adjoint, dtype=kind)


Kept = list[tuple[int, float, Tensor]]


def _column(
    name: str, sparse: Any, A: Any, b: Tensor, options: dict[str, Any], tolerance: float, settings: Settings,
    counter: Counter,
) -> tuple[Tensor, Kept]:  # fmt: skip
    """One right-hand side: the solution, and (products, seconds, iterate) on the way where SciPy shows them."""
    start, before, turn = time.perf_counter(), counter.count, itertools.count(1)
    kept: Kept = []

    def keep(x: np.ndarray) -> None:
        seen = next(turn)
        if seen <= KEPT or seen % KEPT == 0:
            iterate = torch.as_tensor(x.copy(), dtype=b.dtype, device=b.device)
            kept.append((counter.count - before, time.perf_counter() - start, iterate))

    arguments = options | {"rtol": tolerance, "maxiter": settings.maxiter, "callback": keep}
    if name == "lsmr":
        arguments = {"atol": tolerance, "btol": tolerance, "conlim": 0, "maxiter": settings.maxiter}
    found, *_ = getattr(sparse, name)(A, b.cpu().numpy(), **arguments)
    x = torch.as_tensor(found, dtype=b.dtype, device=b.device)
    kept.append((counter.count - before, time.perf_counter() - start, x))
    return x, kept


def _in_step(problem: Problem, tracks: list[Kept], trail: Trail, setup: int) -> None:
    """One trail of all columns: iteration i of each, summed in cost, the worst in residual."""
    for i in range(max(map(len, tracks))):
        at = [track[min(i, len(track) - 1)] for track in tracks]
        X = torch.stack([x for _, _, x in at]).mT
        worst = problem.worst(problem.relative_residuals(X))
        trail.put(setup + sum(p for p, _, _ in at), sum(s for _, s, _ in at), worst)


PEERS: dict[str, BenchSolver] = {
    "linear_operator-cg": BenchSolver(linear_cg, "psd", module="linear_operator"),
    "scipy-cg": BenchSolver(partial(_by_columns, "cg"), "psd", module="scipy"),
    "scipy-minres": BenchSolver(partial(_by_columns, "minres"), "symmetric", module="scipy"),
    "scipy-lsmr": BenchSolver(partial(_by_columns, "lsmr"), "any", preconditioned=False, module="scipy"),
}
