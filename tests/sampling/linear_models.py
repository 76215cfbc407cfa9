"""A linear model of three inputs, whose posterior is known."""

import torch
from torch import Tensor, nn

import curvops as co

N, NOISE, PRIOR = 24, 0.5, 2.0


def linear(points: int = N) -> tuple[nn.Module, Tensor, Tensor]:
    """A model with two outputs and a bias, 8 weights in all; inputs, some of them correlated, and targets."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.tensor([[1.0, 0.7, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 1.0]], dtype=torch.float64)
    x = torch.randn(points, 3, generator=generator, dtype=torch.float64) @ mixed
    y = torch.randn(points, 2, generator=generator, dtype=torch.float64)
    torch.manual_seed(1)
    return nn.Linear(3, 2).double(), x, y


def exact(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The posterior's mode and precision."""
    J = co.linearize(model, (x, y), co.likelihoods.Gaussian(NOISE)).jacobian().to_dense()
    P = J.mT @ J / NOISE + PRIOR * torch.eye(J.shape[1], dtype=torch.float64)
    return torch.linalg.solve(P, J.mT @ y.flatten() / NOISE), P
