"""Long work shows itself on a terminal, and tells programs by a callback; it is silent otherwise.

What has taken two seconds shows a bar on standard error where that is a terminal, and the bar goes when the work ends.
Every function that may take long has the keyword `progress`: None for that, False for silence, True for a bar wherever
standard error leads, or a function (what, done, total), called at each step; total is None where it is not known.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

PATIENCE = 2.0
"""Seconds of silence."""

Progress = bool | Callable[[str, int, int | None], None] | None


def check_progress(progress: Any) -> None:
    """TypeError for what is neither None, a flag nor a function."""
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise TypeError(f"progress must be None, False, True or a function (what, done, total), got {progress!r}.")


@contextmanager
def shown(what: str, total: int | None = None, progress: Progress = None, unit: str = "step") -> Iterator[Steps]:
    """The steps of some work, to be counted by `advance`; what is shown of them goes at the end, also at an error."""
    steps = Steps(what, total, progress, unit)
    try:
        yield steps
    finally:
        steps.close()


class Steps:
    """How far some work has come. Nothing is set up before there is something to show."""

    def __init__(self, what: str, total: int | None, progress: Progress, unit: str) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done = 0
        self._callback = progress if callable(progress) else None
        self._wanted = progress is True or (progress is None and sys.stderr is not None and sys.stderr.isatty())
        self._begin = time.monotonic()
        self._bar: Any = None

    def advance(self, count: int = 1, note: str = "") -> None:
        """Count further steps; `note` stands behind the bar (a residual, an error bar)."""
        self.done += count
        if self._callback is not None:
            self._callback(self.what, self.done, self.total)
        if not self._wanted:
            return
        if self._bar is None and time.monotonic() - self._begin >= PATIENCE:
            self._bar = tqdm(desc=self.what, total=self.total, initial=self.done, unit=self.unit, leave=False)
            self._bar.start_t -= time.monotonic() - self._begin
        elif self._bar is not None:
            self._bar.update(count)
        if self._bar is not None and note:
            self._bar.set_postfix_str(note, refresh=False)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
