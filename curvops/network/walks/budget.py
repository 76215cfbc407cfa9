"""The memory budget, by default a share of the device's free memory, and J of a batch by an engine that counts in it.

The budget is shared by engines, which are kept between products, and the vectors of algorithms, for which engines give
way.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from curvops.ambient import SMALL_BYTES
from curvops.network.engines.autodiff import Streamed
from curvops.network.engines.engine import Engine
from curvops.network.model.model import Model
from curvops.ranks.process_group import Ranks


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
        self._caches: list[weakref.ref[Any]] = []
        """The caches, which may exist no longer, in the order in which they came."""

    @classmethod
    def of(cls, nbytes: int | None, device: torch.device, ranks: Ranks | None = None) -> Budget:
        """Return the budget that a user chose, or the default one; of several ranks the smallest."""
        nbytes = default_budget(device) if nbytes is None else nbytes
        return cls(nbytes if ranks is None else min(ranks.gather(nbytes)), device, ranks)

    def __reduce__(self) -> tuple[type[Budget], tuple[Any, ...]]:
        return Budget, (self.budget, self.device, self.of_ranks)

    def on(self, device: torch.device | None) -> Budget:
        """Return the budget of the same network in another dtype (this one), or on another device (as much there)."""
        return self if device in (None, self.device) else Budget(self.budget, device, self.of_ranks)

    def register(self, cache: Any) -> None:
        """Count the bytes that a walk keeps."""
        with self._lock:
            others = [ref for ref in self._caches if ref() is not None and ref() is not cache]
            self._caches = [*others, weakref.ref(cache)]  # a new list: another thread may be counting the old one

    @property
    def for_engines(self) -> int:
        """The bytes that further engines may take now; negative if vectors have taken bytes from engines."""
        left = self.budget - self._held - self._kept
        for ref in self._caches:
            if (cache := ref()) is not None:
                left -= cache.kept_bytes
        return left

    def room(self) -> int:
        """Return the bytes that an algorithm starting now may take for its vectors; 0 or less if all are in use."""
        most, half = max(self.budget, SMALL_BYTES) - self._held, self.budget // 2
        if self.of_ranks is not None:
            return most - half
        wanted = 0
        for ref in self._caches:
            if (cache := ref()) is not None:
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

    def _take(self, held_bytes: int = 0, kept_bytes: int = 0) -> None:
        with self._lock:
            self._held, self._kept = self._held + held_bytes, self._kept + kept_bytes
        if held_bytes + kept_bytes > 0 and self.for_engines < 0:
            for ref in self._caches:
                if (cache := ref()) is not None and (lacking := -self.for_engines) > 0:
                    cache.shrink(max(0, cache.kept_bytes - lacking))


def default_budget(device: torch.device) -> int:
    """Return a quarter of the bytes free on the device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 4
    return min(_machine_bytes(), _group_bytes()) // 4


def _machine_bytes() -> int:
    try:
        _, separator, rest = Path("/proc/meminfo").read_text().partition("MemAvailable:")
        if separator:
            return int(rest.split(maxsplit=1)[0]) * 1024
    except OSError:
        pass
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 * 2**30  # neither the kernel nor a control group reports it: a small machine


def _group_bytes() -> int:
    """Return the bytes that a control group (a container) leaves free, or no limit."""
    try:
        return int(Path("/sys/fs/cgroup/memory.max").read_text()) - int(
            Path("/sys/fs/cgroup/memory.current").read_text()
        )
    except (OSError, ValueError):
        return 2**63 - 1


class BatchMap:
    """J of one batch on flat vectors: push (D, K) -> (K, n, C) and pull (K, n, C) -> (D, K), both differentiable."""

    def __init__(self, engine: Engine, model: Model, points: slice) -> None:
        self.engine, self._selection, self._lock = engine, model.selection, model.lock
        self.points = points
        """The positions of the batch's points among all points of the walk."""

    @property
    def outputs(self) -> Float[Tensor, "n C"]:
        """The outputs f(θ, inputs)."""
        with self._lock:
            return self.engine.outputs

    def pull_of(self, cotangent: Callable[[Tensor], Tensor]) -> Float[Tensor, "D 1"]:
        """Return Jᵀ u for a function u of the outputs, which one pass computes with their graph."""
        with self._lock:
            if isinstance(self.engine, Streamed):
                self.engine.record()
        return self.pull(cotangent(self.outputs)[None])

    def push(self, vectors: Float[Tensor, "D K"]) -> Float[Tensor, "K n C"]:
        """Return J V."""
        if torch.is_grad_enabled() and vectors.requires_grad:
            return linear(vectors, self.push, self.pull)
        with self._lock:
            return self.engine.push(self._selection.split(vectors.detach()))

    def pull(self, cotangents: Float[Tensor, "K n C"]) -> Float[Tensor, "D K"]:
        """Return Jᵀ U."""
        if torch.is_grad_enabled() and cotangents.requires_grad:
            return linear(cotangents, self.pull, self.push)
        with self._lock:
            return self._selection.join(self.engine.pull(cotangents.detach()))


class _Linear(Function):
    """A linear map with its adjoint, for autograd; both give their own derivatives while gradients are recorded."""

    @staticmethod
    def forward(ctx: Any, argument: Tensor, apply: Any, adjoint: Any) -> Tensor:
        ctx.adjoint = adjoint
        return apply(argument)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(gradient), None, None


def linear(argument: Tensor, apply: Any, adjoint: Any) -> Tensor:
    """Return a linear map's value, with derivatives of any order by its adjoint, which is recorded in the same way."""
    return _Linear.apply(argument, apply, adjoint)  # type: ignore[no-untyped-call]
