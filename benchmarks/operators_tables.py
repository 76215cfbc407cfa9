"""The figures of `benchmarks.operators` as tables: one of times, one of peak memory, for each part."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import machine_line, peak_cells, spread_cell, table, within


def part_tables(part: dict[str, Any]) -> str:
    """The tables of one part, with where it was measured."""
    parts = [machine_line(part)]
    if part["times"]:
        parts.append(_times(part["times"]))
    if notes := _notes(part["times"]):
        parts.append(notes)
    if part["peaks"]:
        parts.append(_peaks(part["peaks"]))
    return "\n\n".join(parts)


def _times(rows: list[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        seconds = f"{row['seconds']['median'] * 1e3:,.1f} ms"
        cells.append([row["subject"], row["what"], spread_cell(row), row["against"], *_goal(row), seconds])
    return table(["", "what", "ratio", "to", "target", "met", "time"], cells)


def _goal(row: dict[str, Any]) -> list[str]:
    """The target and whether the median meets it."""
    most, least, median = row["target"], row["at_least"], row["ratio"]["median"]
    if least is not None:
        return [f"≥ {least:g}", "yes" if median >= least else "no"]
    if most is None:
        return ["", ""]
    return [f"≤ {most:g}", "yes" if median <= most else "no"]


def _notes(rows: list[dict[str, Any]]) -> str:
    """One sentence for each note: which rows it is about, and what it says."""
    about: dict[str, list[str]] = {}
    for row in rows:
        if row["note"]:
            about.setdefault(row["note"], []).append(row["what"])
    return "\n".join(f"- {', '.join(dict.fromkeys(names))}: {note}." for note, names in about.items())


def _peaks(rows: list[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        verdict = within(row["peak"], row["baseline"] + row["memory_budget"])
        cells.append([row["subject"], row["what"], str(row["batches"]), *peak_cells(row), verdict])
    return table(["", "what", "batches", "budget", "baseline", "bound", "peak, MiB", "within the bound"], cells)
