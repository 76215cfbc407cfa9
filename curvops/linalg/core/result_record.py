"""Results as plain values and tensors, and made again of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from curvops.linalg.core.results import Reason

Kind = TypeVar("Kind")


def record_of_result(result: Any) -> dict[str, Any]:
    """The fields of a result, a dataclass of tensors, numbers and reasons."""
    return {field.name: _plain(getattr(result, field.name)) for field in fields(result)}


def recorded_result(kind: type[Kind], record: Mapping[str, Any]) -> Kind:
    """The result of this kind with these fields."""
    return kind(**{name: _value(value) for name, value in record.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, Reason):
        return {"reason": value.name}
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def _value(value: Any) -> Any:
    if isinstance(value, dict) and "reason" in value:
        return Reason[value["reason"]]
    return tuple(map(_value, value)) if isinstance(value, list) else value
