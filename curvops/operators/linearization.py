"""A trained network, linearised at its weights: the one object that every network operator is built from.

`curvops.operators.linearize` makes it, and checks what it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.network.data import Batch, Batches
from curvops.network.inputs import Inputs, as_inputs, copy, num_points, take
from curvops.network.likelihood import Likelihood
from curvops.network.model import Model
from curvops.network.output_fisher import OutputFisher
from curvops.network.passes import BatchMap, Passes, accumulate
from curvops.network.plan import Choice, Plan
from curvops.network.roots import Group
from curvops.network.tangent_space import TangentSpace
from curvops.operators.jacobian import Jacobian


class Linearization:
    """f(x, θ) ≈ f(x, θ*) + J(x)(θ − θ*) around a snapshot θ* of the network, made by `co.linearize`.

    Training the network further changes nothing here. Sums run over the data, never means. `output_shape` is that of
    a point's outputs: (C,), or (T, C) for sequences, whose outputs are rows (n, T·C) everywhere, position by position.
    """

    def __init__(
        self,
        model: Model,
        data: Batches,
        likelihood: Likelihood,
        output_shape: torch.Size,
        engine: Choice,
        memory_budget: int,
    ) -> None:
        self.model, self.data, self.likelihood = model, data, likelihood
        self.output_shape, self.engine, self.memory_budget = output_shape, engine, memory_budget
        self.passes = Passes(model, _Labelled(data), engine, memory_budget)
        self._theta = model.theta

    @property
    def theta(self) -> Float[Tensor, " D"]:
        """The selected parameters as one vector."""
        return self._theta

    @property
    def tangent_space(self) -> TangentSpace:
        """Which parameters, at which values: operators of different ones are refused in a sum."""
        return self.model.tangent_space

    @property
    def num_parameters(self) -> int:
        """D."""
        return self.model.selection.num_parameters

    @property
    def num_outputs(self) -> int:
        """C, the number of a point's outputs; T·C for sequences."""
        return self.output_shape.numel()

    @property
    def num_data(self) -> int:
        """N, the number of training points."""
        return self.data.num_data

    @property
    def plan(self) -> Plan:
        """What serves the products and why: engine per layer, bytes, expected gradients per product."""
        return self.passes.plan

    def jacobian(self, x: Any = None) -> Jacobian:
        """J as an operator (n·C, D), rows point by point (n·C + c); at the training inputs where x is None.

        Raises as `linearize` does for inputs that are empty, not finite or of another form.
        """
        if x is None:
            return Jacobian(self.theta, passes=self.passes, rows=self.num_data * self.num_outputs)
        inputs = copy(self._inputs(x))  # it is lazy: a later change of x must not change half of a predictive
        step = max(self.data.sizes)
        parts = [(take(inputs, slice(i, i + step)), None) for i in range(0, num_points(inputs), step)]
        passes = Passes(self.model, parts, self.engine, self.memory_budget, self.passes.engines)
        return Jacobian(self.theta, passes=passes, rows=num_points(inputs) * self.num_outputs)

    def predict(self, x: Any) -> Float[Tensor, "n C"]:
        """f(x, θ*), the network's outputs at its snapshot, sequences as rows (n, T·C). One forward pass."""
        inputs, step = self._inputs(x), max(self.data.sizes)
        with torch.no_grad():
            parts = [
                self.model(self.model.values, take(inputs, slice(i, i + step)))
                for i in range(0, num_points(inputs), step)
            ]
        return torch.cat(parts)

    def _inputs(self, x: Any) -> Inputs:
        return as_inputs(x, self.theta.device, self.theta.dtype)

    def outputs(self) -> Float[Tensor, "N C"]:
        """f(θ*) at the training inputs. One forward pass."""
        return torch.cat([J.outputs for _, J in self.passes.each(0)])

    def log_likelihood(self) -> Float[Tensor, ""]:
        """Σ_n log p(y_n | f(x_n, θ*)) in nats. One forward pass."""
        return self.sum_over_batches(
            lambda batch, J: self.likelihood.log_prob(J.outputs, batch.targets, batch.weights).sum(), 0
        )

    def gradient(self) -> Float[Tensor, " D"]:
        """Gradient of the negative log-likelihood (a sum over the data), Jᵀr. One gradient."""

        def term(batch: Batch, J: BatchMap) -> Tensor:
            return J.pull(self.likelihood.residual(J.outputs, batch.targets, batch.weights).unsqueeze(0))

        return self.sum_over_batches(term, 1).squeeze(1)

    def sum_over_batches(self, term: Callable[[Batch, BatchMap], Tensor], columns: int) -> Tensor:
        """Σ over batches of `term(batch, J of the batch)`, for a product with `columns` vectors."""
        total: Tensor | None = None
        for batch, J in self.passes.each(columns):
            total = accumulate(total, term(batch, J))
        assert total is not None  # empty data were refused at the door
        return total

    def root_rows(self, fisher: OutputFisher) -> Iterator[Group]:
        """Rows g[n, r] = J_nᵀ s[n, r] of Σ_n Σ_r g gᵀ over all data, by layer and in chunks (see `network.roots`)."""
        return self.passes.root_rows(fisher)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Float[Tensor, " D"]:
        """Named tensors as one vector, in the order of the selection."""
        return self.model.selection.flatten(tensors)

    def unflatten(self, vector: Float[Tensor, " D"]) -> dict[str, Tensor]:
        """One vector as named tensors; entries outside a subnetwork are zero."""
        return self.model.selection.unflatten(vector)

    def cast(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Linearization:
        """A new linearisation with parameters, buffers and data converted. Costs two passes over the data."""
        likelihood = self.likelihood.to(device=device, dtype=dtype)
        data, model = self.data.to(device=device, dtype=dtype), self.model.cast(dtype, device)
        return Linearization(model, data, likelihood, self.output_shape, self.engine, self.memory_budget)

    def __repr__(self) -> str:
        return (
            f"Linearization(num_parameters={self.num_parameters:,}, num_data={self.num_data:,}, "
            f"num_outputs={self.num_outputs}, {self.theta.dtype}, {self.theta.device})"
        )


class _Labelled:
    """The training data as (inputs, batch without its inputs): what a cached engine needs of a batch is small."""

    def __init__(self, data: Batches) -> None:
        self._data = data

    def __iter__(self) -> Any:
        start = 0
        for batch in self._data:
            # Clones: what is kept of a batch must not change with the user's tensors.
            weights = None if batch.weights is None else batch.weights.clone()
            yield batch.inputs, Batch((), batch.targets.clone(), weights, start)
            start += batch.num_points
