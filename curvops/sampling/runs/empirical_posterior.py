"""A posterior known by draws of the weights: predictions through the network itself, or through its linearisation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checks import check_choice
from curvops.network.likelihoods.likelihood import Likelihood
from curvops.operators import Linearization
from curvops.operators.linearized.jacobian import Jacobian
from curvops.posterior.core.arguments import check_accuracy, check_linearization, checked_count
from curvops.posterior.predictions import uncertainty
from curvops.posterior.predictions.held_out import ErrorOfMean
from curvops.posterior.predictions.network_outputs import network_outputs
from curvops.posterior.predictions.predictive import Predictive
from curvops.posterior.predictions.uncertainty import Uncertainty
from curvops.sampling.core.log_density import as_vectors
from curvops.sampling.diagnostics.chain_draws import checked_draws
from curvops.sampling.diagnostics.projected_chains import effective_size

THROUGH = ("network", "linearization")


@dataclass(frozen=True, eq=False)
class EmpiricalPosterior(Predictive):
    """Each of some draws of the weights with the same probability, made by `co.sampling.empirical`.

    Every prediction is a mean over all of them; errors of such means take the draws' autocorrelation into account, and
    how far the chains disagree. `predict` gives the outputs' mean and covariance as those of a normal distribution.
    """

    lin: Linearization
    draws: Float[Tensor, "k D"]
    """All draws, chain by chain."""
    chains: int
    through: str
    _mean: Tensor = field(repr=False)

    @property
    def mean(self) -> Float[Tensor, " D"]:
        """The mean of the draws; not the weights of the linearisation."""
        return self._mean

    def sample(self, k: int, generator: torch.Generator | None = None, rtol: float = 1e-3) -> Float[Tensor, "k D"]:
        """k of the draws at random, with replacement: independent draws of the empirical distribution.

        Raises TypeError or ValueError for a k that is no whole number of draws, or a generator that is none.
        """
        check_accuracy(rtol, generator)
        device = None if generator is None else generator.device
        chosen = torch.randint(len(self.draws), (checked_count(k),), generator=generator, device=device)
        return self.draws[chosen.to(self.draws.device)]

    def _covariance(self, jacobian: Jacobian, joint: bool, rtol: float | None) -> LinearOperator:
        return self._covariance_of(self._pushed(jacobian, self.draws - self.mean + self.lin.theta), joint)

    def _taken(self, samples: Any) -> Float[Tensor, "k D"]:
        given = super()._taken(samples)
        return self.draws if given is None else given

    def _error_of(self, samples: Any) -> ErrorOfMean:
        """Draws that the user gives count as independent, as those of `sample` are."""
        return self._error_of_mean if samples is None else super()._error_of(samples)

    def _error_of_mean(self, series: Float[Tensor, "k *N"]) -> Float[Tensor, "*N"]:
        spread = series.std(0) if len(series) > 1 and series.numel() else torch.full_like(series[0], torch.inf)
        return spread / effective_size(series.unflatten(0, (self.chains, -1))).sqrt().to(spread)

    def _functions(self, x: Any, samples: Float[Tensor, "k D"]) -> Float[Tensor, "k N C"]:
        if self.through == "network":
            return network_outputs(self.lin, x, samples)
        return super()._functions(x, samples)

    def _moments(
        self, x: Any, joint: bool, samples: Float[Tensor, "k D"] | None, rtol: float | None
    ) -> tuple[Float[Tensor, "N C"], LinearOperator]:
        outputs = self._functions(x, self.draws if samples is None else samples)
        mean = outputs.mean(0)
        return mean, self._covariance_of(outputs - mean, joint)

    def _uncertainty_of_numbers(
        self, x: Any, likelihood: Likelihood, samples: Float[Tensor, "k D"] | None, error: ErrorOfMean
    ) -> Uncertainty:
        drawn = self._functions(x, self.draws if samples is None else samples)
        return uncertainty.of_drawn_numbers(likelihood, drawn, error)


def empirical(lin: Linearization, draws: Any, through: str = "network") -> EmpiricalPosterior:
    """The posterior that draws of the weights stand for, such as those of `co.sampling.run`.

    Args:
        lin: the network, by `co.linearize`: its likelihood, and the weights θ̂ where outputs are linearised.
        draws: what `run` returned; or {parameter name: tensor (chain, draw, *shape)} of all parameters that `lin`
            selected, or vectors (chain, draw, D) in its order.
        through: "network" predicts by the network at each draw, f(x, θ_k); "linearization" by f(x, θ̂) + J(x)(θ_k − θ̂),
            for draws near θ̂ and as Laplace's posterior does.

    Returns:
        An `EmpiricalPosterior`, with the face of every posterior: `predict`, `functions`, `probabilities`,
        `uncertainty`, `log_likelihood`, `sample`. The draws are copied into one matrix.

    Raises:
        TypeError, ValueError: draws of other parameters, shapes or dtype, that are not finite, or one draw alone.

    Cost of a prediction: a forward pass for each draw, many draws in one pass where `torch.func.vmap` can and as memory
    has room for; a product with J(x) for each where linearised.
    """
    check_linearization(lin)
    check_choice("through", through, THROUGH)
    rows, chains = _matrix(lin, draws)
    if len(rows) < 2:
        raise ValueError("one draw has no spread: give several, or predict with the network itself, lin.predict(x).")
    return EmpiricalPosterior(lin, rows, chains, through, rows.mean(0))


def _matrix(lin: Linearization, draws: Any) -> tuple[Float[Tensor, "k D"], int]:
    """The draws as rows in the order of the selection, and the number of chains."""
    checked = checked_draws(draws)
    first = next(iter(checked.values()))
    if first.dtype != lin.theta.dtype:
        raise ValueError(f"draws are {first.dtype}, the weights {lin.theta.dtype}; convert them with .to(lin.theta).")
    rows = as_vectors(lin, first if isinstance(draws, Tensor) else checked, 2, "draws")
    return rows.flatten(0, 1).to(lin.theta.device), len(first)
