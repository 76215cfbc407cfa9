"""What the kernels of infinitely wide networks refuse."""

from __future__ import annotations

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
            "layers below none": (lambda: kernel(-1), ValueError, "depth must be at least 0, got -1"),
            "half a layer": (lambda: kernel(1.5), TypeError, "depth must be a whole number"),
            "an activation without a closed form": (
                lambda: kernel(2, "tanh"),
                ValueError,
                "activation must be one of 'relu', 'erf', 'gelu', 'identity', got 'tanh'",
            ),
            "a function": (lambda: kernel(2, torch.relu), ValueError, "activation must be one of 'relu'"),
            "a kind in capitals": (lambda: kernel(kind="NTK"), ValueError, "kind must be one of 'nngp', 'ntk'"),
            "a negative variance": (
                lambda: kernel(weight_variance=-1.0),
                ValueError,
                "weight_variance must be positive",
            ),
            "no weights": (lambda: kernel(weight_variance=0.0), ValueError, "weight_variance must be positive"),
            "a variance as text": (lambda: kernel(weight_variance="2"), TypeError, "a number or a sequence of them"),
            "True": (lambda: kernel(bias_variance=True), TypeError, "a number or a sequence of them"),
            "None": (lambda: kernel(bias_variance=None), TypeError, "a number or a sequence of them, got None"),
            "a layer less": (
                lambda: kernel(2, weight_variance=[1.0, 2.0]),
                ValueError,
                r"holds 2 numbers: expected one, or one for each of the depth \+ 1 = 3 layers",
            ),
            "a layer without biases": (
                lambda: kernel(bias_variance=[0.0, 1.0]),
                ValueError,
                "bias_variance must be pos",
            ),
            "rows of variances": (lambda: kernel(weight_variance=[[1.0, 2.0]]), TypeError, "a sequence of them, got"),
            "a prior of no biases": (
                lambda: kernel(bias_variance=0.0, bias_variance_prior=gpytorch.priors.GammaPrior(1.0, 1.0)),
                ValueError,
                "needs biases: pass bias_variance=1.0",
            ),
            "biases set where there are none": (
                lambda: setattr(kernel(bias_variance=0.0), "bias_variance", 1.0),
                ValueError,
                "no biases: pass bias_variance=1.0",
            ),
            "a start out of its constraint": (
                lambda: kernel(weight_variance_constraint=gpytorch.constraints.Interval(3.0, 4.0)),
                ValueError,
                "weight_variance must be finite and within its constraint, Interval",
            ),
            "a variance set below 0": (
                lambda: setattr(kernel(), "weight_variance", -1.0),
                ValueError,
                r"weight_variance must be finite and within its constraint, Positive\(\), got -1.0",
            ),
            "biases set to 0": (lambda: setattr(kernel(), "bias_variance", 0), ValueError, "bias_variance must be fin"),
            "an infinite variance": (
                lambda: setattr(kernel(), "weight_variance", torch.inf),
                ValueError,
                "weight_variance must be finite",
            ),
            "points that are NaN": (lambda: kernel()(X * torch.nan).to_dense(), ValueError, "inputs .* holds NaN"),
            "points that are infinite": (lambda: kernel()(X, X * torch.inf).to_dense(), ValueError, "NaN or infinite"),
            "a diagonal of other points": (
                lambda: kernel()(X, X[:2], diag=True),
                ValueError,
                "for a diagonal, different numbers of points",
            ),
            "a lengthscale for each dimension": (lambda: kernel(ard_num_dims=2), TypeError, "ard_num_dims"),
            "points of no dimension": (
                lambda: kernel()(X[:, :0]).to_dense(),
                ValueError,
                r"inputs of shape \(3, 0\) have no dimension",
            ),
            "points of two dimensions and of one": (
                lambda: kernel()(X, X[:, :1]).to_dense(),
                RuntimeError,
                "same number of dimensions",
            ),
            "each dimension alone": (
                lambda: kernel()(X, last_dim_is_batch=True).to_dense(),
                ValueError,
                "a network takes them together",
            ),
            "each dimension alone, in a scaled kernel": (
                lambda: gpytorch.kernels.ScaleKernel(kernel())(X, last_dim_is_batch=True).to_dense(),
                ValueError,
                "a network takes them together",
            ),
        },
    ),
]
