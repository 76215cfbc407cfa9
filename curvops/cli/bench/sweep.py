"""The benchmark from end to end: each problem with each method and preconditioner that suits it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from curvops import plots
from curvops.cli.bench import figures, tables
from curvops.cli.bench.measure import MEMORY
from curvops.cli.bench.methods import METHODS, PRECONDITIONERS, BenchEstimator, BenchSolver, Settings, load_peers
from curvops.cli.bench.problem import STRENGTH, BenchError, NotApplicableError, Problem
from curvops.cli.bench.problems import NAMES, build
from curvops.cli.bench.rows import BudgetSpentError, EstimateRow, SolveRow, estimate, solve

PROBLEMS = ("decaying", "kappa1e4", "digits-ggn", "indefinite")
QUICK = ("decaying", "digits-ggn")
USUAL = ("cg", "block-cg", "minres", "trace-hutchinson", "trace-xtrace", "trace-xnystrace", "logdet")
USUAL_PRECONDITIONERS = ("none", "nystrom", "rp-cholesky")
LACKS = {
    "any": "is not square",
    "square": "is not symmetric",
    "symmetric": "is not positive definite",
    "psd": "has no shift (prior precision)",
}
"""The property that a kind of matrix lacks to be of the next stronger kind."""


@dataclass(frozen=True)
class Choice:
    """The names of problems, methods and preconditioners to run."""

    problems: Sequence[str] = PROBLEMS
    methods: Sequence[str] = tuple(name for name in USUAL if name in METHODS)
    preconditioners: Sequence[str] = USUAL_PRECONDITIONERS
    peers: bool = False


@dataclass(eq=False)
class Results:
    """The rows so far, and notes on skipped methods with the reason."""

    solves: list[SolveRow] = field(default_factory=list)
    estimates: list[EstimateRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(choice: Choice) -> None:
    """Raise BenchError for a name that is in no table."""
    named: tuple[tuple[str, Sequence[str], Iterable[str]], ...] = (
        ("problem", [name for name in choice.problems if ":" not in name], NAMES),
        ("method", choice.methods, METHODS),
        ("preconditioner", choice.preconditioners, PRECONDITIONERS),
    )
    for what, names, known in named:
        for name in names:
            if name not in known:
                more = ", or your own module:function" if what == "problem" else ""
                raise BenchError(f"no {what} {name!r}; choose from {', '.join(known)}{more}.")


def run(choice: Choice, settings: Settings, output: Path, say: Callable[[str], None]) -> Results:
    """Run a choice of methods on a choice of problems, and write CSV, JSON and figures.

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
    check(choice)
    # A user's function may fail, so it is called before anything else runs.
    own = {name: _build(name, settings) for name in choice.problems if ":" in name}
    output.mkdir(parents=True, exist_ok=True)
    results = Results()
    methods = _methods(choice, results, say)
    say(f"{MEMORY}.\nProducts are with single vectors, and all of them are counted. {_machine(settings)}.")
    cells = sum(
        settings.seeds * len(settings.budgets) if isinstance(method, BenchEstimator) else 1
        for method in methods.values()
        for _ in _preconditioners(method, choice)
    )
    with tqdm(total=cells * len(choice.problems), desc="bench", unit="run", disable=None) as bar:
        for name in choice.problems:
            bar.set_postfix_str(f"building {name}")
            problem = own.get(name) or _build(name, settings)
            before = len(results.solves), len(results.estimates), len(results.notes)
            _problem(problem, methods, choice, settings, results, bar)
            with tqdm.external_write_mode():
                _print(problem, results, before, settings, say)
            _figures(problem, results, settings, output)
    tables.write(results.solves, results.estimates, _facts(choice, settings, results), output)
    say(f"\nTables, trails and figures: {output}/")
    return results


def _build(name: str, settings: Settings) -> Problem:
    return build(name, settings.size, settings.columns, settings.dtype, settings.seed)


def _methods(choice: Choice, results: Results, say: Callable[[str], None]) -> dict[str, BenchSolver | BenchEstimator]:
    """Return the chosen methods and, with --peers, those of other libraries for the same tasks."""
    methods = {name: METHODS[name] for name in choice.methods}
    tasks = {getattr(method, "quantity", "solve") for method in methods.values()}
    for name, peer in (load_peers() if choice.peers else {}).items():
        note = f"skipped: {peer.module} is not installed"
        if getattr(peer, "quantity", "solve") not in tasks or note in results.notes:
            continue
        if peer.module is None or find_spec(peer.module) is not None:
            methods[name] = peer
        else:
            results.notes.append(note)
            say(note)
    return methods


def _preconditioners(method: BenchSolver | BenchEstimator, choice: Choice) -> Sequence[str]:
    return choice.preconditioners if method.preconditioned else ("none",)


def _problem(
    problem: Problem,
    methods: dict[str, BenchSolver | BenchEstimator],
    choice: Choice,
    settings: Settings,
    results: Results,
    bar: Any,
) -> None:
    for width in range(problem.B.shape[1], 0, -1):  # so that timings exclude what a first product of this width builds
        problem.A._matmul(problem.B.new_zeros(problem.G.shape[1], width))
    plain = STRENGTH[problem.kind] < STRENGTH["psd"]
    unfit: dict[str, None] = {}
    for name, method in methods.items():
        for preconditioner in _preconditioners(method, choice):
            estimator = isinstance(method, BenchEstimator)
            steps = settings.seeds * len(settings.budgets) if estimator else 1
            start = bar.n
            if STRENGTH[problem.kind] < STRENGTH[method.needs]:
                unfit[name] = None
            elif plain and preconditioner != "none":
                unfit[f"preconditioner {preconditioner}"] = None
            else:
                bar.set_postfix_str(f"{problem.name} · {name} · {preconditioner}")
                _cell(problem, name, method, preconditioner, settings, results, bar)
            bar.update(start + steps - bar.n)
    if unfit:
        results.notes.append(f"{problem.name} {LACKS[problem.kind]}; skipped: {', '.join(unfit)}")


def _cell(
    problem: Problem,
    name: str,
    method: BenchSolver | BenchEstimator,
    preconditioner: str,
    settings: Settings,
    results: Results,
    bar: Any,
) -> None:
    """Run one method with one preconditioner; an error becomes a note, and the sweep continues."""
    label = name if preconditioner == "none" else f"{name} with {preconditioner}"
    try:
        if isinstance(method, BenchSolver):
            results.solves.append(solve(problem, name, method, preconditioner, settings))
            bar.update()
            return
        for budget in settings.budgets:
            try:
                row = estimate(problem, name, method, preconditioner, budget, settings, bar.update)
                results.estimates.append(row)
            except BudgetSpentError as error:
                note = f"{label} skipped at {budget} products: building it takes {error}"
                results.notes.append(f"{problem.name}: {note}")
    except NotApplicableError as error:
        note = f"{problem.name}: {name} skipped, {error}"
        results.notes += [note] if note not in results.notes else []
    except (ValueError, TypeError, RuntimeError, ImportError, AttributeError) as error:
        first = str(error).strip().splitlines() or [""]
        results.notes.append(f"{problem.name}: {label} failed, {type(error).__name__}: {first[0][:160]}")


def _print(
    problem: Problem, results: Results, before: tuple[int, int, int], settings: Settings, say: Callable[[str], None]
) -> None:
    sides = tables.plural(problem.B.shape[1], "right-hand side")
    say(f"\n{problem.name}: {problem.text}; {problem.size}, {sides}, rtol {settings.rtol:.0e}")
    if rows := results.solves[before[0] :]:
        say("\n" + tables.table(rows, tables.SOLVES))
    estimates = results.estimates[before[1] :]
    for quantity, group in itertools.groupby(sorted(estimates, key=lambda r: r.quantity), key=lambda r: r.quantity):
        heading = f"{quantity}, relative errors over {settings.seeds} seeds"
        say(f"\n{heading}\n" + tables.table(list(group), tables.ESTIMATES))
    for note in results.notes[before[2] :]:
        say(note)


def _figures(problem: Problem, results: Results, settings: Settings, output: Path) -> None:
    stem = problem.name.replace(":", "-").replace("/", "-")
    solves = [row for row in results.solves if row.problem == problem.name]
    if solves:
        curves = {
            (r.method, r.preconditioner): _arrays(r.trail.products, r.trail.seconds, r.trail.residuals) for r in solves
        }
        rtol = settings.rtol if problem.square else None
        title = f"{problem.name}, {problem.size}, {tables.plural(problem.B.shape[1], 'right-hand side')}"
        plots.save(figures.solves(curves, rtol, title, problem.shown), output / f"solves-{stem}.png")
    rows = [row for row in results.estimates if row.problem == problem.name and not np.isnan(row.error)]
    panels: dict[str, dict[str, Any]] = {}
    for quantity, name in dict.fromkeys((row.quantity, _label(row)) for row in rows):
        points = [(r.budget, r.errors, r.claimed) for r in rows if (r.quantity, _label(r)) == (quantity, name)]
        panels.setdefault(quantity, {})[name] = _arrays(*zip(*points))
    if panels:
        plots.save(figures.estimates(panels, f"{problem.name}, {problem.size}"), output / f"estimates-{stem}.png")


def _arrays(*columns: Sequence[Any]) -> Any:
    return tuple(np.array(column, dtype=float) for column in columns)


def _label(row: EstimateRow) -> str:
    return row.method if row.preconditioner == "none" else f"{row.method} · {row.preconditioner}"


def _machine(settings: Settings) -> str:
    threads = tables.plural(torch.get_num_threads(), "thread")
    return f"{str(settings.dtype).removeprefix('torch.')}, {threads}, torch {torch.__version__}"


def _facts(choice: Choice, settings: Settings, results: Results) -> dict[str, Any]:
    return {
        "settings": vars(settings) | {"dtype": str(settings.dtype), "budgets": list(settings.budgets)},
        "problems": list(choice.problems),
        "memory": MEMORY,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "notes": results.notes,
    }
