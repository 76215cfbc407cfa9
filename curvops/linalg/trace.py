"""The trace of a matrix known by its products."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from curvops.linalg.results import Estimate
from curvops.linalg.vectors import Matrix, describe_square, inner, product, random_block

METHODS = ("hutchinson", "exact")
BLOCK = 32
DEFAULT_MATVECS = 128


def trace(
    A: Matrix,
    *,
    method: str = "hutchinson",
    rtol: float | None = None,
    max_matvecs: int | None = None,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Estimate tr A from products with random signs, streamed in blocks of at most 32.

    Args:
        A: (n, n); it need not be symmetric.
        method: "hutchinson", or "exact" (n products, no error).
        rtol: stop when the standard error is at most rtol times the estimate; None spends the whole budget.
        max_matvecs: the budget, 128 by default, 10 000 where rtol is given. n or more gives the exact trace.
        generator: source of the random signs.

    Raises:
        ValueError: an unknown method, A not square, or a budget that is too small (2 products at least).

    Source: Hutchinson 1990; with random signs the variance is 2 (‖S‖_F² − Σ S_ii²), S the symmetric part of A.
    """
    n, _, dtype, device = describe_square(A)
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}.")
    if rtol is not None and not rtol > 0:
        raise ValueError(f"rtol must be positive, got {rtol}.")
    if max_matvecs is None:
        max_matvecs = DEFAULT_MATVECS if rtol is None else 10_000
    if method == "exact" or max_matvecs >= n:
        return _exact(A)
    if max_matvecs < 2:
        raise ValueError(f"max_matvecs must be at least 2 for an error bar, got {max_matvecs}.")
    multiply, samples = product(A), torch.zeros(0, dtype=torch.float64, device=device)
    while len(samples) < max_matvecs:
        k = min(BLOCK, max_matvecs - len(samples), max(4, len(samples)) if rtol is not None else BLOCK)
        Z = random_block(n, k, dtype=dtype, device=device, generator=generator)
        samples = torch.cat([samples, inner(Z, multiply(Z))])
        if rtol is not None and len(samples) >= 8 and _settled(samples, rtol):
            break
    count = len(samples)
    return Estimate(samples.mean(), samples.std() / math.sqrt(count), count, count)


def _settled(samples: Tensor, rtol: float) -> bool:
    return bool(samples.std() <= rtol * samples.mean().abs() * math.sqrt(len(samples)))


def _exact(A: Matrix) -> Estimate:
    n, _, dtype, device = describe_square(A)
    multiply = product(A)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for i in range(0, n, BLOCK):
        k = min(BLOCK, n - i)
        rows = torch.zeros(k, n, dtype=dtype, device=device)
        rows.diagonal(offset=i).fill_(1)
        total = total + inner(rows.mT, multiply(rows.mT)).sum()
    return Estimate(total, torch.zeros_like(total), 0, n)
