"""Predictive variances: the cost of a point in gradients or forward passes, also with a gradient in the inputs.

A product J U with U (D, 50) takes 50 D multiply-adds per point in each layer that is applied at one position, whereas a
gradient takes at most 3 D. For fully connected networks the product alone therefore costs at least 17 gradients,
whatever else is done (20.9 for the MLP, whose first layer takes 2 D). The last layer is similar, with a forward pass of
669k multiply-adds: KFAC rotates 513 features into their eigenbasis, 263k, and low rank 50 takes 50 × 5,130: at least
1.4 forward passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import curvops as co
from benchmarks.networks import Problem, build
from benchmarks.parts.diagonal import linearized
from benchmarks.parts.figures import Figures
from benchmarks.timing import alternate

RANK = 50
CURVATURES: dict[str, Callable[[Any], Any]] = {
    "KFAC": lambda lin: co.KFAC(lin, fisher="mc"),
    "diagonal": lambda lin: co.DiagonalGGN(lin, fisher="mc"),
    f"low rank {RANK}": lambda lin: co.low_rank(co.GGN(lin), RANK, generator=torch.Generator().manual_seed(0)),
}
BOUND = {"KFAC": 20.0, "diagonal": 15.0, f"low rank {RANK}": 15.0}  # 2 C and 1.5 C


def measure(figures: Figures) -> None:
    """All weights beside a gradient, the last layer beside a forward pass, gradients in inputs beside a variance."""
    pairs = figures.settings.pairs
    for name in ("mlp", "cnn"):
        problem = build(name)
        few = Problem(problem.name, problem.outputs, problem.model, problem.inputs[:16], problem.targets[:16])
        lin = linearized(problem)
        last = co.linearize(problem.model, problem.batches(), "classification", parameters="last_layer")
        for what, make in CURVATURES.items():
            post = co.laplace(lin, make(lin), 10.0, check_mode=False)
            figures.gradients(problem, f"variances, {what}", _variances(post, problem), BOUND[what])
            beside = alternate(_variances(post, few), _with_gradient(post, few), pairs)
            figures.add(
                problem.label, f"variances with gradients in the inputs, {what}", beside, "variance", target=3.0
            )
            post = co.laplace(last, make(last), 10.0, check_mode=False)
            beside = alternate(_forward(problem), _variances(post, problem), pairs)
            figures.add(problem.label, f"variances of the last layer, {what}", beside, "forward pass", target=1.2)


def _forward(problem: Problem) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return problem.model(problem.inputs)

    return run


def _variances(post: co.posterior.Laplace, problem: Problem) -> Callable[[], object]:
    return lambda: post.predict(problem.inputs).variance


def _with_gradient(post: co.posterior.Laplace, problem: Problem) -> Callable[[], object]:
    def run() -> object:
        x = problem.inputs.clone().requires_grad_()
        return torch.autograd.grad(post.predict(x).variance.sum(), x)

    return run
