"""The approximation of f(A) b after m steps of Lanczos, and an estimate of its error.

With T = V diag(θ) Vᵀ, the error of x_m = ‖b‖ Q f(T) e₁ is exactly ‖b‖ h(A) q_{m+1} for
h(λ) = β_m Σᵢ V_{mi} V_{1i} f[λ, θᵢ], with divided differences of f; for f = 1/x this is the residual (Ilić, Turner &
Simpson 2010). The largest |h| between and beyond the Ritz values bounds the error if the Ritz values have reached the
ends of the spectrum. It needs no further products. The change between two depths is not used: it becomes small while
the error stagnates.

The maximum is taken over few points as long as they show an error above the tolerance. Before an error is accepted as
small, f is evaluated at about a thousand points between the Ritz values, to detect a step, a kink or a peak there.

Rounding in b, and in each product with A, adds eps ‖b‖ of every eigenvector. If f(A) b is tiny compared with
max |f| ‖b‖, these parts exceed it, and T may not show them: for b near an eigenvector it has a single entry. They are
bounded at the same points, which cover the whole spectrum that this run or one from a random start (``seen``) found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from curvops.checks import shown
from curvops.linalg.core.results import indefinite
from curvops.linalg.core.vectors import NEAR_ZERO, ScalarFunction
from curvops.linalg.spectra.lanczos import tridiagonal

# Products in a dtype are those of a matrix at a distance of this many eps ‖A‖.
ROUNDING = 4.0
# How many points between Ritz values f is evaluated at before an error counts as small.
MOST_POINTS = 1024
# Fewer steps show too little of the spectrum for any estimate.
LEAST_DEPTH = 3


class Approximants(NamedTuple):
    """Approximations y ≈ f(T) e₁ of K columns of one depth, with absolute errors for start vectors of norm 1.

    ``defined`` is False if f has no value at a Ritz value that is zero to working precision; y is then 0.
    ``verified`` is False if too little of the spectrum was found for a meaningful estimate.
    ``settled`` is True if more steps do not help: within the tolerance, below rounding, or the space is complete.
    """

    coefficients: Float[Tensor, "K m"]
    truncation: Float[Tensor, " K"]
    rounding: Float[Tensor, " K"]
    defined: Bool[Tensor, " K"]
    verified: Bool[Tensor, " K"]
    settled: Bool[Tensor, " K"]

    def relative(self) -> Float[Tensor, " K"]:
        """Return the error over the smallest ‖f(T) e₁‖ possible within rounding: ∞ if that is 0, 0 without error."""
        error, least = self.truncation + self.rounding, (self.coefficients.norm(dim=1) - self.rounding).clamp_min(0)
        return torch.where(error == 0, 0.0, torch.where(least == 0, math.inf, error / least))


class SpectralFunction:
    """A function f on Ritz values, with one rule for those at the edge of its domain.

    A Ritz value below a known ``lower_bound`` by no more than rounding counts as the bound. If f is not finite, a Ritz
    value within ``NEAR_ZERO`` · eps · ‖A‖ of zero counts as zero (a positive semidefinite A has such values by
    rounding). If f is not finite there either, A is singular to working precision; a Ritz value clearly away from
    zero is an error.
    """

    def __init__(self, f: ScalarFunction, lower_bound: float | None, eps: float) -> None:
        if not callable(f):
            raise TypeError(f"f must be a function of a tensor, such as torch.exp, got {shown(f)}.")
        self.f, self.lower_bound, self.eps = f, lower_bound, eps

    def unchecked(self, x: Tensor) -> Tensor:
        """Return f(x) above the lower bound, finite or not."""
        flat = x.flatten() if self.lower_bound is None else x.flatten().clamp_min(self.lower_bound)
        y = self.f(flat.clone())
        if not isinstance(y, Tensor) or y.shape != flat.shape or y.is_complex():
            got = f"{y.dtype} {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(f"f must return a real tensor of the shape it is given, {tuple(flat.shape)}, got {got}.")
        return y.to(x).reshape(x.shape)

    def largest_within(self, size: float) -> float:
        """Return the largest finite |f| found on [−size, size], the range of eigenvalues for that norm."""
        x = torch.linspace(-size, size, 2 * MOST_POINTS + 1, dtype=torch.float64)
        y = self.unchecked(x).abs()
        return float(y[torch.isfinite(y)].amax()) if bool(torch.isfinite(y).any()) else 0.0

    def at_zero(self) -> float:
        """Return f(0), which need not be finite."""
        return float(self.unchecked(torch.zeros(1, dtype=torch.float64))[0])

    def on_ritz_values(self, x: Float[Tensor, "K m"], size: float) -> Float[Tensor, "K m"]:
        """Return f(x) by the rule above; not finite if A looks singular and f has no value at 0. ``size`` is ‖A‖.

        Raises:
            NotPositiveSemidefiniteError: f is not finite at a negative Ritz value, or one is below ``lower_bound``.
            ValueError: f is not finite at a positive one.
        """
        near, lowest = NEAR_ZERO * self.eps * size, float(x.amin())
        if self.lower_bound is not None and lowest < self.lower_bound - near:
            raise indefinite(f"A has an eigenvalue below {lowest:.3e}: pass a smaller lower_bound.")
        y = self.unchecked(x)
        bad = ~torch.isfinite(y)
        if not bool(bad.any()):
            return y
        beside = x[bad & (x.abs() > near)]
        if len(beside) and float(beside.amin()) < 0:
            raise indefinite(f"f is not finite at {float(beside.amin()):.3e}, and A is not positive semidefinite.")
        if len(beside):
            raise ValueError(f"f is not finite at {float(beside[0]):.3e}, in A's range; scale A, or use another f.")
        return torch.where(bad, self.at_zero(), y)


def approximants(
    T: Float[Tensor, "K m m"],
    beta: Float[Tensor, " K"],
    dropped: Float[Tensor, " K"],
    f: SpectralFunction,
    size: float,
    rtol: float,
    seen: Float[Tensor, " s"],
) -> Approximants:
    """Return f(T) e₁ for each T with its errors, which are computed at many more points once settled.

    ``dropped`` is the β below rounding level at which a space counts as complete (β = 0); ``seen`` holds the Ritz
    values of a run from a random start, if there was one.
    """
    nodes, V = torch.linalg.eigh(T)
    values = f.on_ritz_values(nodes, size)
    finite = torch.isfinite(values).all(1)
    values = torch.where(finite[:, None], values, 0.0)
    y = torch.einsum("kij,kj->ki", V, values * V[:, 0])
    rounding = _rounding(T, nodes, V, y, f, size)
    ends = _, floor, high = _ends(nodes, beta[:, None] * V[:, -1].abs(), f)
    truncation = _truncation(nodes, V, values, beta, f, _test_points(nodes, *ends))
    allowed = rtol * y.norm(dim=1)
    for k in (finite & _is_settled(truncation, rounding, allowed, beta)).nonzero().flatten().tolist():
        elsewhere = _rounding_elsewhere(nodes[k], V[k], values[k], float(dropped[k]), f, size, seen)
        rounding[k] = rounding[k].clamp_min(elsewhere)
        if beta[k] != 0:
            here = slice(k, k + 1)
            between = _points_between(floor[k], nodes[k], high[k], seen)
            finer = _truncation(nodes[here], V[here], values[here], beta[here], f, between[None])
            truncation[k] = torch.maximum(truncation[k], finer[0])
    # If f is 0 at every Ritz value, f(A) b may be arbitrarily large in comparison.
    truncation = torch.where((beta != 0) & (y == 0).all(1), math.inf, truncation)
    verified = (beta == 0) | (T.shape[1] >= LEAST_DEPTH)
    return Approximants(y, truncation, rounding, finite, verified, _is_settled(truncation, rounding, allowed, beta))


def _is_settled(truncation: Tensor, rounding: Tensor, allowed: Tensor, beta: Tensor) -> Bool[Tensor, " K"]:
    return (beta == 0) | (truncation <= torch.maximum(allowed - rounding, 0.1 * rounding))


def _truncation(
    nodes: Tensor, V: Tensor, values: Tensor, beta: Tensor, f: SpectralFunction, points: Tensor
) -> Float[Tensor, " K"]:
    """Return the largest |h| at these points, where f is finite."""
    bounds = torch.zeros_like(beta)
    for k in (beta != 0).nonzero().flatten().tolist():
        weights, largest = V[k, -1] * V[k, 0], -math.inf
        for _, gaps, rises in _differences(points[k], nodes[k], values[k], f):
            largest = max(largest, float(((rises / gaps) @ weights).abs().nan_to_num(-math.inf, math.inf).amax()))
        bounds[k] = beta[k] * largest if largest > -math.inf else math.inf
    return bounds


def _differences(x: Tensor, nodes: Tensor, values: Tensor, f: SpectralFunction) -> Iterator[tuple[Tensor, ...]]:
    """Yield F(x), x − θ and f(x) − f(θ), some points x at a time; NaN where f is not finite."""
    for points in x.split(MOST_POINTS):
        y, gaps = f.unchecked(points), points[:, None] - nodes
        y = torch.where(torch.isfinite(y), y, math.nan)
        # Points closer to a Ritz value than its own rounding show nothing of f between the two.
        apart = gaps.abs() > 1e-15 * nodes.abs().amax()
        yield y, torch.where(apart, gaps, 1.0), torch.where(apart | y.isnan()[:, None], y[:, None] - values, 0.0)


def _rounding_elsewhere(
    nodes: Tensor, V: Tensor, values: Tensor, dropped: float, f: SpectralFunction, size: float, seen: Tensor
) -> float:
    """Bound the effect of eps ‖b‖, eps ‖A‖ and a dropped β along an eigenvector anywhere in the spectrum.

    A perturbation of A by E adds (f(x) − f(θ))/(x − θ) times its entry of E along the eigenvector of x, but no more
    than a full turn of the eigenvectors, f(x) − f(θ). A tenth of each gap is left out, since f may have a pole there.
    """

    def effect(x: Tensor) -> Tensor:
        errors = []
        for y, gaps, rises in _differences(x, nodes, values, f):
            rotation = (rises * (level / gaps.abs()).clamp_max(1.0)).square() @ first.square()
            coupling = dropped * ((rises / gaps) @ (last * first)).abs()
            errors.append((f.eps * y.abs() + rotation.sqrt() + coupling).nan_to_num(0.0))
        return torch.cat(errors)

    edges, level, first, last = torch.cat([nodes, seen]).sort().values, f.eps * size, V[0], V[-1]
    largest = effect(edges).amax()
    if len(edges) > 1:
        between = effect(_points_between(edges)).unflatten(0, (len(edges) - 1, -1))
        # A tenth of the points may be near a pole of f.
        largest = torch.maximum(largest, between.quantile(0.9, dim=1).amax())
    return float(largest)


def _ends(nodes: Tensor, residuals: Tensor, f: SpectralFunction) -> tuple[Tensor, Tensor, Tensor]:
    """Return how far below and above the Ritz values eigenvalues are expected, by their residuals, (K, 1) each.

    Between the two is the lower end if A is positive definite, as it is if all Ritz values are positive.
    """
    first, low, high = nodes[:, :1], nodes[:, :1] - residuals[:, :1], nodes[:, -1:] + residuals[:, -1:]
    low = low if f.lower_bound is None else low.clamp_min(f.lower_bound)
    floor = torch.minimum(torch.maximum(low, f.eps * nodes[:, -1:]), first)
    return low, torch.where(first > 0, floor, low), high


def _test_points(nodes: Tensor, low: Tensor, floor: Tensor, high: Tensor) -> Float[Tensor, "K p"]:
    """Return the midpoints between neighbouring Ritz values, and points beyond the outermost ones."""
    first = nodes[:, :1]
    steps = torch.linspace(0, 1, 24, dtype=nodes.dtype)[:-1]
    below = torch.where(first > 0, floor.abs() * (first / floor).abs() ** steps, low)
    middles, products = (nodes[:, 1:] + nodes[:, :-1]) / 2, nodes[:, 1:] * nodes[:, :-1]
    geometric = torch.where(first > 0, products.clamp_min(0).sqrt(), middles)
    return torch.cat([low, high, middles, geometric, below], 1)


def _points_between(*parts: Tensor) -> Float[Tensor, " p"]:
    """Return points over the whole range of the given ones, denser towards each, to find every feature of f."""
    edges = torch.cat(parts).sort().values
    count = max(15, MOST_POINTS // len(edges))
    share = (1 - torch.cos(math.pi * torch.arange(1, count + 1, dtype=edges.dtype) / (count + 1))) / 2
    return (edges[:-1, None] + edges.diff()[:, None] * share).flatten()


def _rounding(T: Tensor, nodes: Tensor, V: Tensor, y: Tensor, f: SpectralFunction, size: float) -> Float[Tensor, " K"]:
    """Return ‖f(T ± E) e₁ − f(T) e₁‖ for fixed E of the size of rounding: products in this dtype are those of A + E.

    Both signs are used, since f at the edge of its domain may be finite for only one. E has random signs, or is a
    multiple of I, which moves every Ritz value across a jump near it. The result is infinite if a Ritz value may be
    zero within rounding and f has no value there.
    """
    m, level = T.shape[1], ROUNDING * f.eps * size
    signs, at_zero = random_signs(m), f.at_zero()
    E = level * tridiagonal(signs[0], signs[1, : m - 1])
    shifted, turned = torch.linalg.eigh(torch.stack([T + E, T - E]))
    moved = torch.cat([shifted, torch.stack([nodes + level, nodes - level])])
    values = f.unchecked(moved)
    near = moved.abs() <= NEAR_ZERO * f.eps * size
    values = torch.where(~torch.isfinite(values) & near, at_zero, values)
    bases = torch.cat([turned, V.expand_as(turned)])
    changes = torch.einsum("...ij,...j->...i", bases, values * bases[..., 0, :]) - y
    change = changes.norm(dim=-1).amax(0) + f.eps * y.norm(dim=1)
    if not math.isfinite(at_zero):
        change = torch.where(nodes.abs().amin(1) <= 2 * level, math.inf, change)
    return torch.where(torch.isfinite(change), change, math.inf)


def random_signs(m: int) -> Float[Tensor, "2 m"]:
    """Draw two rows of signs, the same for every m in each call."""
    return 2.0 * torch.randint(0, 2, (2, m), generator=torch.Generator().manual_seed(m)).double() - 1
