"""The printed form of results: each field in a few words, whatever its size."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from enum import Enum
from typing import Any

from torch import Tensor

# Longer vectors are described by their shape.
PRINTED = 8


class Summarised:
    """A dataclass (with `repr=False`) that prints on one line: long tensors as shapes, reasons with their counts."""

    def __repr__(self) -> str:
        parts = (f"{field.name}={summary(getattr(self, field.name))}" for field in fields(self) if field.repr)  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(parts)})"


def summary(value: Any) -> str:
    """Describe a value in a few words."""
    if isinstance(value, Tensor):
        numbers = value.detach()
        if numbers.ndim == 0:
            return _number(numbers.item())
        if numbers.ndim == 1 and len(numbers) <= PRINTED:
            return f"[{', '.join(_number(x) for x in numbers.tolist())}]"
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, tuple) and value and all(isinstance(item, Enum) for item in value):
        return " + ".join(f"{count} {item.name}" for item, count in Counter(value).items())
    return _number(value) if isinstance(value, float) else repr(value)


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
