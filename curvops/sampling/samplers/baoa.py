"""BAOA, a splitting of Langevin dynamics with the positions of BAOAB, at one gradient per step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from curvops.argument_types import Density, Preconditioning, StepSizes
from curvops.sampling.core.state import Info, MomentumState, NoiseSource
from curvops.sampling.core.transition import common_arguments
from curvops.sampling.samplers.sghmc import MomentumSampler, friction


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BAOA(MomentumSampler):
    """The BAOA step: m += εDg; θ += ½εs m; m ← e^{−γε} m + σ√(𝒯(1 − e^{−2γε})) D^½ξ; θ += ½εs m."""

    def _step(self, state: MomentumState, batch: Any, noise: NoiseSource) -> Info:
        value, g = self._gradient(state, batch)
        eps, T = self._now(state)
        s, theta, m = self.s, state.theta, state.momentum
        gamma = self.alpha * s
        m.add_(self.metric.product(g), alpha=eps)
        theta.add_(m, alpha=eps * s / 2)
        m.mul_(math.exp(-gamma * eps))
        if T:
            spread = self.sigma * math.sqrt(-T * math.expm1(-2 * gamma * eps))
            m.add_(self.metric.noise(noise, theta), alpha=spread)
        theta.add_(m, alpha=eps * s / 2)
        return Info(value)

    def stability_limit(self, curvature: float) -> float | None:
        return 2 / math.sqrt(self.s * curvature) if curvature > 0 else None


def baoa(
    log_posterior: Density,
    step_size: StepSizes,
    *,
    alpha: float = 1.0,
    sigma: float = 1.0,
    temperature: StepSizes = 1.0,
    data_size: int | None = None,
    preconditioner: Preconditioning = None,
) -> BAOA:
    """Build BAOA (Leimkuhler & Matthews 2015), stochastic-gradient Langevin dynamics with errors of second order in ε.

        m += ε D g,    θ += ½ε s m,    m ← e^{−γε} m + σ√(𝒯(1 − e^{−2γε})) D^½ ξ,    θ += ½ε s m

    with s = σ⁻², γ = αs and 𝒯 = τ/N. D is the inverse mass, as in `sghmc`. On a Gaussian with full gradients the
    variance is exactly 𝒯/h at any stable step: ε √(s h) < 2, with h the curvature (of D^½ H D^½). At τ = 0 and m = 0 it
    is
    `torch.optim.SGD(lr=½ε²s(1 + μ), momentum=μ)` with μ = e^{−αsε}.

    Args:
        log_posterior: a function (params, batch) -> mean log-likelihood of the batch + log prior / N, such as
            `co.sampling.log_posterior` returns.
        step_size: ε, a number or a schedule.
        alpha: α, the friction.
        sigma: σ, the standard deviation of momenta at 𝒯 = 1.
        temperature: τ ≥ 0, a number or a schedule; 1 is the posterior.
        data_size: N, required unless log_posterior carries it.
        preconditioner: D, an operator (d, d) with a square root, a vector (d,) or a number; None is the identity.

    Returns:
        A sampler with `init(params, generator)` and `update(state, batch)`.

    Raises:
        TypeError, ValueError: an argument is of another kind or out of range.

    Cost: a gradient, a product with D and a draw with its root; four vectors of memory.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> sampler = co.sampling.baoa(density, 1e-3)
        >>> co.sampling.run(sampler, density.params, [(x, y)], steps=5).theta.shape
        torch.Size([1, 5, 17])
    """
    shared = common_arguments(log_posterior, step_size, temperature, data_size, preconditioner)
    return BAOA(**(shared | friction(alpha, sigma)))
