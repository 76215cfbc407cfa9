"""Hamiltonian and underdamped Langevin Monte Carlo on all data: leapfrog steps, then acceptance or rejection."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.argument_types import Density, Preconditioning, StepSizes
from curvops.checks import checked_number, checked_whole
from curvops.sampling.core.state import Info, MomentumState, NoiseSource, State
from curvops.sampling.core.structure import long_dot
from curvops.sampling.core.transition import common_arguments
from curvops.sampling.samplers.metropolis import Metropolis, MetropolisState, accept_or_reject, write_accepted


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LeapfrogState(MetropolisState, MomentumState):
    """A state of `hmc` and `lmc`, with momenta m and the gradient of `log_posterior`, vectors like `theta`."""

    gradient: Float[Tensor, "*k d"]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Leapfrog(Metropolis):
    """The step m ← √(1−ρ) m + √ρ σ√𝒯 D^½ξ, L leapfrog steps, accept or stay with −m; HMC is ρ = 1, LMC L = 1."""

    leapfrog_steps: int
    refreshment: float
    sigma: float = 1.0
    state_type: ClassVar[type[State]] = LeapfrogState

    def _initial_tensors(self, state: State, noise: NoiseSource) -> dict[str, Any]:
        (_, T), theta = self._now(state), state.theta
        m = self.metric.noise(noise, theta).mul_(self.sigma * math.sqrt(T))
        return super()._initial_tensors(state, noise) | {"momentum": m, "gradient": torch.zeros_like(theta)}

    def _evaluate(self, state: LeapfrogState, batch: Any) -> Tensor:
        value, gradient = self.density.gradient(state.theta, state.structure, batch)
        state.gradient.copy_(gradient)
        return value

    def _step(self, state: LeapfrogState, batch: Any, noise: NoiseSource) -> Info:
        self._refresh(state, batch)
        (eps, T), s, rho, D = self._now(state), self.sigma**-2, self.refreshment, self.metric
        m0 = D.noise(noise, state.theta).mul_(math.sqrt(rho * T) * self.sigma)
        m0.add_(state.momentum, alpha=math.sqrt(1 - rho))

        theta, m = state.theta, torch.add(m0, D.product(state.gradient), alpha=eps / 2)
        for left in reversed(range(self.leapfrog_steps)):
            theta = torch.add(theta, m, alpha=eps * s)
            value, g = self.density.gradient(theta, state.structure, batch)
            m.add_(D.product(g), alpha=eps if left else eps / 2)  # two half steps between two steps of θ

        # Differences before sums, since the energies themselves may be a million times as large.
        kinetic = long_dot(m - m0, D.solve(m + m0)) * (s / 2)
        energy_error = (kinetic - (value.double() - state.value.double())) / T
        probability, accepted = accept_or_reject(energy_error, noise, theta)
        write_accepted(accepted, theta, state.theta)
        write_accepted(accepted, value, state.value)
        write_accepted(accepted, g, state.gradient)
        state.momentum.copy_(m0.neg_())
        write_accepted(accepted, m, state.momentum)
        return Info(state.value.clone(), probability, energy_error)

    def stability_limit(self, curvature: float) -> float | None:
        return 2 * self.sigma / math.sqrt(curvature) if curvature > 0 else None


def hmc(
    log_posterior: Density,
    step_size: StepSizes,
    *,
    leapfrog_steps: int = 10,
    sigma: float = 1.0,
    temperature: StepSizes = 1.0,
    data_size: int | None = None,
    preconditioner: Preconditioning = None,
) -> Leapfrog:
    """Build Hamiltonian Monte Carlo (Duane et al. 1987; Neal 2011), which is exact, on all data in each step.

        m ~ N(0, 𝒯σ²D);  L times  m += ½ε D g,  θ += ε s m,  m += ½ε D g;  accept with min(1, e^{−ΔH})

    with H = (−log_posterior + ½ s mᵀD⁻¹m)/𝒯, s = σ⁻², 𝒯 = τ/N. ε has the units of the other samplers with momenta: a
    step is stable iff ε√(s h) < 2 on a Gaussian of curvature h of −log_posterior (of D^½ H D^½). D is the inverse mass,
    as in `sghmc`, and must be positive definite. Each batch must contain all data: [(X, y)].

    Args:
        log_posterior: a function (params, batch) -> mean log-likelihood of the batch + log prior / N, such as
            `co.sampling.log_posterior` returns.
        step_size: ε, a number or a schedule; `run(..., warmup=, target_acceptance=0.7)` finds one.
        leapfrog_steps: L.
        sigma: σ, the standard deviation of momenta at 𝒯 = 1.
        temperature: τ > 0, a number or a schedule; 1 is the posterior.
        data_size: N, required unless log_posterior carries it.
        preconditioner: D, an operator (d, d) with a square root, a vector (d,) or a number; None is the identity.

    Returns:
        A sampler with `init(params, generator)` and `update(state, batch)`.

    Raises:
        TypeError, ValueError: an argument is of another kind or out of range.

    Cost: L gradients (and one if the batch has changed), L + 1 products with D, a solve, a draw.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> sampler = co.sampling.hmc(density, 0.05, leapfrog_steps=3)
        >>> bool(co.sampling.run(sampler, density.params, [(x, y)], steps=5).acceptance.mean() > 0.5)
        True
    """
    shared = common_arguments(log_posterior, step_size, temperature, data_size, preconditioner)
    steps = checked_whole("leapfrog_steps", leapfrog_steps)
    return Leapfrog(**shared, leapfrog_steps=steps, refreshment=1.0, sigma=checked_number("sigma", sigma))


def lmc(
    log_posterior: Density,
    step_size: StepSizes,
    *,
    refreshment: float = 0.1,
    sigma: float = 1.0,
    temperature: StepSizes = 1.0,
    data_size: int | None = None,
    preconditioner: Preconditioning = None,
) -> Leapfrog:
    """Build underdamped Langevin Monte Carlo with a Metropolis correction (Horowitz 1991; Hron et al. 2022).

        m ← √(1−ρ) m + √ρ σ√𝒯 D^½ξ;  m += ½ε D g,  θ += ε s m,  m += ½ε D g;
        accept with min(1, e^{−ΔH}), else m ← −m

    with H as in `hmc`. ρ = 1 is MALA. Momenta are flipped on rejection; otherwise the distribution would be wrong.

    Args:
        log_posterior: a function (params, batch) -> mean log-likelihood of the batch + log prior / N.
        step_size: ε, a number or a schedule; `run(..., warmup=, target_acceptance=0.9)` finds one. Stable iff
            ε√(s h) < 2.
        refreshment: ρ in (0, 1], the share of new momentum in each step.
        sigma: σ, the standard deviation of momenta at 𝒯 = 1.
        temperature: τ > 0, a number or a schedule.
        data_size: N, required unless log_posterior carries it.
        preconditioner: D, as in `hmc`. Each batch must contain all data.

    Returns:
        A sampler with `init(params, generator)` and `update(state, batch)`.

    Raises:
        TypeError, ValueError: an argument is of another kind or out of range.

    Cost: a gradient (two if the batch has changed), two products with D, a solve, a draw.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> sampler = co.sampling.lmc(density, 0.05)
        >>> co.sampling.run(sampler, density.params, [(x, y)], steps=5).acceptance.shape
        torch.Size([1, 5])
    """
    shared = common_arguments(log_posterior, step_size, temperature, data_size, preconditioner)
    share = checked_number("refreshment", refreshment, "(0, 1]")
    return Leapfrog(**shared, leapfrog_steps=1, refreshment=share, sigma=checked_number("sigma", sigma))
