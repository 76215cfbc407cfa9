"""What a BoTorch model of a posterior refuses."""

from functools import cache

import torch
from torch import nn

import curvops as co
from tests.doors.door import Door

DOUBLE = torch.float64
X, Y = torch.linspace(0, 1, 8, dtype=DOUBLE).view(4, 2), torch.ones(4, 2, dtype=DOUBLE)


@cache
def model(likelihood: str = "regression", memory_budget: int | None = None) -> co.gp.LaplaceModel:
    """Two inputs, two outputs."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    given = co.likelihoods.Gaussian(0.1) if likelihood == "regression" else likelihood
    options = {} if memory_budget is None else {"memory_budget": memory_budget}
    lin = co.linearize(net, (X, Y if likelihood == "regression" else Y[:, 0].long()), given, **options)
    return co.gp.LaplaceModel(co.laplace(lin, co.KFAC, 1.0, check_mode=False))


def of_sequences() -> co.posterior.Laplace:
    data = torch.ones(3, 4, 2, dtype=DOUBLE), torch.ones(3, 4, 1, dtype=DOUBLE)
    return co.laplace(
        co.linearize(nn.Linear(2, 1).double(), data, co.likelihoods.Gaussian(noise=1.0)), co.GGN, 1.0, check_mode=False
    )


DOORS = [
    Door("LaplaceModel", {"a network of sequences": (lambda: co.gp.LaplaceModel(of_sequences()), "append nn.Flatten")}),
    Door(
        "LaplaceModel.posterior",
        {
            "more than memory has room for": (
                lambda: (
                    model(memory_budget=2**20)
                    .posterior(torch.rand(5000, 2, dtype=DOUBLE))
                    .distribution.covariance_matrix
                ),
                "10,000 × 10,000 covariances of 1 points need 800,000,000 bytes",
            ),
            "a number for outputs": (lambda: model().posterior(X, 1), TypeError, "not iterable"),
            "negative noise": (
                lambda: model().posterior(X, observation_noise=-torch.ones(1)),
                "observation_noise holds variances: none may be negative",
            ),
            "noise of a classifier": (
                lambda: model("classification").posterior(X, observation_noise=True),
                "observation noise needs a Gaussian likelihood: use observation_noise=False",
            ),
        },
    ),
    Door(
        "LaplaceModel.condition_on_observations",
        {
            "targets of fewer points": (
                lambda: model().condition_on_observations(X, Y[:3]),
                r"Y must have shape \(\.\.\., 4, 2\)",
            ),
            "NaN among targets": (
                lambda: model().condition_on_observations(X, Y * torch.nan),
                "Y holds NaN or infinite values: leave out",
            ),
            "repeated points without noise": (
                lambda: (
                    model().condition_on_observations(X[[0, 0]], Y[:2], noise=torch.zeros(1, dtype=DOUBLE)).posterior(X)
                ),
                "covariance is singular",
            ),
        },
    ),
    Door(
        "LaplaceModel.draw_function",
        {
            "of a conditioned model": (
                lambda: model().condition_on_observations(X, Y).draw_function(),
                "no draws of the weights",
            )
        },
    ),
]
