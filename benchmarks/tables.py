"""Markdown tables and the text around them, for every page of figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MIB = 2**20


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns line up: text to the left, everything but the first column to the right."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(header))]
    padded = [[c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))] for line in lines]
    rule = [("-" * w) if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [padded[0], rule, *padded[1:]])


def tables(header: Sequence[str], rows: Iterable[Sequence[str]], *parts: Sequence[str]) -> str:
    """Several tables of the same rows, each with the columns of these headings: narrow enough for a page."""
    cells = list(rows)
    places = [[header.index(name) for name in part] for part in parts]
    return "\n\n".join(table([header[i] for i in at], [[row[i] for i in at] for row in cells]) for at in places)


def within(peak: float, bound: float) -> str:
    """Whether a peak is within its bound, both in bytes, and by how much it is not."""
    return "yes" if peak <= bound else f"no, by {(peak - bound) / MIB:,.0f} MiB"


def peak_cells(row: dict[str, Any]) -> list[str]:
    """Budget, baseline, bound and peak in MiB."""
    budget, baseline, peak = (row[key] / MIB for key in ("memory_budget", "baseline", "peak"))
    return [f"{size:,.0f}" for size in (budget, baseline, baseline + budget, peak)]


def machine_line(result: dict[str, Any]) -> str:
    """Where, when and with what a file was measured, and its "note" if it has one."""
    m = result["machine"]
    commit = f" (commit {m['commit']})" if m["commit"] else ""
    load = "nothing else running" if m["load"] is None else f"load {m['load']} at the {m.get('load_at', 'start')}"
    note = f" {result['note']}" if "note" in result else ""
    cores = f"{m['cores']} core{'' if m['cores'] == 1 else 's'}"
    return (
        f"Measured {m['date']} on {m['processor']}, {cores}, threads: {m['threads']}, "
        f"{m['memory_gib']:.0f} GiB, {m['system']}, {load}; Python {m['python']}, "
        f"torch {m['torch']}, curvops {m['curvops']}{commit}.{note}"
    )


def is_resolved(ratio: Mapping[str, float]) -> bool:
    """Whether a spread says something: its least value is positive, and within a factor of three of its greatest."""
    return ratio["low"] > 0 and ratio["high"] <= 3 * ratio["low"]


def spread_cell(row: dict[str, Any] | None) -> str:
    """A ratio's median with the least and the greatest, nothing without a row; no number that says nothing."""
    if not row:
        return ""
    ratio = row["ratio"]
    if ratio["low"] <= 0:
        return "not resolved"
    if ratio["low"] == ratio["high"]:  # a count, or a single measurement
        return f"{ratio['median']:,.2f}".removesuffix(".00")
    return f"{ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})"
