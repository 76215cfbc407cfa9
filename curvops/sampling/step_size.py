"""The step size of a Metropolis sampler, by its acceptance: dual averaging."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

GAMMA, T0, KAPPA = 0.05, 10.0, 0.75
"""How fast trials move, how many first ones count little, how fast old ones are forgotten: the authors' values."""


@dataclass(frozen=True)
class DualAveraging:
    """log ε follows the mean error of the acceptance probability so far (Hoffman & Gelman 2014, section 3.2).

    centre: log of the step size that trials are drawn to. most: no step is larger (1 for pCN).
    """

    target: float
    centre: float
    most: float
    steps: int = 0
    error: float = 0.0
    log_trial: float = 0.0
    log_mean: float = 0.0

    @classmethod
    def begun(cls, step_size: float, target: float, most: float) -> DualAveraging:
        """From this step size on."""
        start = math.log(min(step_size, most))
        return cls(target, math.log(10) + start, math.log(most) if most < math.inf else 1e300, 0, 0.0, start, start)

    @property
    def trial(self) -> float:
        """The step size of the next step of warm-up."""
        return math.exp(self.log_trial)

    @property
    def final(self) -> float:
        """The step size after warm-up, the mean of trials with the later ones counting more."""
        return math.exp(self.log_mean)

    def updated(self, acceptance: float) -> DualAveraging:
        """After a step with this acceptance probability; NaN counts as 0."""
        t = self.steps + 1
        missed = self.target - (acceptance if acceptance == acceptance else 0.0)
        error = self.error + (missed - self.error) / (t + T0)
        trial = min(self.centre - math.sqrt(t) / GAMMA * error, self.most)
        share = t**-KAPPA
        mean = share * trial + (1 - share) * self.log_mean
        return replace(self, steps=t, error=error, log_trial=trial, log_mean=mean)
