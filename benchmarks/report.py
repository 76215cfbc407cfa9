"""The measured figures as a page:   python -m benchmarks.report products.json memory.json --output docs/benchmarks.md

Only what the files hold is printed: machine, date and versions are those of the run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

UNIT = "gradient"

INTRODUCTION = """\
# Benchmarks

The unit is the *gradient*: the time of one loss gradient (forward and backward) on the same data, in the same process.
A product with the generalised Gauss–Newton matrix costs at least one forward-mode and one reverse-mode pass.
Every figure is a median over alternating runs (unit, candidate, unit, candidate, ...), ratio by pair; the least and the
greatest ratio stand in brackets.

```
make bench                  # every network, and other packages beside this one
make bench ARGS="-k mlp"
```

The tables below come from `python -m benchmarks.products` and `python -m benchmarks.memory` (`benchmarks/README.md`).
Other packages are installed into an environment of their own, at the versions in `constraints.txt`. Run it on a quiet
machine: a second job on the same cores has made a figure ten times too large.
"""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns line up: text to the left, everything but the first column to the right."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(header))]
    padded = [[c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))] for line in lines]
    rule = [("-" * w) if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [padded[0], rule, *padded[1:]])


def machine_line(result: dict[str, Any]) -> str:
    """Where, when and with what a file was measured."""
    m = result["machine"]
    commit = f" (commit {m['commit']})" if m["commit"] else ""
    return (
        f"Measured {m['date']} on {m['processor']}, {m['cores']} cores, threads: {m['threads']}, "
        f"{m['memory_gib']:.0f} GiB, {m['system']}, load {m['load']} at the start; Python {m['python']}, "
        f"torch {m['torch']}, curvops {m['curvops']}{commit}."
    )


def products_tables(result: dict[str, Any]) -> str:
    """Products, engines and other packages of one file of `benchmarks.products`."""
    networks, columns = result["networks"], result["settings"]["columns"]
    parts = [machine_line(result), "", "### Products, in gradients", "", _products(networks, columns)]
    parts += ["", _notes(result), "", "### The engines, forced", "", _engines(networks)]
    others = sorted({row["route"] for n in networks for row in n["rows"] if row["route"].startswith("curvlinops")})
    for other in others:
        parts += ["", f"### Beside {other}, in one process", "", _beside(networks, other)]
    return "\n".join(parts)


def _products(networks: list[dict[str, Any]], columns: int) -> str:
    header = ["network", "C", "N", "D", "one gradient", "cached", "served by", "streaming", "cached / streaming"]
    header += ["linearize", "first product", f"K = {columns}, a vector"]
    rows = []
    for n in networks:
        cached = _row(n, "cached") or {}
        cells = [_ratio(cached), cached.get("engine", ""), _ratio(_row(n, "streaming"))]
        cells += [_ratio(_row(n, "cached", against="streaming"))]
        cells += [_ratio(_row(n, route)) for route in ("linearize", "first product")]
        cells += [_ratio(_row(n, "cached", columns))]
        unit = f"{n['unit_seconds']['median'] * 1e3:.1f} ms"
        rows.append([*_name(n), f"{n['points']:,}", f"{n['parameters']:,}", unit, *cells])
    return table(header, rows)


def _notes(result: dict[str, Any]) -> str:
    pairs = result["settings"]["pairs"]
    budgets = sorted({n["memory_budget"] for n in result["networks"]})
    budget = " to ".join(f"{b / 2**20:,.0f} MiB" for b in {budgets[0], budgets[-1]})
    return (
        f"{pairs} pairs a figure ({max(1, pairs // 2)} for blocks and builds), float32, memory budget {budget}. "
        "*Cached*: a product with one vector once the caches are built. *Streaming*: `memory_budget=0`. "
        "*Linearize*: the call of `co.linearize`. *First product*: on a fresh linearisation, with all that it triggers."
    )


def _engines(networks: list[dict[str, Any]]) -> str:
    rows = []
    for n in networks:
        for engine in ("autodiff", "layerwise"):
            row = _row(n, engine)
            if row is None:
                continue
            size = f"{row['bytes'] / 2**20:,.0f} MiB"
            cost = [row["note"], ""] if "note" in row else [_ratio(row), _ratio(_row(n, f"{engine}: build"))]
            rows.append([*_name(n), engine, *cost, size])
    return table(["network", "C", "engine", "product", "build", "keeps"], rows)


def _beside(networks: list[dict[str, Any]], other: str) -> str:
    rows = []
    for n in networks:
        for columns in sorted({row["columns"] for row in n["rows"] if row["route"] == other}):
            theirs, ours = _row(n, other, columns), _row(n, "cached", columns)
            beside = _row(n, "cached", columns, against=other)
            rows.append([*_name(n), str(columns), _ratio(theirs), _ratio(ours), _inverse(beside)])
    header = ["network", "C", "K", f"{other}, gradients a vector", "curvops, gradients a vector", "times as fast"]
    return table(header, rows)


def memory_table(result: dict[str, Any]) -> str:
    """Peaks and bounds of one file of `benchmarks.memory`."""
    rows = []
    for row in result["rows"]:
        peak, baseline, budget = (row[key] / 2**20 for key in ("peak", "baseline", "memory_budget"))
        verdict = "yes" if peak <= baseline + budget else f"no, by {peak - baseline - budget:,.0f} MiB"
        sizes = [f"{x:,.0f}" for x in (budget, baseline, baseline + budget, peak)]
        rows.append([*_name(row), str(row["columns"]), str(row["batches"]), *sizes, row["engine"], verdict])
    header = ["network", "C", "K", "batches", "budget", "baseline", "bound", "peak", "served by", "within the bound"]
    text = (
        "Resident set at its peak, MiB, each in a process of its own. *Baseline*: the interpreter with its libraries, "
        "network, data and vectors, and one batch's forward and backward pass. *Bound*: baseline plus memory budget."
    )
    return "\n".join([machine_line(result), "", table(header, rows), "", text])


def page(results: Iterable[dict[str, Any]]) -> str:
    """The whole page from files of either kind, in the order given."""
    sections = {"products": ("## Products", products_tables), "memory": ("## Peak memory", memory_table)}
    parts = [INTRODUCTION]
    for result in results:
        title, section = sections[result["kind"]]
        parts.append(f"{title}\n\n{section(result)}\n")
    return "\n".join(parts)


def _row(n: dict[str, Any], route: str, columns: int = 1, against: str = UNIT) -> dict[str, Any] | None:
    for row in n["rows"]:
        if row["route"] == route and row.get("columns", 1) == columns and row.get("against", UNIT) == against:
            return row
    return None


def _name(n: dict[str, Any]) -> list[str]:
    return [n["network"], str(n["outputs"])]


def _ratio(row: dict[str, Any] | None) -> str:
    if not row:
        return ""
    ratio = row["ratio"]
    return f"{ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})"


def _inverse(row: dict[str, Any] | None) -> str:
    if not row:
        return ""
    ratio = row["ratio"]
    return f"{1 / ratio['median']:.2f} ({1 / ratio['high']:.2f}–{1 / ratio['low']:.2f})"


def main() -> None:
    """Read the files, write the page (or print it)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="what --json of benchmarks.products and .memory wrote")
    parser.add_argument("--output", type=Path, default=None, metavar="FILE", help="default: print")
    arguments = parser.parse_args()
    text = page(json.loads(file.read_text()) for file in arguments.files)
    if arguments.output is None:
        print(text)
    else:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
