"""The memory budget: by default a share of the device's free memory, with the present users of a budget."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch

from curvops.ambient import SMALL_BYTES
from curvops.ranks.process_group import Ranks

# If neither the kernel nor a control group reports it, a small machine is assumed.
UNKNOWN = 4 * 2**30
LEAST_ROOM = SMALL_BYTES
"""Vectors may take this much whatever the budget is."""


@runtime_checkable
class Caching(Protocol):
    """A cache of engines that are kept between products."""

    @property
    def kept_bytes(self) -> int:
        """The bytes of the engines that are kept now."""

    @property
    def wanted_bytes(self) -> int:
        """The bytes that all engines of the cache would take."""

    def shrink(self, most: int) -> None:
        """Free engines until at most this many bytes are kept."""

    def expect_many(self) -> None:
        """Choose engines as for many products."""


class Budget:
    """One budget of bytes, shared by the engines kept between products and the vectors of algorithms.

    If both need more than there is, each gets half: engines are freed while vectors hold their half, and are built
    again, within the remaining bytes, when later products need them. In a budget with `of_ranks`, vectors always get
    half of the bytes, less those that algorithms hold now, so that the ranks of a group have equal room: their engines
    differ with the shards, and what is kept with an owner ends when its garbage is collected. Pickling and copying drop
    the contents.
    """

    def __init__(self, budget: int, device: torch.device | None = None, of_ranks: Ranks | None = None) -> None:
        self.budget, self.device, self.of_ranks = budget, device, of_ranks
        self._lock = threading.RLock()
        self._held = self._kept = 0
        self._caches: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """The caches that still exist, in the order in which they came."""

    def __reduce__(self) -> tuple[type[Budget], tuple[Any, ...]]:
        return Budget, (self.budget, self.device, self.of_ranks)

    def on(self, device: torch.device | None) -> Budget:
        """Return the budget of the same network in another dtype (this one), or on another device (as much there)."""
        return self if device in (None, self.device) else Budget(self.budget, device, self.of_ranks)

    def register(self, cache: Caching) -> None:
        """Count the bytes that this cache keeps."""
        with self._lock:
            self._caches[id(cache)] = cache

    @property
    def for_engines(self) -> int:
        """The bytes that further engines may take now; negative if vectors have taken bytes from engines."""
        left = self.budget - self._held - self._kept
        for cache in self._caches.values():
            left -= cache.kept_bytes
        return left

    def room(self) -> int:
        """Return the bytes that an algorithm starting now may take for its vectors; 0 or less if all are in use."""
        most, half = max(self.budget, LEAST_ROOM) - self._held, self.budget // 2
        if self.of_ranks is not None:
            return most - half
        wanted = 0
        for cache in self._caches.values():
            wanted += max(cache.kept_bytes, cache.wanted_bytes)
        return most - self._kept - min(half, wanted)

    @contextmanager
    def holding(self, nbytes: int) -> Iterator[None]:
        """Count these bytes of vectors as used inside a `with` block, and free engines beyond the rest."""
        self._take(held_bytes=nbytes)
        try:
            yield
        finally:
            self._take(held_bytes=-nbytes)

    def keep(self, owner: object, nbytes: int) -> None:
        """Count these bytes of vectors as used for as long as ``owner`` exists."""
        self._take(kept_bytes=nbytes)
        weakref.finalize(owner, self._take, kept_bytes=-nbytes).atexit = False

    def expect_many(self) -> None:
        """Announce more products than have been made so far."""
        for cache in self._caches.values():
            cache.expect_many()

    def _take(self, held_bytes: int = 0, kept_bytes: int = 0) -> None:
        with self._lock:
            self._held, self._kept = self._held + held_bytes, self._kept + kept_bytes
        if held_bytes + kept_bytes > 0 and self.for_engines < 0:
            for cache in self._caches.values():
                if (lacking := -self.for_engines) > 0:
                    cache.shrink(max(0, cache.kept_bytes - lacking))


def default_budget(device: torch.device) -> int:
    """Return a quarter of the bytes free on the device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 4
    return min(_machine_bytes(), _group_bytes()) // 4


def _machine_bytes() -> int:
    try:
        _, separator, rest = _text("/proc/meminfo").partition("MemAvailable:")
        if separator:
            return int(rest.split(maxsplit=1)[0]) * 1024
    except OSError:
        pass
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return UNKNOWN


def _group_bytes() -> int:
    """Return the bytes that a control group (a container) leaves free, or no limit."""
    try:
        return int(_text("/sys/fs/cgroup/memory.max")) - int(_text("/sys/fs/cgroup/memory.current"))
    except (OSError, ValueError):
        return 2**63 - 1


def _text(path: str) -> str:
    file = os.open(path, os.O_RDONLY)  # `open` takes three times as long
    try:
        return os.read(file, 2**16).decode()
    finally:
        os.close(file)
