"""Ascent of the evidence along its gradient in the logarithms of the hyperparameters.

The gradient in log α_g is ½ (γ_g − α_g s_g). At the maximum for fixed weights its derivative over (γ_g + α_g s_g)/2
has eigenvalues between −½ and −3/2, for any groups (Gershgorin: A^½P⁻¹A^½ has none outside [0, 1]). So a step of
(γ_g − α_g s_g) / (γ_g + α_g s_g) leaves at most half of a small error, and no step is longer than one nat.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.errors import UndeterminedWarning, warn
from curvops.evidence.hyperparameters import FURTHEST, Hyperparameters, Misfit, misfit
from curvops.linalg import cg
from curvops.linalg.core.vectors import describe, random_block
from curvops.posterior.gaussians.laplace import Laplace
from curvops.posterior.gaussians.updating import tell_choice
from curvops.posterior.log_evidence import Ending, Tuning, TuningStep
from curvops.posterior.solves.function_space import REMEDIES
from curvops.posterior.solves.precision import preconditioner

# Precisions of single weights stay within this factor: beyond it, a weight is practically fixed, or free.
FURTHEST_WEIGHT = 1e6
SOLVE_RTOL = 1e-3


@dataclass(eq=False)
class Ascent:
    """Steps along the gradient of the log evidence in the logarithms of the hyperparameters."""

    now: Hyperparameters
    over: str | None
    rtol: float
    xtol: float
    generator: torch.Generator | None
    probes: int
    mode: str
    records: list[TuningStep] = field(default_factory=list)
    vectors: Tensor | None = None
    solutions: Tensor | None = None
    average: Tensor | None = None

    def run(self, steps: int) -> Laplace:
        """Take at most the given number of steps; return the posterior at the maximum."""
        start, post = self.now, self.now.origin
        theta = post.mean
        scatter, data = self._at(theta)
        furthest = FURTHEST_WEIGHT if self.over == "weights" else FURTHEST
        ending = Ending.STEPS_SPENT
        for _ in range(steps):
            alpha, noise = self.now.alpha, self.now.noise
            spent = 0
            if self.mode == "linear":
                theta, spent = self.now.linear_mode(theta, 0.1 * self.xtol)
                scatter, data = self._at(theta)
            gamma = self._count(spent)
            change = torch.zeros_like(alpha)
            if self.over:
                up, down = gamma - alpha * scatter, gamma + alpha * scatter
                change = torch.where(down > 0, up / down, change)
                moved = (alpha * change.exp()).clamp(start.alpha / furthest, start.alpha * furthest)
                change, alpha = (moved / alpha).log(), moved
            largest = float(change.abs().max())
            if noise is not None and start.noise is not None and data is not None:
                ratio, count = data.squares / noise, float(gamma.sum())
                left = data.targets - count
                # This is how fast γ can fall with the noise: at most Σ g(1 − g) over eigenvalues g of P⁻¹G.
                falling = count * max(0.0, 1 - count / len(post.mean))
                of_noise = (ratio - left) / (ratio + abs(left) + falling)
                noise, largest = noise * math.exp(of_noise), max(largest, abs(of_noise))
                if not start.noise / FURTHEST < noise < start.noise * FURTHEST:
                    raise ValueError(
                        f"the log evidence has no maximum in the noise within a factor {FURTHEST:.0g} of "
                        f"{start.noise:.3g}: the network fits its targets exactly. Keep the noise fixed."
                    )
            self.now = self.now.with_values(alpha, noise)
            if largest <= self.xtol:
                ending = Ending.CONVERGED
                break
        self._check_limits(start)
        targets = None if data is None else data.targets
        tuning = Tuning("gradient", start.groups.names, self.mode, tuple(self.records), ending, targets=targets)
        tuning.warn_of_ending(f"after {len(self.records)} steps of maximize: ")
        by = "the evidence" if self.over else start.origin.prior.chosen_by
        return tell_choice(self.now.posterior_with(tuning, self.generator), by)

    def _at(self, theta: Float[Tensor, " D"]) -> tuple[Float[Tensor, " G"], Misfit | None]:
        """Return the scatter of each group at these weights, and the misfit to the targets."""
        data = None if self.now.noise is None else misfit(self.now.origin, theta)
        return self.now.scatter(theta), data

    def _count(self, spent: int) -> Float[Tensor, " G"]:
        """Compute γ of each group, and record the step."""
        exact = self.now.exact_counts(self.rtol, self.generator)
        gamma, spread, matvecs = self._estimate_count() if exact is None else (*exact, 0)
        self._note(gamma, spread, matvecs + spent)
        return gamma

    def _estimate_count(self) -> tuple[Tensor, Tensor, int]:
        """Estimate γ of each group by solves with random signs; return it, its standard error and the products."""
        groups, post = self.now.groups, self.now.posterior
        P = post.precision
        anew = self.over == "weights" or self.vectors is None
        if anew:
            self.vectors = random_block(describe(P), self.probes, generator=self.generator)
        assert self.vectors is not None
        guess = None if self.over == "weights" else self.solutions
        sketch, spent = preconditioner(post.terms, self.probes, generator=self.generator)
        solved = cg(P, self.vectors, preconditioner=sketch, rtol=SOLVE_RTOL, x0=guess)
        solved.raise_if_failed(SOLVE_RTOL, REMEDIES)
        self.solutions = solved.x
        A = post.prior.diagonal
        assert A is not None
        products = (A.unsqueeze(-1) if A.ndim else A) * self.vectors * solved.x
        each = torch.stack([groups.totals(1 - column) for column in products.mT])
        gamma = each.mean(0)
        spread = each.std(0) / len(each) ** 0.5 if len(each) > 1 else torch.full_like(gamma, math.inf)
        if self.over == "weights":
            count = len(self.records)
            weight = min(1.0, 4 / (count + 1))  # early precisions are far off, late ones similar
            self.average = gamma if self.average is None else self.average + weight * (gamma - self.average)
            gamma = self.average
        return gamma, spread, solved.matvecs + spent

    def _note(self, gamma: Tensor, spread: Tensor, matvecs: int) -> None:
        alpha = self.now.alpha
        if self.over == "weights":
            alpha, gamma, spread = alpha.log().mean(0, True).exp(), gamma.sum(0, True), spread.norm().reshape(1)
        self.records.append(TuningStep(alpha, gamma, spread, self.now.noise, matvecs))

    def _check_limits(self, start: Hyperparameters) -> None:
        if self.over != "weights":
            self.now.require_near(start)
            return
        stuck = (self.now.alpha / start.alpha).log().abs() > math.log(FURTHEST_WEIGHT) * (1 - 1e-6)
        if bool(stuck.any()):
            warn(
                f"the evidence has no maximum in the precision of {int(stuck.sum()):,} of {len(stuck):,} weights "
                f"within a factor {FURTHEST_WEIGHT:.0g} of the start; these precisions now have the limiting value.",
                UndeterminedWarning,
            )
