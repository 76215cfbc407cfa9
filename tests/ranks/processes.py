"""Processes that call one function each as the ranks of a group: gloo on the CPU, found by a file."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 240


@contextlib.contextmanager
def group(rank: int, size: int, path: str) -> Iterator[dist.ProcessGroup]:
    """The group of so many processes that meet at a file."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def run_on_ranks(size: int, function: Callable[..., Any], *given: Any, expected: int | None = None) -> dict[int, Any]:
    """Return what `function(group, *given)` returned on each rank, or the error that it raised there.

    Of `expected` ranks, where some are meant to end without a word.
    """
    spawned = multiprocessing.get_context("forkserver")
    spawned.set_forkserver_preload(["tests.ranks.questions"])  # imports once what all processes need
    answers = spawned.Queue()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "meeting point")
        processes = [spawned.Process(target=_work, args=(r, size, path, answers, function, given)) for r in range(size)]
        for process in processes:
            process.start()
        try:
            return dict(answers.get(timeout=SECONDS) for _ in range(size if expected is None else expected))
        finally:
            for process in processes:
                process.join(5)
                process.kill()
                process.join()


def _work(rank: int, size: int, path: str, answers: Any, function: Callable[..., Any], given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    with group(rank, size, path) as ours:
        try:
            answer = function(ours, *given)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        answers.put((rank, answer))
        answers.close()
        answers.join_thread()  # before a connection is closed that the others may still need
        with contextlib.suppress(RuntimeError):
            dist.barrier(ours)
