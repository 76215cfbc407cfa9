"""How do time and memory grow with the images of a ResNet-18?   python -m benchmarks.large_network

Eleven million weights, group normalisation, ten classes and random images of 3 × 32 × 32. The first convolution has
stride 2, which takes a quarter of the usual multiply-adds with the same weights. A draw and products with 64 to 4,096
images, which every pass makes anew: time and peak memory of each, measured in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import curvops as co
from benchmarks import study_page
from benchmarks.machine import run_apart
from benchmarks.networks import resnet
from benchmarks.peak import load_code, peak_bytes
from benchmarks.scale import fit
from benchmarks.tables import MIB, table

POINTS = (64, 256, 1_024, 4_096)
BATCH, BUDGET = 64, 4096 * MIB
MISLABELLED = 0.1


@dataclass(frozen=True)
class Images:
    """Ten blurred patterns under noise, some labels random; a batch at a time, made anew in every pass."""

    points: int
    seed: int = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        patterns = torch.randn(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        patterns = nn.functional.interpolate(patterns, size=32, mode="bilinear")
        for start in range(0, self.points, BATCH):
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + start + 1)
            labels = torch.randint(10, (BATCH,), generator=generator)
            x = patterns[labels] + 2.0 * torch.randn(BATCH, 3, 32, 32, generator=generator)
            random = torch.rand(BATCH, generator=generator) < MISLABELLED
            yield x, torch.where(random, torch.randint(10, (BATCH,), generator=generator), labels)


def network() -> nn.Module:
    """The ResNet-18, from one seed."""
    torch.manual_seed(0)
    return resnet(10, stride=2)


def row(**found: object) -> dict[str, object]:
    """What was found, with the peak so far."""
    return found | {"peak": peak_bytes()}


def one_pass(model: nn.Module, data: Images) -> float:
    """Seconds that the loss's gradient over the data takes."""
    begin, loss = time.perf_counter(), nn.CrossEntropyLoss(reduction="sum")
    for x, y in data:
        torch.autograd.grad(loss(model(x), y), list(model.parameters()))
    return time.perf_counter() - begin


def growth(points: int) -> Iterator[dict[str, object]]:
    """One number of images: what a product with one vector takes, and a draw under a large prior precision."""
    load_code()
    model, data = network().eval(), Images(points)
    one_pass(model, Images(BATCH))
    before, gradient = peak_bytes(), one_pass(model, data)
    lin = co.linearize(model, data, "classification", memory_budget=BUDGET, engine="streamed")
    v = torch.ones_like(lin.theta)
    begin = time.perf_counter()
    _ = co.GGN(lin) @ v
    product = time.perf_counter() - begin
    post = co.laplace(lin, co.GGN, prior_precision=1e3 * points, check_mode=False)
    begin = time.perf_counter()
    drawn = post.deviations(1, method="cg", rtol=0.1, generator=torch.Generator().manual_seed(0))
    seconds = time.perf_counter() - begin
    yield row(points=points, gradient=gradient, product=product, products=drawn.matvecs, seconds=seconds, before=before)


def growth_report(rows: list[dict[str, Any]]) -> str:
    """The table, and the fit of the products' time."""
    cells = [
        [
            f"{row['points']:,}",
            f"{10 * row['points']:,}",
            f"{row['product']:,.1f} s",
            f"{row['product'] / row['gradient']:.2f}",
            f"{row['products']}",
            f"{row['seconds']:,.0f} s",
            f"{(row['peak'] - row['before']) / MIB:,.0f} MiB",
        ]
        for row in rows
    ]
    heads = ["images", "N·C", "a product", "in gradients", "products, one draw", "their time"]
    slope, square = fit([float(row["points"]) for row in rows], [row["product"] for row in rows])
    peaks = [row["peak"] for row in rows]
    return "\n\n".join(
        [
            table([*heads, "peak over one batch's gradient"], cells),
            f"Time of a product on the number of images: {1e3 * slope:.1f} ms an image (R² = {square:.4f}). From the "
            f"first row to the last the peak changes by {(peaks[-1] - peaks[0]) / MIB:+.0f} MiB.",
        ]
    )


STUDY = study_page.Study(
    "large_network",
    __doc__,
    lambda: {"rows": [run_apart("benchmarks.large_network", "--points", n)[-1] for n in POINTS]},
    {"growth": lambda found: growth_report(found["rows"])},
    "docs/scale.md",
    rows={"points": growth},
)

if __name__ == "__main__":
    STUDY.run()
