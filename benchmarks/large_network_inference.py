"""What does near-exact inference cost for a ResNet-18?   python -m benchmarks.large_network_inference

The network and the images of `large_network.py`, in a process of its own: the effective parameters at a first prior
precision, for which J Jᵀ is formed; the precision from MacKay's update; 8 draws for this precision, the linear model's
mode, and the variances of 64 other images from the draws; time, products and peak after each stage.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import curvops as co
from benchmarks import study_page
from benchmarks.large_network import BUDGET, Images, network, one_pass, row
from benchmarks.machine import run_apart
from benchmarks.peak import load_code
from benchmarks.tables import MIB, table

TEST, EPOCHS = 64, 12
DRAWS, START, STEPS, XTOL = 8, 10.0, 15, 0.01
"""Draws; the prior precision that tuning starts from, its most steps and its relative accuracy."""


def train(model: nn.Module, data: Images) -> None:
    """A few epochs of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loss = nn.CrossEntropyLoss()
    for _ in range(EPOCHS):
        for x, y in data:
            optimizer.zero_grad()
            loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def inference(images: int) -> Iterator[dict[str, object]]:
    """The stages, a line each."""
    load_code()
    model, data = network(), Images(images)
    train(model, data)
    model.eval()
    yield row(stage="training", gradient=one_pass(model, data), images=images)
    lin = co.linearize(model, data, "classification", memory_budget=BUDGET)
    post = co.laplace(lin, co.GGN, prior_precision=START, check_mode=False)
    generator = torch.Generator().manual_seed(0)
    begin = time.perf_counter()
    first = post.effective_parameters()
    yield row(stage="J Jᵀ", seconds=time.perf_counter() - begin, products=0, gamma=float(first.value))
    begin = time.perf_counter()
    post = co.evidence.mackay(post, samples=None, steps=STEPS, xtol=XTOL)
    steps = post.tuning.steps
    yield row(
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
    yield row(
        stage="draws",
        seconds=time.perf_counter() - begin,
        products=drawn.matvecs,
        residual=float(drawn.relative_residuals.max()),
    )
    begin = time.perf_counter()
    mode = post.linear_mode(rtol=1e-3)
    yield row(stage="mode", seconds=time.perf_counter() - begin, products=mode.matvecs, reason=mode.reason.name)
    begin = time.perf_counter()
    (test,) = [x for x, _ in Images(TEST, seed=1)]
    variances = (lin.jacobian(test) @ drawn.draws.mT).square().mean(1)
    yield row(stage="variances", seconds=time.perf_counter() - begin, products=DRAWS, median=float(variances.median()))


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


STUDY = study_page.Study(
    "large_network_inference",
    __doc__,
    lambda images: {"rows": run_apart("benchmarks.large_network_inference", "--stages", images)},
    {"inference": lambda found: inference_report(found["rows"])},
    "docs/scale.md",
    rows={"stages": inference},
    options={"images": (512, "that inference is from")},
)

if __name__ == "__main__":
    STUDY.run()
