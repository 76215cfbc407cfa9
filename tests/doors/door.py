"""One public call with what it refuses."""

from collections.abc import Callable
from typing import NamedTuple

Call = Callable[[], object]
Row = tuple[Call, str] | tuple[Call, type[Exception] | tuple[type[Exception], ...], str]


class Door(NamedTuple):
    """A public call and its table of refusals, `"what is wrong": (the call, words of its message)`.

    The error stands between them where it is no `ValueError`.
    """

    call: str
    rows: dict[str, Row]
