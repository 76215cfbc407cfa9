"""How do time and memory of inference from draws grow with the data?   python -m benchmarks.scale

Each number of points has its own process, whose batches are drawn anew in every pass, so that none is kept in memory:
products with the GGN, 8 draws of the posterior and the linear model's mode, with nothing kept between products; times
are processor times of one thread. The fit of the time to the number of points and the growth of the peak are printed
next to the figures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import curvops as co
from benchmarks import study_page
from benchmarks.layers import perceptron
from benchmarks.machine import run_apart
from benchmarks.peak import load_code, peak_bytes
from benchmarks.tables import MIB, table

POINTS = (500, 2_000, 10_000, 50_000)
BATCH, DRAWS, ROUNDS, BUDGET = 500, 8, 3, 64 * MIB
WIDTHS = (64, 64, 10)
PAPER = 5_000_000
"""N·C of Antorán et al. 2023 (CIFAR-100, where a product is dearer for its network)."""


@dataclass(frozen=True)
class Stream:
    """Random points and labels, a batch at a time, the same in every pass."""

    points: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, self.points, BATCH):
            generator = torch.Generator().manual_seed(start)
            x = torch.randn(BATCH, WIDTHS[0], generator=generator)
            yield x, x[:, : WIDTHS[-1]].argmax(1)


def measure(points: int) -> dict[str, float]:
    """One row: seconds a product with one vector, products and seconds of draws and mode, peak bytes."""
    torch.manual_seed(0)
    load_code()
    model = perceptron(*WIDTHS).eval()
    lin = co.linearize(model, Stream(points), "classification", memory_budget=BUDGET, engine="streamed")
    G, V = co.GGN(lin), torch.randn(DRAWS, lin.num_parameters).mT
    times = []
    for _ in range(ROUNDS + 1):
        begin = time.process_time()
        _ = G @ V
        times.append((time.process_time() - begin) / DRAWS)
    post = co.laplace(lin, co.GGN, prior_precision=points / 50, check_mode=False)
    begin = time.process_time()
    drawn = post.deviations(DRAWS, method="cg", rtol=1e-2, generator=torch.Generator().manual_seed(0))
    mode = post.linear_mode(rtol=1e-3)
    spent = time.process_time() - begin
    return {
        "points": points,
        "product": sorted(times[1:])[ROUNDS // 2],
        "products": drawn.matvecs + mode.matvecs,
        "seconds": spent,
        "peak": peak_bytes(),
        "parameters": lin.num_parameters,
    }


def fit(x: list[float], y: list[float]) -> tuple[float, float]:
    """The slope of the least-squares line, and R²."""
    a, b = torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)
    slope = ((a - a.mean()) * (b - b.mean())).sum() / (a - a.mean()).square().sum()
    rest = b - b.mean() - slope * (a - a.mean())
    return float(slope), 1 - float(rest.square().sum() / (b - b.mean()).square().sum())


def report(rows: list[dict[str, Any]]) -> str:
    """The table, the fit and what it says of larger data."""
    cells = [
        [
            f"{row['points'] * WIDTHS[-1]:,}",
            f"{row['product'] * 1e3:,.1f} ms",
            f"{row['products']:,}",
            f"{row['seconds']:,.1f} s",
            f"{row['peak'] / MIB:,.0f} MiB",
        ]
        for row in rows
    ]
    outputs = [float(row["points"] * WIDTHS[-1]) for row in rows]
    slope, square = fit(outputs, [row["product"] for row in rows])
    products = max(row["products"] for row in rows)
    hours = slope * PAPER * products / 3600
    grown = (rows[-1]["peak"] - rows[0]["peak"]) / MIB
    return "\n\n".join(
        [
            table(["N·C", "a product", "products, 8 draws and mode", "their time", "peak of the process"], cells),
            f"Time of a product on N·C: {slope * 1e6:.3f} µs an output (R² = {square:.4f}); the peak grows by "
            f"{grown:.0f} MiB from the first row to the last. At N·C = {PAPER:,}, {products:,} products with a vector "
            f"of D = {rows[0]['parameters']:,} would take {hours:.2f} hours on this machine.",
        ]
    )


STUDY = study_page.Study(
    "scale",
    __doc__,
    lambda: {"rows": [run_apart("benchmarks.scale", "--points", n)[-1] for n in POINTS]},
    {"scale": lambda found: report(found["rows"])},
    "docs/scale.md",
    rows={"points": lambda points: [measure(points)]},
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    STUDY.run()
