"""What a long run has reached, in a folder: saved as it goes, read by the run that goes on after a crash.

An algorithm opens its checkpoint, asks it what an earlier run `reached` or finished, and calls `save` at each of its
steps, which mostly does nothing: a save comes at most every `PAUSE` seconds, and so seldom that saves take no more than
`SHARE` of the run. Folders are those of `storage`: whole, whenever the process is killed. Steps inside a step keep
folders of their own, `part(name)`, which go when the result is there.

What is stored says of which problem it is, name by name; a checkpoint of another is refused. The result stays in the
folder, so that a script that is run again does not compute it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvops import storage

KIND, VERSION = "checkpoint", 1
PAUSE = 30.0
"""Seconds between two saves, at least."""
SHARE = 0.02
"""Of the time of a run, for saves."""
SPEED = 1e8
"""Bytes a second that a disk is taken to write until it was seen."""

Place = str | os.PathLike[str]


class NotSaved(UserWarning):
    """A checkpoint could not be written; the run goes on."""


class Checkpoint:
    """The folder of one run.

    `reached` is the state that an earlier run saved last and `result` what it ended with, None where there is none.
    Without a path nothing is read or written.
    """

    def __init__(
        self,
        path: Place | None,
        what: str,
        problem: Callable[[], Mapping[str, Any]],
        device: torch.device | None = None,
    ) -> None:
        """Read what is there, or write that nothing is reached yet.

        Args:
            path: the folder; None keeps nothing.
            what: the algorithm.
            problem: by name, what tells this problem from others: plain values, which must be equal, and tensors of
                numbers, which may differ by rounding. Asked for only where there is a path.
            device: where tensors go that came from an accelerator.

        Raises:
            OSError: the folder cannot be written, or the disk is full.
            ValueError: the folder holds another problem, another algorithm or something damaged.
            TypeError: path is no path.
        """
        self.folder = None if path is None else storage.folder_of(path)
        self.reached: Any = None
        self.result: Any = None
        self._others: dict[str, Callable[[], Any]] = {}
        self._device, self._took, self._told = device, 0.0, False
        if self.folder is None:
            return
        self._about = {"algorithm": what} | dict(problem())
        found = self._read()
        if found is not None:
            self._require_same(found["problem"])
            self.reached, self.result = (_unpacked(found[name], device) for name in ("reached", "result"))
        if self.result is None:
            self._write(self.reached, None)  # a folder that cannot be written is better known now
        self._saved = time.monotonic()
        self._due = self._saved + PAUSE
        self._took = 0.0

    def __bool__(self) -> bool:
        return self.folder is not None

    def part(self, name: str) -> Path | None:
        """The folder of a step inside."""
        return None if self.folder is None else self.folder / name

    def also(self, name: str, state: Callable[[], Any]) -> Any:
        """Save this beside the state from now on; returns what was saved so, None where nothing was."""
        if self.folder is None:
            return None
        self._others[name] = state
        known = self.reached if self.result is None else self.result
        return None if known is None else known["others"].get(name)

    def source(self, name: str, generator: torch.Generator | None, device: torch.device) -> torch.Generator | None:
        """A source of random numbers whose state is saved, and restored: the one given, else one of its own."""
        if self.folder is None:
            return generator
        kept = torch.Generator(device).manual_seed(_seed()) if generator is None else generator
        known = self.also(name, kept.get_state)
        if known is not None:
            kept.set_state(known.cpu())
        return kept

    def save(self, state: Callable[[], Any], now: bool = False) -> None:
        """Save this state if it is time to, or `now`."""
        if self.folder is None or not (now or time.monotonic() >= self._due):
            return
        tree = {"state": state(), "others": {name: other() for name, other in self._others.items()}}
        expected = self._took or _nbytes(tree) / SPEED
        if not now and time.monotonic() < self._saved + expected / SHARE:
            self._due = self._saved + expected / SHARE
            return
        self._written(tree, None)

    def finish(self, result: Any) -> None:
        """Save what the run ended with, in place of all that led to it."""
        if self.folder is None:
            return
        self._written(None, {"result": result, "others": {name: other() for name, other in self._others.items()}})
        for each in self._parts():
            storage.discard(each, KIND)

    def forget(self, name: str) -> None:
        """Remove a part that is not needed any more."""
        if self.folder is not None:
            storage.discard(self.folder / name, KIND)

    @property
    def state(self) -> Any:
        """What the algorithm itself had saved, None where nothing was."""
        return None if self.reached is None else self.reached["state"]

    @property
    def outcome(self) -> Any:
        """What the algorithm ended with."""
        return None if self.result is None else self.result["result"]

    def _parts(self) -> Iterator[Path]:
        assert self.folder is not None
        with contextlib.suppress(OSError):
            yield from [each for each in self.folder.iterdir() if each.is_dir()]

    def _read(self) -> Any:
        assert self.folder is not None
        try:
            return storage.load(self.folder, KIND, VERSION)[1]
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(f"{error} To begin anew, delete the folder or give another path.") from error

    def _written(self, reached: Any, result: Any) -> None:
        begin = time.monotonic()
        try:
            self._write(reached, result)
        except OSError as error:
            if not self._told:
                warnings.warn(f"{error} The run goes on and will try again.", NotSaved, stacklevel=4)
            self._told = True
        self._saved = time.monotonic()
        self._took = self._saved - begin
        self._due = self._saved + max(PAUSE, self._took / SHARE)

    def _write(self, reached: Any, result: Any) -> None:
        assert self.folder is not None
        tree = {"problem": self._about, "reached": _packed(reached), "result": _packed(result)}
        storage.save(self.folder, KIND, VERSION, tree)

    def _require_same(self, known: Mapping[str, Any]) -> None:
        other = [name for name in self._about if not _same(known.get(name), self._about[name])]
        if other:
            raise ValueError(
                f"{self.folder} is a checkpoint of another problem: what differs is "
                f"{', '.join(_difference(name, known.get(name), self._about[name]) for name in other)}. Give another "
                "path, or delete the folder to begin anew."
            )


NOTHING = Checkpoint(None, "", dict)
"""That of a run that keeps none."""


def digest(tensors: Sequence[Tensor]) -> str:
    """A text that is equal for equal numbers of equal shapes and dtypes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        numbers = tensor.detach().resolve_conj().cpu().contiguous().reshape(-1)
        found.update(numbers.view(torch.uint8).numpy().data)
    return found.hexdigest()


def seed_of(generator: torch.Generator | None) -> str | None:
    """What distinguishes a source of random numbers, at its present state, from others."""
    return None if generator is None else digest([generator.get_state()])


def seeded_as(generator: torch.Generator | None, device: torch.device) -> torch.Generator | None:
    """A source of other numbers, equal for equal states of this one, which it leaves as it is."""
    seed = seed_of(generator)
    return None if seed is None else torch.Generator(device).manual_seed(int(seed[:15], 16))


def _seed() -> int:
    return int(torch.randint(2**62, ()))


def _same(known: Any, given: Any) -> bool:
    if isinstance(given, Tensor):
        if not isinstance(known, Tensor) or known.shape != given.shape or known.dtype != given.dtype:
            return False
        slack = math.sqrt(torch.finfo(given.dtype).eps) * float(given.abs().max()) if given.numel() else 0.0
        return bool(((known - given.cpu()).abs() <= slack).all()) or bool((known.isnan() & given.cpu().isnan()).any())
    plain = list(given) if isinstance(given, tuple) else given
    return bool(known == plain)


def _difference(name: str, known: Any, given: Any) -> str:
    short = all(
        value is None or (isinstance(value, bool | int | float | str) and len(str(value)) < 40)
        for value in (known, given)
    )
    return f"{name} ({known!r}, here {given!r})" if short else name


def _packed(tree: Any) -> Any:
    """The tree with tensors of accelerators marked as such."""
    if isinstance(tree, Tensor):
        return tree if tree.device.type == "cpu" else {"on accelerator": tree}
    if isinstance(tree, Mapping):
        return {key: _packed(value) for key, value in tree.items()}
    return [_packed(value) for value in tree] if isinstance(tree, list | tuple) else tree


def _unpacked(tree: Any, device: torch.device | None) -> Any:
    if isinstance(tree, dict):
        if "on accelerator" in tree:
            return tree["on accelerator"].to(device)
        return {key: _unpacked(value, device) for key, value in tree.items()}
    return [_unpacked(value, device) for value in tree] if isinstance(tree, list) else tree


def _nbytes(tree: Any) -> int:
    if isinstance(tree, Tensor):
        return tree.nbytes
    if isinstance(tree, Mapping):
        return sum(map(_nbytes, tree.values()))
    return sum(map(_nbytes, tree)) if isinstance(tree, list | tuple) else 0
