"""Far from the data a ReLU network is affine along a ray, so that variances grow as the squares of the outputs do.

With f = a + δ b and J = J₀ + δ J₁ beyond the last kink, probit confidence tends to σ(|b| / √(π/8 · J₁ P⁻¹ J₁ᵀ)) < 1,
where the network's own tends to 1 (Hein et al. 2019; Kristiadi et al. 2020).
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import curvops as co

DIRECTION = torch.tensor([[0.6, -0.8]], dtype=torch.float64)
PRIOR = 2.0


def linearized(parameters: str | None) -> co.operators.Linearization:
    """A ReLU network with one logit, at weights of no importance: the limit needs no mode."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 2
    x = torch.randn(40, 2, dtype=torch.float64)
    y = (x[:, :1] > x[:, 1:].sin()).double()
    return co.linearize(model, (x, y), co.likelihoods.Bernoulli(), parameters=parameters)


def along(lin: co.operators.Linearization, distance: float) -> tuple[Tensor, Tensor]:
    """The logit () and its row of J (D,), this far out."""
    x = distance * DIRECTION
    return lin.predict(x).squeeze(), lin.jacobian(x).to_dense().squeeze(0)


def slopes(lin: co.operators.Linearization) -> tuple[Tensor, Tensor]:
    """b and J₁, from two points beyond the last kink; a third one shows that they are beyond it."""
    (f1, J1), (f2, J2), (f3, J3) = (along(lin, distance) for distance in (1e3, 2e3, 5e3))
    b, J = (f2 - f1) / 1e3, (J2 - J1) / 1e3
    torch.testing.assert_close(f3, f2 + 3e3 * b, rtol=1e-10, atol=0.0)
    torch.testing.assert_close(J3, J2 + 3e3 * J, rtol=1e-10, atol=1e-10)
    return b, J


CASES = [(co.GGN, None), (co.KFAC, None), (co.EKFAC, None), (co.DiagonalGGN, None), (co.GGN, "last_layer")]


@pytest.mark.parametrize(("curvature", "parameters"), CASES)
def test_confidence_along_a_ray_tends_to_a_limit_below_one(curvature: type, parameters: str | None) -> None:
    lin = linearized(parameters)
    post = co.laplace(lin, curvature, PRIOR, check_mode=False)
    b, J = slopes(lin)
    P = curvature(lin).to_dense() + PRIOR * torch.eye(lin.num_parameters, dtype=torch.float64)
    limit = (b.abs() / (math.pi / 8 * J @ torch.linalg.solve(P, J)).sqrt()).sigmoid().item()
    assert 0.6 < limit < 0.99
    distances = torch.tensor([1e3, 1e5, 1e7, 1e9], dtype=torch.float64)
    p = post.probabilities(distances.unsqueeze(1) * DIRECTION).squeeze(1)
    gaps = (torch.maximum(p, 1 - p) - limit).abs()
    assert (gaps * distances <= 2 * gaps[0] * distances[0] + 1e-10 * distances).all()  # O(1/δ)
    assert gaps[-1] < 1e-9
    far = lin.predict(1e9 * DIRECTION).abs().sigmoid()
    assert far.item() == 1.0
