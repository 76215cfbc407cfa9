"""The results as text: aligned tables of solves and of estimates; and the residuals as a figure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from curvops.cli.bench.methods import Settings
from curvops.cli.bench.problems import Problem
from curvops.cli.bench.runs import EstimateRow, SolveRow
from curvops.plots import style

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
    """Align rows as text: words to the left, numbers to the right."""
    cells = [[heading for heading, _ in columns], *([show(row) for _, show in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    sides = ["<" if heading in ("method", "preconditioner", "outcome") else ">" for heading, _ in columns]
    lines = ["  ".join(f"{c:{side}{w}}" for c, side, w in zip(line, sides, widths)).rstrip() for line in cells]
    lines.insert(1, "─" * max(map(len, lines)))
    return "\n".join(lines)


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
