"""Conjugate linear regression as a change of variables, from standard normal numbers to posterior weights.

For Y ~ N(Ψω, λ I) and ω ~ N(0, I), column by column, the posterior is N(μ, Σ), Σ = λ(λI + ΨᵀΨ)⁻¹ and μ = ΣΨᵀY/λ.
T(φ) = μ + R φ with R Rᵀ = Σ; each form has its own root R and factorises its own matrix. All are differentiable in Ψ
any number of times, even if singular values coincide, since they factorise by Cholesky.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

ReadoutFeatures = Float[Tensor, "n p"]
Targets = Float[Tensor, "n k"]
ReadoutWeights = Float[Tensor, "p k"]


@dataclass(frozen=True)
class Identity:
    """The identity map T, the limit λ = ∞, at which the data change nothing."""

    def forward(
        self, features: ReadoutFeatures, targets: Targets, phi: ReadoutWeights
    ) -> tuple[ReadoutWeights, Float[Tensor, ""]]:
        """Return φ itself."""
        return phi, phi.new_zeros((), dtype=torch.float64)

    def inverse(self, features: ReadoutFeatures, targets: Targets, omega: ReadoutWeights) -> ReadoutWeights:
        """Return ω itself."""
        return omega


@dataclass(frozen=True)
class FeatureSpace:
    """The map T(φ) = L⁻ᵀ(L⁻¹ΨᵀY + √λ φ), with the Cholesky factor L Lᵀ = λI + ΨᵀΨ, (p, p); O(np² + p³) operations."""

    level: float

    def factor(self, features: ReadoutFeatures) -> Float[Tensor, "p p"]:
        """Return the Cholesky factor L."""
        return factor(features.mT @ features, self.level)

    def posterior(
        self, L: Float[Tensor, "p p"], features: ReadoutFeatures, targets: Targets
    ) -> tuple[Targets, ReadoutWeights]:
        """Return S⁻¹Y = (Y − Ψμ)/λ for S = λI + ΨΨᵀ, and μ."""
        mean = torch.cholesky_solve(features.mT @ targets, L)
        return (targets - features @ mean) / self.level, mean

    def decorrelate(self, L: Float[Tensor, "p p"], features: ReadoutFeatures) -> ReadoutFeatures:
        """Return S⁻¹Ψ."""
        return features @ torch.cholesky_inverse(L)

    def forward(
        self, features: ReadoutFeatures, targets: Targets, phi: ReadoutWeights
    ) -> tuple[ReadoutWeights, Float[Tensor, ""]]:
        """Return T(φ) and k Σ_i log(√λ / L_ii)."""
        L = self.factor(features)
        inner = solve_triangle(L, features.mT @ targets) + math.sqrt(self.level) * phi
        return solve_triangle(L.mT, inner, upper=True), log_root(L, self.level, phi.shape[-1])

    def inverse(self, features: ReadoutFeatures, targets: Targets, omega: ReadoutWeights) -> ReadoutWeights:
        """Return (Lᵀω − L⁻¹ΨᵀY)/√λ."""
        L = self.factor(features)
        return (L.mT @ omega - solve_triangle(L, features.mT @ targets)) / math.sqrt(self.level)


@dataclass(frozen=True)
class DataSpace:
    """The map T with the root R = I − ΨᵀL⁻ᵀB⁻¹Ψ, L Lᵀ = S = λI + ΨΨᵀ (n, n), B = L + √λ I (Andrews 1968).

    It takes O(n²p + n³) operations.

    R Rᵀ = Σ; the symmetric root of Σ differs from R by a rotation. It would need an eigendecomposition of S, which
    automatic differentiation cannot differentiate if two eigenvalues are equal, for example if a point occurs twice.
    """

    level: float

    def factor(self, features: ReadoutFeatures) -> Float[Tensor, "n n"]:
        """Return the Cholesky factor L."""
        return factor(features @ features.mT, self.level)

    def posterior(
        self, L: Float[Tensor, "n n"], features: ReadoutFeatures, targets: Targets
    ) -> tuple[Targets, ReadoutWeights]:
        """Return S⁻¹Y and μ = ΨᵀS⁻¹Y."""
        alpha = torch.cholesky_solve(targets, L)
        return alpha, features.mT @ alpha

    def decorrelate(self, L: Float[Tensor, "n n"], features: ReadoutFeatures) -> ReadoutFeatures:
        """Return S⁻¹Ψ."""
        return torch.cholesky_inverse(L) @ features

    def forward(
        self, features: ReadoutFeatures, targets: Targets, phi: ReadoutWeights
    ) -> tuple[ReadoutWeights, Float[Tensor, ""]]:
        """Return φ + ΨᵀL⁻ᵀ(L⁻¹Y − B⁻¹Ψφ) and k Σ_i log(√λ / L_ii)."""
        L = self.factor(features)
        change = solve_triangle(L, targets) - solve_triangle(self._shifted(L), features @ phi)
        omega = phi + features.mT @ solve_triangle(L.mT, change, upper=True)
        return omega, log_root(L, self.level, phi.shape[-1])

    def inverse(self, features: ReadoutFeatures, targets: Targets, omega: ReadoutWeights) -> ReadoutWeights:
        """Return v + ΨᵀB⁻ᵀΨv/√λ for v = ω − ΨᵀS⁻¹Y."""
        L = self.factor(features)
        gap = omega - features.mT @ solve_triangle(L.mT, solve_triangle(L, targets), upper=True)
        back = solve_triangle(self._shifted(L).mT, features @ gap, upper=True)
        return gap + features.mT @ back / math.sqrt(self.level)

    def _shifted(self, L: Tensor) -> Tensor:
        return L + math.sqrt(self.level) * torch.eye(len(L), dtype=L.dtype, device=L.device)


Conjugate = Identity | FeatureSpace | DataSpace
"""A change of variables ω = T(φ) at features Ψ and targets Y, with its log-determinant in float64 and its inverse."""


def factor(gram: Float[Tensor, "m m"], level: float) -> Float[Tensor, "m m"]:
    """Return L with L Lᵀ = gram + λI; NaN if it fails, so that a far proposal is rejected without an error."""
    L, info = torch.linalg.cholesky_ex(gram + level * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
    return L.masked_fill((info != 0)[..., None, None], math.nan)


def solve_triangle(
    triangle: Float[Tensor, "m m"], block: Float[Tensor, "m k"], upper: bool = False
) -> Float[Tensor, "m k"]:
    """Solve a triangular system."""
    return torch.linalg.solve_triangular(triangle, block, upper=upper)


def log_root(L: Float[Tensor, "m m"], level: float, columns: int) -> Float[Tensor, ""]:
    """Return log det Σ^½ of all columns, in float64."""
    return columns * (0.5 * math.log(level) - L.diagonal().double().log()).sum()


def condition(root: Float[Tensor, "r m"], level: float) -> float:
    """Return the condition number of λI + AᵀA, with A = root, from the smaller of AᵀA and AAᵀ in float64."""
    A = root.double()
    r, m = A.shape
    values = torch.linalg.eigvalsh(A.mT @ A if m <= r else A @ A.mT).clamp_min(0)
    lowest = float(values[0]) if m <= r else 0.0
    return (float(values[-1]) + level) / (lowest + level)
