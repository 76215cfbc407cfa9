"""The Monte-Carlo and the empirical Fisher: rows in place of J, which change with nothing but what they depend on.

Tests `drawn_fisher.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from tests.network.definitions import TIGHT

N, C = 6, 40


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, C)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 20, dtype=torch.float64, generator=generator)
    return x, torch.randn(N, C, dtype=torch.float64, generator=generator)


def regression(noise: Any, **options: Any) -> co.operators.Linearization:
    return co.linearize(network(), data(), co.likelihoods.Gaussian(noise), **options)


def fisher(noise: Any) -> Tensor:
    """F by definition, a gradient for each point; differentiable in the noise."""
    model, (x, y) = network(), data()
    losses = 0.5 * (model(x) - y).square().sum(1)
    found = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    g = torch.stack([torch.cat([part.flatten() for part in gradients]) for gradients in found]) / noise
    return g.mT @ g


@pytest.mark.parametrize("budget", [0, 10**9])
@pytest.mark.parametrize("make", [co.EmpiricalFisher, lambda lin: co.GGN(lin, mc_samples=1)])
def test_one_row_a_point_serves_at_many_outputs(make: Any, budget: int) -> None:
    lin = regression(0.5, memory_budget=budget)
    op, v = make(lin), torch.randn(lin.num_parameters, dtype=torch.float64)
    first = op @ v
    torch.testing.assert_close(op @ v, first, **TIGHT)  # the first of a small network streams
    assert op.plan.in_use == ({"layerwise": 1} if budget else {}) and lin.plan.in_use == {}
    torch.testing.assert_close(op @ v, first, **TIGHT)
    if make is co.EmpiricalFisher:
        torch.testing.assert_close(first, fisher(0.5) @ v, **TIGHT)


def test_the_empirical_fisher_has_gradients_in_the_noise_and_the_vector() -> None:
    noise = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    lin = regression(noise)
    F, v = co.EmpiricalFisher(lin), torch.randn(lin.num_parameters, dtype=torch.float64)
    with torch.no_grad():
        F @ v  # what it keeps has no gradient
    v.requires_grad_()
    w = torch.randn_like(v)
    ours = torch.autograd.grad((F @ v) @ w, (noise, v))
    expected = torch.autograd.grad((fisher(noise) @ v) @ w, (noise, v))
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a, b, **TIGHT)


def test_draws_by_rows_are_the_draws_by_j() -> None:
    """One seed, the same z: Jᵀ L z by either route."""
    noise = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    F = co.EmpiricalFisher(regression(noise))
    draws = []
    for recording in (False, True):
        with torch.set_grad_enabled(recording):
            draws.append(F._draw(3, torch.Generator().manual_seed(0)))
    torch.testing.assert_close(draws[0], draws[1].detach(), **TIGHT)
    assert draws[1].requires_grad
