"""Stochastic-gradient Langevin dynamics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from curvops.argument_types import Density, Preconditioning, StepSizes
from curvops.checks import checked_number
from curvops.sampling.core.state import Info, NoiseSource, State
from curvops.sampling.core.transition import Transition, common_arguments


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SGLD(Transition):
    """The step θ += ε D g + √(𝒯ε(2 − 𝒯εβ)) D^½ ξ."""

    beta: float = 0.0

    def _step(self, state: State, batch: Any, noise: NoiseSource) -> Info:
        value, g = self._gradient(state, batch)
        (eps, T), beta = self._now(state), self.beta
        self.metric.kick(state.theta, g, eps, deviation(T * eps * (2 - T * eps * beta), beta), noise)
        return Info(value)

    def stability_limit(self, curvature: float) -> float | None:
        return 2 / curvature if curvature > 0 else None


def sgld(
    log_posterior: Density,
    step_size: StepSizes,
    *,
    temperature: StepSizes = 1.0,
    data_size: int | None = None,
    beta: float = 0.0,
    preconditioner: Preconditioning = None,
) -> SGLD:
    """Build stochastic-gradient Langevin dynamics (Welling & Teh 2011).

        θ += ε D g + √(𝒯ε(2 − 𝒯εβ)) D^½ ξ,    𝒯 = τ/N

    with g the gradient of `log_posterior` and ξ standard normal. At τ = 0 this is `torch.optim.SGD(lr=ε)`. On a
    Gaussian of curvature h (of D^½ H D^½) with full gradients it is stable iff εh < 2, and its variance is
    𝒯/(h (1 − εh/2)), too large by the factor 1/(1 − εh/2).

    Args:
        log_posterior: a function (params, batch) -> mean log-likelihood of the batch + log prior / N, such as
            `co.sampling.log_posterior` returns.
        step_size: ε, a number or a schedule (`RobbinsMonro`, `Cosine`, any function of the step).
        temperature: τ ≥ 0, a number or a schedule; 1 is the posterior.
        data_size: N, required unless log_posterior carries it.
        beta: β, the variance of the gradient's noise over 𝒯², which is subtracted from the injected noise.
        preconditioner: D, an operator (d, d) with a square root, or a vector (d,); None is the identity.

    Returns:
        A sampler with `init(params, generator)` and `update(state, batch)`.

    Raises:
        TypeError, ValueError: an argument is of another kind or out of range.

    Cost: a gradient, a product with D and a draw by its root; three vectors.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> sampler = co.sampling.sgld(density, 1e-3)
        >>> co.sampling.run(sampler, density.params, [(x, y)], steps=5).theta.shape
        torch.Size([1, 5, 17])
    """
    shared = common_arguments(log_posterior, step_size, temperature, data_size, preconditioner)
    return SGLD(**shared, beta=checked_number("beta", beta, "[0, inf)"))


def deviation(variance: float, beta: float) -> float:
    """Return the standard deviation of the injected noise; raise ValueError if the gradient's own noise exceeds it."""
    if variance < 0:
        raise ValueError(f"beta={beta:g}: the gradient's noise exceeds what this step injects: use a smaller beta.")
    return variance**0.5
