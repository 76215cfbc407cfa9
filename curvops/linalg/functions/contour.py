"""x^-½ as a short sum of resolvents, Σ w/(x + σ), on an interval: the contour quadrature of a square root.

x^-½ = (2/π) ∫₀^∞ dt/(t² + x). With t = √m sn(u|k')/cn(u|k') the midpoint rule in u converges geometrically on [m, M],
k² = m/M, at a rate exp(−2π²N/(log(M/m) + 3)) (Hale, Higham & Trefethen 2008, method 3; Pleiss et al. 2020).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import ellipj, ellipkm1
from torch import Tensor

MOST_NODES = 100
SMALLEST_RATIO = 4 * np.finfo(np.float64).eps


class InverseRootQuadrature(NamedTuple):
    """Shifts σ > 0 in rising order and weights w > 0, for eigenvalues in [low, high]."""

    shifts: Float[Tensor, " S"]
    weights: Float[Tensor, " S"]
    low: float
    high: float

    def __call__(self, x: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """Σ w/(x + σ) ≈ x^-½."""
        return (self.weights / (x[:, None] + self.shifts)).sum(1)

    def relative_error(self, low: float, high: float) -> float:
        """The largest |√x Σ w/(x + σ) − 1| on [low, high]."""
        x = torch.logspace(math.log10(low), math.log10(high), 400, dtype=torch.float64)
        return float((x.sqrt() * self(x) - 1).abs().amax())


def inverse_root_quadrature(low: float, high: float, rtol: float) -> InverseRootQuadrature:
    """The fewest nodes whose relative error on [low, high] is at most rtol, or `MOST_NODES`."""
    # 1 − k² must be a number that float64 holds.
    ratio = 1.0 - (1.0 - max(min(low / high, 1.0), SMALLEST_RATIO))
    low = ratio * high
    rate = 2 * math.pi**2 / (math.log(high / low) + 3)
    count = max(1, int(math.log(1 / min(max(rtol, 1e-15), 0.5)) / rate))
    while True:
        rule = _midpoint(ratio, low, high, count)
        if count >= MOST_NODES or rule.relative_error(low, high) <= rtol:
            return rule
        count += 1


def _midpoint(ratio: float, low: float, high: float, count: int) -> InverseRootQuadrature:
    period = float(ellipkm1(ratio))  # K(k')
    u = (np.arange(count) + 0.5) * period / count
    # Beyond the middle sn/cn(K' − u) = 1/(k sn/cn(u)), which keeps its digits where k' is 1 to rounding.
    mirrored = u > period / 2
    sn, cn, dn, _ = ellipj(np.where(mirrored, period - u, u), 1.0 - ratio)
    scale = math.sqrt(ratio * high)
    t, slope = scale * sn / cn, scale * dn / cn**2
    product = scale * math.sqrt(high)
    t, slope = np.where(mirrored, product / t, t), np.where(mirrored, product * slope / t**2, slope)
    weights = 2 / math.pi * period / count * slope
    return InverseRootQuadrature(torch.from_numpy(t**2), torch.from_numpy(weights), low, high)
