"""E[φ(u) φ(v)] and E[φ'(u) φ'(v)] for zero-mean Gaussian u, v in closed form, one row of a table per activation φ.

No formula takes a difference of close numbers when u and v nearly coincide, and all derivatives are finite there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

SAME = 64
"""Directions closer than this many roundings count as equal, since their difference has no direction."""


class Covariance(NamedTuple):
    """The variances a and b of u and v, their covariance c, and r² = 2 − 2c/√(ab), of which c keeps too few digits."""

    a: Float[Tensor, "*b n #m"]
    b: Float[Tensor, "*b #n m"]
    c: Float[Tensor, "*b n m"]
    r: Float[Tensor, "*#b #n #m"]
    """The distance |u/√a − v/√b| for vectors with these inner products; only `relu` reads it."""


class Expectations(NamedTuple):
    """The values E[φ(u) φ(v)], E[φ'(u) φ'(v)] and, if r is used, 1 − E[φ(u) φ(v)]/√(E[φ(u)²] E[φ(v)²])."""

    product: Tensor
    slope: Tensor
    gap: Tensor | None = None


def identity(of: Covariance) -> Expectations:
    """Return the expectations for φ(u) = u, the products of a linear network."""
    return Expectations(of.c, torch.ones_like(of.c))


def relu(of: Covariance) -> Expectations:
    """Return the expectations for φ(u) = max(u, 0): √(ab)(sin θ + (π − θ) cos θ)/2π and (π − θ)/2π, cos θ = c/√(ab).

    The angle θ = 2 arcsin(r/2) keeps all its digits when points nearly coincide. There E[φ'φ'] has a kink, like
    |x − x'|, whose derivative at the tip is set to 0, the mean over directions.

    Source: Cho and Saul 2009, the arc-cosine kernels of order 1 and 0; Kahan 2006 for the angle.
    """
    r = of.r.masked_fill(of.r <= SAME * torch.finfo(of.r.dtype).eps, 0)
    half = root((1 - r * r / 4).masked_fill(r * r >= 4 * (1 - SAME * torch.finfo(r.dtype).eps), 0))  # cos(θ/2)
    theta, sine, cosine = 2 * torch.atan2(r / 2, half), r * half, 1 - r * r / 2
    product = root(of.a) * root(of.b) * (sine + (math.pi - theta) * cosine) / (2 * math.pi)
    gap = r * r / 2 - (sine - theta * cosine) / math.pi
    return Expectations(product, (math.pi - theta) / (2 * math.pi), gap)


def erf(of: Covariance) -> Expectations:
    """Return the expectations for φ(u) = erf(u).

    They are (2/π) arcsin(2c/√((1+2a)(1+2b))) and (4/π)/√((1+2a)(1+2b) − 4c²).

    Source: Williams 1998, equation 11; the second is its derivative in c.
    """
    width = (1 + 2 * (of.a + of.b) + 4 * _determinant(of)).sqrt()
    return Expectations(2 / math.pi * torch.atan2(2 * of.c, width), 4 / math.pi / width)


def gelu(of: Covariance) -> Expectations:
    """Return the expectations for φ(u) = u Φ(u), Φ the normal distribution function.

    With Δ = (1+a)(1+b) − c² and the density D = 1/(2π√Δ), E[φφ] = c P + D (ab − c² + c²/(1+a) + c²/(1+b)) and
    E[φ'φ'] = P + c D (1/(1+a) + 1/(1+b) + 1/Δ), where P = 1/4 + arcsin(c/√((1+a)(1+b)))/2π is the probability that two
    normal variables lie below u and v.

    Source: Tsuchida, Pearce, van der Heide, Roosta and Gallagher 2021; here by integration by parts.
    """
    a, b, c, _ = of
    determinant = _determinant(of)
    delta = 1 + (a + b) + determinant
    density, shares = 1 / (2 * math.pi * delta.sqrt()), 1 / (1 + a) + 1 / (1 + b)
    below = 0.25 + torch.atan2(c, delta.sqrt()) / (2 * math.pi)
    product = c * below + density * (determinant + c * c * shares)
    return Expectations(product, below + c * density * (shares + 1 / delta))


ACTIVATIONS: dict[str, Callable[[Covariance], Expectations]] = {
    "relu": relu,
    "erf": erf,
    "gelu": gelu,
    "identity": identity,
}


def root(x: Tensor) -> Tensor:
    """Return √x, with the derivative 0 at 0."""
    none = x <= 0
    return x.masked_fill(none, 1).sqrt().masked_fill(none, 0)


def _determinant(of: Covariance) -> Tensor:
    """Return ab − c², clamped if rounding makes it negative (u and v nearly coincide)."""
    return (of.a * of.b - of.c * of.c).clamp(min=0)
