"""Checkpoints of long runs: the state, saved in a folder as a run proceeds, from which it resumes after a crash.

A public function with the keyword `checkpoint` is an `algorithm` (`linalg/core/algorithm.py`). Once it has checked its
arguments it calls `begin`, looks up the state or the result of an earlier run, and calls `save` at each of its steps.
Most of these calls do nothing: a save comes at most every `PAUSE` seconds, and later saves take no more than `SHARE` of
the run. The folders are those of `storage`, which are complete whenever the process is killed.

In a run with `parts`, each algorithm that it calls saves its progress in a folder inside the run's own,
without being given an argument, just as progress bars work. These parts are numbered in the order in which they run,
and a resumed run continues the numbering from where it was saved; parts are deleted once the state that follows them
is written. Computations done `aside` (products, preconditioners, callbacks) save nothing.

A checkpoint records its problem, by the names of the function's arguments, and is rejected for another problem. A part
is identified by its position alone. The result stays in the folder, so that a script that is run again does not compute
it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from curvops import storage
from curvops.ambient import current_run
from curvops.checks import drawn_seed
from curvops.errors import CheckpointWarning, warn
from curvops.ranks.process_group import Ranks
from curvops.storage import from_record, record_of

KIND, VERSION = "checkpoint", 9
PAUSE = 30.0
"""The least number of seconds between two saves."""
SHARE = 0.02
"""The largest share of a run's time that saves may take."""
ASIDE = ("checkpoint", "progress", "callback", "memory_budget", "preconditioner", "solver")
"""Arguments that determine how a problem is solved but not which problem it is, or that cannot be identified."""
DEEPEST = 6
"""The largest depth of nested objects that `identify` describes."""
DEVICE = re.compile(r"(cuda|xpu|hpu):\d+")
COMMON = frozenset(vars(nn.Module()))
"""The attributes of every module."""
TOLD = (Tensor, LinearOperator, str, int, float, tuple, list, torch.Size)
"""Arguments by which an operator is told; others are caches, budgets and functions."""

Place = str | os.PathLike[str]
T = TypeVar("T")


class Checkpoint:
    """The folder of one run, with the last state and the result of an earlier run.

    Without a path nothing is read or written.
    """

    def __init__(
        self,
        path: Place | None,
        what: str,
        problem: Callable[[], Mapping[str, Any]] = dict,
        device: torch.device | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Read the folder, or record that nothing has been reached yet.

        Args:
            path: the folder; None saves nothing.
            what: the algorithm.
            problem: by name, what distinguishes this problem from others: plain values, which must be equal, and
                tensors of numbers, which may differ by rounding. Called only if there is a path.
            device: the device for tensors that came from an accelerator.
            ranks: the processes of a group that make this run together, with equal states. Only the first reads and
                writes; what it read or raised reaches all of them.

        Raises:
            OSError: the folder cannot be written, or the disk is full.
            ValueError: the folder contains another problem, another algorithm or damaged files.
            TypeError: path is not a path.
        """
        self.folder = None if path is None else storage.folder_of(path)
        self._reached: Any = None
        self._ended: Any = None
        self._attached: dict[str, Callable[[], Any]] = {}
        self._told = False
        self._count, self._to_discard, self._name = 0, list[Path](), ""
        self.held: dict[str, Any] = {}
        """Objects that parts of the whole run store, by name."""
        self.whole = self
        """The outermost run that this one is a step of."""
        self.ranks = ranks
        if self.folder is None:
            return
        self._about = {"algorithm": what, **problem()}
        tree = self._begin() if ranks is None else ranks.from_first(self._begin)
        if tree is not None:
            self._reached, self._ended = (_unpack(tree[name], device) for name in ("reached", "result"))
            self._count = self._reached["parts"] if self._reached else 0
        self._due = time.monotonic() + PAUSE

    @property
    def _writes(self) -> bool:
        """Whether this process writes to the folder."""
        return self.folder is not None and (self.ranks is None or self.ranks.rank == 0)

    def __bool__(self) -> bool:
        return self.folder is not None

    @property
    def done(self) -> bool:
        """Whether an earlier run finished."""
        return self._ended is not None

    @property
    def state(self) -> Any:
        """The last state saved before the end, or None."""
        return None if self._reached is None else self._reached["state"]

    @property
    def outcome(self) -> Any:
        """The result of an earlier run, as plain values and tensors; None if no run finished."""
        return None if self._ended is None else self._ended["result"]

    def result(self, kind: type[T]) -> T:
        """Return the result of an earlier run as a dataclass of this kind."""
        return from_record(kind, self.outcome)

    def part(self, name: str) -> Path | None:
        """Return the folder of a named step inside."""
        return None if self.folder is None else self.folder / name

    def step(self, name: str, device: torch.device, alone: bool = False) -> Checkpoint:
        """Return the checkpoint of a named step inside, which this process may run alone; it has no steps itself."""
        return Checkpoint(self.part(name), name, device=device, ranks=None if alone else self.ranks)

    def next_part(self, what: str) -> Path | None:
        """Return the folder of the next step inside."""
        if self.folder is None or self._name:
            return self.part(self._name)
        self._count += 1
        self._to_discard.append(self.folder / f"{what}-{self._count}")
        return self._to_discard[-1]

    @contextlib.contextmanager
    def name_part(self, name: str) -> Iterator[None]:
        """Give the next step inside this name instead of a number, so that its folder stays until the run ends."""
        self._name = name
        try:
            yield
        finally:
            self._name = ""

    def attach(self, name: str, state: Callable[[], Any]) -> Any:
        """Save this value with the state from now on; return the value from an earlier run, or None."""
        if self.folder is None:
            return None
        self._attached[name] = state
        earlier = self._reached if self._ended is None else self._ended
        return None if earlier is None else earlier["others"].get(name)

    def source(self, name: str, generator: torch.Generator | None, device: torch.device) -> torch.Generator | None:
        """Return a source of random numbers whose state is saved and restored: the given one, or a new one."""
        if self.folder is None:
            return generator
        source = torch.Generator(device).manual_seed(drawn_seed(None)) if generator is None else generator
        state = self.attach(name, source.get_state)
        if state is not None:
            source.set_state(state.cpu())
        return source

    def save(self, state: Callable[[], Any], now: bool = False) -> None:
        """Save this state (plain values, tensors and dataclasses) if a save is due or `now` is true."""
        if self.folder is None or not self._writes or not (now or time.monotonic() >= self._due):
            return
        tree = record_of({"state": state(), "others": self._attachments(), "parts": self._count})
        if self._try_write(tree, None):
            while self._to_discard:
                storage.discard(self._to_discard.pop(), KIND)

    def finish(self, result: T) -> T:
        """Save the result of the run in place of its state and steps; return it."""
        if self.folder is not None and self._writes:
            tree = record_of({"result": result, "others": self._attachments()})
            if self._try_write(None, tree):
                for folder in self._parts():
                    storage.discard(folder, KIND)
        return result

    def _attachments(self) -> dict[str, Any]:
        return {name: other() for name, other in self._attached.items()}

    def _parts(self) -> list[Path]:
        assert self.folder is not None
        with contextlib.suppress(OSError):
            return [path for path in self.folder.iterdir() if path.is_dir()]
        return []

    def _begin(self) -> Any:
        """Return the tree of an earlier run, or None; check at once whether the folder can be written."""
        tree = self._read()
        if tree is not None:
            self._require_same(tree["problem"])
        if tree is None or tree["result"] is None:
            self._write(None if tree is None else tree["reached"], None)
        return tree

    def _read(self) -> Any:
        assert self.folder is not None
        try:
            version, tree = storage.load(self.folder, KIND, VERSION)
            if version < VERSION:
                raise ValueError(f"{self.folder} is a checkpoint of an earlier version of curvops and cannot be read.")
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(f"{error} To start again, delete the folder or pass another path.") from error
        return tree

    def _try_write(self, reached: Any, result: Any) -> bool:
        begin, done = time.monotonic(), True
        try:
            self._write(reached, result)
        except OSError as error:
            done = False
            if not self._told:
                warn(f"{error} The run continues and will try again.", CheckpointWarning)
            self._told = True
        now = time.monotonic()
        self._due = now + max(PAUSE, (now - begin) / SHARE)
        return done

    def _write(self, reached: Any, result: Any) -> None:
        assert self.folder is not None
        tree = {"problem": self._about, "reached": _pack(reached), "result": _pack(result)}
        storage.save(self.folder, KIND, VERSION, tree)

    def _require_same(self, saved: Mapping[str, Any]) -> None:
        differing = [name for name in self._about if not _same(saved.get(name), self._about[name])]
        if differing:
            raise ValueError(
                f"{self.folder} is a checkpoint of another problem. What differs: "
                f"{', '.join(_difference(name, saved.get(name), self._about[name]) for name in differing)}. Pass "
                "another path, or delete the folder to start again."
            )


NOTHING = Checkpoint(None, "")
"""The checkpoint of a run that has none, which saves nothing."""


def begin(
    what: str,
    path: Place | None,
    problem: Callable[[], Mapping[str, Any]],
    device: torch.device,
    parts: bool = False,
    ranks: Ranks | None = None,
    **instead: Any,
) -> Checkpoint:
    """Return the checkpoint of the current `algorithm`: at this path, or a part of the run it is a step of.

    Args:
        what: the algorithm.
        path: the user's path.
        problem: values that identify the function's first argument, by name; other arguments identify themselves.
        device: as in `Checkpoint`.
        parts: whether steps inside this run save their progress, too.
        ranks: as in `Checkpoint`, by default those that share the data of the matrix; steps inside use those of their
            run.
        instead: by name, values for arguments that do not identify themselves.

    Raises:
        OSError, ValueError, TypeError: as `Checkpoint` does.
    """
    run = current_run()
    if path is None and run.checkpoint is None:
        return NOTHING
    if path is None:
        outer = run.checkpoint
        checkpoint = Checkpoint(outer.next_part(what), what, device=device, ranks=outer.ranks)
        checkpoint.whole = outer.whole
    else:
        if ranks is None:
            ranks = next((memory.of_ranks for memory in run.memories if memory.of_ranks is not None), None)
        checkpoint = Checkpoint(path, what, lambda: {**problem(), **_arguments(instead)}, device, ranks)
    run.checkpoint = checkpoint if parts else None
    return checkpoint


def current() -> Checkpoint:
    """Return the checkpoint of the run that this is a step of."""
    return current_run().checkpoint or NOTHING


def _arguments(instead: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that identify the arguments of the current function, without its first."""
    signature, args, options = current_run().call
    bound = signature.bind(*args, **options)
    bound.apply_defaults()
    arguments = {name: value for name, value in list(bound.arguments.items())[1:] if name not in ASIDE}
    return {name: _numbers(value) for name, value in {**arguments, **instead}.items()}


def _numbers(value: Any) -> Any:
    """Return a value that identifies an argument: a plain value itself, a tensor's numbers, a text for the rest."""
    if isinstance(value, Tensor):
        long = torch.atleast_1d(value.detach() if value.ndim < 2 or len(value) >= value.shape[1] else value.detach().mT)
        normal = torch.randn(len(long), dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(long.device)
        return torch.stack([torch.linalg.vector_norm(long.double(), dim=0), normal @ long.double()]).cpu()
    if isinstance(value, torch.Generator):
        return seed_of(value)
    return value if value is None or isinstance(value, bool | int | float | str) else identify(value)


def identify(value: Any) -> str:
    """Return a text that is equal in every process for values of equal effect, as far as that can be told.

    A tensor is told by all its numbers, a module by the classes and settings of its parts and by its tensors, an
    operator by its arguments, another object by its class and its attributes (or by `identified_by`, if it has that). A
    function is told by its name alone, and so is an object that holds more than plain values (locks, files).
    """
    try:
        text = _text(value, DEEPEST, {})
    except UnidentifiedValueError:
        text = type(value).__qualname__
    if len(text) > 200:
        return f"{type(value).__qualname__} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return text


class UnidentifiedValueError(Exception):
    """Raised for an object that does not consist of plain values."""


def _text(value: Any, depth: int, seen: dict[int, Any]) -> str:
    """Describe a value; objects in `seen` were described before, and nested ones only down to some depth."""
    kind = type(value)
    if isinstance(value, Tensor):
        number = value.numel() == 1 and not value.is_meta
        numbers = f"{value.item()!r}, {value.dtype}, {tuple(value.shape)}" if number else digest([value])
        return f"{kind.__qualname__}({numbers})"
    if isinstance(value, torch.Generator):
        return f"Generator({seed_of(value)})"
    if isinstance(value, torch.device) or (isinstance(value, str) and DEVICE.fullmatch(value)):
        return str(value).partition(":")[0]  # ranks, and a run that is resumed, may have other ones
    if isinstance(value, Enum):
        return f"{kind.__qualname__}.{value.name}"
    if isinstance(value, float):
        return repr(float(value))  # NumPy's numbers, too
    if value is None or isinstance(value, int | complex | str | bytes | torch.dtype | torch.Size | range):
        return repr(value)
    if hasattr(value, "__qualname__") and not isinstance(value, MethodType):
        return str(value.__qualname__)
    if hasattr(value, "__array_interface__"):
        return f"{kind.__qualname__}({value.dtype}, {value.shape}, {hashlib.sha256(value.tobytes()).hexdigest()})"
    if depth == 0:
        raise UnidentifiedValueError
    if isinstance(value, tuple | list | set | frozenset):
        items = [_text(item, depth - 1, seen) for item in value]
        return f"{kind.__qualname__}({', '.join(items if isinstance(value, tuple | list) else sorted(items))})"
    if id(value) in seen:
        return f"{kind.__qualname__} again"
    if isinstance(value, nn.Module):
        held: Mapping[Any, Any] = {
            **settings_of(value, depth, seen),
            "its tensors": [*value.parameters(), *value.buffers()],
        }
    else:
        seen[id(value)] = value  # as long as it exists, no other object has its id
        held = _parts(value)
    named = [
        f"{name if isinstance(name, str) else _text(name, depth - 1, seen)}={_text(item, depth - 1, seen)}"
        for name, item in held.items()
    ]
    return f"{kind.__qualname__}({', '.join(named)})"


def _parts(value: Any) -> Mapping[Any, Any]:
    """Return by name what an object consists of; raise UnidentifiedValueError if it shows nothing."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, MethodType):
        return {"func": value.__func__, "of": value.__self__}
    if isinstance(value, LinearOperator):
        arguments = {**dict(enumerate(value._args)), **value._kwargs}
        return {
            name: argument
            for name, argument in arguments.items()
            if isinstance(argument, TOLD) or hasattr(argument, "identified_by")
        }
    if hasattr(value, "identified_by"):
        return {"by": value.identified_by}
    if is_dataclass(value):
        return {item.name: getattr(value, item.name) for item in fields(value) if item.compare}
    if not hasattr(value, "__dict__"):
        raise UnidentifiedValueError
    return dict(sorted(vars(value).items()))


def settings_of(module: nn.Module, depth: int = DEEPEST, seen: dict[int, Any] | None = None) -> dict[str, str]:
    """Return by path what the parts of a module are, without the numbers in its parameters and buffers.

    Attributes that do not consist of plain values, or are None, are left out, because they come and go (a trainer).
    """
    settings, seen = {}, {} if seen is None else seen
    modules = {path: submodule for path, submodule in module.named_modules() if id(submodule) not in seen}
    seen.update((id(submodule), submodule) for submodule in modules.values())
    for path, submodule in modules.items():
        hooks = [
            identify(hook) for hook in (*submodule._forward_pre_hooks.values(), *submodule._forward_hooks.values())
        ]
        tensors = [name for name, _ in (*submodule.named_parameters("", False), *submodule.named_buffers("", False))]
        attributes = {}
        for name, held in vars(submodule).items():
            if name not in COMMON and held is not None:
                with contextlib.suppress(UnidentifiedValueError):
                    attributes[name] = _text(held, depth - 1, seen)
        settings[path] = f"{type(submodule).__qualname__}({submodule.training}, {hooks}, {tensors}, {attributes})"
    return settings


def digest(tensors: Sequence[Tensor]) -> str:
    """Return a string that is the same for equal numbers of equal shapes and dtypes."""
    checksum = hashlib.sha256()
    for tensor in tensors:
        checksum.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        numbers = tensor.detach().resolve_conj().cpu().contiguous().reshape(-1)
        checksum.update(numbers.view(torch.uint8).numpy().data)
    return checksum.hexdigest()


def seed_of(generator: torch.Generator | None) -> str | None:
    """Return a string that identifies the present state of a source of random numbers."""
    return None if generator is None else digest([generator.get_state()])


def derive_generator(generator: torch.Generator | None, device: torch.device | None = None) -> torch.Generator | None:
    """Return a source of different numbers, derived from the state of the given one, which it leaves unchanged."""
    seed = seed_of(generator)
    if generator is None or seed is None:
        return None
    return torch.Generator(device or generator.device).manual_seed(int(seed[:15], 16))


def _same(saved: Any, value: Any) -> bool:
    if isinstance(value, Tensor):
        if not isinstance(saved, Tensor) or saved.shape != value.shape or saved.dtype != value.dtype:
            return False
        slack = math.sqrt(torch.finfo(value.dtype).eps) * float(value.abs().max()) if value.numel() else 0.0
        return bool(((saved - value.cpu()).abs() <= slack).all()) or bool((saved.isnan() & value.cpu().isnan()).any())
    plain = list(value) if isinstance(value, tuple) else value
    return bool(saved == plain)


def _difference(name: str, saved: Any, here: Any) -> str:
    values = f" ({saved!r}, here {here!r})"
    return name + values if len(values) < 100 and not isinstance(here, Tensor) else name


def _pack(tree: Any) -> Any:
    """Return the tree with its accelerator tensors marked as such."""
    return tree_map_only(Tensor, lambda t: t if t.device.type == "cpu" else {"on accelerator": t}, tree)


def _unpack(tree: Any, device: torch.device | None) -> Any:
    """Return the tree with the marked tensors on this device."""
    return tree_map(lambda x: x["on accelerator"].to(device) if _is_marked(x) else x, tree, is_leaf=_is_marked)


def _is_marked(tree: Any) -> bool:
    return isinstance(tree, dict) and "on accelerator" in tree
