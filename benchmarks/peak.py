"""One process of the memory benchmark, started by `benchmarks.memory`: it runs one task, then prints its peak."""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import curvops as co
from benchmarks.machine import resident
from benchmarks.networks import Problem, build


def peak_bytes() -> int:
    """The greatest resident set of this process so far.

    Linux says it of the program itself; elsewhere it starts from what the starting process had.
    """
    if Path("/proc/self/status").exists():
        return resident("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def load_code() -> None:
    """Products of a tiny network, so that the code which torch and the library load lazily counts in every process."""
    layers = nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 2)
    data = [(torch.randn(2, 1, 4, 4), torch.zeros(2, dtype=torch.long))]
    for engine in ("autodiff", "layerwise"):
        lin = co.linearize(nn.Sequential(*layers).eval(), data, "classification", memory_budget=2**20, engine=engine)
        G = co.GGN(lin)
        for _ in range(6):
            G @ torch.ones(lin.num_parameters, 2)


def baseline(problem: Problem, batches: list[tuple[Tensor, Tensor]], V: Tensor) -> str:
    """Forward and backward pass of the largest batch, beside the vectors a product needs: θ, V and its result."""
    theta = torch.cat([parameter.detach().flatten() for parameter in problem.parameters])
    result = torch.zeros_like(V).add_(theta[:1])  # written to, so that its pages are resident
    inputs, targets = max(batches, key=lambda batch: len(batch[0]))
    loss = nn.CrossEntropyLoss(reduction="sum")
    for _ in range(2):
        outputs = problem.model(inputs).flatten(0, -2)
        gradient = torch.autograd.grad(loss(outputs, targets.flatten()), problem.parameters)
    del gradient, theta, result
    return ""


def products(problem: Problem, batches: list[tuple[Tensor, Tensor]], V: Tensor, options: argparse.Namespace) -> str:
    """Products within a memory budget, enough of them to build what the library wants to keep."""
    lin = co.linearize(
        problem.model, batches, "classification", memory_budget=options.memory_budget, engine=options.engine
    )
    G = co.GGN(lin)
    for _ in range(options.products):
        G @ V
    in_use = lin.plan.in_use
    return "+".join(f"{kind} {in_use[kind]}/{len(batches)}" for kind in sorted(in_use)) or "streamed"


def operator(problem: Problem, batches: list[tuple[Tensor, Tensor]], V: Tensor, options: argparse.Namespace) -> str:
    """Builds one of `OPERATORS` within a memory budget."""
    lin = co.linearize(problem.model, batches, "classification", memory_budget=options.memory_budget)
    _ = OPERATORS[options.operator](lin)
    return ""


OPERATORS: dict[str, Callable[[co.operators.Linearization], object]] = {
    "products": lambda lin: [co.GGN(lin) @ torch.ones_like(lin.theta) for _ in range(8)],
    "sampled": lambda lin: co.GGN(lin, mc_samples=1) @ torch.ones_like(lin.theta),
    "diagonal": co.DiagonalGGN,
    "kfac": co.KFAC,
    "kernel": lambda lin: co.TangentKernel(lin).to_dense(),
}


def main() -> None:
    """Run the baseline, or products (or what --operator names) within --memory-budget."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peak", description=__doc__)
    parser.add_argument("network")
    parser.add_argument("--outputs", type=int, default=10)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--columns", type=int, default=1)
    parser.add_argument("--products", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--operator", default=None, choices=[*OPERATORS], help="built once; without it: products")
    parser.add_argument("--memory-budget", type=int, default=None, help="without it: the baseline")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    problem = build(options.network, options.outputs)
    load_code()
    batches, V = problem.batches(options.batches), problem.block(options.columns)
    if options.memory_budget is None:
        engine = baseline(problem, batches, V)
    else:
        run = products if options.operator is None else operator
        engine = run(problem, batches, V, options)
    print(json.dumps({"peak": peak_bytes(), "engine": engine}))


if __name__ == "__main__":
    main()
