"""The benchmark from end to end: every problem with every method and preconditioner that fits it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from curvops import plots
from curvops.cli.bench import tables
from curvops.cli.bench.measure import MEMORY
from curvops.cli.bench.methods import METHODS, PRECONDITIONERS, OwnEstimator, OwnSolver, Settings
from curvops.cli.bench.peers import Peer, PeerEstimator, installed, peers
from curvops.cli.bench.problem import STRENGTH, BenchError, Problem, Unfit
from curvops.cli.bench.problems import NAMES, build
from curvops.cli.bench.rows import EstimateRow, SolveRow, TooDear, estimate, solve

PROBLEMS = ("decaying", "kappa1e4", "digits-ggn", "indefinite")
QUICK = ("decaying", "digits-ggn")
CHOSEN = ("cg", "block-cg", "minres", "trace-hutchinson", "trace-xtrace", "trace-xnystrace", "logdet")
PRECONDITIONED = ("none", "nystrom", "rp-cholesky")
LACKS = {
    "any": "is not square",
    "square": "is not symmetric",
    "symmetric": "is not positive definite",
    "psd": "has no shift (prior precision)",
}
"""What stands between a kind and the next stronger one."""
Contender = OwnSolver | OwnEstimator | Peer | PeerEstimator


@dataclass(frozen=True)
class Choice:
    """Names of what is to be run."""

    problems: Sequence[str] = PROBLEMS
    methods: Sequence[str] = tuple(name for name in CHOSEN if name in METHODS)
    preconditioners: Sequence[str] = PRECONDITIONED
    peers: bool = False


@dataclass(eq=False)
class Results:
    """Rows so far, and lines on what was left out and why."""

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
                more = ", or a module:function of yours" if what == "problem" else ""
                raise BenchError(f"no {what} {name!r}; choose from {', '.join(known)}{more}.")


def run(choice: Choice, settings: Settings, output: Path, say: Callable[[str], None]) -> Results:
    """Run everything, print a table per problem through `say`, and write CSV, JSON and figures to `output`."""
    check(choice)
    # A user's function may fail: before anything else is run.
    own = {name: _build(name, settings) for name in choice.problems if ":" in name}
    output.mkdir(parents=True, exist_ok=True)
    results = Results()
    methods = _methods(choice, results, say)
    say(f"{MEMORY}.\nProducts are with single vectors, all that were made. {_machine(settings)}.")
    cells = sum(
        settings.seeds * len(settings.budgets) if isinstance(method, OwnEstimator | PeerEstimator) else 1
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


def _methods(choice: Choice, results: Results, say: Callable[[str], None]) -> dict[str, Contender]:
    found: dict[str, Contender] = {name: METHODS[name] for name in choice.methods}
    if not choice.peers:
        return found
    solving = any(isinstance(method, OwnSolver) for method in found.values())
    quantities = {method.quantity for method in found.values() if isinstance(method, OwnEstimator)}
    missing = set()
    for name, peer in peers().items():
        if not (solving if isinstance(peer, Peer) else peer.quantity in quantities):
            continue
        if installed(peer.module):
            found[name] = peer
        elif peer.module not in missing:
            missing.add(peer.module)
            results.notes.append(f"skipped: {peer.module} is not installed")
            say(results.notes[-1])
    return found


def _preconditioners(method: Contender, choice: Choice) -> Sequence[str]:
    return choice.preconditioners if getattr(method, "preconditioned", False) else ("none",)


def _problem(
    problem: Problem,
    methods: dict[str, Contender],
    choice: Choice,
    settings: Settings,
    results: Results,
    bar: Any,
) -> None:
    for width in range(problem.B.shape[1], 0, -1):  # what the first product with so many columns builds
        problem.A._matmul(problem.B.new_zeros(problem.G.shape[1], width))
    plain = STRENGTH[problem.kind] < STRENGTH["psd"]
    unfit: dict[str, None] = {}
    for name, method in methods.items():
        for preconditioner in _preconditioners(method, choice):
            estimator = isinstance(method, OwnEstimator | PeerEstimator)
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
    problem: Problem, name: str, method: Contender, preconditioner: str, settings: Settings, results: Results, bar: Any
) -> None:
    """One method with one preconditioner; what it raises becomes a note, and the rest goes on."""
    budget = None
    try:
        if isinstance(method, OwnSolver | Peer):
            results.solves.append(solve(problem, name, method, preconditioner, settings))
            bar.update()
            return
        for budget in settings.budgets:
            row = estimate(problem, name, method, preconditioner, budget, settings, bar.update)
            results.estimates.append(row)
    except TooDear as error:
        label = f"{name} with {preconditioner}"
        results.notes.append(f"{problem.name}: {label} skipped at {budget} products, its making takes {error}")
        left = tuple(b for b in settings.budgets if budget is not None and b > budget)
        if left:
            _cell(problem, name, method, preconditioner, _with_budgets(settings, left), results, bar)
    except Unfit as error:
        note = f"{problem.name}: {name} skipped, {error}"
        results.notes += [note] if note not in results.notes else []
    except (ValueError, TypeError, RuntimeError, ImportError, AttributeError) as error:
        first = str(error).strip().splitlines() or [""]
        what = name if preconditioner == "none" else f"{name} with {preconditioner}"
        results.notes.append(f"{problem.name}: {what} failed, {type(error).__name__}: {first[0][:160]}")


def _with_budgets(settings: Settings, budgets: tuple[int, ...]) -> Settings:
    return Settings(**{**vars(settings), "budgets": budgets})


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
            (r.method, r.preconditioner): (
                np.array(r.trail.products, dtype=float),
                np.array(r.trail.seconds, dtype=float),
                np.array(r.trail.residuals, dtype=float),
            )
            for r in solves
        }
        rtol = settings.rtol if problem.square else None
        title = f"{problem.name}, {problem.size}, {tables.plural(problem.B.shape[1], 'right-hand side')}"
        plots.save(plots.solves(curves, rtol, title, problem.shown), output / f"solves-{stem}.png")
    panels: dict[str, dict[str, Any]] = {}
    of_problem = [row for row in results.estimates if row.problem == problem.name and not np.isnan(row.error)]
    for row in of_problem:
        name = row.method if row.preconditioner == "none" else f"{row.method} · {row.preconditioner}"
        panels.setdefault(row.quantity, {}).setdefault(name, []).append(row)
    if panels:
        drawn = {
            quantity: {
                name: (
                    np.array([r.budget for r in rows], dtype=float),
                    np.array([r.errors for r in rows]),
                    np.array([r.claimed for r in rows]),
                )
                for name, rows in methods.items()
            }
            for quantity, methods in panels.items()
        }
        plots.save(plots.estimates(drawn, f"{problem.name}, {problem.size}"), output / f"estimates-{stem}.png")


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
