"""Dataclasses as plain values and tensors, and dataclasses made from these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch

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
