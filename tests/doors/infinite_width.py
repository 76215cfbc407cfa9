"""What the kernels of infinitely wide networks refuse."""

from typing import Any

import gpytorch
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
            "a layer less": (lambda: kernel(2, weight_variance=[1.0, 2.0]), "holds 2 numbers"),
            "a prior of no biases": (
                lambda: kernel(bias_variance=0.0, bias_variance_prior=gpytorch.priors.GammaPrior(1.0, 1.0)),
                "needs biases: pass bias_variance=1.0",
            ),
            "biases set to 0": (lambda: setattr(kernel(), "bias_variance", 0), "bias_variance must be fin"),
        },
    )
]
