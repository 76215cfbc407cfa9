"""Runs that end amid their products, as a process does that is killed, and go on."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from curvops.linalg import Dense


class Killed(Exception):
    """What ends a run."""


def counted(matrix: Tensor, most: float) -> Any:
    """An operator of this matrix that ends the run at the product after so many."""
    operator: Any = Dense(matrix, psd=True)
    operator.products = 0

    def product(block: Tensor) -> Tensor:
        operator.products += 1
        if operator.products > most:
            raise Killed
        return matrix @ block

    operator._matmul = product
    return operator


def equal(one: Any, other: Any) -> bool:
    """Whether these records have the same bits."""
    if isinstance(one, Tensor):
        alike = isinstance(other, Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return alike and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(one == other)


def goes_on(run: Callable[[float, Any], Any], matrix: Tensor, folder: Any, killed: list[int]) -> tuple[Any, int]:
    """What a run ends with that was killed after so many products each time, and its products of the last start."""
    for most in killed:
        try:
            run(counted(matrix, most), folder)
        except Killed:
            continue
        raise AssertionError(f"{most} products were enough")
    operator = counted(matrix, float("inf"))
    return run(operator, folder), operator.products


def killed_after(count: float, run: Callable[[], Any], steps: dict[str, float]) -> Any:
    """What a run ends with that was killed after so many steps and started again; `made` are those since then."""
    steps["left"] = count
    with pytest.raises(Killed):
        run()
    steps["left"], steps["made"] = math.inf, 0
    torch.manual_seed(int(count))
    return run()
