"""The benchmark from end to end: each problem with each method that suits it, and the results as text and figures."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from curvops import plots
from curvops.cli.problems import KINDS, NAMES, BenchError, Problem, build
from curvops.cli.runs import (
    METHODS,
    PRECONDITIONERS,
    PSD,
    BenchSolver,
    EstimateRow,
    Settings,
    SolveRow,
    estimate,
    solve,
)
from curvops.plots import style
from curvops.plots.style import Figure
from curvops.summary import Table

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
            rows: list[Any] = results.solves if isinstance(method, BenchSolver) else results.estimates
            for measure in _measurements(problem, name, preconditioner, settings):
                try:
                    rows.append(measure())
                except (ValueError, TypeError, RuntimeError, ImportError, AttributeError) as error:
                    label = name if preconditioner == "none" else f"{name} with {preconditioner}"
                    note = f"{problem.name}: {label} failed, {type(error).__name__}: {' '.join(str(error).split())}"
                    results.notes += [note] if note not in results.notes else []
    if unfit:
        results.notes.append(f"{problem.name} is only {problem.kind}; skipped: {', '.join(unfit)}")
    return results


def _measurements(
    problem: Problem, name: str, preconditioner: str, settings: Settings
) -> list[Callable[[], SolveRow | EstimateRow]]:
    """Return the runs of a method with a preconditioner: one solve, or an estimate for each budget."""
    method = METHODS[name]
    if isinstance(method, BenchSolver):
        return [partial(solve, problem, name, method, preconditioner, settings)]
    return [partial(estimate, problem, name, method, preconditioner, budget, settings) for budget in settings.budgets]


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
