"""Preconditioned Crank–Nicolson: proposals that leave a Gaussian invariant and need no gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from curvops.argument_types import Density, StepSizes
from curvops.linalg import Diagonal, Inverse
from curvops.posterior.core.terms import Prior
from curvops.sampling.core.metric import as_metric
from curvops.sampling.core.schedules import Constant
from curvops.sampling.core.state import Info, NoiseSource, State
from curvops.sampling.core.structure import flatten, long_dot
from curvops.sampling.core.transition import common_arguments
from curvops.sampling.samplers.metropolis import Metropolis, MetropolisState, accept_or_reject, write_accepted


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CrankNicolson(Metropolis):
    """The proposal θ' = c + √(1−ε²) (θ − c) + ε√τ C^½ξ, reversible under N(c, τC); `metric` is C, `mean` is c."""

    mean: Tensor
    largest_step: ClassVar[float] = 1.0

    def _initial_tensors(self, state: State, noise: NoiseSource) -> dict[str, Any]:
        if self.mean.ndim and self.mean.shape != state.theta.shape[-1:]:
            raise ValueError(f"mean has {len(self.mean)} entries, but params {state.theta.shape[-1]}.")
        return super()._initial_tensors(state, noise)

    def _evaluate(self, state: MetropolisState, batch: Any) -> Tensor:
        return self.density.value(state.theta, state.structure, batch)

    def with_preconditioner(self, preconditioner: Any) -> NoReturn:
        """Raise TypeError: C is the covariance of a Gaussian in the acceptance rule, not a preconditioner."""
        raise TypeError("pcn has no preconditioner: pass the proposals' covariance, pcn(..., covariance=C).")

    def _step(self, state: MetropolisState, batch: Any, noise: NoiseSource) -> Info:
        self._refresh(state, batch)
        eps, T = self._now(state)
        if eps > 1:
            raise ValueError(f"step_size must lie in (0, 1] for pcn, got {eps:g}.")
        tau, C, c = T * self.data_size, self.metric, self.mean.to(state.theta)
        gap = state.theta - c
        moved = C.noise(noise, gap).mul_(eps * math.sqrt(tau)).add_(gap, alpha=math.sqrt(1 - eps**2))
        theta = moved + c
        value = self.density.value(theta, state.structure, batch)

        # log N(·; c, τC) is subtracted from log p/𝒯 at both ends, as a difference before the sum.
        prior = long_dot(moved - gap, C.solve(moved + gap)) / (2 * tau)
        energy_error = -(value.double() - state.value.double()) / T - prior
        probability, accepted = accept_or_reject(energy_error, noise, theta)
        write_accepted(accepted, theta, state.theta)
        write_accepted(accepted, value, state.value)
        return Info(state.value.clone(), probability, energy_error)


def pcn(
    log_posterior: Density,
    step_size: StepSizes,
    *,
    covariance: Any = None,
    mean: Any = None,
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
    if covariance is None and not isinstance(prior, Prior):
        raise ValueError("covariance is missing: pass a number, a vector (d,) or an operator.")
    if covariance is None:
        assert isinstance(prior, Prior)
        A = prior.precision
        covariance = Inverse(A) if not isinstance(A, Tensor) else float(1 / A) if A.ndim == 0 else Diagonal(1 / A)
        mean = prior.mean if mean is None else mean
    shared = common_arguments(log_posterior, step_size, temperature, data_size, None)
    shared["metric"] = as_metric(covariance, "covariance")
    if isinstance(shared["step_size"], Constant) and shared["step_size"].value > 1:
        raise ValueError(f"step_size must lie in (0, 1] for pcn, got {step_size}.")
    if mean is None or isinstance(mean, int | float):
        centre = torch.as_tensor(0.0 if mean is None else float(mean), dtype=torch.float64)
    else:
        centre = mean.detach().clone() if isinstance(mean, Tensor) and mean.ndim < 2 else flatten(mean)[0]
    if not bool(centre.isfinite().all()):
        raise ValueError("mean holds NaN or Inf.")
    return CrankNicolson(**shared, mean=centre)
