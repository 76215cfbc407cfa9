"""Random numbers of the library: a stream of its own for passes, and normal numbers of draws and points.

A pass leaves the user's random state unchanged. Some models draw numbers that have no effect (dropout of probability
0), and a DataLoader draws a seed in every pass. Their stream continues from pass to pass, so that random outputs differ
between passes and are detected.

`PointNormals` are numbers that belong to a draw and a point, independent of batches and of the order of a walk. Philox
(Salmon et al. 2011) computes its numbers from a key and a counter and needs no state. Here the key is a seed, and the
counter is the draw and the number's position in it, so that each batch or process computes its own part.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checks import drawn_seed

T = TypeVar("T")
_lock = threading.Lock()


def items(source: Iterable[T], device: torch.device) -> Iterator[T]:
    """Yield the items of `source`, each computed under the library's random stream."""
    if type(source) in (list, tuple):  # these draw nothing
        yield from source
        return
    with own_randomness(device):
        iterator = iter(source)
    while True:
        with own_randomness(device):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


class _Stream:
    """One default generator and the two states that it alternates between; a context, as in `own_randomness`."""

    def __init__(self, generator: Any) -> None:
        self._generator, self._inside = generator, 0
        self._own_state = torch.Generator(generator.device).manual_seed(0).get_state()
        self._users_state = self._own_state

    def __enter__(self) -> None:
        with _lock:
            if self._inside == 0:
                self._users_state = self._generator.get_state()
                self._generator.set_state(self._own_state)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with _lock:
            self._inside -= 1
            if self._inside == 0:
                self._own_state = self._generator.get_state()
                self._generator.set_state(self._users_state)


class _Streams:
    """The streams of several generators, entered together."""

    def __init__(self, *streams: _Stream) -> None:
        self._streams = streams

    def __enter__(self) -> None:
        for stream in self._streams:
            stream.__enter__()

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.__exit__()


_of_processor = _Stream(torch.default_generator)


@cache
def own_randomness(device: torch.device) -> _Stream | _Streams:
    """Return a context that puts torch's default generators of the CPU and of `device` into the library's stream.

    It may be nested, and entered by several threads at once: the first saves the user's state, the last restores it.
    Costs about 5 µs.
    """
    if device.type == "cpu":
        return _of_processor
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    if device.index is None:
        return own_randomness(torch.device(device.type, index))
    generators = getattr(module, "default_generators", ())
    return _Streams(_of_processor, *(_Stream(generator) for generator in generators[index : index + 1]))


@dataclass(frozen=True)
class PointNormals:
    """The standard normal numbers of a seed: one for each draw, point and output."""

    seed: int

    @classmethod
    def drawn(cls, generator: torch.Generator | None) -> PointNormals:
        """Return the numbers of a seed drawn from this source, by default torch's own."""
        return cls(drawn_seed(generator))

    def block(self, draws: range, points: slice, outputs: int, like: Tensor) -> Float[Tensor, "k n {outputs}"]:
        """Return the numbers of some draws and points, `outputs` per point, in the dtype and device of `like`.

        Each number depends only on (seed, draw, point, output): equal requests give equal numbers, whatever else is
        requested. A number takes 10 to 15 ns on a CPU: half of `torch.randn` in float64, twice that in float32.
        """
        count = points.stop - points.start
        numbers = torch.empty(len(draws), count * outputs, dtype=like.dtype, device=like.device)
        together = max(1, 2**15 // max(1, count * outputs))  # stays in a CPU's cache
        for start, rows in zip(range(0, len(draws), together), numbers.split(together)):
            self._fill(rows, draws[start : start + together], points.start * outputs)
        return numbers.unflatten(1, (count, outputs))

    def _fill(self, rows: Float[Tensor, "k m"], draws: range, first: int) -> None:
        """Fill rows with the numbers of these draws from `first` on, by the inverse of the distribution function."""
        counter, earlier = divmod(first, 4)  # each counter stands for four numbers
        sources = [np.random.Philox(key=self.seed, counter=[counter, draw, 0, 0]) for draw in draws]
        for source in sources:
            source.random_raw(earlier)
        for chunk in rows.split(2**15, 1):
            bits = np.stack([source.random_raw(chunk.shape[1]) for source in sources]) >> np.uint64(12)
            uniform = torch.from_numpy(bits.view(np.int64)).to(chunk.device).double().add_(0.5).mul_(2.0**-51).sub_(1)
            chunk.copy_(uniform.erfinv_().mul_(math.sqrt(2)))  # all steps except these are exact, and ±1 cannot occur
