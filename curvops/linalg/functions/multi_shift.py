"""(A + σ I) x = b for many shifts σ ≥ 0 by conjugate gradients, at one product a step: only a weighted sum is kept.

The residuals of all shifts are multiples ζ of the one of the smallest shift, so that scalars carry the others
(Jegerlehner 1996; Frommer & Maass 1999). A step costs a product and one vector update a shift.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from scipy.linalg import eigh_tridiagonal, solve_banded
from torch import Tensor

from curvops.linalg.core.limits import NEAR_ZERO
from curvops.linalg.core.memory import Multiply
from curvops.linalg.core.results import INDEFINITE_REMEDY, NotPositiveSemidefinite
from curvops.linalg.core.vectors import Vectors, as_block, axpy, inner, zero_block
from curvops.linalg.functions.ritz import random_signs

# A shift whose residual is this much smaller than b's has no more to add, were the condition number 1/eps.
NEGLIGIBLE = 1e-24


class MultiShift:
    """Σ w x_σ for K unit columns b in lock-step, and what certifies it; scalars are (S, K) or (K,) float64 on the host.

    ``weighted`` is Y = Σ w x_σ and ``damped`` Σ w σ x_σ; ``solutions`` holds the x_σ where ``keep`` asks for them.
    By the recurrences A Y = Σ w b − Σ w ζ R − ``damped``; a product with A tells how far they have drifted.
    """

    def __init__(
        self, multiply: Multiply, B: Float[Vectors, "n K"], shifts: Tensor, weights: Tensor, size: float, keep: bool
    ) -> None:
        self.multiply, self.shifts, self.weights, self.size = multiply, shifts, weights, size
        S, K = len(shifts), B.shape[1]
        self.R = as_block(B)
        self.P = [as_block(B) for _ in range(S)]
        self.weighted, self.damped = zero_block(B, K), zero_block(B, K)
        self.solutions = [zero_block(B, K) for _ in range(S)] if keep else []
        self.zeta, self.zeta_before = torch.ones(2, S, K, dtype=torch.float64)
        self.squared = inner(self.R, self.R)
        self.squared_host = self.squared.cpu()
        self.alpha, self.beta = torch.ones(K, dtype=torch.float64), torch.zeros(K, dtype=torch.float64)
        # Numbers, for so many small tensors between the vectors of a step would hold on to the vectors' memory.
        self.alphas: list[list[float]] = []
        self.betas: list[list[float]] = [[0.0] * K]
        self.active = torch.ones(K, dtype=torch.bool)
        self.depths = torch.zeros(K, dtype=torch.long)
        self.failed = torch.zeros(K, dtype=torch.bool)
        self.matvecs = 0

    @property
    def iteration(self) -> int:
        return len(self.alphas)

    def step(self) -> None:
        """One product for all columns; those no longer active stay as they are. One transfer each way."""
        base, active = self.P[0], self.active.to(self.R.device)
        image = self.multiply(base) + float(self.shifts[0]) * base
        self.matvecs += int(self.active.sum())
        curvature, lengths = inner(base, image), inner(base, base)
        alpha = torch.where(active & (curvature > 0), self.squared / curvature, 0.0)
        axpy(self.R, image, -alpha)
        squared = inner(self.R, self.R)
        curvature_host, lengths_host, squared_host = torch.stack([curvature, lengths, squared]).cpu()
        eps = torch.finfo(self.R.dtype).eps
        if bool((self.active & (curvature_host < -NEAR_ZERO * eps * self.size * lengths_host)).any()):
            raise NotPositiveSemidefinite(
                f"A is not positive semidefinite: a direction p with p'Ap < 0 was met. {INDEFINITE_REMEDY}"
            )
        sound = torch.isfinite(squared_host) & torch.isfinite(curvature_host)
        broken = self.active & ~(sound & (curvature_host > 0))
        self.failed |= broken & ~sound
        self.active &= ~broken
        step = torch.where(self.active, self.squared_host / curvature_host, 0.0)
        self._advance(step, torch.where(self.active, squared_host / self.squared_host, 0.0))
        self.squared, self.squared_host = squared, torch.where(self.active, squared_host, self.squared_host)
        self.depths += self.active
        self.active &= self.squared_host.sqrt() > NEGLIGIBLE

    def _advance(self, alpha: Tensor, beta: Tensor) -> None:
        """The scalar recurrences of every shift, then its vectors."""
        delta = (self.shifts - self.shifts[0])[:, None]
        scaled = self.zeta_before * self.alpha
        bottom = alpha * self.beta * (self.zeta_before - self.zeta) + scaled * (1 + delta * alpha)
        zeta = torch.where(self.active & (bottom != 0), self.zeta * scaled / bottom, self.zeta)
        zeta = torch.where(zeta * self.squared_host.sqrt() > NEGLIGIBLE, zeta, 0.0)
        ratio = torch.where(self.zeta != 0, zeta / self.zeta, 0.0)
        steps, turns = alpha * ratio, beta * ratio.square()
        moving = (steps != 0).any(1)
        on_device = [
            part.to(self.R.device, self.R.dtype)
            for part in (
                steps,
                self.weights[:, None] * steps,
                (self.weights * self.shifts)[:, None] * steps,
                zeta * self.active,
                turns,
            )
        ]
        for s in moving.nonzero().flatten().tolist():
            step, weighted, damped, residual, turn = (part[s] for part in on_device)
            axpy(self.weighted, self.P[s], weighted)
            axpy(self.damped, self.P[s], damped)
            if self.solutions:
                axpy(self.solutions[s], self.P[s], step)
            self.P[s] *= turn
            axpy(self.P[s], self.R, residual)
        self.zeta_before, self.zeta = self.zeta, zeta
        self.alpha, self.beta = torch.where(alpha > 0, alpha, self.alpha), beta
        self.alphas.append(self.alpha.tolist())
        self.betas.append(beta.tolist())

    def residual_norms(self) -> Float[Tensor, "S K"]:
        """‖b − (A + σ) x_σ‖ by the recurrences."""
        return self.zeta * self.squared_host.sqrt()

    def tridiagonal(self, k: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Lanczos's T for column k, that of A without a shift: diagonal, off-diagonal, and the next β."""
        m = int(self.depths[k])
        alpha = np.array([a[k] for a in self.alphas[:m]])
        beta = np.array([b[k] for b in self.betas[: m + 1]])
        diagonal = 1 / alpha - float(self.shifts[0])
        diagonal[1:] += beta[1:m] / alpha[:-1]
        roots = np.sqrt(beta[1:]) / alpha
        return diagonal, roots[:-1], float(roots[-1])

    def ends(self, k: int) -> tuple[float, float, float]:
        """The smallest and largest Ritz value of A for column k, and the residual of the smallest."""
        m = int(self.depths[k])
        if not m:
            return 0.0, self.size, self.size
        diagonal, off, last = self.tridiagonal(k)
        low, vector = eigh_tridiagonal(diagonal, off, select="i", select_range=(0, 0))
        high = eigh_tridiagonal(diagonal, off, eigvals_only=True, select="i", select_range=(m - 1, m - 1))
        return float(low[0]), float(high[0]), abs(float(vector[-1, 0])) * last

    def sensitivity(self, k: int, level: float, inverse: bool) -> float:
        """‖g(T + E) e₁ − g(T) e₁‖/‖g(T) e₁‖ for a fixed E of size ``level`` and g what the shifts sum up to."""
        m = int(self.depths[k])
        if not m:
            return math.inf
        diagonal, off, _ = self.tridiagonal(k)
        signs = random_signs(m).numpy()
        moved = diagonal + level * signs[0], off + level * signs[1, : m - 1]
        g, h = self._of_tridiagonal(diagonal, off, inverse), self._of_tridiagonal(*moved, inverse)
        return float(np.linalg.norm(g - h) / np.linalg.norm(g))

    def _of_tridiagonal(self, diagonal: np.ndarray, off: np.ndarray, inverse: bool) -> np.ndarray:
        first, total = np.eye(len(diagonal), 1)[:, 0], np.zeros(len(diagonal))
        above, below = np.append(0.0, off), np.append(off, 0.0)
        for shift, weight in zip(self.shifts.tolist(), self.weights.tolist()):
            total += weight * solve_banded((1, 1), np.stack([above, diagonal + shift, below]), first)
        if inverse:
            return total
        image: np.ndarray = diagonal * total
        image[:-1] += off * total[1:]
        image[1:] += off * total[:-1]
        return image
