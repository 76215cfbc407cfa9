"""Underdamped Langevin Monte Carlo on all data: momenta refreshed in part, a leapfrog step, accept or reject."""

from __future__ import annotations

from typing import Any

from curvops.checks import checked_number
from curvops.sampling.hmc import Leapfrog
from curvops.sampling.transition import common_arguments


def lmc(
    log_posterior: Any,
    step_size: Any,
    *,
    refreshment: float = 0.1,
    sigma: float = 1.0,
    temperature: Any = 1.0,
    data_size: int | None = None,
    preconditioner: Any = None,
) -> Leapfrog:
    """Underdamped Langevin Monte Carlo with a Metropolis correction (Horowitz 1991; Hron et al. 2022).

        m ← √(1−ρ) m + √ρ σ√𝒯 D^½ξ;  m += ½ε D g,  θ += ε s m,  m += ½ε D g;  accept with min(1, e^{−ΔH}), else m ← −m

    with H as in `hmc`. ρ = 1 is MALA. Momenta are flipped on rejection, without which the law would be another.

    Args:
        log_posterior: a function (params, batch) -> mean log-likelihood of the batch + log prior / N.
        step_size: ε, a number or a schedule; `run(..., warmup=, target_acceptance=0.9)` finds one. Stable iff
            ε√(s h) < 2.
        refreshment: ρ in (0, 1], the share of new momentum at each step.
        sigma: σ, the standard deviation of momenta at 𝒯 = 1.
        temperature: τ > 0, a number or a schedule.
        data_size: N, where log_posterior does not carry it.
        preconditioner: D, as `hmc` takes it. Batches must be all data.

    Raises:
        TypeError, ValueError: an argument of another kind or out of range.

    Cost: a gradient (two where the batch is another than before), two products with D, a solve, a draw.
    """
    shared = common_arguments(log_posterior, step_size, temperature, data_size, preconditioner)
    if checked_number("refreshment", refreshment) > 1:
        raise ValueError(f"refreshment must lie in (0, 1], got {refreshment}.")
    return Leapfrog(**shared, leapfrog_steps=1, refreshment=float(refreshment), sigma=checked_number("sigma", sigma))
