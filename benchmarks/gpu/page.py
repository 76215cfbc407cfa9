"""The tables of docs/gpu.md: what products will take at least, and what was measured where a card was to be had."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import curvops as co
from benchmarks.gpu.counts import H100, Counts, count
from benchmarks.gpu.networks import NETWORKS, build
from benchmarks.gpu.products import CELLS, WARM, vectors
from benchmarks.machine import facts
from benchmarks.report import fill
from benchmarks.tables import MIB, table, tables

PAGE = "docs/gpu.md"
COUNTED = {"mlp": 64, "cnn": 16, "resnet": 4, "vit": 1, "gpt2-lora": 1}
"""Points at which a call is counted on the CPU, and twice as many: what it launches and moves is affine in them."""
FEW = 100
"""Outputs up to which the rows of the layerwise engine are counted, too."""


def predict(folder: Path) -> None:
    """Count what a gradient and a warm product launch, move and multiply, in the sizes of the GPU run."""
    rows = []
    for name, outputs in CELLS:
        for engine in ("autodiff", *(("layerwise",) if outputs <= FEW else ())):
            found = [counts_at(name, outputs, engine, points) for points in (COUNTED[name], 2 * COUNTED[name])]
            points = NETWORKS[name][1][0]
            gradient, product = (few.at(COUNTED[name], more, points) for few, more in zip(*found))
            counted = {"gradient": asdict(gradient), "product": asdict(product)}
            rows.append({"network": name, "outputs": outputs, "points": points, "engine": engine, **counted})
            print(rows[-1], flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": facts(torch.get_num_threads()), "rows": rows}, indent=1)
    (folder / "counts.json").write_text(text + "\n")


def counts_at(name: str, outputs: int, engine: Any, points: int) -> tuple[Counts, Counts]:
    """Return the counts of a gradient, and of a product whose engine has been built."""
    problem = build(name, outputs, False, torch.device("cpu"), points)
    G = co.GGN(co.linearize(problem.model, problem.batches(), "classification", engine=engine))
    v = vectors(problem, 1)
    for _ in range(WARM):
        G @ v
    return count(problem.unit()), count(lambda: G @ v)


def fill_page(folder: Path) -> None:
    """Write the tables into the page; those of stages that have not been run say so."""
    measured = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    counted = measured.pop("counts")
    products = {row["name"]: row for row in measured.get("products", {"rows": []})["rows"] if "error" not in row}
    fill(Path(PAGE), "predicted", predicted_table(counted["rows"], products))
    fill(Path(PAGE), "measured", measured_tables(measured))


def predicted_table(rows: list[dict[str, Any]], products: dict[str, Any]) -> str:
    """Return the least time of a product beside the measured one, and from how many points on Python is not slower."""
    lines = []
    for row in rows:
        product, gradient = Counts(**row["product"]), Counts(**row["gradient"])
        seconds = H100.seconds(product)
        kernels = max(seconds["memory"], seconds["arithmetic"])
        label = f"{row['network']}, C = {row['outputs']:,}"
        found = products.get(f"{label}: GGN, K = 1", {})
        same = found.get("engine", "").startswith({"autodiff": "recorded"}.get(row["engine"], row["engine"]))
        least = max(seconds.values()) / max(H100.seconds(gradient).values())
        lines.append(
            [
                f"{label}, {row['points']:,} points",
                row["engine"],
                f"{product.launches:,.0f}",
                f"{product.bytes / 1e9:,.2f} GB",
                f"{product.multiply_adds / 1e9:,.1f} G",
                f"{1e3 * max(seconds.values()):,.2f} ms",
                f"{least:.2f}",
                max(seconds, key=lambda key: seconds[key]),
                f"{row['points'] * seconds['launches'] / kernels:,.0f}",
                f"{1e3 * found['seconds']:,.2f} ms" if same else "",
            ]
        )
    counted, timed = ["launches", "moved", "multiply-adds"], ["least time", "in gradients", "spent on"]
    head = ["network", "engine", *counted, *timed, "kernels outlast Python from", "measured"]
    return tables(head, lines, [*head[:2], *counted], [*head[:2], *head[5:]])


def measured_tables(measured: dict[str, Any]) -> str:
    """Return what each stage found, a table a stage, with its card."""
    if not measured:
        return "Nothing has been measured on a GPU yet: every figure of this project is from a CPU."
    parts = []
    for name, found in measured.items():
        machine = found["machine"]
        rows = [[row["name"], *cells(row)] for row in found["rows"]]
        title = f"### {name.capitalize()}, on {machine['card']}"
        note = "" if found["ended"] else "\n\nThe stage did not end: rows are missing, or failed."
        where = f"Torch {machine['torch']}, {machine['date']}, commit {machine['commit'] or 'unknown'}."
        parts.append(f"{title}\n\n{table(['', 'time', 'gradients', 'peak', ''], rows)}{note}\n\n{where}")
    return "\n\n".join(parts)


def cells(row: dict[str, Any]) -> list[str]:
    """Return time, gradients, peak and what else a row found, as text."""
    if "error" in row:
        return ["", "", "", f"failed: {row['error'].splitlines()[0][:100]}"]
    shown = {key: value for key, value in row.items() if isinstance(value, int | float | str)}
    time, gradients, peak = (shown.pop(key, None) for key in ("seconds", "gradients", "peak"))
    rest = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in shown.items())
    return [
        "" if time is None else f"{1e3 * time:,.2f} ms",
        "" if gradients is None else f"{gradients:.2f}",
        "" if not peak else f"{peak / MIB:,.0f} MiB",
        ", ".join(text for text in rest if not text.startswith(("name", "took"))),
    ]
