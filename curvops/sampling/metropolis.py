"""Samplers that accept or reject, on all data: Hamiltonian, underdamped Langevin, and preconditioned Crank–Nicolson."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.utils import _pytree as pytree

from curvops.argument_types import Covariance, Density, Preconditioning, StepSizes, Tree
from curvops.checks import checked_whole, refuse
from curvops.linalg import Inverse
from curvops.posterior.terms import Prior
from curvops.sampling.log_density import LogPosterior
from curvops.sampling.state import Info, MomentumState, NoiseSource, State, flatten, long_dot
from curvops.sampling.transition import Transition, as_metric, common_arguments


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MetropolisState(State):
    """The state of a sampler that accepts or rejects, with the value of `log_posterior` at `theta`."""

    value: Float64[Tensor, "*k"]
    seen: list[Any] = field(default_factory=list, repr=False)
    """The function and the batch of `value`; empty before the first evaluation."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Metropolis(Transition):
    """Samplers whose proposals are accepted with probability min(1, e^{−ΔH}), on all data at once."""

    state_type: ClassVar[type[State]] = MetropolisState
    metropolis: ClassVar[bool] = True
    needs_gradient: ClassVar[bool] = True
    cold: ClassVar[str] = (
        "temperature must be positive for a sampler that accepts or rejects; for temperature 0 use an optimiser."
    )

    def _refresh(self, state: Any, batch: Any) -> None:
        """Evaluate unless the state already has the value for this function and batch."""
        seen = [self.log_posterior, batch, _versions(batch)]
        if state.seen and all(old is new for old, new in zip(state.seen[:2], seen)) and state.seen[2] == seen[2]:
            return
        if isinstance(self.log_posterior, LogPosterior):
            self.log_posterior.require_all_data(batch)
        state.seen.clear()
        value, gradient = self.density.gradient(state.theta, state.structure, batch, self.needs_gradient)
        state.value.copy_(value)
        if self.needs_gradient:
            state.gradient.copy_(gradient)
        if not bool(state.value.isfinite().all()):
            raise self._not_finite(state.value, 0)
        state.seen[:] = seen

    def _initial_tensors(self, state: State, noise: NoiseSource) -> dict[str, Any]:
        return {"value": state.theta.new_full(state.theta.shape[:-1], math.nan, dtype=torch.float64)}  # unknown


def accept_or_reject(
    state: MetropolisState, energy_error: Float[Tensor, "*k"], noise: NoiseSource, **proposal: Tensor
) -> Info:
    """Write the proposed fields into the state of each chain that accepts them, with probability min(1, e^{−ΔH}).

    The probability is 0 if ΔH is NaN.
    """
    probability = (-energy_error).clamp_max(0).exp().nan_to_num(0.0)
    accepted = noise.uniform(state.theta) < probability
    for name, proposed in proposal.items():
        present = getattr(state, name)
        where = accepted if proposed.ndim == accepted.ndim else accepted.unsqueeze(-1)
        torch.where(where, proposed.to(present), present, out=present)
    return Info(state.value.clone(), probability, energy_error)


def _versions(batch: Any) -> list[int]:
    """Return how often each tensor of the batch was written to."""
    leaves = pytree.tree_leaves(batch)
    return [leaf._version for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]


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
        state.momentum.copy_(m0.neg_())
        return accept_or_reject(state, energy_error, noise, theta=theta, value=value, gradient=g, momentum=m)

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
        leapfrog_steps: L. Along a direction in which a trajectory is nearly a whole number of oscillations (ε L √(s h)
            near a multiple of 2π, for small ε) it ends where it began, and the chain hardly moves: `ess` and `rhat`
            show it, another L mends it.
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
    shared = common_arguments(log_posterior, step_size, temperature, data_size, preconditioner, sigma=sigma)
    return Leapfrog(**shared, leapfrog_steps=checked_whole("leapfrog_steps", leapfrog_steps), refreshment=1.0)


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
    options = {"refreshment": refreshment, "sigma": sigma}
    shared = common_arguments(log_posterior, step_size, temperature, data_size, preconditioner, **options)
    return Leapfrog(**shared, leapfrog_steps=1)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CrankNicolson(Metropolis):
    """The proposal θ' = c + √(1−ε²) (θ − c) + ε√τ C^½ξ, reversible under N(c, τC); `metric` is C, `mean` is c."""

    mean: Tensor
    largest_step: ClassVar[float] = 1.0
    needs_gradient: ClassVar[bool] = False

    def _step(self, state: MetropolisState, batch: Any, noise: NoiseSource) -> Info:
        self._refresh(state, batch)
        eps, T = self._now(state)
        refuse(eps > 1, f"step_size must lie in (0, 1] for pcn, got {eps:g}.")
        tau, C, c = T * self.data_size, self.metric, self.mean.to(state.theta)
        gap = state.theta - c
        moved = C.noise(noise, gap).mul_(eps * math.sqrt(tau)).add_(gap, alpha=math.sqrt(1 - eps**2))
        theta = moved + c
        value, _ = self.density.gradient(theta, state.structure, batch, wanted=False)

        # log N(·; c, τC) is subtracted from log p/𝒯 at both ends, as a difference before the sum.
        prior = long_dot(moved - gap, C.solve(moved + gap)) / (2 * tau)
        energy_error = -(value.double() - state.value.double()) / T - prior
        return accept_or_reject(state, energy_error, noise, theta=theta, value=value)


def pcn(
    log_posterior: Density,
    step_size: StepSizes,
    *,
    covariance: Covariance = None,
    mean: float | Tree | None = None,
    temperature: StepSizes = 1.0,
    data_size: int | None = None,
) -> CrankNicolson:
    """Build preconditioned Crank–Nicolson (Cotter et al. 2013) on all data, which uses only values of log_posterior.

        θ' = c + √(1−ε²) (θ − c) + ε√τ C^½ξ,  accepted with min(1, e^{Δ}),
        Δ = Δ log_posterior/𝒯 − Δ log N(·; c, τC)

    for any Gaussian N(c, C). If this is the prior, Δ is the change of the log-likelihood alone, and the acceptance does
    not fall with the number of parameters.

    Args:
        log_posterior: a function (params, batch) -> mean log-likelihood of the batch + log prior / N, prior included.
        step_size: ε in (0, 1], a number or a schedule; 1 proposes draws of the Gaussian itself. `run(..., warmup=,
            target_acceptance=0.3)` finds one.
        covariance: C, a number, a vector (d,) or an operator; None uses the prior's if `co.sampling.log_posterior` made
            log_posterior, and I for a `co.sampling.reprior`.
        mean: c, a number, a vector or a tree like the parameters; None uses the prior's, or 0.
        temperature: τ > 0, a number or a schedule; 1 is the posterior.
        data_size: N, required unless log_posterior carries it.

    Returns:
        A sampler with `init(params, generator)` and `update(state, batch)`.

    Raises:
        TypeError, ValueError: an argument is of another kind or out of range, or there is no covariance.

    Cost: a value of log_posterior, a draw by the root of C and a solve with C.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> sampler = co.sampling.pcn(density, 0.1)
        >>> co.sampling.run(sampler, density.params, [(x, y)], steps=5).acceptance.shape
        torch.Size([1, 5])
    """
    prior = getattr(log_posterior, "prior", None)
    if covariance is None:
        if not isinstance(prior, Prior):
            raise ValueError("covariance is missing: pass a number, a vector (d,) or an operator.")
        A = prior.precision
        covariance = Inverse(A) if not isinstance(A, Tensor) else float(1 / A) if A.ndim == 0 else 1 / A
        mean = prior.mean if mean is None else mean
    shared = common_arguments(log_posterior, step_size, temperature, data_size, None)
    shared["metric"] = as_metric(covariance, "covariance")
    if mean is None or isinstance(mean, int | float):
        centre = torch.as_tensor(0.0 if mean is None else float(mean), dtype=torch.float64)
    else:
        centre = mean.detach().clone() if isinstance(mean, Tensor) and mean.ndim < 2 else flatten([mean])[0][0]
    refuse(not centre.isfinite().all(), "mean holds NaN or Inf.")
    return CrankNicolson(**shared, mean=centre)
