"""Trees of numbers, words and tensors as folders: written completely or not at all, and checked when read.

A folder contains `curvops.json`, the tree, and one file of tensors (safetensors), which the JSON names with its
SHA-256; the rest of the JSON has its own checksum. The owner of a tree decides what it means, and gives it a kind
("posterior") and a version. Nothing is unpickled, imported or executed.

Writing changes no existing file: the tensors go to a new file, named by its contents, and the last step replaces
`curvops.json`, which a file system does at once or not at all. A crash or a full disk before that step leaves the
earlier save unchanged. The remains of a crash do no harm, and a later save removes them.

Dataclasses become such trees by `record_of`, and are made from them again by `from_record`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import numbers
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from curvops.checks import check_kind, refuse
from curvops.version import __version__

CONTENTS = "curvops.json"
WRITTEN_BY = f"curvops {__version__}"
LAYOUT = 1
"""The version of the format, which does not depend on the tree."""
TENSORS = re.compile(r"tensors-[0-9a-f]{16}\.safetensors")
SCRATCH = ".writing-"


def save(path: str | os.PathLike[str], kind: str, version: int, tree: Mapping[str, Any]) -> None:
    """Write a tree as the folder at `path`, replacing an earlier one of the same kind.

    Args:
        path: the folder; it is created with its parent folders, and other files in it are left alone.
        kind: the kind of the tree, one word.
        version: the version of the tree's schema, to be raised when older programs would misread it.
        tree: mappings by name, lists and tuples (read back as lists), None, booleans, numbers, words and tensors.
            Tensors keep their values, dtype and the order of their dimensions in memory, but not their device or
            gradient.

    Raises:
        OSError: the disk is full, or the folder cannot be written; earlier contents are unchanged.
        FileExistsError: the path is a file, or contains another kind of tree.
        TypeError: the path is not a path, or a value is none of the above.
    """
    folder = folder_of(path)
    tensors: dict[str, Tensor] = {}
    encoded = _encode(tree, "", tensors)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; pass the path of a folder, which will be created.")
    before = _contents(folder)
    if before.get("kind", kind) != kind:
        raise FileExistsError(f"{folder} holds {before['kind']!r}, which {kind!r} does not replace; pass another path.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Incomplete files are in a folder inside this one, on the same file system.
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder, ignore_cleanup_errors=True) as scratch:
            _write(folder, Path(scratch), {"kind": kind, "version": version, "tree": encoded}, tensors, before)
    except (OSError, SafetensorError) as error:
        why = f"{folder} was not written ({_reason(error)}); earlier contents, if any, are unchanged."
        code = getattr(error, "errno", None)
        raise (OSError(why) if code is None else OSError(code, why)) from error
    _tidy(folder)


def load(path: str | os.PathLike[str], kind: str, version: int) -> tuple[int, Any]:
    """Return the schema's version and the tree of a folder that `save` wrote; tensors on the CPU, in new memory.

    Args:
        path: the folder.
        kind: the kind that it must contain.
        version: the newest version of the schema that the caller reads.

    Raises:
        FileNotFoundError: there is no such folder, or nothing was saved in it.
        ValueError: it contains another kind, was written by a newer version, or its files are truncated or changed.
        TypeError: the path is not a path.
    """
    folder = folder_of(path)
    if not (folder / CONTENTS).is_file():
        raise FileNotFoundError(f"{folder} is no folder with {CONTENTS}: nothing was saved there, or not completely.")
    contents = _read_contents(folder, kind, version)
    try:
        tensors = _tensors(folder, contents["tensors"])
    except FileNotFoundError as error:
        raise _damage(folder, f"{contents['tensors']['file']} is missing") from error
    return contents["version"], _decode(contents["tree"], tensors)


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """Return the kind that the folder declares, unchecked, or None."""
    kind = _contents(folder_of(path)).get("kind")
    return kind if isinstance(kind, str) else None


def folder_of(path: Any) -> Path:
    """Return the path; raise TypeError if it is not a path."""
    check_kind("path", path, (str, os.PathLike), "the path of a folder, a str or a Path")
    refuse(not os.fspath(path), "path is empty; pass the path of a folder.")
    return Path(path)


def discard(path: str | os.PathLike[str], kind: str) -> None:
    """Remove what `save` wrote there, if it is of this kind, together with folders of the kind inside it."""
    folder = folder_of(path)
    before = _contents(folder)
    if before.get("format") != "curvops" or before.get("kind") != kind:
        return
    with contextlib.suppress(OSError):
        for path_inside in folder.iterdir():
            if path_inside.is_dir() and not path_inside.name.startswith(SCRATCH):
                discard(path_inside, kind)
            elif path_inside.is_dir():
                shutil.rmtree(path_inside)
            elif path_inside.name == CONTENTS or TENSORS.fullmatch(path_inside.name):
                path_inside.unlink()
        folder.rmdir()


# Trees as JSON: a name that begins with "$" describes a value and is not a name of the tree.


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return the JSON of a value, its tensors collected by name."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, Tensor):
        return _refer_to(value, name, tensors)
    if isinstance(value, list | tuple):
        return [_encode(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is a {type(value).__name__}; only numbers, words and tensors can be stored.")
    return {
        f"${key}" if key.startswith("$") else key: _encode(item, f"{name}.{key}" if name else key, tensors)
        for key, item in value.items()
    }


def _refer_to(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return a reference to a tensor; for a transposed one it has the order of the dimensions in memory.

    The layout is kept because products round differently in another layout.
    """
    while name in tensors:  # names may contain dots themselves
        name += "_"
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda i: -strides[i])
    turned = tensor.detach().permute(order)
    if not turned.is_contiguous():
        order, turned = list(range(tensor.ndim)), tensor.detach()
    # safetensors rejects two tensors that share memory, and writes all of the memory for a part of it.
    owns_memory = turned.untyped_storage().nbytes() == turned.nbytes and not any(
        _shares(turned, t) for t in tensors.values()
    )
    tensors[name] = (
        turned.cpu().contiguous() if owns_memory else turned.cpu().clone(memory_format=torch.contiguous_format)
    )
    return {"$tensor": name} | ({} if order == sorted(order) else {"order": order})


def _shares(one: Tensor, other: Tensor) -> bool:
    return one.numel() > 0 and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        return float(value["$float"])
    if "$tensor" in value:
        tensor, order = tensors[value["$tensor"]], value.get("order")
        return tensor if order is None else tensor.permute(*torch.tensor(order).argsort().tolist())
    return {key.removeprefix("$"): _decode(item, tensors) for key, item in value.items()}


# Writing


def _write(
    folder: Path, scratch: Path, contents: dict[str, Any], tensors: dict[str, Tensor], before: Mapping[str, Any]
) -> None:
    """Write both files and flush them to the disk; replacing `CONTENTS` makes them the folder's contents."""
    file, text = scratch / "tensors", scratch / CONTENTS
    save_file(tensors, file)
    digest = _sha256(file)
    target = folder / f"tensors-{digest[:16]}.safetensors"
    contents |= {"format": "curvops", "layout": LAYOUT, "written_by": WRITTEN_BY}
    contents["tensors"] = {"file": target.name, "sha256": digest}
    contents["sha256"] = _checksum(contents)
    text.write_text(json.dumps(contents, indent=1, allow_nan=False), encoding="utf-8")
    file.chmod(text.stat().st_mode)  # the user's default mode: safetensors makes its files readable by the owner only
    _flush(file)
    _flush(text)
    predecessor = _file_of(before)
    try:
        os.replace(file, target)
        _flush(folder)
        os.replace(text, folder / CONTENTS)
    except BaseException:
        if target.name != _file_of(_contents(folder)):
            target.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # both files stay as long as a power failure may leave either JSON
        _flush(folder)
        if predecessor not in (None, target.name):
            (folder / str(predecessor)).unlink(missing_ok=True)


def _contents(folder: Path) -> Mapping[str, Any]:
    """Return the contents of an earlier save, as far as they can be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        contents = json.loads((folder / CONTENTS).read_bytes())
        return contents if isinstance(contents, dict) else {}
    return {}


def _file_of(contents: Mapping[str, Any]) -> str | None:
    """Return the file of tensors, if its name is one that `save` gives."""
    tensors = contents.get("tensors")
    name = tensors.get("file") if isinstance(tensors, dict) else None
    return name if isinstance(name, str) and TENSORS.fullmatch(name) else None


def _tidy(folder: Path) -> None:
    """Remove the remains of crashed saves; files of the last hour may belong to another process that is saving."""
    current = _file_of(_contents(folder))
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            left = path.name.startswith(SCRATCH) or (TENSORS.fullmatch(path.name) and path.name != current)
            if left and time.time() - path.stat().st_mtime > 3600:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _reason(error: Exception) -> str:
    return str(error.strerror or error) if isinstance(error, OSError) else str(error)


def _flush(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    if path.is_dir() and not hasattr(os, "O_DIRECTORY"):
        return  # Windows flushes no folders
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _checksum(contents: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in contents.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# Reading


def _read_contents(folder: Path, kind: str, version: int) -> Mapping[str, Any]:
    contents = _contents(folder)
    if contents.get("format") != "curvops":
        raise _damage(folder, f"{CONTENTS} is not a file of curvops")
    _require_readable(folder, contents, "layout", LAYOUT)
    if contents.get("kind") != kind:
        raise ValueError(f"{folder} holds {contents.get('kind')!r}, expected {kind!r}.")
    _require_readable(folder, contents, "version", version)
    if contents.get("sha256") != _checksum(contents) or _file_of(contents) is None:
        raise _damage(folder, f"{CONTENTS} is not as it was written")
    return contents


def _require_readable(folder: Path, contents: Mapping[str, Any], what: str, newest: int) -> None:
    number = contents.get(what)
    if isinstance(number, int) and number > newest:
        raise ValueError(
            f"{folder} was written by {contents.get('written_by')}, in {what} {number} of its format; this is "
            f"{WRITTEN_BY}, which reads up to {newest}: upgrade it."
        )


def _tensors(folder: Path, written: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors, copied: aligned as torch aligns its own, and independent of the file."""
    file = folder / written["file"]
    if _sha256(file) != written["sha256"]:
        raise _damage(folder, f"{file.name} is not as it was written: truncated, or changed")
    return {name: tensor.clone() for name, tensor in load_file(file).items()}


def _damage(folder: Path, what: str) -> ValueError:
    return ValueError(f"{folder} is damaged: {what}. Save it again, or use an undamaged copy.")


# Dataclasses as trees

Kind = TypeVar("Kind")


def record_of(value: Any) -> Any:
    """Return the value with its dataclasses as mappings by field, and members of enumerations and dtypes by name."""
    if is_dataclass(value):
        return {field.name: record_of(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {name: record_of(item) for name, item in value.items()}
    return [record_of(item) for item in value] if isinstance(value, list | tuple) else value


def from_record(kind: type[Kind], record: Mapping[str, Any]) -> Kind:
    """Return the dataclass of this kind with these fields, read according to its annotations."""
    hints = _hints(kind)
    return kind(**{name: _value(value, hints[name]) for name, value in record.items()})


def state_of(value: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the attributes of these names, by name."""
    return {name: getattr(value, name) for name in names}


def restore(value: Any, names: Iterable[str], record: Mapping[str, Any]) -> None:
    """Set these attributes to the values in a record."""
    hints = _hints(type(value))
    for name in names:
        setattr(value, name, _value(record[name], hints.get(name)))


_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def _value(value: Any, hint: Any) -> Any:
    if isinstance(value, list):
        container = tuple if get_origin(hint) is tuple else list
        return container(_value(item, get_args(hint)[0]) if get_args(hint) else item for item in value)
    for kind in (hint, *get_args(hint)):  # for a union, the member that is not a plain value
        if isinstance(kind, type) and value is not None:
            if issubclass(kind, Enum):
                return kind[value]
            if is_dataclass(kind):
                return from_record(kind, value)
            if issubclass(kind, torch.dtype):
                return getattr(torch, value)
    return value
