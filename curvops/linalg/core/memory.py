"""The bytes that an algorithm's vectors may take: a caller's budget, or the rest of the networks' budgets.

The `memories` of an operator are the budgets that its products draw on. An operator that is not built from a network
has none, and without a `memory_budget` nothing limits an algorithm on it. A network's budget never makes an algorithm
fail: the minimum that it needs is always allowed, with a warning if it exceeds the whole budget; only the rest is
limited.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from linear_operator import LinearOperator

from curvops.errors import BlockSizeWarning, MemoryBudgetWarning, warn
from curvops.linalg.core.solve_routes import SOLVE_VECTORS
from curvops.linalg.core.vectors import Description, Vectors, describe, empty_block, part, product, put
from curvops.process_group import Ranks

Multiply: TypeAlias = Callable[[Vectors], Vectors]
Attempted = TypeVar("Attempted")

CALLER_VECTORS = 3
"""How many of the `SOLVE_VECTORS` vectors of a block solve its caller holds."""
UNTOLD_BYTES = 2**24
"""The least that an algorithm needs may exceed a budget without a warning up to this many bytes."""
PRODUCT_VECTORS = 4
"""Vectors per column that a product works with, in addition to its argument and its result."""


@runtime_checkable
class Memory(Protocol):
    """A budget of bytes shared by several users."""

    @property
    def budget(self) -> int:
        """All bytes of the budget."""

    @property
    def of_ranks(self) -> Ranks | None:
        """The processes that share one problem, if the budget belongs to several."""

    def room(self) -> int:
        """Return the bytes left for vectors."""

    def holding(self, nbytes: int) -> AbstractContextManager[None]:
        """Count ``nbytes`` bytes as used inside a `with` block."""

    def keep(self, owner: object, nbytes: int) -> None:
        """Count ``nbytes`` bytes as used as long as the owner exists."""

    def expect_many(self) -> None:
        """Announce more products than have been made so far, so that the next ones use an engine that pays off."""


Memories = frozenset[Memory]


def memories_of(A: Any) -> Memories:
    """Return the budgets of the networks in A; none for a tensor or a foreign operator."""
    return getattr(A, "memories", frozenset())


def room_for(A: Any, memory_budget: int | None, least: int) -> int | None:
    """Return the given bytes, else those left to A's networks, at least ``least``; None if there is no limit.

    Warns if the budget, whatever is left of it, is less than ``least``.
    """
    if memory_budget is not None:
        _require([memory_budget], least)
        return memory_budget
    memories = memories_of(A)
    _require([memory.budget for memory in memories], least)
    return room_in(memories, least)


def room_in(memories: Memories, least: int) -> int | None:
    """Return the bytes left in all of these budgets, at least ``least``."""
    return max(least, min(memory.room() for memory in memories)) if memories else None


@contextmanager
def working(
    A: Any, memory_budget: int | None, least: int = 0, multiply: Multiply | None = None
) -> Iterator[tuple[Multiply, int | None]]:
    """Yield A's product and the bytes for further vectors: the given bytes, else those left to A's networks.

    In the second case the bytes count as used meanwhile and suffice for at least ``least`` vectors, and blocks are
    multiplied in parts whose own vectors take at most a quarter of the bytes left. In both cases a product that runs
    out of memory is repeated with half of the columns at a time.
    """
    multiply, memories = product(A) if multiply is None else multiply, memories_of(A)
    if memory_budget is not None or not memories:
        yield in_parts(multiply, sys.maxsize), memory_budget
        return
    vector = vector_bytes(describe(A))
    _require([memory.budget for memory in memories], least * vector)
    inside = max(vector, longest(A) * A.dtype.itemsize)
    room = room_in(memories, 0) or 0
    width = max(1, room // (4 * PRODUCT_VECTORS * inside))
    budget = max(least * vector, room - PRODUCT_VECTORS * width * inside)
    with hold(memories, budget):
        yield in_parts(multiply, width), budget


def in_parts(multiply: Multiply, width: int) -> Multiply:
    """Return ``multiply`` for blocks of any width, at most ``width`` columns at a time, halved when out of memory."""
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


def holding(A: Any, nbytes: int) -> AbstractContextManager[None]:
    """Return a context in which ``nbytes`` bytes of A's budgets count as used."""
    return hold(memories_of(A), nbytes)


def hold(memories: Memories, nbytes: int) -> AbstractContextManager[None]:
    """Return a context in which ``nbytes`` bytes of these budgets count as used."""
    first, *others = memories or (None,)
    if first is None:
        return nullcontext()
    return _hold_each([first, *others], nbytes) if others else first.holding(nbytes)


@contextmanager
def _hold_each(memories: Sequence[Memory], nbytes: int) -> Iterator[None]:
    with ExitStack() as stack:
        for memory in memories:
            stack.enter_context(memory.holding(nbytes))
        yield


def keep(A: Any, owner: object, nbytes: int) -> None:
    """Count ``nbytes`` bytes of A's budgets as used as long as the owner exists."""
    for memory in memories_of(A):
        memory.keep(owner, nbytes)


def vector_bytes(facts: Description) -> int:
    """Return the bytes of a vector on the longer side of a matrix."""
    return facts.vector_bytes


def longest(A: Any) -> int:
    """Return the longest side of A and of the operators it is made of, the length of vectors in its products."""
    parts = (part for part in getattr(A, "_args", ()) if isinstance(part, LinearOperator))
    return max([*A.shape[-2:], *map(longest, parts)])


def solve_width(A: Any, count: int, memories: Memories | None = None) -> tuple[int, int]:
    """Return how many of ``count`` columns block solves take at once, and the bytes to hold for the caller."""
    memories = memories_of(A) if memories is None else memories
    if not memories:
        return max(1, count), 0
    column = longest(A) * A.dtype.itemsize
    width = columns_at_a_time(count, SOLVE_VECTORS * column, room_in(memories, 0))
    return width, CALLER_VECTORS * width * column


def columns_at_a_time(count: int, column_bytes: int, room: int | None) -> int:
    """Return how many of ``count`` columns of ``column_bytes`` bytes run at once, at least one."""
    return max(1, count if room is None else min(count, room // max(1, column_bytes)))


NO_ROOM = (
    "Not even one column fits: pass linearize a smaller memory_budget, so that less is kept of the data, linearise "
    "on smaller batches, or free other memory."
)


def _require(budgets: Sequence[int], least: int) -> None:
    """Warn if one of these budgets is less than the bytes that an algorithm needs at least."""
    if least > max(UNTOLD_BYTES, short := min(budgets, default=least)):
        warn(
            f"the memory budget is {short:,} bytes, but the working vectors take at least {least:,}, and will be "
            "allocated: pass a memory_budget of that size, or linearise fewer parameters.",
            MemoryBudgetWarning,
        )


@dataclass
class Halving:
    """Work on several columns that may run out of memory: from then on half of them are used, with one warning."""

    what: str
    told: bool = False

    def attempt(self, work: Callable[[int, int], Attempted], start: int, stop: int) -> Attempted | None:
        """Return the outcome of the work on these columns, or None if half of them are to be tried.

        Raises OutOfMemoryError, with the remedy, if memory does not suffice for one column.
        """
        try:
            return work(start, stop)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if stop - start <= 1:
                raise torch.OutOfMemoryError(f"{error} {NO_ROOM}") from error
        # By now the error is freed, and with it the tensors that its traceback held.
        if not self.told:
            warn(
                f"out of memory with {stop - start} columns at once: {(stop - start) // 2} are {self.what} at a time "
                "from now on, or fewer if that is still too many. A memory_budget avoids such failed attempts.",
                BlockSizeWarning,
            )
        self.told = True
        return None


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that a device or the machine is out of memory."""
    # torch has no class for the error on a CPU.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
