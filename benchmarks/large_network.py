"""What does near-exact inference cost for a ResNet-18?   python -m benchmarks.large_network --page docs/scale.md

Eleven million weights, group normalisation, ten classes and random images of 3 × 32 × 32, whose first convolution has
stride 2: a quarter of the usual multiply-adds with the same weights. Each line comes from a process of its own;
`--growth` and `--inference` run one part alone.

Growth: a draw and products from 64 to 4,096 images made anew in every pass, time and peak memory of each. Inference
from --images: the effective parameters at a first prior precision, for which J Jᵀ is formed; the precision by MacKay's
update; 8 draws under it, the linear model's mode, and the variances of 64 other images from the draws; time, products
and peak after each stage.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import curvops as co
from benchmarks.machine import facts, of_its_own
from benchmarks.networks import resnet
from benchmarks.peak import load_code, peak_bytes
from benchmarks.report import publish
from benchmarks.scale import fit
from benchmarks.tables import MIB, machine_line, table

POINTS = (64, 256, 1_024, 4_096)
BATCH, BUDGET = 64, 4096 * MIB
TEST, EPOCHS = 64, 12
DRAWS, START, STEPS, XTOL = 8, 10.0, 15, 0.01
"""Draws; the prior precision that tuning starts from, its most steps and its relative accuracy."""
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


def say(**found: object) -> None:
    """A line of JSON with the peak so far."""
    print(json.dumps(found | {"peak": peak_bytes()}), flush=True)


def one_pass(model: nn.Module, data: Images) -> float:
    """Seconds that the loss's gradient over the data takes."""
    begin, loss = time.perf_counter(), nn.CrossEntropyLoss(reduction="sum")
    for x, y in data:
        torch.autograd.grad(loss(model(x), y), list(model.parameters()))
    return time.perf_counter() - begin


def growth(points: int) -> None:
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
    post = co.laplace(lin, prior_precision=1e3 * points, check_mode=False)
    begin = time.perf_counter()
    drawn = post.deviations(1, method="cg", rtol=0.1, generator=torch.Generator().manual_seed(0))
    seconds = time.perf_counter() - begin
    say(points=points, gradient=gradient, product=product, products=drawn.matvecs, seconds=seconds, before=before)


def train(model: nn.Module, data: Images) -> None:
    """A few epochs of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loss = nn.CrossEntropyLoss()
    for _ in range(EPOCHS):
        for x, y in data:
            optimizer.zero_grad()
            loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def inference(images: int) -> None:
    """The stages, a line each."""
    load_code()
    model, data = network(), Images(images)
    train(model, data)
    model.eval()
    say(stage="training", gradient=one_pass(model, data), images=images)
    lin = co.linearize(model, data, "classification", memory_budget=BUDGET)
    post = co.laplace(lin, prior_precision=START, check_mode=False)
    generator = torch.Generator().manual_seed(0)
    begin = time.perf_counter()
    first = post.effective_parameters()
    say(stage="J Jᵀ", seconds=time.perf_counter() - begin, products=0, gamma=float(first.value))
    begin = time.perf_counter()
    post = co.evidence.mackay(post, samples=None, steps=STEPS, xtol=XTOL)
    steps = post.tuning.steps
    say(
        stage="prior precision",
        seconds=time.perf_counter() - begin,
        products=post.tuning.matvecs,
        path=[float(step.prior_precision) for step in steps] + [float(post.prior_precision)],
        gamma=float(steps[-1].effective_parameters),
        ending=post.tuning.ending.name,
        engine=str(lin.plan.in_use),
    )
    begin = time.perf_counter()
    drawn = post.deviations(DRAWS, rtol=1e-2, generator=generator)
    say(
        stage="draws",
        seconds=time.perf_counter() - begin,
        products=drawn.matvecs,
        residual=float(drawn.relative_residuals.max()),
    )
    begin = time.perf_counter()
    mode = post.linear_mode(rtol=1e-3)
    say(stage="mode", seconds=time.perf_counter() - begin, products=mode.matvecs, reason=mode.reason.name)
    begin = time.perf_counter()
    (test,) = [x for x, _ in Images(TEST, seed=1)]
    variances = (lin.jacobian(test) @ drawn.draws.mT).square().mean(1)
    say(stage="variances", seconds=time.perf_counter() - begin, products=DRAWS, median=float(variances.median()))


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


def inference_report(rows: list[dict[str, Any]]) -> str:
    """A row a stage, and what was found."""
    trained, first, tuned, _, mode, tested = rows
    cells = [
        [
            row["stage"],
            f"{row['products']:,}",
            f"{row['seconds']:,.0f} s",
            f"{row['seconds'] / trained['gradient']:,.0f}",
            f"{(row['peak'] - trained['peak']) / MIB:,.0f} MiB",
        ]
        for row in rows[1:]
    ]
    path = ", ".join(f"{alpha:.3g}" for alpha in tuned["path"])
    return "\n\n".join(
        [
            table(["stage", "products", "time", "in gradients of all data", "peak over training"], cells),
            f"{trained['images']} images; prior precisions {path} ({tuned['ending']}), {first['gamma']:.1f} effective "
            f"parameters at the first and {tuned['gamma']:.1f} at the last; the mode: {mode['reason']}; median "
            f"variance of an output at {TEST} other images {tested['median']:.3g}. "
            f"Memory budget: {BUDGET / MIB:,.0f} MiB.",
        ]
    )


def main() -> None:
    """Run the parts, each line in a process of its own, and print or write the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large_network", description=__doc__)
    parser.add_argument("--points", type=int, default=None, help="one row of growth, as JSON")
    parser.add_argument("--stages", action="store_true", help="the stages of inference, as JSON")
    parser.add_argument("--images", type=int, default=512, help="that inference is from")
    parser.add_argument("--growth", action="store_true", help="this part alone")
    parser.add_argument("--inference", action="store_true", help="this part alone")
    parser.add_argument("--page", type=Path, default=None, metavar="FILE", help="whose sections are filled")
    arguments = parser.parse_args()
    if arguments.points is not None:
        growth(arguments.points)
    elif arguments.stages:
        inference(arguments.images)
    else:
        machine = machine_line({"machine": facts(torch.get_num_threads())})
        both = arguments.growth == arguments.inference
        if both or arguments.growth:
            rows = [of_its_own("benchmarks.large_network", "--points", n)[-1] for n in POINTS]
            publish(arguments.page, "growth", f"{growth_report(rows)}\n\n{machine}")
        if both or arguments.inference:
            stages = of_its_own("benchmarks.large_network", "--stages", "--images", arguments.images)
            publish(arguments.page, "inference", f"{inference_report(stages)}\n\n{machine}")


if __name__ == "__main__":
    main()
