"""The spectrum of a matrix small enough to be formed; one eigendecomposition is used for every shift."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.core.algorithm import Multiply
from curvops.linalg.core.results import Estimate, Reason, indefinite
from curvops.linalg.core.structure import formed
from curvops.linalg.core.vectors import Description, ScalarFunction, check_finite

ROUNDING_UNITS = 2.0
"""Eigenvalues are known up to this many units of rounding of the largest, the error of the products."""


def log_ratio(mu: float) -> ScalarFunction:
    """Return the function x ↦ log(1 + x/μ)."""
    return lambda x: torch.log1p(x / mu)


def share(mu: float) -> ScalarFunction:
    """Return the function x ↦ x/(x + μ)."""
    return lambda x: x / (x + mu)


def rounding_of_eigenvalues(size: float, eps: float, eps_of_rows: float = 0.0) -> tuple[float, float]:
    """Return ρ, the error of an eigenvalue of zero, and η: that of any other, σ² with η the error of σ, is ρ + 2ησ.

    Args:
        size: the largest eigenvalue.
        eps: the rounding of products, or of a sum of squares of rows.
        eps_of_rows: that of the rows.
    """
    of_roots = ROUNDING_UNITS * eps_of_rows * math.sqrt(size)
    return of_roots**2 + ROUNDING_UNITS * eps * size, of_roots


def stack(estimates: list[Estimate]) -> Estimate:
    """Join estimates from the same probes into one of shape (m,); the reason is the first that is not CONVERGED."""
    first = estimates[0]
    failed = [e.reason for e in estimates if e.reason is not Reason.CONVERGED]
    value, stderr = torch.stack([e.value for e in estimates]), torch.stack([e.stderr for e in estimates])
    bias = torch.stack([torch.as_tensor(e.bias_bound).to(value) for e in estimates])
    reason = failed[0] if failed else Reason.CONVERGED
    return Estimate(value, stderr, first.samples, first.matvecs, bias, reason, widening=first.widening)


@dataclass(frozen=True, eq=False)
class DenseSpectrum:
    """Eigenvalues of A − bound I and eigenvectors in float64.

    ``eps`` is the rounding of A's products; or, for a sum of squares of rows, that of the sum, and ``eps_of_rows`` is
    that of the rows.
    """

    values: Float[Tensor, " n"]
    vectors: Float[Tensor, "n n"]
    bound: float
    eps: float
    eps_of_rows: float = 0.0

    @cached_property
    def _rounding(self) -> tuple[float, float]:
        """The errors ρ and η of `rounding_of_eigenvalues`."""
        return rounding_of_eigenvalues(float(self.values.abs().amax()), self.eps, self.eps_of_rows)

    def _errors(self) -> Float[Tensor, " n"]:
        """Return the effect of rounding on each eigenvalue."""
        at_zero, of_roots = self._rounding
        return at_zero + 2 * of_roots * self.values.clamp_min(0).sqrt()

    @property
    def _noise(self) -> float:
        """The size up to which an eigenvalue may be due to rounding alone."""
        return len(self.values) * self._rounding[0] / ROUNDING_UNITS

    def trace_error(self, inverse: Float[Tensor, "n n"], count: Tensor) -> Tensor:
        """Return the effect of rounding on log det P and tr P⁻¹A, given P⁻¹ of a P = A + … and tr P⁻¹A."""
        (at_zero, of_roots), trace = self._rounding, inverse.trace()
        return at_zero * trace + 2 * of_roots * (count.clamp_min(0) * trace).sqrt()

    def _definite(self, mu: float) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """Return the eigenvalues, and the effect of rounding on each; raise as `logdet` does.

        With a shift, an eigenvalue within rounding of zero counts as zero; without one it cannot be distinguished from
        zero.
        """
        values, lowest, errors = self.values, float(self.values[0]), self._errors()
        if mu > 0 and lowest >= -self._noise:
            return values.clamp_min(0), errors.clamp_min(-lowest)
        if lowest + mu <= self._noise:
            raise indefinite(f"A is not positive definite: an eigenvalue is {lowest + self.bound:.3e}.")
        return values, errors

    def logdet(self, mu: float, rtol: float) -> Estimate:
        """Compute log det(A + μ − bound); the bias bound is the effect of rounding.

        Raises:
            NotPositiveSemidefiniteError: an eigenvalue is not positive to working precision.
        """
        (values, delta), n = self._definite(mu), len(self.values)
        total = values + mu
        least = (total - delta).clamp_min(min(mu, float(total.amin())) if mu > 0 else 0.0)
        bias = torch.maximum(torch.log1p(delta / total), (total / least).log()).sum()
        value = total.log().sum()
        return Estimate.rounded(value, bias, rtol, n, torch.log1p(values / mu).abs().sum() if mu > 0 else float(n))

    def effective_dimension(self, mu: float, rtol: float) -> Estimate:
        """Compute tr (A − bound) (A − bound + μ)⁻¹ for μ > 0; the bias bound is the effect of rounding.

        Raises:
            NotPositiveSemidefiniteError: an eigenvalue of A − bound + μ is not positive to working precision.
        """
        self._definite(mu)
        near = self.values.abs() <= self._noise
        values = torch.where(near, self.values.clamp_min(0), self.values)
        # An eigenvalue near zero cannot be distinguished from zero, whatever its computed value.
        delta = torch.where(near, values, 0.0).maximum(self._errors())
        share_of = share(mu)
        least, shares = torch.minimum(values, (values - delta).clamp_min(0)), share_of(values)
        bias = torch.maximum(share_of(values + delta) - shares, shares - share_of(least)).sum()
        return Estimate.rounded(shares.sum(), bias, rtol, len(values))

    def inverse(self, mu: float, dtype: torch.dtype) -> Float[Tensor, "n n"]:
        """Return (A + μ − bound)⁻¹."""
        return ((self.vectors / (self.values + mu)) @ self.vectors.mT).to(dtype)

    def _clamp(self) -> Float[Tensor, " n"]:
        """Return the eigenvalues; unless one is clearly negative, those within rounding of zero are raised to 0."""
        return self.values.clamp_min(0) if float(self.values[0]) >= -self._noise else self.values

    def semidefinite_part(self) -> Float[Tensor, "n n"]:
        """Return A − bound in float64, without the negative eigenvalues due to rounding."""
        return (self.vectors * self._clamp()) @ self.vectors.mT

    def plus_diagonal(self, diagonal: Float[Tensor, " n"], rtol: float) -> tuple[Estimate, Float[Tensor, "n n"]]:
        """Compute log det(P) − log det(diag(d)) and P⁻¹ of P = A − bound + diag(d), d > 0, by Cholesky.

        P⁻¹ is float64. The bias bound is the effect of rounding. Raises NotPositiveSemidefiniteError for an indefinite
        P.
        """
        scale, values, n = diagonal.double().rsqrt(), self._clamp(), len(self.values)
        root = scale[:, None] * self.vectors
        whitened = (root * values) @ root.mT
        whitened.diagonal().add_(1)  # no pivot of a psd A is below 1, whatever the range of d
        ratio = definite_logdet(whitened)
        inverse = scale[:, None] * torch.cholesky_inverse(torch.linalg.cholesky(whitened)) * scale
        count = n - (inverse.diagonal() * diagonal).sum()
        return Estimate.rounded(ratio, self.trace_error(inverse, count), rtol, n), inverse


def dense_spectrum(multiply: Multiply, facts: Description, bound: float) -> DenseSpectrum:
    """Form A by n products and decompose it; raise ValueError if it is not finite or not symmetric."""
    return decomposed(formed(multiply, facts), bound, torch.finfo(facts.dtype).eps)


def decomposed(dense: Float[Tensor, "n n"], bound: float, eps: float, eps_of_rows: float = 0.0) -> DenseSpectrum:
    """Decompose a matrix in float64; raise ValueError if it is not finite."""
    check_finite(dense)
    values, vectors = torch.linalg.eigh((dense + dense.mT) / 2)
    return DenseSpectrum(values - bound, vectors, bound, eps, eps_of_rows)


def definite_logdet(dense: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """Compute log det of symmetric positive definite matrices by Cholesky, with gradients.

    Raises:
        NotPositiveSemidefiniteError: a matrix is not positive definite to working precision (it is also a ValueError).
    """
    factor, info = torch.linalg.cholesky_ex(dense)
    pivots = factor.diagonal(dim1=-2, dim2=-1)
    with torch.no_grad():
        scale = dense.diagonal(dim1=-2, dim2=-1).abs().amax(-1)
        noise = dense.shape[-1] * torch.finfo(dense.dtype).eps * scale
        if bool((info != 0).any() | ~(pivots.square().amin(-1) > noise).all()):
            raise indefinite("the operator is not positive definite to working precision: a pivot is at most rounding.")
    return 2 * pivots.log().sum(-1)
