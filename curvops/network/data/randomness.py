"""Random numbers of a pass, drawn from a stream of the library's own: the user's random state is unchanged.

Some models draw numbers that have no effect (dropout of probability 0), and a DataLoader draws a seed in every pass.
The stream continues from pass to pass, so that random outputs differ between passes and are detected.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, TypeVar

import torch

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
