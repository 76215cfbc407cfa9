"""Progress of long work: a bar on a terminal, calls of a function in programs, nothing otherwise.

Work that has taken two seconds shows a bar on standard error if that is a terminal; the bar is cleared at the end.
Every function that may take long has the keyword `progress`: None for this behaviour, False for no bar, True for a
bar even if standard error is a file, or a function (what, done, total), called at each step; total is None if it is
unknown. An algorithm of linear algebra counts its products. Of nested algorithms the outermost is shown, and counts the
products of all of them; work inside a product, a preconditioner or a callback is done aside: it is not counted, and
saves no checkpoint (`ambient.py`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, ParamSpec, TypeVar

from tqdm import tqdm

PATIENCE = 2.0
"""Seconds before a bar is shown."""

T = TypeVar("T")
Options = ParamSpec("Options")
Progress = bool | Callable[[str, int, int | None], None] | None
in_force: ContextVar[Any] = ContextVar("in_force", default=None)
"""The `Run` in force; None outside of every algorithm."""


def check_progress(progress: Any) -> None:
    """Raise TypeError unless `progress` is None, a flag or a function."""
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise TypeError(f"progress must be None, False, True or a function (what, done, total), got {progress!r}.")


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


def aside(work: Callable[Options, T]) -> Callable[Options, T]:
    """Return this work as a function whose products are not counted and which saves no checkpoint."""
    return partial(as_step, 0, work)


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
