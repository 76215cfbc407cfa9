"""One public call with what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

Row = tuple[Callable[[], object], type[Exception] | tuple[type[Exception], ...], str]


class Door(NamedTuple):
    """A public call and its table of refusals, `"what is wrong": (the call, the error, words of its message)`."""

    call: str
    rows: dict[str, Row]
