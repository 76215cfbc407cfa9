"""A trained network, linearised at its weights: the one object that every network operator is built from.

`curvops.operators.linearized.linearize` makes it, and checks what it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy as copy_object
from typing import Any
from uuid import uuid4

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checks import check_flag
from curvops.linalg.core.cache import recorded
from curvops.linalg.core.sources import Sources
from curvops.network.data.absent_batches import AbsentBatches
from curvops.network.data.batches import Batch, Batches
from curvops.network.data.inputs import Inputs, as_inputs, components, copy, num_points, replaced, take
from curvops.network.engines.engine import Engines
from curvops.network.engines.plan import EngineChoice, Plan
from curvops.network.likelihoods.likelihood import Likelihood
from curvops.network.likelihoods.output_fisher import Empirical, OutputFisher
from curvops.network.model.model import Model
from curvops.network.model.tangent_space import TangentSpace
from curvops.network.walks.budget import Budget
from curvops.network.walks.input_graphs import outputs_at, require_input_gradients
from curvops.network.walks.layer_roots import Group
from curvops.network.walks.passes import BatchMap, Passes
from curvops.network.walks.source import Source, source_of
from curvops.operators.linearized.gradients import Gradients
from curvops.operators.linearized.jacobian import Jacobian
from curvops.progress import Progress


class Linearization:
    """f(x, θ) ≈ f(x, θ*) + J(x)(θ − θ*) around a snapshot θ* of the network, made by `co.linearize`.

    Training the network further changes nothing here. Sums run over the data, never means. `output_shape` is that of
    a point's outputs: (C,), or (T, C) for sequences, whose outputs are rows (n, T·C) everywhere, position by position.
    """

    def __init__(
        self,
        model: Model,
        data: Batches | AbsentBatches,
        likelihood: Likelihood,
        output_shape: torch.Size,
        engine: EngineChoice,
        memory_budget: int | Budget,
        progress: Progress = None,
        token: str | None = None,
        engines: Engines | None = None,
    ) -> None:
        self.model, self.data, self.likelihood = model, data, likelihood
        self.output_shape, self.engine = output_shape, engine
        few, points = (data.few, 0) if isinstance(data, AbsentBatches) else (None, data.num_data)
        self.passes = Passes(model, _Labelled(data), engine, memory_budget, engines, points, progress, few)
        self._theta = model.theta
        self.token = uuid4().hex if token is None else token  # of a likelihood that cannot be fingerprinted
        self._gradient_rows: dict[bool, tuple[list[Tensor], Passes]] = {}
        self._log_likelihood: tuple[list[Tensor], Tensor] | None = None  # at these hyperparameters

    @property
    def theta(self) -> Float[Tensor, " D"]:
        """The selected parameters as one vector."""
        return self._theta

    @property
    def tangent_space(self) -> TangentSpace:
        """Which parameters, at which values: operators of different ones are refused in a sum."""
        return self.model.tangent_space

    @property
    def source(self) -> Source:
        """Which data and likelihood, at its present hyperparameters, by fingerprints."""
        return source_of(self.data, self.likelihood, self.token)

    @property
    def sources(self) -> Sources:
        """The data of operators made of this linearisation, counted once."""
        return Sources({self.source: 1.0})

    @property
    def memory_budget(self) -> int:
        """Bytes for the engines kept between products and the vectors of algorithms, together."""
        return self.memory.budget

    @property
    def memory(self) -> Budget:
        """The memory budget, and who holds how much of it: engines, and vectors of algorithms that are running."""
        return self.passes.memory

    @property
    def num_parameters(self) -> int:
        """The number D of selected parameters."""
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
        """The plan of engines and its reasons: engine per layer, bytes, expected gradients per product."""
        return self.passes.plan

    def jacobian(self, x: Any = None, differentiable: bool = False) -> Jacobian:
        """J as an operator (n·C, D), rows point by point (n·C + c); at the training inputs where x is None.

        With `differentiable` its products, and what posteriors make of them, have gradients in those of the inputs that
        require one (never in θ): first derivatives, by differentiating backward passes.

        Raises as `linearize` does for inputs that are not finite or of another form, and ValueError for inputs
        that require a gradient which is not asked for or which J does not have (a custom `autograd.Function`, an
        operation without a second derivative).
        """
        check_flag("differentiable", differentiable)
        if x is None:
            if differentiable:
                raise ValueError("differentiable=True is for inputs that are given: pass x.")
            return Jacobian(self.theta, passes=self.passes, rows=self.num_data * self.num_outputs)
        # Copies: it is lazy, and a later change of x must not change half of a predictive.
        given, walk = copy(self.admitted(x, differentiable)), self.passes
        wanted = dict(self._differentiated(given)) if num_points(given) else {}
        if wanted:
            require_input_gradients(walk.engines, given)
        inputs, step = replaced(given, {}), max(self.data.sizes)
        parts = [(take(inputs, slice(i, i + step)), None) for i in range(0, num_points(inputs), step)]
        passes = Passes(self.model, parts, self.engine, self.memory, walk.engines, progress=walk.progress)
        rows = num_points(inputs) * self.num_outputs
        if not wanted:
            return Jacobian(self.theta, passes=passes, rows=rows)
        return Jacobian(self.theta, *wanted.values(), passes=passes, rows=rows, inputs=inputs, names=tuple(wanted))

    def predict(self, x: Any, weights: Float[Tensor, " D"] | None = None) -> Float[Tensor, "n C"]:
        """f(x, θ*), the network's outputs at its snapshot, each position of a point as one, (n·T, C). One forward pass.

        With `weights`, such as a draw of a posterior, the network itself at these; those outside a subnetwork keep
        their values. Inputs that require a gradient get one. Raises as `jacobian` does, and ValueError unless the
        weights are one vector (D,).
        """
        inputs, step = self.admitted(x, differentiable=True), max(self.data.sizes)
        values = self.model.values if weights is None else self.unflatten_weights(weights)
        if num_points(inputs) and any(True for _ in self._differentiated(inputs)):
            constants = {name: value.detach() for name, value in values.items()}
            return outputs_at(self.model, copy(inputs), constants).reshape(-1, self.output_shape[-1])
        with torch.no_grad():
            parts = [self.model(values, take(inputs, slice(i, i + step))) for i in range(0, num_points(inputs), step)]
        return torch.cat([self.theta.new_zeros(0, self.num_outputs), *parts]).reshape(-1, self.output_shape[-1])

    def admitted(self, x: Any, differentiable: bool = False) -> Inputs:
        """Inputs where the weights are, once the model was seen to take such; raises as `jacobian` does."""
        inputs = as_inputs(x, self.theta.device, self.theta.dtype)
        for name, _ in () if differentiable else self._differentiated(inputs):
            raise ValueError(
                f"{name} requires a gradient, which is not asked for here and would be taken for zero: use "
                "lin.jacobian(x, differentiable=True), lin.predict(x) or a posterior's predictions, pass x.detach(), "
                "or call this under torch.no_grad()."
            )
        self.model.admit(inputs)
        return inputs

    def _differentiated(self, inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
        """Yield the inputs that require a gradient while gradients are recorded."""
        return ((name, tensor) for name, tensor in components(inputs) if recorded((tensor,)))

    def outputs(self) -> Float[Tensor, "N C"]:
        """f(θ*) at the training inputs, each position of a point as one, (N·T, C). One forward pass."""
        return self.passes.rows(lambda _, J: J.outputs.unsqueeze(0), 0).reshape(-1, self.output_shape[-1])

    def log_likelihood(self) -> Float[Tensor, ""]:
        """Σ_n log p(y_n | f(x_n, θ*)) in nats. One forward pass; under no_grad none after KFAC or a diagonal was made.

        (A likelihood that is a function may hold tensors of its own that want a gradient.)
        """
        if self._log_likelihood is not None and not torch.is_grad_enabled():
            at, known = self._log_likelihood
            if all(map(torch.equal, at, self.likelihood.hyperparameters)):  # they may change in place, as in training
                return known.clone()
        return self.sum_over_batches(
            lambda batch, J: self.likelihood.log_prob(J.outputs, batch.targets, batch.weights).sum(), 0
        )

    def gradient(self) -> Float[Tensor, " D"]:
        """Gradient of the negative log-likelihood (a sum over the data), Jᵀr. One gradient."""

        def term(batch: Batch, J: BatchMap) -> Tensor:
            return J.pull(self.likelihood.residual(J.outputs, batch.targets, batch.weights).unsqueeze(0))

        return self.sum_over_batches(term, 1).squeeze(1)

    def gradients(self, per_token: bool = False) -> Gradients:
        """The gradient of each point's negative log-likelihood as the rows of an operator (N, D); see `Gradients`.

        With `per_token` those of the tokens of sequences, (N·T, D). Raises TypeError for anything but True or False.
        """
        check_flag("per_token", per_token, "For points other than the training points linearise there.")
        return Gradients(self.theta, *self.likelihood.hyperparameters, lin=self, per_token=per_token)

    def positions_apart(self, per_token: bool) -> int:
        """T where the tokens of a sequence are to count one by one, else 1."""
        return self.output_shape[0] if per_token and len(self.output_shape) == 2 else 1

    def gradient_rows(self, likelihood: Likelihood, per_token: bool = False) -> Passes | None:
        """The walk over the points' own gradients J_nᵀ r_n, or those of their tokens; one for all who ask.

        r is kept as a constant: None where a gradient for the likelihood's hyperparameters is recorded.
        """
        tensors = likelihood.hyperparameters
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return None
        present = [tensor.detach() for tensor in tensors]
        with self.model.lock:
            held = self._gradient_rows.get(per_token)
            if held is None or not all(map(torch.equal, held[0], present)):  # they may change in place, as in training
                values = [tensor.clone() for tensor in present]
                fisher = Empirical(likelihood.with_hyperparameters(values), self.positions_apart(per_token))
                held = self._gradient_rows[per_token] = values, self.passes.reduced(fisher)
            return held[1]

    def sum_over_batches(self, term: Callable[[Batch, BatchMap], Tensor], columns: int) -> Tensor:
        """Σ over batches of `term(batch, J of the batch)`, for a product with `columns` vectors."""
        return self.passes.total(term, columns)

    def root_pieces(
        self, fisher: OutputFisher, chunk: int, apart: bool = False, first: int = 0
    ) -> Iterator[tuple[int, Iterator[Group]]]:
        """Yield the root pieces of `passes`; a walk over all data also computes the log-likelihood."""
        at, found, count = [tensor.detach().clone() for tensor in self.likelihood.hyperparameters], [], 0

        @torch.no_grad()
        def score(f: Tensor, batch: Batch) -> None:
            nonlocal count
            found.append(self.likelihood.log_prob(f, batch.targets, batch.weights).sum())
            count += batch.num_points

        yield from self.passes.root_pieces(fisher, chunk, apart, first, score)
        if count == self.num_data:
            self._log_likelihood = at, self.passes.add_up(found)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Float[Tensor, " D"]:
        """Named tensors as one vector, in the order of the selection."""
        return self.model.selection.flatten(tensors)

    def unflatten(self, vector: Float[Tensor, " D"]) -> dict[str, Tensor]:
        """One vector as named tensors, the inverse of `flatten`, where whole tensors were selected.

        Raises ValueError for a subnetwork, whose vector lacks the entries outside it, and names the alternatives,
        `unflatten_weights` and `unflatten_tangent`.
        """
        if self.model.selection.index is not None:
            raise ValueError(
                "a subnetwork's vector does not hold all entries of its tensors: unflatten_weights(vector) takes the "
                "others from the snapshot (for a draw, to be loaded into the model), unflatten_tangent(vector) takes "
                "zeros (for a step, gradient or product)."
            )
        return self.unflatten_tangent(vector)

    def unflatten_weights(self, weights: Float[Tensor, " D"]) -> dict[str, Tensor]:
        """Weights, such as a draw of a posterior, as named tensors; entries outside a subnetwork are the snapshot's.

        `model.load_state_dict(lin.unflatten_weights(draw), strict=False)` puts a draw into the model. Raises ValueError
        unless it is one vector (D,).
        """
        return self.model.unflatten(self._one_vector(weights))

    def unflatten_tangent(self, vector: Float[Tensor, " D"]) -> dict[str, Tensor]:
        """A step, gradient or product as named tensors; entries outside a subnetwork are zero.

        Raises ValueError unless it is one vector (D,).
        """
        return self.model.selection.unflatten(self._one_vector(vector))

    def _one_vector(self, vector: Tensor) -> Tensor:
        if vector.shape != (self.num_parameters,):
            raise ValueError(
                f"expected one vector ({self.num_parameters},), got {tuple(vector.shape)}; of several, as "
                "post.sample(k) gives them, take one at a time."
            )
        return vector

    def with_likelihood(self, likelihood: Likelihood) -> Linearization:
        """Return a copy with another likelihood of the same targets, unchecked; it shares engines for J."""
        new = copy_object(self)
        new.likelihood, new._gradient_rows = likelihood.snapshot(), {}
        new._log_likelihood = None
        return new

    def cast(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Linearization:
        """A new linearisation with parameters, buffers and data converted. Costs two passes over the data."""
        likelihood = self.likelihood.to(device=device, dtype=dtype)
        data, model = self.data.to(device=device, dtype=dtype), self.model.cast(dtype, device)
        memory, progress = self.memory.on(device), self.passes.progress
        return Linearization(model, data, likelihood, self.output_shape, self.engine, memory, progress, self.token)

    def __repr__(self) -> str:
        return (
            f"Linearization(num_parameters={self.num_parameters:,}, num_data={self.num_data:,}, "
            f"num_outputs={self.num_outputs}, {self.theta.dtype}, {self.theta.device})"
        )


class _Labelled:
    """The training data as (inputs, batch without its inputs): what a cached engine needs of a batch is small."""

    def __init__(self, data: Batches | AbsentBatches) -> None:
        self._data = data

    def __iter__(self) -> Any:
        start = 0
        for batch in self._data:
            # Clones: what is kept of a batch must not change with the user's tensors.
            weights = None if batch.weights is None else batch.weights.clone()
            yield batch.inputs, Batch((), batch.targets.clone(), weights, start)
            start += batch.num_points
