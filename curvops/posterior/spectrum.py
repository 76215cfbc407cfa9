"""What a posterior needs of its data and curvature whatever the prior: computed once for every prior precision."""

from __future__ import annotations

import threading
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg import Diagonal, Estimate, Operator, SpectralQuadrature, lanczos, spectral_quadrature
from curvops.linalg.algebra import is_psd
from curvops.linalg.results import NotPositiveSemidefinite, Reason
from curvops.operators import Linearization

# An evidence is worth no more products: past them the error bar is what it is, and the estimate's reason says so.
MOST_MATVECS = 4000
# Products spent on looking for a negative eigenvalue of a curvature that does not vouch for having none.
LOOKED_AT = 20


class Spectrum:
    """Quadratures of the curvature's spectrum, the log-likelihood and its gradient, each computed when first asked for.

    For a scalar prior precision λ, one set of Lanczos runs on G gives log det(I + G/λ) and tr G(G + λ)⁻¹ at every λ; it
    is extended where a smaller λ or a tighter tolerance needs it. For a vector A the runs are on A^-½ G A^-½.
    """

    def __init__(self, lin: Linearization, curvature: LinearOperator) -> None:
        self._lin, self._curvature = lin, curvature
        self._lock = threading.RLock()
        self._scalar: tuple[float, float, SpectralQuadrature] | None = None
        self._log_likelihood: Tensor | None = None
        self._gradient: Tensor | None = None
        self._lowest: tuple[float, Tensor] | None = None

    def log_likelihood(self) -> Float[Tensor, ""]:
        """Σ_n log p(y_n | x_n, θ*) in nats."""
        with self._lock:
            if self._log_likelihood is None:
                with torch.no_grad():
                    self._log_likelihood = self._lin.log_likelihood()
            return self._log_likelihood

    def gradient(self) -> Float[Tensor, " D"]:
        """Gradient of the negative log-likelihood at θ*."""
        with self._lock:
            if self._gradient is None:
                self._gradient = self._lin.gradient()
            return self._gradient

    def require_usable(self, prior: Tensor) -> None:
        """Raise ValueError where G's closed form does not take this prior, or where G + A is seen to be indefinite.

        The latter is a NotPositiveSemidefinite. A G known to be psd costs nothing.
        Any other costs `LOOKED_AT` products, once for all priors: a Ritz value θ of G with its vector v proves G + A
        indefinite where θ + vᵀAv ≤ 0. Passing proves nothing; what then solves with an indefinite G + A raises.
        """
        form = self._closed_form(prior)
        if form is not None:
            form.require_fit()
        if is_psd(self._curvature):
            return
        lowest, weights = self._least_ritz()
        if lowest + float((prior.detach() * weights).sum()) <= 0:
            raise NotPositiveSemidefinite(
                f"{type(self._curvature).__name__} + prior is indefinite, so there is no Gaussian with that precision: "
                f"the curvature has an eigenvalue of {lowest:.3g} or less, the prior precision is "
                f"{float(prior.min()):.3g}. Give a prior_precision of {-1.01 * lowest:.3g} or more, or use the GGN "
                "(co.GGN), which has no negative eigenvalue."
            )

    def _least_ritz(self) -> tuple[float, Float[Tensor, " D"]]:
        """The least Ritz value of G from a short Lanczos run, and the squares of its vector's entries."""
        with self._lock:
            if self._lowest is None:
                generator = torch.Generator(device=self._lin.theta.device).manual_seed(0)  # the user's stays as it is
                with torch.no_grad():
                    found = lanczos(self._curvature, LOOKED_AT, generator=generator)
                if found.reason in (Reason.NON_FINITE, Reason.NOT_SYMMETRIC):
                    raise ValueError(f"{type(self._curvature).__name__}: {found.reason.value}")
                values, vectors = torch.linalg.eigh(found.T)
                self._lowest = float(values[0]), (found.Q @ vectors[:, 0].to(found.Q)).square()
            return self._lowest

    def logdet(self, prior: Tensor, rtol: float, generator: torch.Generator | None = None) -> Estimate:
        """log det(G + A) − log det A in nats; exact where G + A has a closed form."""
        form = self._closed_form(prior)
        if form is not None:
            value = form.logdet() - prior.log().expand(len(self._lin.theta)).sum()
            return _exact(value, form.logdet_error(), rtol)
        quadrature, shift = self._quadrature(prior, rtol, generator)
        found = quadrature.logdet(shift)
        if not (prior.requires_grad and torch.is_grad_enabled()):
            return found
        if prior.ndim:
            raise ValueError("the evidence has no gradient for a vector prior here; use a curvature in closed form.")
        # d/dλ [log det(G + λ) − D log λ] = −γ/λ with γ the effective number of parameters
        slope = -quadrature.effective_dimension(shift).value / shift
        return found + (slope * (prior - prior.detach())).to(found.value)

    def effective_dimension(self, prior: Tensor, rtol: float, generator: torch.Generator | None = None) -> Estimate:
        """tr(G (G + A)⁻¹) = D − Σ_d A_dd (P⁻¹)_dd; exact where G + A has a closed form."""
        form = self._closed_form(prior)
        if form is not None:
            return _exact((1 - (prior * form.inverse_diagonal()).double()).sum(), form.logdet_error(), rtol)
        quadrature, shift = self._quadrature(prior, rtol, generator)
        return quadrature.effective_dimension(shift)

    def prepare(self, smallest: float, rtol: float, generator: torch.Generator | None = None) -> None:
        """Spend the products that serve every scalar prior precision from `smallest` on; none for a closed form."""
        if self._closed_form(self._lin.theta.new_tensor(smallest)) is None:
            self._prepared(smallest, rtol, generator)

    def _closed_form(self, prior: Tensor) -> Any:
        precision = self._curvature.add_diagonal(prior)
        return precision._closed_form() if isinstance(precision, Operator) else None

    def _prepared(self, smallest: float, rtol: float, generator: torch.Generator | None) -> SpectralQuadrature:
        with self._lock:
            if self._scalar is None or smallest < self._scalar[0] or rtol < self._scalar[1]:
                quadrature = _within_bounds(self._curvature, smallest, rtol, generator)
                self._scalar = smallest, rtol, quadrature
            return self._scalar[2]

    def _quadrature(self, prior: Tensor, rtol: float, generator: Any) -> tuple[SpectralQuadrature, float]:
        if prior.ndim == 0:
            return self._prepared(float(prior), rtol, generator), float(prior)
        root = Diagonal(prior.detach().rsqrt())
        whitened = root @ self._curvature @ root
        return _within_bounds(whitened, 1.0, rtol, generator), 1.0


def _exact(value: Tensor, error: float, rtol: float) -> Estimate:
    reason = Reason.CONVERGED if error <= rtol * abs(float(value)) else Reason.PRECISION_LIMIT
    return Estimate.exact(value, bias_bound=error, reason=reason)


def _within_bounds(A: Any, shift: float, rtol: float, generator: torch.Generator | None) -> SpectralQuadrature:
    return spectral_quadrature(A, shift=shift, rtol=rtol, max_matvecs=MOST_MATVECS, generator=generator)
