"""A clock on which runs that take milliseconds save checkpoints as those of hours do."""

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from unittest.mock import patch


@contextlib.contextmanager
def a_minute_between_saves() -> Iterator[None]:
    """A minute passes whenever somebody reads the clock, but none in writing a file, which does not wait for the disk.

    So a checkpoint is saved whenever a run may save one.
    """
    minutes, written = itertools.count(time.monotonic(), 60.0), []

    def fsync(descriptor: int) -> None:
        written.append(descriptor)

    now = next(minutes)

    def monotonic() -> float:
        nonlocal now
        now = now if written else next(minutes)
        written.clear()
        return now

    with patch.object(os, "fsync", fsync), patch.object(time, "monotonic", monotonic):
        yield
