"""Where the time of a product, of an iteration of block CG and of a prediction goes: kernels, launches, idle time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import curvops as co
from benchmarks.gpu.networks import build
from benchmarks.gpu.products import vectors
from benchmarks.gpu.stage import Row, Stage

SHOWN, RUNS, ITERATIONS = 12, 3, 10
"""Kernels that a row names; runs that are profiled; iterations of CG in one run."""


def measure(stage: Stage) -> None:
    """Profile three calls on the MLP, where Python is slow beside the kernels, and on the ResNet-18."""
    for name in ("mlp",) if stage.toy else ("mlp", "resnet"):
        for what, prepare in list(CALLS.items())[: 1 if stage.toy else None]:

            def profiled(prepare: Callable[..., Any] = prepare, name: str = name) -> Row:
                return shares(stage, *prepare(build(name, 10, stage.toy, stage.device)))

            stage.row(f"{name}: {what}", profiled)


def product(problem: Any) -> tuple[Callable[[], object], int]:
    """Return a GGN product, warm."""
    G, v = co.GGN(co.linearize(problem.model, problem.batches(), "classification")), vectors(problem, 1)
    return lambda: G @ v, 1


def iteration(problem: Any) -> tuple[Callable[[], object], int]:
    """Return some iterations of block CG with 8 right-hand sides, and their number."""
    P = co.GGN(co.linearize(problem.model, problem.batches(), "classification")).add_diagonal(1.0)
    B = vectors(problem, 8)
    return lambda: co.linalg.cg(P, B, maxiter=ITERATIONS, rtol=1e-12), ITERATIONS


def prediction(problem: Any) -> tuple[Callable[[], object], int]:
    """Return the variances of 64 points under KFAC."""
    lin = co.linearize(problem.model, problem.batches(), "classification")
    post, x = co.laplace(lin, co.KFAC, 1.0, check_mode=False), problem.inputs[:64]
    return lambda: post.predict(x).variance, 1


CALLS = {
    "a GGN product": product,
    "an iteration of block CG, K = 8": iteration,
    "the variances of 64 points under KFAC": prediction,
}


def shares(stage: Stage, call: Callable[[], object], parts: int) -> Row:
    """Return seconds, launches and busy time of a call (of one of its parts), and the kernels that take most of it."""
    runs = 1 if stage.toy else RUNS
    for _ in range(runs):
        call()
    cuda = stage.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    seconds, _ = stage.seconds(call)
    with profile(activities=activities) as found:
        for _ in range(runs):
            call()
        stage.clock()
    device = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    events = [event for event in found.key_averages() if event.device_type == device]
    busy = {event.key: (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6 for event in events}
    total, each = sum(busy.values()), runs * parts
    top = sorted(events, key=lambda event: -busy[event.key])[:SHOWN]
    return {
        "seconds": seconds / parts,
        "launches": sum(event.count for event in events) / each,
        "busy seconds": total / each,
        "share without work": max(0.0, 1 - total / runs / seconds),
        "kernels": [
            {"name": event.key[:120], "count": event.count / each, "seconds": busy[event.key] / each} for event in top
        ],
    }
