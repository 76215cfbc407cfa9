"""An example of `curvops bench`, for its page:   python -m benchmarks.bench_example

The usual methods on two of the usual problems.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.study_page import Study
from benchmarks.tables import table
from curvops.cli import sweep
from curvops.cli.problems import build
from curvops.cli.sweep import Settings

USUAL = sweep.Choice(problems=("digits-ggn", "indefinite"))
SETTINGS = Settings()


def measure() -> dict[str, Any]:
    """What `curvops bench` writes as JSON, without the trails, and a title for each problem."""
    with TemporaryDirectory() as folder:
        sweep.run(USUAL, SETTINGS, Path(folder), print)
        written = json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))
    for row in written["solves"]:
        del row["trail"]
    return {
        **{key: written[key] for key in ("solves", "estimates", "notes")},
        "titles": dict(map(title, USUAL.problems)),
    }


def title(name: str) -> tuple[str, str]:
    """What a problem is, by its name."""
    problem = build(name, SETTINGS.size, SETTINGS.columns, SETTINGS.dtype)
    return name, f"{problem.text}; {problem.title}, rtol {SETTINGS.rtol:.0e}"


def text(found: Mapping[str, Any]) -> str:
    """The tables of each problem; the outcome of solvers where not all converged."""
    parts = []
    for name, what in found["titles"].items():
        parts.append(f"**`{name}`**: {what}.")
        solves, estimates = (rows(found[kind], name) for kind in ("solves", "estimates"))
        if solves:
            ended = [] if {row.outcome for row in solves} == {"converged"} else ["outcome"]
            shown = [*ended, "products", "setup", "iterations", "true residual", "time"]
            parts.append(cells(solves, sweep.SOLVES, shown))
        for quantity, group in sweep.by_quantity(estimates).items():
            parts.append(f"{quantity.capitalize()}, relative errors over {SETTINGS.seeds} seeds:")
            shown = ["budget", "products", "mean error", "claimed 95 %", "inside", "time"]
            parts.append(cells(group, sweep.ESTIMATES, shown))
        parts += [f"{note.capitalize()}." for note in found["notes"] if note.startswith(name)]
    return "\n\n".join(parts)


def rows(found: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """The rows of one problem as the table of the command takes them."""
    of = (row for row in found if row["problem"] == name)
    numbers = ("error", "claimed", "inside")
    return [SimpleNamespace(**row | {key: math.nan for key in numbers if row.get(key, 0) is None}) for row in of]


def cells(found: Sequence[Any], columns: Sequence[sweep.Column], shown: Sequence[str]) -> str:
    """A table of these columns, preconditioners beside the method."""
    show: dict[str, Callable[[Any], str]] = dict(columns)
    names = [row.method + (f", {row.preconditioner}" if row.preconditioner != "none" else "") for row in found]
    return table(["method", *shown], [[name, *(show[key](row) for key in shown)] for name, row in zip(names, found)])


STUDY = Study(
    name="bench_example", description=__doc__, measure=measure, sections={"bench": text}, page="docs/bench.md"
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    STUDY.run()
