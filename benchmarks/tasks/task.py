"""A task, another package's program for it, and the check that both answers have the same quality."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """A problem that nobody times, two programs that solve it, and what is compared of their answers.

    Attributes:
        name: what is done, in words.
        prepare: makes the problem (model, data), which both programs get.
        ours: the program with curvops; returns its answer.
        theirs: the program with another package.
        peer: the distribution that `theirs` needs.
        modules: what `theirs` imports, loaded before anything is measured.
        quality: the figure of an answer to the problem, by name; `same` holds both to it.
        same: whether our figure is as good as theirs: arguments are ours and theirs.
        fewer: makes the problem smaller, for the comparison of quality where `theirs` does not end within the limit.
    """

    name: str
    prepare: Callable[[], Any]
    ours: Callable[[Any], Any]
    theirs: Callable[[Any], Any]
    peer: str
    modules: tuple[str, ...]
    quality: Callable[[Any, Any], dict[str, float]]
    same: Callable[[dict[str, float], dict[str, float]], bool]
    fewer: Callable[[Any], Any] | None = None


def statements(program: Callable[[Any], Any]) -> int:
    """Count the statements of a program and of the functions that it defines, without docstrings."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(program)))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    texts = [n for n in found if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    return len(found) - len(texts) - 1  # the function itself
