"""What is in force around a public call: the bar of its steps, its bytes, its checkpoint.

Every public algorithm takes long enough to have the keywords `progress`, `memory_budget` and, if it can be resumed,
`checkpoint`. They apply to all that the call does, so that nothing inside takes them as arguments: `current_run()` is
the `Run`. An algorithm that calls another one passes its run on: the outer bar counts the products of both, both
allocate within the bytes given, and the inner one saves its state inside the outer one's folder. Products,
preconditioners and callbacks are done aside (`as_step`), where nothing of this applies: they are not counted, and save
no checkpoint.

Work that has taken two seconds shows a bar on standard error if that is a terminal; the bar is cleared at the end.
Every function that may take long has the keyword `progress`: None for this behaviour, False for no bar, True for a
bar even if standard error is a file, or a function (what, done, total), called at each step; total is None if it is
unknown. An algorithm of linear algebra counts its products. Of nested algorithms the outermost is shown.

Without a `memory_budget` the networks behind the matrix limit an algorithm: each has a budget of bytes, a `Memory`. It
never makes an algorithm fail. What an algorithm needs at least is always allowed, with a warning if it exceeds the
whole budget; only the rest is limited.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

import torch
from tqdm import tqdm

from curvops.checks import check_options
from curvops.errors import BlockSizeWarning, MemoryBudgetWarning, warn
from curvops.ranks.process_group import Ranks

SMALL_BYTES = 2**24
"""Up to this many bytes are allocated whatever a budget is, and without a warning: there is nothing worth saving."""
CACHE_BYTES = 2**22
"""The bytes, on a CPU, of numbers that are made and used at once: they stay in a cache."""
NO_ROOM = (
    "Not even one column fits: pass linearize a smaller memory_budget, so that less is kept of the data, linearise "
    "on smaller batches, or free other memory."
)
PATIENCE = 2.0
"""Seconds before a bar is shown."""

T = TypeVar("T")
Options = ParamSpec("Options")
Progress = bool | Callable[[str, int, int | None], None] | None
in_force: ContextVar[Run | None] = ContextVar("in_force", default=None)
"""The `Run` in force; None outside of every algorithm."""


def progress_bar(what: str, total: int | None = None, progress: Progress = None, unit: str = "step") -> Steps:
    """Return the steps of some work, to be counted by `advance`; a context that clears the bar, also on an error."""
    run = in_force.get()
    return Steps(what, total, False if run is not None and run.silent else progress, unit)


def is_wanted(progress: Progress) -> bool:
    """Return whether somebody is told of the steps: by a function or a bar, by default one on a terminal."""
    return progress is not False and (progress is not None or (sys.stderr is not None and sys.stderr.isatty()))


class Steps:
    """The steps of some work and the bar that shows them, which is created when there is something to show."""

    def __init__(self, what: str, total: int | None, progress: Progress, unit: str) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done = 0
        self._callback = progress if callable(progress) else None
        self._wanted = self._callback is None and is_wanted(progress)
        self._begin = time.monotonic()
        self._bar: Any = None
        self._note = ""

    def advance(self, count: int = 1, note: str = "") -> None:
        """Count further steps; `note` is shown behind the bar (a residual, an error bar)."""
        self.done += count
        self._note = note or self._note
        if self._callback is not None:
            as_step(0, self._callback, self.what, self.done, self.total)
        if not self._wanted:
            return
        if self._bar is None and time.monotonic() - self._begin >= PATIENCE:
            self._bar = tqdm(desc=self.what, total=self.total, initial=self.done, unit=self.unit, leave=False)
            self._bar.start_t -= time.monotonic() - self._begin
        elif self._bar is not None:
            self._bar.update(count)
            if self._note:
                self._bar.set_postfix_str(self._note, refresh=False)

    def remark(self, note: Callable[[], str]) -> None:
        """Set the note behind the bar (a residual, an error bar), which is computed only if a bar is shown."""
        if self._bar is not None:
            self._note = note()

    def close(self) -> None:
        """Clear the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def as_step(count: int, work: Callable[Options, T], *args: Options.args, **options: Options.kwargs) -> T:
    """Do this work aside and count it as `count` products, whatever happens inside."""
    run = in_force.get()
    if run is None:
        return work(*args, **options)
    token = in_force.set(run.aside)
    try:
        result = work(*args, **options)
    finally:
        in_force.reset(token)
    if count and run.steps is not None:
        run.steps.advance(count)
    return result


def time_left(share: float, since: float) -> str:
    """Return in words the time left, `share` times the time elapsed since `since` (of `time.monotonic`).

    The share is an estimate and the rate may change; the words say so.
    """
    return f"about {tqdm.format_interval(share * (time.monotonic() - since))} left at this rate"


def remark(note: Callable[[], str]) -> None:
    """Show this note behind the bar, if there is one."""
    run = in_force.get()
    if run is not None and run.steps is not None:
        run.steps.remark(note)


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


Memories = frozenset[Memory]


@dataclass(eq=False)
class Run:
    """A run holds what is in force around one call."""

    counts: bool = False
    """Whether algorithms inside are its steps, shown by its bar or not at all."""
    steps: Steps | None = None
    """The steps that products count as; None if nobody is shown them."""
    silent: bool = False
    """Whether no bar is shown by anything inside."""
    distributed: bool = False
    """Whether DTensors are blocks inside, and blocks become DTensors where the outermost algorithm ends."""
    memory_budget: int | None = None
    """The caller's bytes for working vectors."""
    memories: Memories = frozenset()
    """The budgets of the networks behind the matrix."""
    checkpoint: Any = None
    """The checkpoint in whose folder algorithms inside save their states, or None."""
    call: Any = None
    """The function's signature and its arguments, which identify the problem in a checkpoint."""
    shows: bool = False
    """Whether the steps are this call's own, not those of an outer one."""
    aside: Run | None = None
    """What is in force in work done aside."""

    def expect(self, total: int | None) -> None:
        """Set the number of products after which this call ends, if its own bar is shown."""
        if self.shows and self.steps is not None:
            self.steps.total = total

    def room(self, least: int = 0) -> int | None:
        """Return the bytes for vectors: the caller's, else those left to the networks; None if there is no limit.

        At least ``least`` bytes are left; warns if the budget, whatever is left of it, is smaller.
        """
        if self.memory_budget is None:
            return room_in(self.memories, least)
        warn_below(self.memory_budget, least)
        return self.memory_budget


NOWHERE = Run()


def current_run() -> Run:
    """Return the run in force."""
    return in_force.get() or NOWHERE


@contextmanager
def running(
    what: str,
    A: Any,
    progress: Progress = None,
    memory_budget: int | None = None,
    call: Any = None,
    distributed: bool = False,
) -> Iterator[Run]:
    """Put a run of the algorithm ``what`` on A in force, inside the one that is.

    Raises:
        TypeError: progress is neither None, a flag nor a function, or memory_budget is not a number.
        ValueError: memory_budget is negative.
    """
    check_options(progress=progress, memory_budget=memory_budget)
    if memory_budget is not None:
        memory_budget = int(min(memory_budget, sys.maxsize))
    outer = current_run()
    own_steps: Steps | None = None
    silent, steps = outer.silent, outer.steps
    if progress is not None or not outer.counts:
        progress = getattr(A, "progress", None) if progress is None else progress
        silent = silent or progress is False
        steps = own_steps = Steps(what, None, progress, " products") if not silent and is_wanted(progress) else None
    aside = Run(True, silent=silent, distributed=distributed or outer.distributed)
    aside.aside = aside
    run = replace(
        aside,
        steps=steps,
        shows=own_steps is not None,
        memory_budget=outer.memory_budget if memory_budget is None else memory_budget,
        memories=getattr(A, "memories", frozenset()),
        checkpoint=outer.checkpoint,
        call=call,
    )
    token = in_force.set(run)
    try:
        yield run
    finally:
        in_force.reset(token)
        if own_steps is not None:
            own_steps.close()


def hold(memories: Memories, nbytes: int) -> AbstractContextManager[Any]:
    """Return a context in which ``nbytes`` bytes of these budgets count as used."""
    if len(memories) == 1:
        (memory,) = memories
        return memory.holding(nbytes)
    stack = ExitStack()
    for memory in memories:
        stack.enter_context(memory.holding(nbytes))
    return stack


def room_in(memories: Memories, least: int = 0) -> int | None:
    """Return the bytes left in all of these budgets, at least ``least``; None if there are none.

    Warns if a whole budget is smaller.
    """
    if not memories:
        return None
    rooms = []
    for memory in memories:
        warn_below(memory.budget, least)
        rooms.append(memory.room())
    return max(least, min(rooms))


def columns_at_a_time(count: int, column_bytes: int, room: int | None) -> int:
    """Return how many of ``count`` columns of ``column_bytes`` bytes run at once, at least one."""
    return max(1, count if room is None else min(count, room // max(1, column_bytes)))


def warn_below(budget: int, least: int) -> None:
    """Warn if a budget is less than the bytes that an algorithm needs at least."""
    if least > max(SMALL_BYTES, budget):
        warn(
            f"the memory budget is {budget:,} bytes, but the working vectors take at least {least:,}, and will be "
            "allocated: pass a memory_budget of that size, or linearise fewer parameters.",
            MemoryBudgetWarning,
        )


@dataclass
class Groups:
    """Columns in groups of a width, halved for good when memory runs out, with one warning."""

    verb: str
    """What happens to the columns, for the warning."""
    width: int
    halved: bool = False

    def each(self, count: int, work: Callable[[int, int], object], start: int = 0) -> None:
        """Call ``work(start, stop)`` for one group of the ``count`` columns after the other, at least once.

        Raises OutOfMemoryError, with the remedy, if memory does not suffice for one column.
        """
        while True:
            stop = min(count, start + self.width)
            try:
                work(start, stop)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if stop - start <= 1:
                    raise torch.OutOfMemoryError(f"{error} {NO_ROOM}") from error
            else:
                if stop >= count:
                    return
                start = stop
                continue
            # By now the error is freed, and with it the tensors that its traceback held.
            self.width = (stop - start) // 2
            if not self.halved:
                warn(
                    f"out of memory with {stop - start} columns at once: {self.width} are {self.verb} at a time "
                    "from now on, or fewer if that is still too many. A memory_budget avoids such failed attempts.",
                    BlockSizeWarning,
                )
            self.halved = True


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that a device or the machine is out of memory."""
    # torch has no class for the error on a CPU.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
