"""Processes that call functions as the ranks of a group: gloo on the CPU, found by a store of their parent."""

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

LONGEST = tuple(map(int, os.environ.get("RANKS", "2").split()))
"""The sizes of groups that the three longest tables ask: with `RANKS="2 3"` three ranks, too, a minute more."""

SECONDS = 240

CONTEXT = multiprocessing.get_context("forkserver")
# Imported once for all processes: what tests of ranks import, and what the library, and torch for its DTensors, import
# where it is needed.
CONTEXT.set_forkserver_preload(
    [
        "gpytorch",
        "botorch",
        "scipy.optimize",
        "torch._dynamo",
        *(f"tests.ranks.{each.stem}" for each in Path(__file__).parent.glob("test_*.py")),
    ]
)


def largest(truth: np.ndarray) -> float:
    """The largest absolute number."""
    return float(np.abs(truth).max())


def by_problem(found: dict[int, Any]) -> dict[str, dict[int, Any]]:
    """The answers of all ranks to each problem."""
    for rank, own in found.items():
        assert own.keys() == found[0].keys(), rank
    return {problem: {rank: own[problem] for rank, own in found.items()} for problem in found[0]}


def assert_those_of_one_process(
    found: dict[int, Any],
    expected: dict[str, np.ndarray],
    in_part: bool = False,
    within: float = 1e-10,
    size_of: Callable[[np.ndarray], float] = largest,
) -> None:
    """The answers of all ranks are equal to the bit, and `within` this share of their size those of one process.

    To some of its questions only, if they were asked `in_part`.
    """
    wrong = []
    for rank, own in found.items():
        assert own.keys() < expected.keys() if in_part else own.keys() == expected.keys(), rank
        for name, value in own.items():
            truth = expected[name]
            assert value.shape == truth.shape, (rank, name)
            assert np.array_equal(value, found[0][name]), (rank, name)
            error = np.abs(value - truth).max() / max(1e-300, size_of(truth))
            if not error < within:
                wrong.append(f"rank {rank} of {len(found)}: {name} is off by {error:.2g}")
    assert not wrong, "\n".join(wrong)


def assert_said(found: dict[int, dict[str, str]], words: dict[str, str]) -> None:
    """Each rank was told these words, by what was asked of it."""
    for rank, told in found.items():
        assert told.keys() == words.keys()
        wrong = [f"{name}: {said[:300]}" for name, said in told.items() if words[name] not in said]
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong)


@contextlib.contextmanager
def group(rank: int, size: int, port: int) -> Iterator[tuple[dist.ProcessGroup]]:
    """The group of so many processes that meet at a store of the process that started them, as under torchrun."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        yield (dist.group.WORLD,)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def environment(rank: int, size: int, port: int) -> Iterator[tuple[()]]:
    """What torchrun tells a process, which begins its group itself."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    yield ()


def run_on_ranks(size: int, function: Callable[..., Any], *given: Any) -> dict[int, Any]:
    """Return what `function(group, *given)` returned on each rank; raise AssertionError with the errors of the others.

    By processes that stay, and form a new group for each call: what they imported and proved serves the next one. Where
    a call fails on a rank, or leaves the ranks out of step, they end, and the next call begins with others.
    """
    _standing.extend(_Standing() for _ in range(size - len(_standing)))
    ranks, store = _standing[:size], dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    together = False
    try:
        for rank, each in enumerate(ranks):
            each.connection.send((rank, size, store.port, function, given))
        answers = [each.answer() for each in ranks]
        together = all(succeeded for succeeded, _ in answers) and all(each.has_left() for each in ranks)
    finally:
        if not together:
            while _standing:
                _standing.pop().process.kill()
    errors = [f"rank {rank}: {answer}" for rank, (succeeded, answer) in enumerate(answers) if not succeeded]
    assert not errors, "\n".join(errors)
    return {rank: answer for rank, (_, answer) in enumerate(answers)}


def alone(function: Callable[..., Any], *given: Any) -> Any:
    """Return what `function(*given)` returns in one of these processes, without a group or checks of shapes."""
    return run_on_ranks(1, _apply, function, *given)[0]


def _apply(group: Any, function: Callable[..., Any], *given: Any) -> Any:
    return function(*given)


class _Standing:
    """A process that calls one function after another, each as a rank of a group of its own."""

    def __init__(self) -> None:
        self.connection, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self) -> tuple[bool, Any]:
        """Return whether the function returned here, and what, or its error."""
        if not self.connection.poll(SECONDS):
            raise TimeoutError(f"a rank gave no answer within {SECONDS} s.")
        found: tuple[bool, Any] = self.connection.recv()
        return found

    def has_left(self) -> bool:
        """Whether the process left its group together with the others."""
        return self.connection.poll(5) and self.connection.recv()


_standing: list[_Standing] = []


def _serve(connection: Any) -> None:
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):  # the parent has ended
        while True:
            rank, size, port, function, given = connection.recv()
            torch.manual_seed(0)
            with group(rank, size, port) as ours:
                connection.send(_called(function, *ours, *given))
                with contextlib.suppress(RuntimeError):
                    dist.barrier(*ours)
            connection.send(True)


def run_apart(size: int, function: Callable[..., Any], *given: Any, expected: int | None = None) -> dict[int, Any]:
    """Return what `run_on_ranks` does, or an error's text, by processes that end: for what leaves ranks out of step.

    Of `expected` ranks, where some are meant to end without a word.
    """
    with running_apart(size, function, *given) as (_, answers):
        return dict(answers.get(timeout=SECONDS) for _ in range(size if expected is None else expected))


def run_programs(size: int, program: Callable[..., Any], *given: Any) -> list[Any]:
    """Return what `program(*given)` returned in each process, started as torchrun does: without a group."""
    with running_apart(size, program, *given, begin=environment) as (_, answers):
        return [answer for _, answer in sorted(answers.get(timeout=SECONDS) for _ in range(size))]


@contextlib.contextmanager
def running_apart(
    size: int, function: Callable[..., Any], *given: Any, begin: Callable[..., Any] = group
) -> Iterator[tuple[list[Any], Any]]:
    """Yield the processes, and the queue of their answers as `(rank, answer)`; they end with the `with` block."""
    answers = CONTEXT.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = begin, answers, function, given
    processes = [CONTEXT.Process(target=_work, args=((rank, size, store.port), *shared)) for rank in range(size)]
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


def _work(
    place: tuple[int, int, int],
    begin: Callable[..., Any],
    answers: Any,
    function: Callable[..., Any],
    given: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    with begin(*place) as ours:
        answers.put((place[0], _called(function, *ours, *given)[1]))
        answers.close()
        answers.join_thread()  # before a connection is closed that the others may still need
        with contextlib.suppress(RuntimeError, ValueError):  # the second where there is no group
            dist.barrier(*ours)


def _called(function: Callable[..., Any], *given: Any) -> tuple[bool, Any]:
    """Whether a function returned, and what; or its error."""
    try:
        return True, function(*given)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
