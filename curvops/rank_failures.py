"""A process group whose ranks wait for each other and detect a rank that failed, ended or hangs.

Messages of torch.distributed do not end if another rank never sends its own. Ranks therefore write to the group's store
that they wait, are at work or failed, and read there what the others wrote. `Ranks` adds sums and rows to it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor

from curvops.errors import RankFailedError

TIMEOUT, TIMEOUT_VARIABLE = 60.0, "CURVOPS_RANK_TIMEOUT"
"""The seconds that a rank waits for the others before it raises `RankFailedError`, and the environment variable that
changes them."""
LATE = 1.0
"""Seconds after which a waiting rank reports that it waits, and checks whether another one failed."""
SIGNS = 6
"""How many times a rank reports within this time that it is at work."""
PAUSE = 2e-5
"""The first pause between two checks of the store, in seconds."""


def given_timeout() -> float:
    """Return the seconds that a rank waits for another: those of `CURVOPS_RANK_TIMEOUT`, or 60.

    Raises ValueError if the environment variable is set to anything but a positive number.
    """
    given = os.environ.get(TIMEOUT_VARIABLE, str(TIMEOUT))
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < 1e9:
        raise ValueError(
            f"the environment variable {TIMEOUT_VARIABLE} must hold a positive number of seconds, the time for which a "
            f"rank waits for another, such as 600, got {given!r}."
        )
    return seconds


class WatchedGroup:
    """A process group in which a rank that waits for the others raises `RankFailedError` if one fails, ends or hangs.

    Args:
        group: a process group of torch.distributed.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        if not isinstance(group, dist.ProcessGroup) or _is_destroyed(group) or dist.get_rank(group) < 0:
            raise TypeError(
                "process_group must be a process group of torch.distributed that this process is in and that was not "
                f"destroyed, such as torch.distributed.group.WORLD after init_process_group, got {group!r}."
            )
        for earlier in [watched for watched in _troubled if watched.group is group]:
            if earlier._lost is not None:
                raise RankFailedError(
                    f"{earlier._lost} Since then the ranks of this process group are out of step: create another group."
                )
            earlier._settle()
        self.group: dist.ProcessGroup = group
        self.timeout = given_timeout()
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.messages = self.bytes_sent = 0
        """The number of collective calls made so far, and the bytes of their tensors."""
        self._earlier = 0  # the number of messages before those that this rank waits for
        self._beaten, self._longest, self._meetings = 0.0, 0.0, 0
        self._worked: float | None = None
        self._lost: str | None = None  # why no later call can succeed
        self._failed, self._settled = False, 0  # raised since the last message; errors common to all ranks
        self._told_at = time.monotonic()
        self._store: Any = _store_of(group)

    @property
    def names(self) -> str:
        """Describe this rank and the size of the group, for messages."""
        return f"rank {self.rank} of {self.size}"

    def beat(self) -> None:
        """Report, at most once a second, that this rank is at work on its own; raise if another one failed.

        This is for long work without messages, after which the ranks `meet`.
        """
        now = time.monotonic()
        self._longest = 0.0 if self._worked is None else max(self._longest, now - self._worked)
        self._worked = now
        if now - self._beaten > LATE:
            self._beaten = now
            with self._store_in_reach():
                self._store.set(f"beat {self.rank}", str(now))
                self._heed(self.messages)

    def meet(self) -> None:
        """Wait until all ranks have come here, as long as the others are at work; not inside a collective call.

        Raises RankFailedError if another rank failed, or has not called `beat` for the timeout plus ten times the
        longest time between two beats of this rank.
        """
        self._meetings += 1
        self._worked = None
        patience, pause = max(self.timeout, 10 * self._longest), PAUSE
        seen: dict[int, tuple[bytes, float]] = {}
        with self._store_in_reach():
            self._store.set(f"met {self._meetings} {self.rank}", "")
            while missing := [r for r in range(self.size) if not self._store.check([f"met {self._meetings} {r}"])]:
                self._heed(self.messages)
                now = time.monotonic()
                for r in missing:
                    beat = self._store.get(f"beat {r}") if self._store.check([f"beat {r}"]) else b""
                    if seen.setdefault(r, (beat, now))[0] != beat:
                        seen[r] = beat, now
                late = [r for r in missing if now - seen[r][1] > patience]
                if late:
                    raise RankFailedError(
                        f"{self.names} has finished and waits for the others; rank {', '.join(map(str, late))} "
                        f"did nothing for {patience:.0f} s: it hangs, has ended, or made different calls; "
                        f"{TIMEOUT_VARIABLE}=seconds lets ranks wait longer."
                    )
                time.sleep(pause)
                pause = min(LATE / 4, 2 * pause)

    @contextmanager
    def _store_in_reach(self) -> Iterator[None]:
        """Raise RankFailedError if the store, which the first rank keeps, no longer answers."""
        try:
            yield
        except RankFailedError:
            raise
        except RuntimeError as error:
            raise RankFailedError(
                f"the store of the process group no longer answers ({error}); rank 0 has ended."
            ) from error

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Report an error raised inside to the other ranks before it propagates."""
        try:
            yield
        except (RankFailedError, GeneratorExit):
            raise
        except BaseException as error:
            self._tell_of(error, self.messages)
            raise

    def at_work(self, seconds: float | None = None) -> None:
        """Report to ranks that wait for this one that it is at work, and for how many seconds it may not report again.

        Without these seconds it may be called often, at little cost.
        """
        now = time.monotonic()
        if self.size > 1 and (seconds is not None or now > self._told_at + self.timeout / SIGNS):
            self._told_at = now
            self._store.set(f"at work {self.rank}", f"{now} {seconds or 0.0}")

    def _tell_of(self, error: BaseException, messages: int) -> None:
        self._failed = True
        self._note()
        with suppress(RuntimeError):  # the store is gone if its process ended
            what = f"{self.names} raised {type(error).__name__}: {error}"
            for key in ("", f" {self.rank}"):
                self._store.set(f"failed {messages} {self._settled}{key}", what)

    def _heed(self, messages: int) -> None:
        """Raise RankFailedError if another rank raised an error after this number of messages."""
        mark = f"{messages} {self._settled}"
        if not self._failed and self._store.check([f"failed {mark}"]):
            self._store.set(f"left {mark}", "")
            self._lose(self._store.get(f"failed {mark}").decode())

    def _settle(self) -> None:
        """After an error, continue if all ranks raised one at this place; otherwise raise RankFailedError."""
        mark, begin = f"{self.messages} {self._settled}", time.monotonic()
        others = [rank for rank in range(self.size) if rank != self.rank]
        while missing := [rank for rank in others if not self._store.check([f"failed {mark} {rank}"])]:
            if self._store.check([f"left {mark}"]):
                self._lose(f"{self._store.get(f'failed {mark} {self.rank}').decode()} The other ranks gave up.")
            if time.monotonic() > begin + self.timeout:
                self._lose(
                    f"{self.names} waited {self.timeout:.0f} s after its error; missing: rank {_listed(missing)}."
                )
            time.sleep(LATE / 20)
        self._failed, self._settled = False, self._settled + 1
        _troubled.remove(self)

    def _lose(self, why: str) -> NoReturn:
        self._lost = why
        self._note()
        raise RankFailedError(why)

    def _note(self) -> None:
        if self not in _troubled:
            _troubled.append(self)

    def _wait(self, begin: Callable[[], Any], *tensors: Tensor) -> None:
        """Wait for a collective call of each tensor; raise RankFailedError if another rank failed, ended or is late."""
        if self._lost is not None:
            raise RankFailedError(self._lost)
        if _is_destroyed(self.group):
            self._lose("the process group of this linearisation was destroyed: linearise again over another group.")
        if self._failed:
            self._settle()
        self._earlier = self.messages
        self.messages += len(tensors)
        self.bytes_sent += sum(tensor.nbytes for tensor in tensors)
        try:
            begun = begin()
            for work in begun if isinstance(begun, list) else [begun]:
                if tensors[0].is_cuda:
                    work.wait(timedelta(seconds=self.timeout))
                    continue
                start, signs = time.monotonic(), _Signs()
                while not _ends_within(work, LATE):
                    self._look(time.monotonic() - start, signs)
        except RankFailedError:
            raise
        except RuntimeError as error:
            self._lose(self._why_broken(error))
        except BaseException as error:  # an interruption: the message is under way, and out of step from now on
            self._tell_of(error, self._earlier)
            self._lost = f"{self.names} was interrupted while it waited for the others ({type(error).__name__})."
            raise

    def _look(self, waited: float, signs: _Signs) -> None:
        """Check whether another rank failed while this one waits, and which ranks are missing once the time is over."""
        key = f"waiting {self.messages}"
        self._heed(self._earlier)
        if self._store.check(["broken"]):
            self._lose(self._why_broken("as another rank found"))
        self._store.set(f"{key} {self.rank}", "")
        missing = [rank for rank in range(self.size) if not self._store.check([f"{key} {rank}"])]
        signs.read(self._store, missing, waited)
        if waited > signs.seen + signs.promised + self.timeout:
            self._lose(
                f"{self.names} waited {waited:.0f} s for the others; missing: rank {_listed(missing)}. They hang, "
                f"have ended, or made different calls; {TIMEOUT_VARIABLE}=seconds lets ranks wait longer."
            )

    def _why_broken(self, error: object) -> str:
        try:
            self._heed(self._earlier)
            for key in ("broken", f"broken {self.rank}"):
                self._store.set(key, "")
            begin, dead = time.monotonic(), list(range(self.size))
            while len(dead) > 1 and time.monotonic() < begin + self.timeout:  # the others check each second
                dead = [rank for rank in range(self.size) if not self._store.check([f"broken {rank}"])]
                time.sleep(LATE / 20)
        except RankFailedError as raised:
            return str(raised)
        except RuntimeError:
            dead = [0]  # its store no longer answers
        return f"the connection to another rank broke ({error}); it has ended: rank {_listed(dead)}."


_troubled: list[WatchedGroup] = []
"""Groups in which a rank raised an error, after which their ranks may be out of step."""


class _Signs:
    """The time at which a missing rank last reported work, in seconds of this wait, and how long it may be silent."""

    def __init__(self) -> None:
        self.seen = self.promised = 0.0
        self._known: dict[int, str] = {}

    def read(self, store: Any, missing: list[int], waited: float) -> None:
        self.promised = 0.0
        for rank in missing:
            key = f"at work {rank}"
            said = store.get(key).decode() if store.check([key]) else "0 0"
            if said != self._known.setdefault(rank, said):
                self._known[rank], self.seen = said, waited
            self.promised = max(self.promised, float(said.split()[1]))


def _is_destroyed(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_rank(group)
    except ValueError:
        return True
    return False


def _store_of(group: dist.ProcessGroup) -> Any:
    """Return the store through which the processes of a group met; torch 2.7 has no public call for it."""
    own = getattr(group, "get_group_store", None)
    return dist.distributed_c10d._get_process_group_store(group) if own is None else own()


def _ends_within(work: Any, seconds: float) -> bool:
    """Wait for a message for this time, and return whether it ended; gloo raises for late and broken messages alike."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises again if it is broken
    return True


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) or "none that can be told"
