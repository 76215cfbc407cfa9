"""Conjugate linear regression as a change of variables: standard normal numbers in, posterior weights out.

For Y ~ N(Ψω, λ I) and ω ~ N(0, I), column by column, the posterior is N(μ, Σ), Σ = λ(λI + ΨᵀΨ)⁻¹ and μ = ΨᵀY's image
under Σ/λ; T(φ) = μ + R φ with R Rᵀ = Σ. Each form is another root R, of another matrix to be factorised. All are
differentiable in Ψ any number of times, also where singular values coincide, since they factorise by Cholesky.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

ReadoutFeatures = Float[Tensor, "n p"]
Targets = Float[Tensor, "n k"]
ReadoutWeights = Float[Tensor, "p k"]


@runtime_checkable
class Conjugate(Protocol):
    """ω = T(φ) at features Ψ and targets Y, log|det ∂T/∂φ| of all columns, and φ = T⁻¹(ω)."""

    def forward(
        self, features: ReadoutFeatures, targets: Targets, phi: ReadoutWeights
    ) -> tuple[ReadoutWeights, Float[Tensor, ""]]:
        """T(φ) and the log-determinant, in float64."""

    def inverse(self, features: ReadoutFeatures, targets: Targets, omega: ReadoutWeights) -> ReadoutWeights:
        """T⁻¹(ω)."""


@dataclass(frozen=True)
class Identity:
    """λ = ∞: the data change nothing."""

    def forward(
        self, features: ReadoutFeatures, targets: Targets, phi: ReadoutWeights
    ) -> tuple[ReadoutWeights, Float[Tensor, ""]]:
        """φ itself."""
        return phi, phi.new_zeros((), dtype=torch.float64)

    def inverse(self, features: ReadoutFeatures, targets: Targets, omega: ReadoutWeights) -> ReadoutWeights:
        """ω itself."""
        return omega


@dataclass(frozen=True)
class FeatureSpace:
    """By L Lᵀ = λI + ΨᵀΨ, (p, p): T(φ) = L⁻ᵀ(L⁻¹ΨᵀY + √λ φ). O(np² + p³) operations."""

    level: float

    def factor(self, features: ReadoutFeatures) -> Float[Tensor, "p p"]:
        """L."""
        return factor(features.mT @ features, self.level)

    def posterior(
        self, L: Float[Tensor, "p p"], features: ReadoutFeatures, targets: Targets
    ) -> tuple[Targets, ReadoutWeights]:
        """S⁻¹Y = (Y − Ψμ)/λ, S = λI + ΨΨᵀ, and μ."""
        mean = torch.cholesky_solve(features.mT @ targets, L)
        return (targets - features @ mean) / self.level, mean

    def decorrelated(self, L: Float[Tensor, "p p"], features: ReadoutFeatures) -> ReadoutFeatures:
        """S⁻¹Ψ."""
        return features @ torch.cholesky_inverse(L)

    def forward(
        self, features: ReadoutFeatures, targets: Targets, phi: ReadoutWeights
    ) -> tuple[ReadoutWeights, Float[Tensor, ""]]:
        """T(φ) and k Σ_i log(√λ / L_ii)."""
        L = self.factor(features)
        inner = solved(L, features.mT @ targets) + math.sqrt(self.level) * phi
        return solved(L.mT, inner, upper=True), log_root(L, self.level, phi.shape[-1])

    def inverse(self, features: ReadoutFeatures, targets: Targets, omega: ReadoutWeights) -> ReadoutWeights:
        """(Lᵀω − L⁻¹ΨᵀY)/√λ."""
        L = self.factor(features)
        return (L.mT @ omega - solved(L, features.mT @ targets)) / math.sqrt(self.level)


@dataclass(frozen=True)
class DataSpace:
    """By L Lᵀ = S = λI + ΨΨᵀ, (n, n), and B = L + √λ I: R = I − ΨᵀL⁻ᵀB⁻¹Ψ (Andrews 1968). O(n²p + n³) operations.

    R Rᵀ = Σ as of the symmetric root, which differs by a rotation. That one takes an eigendecomposition of S, and its
    derivative does not exist by automatic differentiation where two eigenvalues are equal: for a point that occurs
    twice, say.
    """

    level: float

    def factor(self, features: ReadoutFeatures) -> Float[Tensor, "n n"]:
        """L."""
        return factor(features @ features.mT, self.level)

    def posterior(
        self, L: Float[Tensor, "n n"], features: ReadoutFeatures, targets: Targets
    ) -> tuple[Targets, ReadoutWeights]:
        """S⁻¹Y and μ = ΨᵀS⁻¹Y."""
        alpha = torch.cholesky_solve(targets, L)
        return alpha, features.mT @ alpha

    def decorrelated(self, L: Float[Tensor, "n n"], features: ReadoutFeatures) -> ReadoutFeatures:
        """S⁻¹Ψ."""
        return torch.cholesky_inverse(L) @ features

    def forward(
        self, features: ReadoutFeatures, targets: Targets, phi: ReadoutWeights
    ) -> tuple[ReadoutWeights, Float[Tensor, ""]]:
        """φ + ΨᵀL⁻ᵀ(L⁻¹Y − B⁻¹Ψφ), and k Σ_i log(√λ / L_ii)."""
        L = self.factor(features)
        change = solved(L, targets) - solved(self._shifted(L), features @ phi)
        omega = phi + features.mT @ solved(L.mT, change, upper=True)
        return omega, log_root(L, self.level, phi.shape[-1])

    def inverse(self, features: ReadoutFeatures, targets: Targets, omega: ReadoutWeights) -> ReadoutWeights:
        """v + ΨᵀB⁻ᵀΨv/√λ of v = ω − ΨᵀS⁻¹Y."""
        L = self.factor(features)
        gap = omega - features.mT @ solved(L.mT, solved(L, targets), upper=True)
        back = solved(self._shifted(L).mT, features @ gap, upper=True)
        return gap + features.mT @ back / math.sqrt(self.level)

    def _shifted(self, L: Tensor) -> Tensor:
        return L + math.sqrt(self.level) * torch.eye(len(L), dtype=L.dtype, device=L.device)


def factor(gram: Float[Tensor, "m m"], level: float) -> Float[Tensor, "m m"]:
    """L with L Lᵀ = gram + λI; NaN where there is none, so that a proposal far away is rejected, not an error."""
    L, info = torch.linalg.cholesky_ex(gram + level * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
    return L.masked_fill((info != 0)[..., None, None], math.nan)


def solved(triangle: Float[Tensor, "m m"], block: Float[Tensor, "m k"], upper: bool = False) -> Float[Tensor, "m k"]:
    """The solution of a triangular system."""
    return torch.linalg.solve_triangular(triangle, block, upper=upper)


def log_root(L: Float[Tensor, "m m"], level: float, columns: int) -> Float[Tensor, ""]:
    """log det Σ^½ of all columns, in float64."""
    return columns * (0.5 * math.log(level) - L.diagonal().double().log()).sum()


def condition(root: Float[Tensor, "r m"], level: float) -> float:
    """The condition number of λI + AᵀA for A = root, from the smaller of AᵀA and AAᵀ in float64."""
    A = root.double()
    r, m = A.shape
    values = torch.linalg.eigvalsh(A.mT @ A if m <= r else A @ A.mT).clamp_min(0)
    lowest = float(values[0]) if m <= r else 0.0
    return (float(values[-1]) + level) / (lowest + level)
