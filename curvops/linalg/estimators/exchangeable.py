"""Leave-one-out trace estimators, in which every probe is part of the sketch for all the others.

XTrace (any square A, two products per column) and XNysTrace (positive semidefinite A, one product per column) of
Epperly, Tropp & Webber 2024. Only K × K matrices enter the estimates; earlier products are kept when K grows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.errors import NotPositiveSemidefiniteError
from curvops.linalg.core.algorithm import Multiply
from curvops.linalg.core.probed import Probed, ProbeKind
from curvops.linalg.core.results import Estimate, Reason, caution
from curvops.linalg.core.structure import require_symmetric, rounding_of
from curvops.linalg.core.vectors import axpy, combine, empty_block, gram, join, norm, part, tall_qr


class RangeSketch:
    """A range sketch with Ω, Q with Q R = A Ω, and Z = B Q for a second map B (by default A itself)."""

    cost = 2
    """Products per column."""

    def __init__(self, probed: Probed, kind: ProbeKind, second: Multiply | None = None) -> None:
        self.probed, self.facts, self.kind = probed, probed.facts, kind
        self.second = probed.multiply if second is None else second
        self.Omega = self.Q = self.Z = empty_block(self.facts, 0)
        self.R = torch.zeros(0, 0, dtype=torch.float64, device=self.facts.device)

    @property
    def columns(self) -> int:
        """K, the number of probes."""
        return len(self.R)

    @property
    def matvecs(self) -> int:
        """Products spent."""
        return self.cost * self.columns

    def grow(self, columns: int) -> None:
        """Add probes until there are ``columns``, with the earlier part of Q unchanged."""
        k = columns - self.columns
        if k < 1:
            return
        fresh = self.probed.probes(k, self.kind)
        Q, R, C = self._orthonormal(self.probed.multiply(fresh))
        below = torch.zeros(k, self.columns, dtype=torch.float64, device=R.device)
        self.R = torch.cat([torch.cat([self.R, C], 1), torch.cat([below, R], 1)])
        self.Omega, self.Q, self.Z = join(self.Omega, fresh), join(self.Q, Q), join(self.Z, self.second(Q))

    def _orthonormal(self, Y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.columns:
            return *tall_qr(Y), torch.zeros(0, Y.shape[1], dtype=torch.float64, device=Y.device)
        C, R = gram(self.Q, Y), torch.eye(Y.shape[1], dtype=torch.float64, device=Y.device)
        overlap, Q = C, Y
        for turn in range(2):
            Q, factor = tall_qr(axpy(Q.clone(), self.Q, -overlap))
            R = factor @ R
            if turn == 0:
                overlap = gram(self.Q, Q)
                C = C + overlap @ R
        return Q, R, C

    def leave_out(self) -> LeftOut:
        """Return the projections on the range without each probe in turn."""
        return LeftOut(gram(self.Q, self.Omega), self.R, torch.finfo(self.facts.dtype).eps, self.facts.columns)


class LeftOut:
    """The projections Q(I − EEᵀ)Qᵀ on the range without probes i and j, for every pair: (K, K) arrays, i by rows.

    E = [sⱼ, (sᵢ − c sⱼ)/√(1 − c²)] with c = sᵢᵀsⱼ is orthonormal. On the diagonal, E is sⱼ: only probe j is left out.
    ``W`` is QᵀΩ and A Ω = Q R.
    """

    def __init__(self, W: Float[Tensor, "K K"], R: Float[Tensor, "K K"], eps: float, n: int) -> None:
        self.W, self.S, self.n = W, dual_directions(R, eps), n
        self.c = self.S.mT @ self.S
        self.cosecant = (1 - self.c.square()).clamp_min(1e-14).rsqrt().fill_diagonal_(0)
        self.overlap = self.along(W)

    @property
    def scale(self) -> Float[Tensor, "K K"]:
        """The squared length that a residual probe should have, over its actual squared length."""
        first, second = self.overlap
        left = self.n - self.W.square().sum(0) + first.square() + second.square()
        length = torch.full_like(left, self.n - len(self.W) + 2).fill_diagonal_(self.n - len(self.W) + 1)
        return length / left.clamp_min(torch.finfo(torch.float64).tiny)

    def along(self, V: Float[Tensor, "K K"]) -> tuple[Tensor, Tensor]:
        """Return the components Eᵀvⱼ."""
        SV = self.S.mT @ V
        first = SV.diagonal().expand_as(SV)
        return first, (SV - self.c * first) * self.cosecant

    def form(self, H: Float[Tensor, "K K"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the diagonal of EᵀHE, and the sum of its off-diagonal entries."""
        h = self.S.mT @ H @ self.S
        first = h.diagonal().expand_as(h)
        mixed = h + h.mT - 2 * self.c * first
        second = h.diagonal()[:, None] - self.c * (h + h.mT) + self.c.square() * first
        return first, second * self.cosecant.square(), mixed * self.cosecant

    def quadratic(self, H: Float[Tensor, "K K"]) -> Float[Tensor, "K K"]:
        """Return pᵀHp for p = (I − EEᵀ)wⱼ."""
        (a, b), (x, y), (u, v) = self.overlap, self.along(H @ self.W), self.along(H.mT @ self.W)
        first, second, mixed = self.form(H)
        whole = (self.W * (H @ self.W)).sum(0)
        return whole - a * (x + u) - b * (y + v) + a * a * first + b * b * second + a * b * mixed

    def against(self, V: Float[Tensor, "K K"]) -> Float[Tensor, "K K"]:
        """Return pᵀvⱼ for p = (I − EEᵀ)wⱼ."""
        (a, b), (x, y) = self.overlap, self.along(V)
        return (self.W * V).sum(0) - a * x - b * y

    def estimates(self, H: Float[Tensor, "K K"], residual: Float[Tensor, "K K"]) -> Float[Tensor, "K K"]:
        """Return tr (I − EEᵀ)H, plus the residual for a probe of the length that it should have."""
        first, second, _ = self.form(H)
        return H.trace() - first - second + self.scale * residual


def dual_directions(R: Float[Tensor, "K K"], eps: float) -> Float[Tensor, "K K"]:
    """Return unit sᵢ orthogonal to every column of R but the i-th: the normalised columns of R⁻ᵀ.

    Singular values are floored at eps of the largest: R is singular for an operator of low rank, and then any
    directions of Q outside the range can be used.
    """
    U, sigma, Vh = torch.linalg.svd(R)
    sigma = sigma / torch.where(sigma[:1] > 0, sigma[:1], 1.0)
    inverse = U @ (Vh / sigma.clamp_min(eps)[:, None])
    return inverse / torch.linalg.vector_norm(inverse, dim=0)


def leave_one_out(estimates: Float[Tensor, "K K"], matvecs: int, bias: Tensor | float) -> Estimate:
    """Return the mean of the estimates without one probe, the diagonal, with the jackknife's standard error.

    They share all but one probe, and may all be wrong in the same way, which their spread does not show (a tenth of the
    error for a spectrum of two clusters). The whole estimate without probe i is the mean over j of those without i and
    j. The variance of a symmetric function of K − 1 independent probes is at most the expected sum of squared
    deviations of these.

    Source: Efron & Stein 1981; Epperly & Tropp 2024 for matrices.
    """
    samples, K = estimates.diagonal(), len(estimates)
    without = (estimates.sum(1) - samples) / (K - 1)
    stderr = ((K - 1) / K * (without - without.mean()).square().sum()).sqrt()
    return Estimate(samples.mean(), stderr, K, matvecs, bias, Reason.BUDGET_SPENT, widening=caution(K))


class LeaveOneOut:
    """An estimator from one sketch whose probes are left out in turn."""

    sketch: RangeSketch | NystromSketch

    def spend(self, matvecs: int) -> None:
        """Grow the sketch to as many columns as ``matvecs`` products give."""
        self.sketch.grow(matvecs // self.sketch.cost)


class XTrace(LeaveOneOut):
    """XTrace, the mean over i of tr Qᵢᵀ A Qᵢ + ωᵢᵀ(I − Pᵢ) A (I − Pᵢ)ωᵢ, exact for rank ≤ K − 1."""

    least, first, held = 4, 16, 2.0

    def __init__(self, probed: Probed) -> None:
        self.sketch: RangeSketch = RangeSketch(probed, "spherical")

    def estimate(self) -> Estimate:
        """Return the mean of the samples; the bias bound is rounding."""
        sketch, out, eps = self.sketch, self.sketch.leave_out(), torch.finfo(self.sketch.facts.dtype).eps
        H, T, R = gram(sketch.Q, sketch.Z), gram(sketch.Z, sketch.Omega), sketch.R
        # ωᵀ(I − P)A(I − P)ω with (I − P)ω = ω − Q p, A Ω = Q R and T = (A Q)ᵀΩ.
        residual = (out.W * R).sum(0) - out.against(R) - out.against(T) + out.quadratic(H)
        bias = math.sqrt(sketch.facts.rows) * eps * norm(sketch.Z).square().sum().sqrt()
        return leave_one_out(out.estimates(H, residual), sketch.matvecs, bias)

    def functional(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks L, R with E tr LᵀXR = tr X for any X that does not depend on the probes."""
        yield from functional(self.sketch.Omega, self.sketch.Q, self.sketch.leave_out())


def functional(Omega: Tensor, Q: Tensor, out: LeftOut) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the leave-one-out estimator of a trace as a linear map of the matrix, for given sketches."""
    K = len(out.W)
    eye = torch.eye(K, dtype=torch.float64, device=out.W.device)
    yield combine(Q, eye - out.S @ out.S.mT / K), Q
    residual = axpy(Omega.clone(), Q, out.S * out.overlap[0][0] - out.W)
    yield residual * (out.scale.diagonal() / K).to(residual), residual


class NystromSketch:
    """A Nyström sketch Ω, Y = A Ω for psd A, shifted by ν ≥ eps ‖Y‖/√n so that H = Ωᵀ(Y + νΩ) is invertible."""

    cost = 1
    """Products per column."""

    def __init__(self, probed: Probed, kind: ProbeKind) -> None:
        self.probed, self.facts, self.kind = probed, probed.facts, kind
        self.eps = torch.finfo(self.facts.dtype).eps
        self.Omega = self.Y = empty_block(self.facts, 0)

    @property
    def matvecs(self) -> int:
        """Products spent, as many as probes."""
        return self.Y.shape[1]

    def grow(self, columns: int) -> None:
        """Add probes until there are ``columns``."""
        k = columns - self.matvecs
        if k > 0:
            fresh = self.probed.probes(k, self.kind)
            self.Omega, self.Y = join(self.Omega, fresh), join(self.Y, self.probed.multiply(fresh))

    def shift(self) -> tuple[Tensor, Tensor, Tensor, float]:
        """Return Y + νΩ, C⁻¹ for the Cholesky factor H = CᵀC, ΩᵀΩ, and ν.

        Raises:
            NotPositiveSemidefiniteError: ΩᵀAΩ has an eigenvalue clearly below zero.
        """
        core, overlap = gram(self.Omega, self.Y), gram(self.Omega, self.Omega)
        size = float(norm(self.Y).square().sum().sqrt()) / math.sqrt(self.facts.rows)
        n, one = self.facts.rows, part(self.Omega, 0, 1)
        require_symmetric(core, self.eps, n * size, lambda: n * rounding_of(self.probed.multiply, one))
        core, eye = (core + core.mT) / 2, torch.eye(len(overlap), dtype=torch.float64, device=overlap.device)
        if size == 0:
            return self.Y, torch.zeros_like(eye), overlap, 0.0
        overlap = overlap + 1e-12 * self.facts.rows * eye  # signs of a small n may repeat
        whiten = torch.linalg.solve_triangular(torch.linalg.cholesky(overlap), eye, upper=False)
        lowest, rounding = float(torch.linalg.eigvalsh(whiten @ core @ whiten.mT)[0]), self.eps * size
        if lowest < -1e3 * rounding:
            raise NotPositiveSemidefiniteError(f'A has an eigenvalue {lowest:.3e}: use method="xtrace" ("xdiag").')
        nu = max(rounding, -10 * lowest)
        L, info = torch.linalg.cholesky_ex(core + nu * overlap)
        if bool(info):
            L = torch.linalg.cholesky(core + nu * overlap + 1e-13 * core.diagonal().amax() * eye)
        return self.Y + nu * self.Omega, torch.linalg.solve_triangular(L, eye, upper=False).mT, overlap, nu


class XNysTrace(LeaveOneOut):
    """XNysTrace, the mean over i of tr Âᵢ + ωᵢᵀ(A − Âᵢ)ωᵢ, Âᵢ the Nyström approximation without probe i."""

    least, first, held = 2, 16, 3.0

    def __init__(self, probed: Probed) -> None:
        self.sketch: NystromSketch = NystromSketch(probed, "spherical")

    def estimate(self) -> Estimate:
        """Return the mean of the samples; the bias bound is rounding: the stabilising shift's part of the trace."""
        Y, inverse, overlap, nu = self.sketch.shift()
        n, K = self.sketch.facts.rows, len(overlap)
        if nu == 0:
            return leave_one_out(torch.zeros_like(overlap), K, 0.0)
        F = tall_qr(Y, overwrite=True)[1] @ inverse  # Y is a copy
        # With H = ΩᵀAΩ: D = A^½-weighted columns of H⁻¹, so that dᵢᵀdⱼ = (H⁻¹YᵀYH⁻¹)ᵢⱼ.
        D, N = F @ inverse.mT, torch.linalg.inv(overlap)
        pivots, sizes, whole = inverse.square().sum(1), D.square().sum(0), F.square().sum() - nu * n
        # Without probe i, H⁻¹, N and D lose their part along column i.
        M, cross, diagonal = inverse @ inverse.mT, D.mT @ D, N.diagonal()
        share = M / pivots[:, None]
        pivot = (pivots - M * share).clamp_min(1e-14 * pivots)
        size = sizes - 2 * cross * share + sizes[:, None] * share.square()
        length = (n - K + 2) * (diagonal - N.square() / diagonal[:, None])
        estimates = whole - (sizes / pivots)[:, None] + (length - size) / pivot
        estimates.diagonal().copy_(whole + ((n - K + 1) * diagonal - sizes) / pivots)
        return leave_one_out(estimates, K, 4 * nu * n)

    def functional(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks as `XTrace.functional` does, with the range of the sketch."""
        Q, R = tall_qr(self.sketch.Y)
        W, eps = gram(Q, self.sketch.Omega), torch.finfo(self.sketch.facts.dtype).eps
        yield from functional(self.sketch.Omega, Q, LeftOut(W, R, eps, self.sketch.facts.rows))
