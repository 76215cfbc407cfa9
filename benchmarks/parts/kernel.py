"""The tangent kernel's Gram matrix beside contracting the Jacobians of `torch.func`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, jacrev, vmap

import curvops as co
from benchmarks.networks import Problem, build
from benchmarks.parts.diagonal import linearized
from benchmarks.parts.figures import Figures
from benchmarks.routes import difference
from benchmarks.tables import MIB
from benchmarks.timing import Comparison, Spread, seconds

LEAST = 3.0
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
    figures.gradients(build("mlp"), "TangentKernel.to_dense", _dense(linearized(build("mlp"))))
    for network in ("cnn", "mlp"):
        points = len(build(network).inputs)
        figures.peak(network, 10, "kernel", [256 * MIB], result=4 * (10 * points) ** 2)


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
