"""Write the figures of `operators`, `memory` and `working_memory` into their pages:   python -m benchmarks.report

Only the contents of the files are written: machine, date and versions are those of the run. The page's own text stays;
a table goes between the two comments that name it, `<!-- products -->` and `<!-- end products -->`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill as fill_lines
from typing import Any

from benchmarks.operators_tables import part_tables
from benchmarks.tables import MIB, machine_line, peak_cells, spread_cell, table, tables, within

UNIT = "gradient"
PAGE = "docs/benchmarks.md"
RESIDENT = {
    "resnet": {
        "products": "12 products",
        "solve": "a solve of 4 columns",
        "evidence": "log evidence",
        "sample": "4 draws",
        "predict": "predictions at 8 images",
        "mode": "the linear mode",
    },
    "factors": {
        "kfac": "KFAC and its log evidence",
        "kfac predict": "predictions at 64 images with KFAC",
        "ekfac predict": "EKFAC and its predictions",
    },
}
"""What `benchmarks.working_memory` measures on each network, in words."""
MEASURED = Path(__file__).parent / "measured"
ROOT = Path(__file__).parents[1]


def products_tables(result: dict[str, Any]) -> str:
    """Products, engines and other packages, as `benchmarks.products` found them."""
    networks, columns = result["networks"], result["settings"]["columns"]
    parts = ["### Products, in gradients", "", _products(networks, columns)]
    parts += ["", _notes(result), "", "### The engines, forced", "", _engines(networks)]
    others = sorted({row["route"] for n in networks for row in n["rows"] if row["route"].startswith("curvlinops")})
    for other in others:
        parts += ["", f"### Beside {other}, in one process", "", _beside(networks, other)]
    return "\n".join(parts)


def speed(result: dict[str, Any]) -> str:
    """Products in short: their gradients with ten outputs, beside curvlinops."""
    ten = {n["network"]: n for n in result["networks"] if n["outputs"] == 10}
    columns = result["settings"]["columns"]
    routes = {
        "one vector, the engine chosen by cost": ("cached", 1),
        "one vector, recorded autodiff": ("autodiff", 1),
        "one vector, streamed": ("streaming", 1),
        f"a vector in a block of {columns}, same engine": ("cached", columns),
    }
    names = {"mlp": "MLP 784-512-512-10", "cnn": "CNN", "resnet": "ResNet-18"}
    heads = ["GGN product", *(f"{name}, N = {ten[key]['points']:,}" for key, name in names.items())]
    rows = [[what, *(_median(_row(ten[key], *at)) for key in names)] for what, at in routes.items()]
    other = next(row["route"] for row in ten["mlp"]["rows"] if row["route"].startswith("curvlinops"))
    theirs = [_row(ten[key], other) for key in names]
    times = [_row(ten[key], "cached", against=other) for key in names]
    block = _row(ten["mlp"], "cached", columns, against=other)
    text = (
        f"A product of {other} with one vector takes {_listed([_median(row) for row in theirs])} gradients. Measured "
        f"in the same process, curvops is {_listed([_times_as_fast(row) for row in times])} times as fast, and in "
        f"blocks of {columns} on the MLP {_times_as_fast(block)} times."
    )
    return f"{table(heads, rows)}\n\n{fill_lines(text, 118)}"


def _median(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['ratio']['median']:.2f}"


def _times_as_fast(row: dict[str, Any] | None) -> str:
    assert row is not None
    return f"{1 / row['ratio']['median']:.1f}"


def _listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _products(networks: list[dict[str, Any]], columns: int) -> str:
    header = ["network", "C", "N", "D", "one gradient", "cached", "served by", "streaming", "no memory"]
    header += ["cached / streaming", "linearize", "first product", f"K = {columns}, a vector"]
    rows = []
    for n in networks:
        cached = _row(n, "cached") or {}
        cells = [spread_cell(cached), cached.get("engine", ""), spread_cell(_row(n, "streaming"))]
        cells += [spread_cell(_row(n, "streaming, no memory"))]
        cells += [spread_cell(_row(n, "cached", against="streaming"))]
        cells += [spread_cell(_row(n, route)) for route in ("linearize", "first product")]
        cells += [spread_cell(_row(n, "cached", columns))]
        unit = f"{n['unit_seconds']['median'] * 1e3:.1f} ms"
        rows.append([*_name(n), f"{n['points']:,}", f"{n['parameters']:,}", unit, *cells])
    at = header[:2]
    parts = [[*at, "cached", "served by", "streaming", "cached / streaming"]]
    parts += [[*at, "no memory", "linearize", "first product", header[-1]], [*at, "one gradient", "N", "D"]]
    return tables(header, rows, *parts)


def _notes(result: dict[str, Any]) -> str:
    pairs = result["settings"]["pairs"]
    budgets = sorted({n["memory_budget"] for n in result["networks"]})
    budget = " to ".join(f"{b / 2**20:,.0f} MiB" for b in {budgets[0], budgets[-1]})
    return (
        f"Each figure is from {pairs} pairs of runs ({max(1, pairs // 2)} for blocks and builds) in float32, with a "
        f"memory budget of {budget}. *Cached* is a product with one vector once the caches are built. *Streaming* is "
        "`engine='streamed'`, which keeps nothing between products. *No memory* is `memory_budget=0`: products with J "
        "and with Jᵀ then share no pass. *Linearize* is the call of `co.linearize`. *First product* is the first one "
        "on a fresh linearisation, with everything that it triggers."
    )


def _engines(networks: list[dict[str, Any]]) -> str:
    rows = []
    for n in networks:
        for engine in ("autodiff", "layerwise"):
            row = _row(n, engine)
            if row is None:
                continue
            size = f"{row['bytes'] / 2**20:,.0f} MiB"
            cost = [row["note"], ""] if "note" in row else [spread_cell(row), spread_cell(_row(n, f"{engine}: build"))]
            rows.append([*_name(n), engine, *cost, size])
    return table(["network", "C", "engine", "product", "build", "keeps"], rows)


def _beside(networks: list[dict[str, Any]], other: str) -> str:
    rows = []
    for n in networks:
        for columns in sorted({row["columns"] for row in n["rows"] if row["route"] == other}):
            theirs, ours = _row(n, other, columns), _row(n, "cached", columns)
            beside = _row(n, "cached", columns, against=other)
            rows.append([*_name(n), str(columns), spread_cell(theirs), spread_cell(ours), _inverse(beside)])
    header = ["network", "C", "K", f"{other}, gradients a vector", "curvops, gradients a vector", "times as fast"]
    return table(header, rows)


def memory_table(result: dict[str, Any]) -> str:
    """Peaks and bounds of one file of `benchmarks.memory`."""
    rows = []
    for row in result["rows"]:
        verdict = within(row["peak"], row["baseline"] + row["memory_budget"])
        sizes = [str(row["columns"]), str(row["batches"]), *peak_cells(row)]
        rows.append([*_name(row), *sizes, row["engine"], verdict])
    header = ["network", "C", "K", "batches", "budget", "baseline", "bound", "peak", "served by", "within the bound"]
    text = (
        "Peak resident set in MiB, each in a separate process. *Baseline* is the interpreter with its libraries, "
        "network, data and vectors, and one batch's forward and backward pass. *Bound* is the baseline plus the memory "
        "budget."
    )
    apart = tables(
        header,
        rows,
        ["network", "budget", "peak", "bound", "within the bound", "served by"],
        ["network", "budget", "baseline", "C", "K", "batches"],
    )
    return "\n".join([machine_line(result), "", apart, "", text])


def resident_table(result: dict[str, Any], network: str, names: Mapping[str, str]) -> str:
    """Peaks of one network in `benchmarks.working_memory`, beyond one batch and the results, by budget."""
    rows = [row for row in result["rows"] if row["network"] == network]
    budgets = sorted({row["budget"] for row in rows})
    own = {(row["algorithm"], row["budget"]): row for row in rows}

    def cell(row: dict[str, Any] | None) -> str:
        if row is None:
            return ""
        text = f"{(row['over'] - row['batch'] - row['asked']) / MIB:,.0f}"
        return text if row["over"] <= row["bound"] else f"**{text}**"

    known = {name: text for name, text in names.items() if any(row["algorithm"] == name for row in rows)}
    lines = [[text, *(cell(own.get((name, budget))) for budget in budgets)] for name, text in known.items()]
    batches = sorted({round(row["batch"] / MIB) for row in rows})
    return (
        f"{table(['budget, MiB', *(f'{budget / MIB:,.0f}' for budget in budgets)], lines)}\n\n"
        f"One batch takes {batches[0]} to {batches[-1]} MiB. {machine_line(result)}"
    )


def diagonal(parts: Mapping[str, Any]) -> str:
    """In short, the costs of the exact diagonal and of the tangent kernel, from parts of `benchmarks.operators`."""
    names = {"mlp": "the MLP", "cnn": "the CNN"}
    ours, theirs = {}, {}
    for key in names:
        found = [row for row in parts["laplace"]["times"] if row["subject"].startswith(key) and row["against"] == UNIT]
        ours[key] = next(row for row in found if row["what"] == "DiagonalGGN")
        theirs[key] = min((row for row in found if row is not ours[key]), key=lambda row: row["ratio"]["median"])
    (package,) = {row["what"].partition(", ")[0] for row in theirs.values()}
    backends = dict.fromkeys(f"`{row['what'].partition(', ')[2]}`" for row in theirs.values())
    cost = [f"{row['ratio']['median']:.1f} gradients on {names[key]}" for key, row in ours.items()]
    fits = [f"{row['ratio']['median']:.1f}" for row in theirs.values()]
    gram = next(row for row in parts["kernel"]["times"] if "jacrev" in row["against"])
    threads = parts["laplace"]["machine"]["threads"]
    unit = "one thread" if threads == 1 else f"{threads} threads"
    text = (
        f"The exact diagonal of the GGN takes {_listed(cost)} ({unit}). "
        f"The fastest backend of {package} for it, {' or '.join(backends)}, takes "
        f"{_listed(fits)}. "
        f"The tangent kernel of the CNN is formed {gram['ratio']['median']:.0f} times as fast as by `jacrev`."
    )
    return fill_lines(text, 118)


def pages(result: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The sections that a file of either kind fills, by page and by the name that the page gives them."""
    if result["kind"] == "memory":
        return {PAGE: {"memory": memory_table(result)}}
    if result["kind"] == "working memory":
        known = {row["network"] for row in result["rows"]}
        texts = {key: resident_table(result, key, names) for key, names in RESIDENT.items() if key in known}
        return {"docs/scale.md": {f"resident: {key}": text for key, text in texts.items()}}
    parts = result["parts"]
    found = {PAGE: {f"operators: {name}": part_tables(part) for name, part in parts.items()}}
    if all(parts.get(name, {}).get("times") for name in ("laplace", "kernel")):
        found[PAGE]["diagonal"] = diagonal(parts)
    return found


def fill_pages(result: dict[str, Any]) -> None:
    """Replace the sections of all pages that show these results; print what has no section."""
    for page, texts in pages(result).items():
        for name, text in texts.items():
            try:
                fill(ROOT / page, name, text)
            except ValueError as error:
                print(f"{page}: {error}\n\n{text}\n")


def filled(page: str, name: str, text: str) -> str:
    """The page with a section replaced. Raises ValueError where its two comments are missing."""
    first, last = f"<!-- {name} -->\n", f"<!-- end {name} -->"
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"the page has no section {name!r}: add the lines {first.strip()} and {last} where it goes.")
    return f"{before}{first}\n{text}\n\n{last}{after}"


def fill(path: Path, name: str, text: str) -> None:
    """Replace a section of the page in a file, as `filled` does."""
    path.write_text(filled(path.read_text(encoding="utf-8"), name, text), encoding="utf-8")


def _row(n: dict[str, Any], route: str, columns: int = 1, against: str = UNIT) -> dict[str, Any] | None:
    rows: list[dict[str, Any]] = n["rows"]
    for row in rows:
        if row["route"] == route and row.get("columns", 1) == columns and row.get("against", UNIT) == against:
            return row
    return None


def _name(n: dict[str, Any]) -> list[str]:
    return [n["network"], str(n["outputs"])]


def _inverse(row: dict[str, Any] | None) -> str:
    if not row:
        return ""
    ratio = row["ratio"]
    return f"{1 / ratio['median']:.2f} ({1 / ratio['high']:.2f}–{1 / ratio['low']:.2f})"


def main() -> None:
    """Read the files, write their tables into the pages."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    kept = [MEASURED / f"{name}.json" for name in ("operators", "memory", "working_memory")]
    parser.add_argument("files", type=Path, nargs="*", default=kept, help="what these benchmarks wrote")
    for file in parser.parse_args().files:
        fill_pages(json.loads(file.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
