"""The door of every public algorithm: its options are put in force, and DTensors are blocks of rows inside."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar, cast

import torch

from curvops.ambient import current_run, running
from curvops.ranks.sharded_vectors import as_blocks, as_dtensors

P = ParamSpec("P")
R = TypeVar("R")


def algorithm(work: Callable[P, R]) -> Callable[P, R]:
    """Make a public function on a matrix, its first argument, an algorithm: its options are in force until it returns.

    These are `progress`, `memory_budget` and `checkpoint` (`curvops.ambient`). Vectors may be DTensors, which become
    blocks inside; the blocks of its result become DTensors again.
    """
    signature = inspect.signature(work)
    first = next(iter(signature.parameters))

    @functools.wraps(work)
    def call(*args: Any, **options: Any) -> R:
        if not args and first in options:
            args = (options.pop(first),)
        distributed = "torch.distributed.tensor" in sys.modules and bool(args) and not current_run().distributed
        any_blocks = False
        if distributed:
            args, options, any_blocks = as_blocks(args, options)
        arguments = {**dict(zip(signature.parameters, args)), **options}
        A, progress, memory_budget = (arguments.get(name) for name in (first, "progress", "memory_budget"))
        if arguments.get("checkpoint") is not None and (any_blocks or getattr(A, "layouts", None) is not None):
            raise ValueError("sharded vectors cannot be saved in a checkpoint: omit checkpoint=.")
        problem = signature, args, options
        with (
            running(work.__name__, A, progress, memory_budget, call=problem, distributed=distributed),
            torch.no_grad() if any_blocks else nullcontext(),
        ):
            result = cast(Any, work)(*args, **options)
        return cast(R, as_dtensors(result)) if distributed else result

    return cast(Callable[P, R], call)
