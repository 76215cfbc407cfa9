"""The step size of a Metropolis sampler, by its acceptance: stochastic approximation with averaged trials."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

DECAY = 0.75
"""Moves and the shares of new trials in the mean fall as t^−.75 (Hoffman & Gelman 2014 forget old trials so, too)."""
LARGEST_MOVE = 1.0
"""A step of warm-up changes log ε by no more, however few proposals the target lets be rejected."""


@dataclass(frozen=True)
class StepSizeSearch:
    """log ε follows the error of the acceptance probability, counted in the rarer outcome's probability at the target.

        log ε ← log ε − t^−¾ (a* − a)/min(a*, 1 − a*),    the result being the mean of trials, later ones counting more

    Robbins–Monro on the log scale (Andrieu & Thoms 2008) with Polyak's averaging. The rate of rejection is proportional
    to ε³ of one leapfrog step and to ε of pCN, so that in these units the mean error has a slope of 1 to 3 in log ε at
    any target (Garthwaite, Fan & Sisson 2016 divide by the slope likewise). That of plain a* − a is .06 at .98.

    target: a*. most: log of the largest step size (1 for pCN).
    """

    target: float
    most: float
    steps: int = 0
    log_trial: float = 0.0
    log_mean: float = 0.0

    @classmethod
    def begun(cls, step_size: float, target: float, most: float) -> StepSizeSearch:
        """From this step size on."""
        start = math.log(min(step_size, most))
        return cls(target, math.log(most) if most < math.inf else 1e300, 0, start, start)

    @property
    def trial(self) -> float:
        """The step size of the next step of warm-up."""
        return math.exp(self.log_trial)

    @property
    def final(self) -> float:
        """The step size after warm-up, the mean of trials with the later ones counting more."""
        return math.exp(self.log_mean)

    def updated(self, acceptance: float) -> StepSizeSearch:
        """After a step with this acceptance probability; NaN counts as 0."""
        share = (self.steps + 1) ** -DECAY
        missed = self.target - (acceptance if acceptance == acceptance else 0.0)
        move = share * missed / min(self.target, 1 - self.target)
        trial = min(self.log_trial - max(-LARGEST_MOVE, min(LARGEST_MOVE, move)), self.most)
        mean = share * trial + (1 - share) * self.log_mean
        return replace(self, steps=self.steps + 1, log_trial=trial, log_mean=mean)
