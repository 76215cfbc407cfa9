"""The benchmark from end to end: each problem with each method and preconditioner that suits it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from curvops import plots
from curvops.cli.bench import report
from curvops.cli.bench.methods import METHODS, PRECONDITIONERS, PSD, BenchSolver, Settings
from curvops.cli.bench.problems import KINDS, NAMES, BenchError, Problem, build
from curvops.cli.bench.runs import EstimateRow, SolveRow, estimate, solve

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
            say(report.text(problem, results.solves, results.estimates, results.notes, settings))
        if results.solves:
            figure = report.draw_solves(results.solves, settings.rtol, f"{problem.name}, {problem.title}")
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
