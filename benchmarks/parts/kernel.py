"""The tangent kernel's Gram matrix compared with contracting the Jacobians of `torch.func`, and in gpytorch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import curvops as co
from benchmarks.networks import SEED, Problem, build, resnet
from benchmarks.parts.diagonal import linearized
from benchmarks.parts.figures import Figures
from benchmarks.routes import difference
from benchmarks.tables import MIB
from benchmarks.timing import Comparison, Spread, alternate, seconds
from curvops.operators.function_space.gram_matrix import gram_cost

LEAST, MOST, PAIRS = 3.0, 1.3, 3
BUDGET, BATCH, IMAGES = 4096 * MIB, 64, (128, 512)
"""The budget and the batches of `benchmarks.large_network`, and the images whose J Jᵀ is counted."""
SLOW = 10_000
"""The gradients of a point in one run above which it is made once."""
CHUNK = 16
"""Points whose Jacobians `torch.func` makes at a time; all of them are kept, 4.0 GiB for the CNN."""
AGAINST = "jacrev and contraction"


def measure(figures: Figures) -> None:
    """The CNN beside jacrev, once each; the MLP, whose Jacobian of 25 GiB fits in no budget here, by peak memory."""
    problem = build("cnn")
    lin = linearized(problem)
    _ = co.TangentKernel(lin).to_dense()  # warm
    _contracted(problem, problem.inputs[:CHUNK])
    kept: dict[str, Tensor] = {}
    ours = seconds(lambda: kept.setdefault("ours", co.TangentKernel(lin).to_dense()))
    theirs = seconds(lambda: kept.setdefault("theirs", _contracted(problem, problem.inputs)))
    again = seconds(lambda: co.TangentKernel(lin).to_dense())
    times = Spread.of([ours, again])
    ratio = Spread(theirs / times.median, theirs / times.high, theirs / times.low)
    note = f"the two differ by {difference(kept['ours'], kept['theirs']):.0e} in relative norm; times as fast"
    figures.add(
        problem.label,
        "TangentKernel.to_dense",
        Comparison(ratio, times, Spread.of([theirs]), 1),
        AGAINST,
        at_least=LEAST,
        note=note,
    )
    _in_gpytorch(figures, problem, lin)
    for counted in (problem, build("mlp"), build("resnet"), *map(_images, IMAGES)):
        _beside_count(figures, counted)
    for network in ("cnn", "mlp"):
        points = len(build(network).inputs)
        figures.peak(network, 10, "kernel", [256 * MIB], result=4 * (10 * points) ** 2)


def _images(points: int) -> Problem:
    """The ResNet-18 with stride 2 on this many images, as `benchmarks.large_network` has it, in batches of 64."""
    problem = build("resnet")
    generator = torch.Generator().manual_seed(SEED)
    inputs, targets = torch.randn(points, *problem.inputs.shape[1:], generator=generator), torch.arange(points) % 10
    return Problem(f"resnet, stride 2, {points} images", 10, resnet(10, stride=2).eval(), inputs, targets)


def _beside_count(figures: Figures, problem: Problem) -> None:
    """Compare J Jᵀ with the gradient of the same data, and that with the gradients which solves count for it."""
    batches = problem.batches(max(1, problem.points // BATCH) if problem.name.startswith("resnet") else 1)
    lin = co.linearize(problem.model, batches, "classification", memory_budget=BUDGET)

    def gradient() -> None:
        for x, y in batches:
            torch.autograd.grad(nn.functional.cross_entropy(problem.model(x), y, reduction="sum"), problem.parameters)

    gradient()
    lin.passes.engines.checked_others(batches[0][0])  # once for a network
    count = gram_cost(lin.plan, problem.points)
    comparison = alternate(gradient, _dense(lin), 1 if count * problem.points > SLOW else PAIRS, warmup=0)
    figures.add(problem.label, "TangentKernel.to_dense", comparison)
    beside = replace(comparison, ratio=comparison.ratio.scaled(1 / count))
    figures.add(problem.label, "TangentKernel.to_dense, counted", beside, f"{count:,.1f} gradients", target=MOST)


def _in_gpytorch(figures: Figures, problem: Problem, lin: co.operators.Linearization) -> None:
    """Compare a new kernel's matrix, with one or several prior precisions, and its gradient in x with the matrix."""
    x, unit = problem.inputs.flatten(1), _dense(lin)
    weights = torch.randn(10 * len(x), 10 * len(x), generator=torch.Generator().manual_seed(SEED))

    def gradient() -> None:
        points = x.clone().requires_grad_()
        (co.gp.LinearizedKernel(lin)(points).to_dense() * weights).sum().backward()

    def matrix(over: str) -> None:
        co.gp.LinearizedKernel(lin, over=over)(x).to_dense()

    for over in ("scalar", "layers", "tensors"):
        what = f"LinearizedKernel, over {over}"
        comparison = alternate(unit, partial(matrix, over), PAIRS)
        figures.add(problem.label, what, comparison, "TangentKernel.to_dense", target=1.0)
    what = "LinearizedKernel with its gradient in x"
    figures.add(problem.label, what, alternate(unit, gradient, PAIRS), "TangentKernel.to_dense", target=4.0)


def _dense(lin: co.operators.Linearization) -> Any:
    return lambda: co.TangentKernel(lin).to_dense()


def _contracted(problem: Problem, inputs: Tensor) -> Tensor:
    """The recipe of torch's tutorial: per-point Jacobians by vmap over jacrev, then a product a parameter."""
    parameters = {name: value.detach() for name, value in problem.model.named_parameters()}

    def one(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(problem.model, values, (x.unsqueeze(0),)).squeeze(0)

    rows = vmap(jacrev(one), (None, 0), chunk_size=CHUNK)(parameters, inputs)
    with torch.no_grad():
        flat = [row.flatten(2).flatten(0, 1) for row in rows.values()]
        total = flat[0] @ flat[0].mT
        for row in flat[1:]:
            total.addmm_(row, row.mT)
    return total
