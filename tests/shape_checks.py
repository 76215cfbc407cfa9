"""Shape checks of the test run: every function is checked in its first calls of each test, not in its thousandth.

jaxtyping's import hook decorates each function, also those inside functions, whenever the outer one runs: a decoration
takes a millisecond, a checked call a tenth of one. What stands here decorates when a call is to be checked, so that
loops of an algorithm run at its own speed after their first rounds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any

import jaxtyping

CALLS = 4  # of each function in each test; 0: none is checked

_jaxtyped = jaxtyping.jaxtyped
_calls: Counter[int] = Counter()  # by the identity of the code: its hash takes longer than a call


def restart() -> None:
    """A test begins."""
    _calls.clear()


def _in_first_calls(function: FunctionType, typechecker: Any) -> Callable[..., Any]:
    code, checked = id(function.__code__), None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal checked
        if _calls.get(code, 0) >= CALLS:
            return function(*args, **kwargs)
        _calls[code] += 1
        checked = checked or _jaxtyped(function, typechecker=typechecker)
        return checked(*args, **kwargs)

    return call


def sparing(*, typechecker: Any) -> Callable[[Any], Any]:
    """In place of `jaxtyping.jaxtyped`, which the import hook calls by this name."""

    def decorate(subject: Any) -> Any:
        if isinstance(subject, FunctionType):
            return _in_first_calls(subject, typechecker)
        if dataclasses.is_dataclass(subject) and not hasattr(subject.__init__, "__wrapped__"):
            subject.__init__ = _in_first_calls(subject.__init__, typechecker)
        return subject

    return decorate


def install() -> None:
    """From here on modules are imported with these checks."""
    jaxtyping.jaxtyped = sparing
