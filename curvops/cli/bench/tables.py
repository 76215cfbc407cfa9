"""The output of the benchmark: aligned tables, CSV, JSON."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from curvops.cli.bench.rows import EstimateRow, SolveRow

Column = tuple[str, Callable[[Any], str]]


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: 1 thread, 2 threads."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value < 10 else f"{value:.1f} s"


def _memory(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:.1f} MiB"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1e}"


def _inside(row: EstimateRow) -> str:
    if row.inside is None:
        return "-"
    return f"{row.inside:.0%}" if row.entries > 1 else f"{round(row.inside * row.runs)}/{row.runs}"


SOLVES: tuple[Column, ...] = (
    ("method", lambda r: r.method),
    ("preconditioner", lambda r: r.preconditioner),
    ("iterations", lambda r: "-" if r.iterations is None else str(r.iterations)),
    ("products", lambda r: f"{r.products:,}"),
    ("setup", lambda r: f"{r.setup_products:,}"),
    ("time", lambda r: _seconds(r.seconds)),
    ("true residual", lambda r: _number(r.true_residual)),
    ("memory", lambda r: _memory(r.memory_bytes)),
    ("outcome", lambda r: r.outcome),
)
ESTIMATES: tuple[Column, ...] = (
    ("method", lambda r: r.method),
    ("preconditioner", lambda r: r.preconditioner),
    ("budget", lambda r: f"{r.budget:,}"),
    ("products", lambda r: f"{r.products:,.0f}"),
    ("time", lambda r: _seconds(r.seconds)),
    ("mean error", lambda r: _number(r.error)),
    ("claimed 95 %", lambda r: "none" if math.isnan(r.claimed) else _number(r.claimed)),
    ("inside", _inside),
    ("memory", lambda r: _memory(r.memory_bytes)),
)
LEFT = {"method", "preconditioner", "outcome"}


def table(rows: Sequence[Any], columns: Sequence[Column]) -> str:
    """Align rows as text: words to the left, numbers to the right."""
    cells = [[heading for heading, _ in columns], *([show(row) for _, show in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    sides = ["<" if heading in LEFT else ">" for heading, _ in columns]
    lines = ["  ".join(f"{c:{side}{w}}" for c, side, w in zip(line, sides, widths)).rstrip() for line in cells]
    lines.insert(1, "─" * max(map(len, lines)))
    return "\n".join(lines)


def write(solves: Sequence[SolveRow], estimates: Sequence[EstimateRow], facts: dict[str, Any], output: Path) -> None:
    """Write solves.csv, trails.csv, estimates.csv and results.json into a folder."""
    _csv(output / "solves.csv", [_plain(row, "trail") for row in solves])
    _csv(output / "estimates.csv", [_plain(row, "errors") for row in estimates])
    points = [
        {"problem": r.problem, "method": r.method, "preconditioner": r.preconditioner, "products": p, "seconds": s,
         "residual": v}
        for r in solves
        for p, s, v in zip(r.trail.products, r.trail.seconds, r.trail.residuals)
    ]  # fmt: skip
    _csv(output / "trails.csv", points)
    estimated = [_plain(row, "errors") | {"errors": row.errors} for row in estimates]
    everything = facts | {"solves": [_plain(row, "trail") for row in solves], "estimates": estimated}
    text = json.dumps(_finite(everything), indent=2, ensure_ascii=False, allow_nan=False)
    (output / "results.json").write_text(text + "\n", encoding="utf-8")


def _plain(row: Any, left_out: str) -> dict[str, Any]:
    return {name: value for name, value in vars(row).items() if name != left_out}


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON cannot express, by null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        path.unlink(missing_ok=True)  # left by an earlier run
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
