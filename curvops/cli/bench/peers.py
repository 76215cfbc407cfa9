"""The same problems solved by other libraries, their products counted by wrapping the matrix."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvops.cli.bench.measure import Trail
from curvops.cli.bench.methods import Made, Settings
from curvops.cli.bench.problems import Problem

KEPT = 60
TOLERANCES = 12


class Answer(NamedTuple):
    """What a peer hands back: the solution and its own verdict."""

    x: Tensor
    verdict: str
    iterations: int | None = None


class Peer(NamedTuple):
    """A solver of another library: its module, what A must be, and how to call it."""

    module: str
    needs: str
    run: Callable[[Problem, Made, Settings, Trail], Answer]
    preconditioned: bool = True


def linear_cg(problem: Problem, P: Made, settings: Settings, trail: Trail) -> Answer:
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
    verdict = "reached rtol" if residual <= settings.rtol else "does not reach rtol"
    return Answer(x, f"{verdict} at tolerance {tolerance:.0e}")


def _scipy(name: str) -> Callable[[Problem, Made, Settings, Trail], Answer]:
    def run(problem: Problem, P: Made, settings: Settings, trail: Trail) -> Answer:
        return _by_columns(name, problem, P, settings, trail)

    return run


def _by_columns(name: str, problem: Problem, P: Made, settings: Settings, trail: Trail) -> Answer:
    """SciPy takes one right-hand side at a time; the trail shows them as if they went in step."""
    sparse = import_module("scipy.sparse.linalg")
    B, counter = problem.B, problem.G.counter
    n, setup = len(B), counter.count

    def wrap(multiply: Callable[[Tensor], Tensor]) -> Any:
        def apply(v: np.ndarray) -> np.ndarray:
            block = torch.as_tensor(v.reshape(n, -1), dtype=B.dtype, device=B.device)
            return multiply(block).cpu().numpy().reshape(v.shape)

        kind = torch.empty(0, dtype=B.dtype).numpy().dtype
        return sparse.LinearOperator((n, n), matvec=apply, rmatvec=apply, dtype=kind)

    A = wrap(problem.A._matmul)
    options: dict[str, Any] = {} if P is None else {"M": wrap(lambda V: P @ V)}
    tracks, solutions, verdicts = [], [], []
    for b in B.mT:
        start, before = time.perf_counter(), counter.count
        kept: list[tuple[int, float, np.ndarray]] = []
        seen = [0]

        def keep(x: np.ndarray, kept: Any = kept, seen: Any = seen, start: float = start, before: int = before) -> None:
            seen[0] += 1
            if seen[0] <= KEPT or seen[0] % KEPT == 0:
                kept.append((counter.count - before, time.perf_counter() - start, x.copy()))

        arguments = options | {"rtol": settings.rtol, "maxiter": settings.maxiter, "callback": keep}
        if name == "lsmr":
            arguments = {"atol": settings.rtol, "btol": settings.rtol, "conlim": 0, "maxiter": settings.maxiter}
        x, info, *_ = getattr(sparse, name)(A, b.cpu().numpy(), **arguments)
        kept.append((counter.count - before, time.perf_counter() - start, x))
        tracks.append(kept)
        solutions.append(torch.as_tensor(x, dtype=B.dtype, device=B.device))
        verdicts.append(info in (0, 1, 2) if name == "lsmr" else info == 0)
    _in_step(problem, tracks, trail, setup)
    text = "says it converged" if all(verdicts) else "says it did not converge"
    return Answer(torch.stack(solutions).mT, text)


def _in_step(problem: Problem, tracks: list[list[tuple[int, float, np.ndarray]]], trail: Trail, setup: int) -> None:
    """One trail of all columns: iteration i of each, summed in cost, the worst in residual."""
    for i in range(max(map(len, tracks))):
        at = [track[min(i, len(track) - 1)] for track in tracks]
        X = torch.stack([torch.as_tensor(x, dtype=problem.B.dtype, device=problem.B.device) for _, _, x in at]).mT
        trail.put(setup + sum(p for p, _, _ in at), sum(s for _, s, _ in at), problem.residual(X))


PEERS: dict[str, Peer] = {
    "linear_operator-cg": Peer("linear_operator", "psd", linear_cg),
    "scipy-cg": Peer("scipy", "psd", _scipy("cg")),
    "scipy-minres": Peer("scipy", "symmetric", _scipy("minres")),
    "scipy-lsmr": Peer("scipy", "any", _scipy("lsmr"), preconditioned=False),
}


def installed(module: str) -> bool:
    """Whether a peer's library can be imported."""
    return find_spec(module) is not None
