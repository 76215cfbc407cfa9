"""The approximant of f(A) b after m steps of Lanczos, and an estimate of its error.

With T = V diag(θ) Vᵀ the error of x_m = ‖b‖ Q f(T) e₁ is, exactly, ‖b‖ h(A) q_{m+1} for
h(λ) = β_m Σᵢ V_{mi} V_{1i} f[λ, θᵢ], divided differences of f; for f = 1/x this is the residual (Ilić, Turner &
Simpson 2010). The largest |h| between and beside the Ritz values bounds the error wherever the Ritz values have reached
the ends of the spectrum. It takes no further products. The change between two depths is not used: it becomes small
while the error stagnates.

The largest value is sought at few points as long as they show an error above the tolerance. Before an error is accepted
as small, f is evaluated at about a thousand points between the Ritz values, to detect a step, a kink or a peak there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from curvops.linalg.core.limits import NEAR_ZERO
from curvops.linalg.core.results import INDEFINITE_REMEDY, NotPositiveSemidefinite
from curvops.linalg.core.vectors import ScalarFunction

# Products in a dtype are those of a matrix this many eps ‖A‖ away.
ROUNDING = 4.0
POINTS_BELOW = 24
# Points between the Ritz values at which f is evaluated before an error counts as small, and the fewest in each gap.
MOST_POINTS = 1024
LEAST_BETWEEN = 15
AT_ONCE = 1024
# With fewer steps too little of the spectrum is known for any estimate.
LEAST_DEPTH = 3
# Numbers this close, relative to the largest, are one.
SAME = 1e-15


class Approximants(NamedTuple):
    """y ≈ f(T) e₁ for K columns of one depth, with absolute error estimates for start vectors of norm 1.

    ``known`` is False where f has no value on a Ritz value that is zero to working precision; y is 0 there.
    ``verified`` is False where too little of the spectrum was seen for the estimate to mean anything.
    """

    coefficients: Float[Tensor, "K m"]
    truncation: Float[Tensor, " K"]
    rounding: Float[Tensor, " K"]
    known: Bool[Tensor, " K"]
    verified: Bool[Tensor, " K"]

    def relative(self) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"]]:
        """Truncation and rounding over ‖y‖; where f(T) e₁ = 0 exactly, no error counts as none."""
        sizes = self.coefficients.norm(dim=1)
        return tuple(  # type: ignore[return-value]
            torch.where(part == 0, 0.0, torch.where(sizes == 0, math.inf, part / sizes))
            for part in (self.truncation, self.rounding)
        )


class SpectralFunction:
    """f on Ritz values, with one rule for those at the edge of its domain.

    A Ritz value below a known ``lower_bound`` by no more than rounding counts as the bound. Where f is not finite, a
    Ritz value within ``NEAR_ZERO`` · eps · ‖A‖ of zero counts as zero (a positive semidefinite A has such by rounding);
    where f is not finite there either, A is singular to working precision; clearly beside zero it is an error.
    """

    def __init__(self, f: ScalarFunction, lower_bound: float | None, eps: float) -> None:
        self.f, self.lower_bound, self.eps = f, lower_bound, eps

    def quietly(self, x: Tensor) -> Tensor:
        """f(x) above the lower bound, finite or not."""
        flat = x.flatten() if self.lower_bound is None else x.flatten().clamp_min(self.lower_bound)
        y = self.f(flat.clone())
        if not isinstance(y, Tensor) or y.shape != flat.shape or y.is_complex():
            got = f"{y.dtype} {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(f"f must return a real tensor of the shape it is given, {tuple(flat.shape)}, got {got}.")
        return y.to(x).reshape(x.shape)

    def at_zero(self) -> float:
        """f(0), which need not be finite."""
        return float(self.quietly(torch.zeros(1, dtype=torch.float64))[0])

    def on_ritz_values(self, x: Float[Tensor, "K m"], size: float) -> Float[Tensor, "K m"]:
        """f(x) by the rule above; not finite where A looks singular and f has no value at 0. ``size`` is ‖A‖.

        Raises:
            NotPositiveSemidefinite: f is not finite at a negative Ritz value, or one is below ``lower_bound``.
            ValueError: f is not finite at a positive one.
        """
        near, lowest = NEAR_ZERO * self.eps * size, float(x.amin())
        if self.lower_bound is not None and lowest < self.lower_bound - near:
            raise NotPositiveSemidefinite(
                f"A has an eigenvalue below {lowest:.3e}, less than lower_bound = {self.lower_bound:.3e}. "
                f"Give a smaller lower_bound. {INDEFINITE_REMEDY}"
            )
        y = self.quietly(x)
        bad = ~torch.isfinite(y)
        if not bool(bad.any()):
            return y
        beside = x[bad & (x.abs() > near)]
        if len(beside) and float(beside.amin()) < 0:
            raise NotPositiveSemidefinite(
                f"f is not finite at {float(beside.amin()):.3e}, between eigenvalues of A, which is not positive "
                f"semidefinite. Use an f for its range. {INDEFINITE_REMEDY}"
            )
        if len(beside):
            raise ValueError(f"f is not finite at {float(beside[0]):.3e}, in A's range; scale A, or take another f.")
        return torch.where(bad, self.at_zero(), y)


def approximants(
    T: Float[Tensor, "K m m"], beta: Float[Tensor, " K"], f: SpectralFunction, size: float, rtol: float
) -> Approximants:
    """f(T) e₁ for each T, and its errors; those within rtol are estimated once more, at many more points."""
    nodes, V = torch.linalg.eigh(T)
    values = f.on_ritz_values(nodes, size)
    known = torch.isfinite(values).all(1)
    values = torch.where(known[:, None], values, 0.0)
    y = torch.einsum("kij,kj->ki", V, values * V[:, 0])
    rounding = _rounding(T, nodes, V, y, f, size)
    residuals = beta[:, None] * V[:, -1].abs()
    truncation = _truncation(nodes, V, values, beta, f, _test_points(nodes, residuals, f))
    passed = truncation + rounding <= rtol * y.norm(dim=1)
    again = (known & passed & (beta != 0)).nonzero().flatten()
    if len(again):
        between = _points_between(nodes[again], residuals[again], f)
        finer = _truncation(nodes[again], V[again], values[again], beta[again], f, between)
        truncation[again] = torch.maximum(truncation[again], finer)
    # Where f is 0 at every Ritz value, f(A) b may be anything in comparison.
    truncation = torch.where((beta != 0) & (y == 0).all(1), math.inf, truncation)
    return Approximants(y, truncation, rounding, known, (beta == 0) | (T.shape[1] >= LEAST_DEPTH))


def _truncation(
    nodes: Tensor, V: Tensor, values: Tensor, beta: Tensor, f: SpectralFunction, points: Tensor
) -> Float[Tensor, " K"]:
    """The largest |h| at these points, where f is finite."""
    found = torch.zeros_like(beta)
    for k in (beta != 0).nonzero().flatten().tolist():
        largest = [_residual(x, nodes[k], values[k], V[k, -1] * V[k, 0], f) for x in points[k].split(AT_ONCE)]
        found[k] = beta[k] * max(largest) if max(largest) > -math.inf else math.inf
    return found


def _residual(x: Tensor, nodes: Tensor, values: Tensor, weights: Tensor, f: SpectralFunction) -> float:
    """The largest |Σᵢ wᵢ f[x, θᵢ]| at these points where f is finite; −∞ where it is at none."""
    y = f.quietly(x)
    x, y = x[torch.isfinite(y)], y[torch.isfinite(y)]
    if not len(x):
        return -math.inf
    gaps = x[:, None] - nodes
    # Points closer to a Ritz value than its own rounding say nothing of f between the two.
    apart = gaps.abs() > SAME * nodes.abs().amax()
    slopes = torch.where(apart, (y[:, None] - values) / torch.where(apart, gaps, 1.0), 0.0)
    return float((slopes @ weights).abs().amax())


def _ends(nodes: Tensor, residuals: Tensor, f: SpectralFunction) -> tuple[Tensor, Tensor]:
    """How far below and above the Ritz values eigenvalues are expected: as their residuals reach."""
    low, high = nodes[:, :1] - residuals[:, :1], nodes[:, -1:] + residuals[:, -1:]
    return (low if f.lower_bound is None else low.clamp_min(f.lower_bound)), high


def _test_points(nodes: Tensor, residuals: Tensor, f: SpectralFunction) -> Float[Tensor, "K p"]:
    """The middles between neighbouring Ritz values, and points beside the outermost ones."""
    first, (low, high) = nodes[:, :1], _ends(nodes, residuals, f)
    positive = first > 0
    floor = torch.minimum(torch.maximum(low, f.eps * nodes[:, -1:]), first)
    steps = torch.linspace(0, 1, POINTS_BELOW, dtype=nodes.dtype)[:-1]
    below = torch.where(positive, floor.abs() * (first / floor).abs() ** steps, low)
    middles, products = (nodes[:, 1:] + nodes[:, :-1]) / 2, nodes[:, 1:] * nodes[:, :-1]
    geometric = torch.where(positive, products.clamp_min(0).sqrt(), middles)
    return torch.cat([low, high, middles, geometric, below], 1)


def _points_between(nodes: Tensor, residuals: Tensor, f: SpectralFunction) -> Float[Tensor, "K p"]:
    """Points that leave no feature of f unseen: all over the range, denser towards each Ritz value."""
    first, (low, high) = nodes[:, :1], _ends(nodes, residuals, f)
    floor = torch.minimum(torch.maximum(low, f.eps * nodes[:, -1:]), first)
    edges = torch.cat([torch.where(first > 0, floor, low), nodes, high], 1)
    count = max(LEAST_BETWEEN, MOST_POINTS // edges.shape[1])
    share = (1 - torch.cos(math.pi * torch.arange(1, count + 1, dtype=nodes.dtype) / (count + 1))) / 2
    return (edges[:, :-1, None] + edges.diff(dim=1)[:, :, None] * share).flatten(1)


def _rounding(T: Tensor, nodes: Tensor, V: Tensor, y: Tensor, f: SpectralFunction, size: float) -> Float[Tensor, " K"]:
    """‖f(T ± E) e₁ − f(T) e₁‖ for fixed E of the size of rounding: products in this dtype are those of A + E.

    Both signs, since at the edge of its domain f may be finite for one of them alone; E of random signs, and a multiple
    of I, which moves every Ritz value across a jump beside it. Infinite where a Ritz value could as well be zero, and f
    has no value there.
    """
    m, level = T.shape[1], ROUNDING * f.eps * size
    signs, at_zero = random_signs(m), f.at_zero()
    off = signs[1, : m - 1]
    E = level * (signs[0].diag() + off.diag(1) + off.diag(-1))
    moved = [torch.linalg.eigh(T + E), torch.linalg.eigh(T - E), (nodes + level, V), (nodes - level, V)]
    change = torch.stack([_change(nodes, V, y, f, size) for nodes, V in moved]).amax(0) + f.eps * y.norm(dim=1)
    if not math.isfinite(at_zero):
        change = torch.where(nodes.abs().amin(1) <= 2 * level, math.inf, change)
    return torch.where(torch.isfinite(change), change, math.inf)


def _change(nodes: Tensor, V: Tensor, y: Tensor, f: SpectralFunction, size: float) -> Float[Tensor, " K"]:
    """‖f(T) e₁ − y‖ for the T of these eigenpairs."""
    values = f.quietly(nodes)
    near = nodes.abs() <= NEAR_ZERO * f.eps * size
    values = torch.where(~torch.isfinite(values) & near, f.at_zero(), values)
    return (torch.einsum("kij,kj->ki", V, values * V[:, 0]) - y).norm(dim=1)


def random_signs(m: int) -> Float[Tensor, "2 m"]:
    """Two rows of signs, the same for every m whenever asked."""
    return 2.0 * torch.randint(0, 2, (2, m), generator=torch.Generator().manual_seed(m)).double() - 1
