"""Operators that fail while they are used."""

from typing import Any

import torch
from torch import Tensor

from curvops.linalg import Dense


def without_room_beyond(width: int, matrix: Tensor, error: Exception | None = None) -> Any:
    """An operator of this matrix that has no memory for products with blocks wider than this."""
    operator: Any = Dense(matrix)
    operator.widths = []

    def product(block: Tensor) -> Tensor:
        operator.widths.append(block.shape[1])
        if block.shape[1] > width:
            raise torch.OutOfMemoryError("CUDA out of memory.") if error is None else error
        return matrix @ block

    operator._matmul = product
    return operator
