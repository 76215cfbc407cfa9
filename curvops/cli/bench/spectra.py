"""Eigenvalues by shape, and dense symmetric matrices that have them: for the benchmarks and the tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Seed = int | torch.Generator
"""A number, or a generator that is drawn from."""


def powers(n: int, exponent: float | int) -> Tensor:
    """k^exponent for k = 1, ..., n."""
    return torch.arange(1, n + 1, dtype=torch.float64) ** exponent


def geometric(n: int, ratio: float) -> Tensor:
    """1, ratio, ratio², ..."""
    return ratio ** torch.arange(n, dtype=torch.float64)


def log_spaced(n: int, kappa: float | int) -> Tensor:
    """From 1 down to 1/kappa."""
    return torch.logspace(0, -math.log10(kappa), n, dtype=torch.float64)


def flat(n: int, low: float | int, high: float | int) -> Tensor:
    """Evenly spaced."""
    return torch.linspace(low, high, n, dtype=torch.float64)


def step(n: int, large: int, high: float | int, low: float | int) -> Tensor:
    """``large`` of them at one value, the rest at another."""
    return torch.cat([torch.full((large,), high, dtype=torch.float64), torch.full((n - large,), low).double()])


def clusters(n: int, centres: Sequence[float | int], width: float = 1e-3) -> Tensor:
    """As many near each centre, spread over ``width`` above it; the first clusters have what does not divide."""
    sizes = [len(part) for part in torch.arange(n).tensor_split(len(centres))]
    return torch.cat([centre + width * flat(size, 0, 1) for centre, size in zip(centres, sizes)])


def rotation(n: int, seed: Seed = 0) -> Tensor:
    """A random orthogonal matrix, float64."""
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q


def symmetric(eigenvalues: Tensor, seed: Seed = 0) -> Tensor:
    """A dense symmetric matrix with these eigenvalues and random eigenvectors, in their dtype."""
    Q = rotation(len(eigenvalues), seed)
    A = (Q * eigenvalues.double()) @ Q.mT
    return ((A + A.mT) / 2).to(eigenvalues.dtype)
