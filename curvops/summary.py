"""The printed forms of objects: each field in a few words, whatever its size, and tables as text and HTML."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from html import escape
from typing import Any

import torch
from torch import Tensor

PRINTED = 8
"""The length of vectors and sequences up to which all their entries are printed."""
FIRST = 5
"""The number of entries of a longer vector that are printed."""
MOST_ROWS = 20
"""The largest number of rows of a table, one for each column of a result."""


class Summarised:
    """A dataclass (with `repr=False`) that prints on one line, without the fields that are None."""

    def __repr__(self) -> str:
        named = ((field.name, getattr(self, field.name)) for field in fields(self) if field.repr)  # type: ignore[arg-type]
        parts = (f"{name}={summary(value)}" for name, value in named if value is not None)
        return f"{type(self).__name__}({', '.join(parts)})"


def summary(value: Any) -> str:
    """Describe a value in a few words, without a memory address."""
    if isinstance(value, Tensor):
        return size_of(value) if value.ndim > 1 or value.dtype == torch.uint8 else _entries(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, tuple) and value and all(isinstance(item, Enum) for item in value):
        return " + ".join(f"{count} {item.name}" for item, count in Counter(value).items())
    if isinstance(value, Mapping):
        return _several([f"{key!r}: {summary(item)}" for key, item in _first(value.items())], len(value), "{}")
    if isinstance(value, list | tuple):
        brackets = "[]" if isinstance(value, list) else "()"
        return _several([summary(item) for item in _first(value)], len(value), brackets)
    if isinstance(value, functools.partial):
        return summary(value.func)
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__).rpartition("<locals>.")[2]
    return _short(value) if _prints_itself(value) else type(value).__name__


def size_of(value: Tensor) -> str:
    """Describe a tensor by its dtype and shape, without waiting for its device."""
    return f"{name_of(value.dtype)} {tuple(value.shape)}"


def _entries(vector: Tensor) -> str:
    few = vector if vector.numel() <= PRINTED else vector[:FIRST]
    try:
        entries = few.detach().tolist()
    except RuntimeError:  # without numbers: on the meta device, or inside a transform such as vmap
        return size_of(vector)
    return _several([*map(_short, entries)], len(vector), "[]") if vector.ndim else _short(entries)


def name_of(dtype: Any) -> str:
    """Return the name of a dtype without its package."""
    return str(dtype).removeprefix("torch.")


def _short(value: Any) -> str:
    """Return a float with at most six digits, and any other value as it prints."""
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def _first(items: Iterable[Any]) -> list[Any]:
    return [item for _, item in zip(range(PRINTED), items)]


def _several(parts: list[str], count: int, brackets: str) -> str:
    more = [f"… {count} in all"] if count > len(parts) else []
    return f"{brackets[0]}{', '.join(parts + more)}{brackets[1]}"


def _prints_itself(value: Any) -> bool:
    """Return whether a class defines how it prints, on one line; a module takes a line for each layer."""
    return any("__repr__" in vars(kind) for kind in type(value).__mro__[:-1]) and not hasattr(value, "named_modules")


@dataclass(frozen=True)
class Table:
    """Rows of cells under a head, with remarks below; it prints as text in columns or as HTML."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    remarks: Sequence[str] = ()

    def __str__(self) -> str:
        lines = [self.head, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.head))]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
        return "\n".join([*text, *self.remarks])

    def html(self) -> str:
        """Return the table as HTML, with every cell escaped."""
        body = "".join(_html_row(row, "td") for row in self.rows)
        below = "".join(f"<p>{escape(remark)}</p>" for remark in self.remarks)
        return f"<table><thead>{_html_row(self.head, 'th')}</thead><tbody>{body}</tbody></table>{below}"


def _html_row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


class Tabular:
    """An object that a notebook shows as tables; `__repr__ = Tabular.as_text` also prints them as text."""

    def _tables(self) -> Sequence[Table]:
        raise NotImplementedError

    def as_text(self) -> str:
        """Return the tables as text."""
        return "\n\n".join(map(str, self._tables()))

    def _repr_html_(self) -> str:
        return "".join(table.html() for table in self._tables())


def by_columns_of(columns: Mapping[str, Sequence[str]], remarks: Sequence[str] = ()) -> Table:
    """Return a table of a result's columns, numbered, at most `MOST_ROWS` of them."""
    count = max(map(len, columns.values()), default=0)
    rows = [(str(i), *(cells[i] for cells in columns.values())) for i in range(min(count, MOST_ROWS))]
    more = [f"… {count} in all."] if count > MOST_ROWS else []
    return Table(("", *columns), rows, [*more, *remarks])


def cells_of(numbers: Tensor) -> list[str]:
    """Return the first `MOST_ROWS` of a vector's numbers as cells, fetched at once."""
    return [f"{x:.4g}" for x in numbers.detach()[:MOST_ROWS].tolist()]
