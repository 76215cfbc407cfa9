"""How many passes of the model a call takes, and that what one pass found for another is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvops as co

TIGHT = {"rtol": 1e-12, "atol": 0.0}


CALLED: list[int] = []
"""The numbers of points of the calls of models."""


class Noted(nn.Sequential):
    """A network that notes its calls."""

    def forward(self, x: Tensor) -> Tensor:
        CALLED.append(len(x))
        return super().forward(x)


@contextmanager
def passes() -> Iterator[list[int]]:
    """Counts the points of the calls of models."""
    CALLED.clear()
    yield CALLED


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Noted(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    return model, torch.randn(30, 4).double(), torch.randn(30, 3).double()


def linearized(noise: float | Tensor = 0.3) -> co.operators.Linearization:
    model, x, y = problem()
    return co.linearize(model, (x, y), co.likelihoods.Gaussian(noise))


def test_linearising_takes_eight_passes_over_a_few_points() -> None:
    """One watches the module, one is compared with it, a point alone, after others, four for derivatives and layers."""
    with passes() as counted:
        linearized()
    assert len(counted) == 8


class Preparing(nn.Linear):
    """Whose first call prepares what later ones find."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        found, self.scale = self.scale * super().forward(x), 2.0
        return found


class Counting(nn.Linear):
    """Whose outputs are others in every call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) + self.calls


@pytest.mark.parametrize("kind", [Preparing, Counting])
@pytest.mark.parametrize("calls", [0, 2])
def test_every_pass_is_the_next_call_of_the_users_module(kind: type[nn.Linear], calls: int) -> None:
    """What a pass writes into its copy of the module is undone after it."""
    torch.manual_seed(0)
    model, x = kind(4, 3).double().eval(), torch.randn(5, 4).double()
    for _ in range(calls):
        model(x)
    lin = co.linearize(model, (x, torch.zeros(5, 3)), co.likelihoods.Gaussian(noise=1.0))
    first, second = lin.outputs(), lin.outputs()
    assert torch.equal(first, second)
    torch.testing.assert_close(first, model(x).detach())


@pytest.mark.parametrize("curvature", [co.KFAC, co.EKFAC, co.DiagonalGGN])
def test_the_walk_of_a_curvature_finds_the_log_likelihood(curvature: Callable[..., Any]) -> None:
    expected = linearized().log_likelihood()
    lin = linearized()
    post = co.laplace(lin, curvature(lin), 1.0, check_mode=False)
    with passes() as counted:
        evidence = post.log_evidence()
    assert len(counted) == 0
    torch.testing.assert_close(evidence.log_likelihood, expected, **TIGHT)


def test_a_log_likelihood_found_before_is_that_of_its_hyperparameters() -> None:
    noise = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    lin = linearized(noise)
    with torch.no_grad():
        co.KFAC(lin)
        before = lin.log_likelihood()
        noise.mul_(2)
        changed = lin.log_likelihood()
    torch.testing.assert_close(before, linearized(0.3).log_likelihood(), **TIGHT)
    torch.testing.assert_close(changed, linearized(0.6).log_likelihood(), **TIGHT)
    (slope,) = torch.autograd.grad(lin.log_likelihood(), noise)
    assert slope != 0


def test_a_walk_that_did_not_end_tells_no_log_likelihood() -> None:
    lin = linearized()
    next(lin.root_pieces(co.GGN(lin).output, 1))
    with torch.no_grad():
        torch.testing.assert_close(lin.log_likelihood(), linearized().log_likelihood(), **TIGHT)
