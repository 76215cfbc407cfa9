"""What a BoTorch model of a posterior refuses."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

import curvops as co
from tests.doors.door import Door

DOUBLE = torch.float64
X, Y = torch.linspace(0, 1, 8, dtype=DOUBLE).view(4, 2), torch.ones(4, 2, dtype=DOUBLE)
POINTS = X.expand(3, 4, 2)


@cache
def model(likelihood: str = "regression", memory_budget: int | None = None) -> co.gp.LaplaceModel:
    """Two inputs, two outputs."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    given = co.likelihoods.Gaussian(0.1) if likelihood == "regression" else likelihood
    options = {} if memory_budget is None else {"memory_budget": memory_budget}
    lin = co.linearize(net, (X, Y if likelihood == "regression" else Y[:, 0].long()), given, **options)
    return co.gp.LaplaceModel(co.laplace(lin, co.KFAC, 1.0, check_mode=False))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.layer(a + b)


def of_two_tensors() -> co.gp.LaplaceModel:
    lin = co.linearize(TwoInputs().double(), ((X, X), Y[:, :1]), co.likelihoods.Gaussian(0.1))
    return co.gp.LaplaceModel(co.laplace(lin, co.KFAC, 1.0, check_mode=False))


def of_sequences() -> co.posterior.Laplace:
    data = torch.ones(3, 4, 2, dtype=DOUBLE), torch.ones(3, 4, 1, dtype=DOUBLE)
    return co.laplace(
        co.linearize(nn.Linear(2, 1).double(), data, co.likelihoods.Gaussian(noise=1.0)), co.GGN, 1.0, check_mode=False
    )


DOORS = [
    Door(
        "LaplaceModel",
        {
            "not a posterior": (lambda: co.gp.LaplaceModel(model().post.lin), TypeError, "must be a Laplace posterior"),
            "a network of sequences": (
                lambda: co.gp.LaplaceModel(of_sequences()),
                ValueError,
                r"this network's outputs have shape \(4, 1\): append nn.Flatten",
            ),
            "another mean": (lambda: co.gp.LaplaceModel(model().post, mode="mean"), ValueError, "mode must be"),
            "a transform that is a function": (
                lambda: co.gp.LaplaceModel(model().post, outcome_transform=lambda y: y),
                TypeError,
                "outcome_transform must be one of BoTorch's, an OutcomeTransform, got function",
            ),
            "a transform by name": (
                lambda: co.gp.LaplaceModel(model().post, input_transform="normalize"),
                TypeError,
                "input_transform must be one of BoTorch's, an InputTransform, got str",
            ),
            "a network of two tensors": (
                lambda: of_two_tensors().posterior(X),
                TypeError,
                "inputs of one tensor .* takes a tuple",
            ),
        },
    ),
    Door(
        "LaplaceModel.posterior",
        {
            "another dimension": (lambda: model().posterior(X[:, :1]), ValueError, r"expected \(..., n, 2\), one row"),
            "one point without its dimension": (
                lambda: model().posterior(X[0]),
                ValueError,
                r"shape \(2,\) do not fit",
            ),
            "a list": (lambda: model().posterior(X.tolist()), TypeError, "inputs must be a tensor .* got list"),
            "no points": (lambda: model().posterior(X[:0]), ValueError, r"X of shape \(0, 2\) has no points"),
            "no batches": (lambda: model().posterior(POINTS[:0]), ValueError, r"shape \(0, 4, 2\) has no points"),
            "NaN": (lambda: model().posterior(X * torch.nan), ValueError, "NaN or infinite"),
            "whole numbers": (lambda: model().posterior(X.long()), ValueError, "real numbers in a floating"),
            "more than memory has room for": (
                lambda: (
                    model(memory_budget=2**20)
                    .posterior(torch.rand(5000, 2, dtype=DOUBLE))
                    .distribution.covariance_matrix
                ),
                ValueError,
                "10,000 × 10,000 covariances of 1 points need 800,000,000 bytes",
            ),
            "an output that is not there": (
                lambda: model().posterior(X, [2]),
                ValueError,
                r"some of the 2 .* got \[2\]",
            ),
            "no outputs": (lambda: model().posterior(X, []), ValueError, r"some of the 2 of this model.* got \[\]"),
            "a number for outputs": (lambda: model().posterior(X, 1), TypeError, "not iterable"),
            "noise that is no tensor": (
                lambda: model().posterior(X, observation_noise=0.1),
                TypeError,
                "observation_noise must be a tensor of variances, or True or False, got 0.1",
            ),
            "noise of another shape": (
                lambda: model().posterior(X, observation_noise=torch.ones(3)),
                ValueError,
                r"expands to \(..., 4, 2\), points by outputs, got \(3,\)",
            ),
            "negative noise": (
                lambda: model().posterior(X, observation_noise=-torch.ones(1)),
                ValueError,
                "observation_noise holds variances: none may be negative",
            ),
            "noise of a classifier": (
                lambda: model("classification").posterior(X, observation_noise=True),
                ValueError,
                "observation noise needs a Gaussian likelihood, but this is Categorical.*GenericMCObjective",
            ),
        },
    ),
    Door(
        "LaplaceModel.condition_on_observations",
        {
            "targets of fewer points": (
                lambda: model().condition_on_observations(X, Y[:3]),
                ValueError,
                r"Y must be of shape \(..., 4, 2\) .* got \(3, 2\)",
            ),
            "targets of other outputs": (
                lambda: model().condition_on_observations(X, Y[:, :1]),
                ValueError,
                r"a model of 2 outputs, got \(4, 1\)",
            ),
            "targets without outputs": (
                lambda: model().condition_on_observations(X, Y[:, 0]),
                ValueError,
                r"Y must be of shape \(..., 4, 2\)",
            ),
            "inputs of another dimension": (
                lambda: model().condition_on_observations(X[:, :1], Y),
                ValueError,
                r"expected \(..., n, 2\)",
            ),
            "NaN among targets": (
                lambda: model().condition_on_observations(X, Y * torch.nan),
                ValueError,
                "Y holds NaN or infinite values: leave out",
            ),
            "batches that do not go together": (
                lambda: model().condition_on_observations(POINTS, Y.expand(2, 4, 2)),
                ValueError,
                "batches of X, Y and noise .* do not broadcast together",
            ),
            "noise that is no tensor": (
                lambda: model().condition_on_observations(X, Y, noise=0.1),
                TypeError,
                "noise must be a tensor of variances",
            ),
            "negative noise": (
                lambda: model().condition_on_observations(X, Y, noise=-torch.ones(1)),
                ValueError,
                "noise holds variances: none may be negative",
            ),
            "repeated points without noise": (
                lambda: (
                    model().condition_on_observations(X[[0, 0]], Y[:2], noise=torch.zeros(1, dtype=DOUBLE)).posterior(X)
                ),
                ValueError,
                "covariance is singular: points are repeated.*no jitter is added",
            ),
            "labels of a classifier": (
                lambda: model("classification").condition_on_observations(X, Y),
                ValueError,
                "observation noise needs a Gaussian likelihood",
            ),
        },
    ),
    Door(
        "LaplaceModel.subset_output",
        {
            "an output that is not there": (lambda: model().subset_output([0, 5]), ValueError, r"got \[0, 5\]"),
            "none": (lambda: model().subset_output([]), ValueError, r"as indices from 0, got \[\]"),
        },
    ),
    Door(
        "LaplaceModel.draw_function",
        {
            "of a conditioned model": (
                lambda: model().condition_on_observations(X, Y).draw_function(),
                ValueError,
                "no draws of the weights",
            ),
        },
    ),
]
