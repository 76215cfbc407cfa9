"""The evidence by its gradient in the logarithms of the hyperparameters, at fixed weights.

The gradient in log α_g is ½ (γ_g − α_g s_g). At the maximum its derivative, over (γ_g + α_g s_g)/2, has eigenvalues
between −½ and −3/2, whatever the groups (Gershgorin: A^½P⁻¹A^½ has none outside [0, 1]). So a step of
(γ_g − α_g s_g) / (γ_g + α_g s_g) leaves at most half of a small error, and no step is longer than one nat.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.evidence.hyperparameters import Hyperparameters, misfit
from curvops.linalg import cg
from curvops.linalg.core.vectors import describe, random_block
from curvops.posterior.laplace import Laplace
from curvops.posterior.tuning import Ending, Tuning, TuningStep

# The search reaches this factor below and above the start.
FURTHEST = 1e10
# Precisions of single weights stay within this one: beyond, a weight is known, or free, for all that it matters.
FURTHEST_WEIGHT = 1e6
# Products with one vector serve all precisions down to this factor below the present one.
WINDOW = 100.0
SOLVE_RTOL = 1e-3
# γ below this many units of rounding for each weight of a group is none.
ROUNDING = 50


class Undetermined(UserWarning):
    """The data do not determine a hyperparameter, which stands at the limit of the search."""


@dataclass(eq=False)
class Ascent:
    """Steps along the gradient of the log evidence in the logarithms of the hyperparameters."""

    now: Hyperparameters
    over: str | None
    rtol: float
    xtol: float
    generator: torch.Generator | None
    probes: int
    taken: list[TuningStep] = field(default_factory=list)
    vectors: Tensor | None = None
    solutions: Tensor | None = None
    average: Tensor | None = None

    def run(self, steps: int) -> Laplace:
        """The posterior at the maximum."""
        start, post = self.now, self.now.origin
        scatter = start.scatter(post.mean)
        data = misfit(post) if start.noise is not None else None
        furthest = FURTHEST_WEIGHT if self.over == "weights" else FURTHEST
        ending = Ending.STEPS_SPENT
        for _ in range(steps):
            alpha, noise = self.now.alpha, self.now.noise
            gamma = self._counted()
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
                # How fast γ falls with the noise: Σ g(1 − g) over eigenvalues g of P⁻¹G is at most this.
                falling = count * max(0.0, 1 - count / len(post.mean))
                of_noise = (ratio - left) / (ratio + abs(left) + falling)
                noise, largest = noise * math.exp(of_noise), max(largest, abs(of_noise))
                if not start.noise / FURTHEST < noise < start.noise * FURTHEST:
                    raise ValueError(
                        f"the log evidence has no maximum in the noise within a factor {FURTHEST:.0g} of "
                        f"{start.noise:.3g}: the network fits its targets exactly. Hold the noise."
                    )
            self.now = self.now.moved(alpha, noise)
            if largest <= self.xtol:
                ending = Ending.CONVERGED
                break
        self._check_limits(start, furthest)
        targets = None if data is None else data.targets
        tuning = Tuning("gradient", start.groups.names, "map", tuple(self.taken), ending, targets)
        return self.now.finished(tuning, self.generator)

    def _counted(self) -> Float[Tensor, " G"]:
        """γ of each group, noted as a step."""
        groups, post = self.now.groups, self.now.posterior
        A = post.prior.diagonal
        assert A is not None
        if A.ndim == 0 and post.precision._closed_form() is None:  # the products reach on for some steps
            post.spectrum.prepare(float(A) / WINDOW, self.rtol, self.generator)
        exact = post.spectrum.shares(post.prior, self.rtol, self.generator)
        matvecs, spread = 0, torch.zeros_like(groups.counts)
        if exact is None:
            gamma, spread, matvecs = self._probed(post)
        elif exact.value.ndim:
            gamma = groups.totals(exact.value)
        else:
            gamma, spread = exact.value.reshape(1).to(groups.counts), exact.stderr.reshape(1).to(groups.counts)
        rounding = ROUNDING * torch.finfo(post.mean.dtype).eps * groups.counts
        gamma = torch.where(gamma > rounding, gamma, 0.0)
        self._note(gamma, spread, matvecs)
        return gamma

    def _probed(self, post: Laplace) -> tuple[Tensor, Tensor, int]:
        """γ of each group from solves with random signs, and its standard error."""
        groups, P = self.now.groups, post.precision
        anew = self.over == "weights" or self.vectors is None
        if anew:
            self.vectors = random_block(describe(P), self.probes, generator=self.generator)
        assert self.vectors is not None
        guess = None if self.over == "weights" else self.solutions
        sketch = P.preconditioner(self.probes, self.generator)
        solved = cg(P, self.vectors, preconditioner=sketch, rtol=SOLVE_RTOL, x0=guess).raise_if_failed(SOLVE_RTOL)
        self.solutions = solved.x
        A = post.prior.diagonal
        assert A is not None
        products = (A.unsqueeze(-1) if A.ndim else A) * self.vectors * solved.x
        each = torch.stack([groups.totals(1 - column) for column in products.mT])
        gamma = each.mean(0)
        spread = each.std(0) / len(each) ** 0.5 if len(each) > 1 else torch.full_like(gamma, math.inf)
        if self.over == "weights":
            count = len(self.taken)
            weight = min(1.0, 4 / (count + 1))  # early precisions are wrong, late ones alike
            self.average = gamma if self.average is None else self.average + weight * (gamma - self.average)
            gamma = self.average
        return gamma, spread, solved.matvecs

    def _note(self, gamma: Tensor, spread: Tensor, matvecs: int) -> None:
        alpha = self.now.alpha
        if self.over == "weights":
            alpha, gamma, spread = alpha.log().mean(0, True).exp(), gamma.sum(0, True), spread.norm().reshape(1)
        self.taken.append(TuningStep(alpha, gamma, spread, self.now.noise, matvecs))

    def _check_limits(self, start: Hyperparameters, furthest: float) -> None:
        factor = (self.now.alpha / start.alpha).log().abs()
        stuck = factor > math.log(furthest) * (1 - 1e-6)
        if not bool(stuck.any()):
            return
        if self.over == "weights":
            warnings.warn(
                f"the evidence has no maximum in the precision of {int(stuck.sum()):,} of {len(stuck):,} weights "
                f"within a factor {furthest:.0g} of its start, where they now stand.",
                Undetermined,
                stacklevel=4,
            )
            return
        names = [name for name, at in zip(start.groups.names, stuck.tolist()) if at]
        raise ValueError(
            f"the log evidence has no maximum in the prior precision of {names} within a factor {furthest:.0g} of its "
            "start: these data do not determine it at these weights."
        )
