"""The headline of the field: sampled inference for a ResNet-18 with 100 classes from 50,000 images.

N·C = 5 million, D = 11 million, as in Antorán et al. (2023), "Sampling-based inference for large linear models, with
application to linearised Laplace". What a product takes is measured with all images; draws, a step of MacKay and
predictions are run to their end with fewer, as far as time goes, and what all images would take is computed from the
number of products that they took, and said to be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import curvops as co
from benchmarks.gpu.networks import small_resnet
from benchmarks.gpu.stage import Row, Stage
from benchmarks.networks import SEED, resnet

CLASSES, BATCH, PREDICTED = 100, 500, 1000
DRAWS, RTOL, PRECISION = 8, 1e-2, 1e4
"""Draws of a step of MacKay; the residual of a draw; the prior precision with all images, from which tuning starts."""
FULL, FEWER = 50_000, (1000, 5000)


@dataclass(frozen=True)
class Images:
    """Images 3 × 32 × 32 of blurred patterns under noise, made on the device, batch by batch, anew in every pass.

    Their labels are the teacher's: the pattern, of a hundred, that was drawn; one in ten is random.
    """

    points: int
    device: torch.device
    size: int = 32
    first: int = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator(self.device).manual_seed(SEED)
        coarse = torch.randn(CLASSES, 3, 4, 4, generator=generator, device=self.device)
        patterns = nn.functional.interpolate(coarse, size=self.size, mode="bilinear")
        for start in range(self.first, self.first + self.points, BATCH):
            count = min(BATCH, self.first + self.points - start)
            own = torch.Generator(self.device).manual_seed(SEED + 1 + start)
            teacher = torch.randint(CLASSES, (count,), generator=own, device=self.device)
            noise = torch.randn(count, *patterns.shape[1:], generator=own, device=self.device)
            random = torch.randint(CLASSES, (count,), generator=own, device=self.device)
            chosen = torch.rand(count, generator=own, device=self.device) < 0.1
            yield patterns[teacher] + 2.0 * noise, torch.where(chosen, random, teacher)


def train(stage: Stage, data: Images, epochs: int) -> nn.Module:
    """Return the network after some epochs of Adam."""
    torch.manual_seed(SEED)
    model = (small_resnet if stage.toy else resnet)(CLASSES).to(stage.device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(epochs):
        for x, y in data:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def measure(stage: Stage) -> None:
    """Measure with all images what one pass takes, then whole inference with some, the more the later."""
    full, fewer = (12, (6,)) if stage.toy else (FULL, FEWER)
    size = 8 if stage.toy else 32
    images, begin = Images(full, stage.device, size), stage.clock()
    model = train(stage, images, epochs=1)
    trained = stage.clock() - begin
    data = {n: Images(n, stage.device, size) for n in (full, *fewer)}
    lins: dict[int, co.operators.Linearization] = {}

    def linearised(n: int) -> co.operators.Linearization:
        if n not in lins:
            lins.clear()
            lins[n] = co.linearize(model, data[n], "classification")
        return lins[n]

    def gradient() -> Row:
        loss, parameters = nn.CrossEntropyLoss(reduction="sum"), list(model.parameters())

        def run() -> None:
            for x, y in images:
                torch.autograd.grad(loss(model(x), y), parameters)

        seconds, peak = stage.seconds(run)
        return {"seconds": seconds, "peak": peak, "training an epoch": trained}

    def product(columns: int) -> Row:
        lin = linearised(full)
        G = co.GGN(lin)
        V = torch.ones_like(lin.theta) if columns == 1 else torch.ones(columns, lin.num_parameters).mT.to(lin.theta)
        seconds, peak = stage.seconds(lambda: G @ V)
        return {"seconds": seconds, "peak": peak, "budget": lin.memory_budget, "seconds a vector": seconds / columns}

    def inference(n: int) -> Iterator[tuple[str, Row]]:
        """One draw, a step of MacKay, and predictions, from n images under the prior precision of all, scaled."""
        post = co.laplace(linearised(n), co.GGN, prior_precision=PRECISION * n / full, check_mode=False)
        generator = torch.Generator(stage.device).manual_seed(SEED)
        begin = stage.clock()
        one = post.deviations(1, rtol=RTOL, method="cg", generator=generator)
        residual = float(one.relative_residuals.max())
        yield "a draw", {"seconds": stage.clock() - begin, "products": one.matvecs, "residual": residual}
        begin = stage.clock()
        tuned = co.evidence.mackay(post, samples=DRAWS, steps=1, generator=generator)
        found = {"precision": float(tuned.prior_precision), "products": tuned.tuning.matvecs}
        yield f"a step of MacKay, {DRAWS} draws", {"seconds": stage.clock() - begin, **found}
        begin = stage.clock()
        drawn = post.deviations(DRAWS, rtol=RTOL, method="cg", generator=generator)
        x = torch.cat([x for x, _ in Images(min(PREDICTED, full), stage.device, size, first=full)])
        variance = (lin_outputs(post, x, drawn.draws)).square().mean(-1)
        yield (
            f"error bars of {len(x):,} images from {DRAWS} draws",
            {"seconds": stage.clock() - begin, "products": drawn.matvecs, "median variance": float(variance.median())},
        )

    stage.row(f"a gradient, {full:,} images", gradient)
    one = stage.row(f"a product, {full:,} images", lambda: product(1))
    stage.row(f"a block of {DRAWS}, {full:,} images", lambda: product(DRAWS))
    for n in fewer:
        steps = inference(n)
        while stage.left > 3:
            label: list[str] = []

            def step(steps: Iterator[tuple[str, Row]] = steps, label: list[str] = label) -> Row:
                name, row = next(steps)
                label.append(name)
                all_images = row["products"] * one["seconds"] if one and "seconds" in one else None
                return {"what": name, **row, "seconds with all images, extrapolated": all_images}

            done = sum(row["name"].startswith(f"inference from {n:,} images") for row in stage.rows)
            if done == 3:
                break
            stage.row(f"inference from {n:,} images, part {done + 1}", step)
            if "error" in stage.rows[-1]:
                break


def lin_outputs(post: co.posterior.Laplace, x: Tensor, draws: Tensor) -> Tensor:
    """Return J(x) z for each draw, (N·C, K)."""
    return post.lin.jacobian(x) @ draws.mT
