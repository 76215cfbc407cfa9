"""The figures of `benchmarks.operators` as tables: one of times, one of peak memory, for each part."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import machine_line, peak_cells, spread_cell, table, tables, within


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
    parts = []
    for subject in dict.fromkeys(row["subject"] for row in rows):
        cells = []
        for row in rows:
            if row["subject"] == subject:
                seconds = f"{row['seconds']['median'] * 1e3:,.1f} ms"
                cells.append([row["what"], spread_cell(row), _goal(row), row["against"], seconds])
        parts.append(f"**{subject}**\n\n{table(['what', 'ratio', 'target', 'to', 'time'], cells)}")
    return "\n\n".join(parts)


def _goal(row: dict[str, Any]) -> str:
    """The target and whether the median meets it."""
    most, least, median = row["target"], row["at_least"], row["ratio"]["median"]
    if least is not None:
        return f"≥ {least:g}: {'met' if median >= least else 'missed'}"
    return "" if most is None else f"≤ {most:g}: {'met' if median <= most else 'missed'}"


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
    header = ["network", "what", "batches", "budget", "baseline", "bound", "peak, MiB", "within the bound"]
    first = ["network", "what", "peak, MiB", "bound", "within the bound"]
    return tables(header, cells, [*first, "baseline", "budget", "batches"])
