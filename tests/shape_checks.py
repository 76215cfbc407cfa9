"""Shape checks of the test run: every function is checked in its first calls of each test, not in its thousandth.

jaxtyping's import hook decorates each function, also those inside functions, whenever the outer one runs: a decoration
takes a millisecond, a checked call a tenth of one. What stands here decorates when a call is to be checked, so that
loops of an algorithm run at its own speed after their first rounds, and leaves out functions inside functions and
those whose annotations name no shape, which mypy has checked.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import jaxtyping

CALLS = 1  # of each function in each test; 0: none is checked

_jaxtyped = jaxtyping.jaxtyped
_open: list[_Gate] = []
_tests = 0


def restart() -> None:
    """A test begins."""
    global _tests
    _tests += 1
    if CALLS:
        for gate in _open:
            gate.close()
        _open.clear()


class _Gate:
    """What runs in place of a function that stays, until its first calls are checked: later ones then cost nothing.

    The function itself keeps its place, and gets another code: a wrapper would take as long as many a small function.
    """

    def __init__(self, function: FunctionType, typechecker: Any) -> None:
        self.function, self.own, self.typechecker = function, function.__code__, typechecker
        self.checked: Any = None
        self.test = self.calls = 0
        twin = FunctionType(self.own, function.__globals__, function.__name__, None, function.__closure__)
        twin.__kwdefaults__, twin.__defaults__ = function.__kwdefaults__, function.__defaults__
        self.twin = functools.update_wrapper(twin, function)
        del twin.__wrapped__
        function.__wrapped__ = twin  # whose signature is the function's
        self.code = _calling(self, self.own)
        self.close()

    def close(self) -> None:
        """The next calls come here."""
        self.function.__code__ = self.code

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if self.test != _tests:
            self.test, self.calls = _tests, 0
        if self.calls >= CALLS:
            self.function.__code__ = self.own
            _open.append(self)
            return self.twin(*args, **kwargs)
        self.calls += 1
        self.checked = self.checked or _jaxtyped(self.twin, typechecker=self.typechecker)
        return self.checked(*args, **kwargs)


def _through(*args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    gate: Any = "a gate"
    return gate(*args, **kwargs)


def _yielding_through(*args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    gate: Any = "a gate"
    yield from gate(*args, **kwargs)


def _calling(gate: _Gate, own: CodeType) -> CodeType:
    """A code that calls a gate, in place of a function's own, of whose kind it must be from Python 3.13 on."""
    code = (_yielding_through if own.co_flags & inspect.CO_GENERATOR else _through).__code__
    constants = tuple(gate if constant == "a gate" else constant for constant in code.co_consts)
    return code.replace(co_consts=constants, co_freevars=own.co_freevars, co_name=own.co_name)


def _names_a_shape(function: FunctionType) -> bool:
    """Whether an annotation is one of jaxtyping's, or names one that its module has defined."""
    words = re.findall(r"\w+", " ".join(map(str, function.__annotations__.values())))
    return any(hasattr(jaxtyping, word) or "jaxtyping" in repr(function.__globals__.get(word)) for word in words)


def sparing(*, typechecker: Any) -> Callable[[Any], Any]:
    """In place of `jaxtyping.jaxtyped`, which the import hook calls by this name."""

    def decorate(subject: Any) -> Any:
        whole = dataclasses.is_dataclass(subject) and not hasattr(subject.__init__, "__wrapped__")
        function = subject.__init__ if whole else subject
        if isinstance(function, FunctionType) and "<locals>" not in subject.__qualname__ and _names_a_shape(function):
            _Gate(function, typechecker)
        return subject

    return decorate


def install() -> None:
    """From here on modules are imported with these checks."""
    jaxtyping.jaxtyped = sparing
