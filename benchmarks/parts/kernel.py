"""The tangent kernel's Gram matrix compared with contracting the Jacobians of `torch.func`, and in gpytorch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, jacrev, vmap

import curvops as co
from benchmarks.networks import SEED, Problem, build
from benchmarks.parts.diagonal import linearized
from benchmarks.parts.figures import Figures
from benchmarks.routes import difference
from benchmarks.tables import MIB
from benchmarks.timing import Comparison, Spread, alternate, seconds

LEAST, PAIRS = 3.0, 3
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
    figures.gradients(build("mlp"), "TangentKernel.to_dense", _dense(linearized(build("mlp"))))
    for network in ("cnn", "mlp"):
        points = len(build(network).inputs)
        figures.peak(network, 10, "kernel", [256 * MIB], result=4 * (10 * points) ** 2)


def _in_gpytorch(figures: Figures, problem: Problem, lin: co.Linearization) -> None:
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


def _dense(lin: co.Linearization) -> Any:
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
