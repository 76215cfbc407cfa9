"""Stochastic-gradient Langevin dynamics: without momenta, with constant friction, with a thermostat, and BAOA."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.argument_types import Density, Preconditioning, StepSizes
from curvops.sampling.state import Info, MomentumState, NoiseSource, State
from curvops.sampling.transition import Transition, common_arguments


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
    return SGLD(**common_arguments(log_posterior, step_size, temperature, data_size, preconditioner, beta=beta))


def deviation(variance: float, beta: float) -> float:
    """Return the standard deviation of the injected noise; raise ValueError if the gradient's own noise exceeds it."""
    if variance < 0:
        raise ValueError(f"beta={beta:g}: the gradient's noise exceeds what this step injects: use a smaller beta.")
    return variance**0.5


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MomentumSampler(Transition):
    """Samplers with momenta m ~ N(0, 𝒯σ²D), and friction α."""

    alpha: float
    sigma: float = 1.0
    state_type: ClassVar[type[State]] = MomentumState

    @property
    def s(self) -> float:
        """The number σ⁻²."""
        return self.sigma**-2

    def _initial_tensors(self, state: State, noise: NoiseSource) -> dict[str, Any]:
        _, T = self._now(state)
        if not T:
            return {"momentum": torch.zeros_like(state.theta)}
        return {"momentum": self.metric.noise(noise, state.theta).mul_(self.sigma * math.sqrt(T))}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SGHMC(MomentumSampler):
    """The step θ += εs m and m += εDg − εsα m + √(𝒯ε(2α − 𝒯εβ)) D^½ξ, in this order or in reverse."""

    beta: float = 0.0
    momentum_first: bool = False

    def _step(self, state: MomentumState, batch: Any, noise: NoiseSource) -> Info:
        value, g = self._gradient(state, batch)
        eps, T = self._now(state)
        s, theta, m = self.s, state.theta, state.momentum
        spread = deviation(T * eps * (2 * self.alpha - T * eps * self.beta), self.beta)
        if not self.momentum_first:
            theta.add_(m, alpha=eps * s)
        self.metric.kick(m.mul_(1 - eps * s * self._friction(state)), g, eps, spread, noise)
        if self.momentum_first:
            theta.add_(m, alpha=eps * s)
        return Info(value)

    def _friction(self, state: Any) -> Any:
        return self.alpha

    def stability_limit(self, curvature: float) -> float | None:
        h, s, alpha = curvature, self.s, self.alpha
        if h <= 0:
            return None
        if self.momentum_first:
            return (math.sqrt(alpha**2 + 4 * h / s) - alpha) / h
        overdamped = alpha**2 - 4 * h / s
        return alpha / h if overdamped <= 0 else (alpha - math.sqrt(overdamped)) / h


@dataclass(frozen=True, eq=False, repr=False)
class ThermostatState(MomentumState):
    """The state of `sgnht`: momenta and the thermostat x, 0-d or (k,)."""

    thermostat: Float[Tensor, "*k"]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SGNHT(SGHMC):
    """SGHMC with the thermostat x instead of α in the friction; x += ε(s mᵀD⁻¹m/d − 𝒯)."""

    state_type: ClassVar[type[State]] = ThermostatState
    cold: ClassVar[str] = (
        "temperature=0: the thermostat of sgnht would lower the friction until it diverges; use sghmc at "
        "temperature 0, or a positive temperature."
    )

    def _initial_tensors(self, state: State, noise: NoiseSource) -> dict[str, Any]:
        momenta, (_, T) = super()._initial_tensors(state, noise), self._now(state)
        x = noise.normal(state.theta[..., :1]).squeeze(-1).mul_(math.sqrt(T / state.structure.size)).add_(self.alpha)
        return momenta | {"thermostat": x}

    def _step(self, state: Any, batch: Any, noise: NoiseSource) -> Info:
        (eps, T), m = self._now(state), state.momentum
        heat = self.s * (m * self.metric.solve(m)).mean(-1) - T
        info = super()._step(state, batch, noise)
        state.thermostat.add_(heat, alpha=eps)
        return info

    def _friction(self, state: Any) -> Any:
        return state.thermostat.unsqueeze(-1)

    def stability_limit(self, curvature: float) -> float | None:
        return self.alpha / curvature if curvature > 0 else None


def sghmc(
    log_posterior: Density,
    step_size: StepSizes,
    *,
    alpha: float = 1.0,
    sigma: float = 1.0,
    temperature: StepSizes = 1.0,
    data_size: int | None = None,
    beta: float = 0.0,
    momentum_first: bool = False,
    preconditioner: Preconditioning = None,
) -> SGHMC:
    """Build stochastic-gradient Hamiltonian Monte Carlo (Chen, Fox & Guestrin 2014; order of Duffield et al. 2024).

        θ += ε s m,    m += ε D g − ε s α m + √(𝒯ε(2α − 𝒯εβ)) D^½ ξ,    s = σ⁻², 𝒯 = τ/N

    with the old m in the first equation; `momentum_first` makes the second step first, so that the new m moves θ. A
    preconditioner D is the inverse mass: m stands for D times the momentum, m ~ N(0, 𝒯σ²D), and friction is
    proportional to the mass. This equals the sampler without D in the coordinates D^-½ θ.

    At τ = 0 and m = 0, momentum first is `torch.optim.SGD(lr=ε²s, momentum=1 − εsα)`; the order of the paper uses each
    gradient one step later. On a Gaussian of curvature h (of D^½ H D^½) the paper's order is stable only if εh < α, and
    its variance is too large by a factor of about 1 / (1 − εh/α); momentum first, the error is second order in ε.

    Args:
        log_posterior: a function (params, batch) -> mean log-likelihood of the batch + log prior / N, such as
            `co.sampling.log_posterior` returns.
        step_size: ε, a number or a schedule.
        alpha: α, the friction.
        sigma: σ, the standard deviation of momenta at 𝒯 = 1.
        temperature: τ ≥ 0, a number or a schedule; 1 is the posterior.
        data_size: N, required unless log_posterior carries it.
        beta: β, the variance of the gradient's noise over 𝒯², which is subtracted from the injected noise.
        momentum_first: update m before θ.
        preconditioner: D, an operator (d, d) with a square root, a vector (d,) or a number; None is the identity.

    Returns:
        A sampler with `init(params, generator)` and `update(state, batch)`.

    Raises:
        TypeError, ValueError: an argument is of another kind or out of range.

    Cost: a gradient, a product with D and a draw by its root; four vectors.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> sampler = co.sampling.sghmc(density, 1e-3)
        >>> co.sampling.run(sampler, density.params, [(x, y)], steps=5).theta.shape
        torch.Size([1, 5, 17])
    """
    options = {"alpha": alpha, "sigma": sigma, "beta": beta}
    shared = common_arguments(log_posterior, step_size, temperature, data_size, preconditioner, **options)
    return SGHMC(**shared, momentum_first=momentum_first)


def sgnht(
    log_posterior: Density,
    step_size: StepSizes,
    *,
    alpha: float = 1.0,
    sigma: float = 1.0,
    temperature: StepSizes = 1.0,
    data_size: int | None = None,
    beta: float = 0.0,
    preconditioner: Preconditioning = None,
) -> SGNHT:
    """Build the stochastic-gradient Nosé–Hoover thermostat (Ding et al. 2014; order of Duffield et al. 2024).

        θ += ε s m,    m += ε D g − ε s x m + √(𝒯ε(2α − 𝒯εβ)) D^½ ξ,    x += ε (s mᵀD⁻¹m/d − 𝒯)

    with the old m and x on the right, s = σ⁻², 𝒯 = τ/N and x₀ ~ N(α, 𝒯/d): the friction x rises until the momenta have
    their temperature, whatever the noise of the gradient. The mean is over all d coordinates. D is the inverse mass, as
    in `sghmc`, and must be positive definite.

    Start at a mode. The momentum of a chain on its way there raises x, which then falls by at most 𝒯ε in a step: for
    many thousand steps variances are too small, by a factor of about α/x (x is `state.thermostat`).

    Args:
        log_posterior: a function (params, batch) -> mean log-likelihood of the batch + log prior / N.
        step_size: ε, a number or a schedule.
        alpha: α in the noise, and the mean of the initial friction.
        sigma: σ, the standard deviation of momenta at 𝒯 = 1.
        temperature: τ > 0, a number or a schedule.
        data_size: N, required unless log_posterior carries it.
        beta: β, as in `sghmc`.
        preconditioner: D, as in `sghmc`.

    Returns:
        A sampler with `init(params, generator)` and `update(state, batch)`.

    Raises:
        TypeError, ValueError: an argument is of another kind or out of range, or τ is 0, at which it would diverge.

    Cost: a gradient, a product with D, a solve and a draw by its root; four vectors.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> sampler = co.sampling.sgnht(density, 1e-3)
        >>> co.sampling.run(sampler, density.params, [(x, y)], steps=5).theta.shape
        torch.Size([1, 5, 17])
    """
    options = {"alpha": alpha, "sigma": sigma, "beta": beta}
    return SGNHT(**common_arguments(log_posterior, step_size, temperature, data_size, preconditioner, **options))


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
    is `torch.optim.SGD(lr=½ε²s(1 + μ), momentum=μ)` with μ = e^{−αsε}.

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
    options = {"alpha": alpha, "sigma": sigma}
    return BAOA(**common_arguments(log_posterior, step_size, temperature, data_size, preconditioner, **options))
