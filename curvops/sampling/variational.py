"""Variational inference: the normal distribution of a family that is nearest to the posterior."""

from __future__ import annotations

import numbers
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.core.limits import check_choice, check_flag, checked_whole
from curvops.operators import Linearization
from curvops.posterior.arguments import check_linearization
from curvops.posterior.gaussian_posterior import GaussianPosterior
from curvops.sampling.families import FAMILIES, GaussianFamily, family_of
from curvops.sampling.noise_source import NoiseSource
from curvops.sampling.schedules import at, checked
from curvops.sampling.sghmc import fields_of
from curvops.sampling.state import Info, State
from curvops.sampling.torch_optimizer import Optimizer, OptimizerState
from curvops.sampling.torch_optimizer import optimizer as in_torch
from curvops.sampling.transition import common_arguments
from curvops.sampling.weight_order import order_at_mean


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class VariationalState(OptimizerState):
    """The mean as `theta`, and the tensors that describe the covariance."""

    spread: dict[str, Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class VariationalInfo(Info):
    """log_posterior is the mean over the step's draws; ``nelbo`` that of 𝒯 log q − log_posterior, in nats a point."""

    nelbo: Float[Tensor, ""] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Variational(Optimizer):
    """An optimiser of the mean and the covariance of a normal distribution."""

    family: GaussianFamily
    draws: int
    stick_the_landing: bool
    initial_scale: float

    @property
    def _state_type(self) -> type[State]:
        return VariationalState

    def _begun(self, state: State, noise: NoiseSource) -> VariationalState:
        if self.chains is not None:
            raise ValueError("variational inference makes one fit, not chains: give several draws=, or fit each alone.")
        spread = self.family.begun(state.structure, self.initial_scale, state.theta, noise)
        return VariationalState(**fields_of(super()._begun(state, noise)), spread=spread)

    def _step(self, state: Any, batch: Any, noise: NoiseSource) -> VariationalInfo:
        numbers = self.family.noise(state.structure, self.draws, state.theta, noise)
        info, of_mean, of_spread = self.gradients(state, batch, numbers)
        if not bool(info.log_posterior.isfinite()):
            raise self._not_finite(info.log_posterior, int(state.step))
        tensors = [*state.structure.parts(state.theta), *state.spread.values()]
        slopes = [*state.structure.parts(of_mean), *of_spread.values()]
        self._descend(tensors, slopes, state.slots.setdefault("0", {}), int(state.step))
        return info

    def gradients(
        self, state: VariationalState, batch: Any, numbers: Float[Tensor, "k m"]
    ) -> tuple[VariationalInfo, Float[Tensor, " d"], dict[str, Tensor]]:
        """The NELBO at these standard normal numbers, and its gradients in the mean and in the spread."""
        temperature = at("temperature", self.temperature, int(state.step), zero=True) / self.data_size
        if not temperature > 0:
            raise ValueError("temperature is 0, at which the best distribution is a point: use co.sampling.optimizer.")
        family, structure = self.family, state.structure
        spread = {name: tensor.detach().clone().requires_grad_() for name, tensor in state.spread.items()}
        mean = state.theta.detach().clone().requires_grad_()
        with torch.enable_grad():
            theta = mean + family.moved(spread, structure, numbers)
            given = theta.detach()
            values, slopes = (
                self.density.gradient(given, structure, batch)
                if len(given) > 1
                else tuple(each.unsqueeze(0) for each in self.density.gradient(given[0], structure, batch))
            )
            fixed = {name: tensor.detach() for name, tensor in spread.items()} if self.stick_the_landing else spread
            centre = mean.detach() if self.stick_the_landing else mean
            log_q = temperature * family.log_density(fixed, structure, theta - centre)
            surrogate = (log_q - (slopes * theta).sum(1)).mean()
        of_mean, *of_spread = torch.autograd.grad(surrogate, [mean, *spread.values()], allow_unused=True)
        info = VariationalInfo(values.mean(), nelbo=(log_q.detach() - values).mean())
        return info, of_mean, dict(zip(spread, of_spread))

    def posterior(self, state: VariationalState, lin: Linearization) -> GaussianPosterior:
        """N(mean, Σ) as a posterior, with the face of Laplace's.

        Args:
            state: of this method's `init` or `update`.
            lin: the network linearised at the mean: `model.load_state_dict(state.params, strict=False)`, then
                `co.linearize(model, data, likelihood)`.

        Raises:
            TypeError, ValueError: another kind of state, or a linearisation of other parameters or at other weights.
        """
        self._check_state(state)
        check_linearization(lin)
        covariance, precision = self.family.covariance(state.spread, state.structure, order_at_mean(lin, state))
        return GaussianPosterior.of(lin, covariance, precision)


def vi(
    log_posterior: Any,
    family: str = "diagonal",
    *,
    optimizer: Any = torch.optim.Adam,
    draws: int = 1,
    rank: int | None = None,
    stick_the_landing: bool = True,
    initial_scale: float = 0.05,
    temperature: Any = 1.0,
    data_size: int | None = None,
    **options: Any,
) -> Variational:
    """Variational inference with normal distributions (Graves 2011; Blundell et al. 2015), under the same protocol.

    Each step descends NELBO(q) = E_q[𝒯 log q − log_posterior], 𝒯 = τ/N, whose least value over all distributions is at
    the posterior to the power 1/τ. Of a linear model under a Gaussian likelihood the dense family comes to N(θ̄, τP⁻¹),
    the diagonal one to the variances τ/P_dd.

    Args:
        log_posterior: a function (params, batch) -> mean log-likelihood of the batch + log prior / N, as
            `co.sampling.log_posterior` makes it.
        family: "diagonal"; "dense", by a Cholesky factor; "low_rank_diagonal", U Uᵀ plus a diagonal; "kronecker", for
            each tensor the Kronecker product of two covariances, of a vector one.
        optimizer: a class of torch.optim, which takes the gradients of the mean and of the family's parameters. Weight
            decay would pull at the covariance, too: AdamW needs weight_decay=0.
        draws: draws of the weights a step, together where `torch.vmap` can. Variances fall with their number.
        rank: of U, 10 where none is given.
        stick_the_landing: leave the score of q out of the gradient (Roeder, Wu & Duvenaud 2017), which is unbiased and
            without noise where q is the posterior; False differentiates log q in all of its parameters.
        initial_scale: the standard deviation of each weight at the start.
        temperature: τ > 0, a number or a schedule.
        data_size: N, where log_posterior does not carry it.
        options: of the optimiser; `lr` may be a schedule.

    Returns:
        A `Variational`: `init(params)`, `update(state, batch)`, `posterior(state, lin)`, and `co.sampling.run` takes
        it. `state.params` are the mean.

    Raises:
        TypeError, ValueError: an argument of another kind or out of range, and what `co.sampling.optimizer` refuses.

    Cost of a step: a gradient for each draw. Memory: the family's tensors (diagonal D, low rank (r + 1) D, Kronecker
    p² + q² a tensor, dense D²), the optimiser's own, and two vectors a draw.
    """
    check_choice("family", family, FAMILIES)
    check_flag("stick_the_landing", stick_the_landing)
    shared = common_arguments(log_posterior, 1.0, temperature, data_size, None)
    if isinstance(temperature, numbers.Real) and temperature == 0:
        raise ValueError("temperature=0: the best distribution is then a point; use co.sampling.optimizer for it.")
    inner = in_torch(optimizer, log_posterior, data_size=shared["data_size"], **options)
    return Variational(
        **{each.name: getattr(inner, each.name) for each in fields(inner)} | {"temperature": shared["temperature"]},
        family=family_of(family, rank),
        draws=checked_whole("draws", draws, 1),
        stick_the_landing=stick_the_landing,
        initial_scale=checked("initial_scale", initial_scale),
    )
