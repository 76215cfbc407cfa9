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
        context = nullcontext()
        if distributed:
            args, options, any_blocks = as_blocks(args, options)
            context = torch.no_grad() if any_blocks else context
        A, progress, memory_budget = args[0] if args else None, options.get("progress"), options.get("memory_budget")
        problem = signature, args, options
        with running(work.__name__, A, progress, memory_budget, call=problem, distributed=distributed), context:
            result = cast(Any, work)(*args, **options)
        return cast(R, as_dtensors(result)) if distributed else result

    return cast(Callable[P, R], call)
