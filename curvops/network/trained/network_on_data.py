"""A network with its data and its likelihood, with parameters whole or in shards: sizes, outputs, sums over data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checks import check_choice, check_options
from curvops.errors import MissingLabelsError
from curvops.network.data.batches import AbsentBatches, Batch, Batches
from curvops.network.likelihoods.gaussian import sums_of_squares
from curvops.network.likelihoods.likelihood import Likelihood, likelihood_state
from curvops.network.likelihoods.output_fisher import Empirical, Exact, FisherKind, OutputFisher, Sampled
from curvops.network.model.model import Model
from curvops.network.model.parameters import TangentSpace
from curvops.network.walks.budget import BatchMap
from curvops.network.walks.walk import Passes
from curvops.summary import name_of


@dataclass(frozen=True)
class Source:
    """The data of a log-likelihood and the likelihood itself, by fingerprints; equal if both are equal.

    Small operators keep it instead of the data. Data are equal if all points are, in any order and any batches.
    """

    num_data: int
    data: int
    likelihood: str

    def __str__(self) -> str:
        """Describe the data alone: a likelihood with a function has a name that differs between processes."""
        return f"{self.num_data} points of fingerprint {self.data}"


class NetworkOnData:
    """A network with its data and its likelihood: sizes, outputs and sums over data, with parameters sharded or not."""

    model: Model
    data: Batches | AbsentBatches
    likelihood: Likelihood
    output_shape: torch.Size
    passes: Passes
    token: str
    _results: tuple[list[Tensor] | None, dict[str, Any]]

    @property
    def num_parameters(self) -> int:
        """The number D of selected parameters, those of all ranks."""
        return self.model.num_parameters

    @property
    def num_outputs(self) -> int:
        """The number C of a point's outputs, T·C for sequences."""
        return self.output_shape.numel()

    @property
    def num_data(self) -> int:
        """The number N of training points, those of all ranks."""
        return self.data.num_data

    def positions_apart(self, per_token: bool) -> int:
        """Return T if the tokens of a sequence are to count one by one, otherwise 1."""
        return self.output_shape[0] if per_token and len(self.output_shape) == 2 else 1

    def require_labels(self, what: str) -> None:
        """Raise MissingLabelsError, with the name of what depends on them, if the data have no labels."""
        if not self.data.labelled:
            raise MissingLabelsError(what)

    @property
    def tangent_space(self) -> TangentSpace:
        """The selected parameters and their values; a sum of operators from different ones is rejected."""
        return self.model.tangent_space

    @property
    def source(self) -> Source:
        """The data and the likelihood, at its present hyperparameters, by fingerprints."""
        results = self.results_now()
        if "source" not in results:
            likelihood = likelihood_state(self.likelihood, self.token)
            results["source"] = Source(self.data.num_data, self.data.prints.contents, likelihood)
        source: Source = results["source"]
        return source

    def outputs(self) -> Float[Tensor, "N *shape"]:
        """Return f(θ*) at the training inputs, in the shape in which the model returns outputs. One forward pass."""
        rows = self.passes.rows(lambda _, J: J.outputs.unsqueeze(0), 0)
        return self.by_point(rows.reshape(-1, self.output_shape[-1]))

    def by_point(self, values: Tensor, dim: int = 0) -> Tensor:
        """Return values with a row for each position of a point, in the shape of the model's outputs."""
        layout = self.model.layout
        return values if layout is None else layout.by_point(values, dim)

    @property
    def places(self) -> tuple[int, ...]:
        """The lengths of the dimensions of outputs that are positions; empty if a point has one position."""
        layout = self.model.layout
        return () if layout is None else layout.places

    def log_likelihood(self) -> Float[Tensor, ""]:
        """Return Σ_n log p(y_n | f(x_n, θ*)) in nats.

        Costs one forward pass; under no_grad it costs none once KFAC or a diagonal has been built.

        (A likelihood that is a function may contain tensors that require a gradient.)
        """
        if not torch.is_grad_enabled() and (value := self.results_now().get("log likelihood")) is not None:
            copied: Tensor = value.clone()
            return copied
        exact = self._exact
        return self.passes.total(lambda batch, J: exact.log_prob(J.outputs, batch).sum(), 0)

    @torch.no_grad()
    def squared_residuals(self) -> Float[Tensor, "4 C"]:
        """Return `sums_of_squares` of the training data. One forward pass."""

        def term(batch: Batch, J: BatchMap) -> Tensor:
            return sums_of_squares(self.likelihood, J.outputs, batch.targets, batch.weights)

        return self.passes.total(term, 0)

    @property
    def _exact(self) -> Exact:
        """The likelihood in sums over the data, which have gradients in its hyperparameters."""
        tensors = self.likelihood.hyperparameters
        if self.passes.shard is None or not tensors:
            return Exact(self.likelihood)
        return Exact(self.likelihood.with_hyperparameters([self.passes.replicated(tensor) for tensor in tensors]))

    def output_fisher(self, kind: str, mc_samples: int, generator: torch.Generator | None) -> OutputFisher:
        """Return the H named by `fisher=`: "exact", "mc" with `mc_samples` targets drawn here, or "empirical".

        Raises ValueError for another name, for `mc_samples` below 1, and for more than 1 if nothing is drawn.
        """
        check_choice("fisher", kind, get_args(FisherKind))
        if kind == "mc":
            return Sampled(self.likelihood, self.draw_residuals(mc_samples, generator))
        if mc_samples != 1:
            raise ValueError(f"mc_samples={mc_samples} with fisher={kind!r}, which draws nothing; use fisher='mc'.")
        if kind == "exact":
            return Exact(self.likelihood)
        self.require_labels("the empirical Fisher")
        return Empirical(self.likelihood)

    @torch.no_grad()
    def draw_residuals(self, mc_samples: int, generator: torch.Generator | None) -> Float[Tensor, "M N C"]:
        """Return residuals at M targets per point drawn from the model, divided by √M. One forward pass.

        They are drawn for all points at once: equal seeds give equal draws, however the data are batched.
        """
        check_options(mc_samples=mc_samples, generator=generator)
        walked = [(J.outputs, batch.any_targets, batch.weights) for batch, J in self.passes.each(0)]
        f, y = (self.passes.line_up([batch[i] for batch in walked]) for i in (0, 1))
        weights = [w for *_, w in walked if w is not None]
        w = self.passes.line_up(weights) if weights else None
        draws = [self.likelihood.mc_residual(f, y, w, generator) for _ in range(mc_samples)]
        return torch.stack(draws) / mc_samples**0.5

    def results_now(self) -> dict[str, Any]:
        """Return results at the present hyperparameters, which may change in place, as in training."""
        present, (at, results) = self.likelihood.hyperparameters, self._results
        if at is None or not all(map(torch.equal, at, present)):
            results = {}
            self._results = [tensor.detach().clone() for tensor in present], results
        return results

    def _printed(self, dtype: torch.dtype, place: object) -> str:
        return (
            f"{type(self).__name__}({self.num_parameters} weights, {self.num_data} points"
            f"{'' if self.data.labelled else ' without labels'}, {self.num_outputs} outputs, "
            f"{self.likelihood.described}, {name_of(dtype)}, {place})"
        )
