"""A user's problem: what their ``module:function`` returns."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from linear_operator import LinearOperator
from torch import Tensor

from curvops.cli.bench.counted import Counted
from curvops.cli.bench.problem import BenchError, Problem
from curvops.linalg import Damped, Dense


def imported(name: str) -> Any:
    """A module, found also from the working directory."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(here)


def users(name: str) -> Problem:
    """What the user's ``module:function`` returns, found also from the working directory.

    Raises:
        BenchError: no such module or function, or it fails or returns something else.
    """
    module_name, _, function_name = name.partition(":")
    try:
        module = imported(module_name)
    except Exception as error:  # a user's module may fail in any way
        raise BenchError(f"cannot import {module_name!r} for the problem {name!r}: {_line(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module_name]
        known = ", ".join(own) or "none"
        raise BenchError(f"module {module_name!r} has no function {function_name!r}; it has: {known}.")
    try:
        returned = function()
    except Exception as error:  # likewise
        raise BenchError(f"{name} failed: {_line(error)}") from error
    return _checked(name, returned)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _checked(name: str, returned: Any) -> Problem:
    """What a user's function returned, as a problem."""
    wanted = f"{name} must return (operator, right-hand sides)"
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise BenchError(f"{wanted}, got {type(returned).__name__}.")
    A, B = returned
    if not isinstance(A, Tensor | LinearOperator) or not isinstance(B, Tensor):
        raise BenchError(
            f"{wanted}: a tensor or LinearOperator and a tensor, got {type(A).__name__} and {type(B).__name__}."
        )
    if len(A.shape) != 2 or not A.dtype.is_floating_point or not all(A.shape):
        raise BenchError(f"{wanted}: the operator must be a floating matrix, got {tuple(A.shape)}, {A.dtype}.")
    if B.ndim not in (1, 2) or B.shape[0] != A.shape[0] or B.dtype != A.dtype or B.device != A.device:
        raise BenchError(
            f"{wanted}: the right-hand sides must be ({A.shape[0]},) or ({A.shape[0]}, K), {A.dtype} on {A.device}; "
            f"got {tuple(B.shape)}, {B.dtype} on {B.device}."
        )
    if not bool(torch.isfinite(B).all()):
        raise BenchError(f"{wanted}: the right-hand sides hold NaN or Inf.")
    wide = B.detach().reshape(len(B), -1)
    text = f"{type(A).__name__} of {name}"
    if isinstance(A, Damped) and A.shift.ndim == 0:
        shift = float(A.shift)
        lower = shift if getattr(A.base, "psd", False) else 0.0
        return Problem(name, text, Counted(A.base), shift, wide, lower)
    tensor = A.detach() if isinstance(A, Tensor) else None
    return Problem(name, text, Counted(A if tensor is None else Dense(tensor)), 0.0, wide, tensor=tensor)
