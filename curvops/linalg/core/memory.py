"""How many bytes the vectors of an algorithm may take: what its caller gives, or what the networks behind A have left.

`memories` of an operator are the budgets that products with it draw on. Operators that are not made from a network have
none, and without a `memory_budget` nothing limits an algorithm on them. A network's budget never makes an algorithm
fail: the least that it needs is always allowed, and only what it can do without is cut.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from linear_operator import LinearOperator

from curvops.linalg.core.solve_routes import SOLVED
from curvops.linalg.core.vectors import Description, Vectors, describe, empty_block, part, product, put

Multiply: TypeAlias = Callable[[Vectors], Vectors]
Outcome = TypeVar("Outcome")

BESIDE = 3
"""Those of them that are not the solver's."""
OF_PRODUCT = 4
"""Vectors a column that a product works with, its own argument and result left out."""


@runtime_checkable
class Memory(Protocol):
    """A budget of bytes that several share."""

    def room(self) -> int:
        """Bytes that are left for vectors."""

    def holding(self, nbytes: int) -> AbstractContextManager[None]:
        """So many bytes are in use."""

    def keep(self, owner: object, nbytes: int) -> None:
        """So many bytes are in use for as long as the owner exists."""

    def expect_many(self) -> None:
        """Products to come are more than those made so far: what serves many of them serves the next."""


Memories = frozenset[Memory]


def memories_of(A: Any) -> Memories:
    """The budgets of the networks in A; none for a tensor or a foreign operator."""
    found: Memories = getattr(A, "memories", frozenset())
    return found


def room_for(A: Any, memory_budget: int | None, least: int) -> int | None:
    """The bytes given, else those that A's networks have left, but at least ``least``; None where nothing limits."""
    return room_in(memories_of(A), least) if memory_budget is None else memory_budget


def room_in(memories: Memories, least: int) -> int | None:
    """What these have left, at least ``least``."""
    return max(least, min(memory.room() for memory in memories)) if memories else None


@contextmanager
def working(
    A: Any, memory_budget: int | None, least: int = 0, multiply: Multiply | None = None
) -> Iterator[tuple[Multiply, int | None]]:
    """A's product and the bytes that vectors may take beside it: those given, else what A's networks have left.

    In the second case the bytes are held meanwhile, at least ``least`` vectors' are given, and blocks are multiplied in
    parts, whose own vectors take at most a quarter of what was left. In both a product that memory does not suffice for
    is made of half of the columns at a time.
    """
    multiply, memories = product(A) if multiply is None else multiply, memories_of(A)
    if memory_budget is not None or not memories:
        yield in_parts(multiply, sys.maxsize), memory_budget
        return
    vector = vector_bytes(describe(A))
    room = room_in(memories, 0) or 0
    width = max(1, room // (4 * OF_PRODUCT * vector))
    budget = max(least * vector, room - OF_PRODUCT * width * vector)
    with held_in(memories, budget):
        yield in_parts(multiply, width), budget


def in_parts(multiply: Multiply, width: int) -> Multiply:
    """The same product, of blocks with more columns than ``width`` one part after the other; halved out of memory."""
    attempt = Halving("multiplied").attempt

    def apply(V: Vectors) -> Vectors:
        nonlocal width
        K, start, result = V.shape[1], 0, None
        work = lambda start, stop: multiply(V if stop - start == K else part(V, start, stop))  # noqa: E731
        while start < K or result is None:
            stop = min(K, start + width)
            found = attempt(work, start, stop)
            if found is None:
                width = (stop - start) // 2
                continue
            if stop - start == K:
                return found
            result = empty_block(found, K) if result is None else result
            put(result, start, found)
            start = stop
            del found
        return result

    return apply


@contextmanager
def holding(A: Any, nbytes: int) -> Iterator[None]:
    """So many bytes of A's budgets are in use."""
    with held_in(memories_of(A), nbytes):
        yield


@contextmanager
def held_in(memories: Memories, nbytes: int) -> Iterator[None]:
    """So many bytes of these budgets are in use."""
    with ExitStack() as stack:
        for memory in memories:
            stack.enter_context(memory.holding(nbytes))
        yield


def keep(A: Any, owner: object, nbytes: int) -> None:
    """So many bytes of A's budgets are in use for as long as the owner exists."""
    for memory in memories_of(A):
        memory.keep(owner, nbytes)


def vector_bytes(facts: Description) -> int:
    """Bytes of a vector on the longer side of a matrix."""
    return max(facts.rows, facts.columns) * facts.dtype.itemsize


def longest(A: Any) -> int:
    """The longest side of A and of the operators that it is made of: products with it hold vectors of that length."""
    parts = (part for part in getattr(A, "_args", ()) if isinstance(part, LinearOperator))
    return max([*A.shape[-2:], *map(longest, parts)])


def solved_at_a_time(A: Any, count: int, memories: Memories | None = None) -> tuple[int, int]:
    """How many of ``count`` columns that end in block solves run together, and the bytes to hold beside the solves."""
    memories = memories_of(A) if memories is None else memories
    if not memories:
        return max(1, count), 0
    column = longest(A) * A.dtype.itemsize
    width = columns_at_a_time(count, SOLVED * column, room_in(memories, 0))
    return width, BESIDE * width * column


def columns_at_a_time(count: int, column_bytes: int, room: int | None) -> int:
    """How many of ``count`` columns of so many bytes run together; at least one."""
    return max(1, count if room is None else min(count, room // max(1, column_bytes)))


NO_ROOM = (
    "There is no room for one column either: give linearize a smaller memory_budget, so that less is kept of the data, "
    "linearise on smaller batches, or free what else is in memory."
)


class BlockHalved(UserWarning):
    """Memory did not suffice for a block of columns: they are solved for, or multiplied, in smaller ones."""


@dataclass
class Halving:
    """Work on columns together that may run out of memory; one warning says what is then done with half of them."""

    what: str
    told: bool = False

    def attempt(self, work: Callable[[int, int], Outcome], start: int, stop: int) -> Outcome | None:
        """The outcome of the work on these columns, None where half of them are to be tried.

        Raises OutOfMemoryError, with what to do, where memory does not suffice for one column.
        """
        try:
            return work(start, stop)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if stop - start <= 1:
                raise torch.OutOfMemoryError(f"{error} {NO_ROOM}") from error
        # Here the error is gone, and with it the tensors that its traceback held.
        if not self.told:
            warnings.warn(
                f"out of memory with {stop - start} columns together: {(stop - start) // 2} are {self.what} at a "
                "time, or fewer where these do not fit either. A memory_budget prevents the attempts that fail.",
                BlockHalved,
                stacklevel=5,
            )
        self.told = True
        return None


def is_out_of_memory(error: Exception) -> bool:
    """Whether this says that a device or the machine has no memory left; of a CPU, torch has no class for it."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
