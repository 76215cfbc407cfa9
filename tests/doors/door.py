"""One public call with what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Row = tuple[Callable[..., object], type[Exception] | tuple[type[Exception], ...], str]


class Door(NamedTuple):
    """A public call and its table of refusals: `"what is wrong": (the call, the error, words of its message)`.

    `given` makes what each call of the table takes, such as a posterior; without it the calls take nothing.
    """

    call: str
    rows: dict[str, Row]
    given: Callable[[], tuple[Any, ...]] = tuple
