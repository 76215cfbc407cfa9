"""What the kernels of infinitely wide networks refuse."""

from __future__ import annotations

from typing import Any

import torch

import curvops as co
from tests.doors.door import Door

X = torch.ones(3, 2)


def kernel(*args: Any, **kwargs: Any) -> co.gp.InfiniteWidthKernel:
    return co.gp.InfiniteWidthKernel(*args, **kwargs)


DOORS = [
    Door(
        "InfiniteWidthKernel",
        rows={
            "biases set to 0": (lambda: setattr(kernel(), "bias_variance", 0), "bias_variance must be fin"),
        },
    )
]
