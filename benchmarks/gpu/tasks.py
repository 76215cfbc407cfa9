"""Whole tasks on the GPU beside other packages: those of `benchmarks.tasks` that somebody would bring there."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.stage import Row, Stage
from benchmarks.machine import peer_version
from benchmarks.networks import cnn
from benchmarks.tasks.of_matrices import digits
from benchmarks.tasks.of_posteriors import images
from benchmarks.tasks.study import TASKS

NAMES = ("last-layer", "kfac", "lora", "resnet", "draws", "logdet", "diagonal", "spectrum")
"""Tasks in the order in which they are measured."""
TOY = {"draws": lambda: digits(40), "kfac": lambda: images(cnn(10), 28, 1, 16, 4, epochs=1)}
"""The tasks of a rehearsal, with smaller problems."""


def measure(stage: Stage) -> None:
    """Measure ours of every task, then the others', whose programs may not end within the stage's limit."""
    for whose in ("ours", "theirs"):
        for name in TOY if stage.toy else NAMES:
            stage.row(f"{name}, {whose}", lambda name=name, whose=whose: run(stage, name, whose))  # type: ignore[misc]


def run(stage: Stage, name: str, whose: str) -> Row:
    """Return seconds and peak of a task's program, from the trained network to the answer, with its quality."""
    task = TASKS[name]
    if whose == "theirs":
        if peer_version(task.peer) is None:
            return {"skipped": f"{task.peer} is not installed"}
        for module in task.modules:
            import_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problem = on_device(prepared(name, stage.toy), stage.device)
        program = getattr(task, whose)
        # What the other packages' programs draw is on the default device.
        with torch.device(stage.device) if whose == "theirs" else contextlib.nullcontext():
            seconds, peak = stage.seconds(lambda: program(problem), most=3)
            answer = program(problem)
        return {"seconds": seconds, "peak": peak, "quality": task.quality(problem, answer)}


@cache
def prepared(name: str, toy: bool) -> Any:
    """Return a task's problem, on the CPU: a DataLoader that shuffles draws on the CPU, whatever the default device."""
    return TOY[name]() if toy else TASKS[name].prepare()


def on_device(problem: Any, device: torch.device) -> Any:
    """Return a problem with its model and tensors on a device."""
    held = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
    moved = {name: value.to(device) for name, value in held.items() if isinstance(value, Tensor | nn.Module)}
    return dataclasses.replace(problem, **moved)
