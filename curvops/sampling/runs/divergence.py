"""Divergence of samplers: energies are checked as they run, and the curvature determines which steps are stable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from curvops.errors import DivergenceError
from curvops.sampling.core.state import Info, State

LOOK_EVERY = 20
"""The number of steps between two checks, which wait for the device."""
PATIENCE = 100
"""The number of steps without an accepted proposal after which a Metropolis sampler counts as stuck."""
RUNAWAY = 100.0
"""A bound, in units of the thermal energy and the start's own size, that no stable sampler's fluctuations reach."""
POWER_STEPS = 20
"""The number of power iterations for the largest curvature, at two gradients each."""
DIFFERENCE = 1e-3
"""The length of the differences of gradients in these iterations, relative to the parameters."""


class Watch:
    """A check of energies −log_posterior every few steps; it keeps the state before them to measure its curvature.

    On a quadratic of curvature h, a step beyond the stability limit multiplies the energy each time. From 1.02 times
    the limit on, the energy exceeds any bound within 100 steps, whereas a stable sampler stays at its thermal energy
    𝒯d/2.
    """

    def __init__(self, transition: Any) -> None:
        self._transition = transition
        self._energies: list[Tensor] = []
        self._first: Tensor | None = None
        self._held: tuple[State, Any] | None = None
        self._accepted: list[Tensor] = []
        self._step_size = 0.0
        self._steps = 0

    def before(self, state: State, batch: Any) -> None:
        """Store the state before a step, after checking the energies every few steps."""
        if self._steps % LOOK_EVERY == 0:
            self.look(state)
            self._held = state.clone(), batch
        self._steps += 1

    def after(self, info: Info, adapted: Any, adapting: bool) -> None:
        """Store the energy and the acceptance of a step."""
        self._energies.append(-info.log_posterior)
        if info.acceptance is not None and not adapting:
            self._accepted.append(info.acceptance)
            self._step_size = adapted.step_size(self._steps - 1)

    def look(self, state: State) -> None:
        """Check the energies of the steps since the last check, which led to this state."""
        if not self._energies:
            return
        energies = torch.stack(self._energies)
        self._energies.clear()
        if self._first is None:
            self._first = energies[0]
        self._look_at_acceptance()
        temperature = self._transition.temperature(int(state.step)) / self._transition.data_size
        bound = RUNAWAY * (temperature * state.structure.size + self._first.abs() + 1)
        if bool(((energies - self._first) <= bound).all()) and bool(state.theta.isfinite().all()):
            return
        name, length = self._transition.step_length(int(state.step))
        worst = float(energies.max()) if bool(energies.isfinite().all()) else float("inf")
        raise DivergenceError(
            f"the energy −log_posterior grew from {float(self._first.max()):.4g} to {worst:.4g} within "
            f"{self._steps} steps of {name}={length:g}{self.remedy()}"
        )

    def _look_at_acceptance(self) -> None:
        if not self._transition.metropolis or len(self._accepted) < PATIENCE:
            return
        mean = float(torch.stack(self._accepted).mean())
        self._accepted.clear()
        if mean < 1e-3:
            raise DivergenceError(
                f"of {PATIENCE} proposals with step_size={self._step_size:g} none was likely to be "
                f"accepted (mean probability {mean:.2g}){self.remedy()} Or use a warm-up to find one: "
                "run(..., warmup=500, target_acceptance=0.6)."
            )

    def remedy(self) -> str:
        """Return the end of a message: the largest curvature, and the step size to try."""
        assert self._held is not None
        state, batch = self._held
        theta = state.theta if state.theta.ndim == 1 else state.theta[0]
        curvature = largest_curvature(self._transition, theta, state, batch)
        limit = self._transition.stability_limit(curvature)
        if limit is None:
            name, length = self._transition.step_length(int(state.step))
            return f"; use a smaller step, {name}={length / 4:.2g}."
        return (
            f", where the largest curvature is {curvature:.3g} and steps up to {limit:.3g} are stable; try "
            f"step_size={limit / 2:.2g}."
        )


def largest_curvature(transition: Any, theta: Tensor, state: State, batch: Any) -> float:
    """Compute the largest eigenvalue of D times the Hessian of −log_posterior by power iterations on differences."""
    generator = torch.Generator(theta.device).manual_seed(0)
    v = torch.empty_like(theta).normal_(generator=generator)
    found = 0.0
    for _ in range(POWER_STEPS):
        v = v / v.norm()
        h = DIFFERENCE * (1 + theta.norm())
        ahead, behind = (
            transition.density.gradient(theta + sign * h * v, state.structure, batch)[1] for sign in (1.0, -1.0)
        )
        pushed = transition.metric.product((behind - ahead) / (2 * h))
        found = float(v @ pushed)
        if not pushed.isfinite().all() or float(pushed.norm()) == 0:
            break
        v = pushed
    return found
