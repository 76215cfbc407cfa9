"""Search directions of conjugate gradients: one shared block, or one direction per column.

Both take the step that minimises the energy over their directions and make the next directions conjugate to the last
ones. They differ only in the small algebra: K × K matrices for the block, scalars per column otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from curvops.linalg.core.orthogonal import independent_basis
from curvops.linalg.core.results import Reason
from curvops.linalg.core.vectors import Vectors, axpy, columns, combine, gram, inner, largest, norm


@dataclass(frozen=True, eq=False)
class Step:
    """Orthonormal directions Q, their images AQ, their curvature QᵀAQ (or its diagonal) and the step along them."""

    Q: Float[Vectors, "n r"]
    AQ: Float[Vectors, "n r"]
    curvature: Float[Tensor, "..."]
    alpha: Float[Tensor, "..."]
    sound: Bool[Tensor, "..."]


@runtime_checkable
class Directions(Protocol):
    """The small algebra of one CG step."""

    @property
    def noise(self) -> float:
        """The curvature below which rounding decides, relative to ‖A‖."""

    def overlap(self, P: Vectors) -> Tensor:
        """What ``basis`` must know of P, to travel to the host with the residual norms."""

    def basis(self, P: Vectors, overlap_host: Tensor) -> Vectors:
        """Orthonormal directions spanning P."""

    def step(self, Q: Vectors, AQ: Vectors, R: Vectors, norm_A: Tensor) -> Step:
        """The energy-minimising step; nothing moves along directions that are not safely positive."""

    def move(self, Y: Vectors, block: Vectors, alpha: Tensor, sign: int) -> None:
        """Y ← Y ± block alpha, in place."""

    def conjugate(self, Z: Vectors, step: Step) -> Vectors:
        """Z made A-conjugate to the directions of the last step."""

    def repair(self, step: Step, R: Vectors, norm_A: Tensor) -> tuple[Step, dict[int, Reason]]:
        """The step without its unsafe directions, and the columns that must stop, with their reasons."""

    def keep(self, step: Step, index: Tensor) -> Step:
        """The step that the remaining columns took."""


def _judge(curvature: Tensor, image: Tensor, norm_A: Tensor, noise: float) -> tuple[Tensor, Tensor, Tensor]:
    """Which directions are sound, which prove that A is not positive definite, which are null to rounding.

    For positive semidefinite A, ‖Aq‖² ≤ ‖A‖ qᵀAq: a direction of no curvature has no image. An image without
    curvature therefore disproves it (a nilpotent matrix), whatever the sign of the rounding error.
    """
    finite = torch.isfinite(curvature) & torch.isfinite(image)
    floor = noise * norm_A
    sound = finite & ((curvature > floor) | ((curvature > 0.1 * image) & (curvature > 0)))
    indefinite = finite & ~sound & ((curvature < -floor) | (image.square() > 100 * noise * norm_A.square()))
    return sound, indefinite, finite & ~sound & ~indefinite


@dataclass(frozen=True)
class BlockDirections:
    """All columns share one block of directions (O'Leary 1980)."""

    noise: float

    def overlap(self, P: Vectors) -> Tensor:
        return gram(P, P)

    def basis(self, P: Vectors, overlap_host: Tensor) -> Vectors:
        return independent_basis(P, overlap_host)

    def step(self, Q: Vectors, AQ: Vectors, R: Vectors, norm_A: Tensor) -> Step:
        curvature = gram(Q, AQ)
        curvature = (curvature + curvature.mT) / 2
        shifted = curvature - self.noise * norm_A * torch.eye(len(curvature), dtype=torch.float64, device=R.device)
        _, unsafe = torch.linalg.cholesky_ex(shifted)
        L, info = torch.linalg.cholesky_ex(curvature)
        alpha = torch.cholesky_solve(gram(Q, R), L)
        sound = (unsafe == 0) & (info == 0) & torch.isfinite(alpha).all() & torch.isfinite(curvature).all()
        return Step(Q, AQ, curvature, torch.where(sound, alpha, 0.0), sound)

    def move(self, Y: Vectors, block: Vectors, alpha: Tensor, sign: int) -> None:
        axpy(Y, block, sign * alpha)

    def conjugate(self, Z: Vectors, step: Step) -> Vectors:
        if not step.Q.shape[1]:
            return Z
        L, _ = torch.linalg.cholesky_ex(step.curvature)
        return Z - combine(step.Q, torch.cholesky_solve(gram(step.AQ, Z), L))

    def repair(self, step: Step, R: Vectors, norm_A: Tensor) -> tuple[Step, dict[int, Reason]]:
        everyone = range(R.shape[1])
        curvature = step.curvature.cpu()
        if not bool(torch.isfinite(curvature).all()) or not bool(torch.isfinite(largest(R)).all()):
            return step, dict.fromkeys(everyone, Reason.NON_FINITE)
        values, V = torch.linalg.eigh(curvature)
        V = V.to(R.device)
        Q, AQ = combine(step.Q, V), combine(step.AQ, V)
        sound, indefinite, _ = _judge(values, norm(AQ).cpu(), norm_A.cpu(), self.noise)
        if bool(indefinite.any()):
            return step, dict.fromkeys(everyone, Reason.NOT_POSITIVE_DEFINITE)
        if not bool(sound.any()):
            return step, dict.fromkeys(everyone, Reason.SINGULAR)
        index = sound.nonzero().squeeze(1)
        Q, AQ, values = columns(Q, index), columns(AQ, index), values[index].to(R.device)
        alpha = gram(Q, R) / values[:, None]
        return Step(Q, AQ, torch.diag(values), alpha, torch.ones((), dtype=torch.bool, device=R.device)), {}

    def keep(self, step: Step, index: Tensor) -> Step:
        return step


@dataclass(frozen=True)
class ColumnDirections:
    """Each column has its own direction: textbook CG for K systems that share the block product."""

    noise: float

    def overlap(self, P: Vectors) -> Tensor:
        return norm(P)

    def basis(self, P: Vectors, overlap_host: Tensor) -> Vectors:
        sizes = torch.where(overlap_host > 0, overlap_host, 1.0)
        return P / sizes.to(P.device, P.dtype)

    def step(self, Q: Vectors, AQ: Vectors, R: Vectors, norm_A: Tensor) -> Step:
        curvature, image = inner(Q, AQ), norm(AQ)
        sound, _, _ = _judge(curvature, image, norm_A, self.noise)
        alpha = inner(Q, R) / torch.where(sound, curvature, 1.0)
        return Step(Q, AQ, curvature, torch.where(sound, alpha, 0.0), sound)

    def move(self, Y: Vectors, block: Vectors, alpha: Tensor, sign: int) -> None:
        axpy(Y, block, sign * alpha)

    def conjugate(self, Z: Vectors, step: Step) -> Vectors:
        beta = inner(step.AQ, Z) / torch.where(step.sound, step.curvature, 1.0)
        return Z - step.Q * torch.where(step.sound, beta, 0.0).to(Z.dtype)

    def repair(self, step: Step, R: Vectors, norm_A: Tensor) -> tuple[Step, dict[int, Reason]]:
        curvature, image = step.curvature.cpu(), norm(step.AQ).cpu()
        sound, indefinite, null = _judge(curvature, image, norm_A.cpu(), self.noise)
        failed = {}
        for j in (~sound).nonzero().squeeze(1).tolist():
            known = Reason.NOT_POSITIVE_DEFINITE if bool(indefinite[j]) else Reason.NON_FINITE
            failed[j] = Reason.SINGULAR if bool(null[j]) else known
        return step, failed

    def keep(self, step: Step, index: Tensor) -> Step:
        where = index.to(step.alpha.device)
        small = (step.curvature[where], step.alpha[where], step.sound[where])
        return Step(columns(step.Q, index), columns(step.AQ, index), *small)
