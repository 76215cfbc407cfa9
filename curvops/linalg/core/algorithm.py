"""The surroundings of an algorithm on a matrix: its options, in force until it returns, and the bytes for its vectors.

Both are those of `curvops.ambient`. The `memories` of an operator are the budgets that its products draw on. An
operator that is not built from a network has none, and without a `memory_budget` nothing limits an algorithm on it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import torch
from linear_operator import LinearOperator

from curvops.ambient import Groups, Memories, columns_at_a_time, current_run, hold, room_in, running
from curvops.linalg.core.solve_routes import SOLVE_VECTORS
from curvops.linalg.core.vectors import Vectors, describe, empty_block, part, product, put
from curvops.ranks.sharded_vectors import as_blocks, as_dtensors

P = ParamSpec("P")
R = TypeVar("R")
Multiply: TypeAlias = Callable[[Vectors], Vectors]

CALLER_VECTORS = 3
"""How many of the `SOLVE_VECTORS` vectors of a block solve its caller holds."""
PRODUCT_VECTORS = 4
"""Vectors per column that a product works with, in addition to its argument and its result."""


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
        A, progress, memory_budget = arguments.get(first), arguments.get("progress"), arguments.get("memory_budget")
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


def memories_of(A: Any) -> Memories:
    """Return the budgets of the networks in A; none for a tensor or a foreign operator."""
    return getattr(A, "memories", frozenset())


@contextmanager
def working(A: Any, least: int = 0, multiply: Multiply | None = None) -> Iterator[tuple[Multiply, int | None]]:
    """Yield A's product and the bytes for further vectors: the caller's bytes, else those left to A's networks.

    In the second case the bytes count as used meanwhile and suffice for at least ``least`` vectors, and blocks are
    multiplied in parts whose own vectors take at most a quarter of the bytes left. In both cases a product that runs
    out of memory is repeated with half of the columns at a time.
    """
    memory_budget = current_run().memory_budget
    multiply, memories = product(A) if multiply is None else multiply, memories_of(A)
    if memory_budget is not None or not memories:
        yield in_parts(multiply, sys.maxsize), memory_budget
        return
    vector = describe(A).vector_bytes
    room = room_in(memories, least * vector) or 0
    inside = max(vector, longest(A) * A.dtype.itemsize)
    width = max(1, room // (4 * PRODUCT_VECTORS * inside))
    budget = max(least * vector, room - PRODUCT_VECTORS * width * inside)
    with hold(memories, budget):
        yield in_parts(multiply, width), budget


def in_parts(multiply: Multiply, width: int) -> Multiply:
    """Return ``multiply`` for blocks of any width, at most ``width`` columns at a time, halved when out of memory."""
    groups = Groups("multiplied", width)
    return lambda V: assembled(groups, V.shape[1], lambda start, stop: multiply(part(V, start, stop)))


def assembled(groups: Groups, count: int, work: Callable[[int, int], Vectors]) -> Vectors:
    """Return the block of ``count`` columns of which ``work(start, stop)`` makes some, group by group."""
    result: Vectors | None = None

    def put_group(start: int, stop: int) -> None:
        nonlocal result
        block = work(start, stop)
        if stop - start == count:
            result = block
            return
        result = empty_block(block, count) if result is None else result
        put(result, start, block)

    groups.each(count, put_group)
    assert result is not None
    return result


def holding(A: Any, nbytes: int) -> AbstractContextManager[Any]:
    """Return a context in which ``nbytes`` bytes of A's budgets count as used."""
    return hold(memories_of(A), nbytes)


def keep(A: Any, owner: object, nbytes: int) -> None:
    """Count ``nbytes`` bytes of A's budgets as used as long as the owner exists."""
    for memory in memories_of(A):
        memory.keep(owner, nbytes)


def longest(A: Any) -> int:
    """Return the longest side of A and of the operators it is made of, the length of vectors in its products."""
    arguments = (argument for argument in getattr(A, "_args", ()) if isinstance(argument, LinearOperator))
    return max([*A.shape[-2:], *map(longest, arguments)])


def solve_width(A: Any, count: int, memories: Memories | None = None) -> tuple[int, int]:
    """Return how many of ``count`` columns block solves take at once, and the bytes to hold for the caller."""
    memories = memories_of(A) if memories is None else memories
    if not memories:
        return max(1, count), 0
    column = longest(A) * A.dtype.itemsize
    width = columns_at_a_time(count, SOLVE_VECTORS * column, room_in(memories))
    return width, CALLER_VECTORS * width * column
