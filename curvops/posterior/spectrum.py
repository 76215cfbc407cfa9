"""What a posterior needs of its data and curvature whatever the prior: computed once for every prior precision."""

from __future__ import annotations

import threading
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg import Diagonal, Estimate, SpectralQuadrature, spectral_quadrature
from curvops.operators import Linearization


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

    def log_likelihood(self) -> Float[Tensor, ""]:
        """Σ_n log p(y_n | x_n, θ*) in nats."""
        with self._lock:
            if self._log_likelihood is None:
                self._log_likelihood = self._lin.log_likelihood()
            return self._log_likelihood

    def gradient(self) -> Float[Tensor, " D"]:
        """Gradient of the negative log-likelihood at θ*."""
        with self._lock:
            if self._gradient is None:
                self._gradient = self._lin.gradient()
            return self._gradient

    def logdet(self, prior: Tensor, rtol: float, generator: torch.Generator | None = None) -> Estimate:
        """log det(G + A) − log det A in nats."""
        quadrature, shift = self._quadrature(prior, rtol, generator)
        return quadrature.logdet(shift)

    def effective_dimension(self, prior: Tensor, rtol: float, generator: torch.Generator | None = None) -> Estimate:
        """tr(G (G + A)⁻¹)."""
        quadrature, shift = self._quadrature(prior, rtol, generator)
        return quadrature.effective_dimension(shift)

    def prepare(self, smallest: float, rtol: float, generator: torch.Generator | None = None) -> SpectralQuadrature:
        """The quadrature that serves every scalar prior precision from `smallest` on."""
        with self._lock:
            if self._scalar is None or smallest < self._scalar[0] or rtol < self._scalar[1]:
                quadrature = spectral_quadrature(self._curvature, shift=smallest, rtol=rtol, generator=generator)
                self._scalar = smallest, rtol, quadrature
            return self._scalar[2]

    def _quadrature(self, prior: Tensor, rtol: float, generator: Any) -> tuple[SpectralQuadrature, float]:
        if prior.ndim == 0:
            return self.prepare(float(prior), rtol, generator), float(prior)
        root = Diagonal(prior.detach().rsqrt())
        whitened = root @ self._curvature @ root
        return spectral_quadrature(whitened, shift=1.0, rtol=rtol, generator=generator), 1.0
