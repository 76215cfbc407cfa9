"""Test matrices by prescribed spectrum."""

from __future__ import annotations

import torch
from torch import Tensor


def rotation(n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random orthogonal matrix."""
    g = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64)).Q.to(dtype)


def symmetric(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """A dense symmetric matrix with these eigenvalues and random eigenvectors."""
    Q = rotation(len(eigenvalues), seed)
    A = (Q * eigenvalues.double()) @ Q.mT
    return ((A + A.mT) / 2).to(eigenvalues.dtype)


def log_spaced(n: int, kappa: float) -> Tensor:
    return torch.logspace(0, -torch.tensor(kappa).log10().item(), n, dtype=torch.float64)


N = 120
SPECTRA: dict[str, Tensor] = {
    "decaying": torch.arange(1, N + 1, dtype=torch.float64) ** -2.0,
    "exponential": 0.9 ** torch.arange(N, dtype=torch.float64),
    "step": torch.cat([torch.full((20,), 100.0), torch.ones(N - 20)]).double(),
    "clustered": torch.cat([c + 1e-3 * torch.linspace(0, 1, N // 4, dtype=torch.float64) for c in (1, 10, 50, 200)]),
    "flat": torch.linspace(1, 3, N, dtype=torch.float64),
    "kappa 1e4": log_spaced(N, 1e4),
    "kappa 1e6": log_spaced(N, 1e6),
    "kappa 1e8": log_spaced(N, 1e8),
}
