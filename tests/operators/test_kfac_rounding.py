"""What the closed forms of KFAC and EKFAC say of their rounding, against 80 digits, and single against double."""

from functools import cache

import pytest
import torch
from mpmath import mp, mpf
from torch import nn

import curvops as co
from curvops.linalg import Reason

DIGITS = 80
WIDTH = 10
ORDINARY = 1e-4
"""The relative width below which an interval in single precision is of use."""


def inputs(kind):
    """40 points that single precision holds exactly."""
    torch.manual_seed(0)
    t = torch.linspace(0, 1, 40, dtype=torch.float64)
    made = {
        "random": lambda: torch.randn(40, WIDTH, dtype=torch.float64),
        "powers": lambda: torch.stack([t**k for k in range(1, WIDTH + 1)], 1),
        "rank 5": lambda: torch.randn(40, 5, dtype=torch.float64) @ torch.randn(5, WIDTH, dtype=torch.float64),
    }
    return made[kind]().float().double()


def linearized(x, dtype):
    data = x.to(dtype), torch.zeros(40, 1, dtype=dtype)
    return co.linearize(nn.Linear(WIDTH, 1).to(dtype), data, co.likelihoods.Gaussian(noise=1.0))


@cache
def exact(kind, scale, prior):
    """γ, log det P and tr P⁻¹ of a linear layer with one output: its GGN is XᵀX, with ones for the bias."""
    with mp.workdps(DIGITS):
        X = mp.matrix([[*map(mpf, row), mpf(1)] for row in (inputs(kind) * scale).tolist()])
        values, prior = mp.eigsy(X.T * X, eigvals_only=True), mpf(prior)
        sums = [
            sum(f(v) for v in values)
            for f in (lambda v: v / (v + prior), lambda v: mp.log(v + prior), lambda v: 1 / (v + prior))
        ]
        return [float(found) for found in sums]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["random", "powers", "rank 5"])
@pytest.mark.parametrize("curvature", [co.KFAC, co.EKFAC])
@pytest.mark.parametrize(("scale", "prior"), [(1.0, 1.0), (1.0, 1e-8), (2.0**13, 1.0), (2.0**13, 1e-8)])
def test_closed_forms_are_within_their_intervals(scale, prior, curvature, kind, dtype):
    post = co.laplace(linearized(inputs(kind) * scale, dtype), curvature, prior, check_mode=False)
    found = post.effective_parameters(), co.linalg.logdet(post.precision), post.precision.inverse().trace()
    for estimate, expected in zip(found, exact(kind, scale, prior)):
        low, high = estimate.interval()
        # The prior precision itself is rounded to the dtype, and so are its reciprocal and the sums of them.
        assert low <= expected <= high, (estimate, expected)
        assert (estimate.reason is Reason.CONVERGED) == (estimate.stderr == 0)
        if kind == "random" and (scale, prior) == (1.0, 1.0):
            assert 0 < high - low < ORDINARY * expected and estimate.reason is Reason.CONVERGED


@pytest.mark.parametrize("curvature", [co.KFAC, co.EKFAC])
def test_a_third_of_the_effective_parameters_cannot_be_certain(curvature):
    """The decomposition in float64 takes directions of the data for none: 6 where 11 are determined."""
    for dtype in (torch.float32, torch.float64):
        lin = linearized(inputs("rank 5") * 1e4, dtype)
        found = co.laplace(lin, curvature, 1e-8, check_mode=False).effective_parameters()
        assert found.reason is Reason.PRECISION_LIMIT and found.stderr == found.bias_bound > 1


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("curvature", [co.KFAC, co.EKFAC])
@pytest.mark.parametrize("prior", [1e-6, 1e-2, 1.0])
def test_rows_in_single_precision_are_within_what_they_are_said_to_be_off(prior, curvature, sharing):
    """A softmax's factor is singular: in its null space single precision leaves eps² of the largest eigenvalue."""
    model = nn.Sequential(nn.Conv1d(3, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 4))
    x, y, found = torch.randn(60, 3, 8), torch.arange(60) % 4, []
    for dtype in (torch.float32, torch.float64):
        lin = co.linearize(model.to(dtype), (x.to(dtype), y), "classification")
        P = curvature(lin, sharing=sharing).add_diagonal(prior)
        post = co.laplace(lin, curvature(lin, sharing=sharing), prior, check_mode=False)
        found.append([co.linalg.logdet(P), P.inverse().trace(), post.effective_parameters()])
    for single, double in zip(*found):
        gap = abs(float(single.value) - float(double.value))
        assert gap <= float(single.bias_bound) + float(double.bias_bound), (single, double)
        assert prior < 1 or single.bias_bound <= ORDINARY * abs(single.value), single
