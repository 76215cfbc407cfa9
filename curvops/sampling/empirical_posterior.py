"""A posterior given by draws of the weights: predictions through the network itself, or through its linearisation."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float
from linear_operator import LinearOperator
from torch import Tensor

from curvops.argument_types import Draws
from curvops.checks import check_choice, check_like, check_options, refuse
from curvops.operators import Linearization
from curvops.posterior.predictions.answers import error_of_mean
from curvops.posterior.predictions.outputs import DrawnOutputs
from curvops.posterior.predictions.predictive import Predictive
from curvops.posterior.terms import check_linearization
from curvops.sampling.diagnostics import effective_size
from curvops.sampling.log_density import as_vectors
from curvops.sampling.state import Chain, checked_draws

THROUGH = ("network", "linearization")


@dataclass(frozen=True, eq=False, repr=False)
class EmpiricalPosterior(Predictive):
    """The empirical distribution of draws of the weights, each equally probable; see `co.sampling.empirical`.

    Every prediction is a mean over all draws; the errors of such means include the draws' autocorrelation and the
    disagreement of the chains. `predict` returns the outputs' mean and covariance as those of a normal distribution.

    Examples:
        >>> draws = lin.theta + 0.1 * torch.randn(1, 20, 17, generator=torch.Generator().manual_seed(0))
        >>> co.sampling.empirical(lin, draws).probabilities(x).shape
        torch.Size([8, 2])
    """

    lin: Linearization
    draws: Float[Tensor, "k D"]
    """All draws, chain by chain."""
    chains: int
    through: str

    def _facts(self) -> tuple[str, ...]:
        return (f"{len(self.draws)} draws of {self.chains} chains", f"through the {self.through}")

    @cached_property
    def mean(self) -> Float[Tensor, " D"]:
        """The mean of the draws, which is not the weights of the linearisation."""
        return self.draws.mean(0)

    def sample(self, k: int, generator: torch.Generator | None = None, rtol: float = 1e-3) -> Float[Tensor, "k D"]:
        """Choose k of the draws at random, with replacement: independent draws of the empirical distribution.

        Args:
            k: the number of draws, at least 1.
            generator: the source of the choice.
            rtol: has no effect, since no solve is needed.

        Returns:
            The draws, (k, D).

        Raises:
            TypeError, ValueError: k is not a whole number of draws, or generator is not a torch.Generator.
        """
        check_options(k=k, rtol=rtol, generator=generator)
        device = None if generator is None else generator.device
        chosen = torch.randint(len(self.draws), (k,), generator=generator, device=device)
        return self.draws[chosen.to(self.draws.device)]

    def _outputs(self) -> EmpiricalOutputs:
        return EmpiricalOutputs(self.lin, self.draws, error=self._error_of_mean, through=self.through)

    def _error_of_mean(self, series: Float[Tensor, "k *N"]) -> Float[Tensor, "*N"]:
        size = effective_size(series.unflatten(0, (self.chains, -1)))
        return error_of_mean(series) * (len(series) / size).sqrt().to(series)


@dataclass(frozen=True, eq=False)
class EmpiricalOutputs(DrawnOutputs):
    """The outputs at draws of the weights, around their own mean."""

    through: str = field(kw_only=True)
    correction: ClassVar[int] = 0  # the draws are the whole distribution
    is_normal: ClassVar[bool] = False

    def at_draws(self, weights: Float[Tensor, "k D"]) -> EmpiricalOutputs:
        return EmpiricalOutputs(self.lin, weights, through=self.through)

    def functions(self) -> Float[Tensor, "k N C"]:
        return self.of_network if self.through == "network" else super().functions()

    @property
    def mean(self) -> Float[Tensor, "N C"]:
        return self.functions().mean(0)

    def covariance(self, together: int | None = 1) -> LinearOperator:
        return self.covariance_of(self.functions() - self.mean, together)


def empirical(lin: Linearization, draws: Draws, through: str = "network") -> EmpiricalPosterior:
    """Make the empirical posterior from draws of the weights, such as those from `co.sampling.run`.

    Args:
        lin: the network, from `co.linearize`: its likelihood, and the weights θ̂ at which outputs are linearised.
        draws: the result of `run`; or {parameter name: tensor (chain, draw, *shape)} of all parameters that `lin`
            selects, or vectors (chain, draw, D) in its order.
        through: "network" predicts with the network at each draw, f(x, θ_k); "linearization" with f(x, θ̂) +
            J(x)(θ_k − θ̂), for draws near θ̂, as a Laplace posterior does.

    Returns:
        An `EmpiricalPosterior` with the methods of every posterior: `at`, `predict`, `functions`, `probabilities`,
        `uncertainty`, `log_likelihood`, `sample`. The draws are copied into one matrix.

    Raises:
        TypeError, ValueError: draws have other parameters, shapes or dtypes, are those of a `co.sampling.reprior`, or
            are not finite, or there is only one draw.

    Cost of a prediction: a forward pass for each draw, many draws in one pass if `torch.func.vmap` can run the model
    and memory has room; a product with J(x) for each draw if linearised.

    Examples:
        >>> draws = lin.theta + 0.1 * torch.randn(1, 20, 17, generator=torch.Generator().manual_seed(0))
        >>> co.sampling.empirical(lin, draws).uncertainty(x).unit
        'nats'
    """
    check_linearization(lin)
    check_choice("through", through, THROUGH)
    changed = isinstance(draws, Chain) and hasattr(draws.sampler.log_posterior, "map")  # as a reprior has
    refuse(changed, "these are draws of φ, and not of the weights: pass torch.vmap(torch.vmap(rep.map))(chain.params).")
    checked = checked_draws(draws)
    first = next(iter(checked.values()))
    check_like("draws", first, lin.theta, "weights")
    rows = as_vectors(lin, first if isinstance(draws, Tensor) else checked, 2, "draws").flatten(0, 1)
    refuse(len(rows) < 2, "one draw has no spread: pass several, or predict with the network itself, lin.predict(x).")
    return EmpiricalPosterior(lin, rows, len(first), through)
