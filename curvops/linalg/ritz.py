"""What a Lanczos run of m steps says of f(A) b: the approximant, and how wrong it is.

With T = V diag(θ) Vᵀ the error of x_m = ‖b‖ Q f(T) e₁ is, exactly, ‖b‖ h(A) q_{m+1} for
h(λ) = β_m Σᵢ V_{mi} V_{1i} f[λ, θᵢ], divided differences of f: the residual of f = 1/x is a case of it (Ilić, Turner &
Simpson 2010). Its largest value between and beside the Ritz values bounds the error wherever the run has seen how far
the spectrum reaches; it needs neither more products nor a change between depths, which stagnates and lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.results import NotPositiveSemidefinite

Function: TypeAlias = Callable[[Tensor], Tensor]

# Products in a dtype are those of a matrix this many eps ‖A‖ away; Ritz values within the second multiple count as 0.
ROUNDING = 4.0
NEAR_ZERO = 100.0
POINTS_BELOW = 24


class Approximant(NamedTuple):
    """y ≈ f(T) e₁ with absolute error estimates for a start vector of norm 1."""

    coefficients: Float[Tensor, " m"]
    truncation: float
    rounding: float

    @property
    def relative(self) -> tuple[float, float]:
        """Truncation and rounding over ‖y‖."""
        size = float(self.coefficients.norm())
        if size == 0:
            return (0.0, 0.0) if self.truncation == 0 else (math.inf, self.rounding)
        return self.truncation / size, self.rounding / size


class SpectralFunction:
    """f on Ritz values, with one rule for those at the edge of its domain.

    A Ritz value below a known ``lower_bound`` by no more than rounding counts as the bound. Where f is not finite, a
    Ritz value within ``NEAR_ZERO`` · eps · ‖A‖ of zero counts as zero (a positive semidefinite A has such by rounding);
    where f is not finite there either, A is singular to working precision; clearly beside zero it is an error.
    """

    def __init__(self, f: Function, lower_bound: float | None, eps: float) -> None:
        self.f, self.lower_bound, self.eps = f, lower_bound, eps

    def quietly(self, x: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """f(x) whatever it is, above the lower bound."""
        y = self.f(x.clone() if self.lower_bound is None else x.clamp_min(self.lower_bound))
        if not isinstance(y, Tensor) or y.shape != x.shape or y.is_complex():
            got = f"{y.dtype} {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(f"f must return a real tensor of the shape it is given, {tuple(x.shape)}, got {got}.")
        return y.to(x)

    def on_ritz_values(self, x: Float[Tensor, " m"], size: float) -> Float[Tensor, " m"] | None:
        """f(x) by the rule above; None where A looks singular and f has no value at 0. ``size`` is ‖A‖.

        Raises:
            NotPositiveSemidefinite: f is not finite at a negative Ritz value, or one is below ``lower_bound``.
            ValueError: f is not finite at a positive one.
        """
        near = NEAR_ZERO * self.eps * size
        if self.lower_bound is not None and float(x[0]) < self.lower_bound - near:
            raise NotPositiveSemidefinite(
                f"A has an eigenvalue below {float(x[0]):.3e}, less than lower_bound = {self.lower_bound:.3e}. "
                "Give a smaller lower_bound, or use the GGN in place of the Hessian."
            )
        y = self.quietly(x)
        bad = ~torch.isfinite(y)
        if not bool(bad.any()):
            return y
        beside = x[bad & (x.abs() > near)]
        if len(beside) and float(beside[0]) < 0:
            raise NotPositiveSemidefinite(
                f"f is not finite at {float(beside[0]):.3e}, between eigenvalues of A, which is not positive "
                "semidefinite. Add a prior (add_diagonal), use the GGN in place of the Hessian, or an f for its range."
            )
        if len(beside):
            raise ValueError(f"f is not finite at {float(beside[0]):.3e}, in A's range; scale A, or take another f.")
        y = torch.where(bad, self.quietly(torch.zeros_like(x)), y)
        return y if bool(torch.isfinite(y).all()) else None


def approximant(T: Float[Tensor, "m m"], beta: float, f: SpectralFunction, size: float) -> Approximant | None:
    """f(T) e₁ and its errors; None where f has no value on a Ritz value that is zero to working precision."""
    nodes, V = torch.linalg.eigh(T)
    values = f.on_ritz_values(nodes, size)
    if values is None:
        return None
    y = V @ (values * V[0])
    return Approximant(y, _truncation(nodes, V, values, beta, f), _rounding(T, nodes, y, f, size))


def _truncation(nodes: Tensor, V: Tensor, values: Tensor, beta: float, f: SpectralFunction) -> float:
    """The largest |h| at points between the Ritz values, and beyond them as far as their residuals reach."""
    if beta == 0:
        return 0.0
    points = _test_points(nodes, beta * V[-1].abs(), f)
    at_points = f.quietly(points)
    known = torch.isfinite(at_points)
    if not bool(known.any()):
        return math.inf
    gaps = points[known, None] - nodes
    # A test point on a Ritz value belongs to a converged one, whose weight V_{mi} is 0 anyway.
    apart = gaps.abs() > 1e-12 * nodes.abs().amax()
    slopes = torch.where(apart, (at_points[known, None] - values) / torch.where(apart, gaps, 1.0), 0.0)
    return beta * float((slopes @ (V[-1] * V[0])).abs().amax())


def _test_points(nodes: Tensor, residuals: Tensor, f: SpectralFunction) -> Tensor:
    low, high = float(nodes[0] - residuals[0]), float(nodes[-1] + residuals[-1])
    if f.lower_bound is not None:
        low = max(low, f.lower_bound)
    points = [nodes.new_tensor([low, high]), (nodes[1:] + nodes[:-1]) / 2]
    if float(nodes[0]) > 0:
        floor = min(max(low, f.eps * float(nodes[-1])), float(nodes[0]))
        below = torch.logspace(math.log10(floor), math.log10(float(nodes[0])), POINTS_BELOW, dtype=nodes.dtype)
        points += [(nodes[1:] * nodes[:-1]).sqrt(), below[:-1]]
    return torch.cat(points)


def _rounding(T: Tensor, nodes: Tensor, y: Tensor, f: SpectralFunction, size: float) -> float:
    """‖f(T + E) e₁ − f(T) e₁‖ for a fixed E of the size of rounding: products in this dtype are those of A + E.

    Infinite where a Ritz value could as well be zero, and f has no value there.
    """
    m, level = len(T), ROUNDING * f.eps * size
    if float(nodes.abs().amin()) <= 2 * level and not bool(torch.isfinite(f.quietly(torch.zeros_like(nodes))).all()):
        return math.inf
    signs = random_signs(m)
    off = signs[1, : m - 1]
    E = level * (signs[0].diag() + off.diag(1) + off.diag(-1))
    nodes, V = torch.linalg.eigh(T + E)
    moved = f.quietly(nodes)
    if not bool(torch.isfinite(moved).all()):
        near = nodes.abs() <= NEAR_ZERO * f.eps * size
        moved = torch.where(torch.isfinite(moved) | ~near, moved, f.quietly(torch.zeros_like(nodes)))
    change = float((V @ (moved * V[0]) - y).norm())
    return change + f.eps * float(y.norm()) if math.isfinite(change) else math.inf


def random_signs(m: int) -> Float[Tensor, "2 m"]:
    """Two rows of signs, the same for every m whenever asked."""
    return 2.0 * torch.randint(0, 2, (2, m), generator=torch.Generator().manual_seed(m)).double() - 1
