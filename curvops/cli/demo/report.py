"""What the demo prints and writes: the table, the stages, results.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from curvops.cli.demo.scores import PARTS, SCORES, Row, mean_and_error

HEADINGS = {"accuracy": "accuracy", "nll": "NLL", "brier": "Brier", "ece": "ECE"}
TURNS = (("0°", "0"), ("turned", "rotated"))


def summary(rows: Sequence[Mapping[str, Row]]) -> dict[str, dict[str, tuple[float, float | None] | None]]:
    """By method and column, the mean over seeds and its standard error; None where a method has no such column."""
    found: dict[str, dict[str, tuple[float, float | None] | None]] = {}
    for name in rows[0]:
        by_seed = [of_seed[name].values() for of_seed in rows]
        found[name] = {}
        for column in by_seed[0]:
            values = [value for value in (of_seed[column] for of_seed in by_seed) if value is not None]
            found[name][column] = mean_and_error(values) if values else None
    return found


def table(summaries: Mapping[str, Mapping[str, tuple[float, float | None] | None]]) -> str:
    """Four blocks for a terminal of 100 columns: upright, rotated, uncertainty in parts, telling one from the other."""
    blocks = [
        ("upright (0°)", [(HEADINGS[s], f"{s}_0") for s in SCORES]),
        ("mean over 15–90°", [(HEADINGS[s], f"{s}_rotated") for s in SCORES]),
        ("uncertainty (nats)", [(f"{part}, {where}", f"{part}_{key}") for where, key in TURNS for part in PARTS]),
        ("AUROC rotated", [("total", "auroc_total"), ("epistemic", "auroc_epistemic")]),
    ]
    lines = []
    for title, columns in blocks:
        lines.append(f"{title:<20}" + "".join(f"{heading:>18}" for heading, _ in columns))
        for name, values in summaries.items():
            cells = [_cell(values.get(column)) for _, column in columns]
            if set(cells) != {"-"}:
                lines.append(f"{name:<20}" + "".join(f"{cell:>18}" for cell in cells))
        lines.append("")
    return "\n".join(lines).rstrip()


def _cell(value: tuple[float, float | None] | None) -> str:
    if value is None:
        return "-"
    mean, error = value
    return f"{mean:.4f}" if error is None else f"{mean:.4f} ± {error:.4f}"


def stages(timings: Iterable[tuple[str, float, int]]) -> str:
    """Seconds and products of each stage. A product is one vector through the GGN or the Jacobian."""
    lines = [f"{'stage':<44}{'seconds':>9}{'products':>10}"]
    lines += [
        f"{name:<44}{seconds:>9.1f}{(str(products) if products else '-'):>10}" for name, seconds, products in timings
    ]
    return "\n".join(lines)


def write(results: Mapping[str, Any], path: Path) -> None:
    """All raw numbers, as JSON."""
    path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
