"""The benchmark: a table of methods, one measured run of each on each problem that suits it, and the results."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from curvops import linalg, plots
from curvops.cli.problems import KINDS, NAMES, BenchError, Problem, build
from curvops.linalg import Estimate, FactoredPreconditioner, Solution
from curvops.linalg.estimators.diagonal import METHODS as DIAGONALS
from curvops.linalg.estimators.trace import METHODS as TRACES
from curvops.plots import style
from curvops.plots.style import Figure
from curvops.summary import Table

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


def solve(problem: Problem, name: str, solver: BenchSolver, preconditioner: str, settings: Settings) -> SolveRow:
    """Warm up with two iterations, build the preconditioner, solve, and compute the true residual."""
    counter = problem.G.counter
    solver.run(problem, None, replace(settings, maxiter=2, rtol=0.5), lambda *_: None)
    counter.count = 0
    generator = torch.Generator().manual_seed(0)
    start = time.perf_counter()
    P = PRECONDITIONERS[preconditioner](problem, settings, generator)
    setup_products = counter.count
    trail: list[tuple[int, float, float]] = []

    def callback(iteration: int, residuals: Tensor) -> None:
        worst = float(residuals.nan_to_num(torch.inf).max())
        trail.append((counter.count, time.perf_counter() - start, worst))

    solution = solver.run(problem, P, settings, callback)
    seconds, products, residual = time.perf_counter() - start, counter.count, problem.residual(solution.x)
    outcome = ", ".join(sorted({reason.name.lower().replace("_", " ") for reason in solution.reasons}))
    if solution.exact_matvecs:
        outcome += f"; {solution.exact_matvecs} products in float64"
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
        counter.count, start = 0, time.perf_counter()
        estimated = _estimated(problem, estimator, preconditioner, budget, settings, generator)
        seconds.append(time.perf_counter() - start)
        low, high = estimated.interval()
        value = estimated.value if truth is None else truth
        claims.append(float(((high - low) / 2).norm() / value.norm()))
        errors.append(math.nan if truth is None else float((estimated.value - truth).norm() / truth.norm()))
        inside.append(math.nan if truth is None else float(((low <= truth) & (truth <= high)).double().mean()))
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


PROBLEMS = ("decaying", "kappa1e4", "digits-ggn", "indefinite")
QUICK = ("decaying", "digits-ggn")
USUAL = ("cg", "block-cg", "minres", "trace-hutchinson", "trace-xtrace", "trace-xnystrace", "logdet")
USUAL_PRECONDITIONERS = ("none", "nystrom", "rp-cholesky")


@dataclass(frozen=True)
class Choice:
    """The names of problems, methods and preconditioners to run."""

    problems: Sequence[str] = PROBLEMS
    methods: Sequence[str] = USUAL
    preconditioners: Sequence[str] = USUAL_PRECONDITIONERS


@dataclass(eq=False)
class Results:
    """The rows so far, and notes on skipped methods with the reason."""

    solves: list[SolveRow] = field(default_factory=list)
    estimates: list[EstimateRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def run(choice: Choice, settings: Settings, output: Path, say: Callable[[str], None]) -> Results:
    """Run a choice of methods on a choice of problems, and write results.json and figures.

    Args:
        choice: Names of problems, methods and preconditioners.
        settings: Sizes, tolerances and seeds.
        output: Folder of the files; it is created if missing.
        say: A function that is called with the text of the tables, problem by problem.

    Returns:
        All rows and notes.

    Raises:
        BenchError: A name is unknown, or a user's function fails.
    """
    _check("problem", [name for name in choice.problems if ":" not in name], NAMES)
    _check("method", choice.methods, METHODS)
    _check("preconditioner", choice.preconditioners, PRECONDITIONERS)
    problems = [build(name, settings.size, settings.columns, settings.dtype) for name in choice.problems]
    output.mkdir(parents=True, exist_ok=True)
    everything = Results()
    for problem in tqdm(problems, desc="bench", unit="problem", disable=None):
        results = _of_problem(problem, choice, settings)
        with tqdm.external_write_mode():
            say(text(problem, results.solves, results.estimates, results.notes, settings))
        if results.solves:
            figure = draw_solves(results.solves, settings.rtol, f"{problem.name}, {problem.title}")
            plots.save(figure, output / f"solves-{problem.name.replace(':', '-')}.png")
        everything.solves += results.solves
        everything.estimates += results.estimates
        everything.notes += results.notes
    _write(settings, everything, output / "results.json")
    say(f"\nProducts are with single vectors, and all of them are counted. Results and figures: {output}/")
    return everything


def _check(what: str, names: Sequence[str], table: Iterable[str]) -> None:
    for name in names:
        if name not in table:
            raise BenchError(f"no {what} {name!r}; choose from {', '.join(table)}.")


def _of_problem(problem: Problem, choice: Choice, settings: Settings) -> Results:
    """Run every method that suits a problem; an error becomes a note, and the sweep continues."""
    for width in range(problem.B.shape[1], 0, -1):  # so that timings exclude what a first product of this width builds
        problem.uncounted(problem.B[:, :width])
    results, strength = Results(), KINDS.index(problem.kind)
    plain = strength < KINDS.index(PSD)
    unfit = [f"preconditioner {name}" for name in choice.preconditioners if plain and name != "none"]
    unfit += [name for name in choice.methods if strength < KINDS.index(METHODS[name].needs)]
    for name in choice.methods:
        method = METHODS[name]
        for preconditioner in choice.preconditioners if method.preconditioned and not plain else ("none",):
            if name in unfit:
                continue
            for budget in (0,) if isinstance(method, BenchSolver) else settings.budgets:
                try:
                    if isinstance(method, BenchSolver):
                        results.solves.append(solve(problem, name, method, preconditioner, settings))
                    else:
                        results.estimates.append(estimate(problem, name, method, preconditioner, budget, settings))
                except (ValueError, TypeError, RuntimeError, ImportError, AttributeError) as error:
                    label = name if preconditioner == "none" else f"{name} with {preconditioner}"
                    note = f"{problem.name}: {label} failed, {type(error).__name__}: {' '.join(str(error).split())}"
                    results.notes += [note] if note not in results.notes else []
    if unfit:
        results.notes.append(f"{problem.name} is only {problem.kind}; skipped: {', '.join(unfit)}")
    return results


def _write(settings: Settings, results: Results, path: Path) -> None:
    everything = {
        "settings": vars(settings) | {"dtype": str(settings.dtype)},
        "torch": torch.__version__,
        "notes": results.notes,
        "solves": [asdict(row) for row in results.solves],
        "estimates": [asdict(row) for row in results.estimates],
    }
    finite = json.loads(json.dumps(everything), parse_constant=lambda _: None)  # JSON has no NaN or infinity
    path.write_text(json.dumps(finite, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


Column = tuple[str, Callable[[Any], str]]


def _inside(row: EstimateRow) -> str:
    if math.isnan(row.inside):
        return "-"
    return f"{row.inside:.0%}" if row.entries > 1 else f"{round(row.inside * row.runs)}/{row.runs}"


SOLVES: tuple[Column, ...] = (
    ("method", lambda r: r.method),
    ("preconditioner", lambda r: r.preconditioner),
    ("iterations", lambda r: "-" if r.iterations is None else str(r.iterations)),
    ("products", lambda r: f"{r.products:,}"),
    ("setup", lambda r: f"{r.setup_products:,}"),
    ("time", lambda r: f"{r.seconds:.2f} s"),
    ("true residual", lambda r: f"{r.true_residual:.1e}"),
    ("outcome", lambda r: r.outcome),
)
ESTIMATES: tuple[Column, ...] = (
    ("method", lambda r: r.method),
    ("preconditioner", lambda r: r.preconditioner),
    ("budget", lambda r: f"{r.budget:,}"),
    ("products", lambda r: f"{r.products:,.0f}"),
    ("time", lambda r: f"{r.seconds:.2f} s"),
    ("mean error", lambda r: f"{r.error:.1e}"),
    ("claimed 95 %", lambda r: f"{r.claimed:.1e}"),
    ("inside", _inside),
)


def table(rows: Sequence[Any], columns: Sequence[Column]) -> str:
    """Return the rows as text in columns."""
    return str(Table([heading for heading, _ in columns], [[show(row) for _, show in columns] for row in rows]))


def by_quantity(rows: Iterable[EstimateRow]) -> dict[str, list[EstimateRow]]:
    """Group the rows of estimates by what they estimate, in alphabetical order."""
    ordered = sorted(rows, key=lambda row: row.quantity)
    return {quantity: list(group) for quantity, group in itertools.groupby(ordered, key=lambda row: row.quantity)}


def text(
    problem: Problem, solves: Sequence[SolveRow], estimates: Sequence[EstimateRow], notes: Sequence[str],
    settings: Settings,
) -> str:  # fmt: skip
    """Return the heading of a problem, its tables and its notes."""
    blocks = [f"\n{problem.name}: {problem.text}; {problem.title}, rtol {settings.rtol:.0e}"]
    blocks += [table(solves, SOLVES)] if solves else []
    for quantity, rows in by_quantity(estimates).items():
        blocks.append(f"{quantity}, relative errors over {settings.seeds} seeds\n{table(rows, ESTIMATES)}")
    return "\n\n".join([*blocks, *(["\n".join(notes)] if notes else [])])


def label(row: SolveRow | EstimateRow) -> str:
    """Return the name of a method and its preconditioner."""
    return row.method if row.preconditioner == "none" else f"{row.method} · {row.preconditioner}"


def draw_solves(rows: Sequence[SolveRow], rtol: float, title: str) -> Figure:
    """Draw the worst relative residual of each solve, on a log axis, against products and against seconds.

    The preconditioner's cost is included. Colours distinguish methods, dashes preconditioners. A cross marks the last
    point of a curve that ends above rtol.
    """
    figure = style.blank(11.5, 4.8 + 0.09 * max(0, len(rows) - 12), title)
    left, right = figure.subplots(1, 2, sharey=True)
    methods, preconditioners = style.looks(r.method for r in rows), style.looks(r.preconditioner for r in rows)
    for row in rows:
        products, seconds, residual = np.array(row.trail, dtype=float).T
        dashes = preconditioners[row.preconditioner]
        look: dict[str, Any] = {
            "color": methods[row.method].color,
            "linestyle": dashes.linestyle,
            "marker": dashes.marker,
        }
        missed = not row.true_residual <= rtol
        look |= {"marker": "x", "markersize": 9, "markeredgewidth": 2.2} if missed else {}
        name = label(row) + (" (tolerance not reached)" if missed else "")
        for axes, cost in ((left, products), (right, seconds)):
            shown = (cost > 0) & (residual > 0) & np.isfinite(residual)
            last = [max(int(shown.sum()) - 1, 0)]
            axes.plot(cost[shown], residual[shown], label=name, linewidth=1.4, markevery=last, **look)
    for axes, unit in ((left, "products with single vectors"), (right, "seconds")):
        axes.axhline(rtol, linewidth=1.4, label=f"tolerance {rtol:.0e}", **style.REFERENCE)
        axes.set(xscale="log", yscale="log")
        style.dress(axes, unit, "worst relative residual (no unit)" if axes is left else "")
    entries = left.get_legend_handles_labels()
    figure.legend(*entries, loc="outside right center", fontsize=style.SMALL, handlelength=3.2)
    return figure
