"""Sums of functions of eigenvalues by stochastic Lanczos quadrature; one run is used for every scalar shift.

For positive semidefinite G and a random probe z, Lanczos turns zᵀf(G)z into an integral with m nodes. Two rules
bracket it if the even derivatives of f are negative and the odd ones positive, as for log(1 + x/μ) and x/(x + μ):
Gauss is an upper bound, and Gauss–Radau with a node at the lower end of the spectrum, 0, is a lower bound (Golub &
Meurant 2010, theorem 6.4).

Probes are random signs. Their variance is 2 (‖F‖_F² − Σ F_ii²) for F = f(G); that of Gaussian probes of norm √n is
about 2 (‖F‖_F² − (tr F)²/n), which is never smaller, by Cauchy–Schwarz. For the log-determinant of digits networks'
GGN, signs have 0.1 to 0.9 of the variance of Gaussian probes: a curvature matrix has a strong and uneven diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.core.results import Estimate, Reason, caution, indefinite
from curvops.linalg.core.vectors import ScalarFunction
from curvops.linalg.spectra.lanczos import LockStep
from curvops.summary import Summarised

# Eigenvalues are known up to this many units of rounding of the largest, the error of the products.
ROUNDING_UNITS = 2.0


@dataclass(frozen=True, eq=False, repr=False)
class SpectralQuadrature(Summarised):
    """Nodes and weights of Gauss and Gauss–Radau quadratures of a spectrum, one row per probe.

    Padding has weight 0. ``control_nodes`` and ``control_weights`` (uᵢᵀz)² belong to a Nyström approximation Ĝ whose
    sum is known exactly and whose probe values are subtracted: tr f(G) = tr f(Ĝ) + E zᵀ[f(G) − f(Ĝ)]z. They are empty
    without a sketch. ``reason`` is CONVERGED, or RANK_CAPPED if the memory or product budget ended the depth too
    early; an estimate has its own reason if a tolerance was set, ``rtol`` of the value plus ``known``.
    ``rounding`` is the size of the errors in the eigenvalues from the products' dtype.

    Examples:
        >>> A = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0]).double())
        >>> quadrature = co.linalg.spectral_quadrature(A, shift=1.0)
        >>> round(float(quadrature.logdet(1.0)), 4), round(float(quadrature.effective_dimension(1.0)), 4)
        (4.7875, 2.7167)
    """

    gauss_nodes: Float[Tensor, "K m"]
    gauss_weights: Float[Tensor, "K m"]
    radau_nodes: Float[Tensor, "K l"]
    radau_weights: Float[Tensor, "K l"]
    control_nodes: Float[Tensor, " r"]
    control_weights: Float[Tensor, "K r"]
    matvecs: int
    reason: Reason
    rounding: float = 0.0
    rtol: float | None = None
    known: float = 0.0

    def logdet(self, shift: float | int | Tensor) -> Estimate:
        """Estimate log det(I + G/shift) in nats, for any positive shift, or for each of a tensor (m,)."""
        return self._each(log_ratio, shift)

    def effective_dimension(self, shift: float | int | Tensor) -> Estimate:
        """Estimate tr G (G + shift I)⁻¹ for any positive shift, or for each of a tensor (m,)."""
        return self._each(share, shift)

    def _each(self, of_shift: Callable[[float], ScalarFunction], shift: float | int | Tensor) -> Estimate:
        if not (isinstance(shift, Tensor) and shift.ndim):
            return self.trace(of_shift(float(positive(shift))))
        return stack([self.trace(of_shift(float(positive(mu)))) for mu in shift.tolist()])

    def trace(self, f: ScalarFunction) -> Estimate:
        """Estimate tr f(G) for f with f(0) = 0 and derivatives of alternating sign, the first positive.

        The value is the middle of the bracket. ``bias_bound`` is half its mean width plus the effect of rounding of the
        products, which changes each eigenvalue by ``rounding``, counted by the weights. The control variate is used
        if it lowers the variance between probes.
        """
        upper, lower = self.bracket(f)
        middle, half = (upper + lower) / 2, ((upper - lower) / 2).clamp_min(0).mean()
        known = f(self.control_nodes)
        corrected = middle - self.control_weights @ known + known.sum()
        count = len(middle)
        samples = corrected if len(known) and count > 1 and corrected.var() < middle.var() else middle
        variance = samples.var() if count > 1 else torch.full_like(half, math.inf)
        if samples is middle:
            variance = variance + self._top_weight_error(f).square()
        stderr = (variance / count).sqrt()
        rounded = self._rounding_effect(f)
        found = Estimate(samples.mean(), stderr, count, self.matvecs, half + rounded, widening=caution(count))
        return replace(found, reason=self._reason(found, float(rounded)))

    def _top_weight_error(self, f: ScalarFunction) -> Tensor:
        """Return the error of the largest eigenvalue's weight, in units of the sum.

        The expectation of the weight is known: it is the multiplicity, a whole number. If one eigenvalue dominates,
        zᵀf(G)z is about χ² with one degree of freedom; if it happens to be small, so is its spread between probes, and
        the tolerance ends the run too early. The spread about the known expectation, which is added to the spread about
        the mean, is not small then. The error is 0 unless all probes found the same eigenvalue.
        """
        top, place = self.gauss_nodes.max(1)
        largest, alike = top.amax(), 1 - 1e-6
        if not bool(top.amin() >= alike * largest):
            return torch.zeros_like(largest)
        weight = self.gauss_weights.gather(1, place[:, None]).mean()
        below = torch.where(self.gauss_nodes < alike * largest, self.gauss_nodes, 0.0).amax()
        return (f(largest) - f(below)) * (weight - weight.round().clamp_min(1))

    def _rounding_effect(self, f: ScalarFunction) -> Tensor:
        x, delta = self.gauss_nodes, self.rounding
        change = torch.maximum(f(x + delta) - f(x), f(x) - f((x - delta).clamp_min(0)))
        return (self.gauss_weights * change).sum(1).mean()

    def _reason(self, found: Estimate, rounded: float) -> Reason:
        if self.rtol is None:
            return Reason.BUDGET_SPENT if self.reason is Reason.CONVERGED else self.reason
        goal = self.rtol * abs(self.known + float(found.value))
        if float(found.stderr) <= goal and float(found.bias_bound) <= goal:
            return Reason.CONVERGED
        if rounded > goal:
            return Reason.PRECISION_LIMIT
        return Reason.MATVEC_LIMIT if self.reason is Reason.CONVERGED else self.reason

    def bracket(self, f: ScalarFunction) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"]]:
        """Return the upper and lower bound of zᵀf(G)z for each probe."""
        upper = (self.gauss_weights * f(self.gauss_nodes)).sum(1)
        return upper, (self.radau_weights * f(self.radau_nodes)).sum(1)


def log_ratio(mu: float) -> ScalarFunction:
    """Return the function x ↦ log(1 + x/μ)."""
    return lambda x: torch.log1p(x / mu)


def share(mu: float) -> ScalarFunction:
    """Return the function x ↦ x/(x + μ)."""
    return lambda x: x / (x + mu)


def stack(estimates: list[Estimate]) -> Estimate:
    """Join estimates from the same probes into one of shape (m,); the reason is the first that is not CONVERGED."""
    first = estimates[0]
    failed = [e.reason for e in estimates if e.reason is not Reason.CONVERGED]
    value, stderr = torch.stack([e.value for e in estimates]), torch.stack([e.stderr for e in estimates])
    bias = torch.stack([torch.as_tensor(e.bias_bound).to(value) for e in estimates])
    reason = failed[0] if failed else Reason.CONVERGED
    return Estimate(value, stderr, first.samples, first.matvecs, bias, reason, widening=first.widening)


def single(estimate: Estimate) -> Estimate:
    """Return an estimate of shape (1,) as a number."""
    bias = torch.as_tensor(estimate.bias_bound).squeeze()
    return replace(estimate, value=estimate.value[0], stderr=estimate.stderr[0], bias_bound=bias)


def positive(shift: float | int | Tensor) -> float | int | Tensor:
    """Return a positive shift; raise ValueError for any other value."""
    if not bool(shift > 0):
        raise ValueError(f"shift must be positive, got {float(shift)}.")
    return shift


class Rules(NamedTuple):
    """The quadrature rules of one probe with nodes clamped at 0, and the extreme Ritz values before clamping."""

    gauss: Tensor
    gauss_weights: Tensor
    radau: Tensor
    radau_weights: Tensor
    lowest: float
    highest: float


def rules(run: LockStep, k: int, scale: float) -> Rules:
    """Return the rules of Gauss and of Gauss–Radau with a node at 0, for start vector k.

    ``scale`` is the size of the terms of the products; their rounding may look like a negative eigenvalue.

    Raises:
        NotPositiveSemidefiniteError: a Ritz value is clearly below zero.
    """
    T, size = run.tridiagonal(k), float(run.sizes[k]) ** 2
    nodes, V = torch.linalg.eigh(T)
    lowest, highest, m = float(nodes[0]), float(nodes.abs().amax()), len(T)
    beta = float(run.betas[k, m - 1])
    noise = 1e3 * run.eps * max(scale, highest)
    # ‖Gz‖² ≤ ‖G‖ zᵀGz for a positive semidefinite G; an image of z without curvature along z disproves it.
    if lowest < -noise or (highest == 0 and beta > noise):
        raise indefinite(
            f"the operator is not positive semidefinite, or lower_bound is too large: {lowest:.3e} is below."
        )
    gauss = nodes.clamp_min(0), size * V[0].square()
    if beta == 0 or highest == 0:
        return Rules(*gauss, *gauss, lowest, highest)
    # A node slightly below 0 bounds, too, and T minus it stays regular if 0 is itself a Ritz value.
    below = min(lowest, 0.0) - run.eps * float(nodes[-1].abs())
    last = torch.zeros(m, dtype=torch.float64)
    last[-1] = beta**2
    found, info = torch.linalg.solve_ex(T - below * torch.eye(m, dtype=torch.float64), last)
    if int(info) or not math.isfinite(float(found[-1])):
        # Rounding in T put a Ritz value there, as in steps within an exact null space: move past it.
        below -= m * run.eps * highest
        found = torch.linalg.solve(T - below * torch.eye(m, dtype=torch.float64), last)
    corner = below + float(found[-1])
    extended = torch.zeros(m + 1, m + 1, dtype=torch.float64)
    extended[:m, :m], extended[m, m] = T, corner
    extended[m, m - 1] = extended[m - 1, m] = beta
    nodes, V = torch.linalg.eigh(extended)
    return Rules(*gauss, nodes.clamp_min(0), size * V[0].square(), lowest, highest)
