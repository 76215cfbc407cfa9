"""One program of a task in a process of its own, which `benchmarks.tasks` starts, and which runs it when asked.

    python -m benchmarks.tasks.process NAME ours|theirs THREADS

Each line of the standard input asks for something, each line of the output answers in JSON. `run` says how long the
program took and how far its memory rose above what was resident before it; `quality` the figures of its answer;
`fewer` those of its answer to the smaller problem.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import warnings
from importlib import import_module
from typing import Any

import torch

from benchmarks.machine import reset_peak, resident
from benchmarks.tasks.study import TASKS
from benchmarks.timing import seconds


def release_heap() -> None:
    """Give the heap that training left behind back to the system, so that a program does not fill it unseen (glibc)."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def main() -> None:
    name, whose, threads = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w")  # what the packages print goes elsewhere
    os.dup2(2, 1)

    def say(**found: Any) -> None:
        print(json.dumps(found), file=out, flush=True)

    warnings.simplefilter("ignore")
    torch.set_num_threads(int(threads))
    task = TASKS[name]
    for module in task.modules if whose == "theirs" else ():
        import_module(module)
    problem, program, answers = task.prepare(), getattr(task, whose), [None]

    def run() -> None:
        answers[0] = program(problem)

    say(ready=True)
    for asked in sys.stdin:
        if asked.strip() == "run":
            answers[0] = None
            release_heap()
            before = reset_peak()
            say(before=before)
            elapsed = seconds(run)
            say(seconds=elapsed, peak=resident("VmHWM") - before)
        elif asked.strip() == "quality":
            say(**task.quality(problem, answers[0]))
        elif asked.strip() == "fewer":
            assert task.fewer is not None
            few = task.fewer(problem)
            say(**task.quality(few, program(few)))


if __name__ == "__main__":
    main()
