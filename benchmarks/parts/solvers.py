"""Solving with a digits network's GGN, in products, compared with linear_operator's CG; Python's time per step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from linear_operator.utils import linear_cg
from torch import Tensor

import curvops as co
from benchmarks.digits import all_digits
from benchmarks.layers import fit, perceptron
from benchmarks.machine import peer_version
from benchmarks.networks import SEED
from benchmarks.parts.figures import Figures
from benchmarks.timing import Comparison, Spread, seconds
from curvops.linalg import Damped, Diagonal, Solution, cg, nystrom, solve

COLUMNS = 8
RTOL = 1e-6
MOST_PRODUCTS = {1.0: 250, 0.01: 550}
AT_LEAST = 5.0
ONE = "product with one vector"
SIZE, STEPS = 1_000_000, 100
MOST_MILLISECONDS = 1.0


def measure(figures: Figures) -> None:
    """Products at two prior precisions, of a first solve and of a further one; other ways; the time of a CG step."""
    lin = digits()
    for prior, most in MOST_PRODUCTS.items():
        _solve(figures, lin, prior, most)
    _steps(figures)


def digits() -> co.operators.Linearization:
    """A trained network 64-100-100-10 with tanh on 1400 handwritten digits, float64, D = 17,610."""
    data = all_digits().to(torch.float64).first(1400)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = perceptron(64, 100, 100, 10).double()
    fit(model, data, prior_precision=1.0, steps=1500, rate=1e-2, cosine=True)
    return co.linearize(model, (data.x, data.y), "classification")


@dataclass(frozen=True, eq=False)
class Solved:
    """A solution and the products that it cost in all."""

    x: Tensor
    products: int


def _ours(P: Damped, B: Tensor) -> Solved:
    """Solve as `P.solve` does, by the route that it takes, to the tolerance of the others."""
    spent = [0]
    x = solve(P, B, rtol=RTOL, progress=lambda description, products, total: spent.append(products))
    return Solved(x, spent[-1])


def _sketched(P: Damped, B: Tensor) -> Solved:
    """Solve with a Nyström sketch of the rank that pays, as for draws of a posterior."""
    sketch = nystrom(P.base, shift=float(P.shift), rhs=COLUMNS, generator=torch.Generator().manual_seed(SEED))
    solution = cg(P, B, preconditioner=sketch.preconditioner(), rtol=RTOL)
    return Solved(solution.x, solution.matvecs + sketch.matvecs)


def _solve(figures: Figures, lin: co.operators.Linearization, prior: float, most: int) -> None:
    drawn = torch.Generator().manual_seed(SEED)
    B, other = (torch.randn(COLUMNS, lin.num_parameters, generator=drawn, dtype=torch.float64).mT for _ in range(2))
    P = co.GGN(lin).add_diagonal(prior)
    _ = P @ B  # from the second product on, the linearisation is kept
    _ = P @ B
    kept: dict[str, Solved] = {}

    def timed(what: str, solved: Callable[[], Solved]) -> float:
        return seconds(lambda: kept.setdefault(what, solved()))

    fresh = [co.GGN(lin).add_diagonal(prior) for _ in range(2)]
    ours = Spread.of([timed("first", partial(_ours, each, B)) for each in fresh])
    further = Spread.of([timed("further", partial(_ours, each, other)) for each in fresh])
    sketched = Spread.of([timed("sketched", partial(_sketched, P, B))])
    unit = Spread.of([seconds(lambda: P @ B) / COLUMNS for _ in range(5)])
    worst = float(((B - P @ kept["first"].x).norm(dim=0) / B.norm(dim=0)).max())
    subject = f"digits, prior precision {prior:g}, {COLUMNS} right-hand sides, true residual {worst:.0e}"

    def products(what: str, count: int, time: Spread, target: float | None = None) -> None:
        figures.add(subject, what, Comparison(Spread.of([count]), time, unit, 1), ONE, target=target)

    products("products, P.solve", kept["first"].products, ours, most)
    products("products, P.solve of further columns", kept["further"].products, further)
    products("products, sketch and block CG", kept["sketched"].products, sketched)
    plain: list[Solution] = []
    for block in (True, False):
        time = Spread.of([seconds(lambda: plain.append(cg(P, B, rtol=RTOL, block=block)))])  # noqa: B023
        products(f"products, plain CG{' in a block' if block else ' by columns'}", plain[-1].matvecs, time)
    if figures.settings.peers:
        theirs, residual, count = _linear_cg(P, B, worst)
        label = f"linear_operator {peer_version('linear-operator')}, linear_cg to {residual:.0e}"
        products(f"products, {label}", count, Spread.of([theirs]))
        ratio = Spread(theirs / ours.median, theirs / ours.high, theirs / ours.low)
        against = Comparison(ratio, Spread.of([theirs]), ours, 1)
        figures.add(subject, label, against, "first solve of ours", at_least=AT_LEAST)


def _linear_cg(P: Damped, B: Tensor, residual: float) -> tuple[float, float, int]:
    """Seconds, true residual and products of its CG, in as few iterations as reach that residual, give or take a tenth.

    Its own stopping rule looks at the mean over the columns, and at its default `eps` the steps become zero on the way:
    both are set so that they do not count against it.
    """
    products = 0

    def multiply(V: Tensor) -> Tensor:
        nonlocal products
        products += V.shape[1]
        return P._matmul(V)

    tolerance, reached, taken = residual, math.inf, 0.0
    while reached > residual and tolerance > 0.3 * residual:
        products, kept = 0, []
        taken = seconds(lambda: kept.append(_run(multiply, B, tolerance)))  # noqa: B023
        reached = float(((B - P._matmul(kept[0])).norm(dim=0) / B.norm(dim=0)).max())
        tolerance *= 0.7
    return taken, reached, products


def _run(multiply: Callable[[Tensor], Tensor], B: Tensor, tolerance: float) -> Tensor:
    found: Tensor = linear_cg(multiply, B, tolerance=tolerance, eps=1e-30, max_iter=5000, max_tridiag_iter=0)
    return found


def _steps(figures: Figures) -> None:
    """A CG step with a diagonal of 10⁶ entries, and with one of 64: there, nothing but our Python takes time."""
    for size in (SIZE, 64):
        A = Diagonal(torch.logspace(0, 6, size, dtype=torch.float64))
        b = torch.randn(size, 1, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
        cg(A, b, maxiter=3)
        iterations: list[int] = []
        times = [seconds(lambda: iterations.append(cg(A, b, rtol=0, maxiter=STEPS).iterations)) for _ in range(3)]  # noqa: B023
        step = Spread.of([1e3 * time / count for time, count in zip(times, iterations)])
        subject = f"diagonal operator, D = {size:,}"
        target = None if size == SIZE else MOST_MILLISECONDS
        figures.add(subject, "a step of CG", Comparison(step, Spread.of(times), Spread.of([1e-3]), 3), "1 ms", target)
