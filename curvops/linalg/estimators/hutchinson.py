"""Trace estimators with independent probes: Hutchinson, and Hutch++, which treats the dominant range exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.core.probed import BLOCK, Probed
from curvops.linalg.core.results import Estimate, Reason, caution
from curvops.linalg.core.vectors import axpy, empty_block, gram, inner, join, norm
from curvops.linalg.estimators.exchangeable import RangeSketch


def sample_mean(samples: Tensor, matvecs: int, known: Tensor | float = 0.0, bias: Tensor | float = 0.0) -> Estimate:
    """Return a known part plus the mean of independent samples, with its standard error."""
    stderr = samples.std() / math.sqrt(len(samples))
    value, k = known + samples.mean(), len(samples)
    return Estimate(value, stderr, k, matvecs, bias, Reason.BUDGET_SPENT, widening=caution(k))


class Hutchinson:
    """The mean of zᵀAz over random signs, streamed: only the numbers are kept (Hutchinson 1990)."""

    least, first, held = 2, BLOCK, 0.0

    def __init__(self, probed: Probed, keep: bool = False) -> None:
        self.probed = probed
        self.samples = torch.zeros(0, dtype=torch.float64, device=probed.facts.device)
        self.kept: list[Tensor] | None = [] if keep else None

    def spend(self, matvecs: int) -> None:
        """Spend one product per probe."""
        for Z in self.probed.stream(matvecs - len(self.samples)):
            self.samples = torch.cat([self.samples, self.sample(Z, self.probed.multiply(Z))])
            if self.kept is not None:
                self.kept.append(Z.to(torch.int8))

    def sample(self, Z: Tensor, Y: Tensor) -> Float[Tensor, " k"]:
        """Return the samples of probes Z with products Y."""
        return inner(Z, Y)

    def estimate(self) -> Estimate:
        """Return mean and standard error of the samples."""
        return sample_mean(self.samples, len(self.samples))

    def functional(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks L, R with E tr LᵀXR = tr X; the probes must have been kept."""
        assert self.kept is not None
        for signs in self.kept:
            Z = signs.to(self.probed.facts.dtype)
            yield Z / len(self.samples), Z


class HutchPlusPlus:
    """Hutch++: tr QᵀAQ exactly, and Hutchinson's estimator on the complement of Q (Meyer et al. 2021).

    The sketch, A Q and the residual probes each take a third of the products. When the sketch grows, the products of
    the residual are updated by a downdate with A Q.
    """

    least, first, held = 6, 16, 2.0

    def __init__(self, probed: Probed) -> None:
        self.probed, self.sketch = probed, RangeSketch(probed, "signs")
        self.G = self.AG = empty_block(probed.facts, 0)

    @property
    def matvecs(self) -> int:
        """Products spent."""
        return self.sketch.matvecs + self.G.shape[1]

    def spend(self, matvecs: int) -> None:
        """Spend a third of the products on each part."""
        before = self.sketch.columns
        self.sketch.grow(matvecs // 3)
        new = slice(before, self.sketch.columns)
        if self.G.shape[1]:
            overlap = gram(self.sketch.Q[:, new], self.G)
            self.G = axpy(self.G, self.sketch.Q[:, new], -overlap)
            self.AG = axpy(self.AG, self.sketch.Z[:, new], -overlap)
        missing = matvecs - self.matvecs
        if missing > 0:
            G = self.probed.probes(missing)
            G = axpy(G, self.sketch.Q, -gram(self.sketch.Q, G))
            self.G, self.AG = join(self.G, G), join(self.AG, self.probed.multiply(G))

    def samples(self) -> Float[Tensor, " k"]:
        """Return gᵀ(I − P)A(I − P)g for each residual probe."""
        return inner(self.G, self.AG)

    def estimate(self) -> Estimate:
        """Return the exact part plus the mean of the samples; the bias bound is rounding."""
        known = inner(self.sketch.Q, self.sketch.Z).sum()
        rounding = math.sqrt(self.probed.facts.rows) * torch.finfo(self.probed.facts.dtype).eps
        return sample_mean(self.samples(), self.matvecs, known, rounding * norm(self.sketch.Z).square().sum().sqrt())

    def functional(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks L, R with E tr LᵀXR = tr X."""
        yield self.sketch.Q, self.sketch.Q
        yield self.G / self.G.shape[1], self.G
