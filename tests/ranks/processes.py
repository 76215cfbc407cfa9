"""Processes that call one function each as the ranks of a group: gloo on the CPU, found by a store of their parent."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

LONGEST = tuple(map(int, os.environ.get("RANKS", "2").split()))
"""The sizes of groups that the three longest tables ask: with `RANKS="2 3"` three ranks, too, a minute more."""

SECONDS = 240


def largest(truth: np.ndarray) -> float:
    """The largest absolute number."""
    return float(np.abs(truth).max())


def by_problem(found: dict[int, Any]) -> dict[str, dict[int, Any]]:
    """The answers of all ranks to each problem."""
    for rank, own in found.items():
        assert not isinstance(own, str), f"rank {rank}: {own}"
        assert own.keys() == found[0].keys(), rank
    return {problem: {rank: own[problem] for rank, own in found.items()} for problem in found[0]}


def assert_those_of_one_process(
    found: dict[int, Any],
    expected: dict[str, np.ndarray],
    in_part: bool = False,
    size_of: Callable[[np.ndarray], float] = largest,
) -> None:
    """The answers of all ranks are equal to the bit, and to 1e-10 of their size those of one process.

    To some of its questions only, if they were asked `in_part`.
    """
    wrong = []
    for rank, own in found.items():
        assert not isinstance(own, str), f"rank {rank}: {own}"
        assert own.keys() < expected.keys() if in_part else own.keys() == expected.keys(), rank
        for name, value in own.items():
            truth = expected[name]
            assert value.shape == truth.shape, (rank, name)
            assert np.array_equal(value, found[0][name]), (rank, name)
            error = np.abs(value - truth).max() / max(1e-300, size_of(truth))
            if not error < 1e-10:
                wrong.append(f"rank {rank} of {len(found)}: {name} is off by {error:.2g}")
    assert not wrong, "\n".join(wrong)


@contextlib.contextmanager
def group(rank: int, size: int, port: int) -> Iterator[dist.ProcessGroup]:
    """The group of so many processes that meet at a store of the process that started them, as under torchrun."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def run_on_ranks(size: int, function: Callable[..., Any], *given: Any, expected: int | None = None) -> dict[int, Any]:
    """Return what `function(group, *given)` returned on each rank, or the error that it raised there.

    Of `expected` ranks, where some are meant to end without a word.
    """
    with running_on_ranks(size, function, *given) as (_, answers):
        return dict(answers.get(timeout=SECONDS) for _ in range(size if expected is None else expected))


@contextlib.contextmanager
def running_on_ranks(size: int, function: Callable[..., Any], *given: Any) -> Iterator[tuple[list[Any], Any]]:
    """Yield the processes, and the queue of their answers as `(rank, answer)`; they end with the `with` block."""
    spawned = multiprocessing.get_context("forkserver")
    spawned.set_forkserver_preload(["tests.ranks.questions"])  # imports once what all processes need
    answers = spawned.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = (size, store.port, answers, function, given)
    processes = [spawned.Process(target=_work, args=(rank, *given)) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        yield processes, answers
    finally:
        end = time.monotonic() + 1  # of all: after a failure they would wait for each other, and the answers are here
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join()
        del store


def _work(rank: int, size: int, port: int, answers: Any, function: Callable[..., Any], given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    with group(rank, size, port) as ours:
        try:
            answer = function(ours, *given)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        answers.put((rank, answer))
        answers.close()
        answers.join_thread()  # before a connection is closed that the others may still need
        with contextlib.suppress(RuntimeError):
            dist.barrier(ours)
