"""A trained network, linearised at its weights: the one object that every network operator is built from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.network.autodiff import saved_bytes
from curvops.network.data import Batch, Batches, as_batches, as_source
from curvops.network.inputs import Inputs, as_inputs, copy, move, move_tensor, normalise, num_points, take
from curvops.network.likelihood import Likelihood
from curvops.network.likelihoods import Sequences, as_likelihood
from curvops.network.memory import default_budget
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


def linearize(
    model: Any,
    data: Any,
    likelihood: Any,
    parameters: Any = None,
    memory_budget: int | None = None,
    *,
    engine: Choice = "auto",
) -> Linearization:
    """Linearise a network at its present weights.

    model: an `nn.Module`, or a pair (function(params, inputs) -> outputs, mapping of parameters). Outputs are (N, C),
        or (N, T, C) for sequences of one length T: then targets are (N, T) or (N, T, ...), and positions are left out
        by ignore_index or by weights (N, T) of zeros.
    data: (X, y) tensors, a Dataset, a DataLoader or any re-iterable of (inputs, targets[, weights]); inputs may be a
        tensor, a tuple or a mapping. Floating data are cast to the parameters' dtype.
    likelihood: of `co.likelihoods`, `Categorical(...)`, `Gaussian(noise=variance)`, `Bernoulli(...)`, `Poisson()`,
        `HeteroscedasticGaussian()`; `nn.CrossEntropyLoss(...)`, `nn.BCEWithLogitsLoss(...)`, `nn.PoissonNLLLoss()`,
        `nn.MSELoss()`; a function from outputs to a `torch.distributions.Distribution`; "classification" or
        "regression".
    parameters: None (all that require a gradient), "last_layer", a glob or a list of globs over names, a predicate
        (name, tensor) -> bool, or positions (indices or a mask) in the flat vector: a subnetwork.
    memory_budget: bytes for cached linearisations; None is a quarter of the memory free on the device now.
    engine: "auto" lets the cost rule of `lin.plan` choose; "autodiff" and "layerwise" force one; "streamed" is autodiff
        that keeps nothing between products (within one, a push and a pull share a pass where the budget holds it).

    Costs one pass over the data and a few passes over two points. Raises TypeError or ValueError, naming what to do,
    for empty, one-shot or non-finite data, targets that do not suit the likelihood, a module in train mode that is
    random or depends on its batch, outputs that are not (N, C) or (N, T, C), a selection that matches nothing or mixes
    dtypes.
    """
    if engine not in get_args(Choice):
        raise ValueError(f"engine={engine!r}; expected 'auto', 'streamed', 'autodiff' or 'layerwise'.")
    if memory_budget is not None and memory_budget < 0:
        raise ValueError(f"memory_budget={memory_budget} must be a number of bytes, at least 0.")
    network = Model(model, parameters)
    theta = network.theta
    budget = default_budget(theta.device) if memory_budget is None else memory_budget
    probability = as_likelihood(likelihood).to(device=theta.device, dtype=theta.dtype)
    few, first_targets = _first_points(data, theta)
    output_shape = _check_outputs(network, few)
    if len(output_shape) == 2:
        probability = _over_positions(probability, output_shape)
    positions = probability.positions if isinstance(probability, Sequences) else None
    step = max(1, budget // (8 * max(1, saved_bytes(network, few) // num_points(few))))
    check = partial(probability.check_targets, num_outputs=output_shape.numel())
    batches = as_batches(data, step, theta.device, theta.dtype, check, positions)
    _check_scores(network, probability, few, first_targets)
    if isinstance(probability, Sequences):
        output_shape = probability.output_shape  # of rows (N, T·C) too, where the likelihood is given as sequences
    lin = Linearization(network, batches, probability, output_shape, engine, budget)
    _ = lin.plan  # the probe is part of the door, not of the first product
    return lin


def _over_positions(likelihood: Likelihood, output_shape: torch.Size) -> Sequences:
    """The likelihood of sequences of outputs (T, C), unless it is one already."""
    if not isinstance(likelihood, Sequences):
        return Sequences(likelihood, *output_shape)
    if likelihood.output_shape != output_shape:
        raise ValueError(
            f"the model returns (N, {output_shape[0]}, {output_shape[1]}), not the outputs of {likelihood}."
        )
    return likelihood


def _first_points(data: Any, theta: Tensor) -> tuple[Inputs, Any]:
    """The inputs of the first two points, and their targets as they are given."""
    for item in as_source(data, 2):
        if not isinstance(item, tuple | list) or len(item) not in (2, 3):
            break
        inputs = normalise(item[0])
        if num_points(inputs) > 0:
            return move(take(inputs, slice(0, 2)), theta.device, theta.dtype), item[1]
    as_batches(data, 1)  # says what is wrong with the data
    raise ValueError("the data hold no points.")


def _check_scores(model: Model, likelihood: Likelihood, few: Inputs, targets: Tensor) -> None:
    """Score the first points: what a likelihood can say only when it sees outputs and targets together, it says now."""
    y = move_tensor(targets[: num_points(few)], model.theta.device, model.theta.dtype)
    with torch.no_grad():
        likelihood.log_prob(model(model.values, few), y)


def _check_outputs(model: Model, few: Inputs) -> torch.Size:
    """(C,) or (T, C); raises ValueError where outputs are random or depend on the other points of the batch."""
    with torch.no_grad(), model.differentiating(), torch.no_grad():
        shape = model.fix_output_shape(few)
        outputs = model(model.values, few)
        state = _random_state(outputs.device)
        again = model(model.values, few)
        drew = not torch.equal(state, _random_state(outputs.device))
        if outputs.shape[0] != num_points(few):
            raise ValueError(
                f"{num_points(few)} points gave outputs of shape {(len(outputs), *shape)}, expected one row a point."
            )
        if not bool(outputs.isfinite().all()):
            raise ValueError("the model's outputs hold NaN or Inf; look at its buffers and at the scale of the inputs.")
        more = (model(model.values, few) for _ in range(16 if drew else 0))
        if not all(torch.equal(outputs, repeat) for repeat in (again, *more)):
            raise ValueError("two passes over the same points gave different outputs; call model.eval() first.")
        if drew and model.training:  # a mask of few entries is often the same twice
            raise ValueError("the model is in train mode and draws random numbers; call model.eval() first.")
        try:
            alone = model(model.values, take(few, slice(0, 1)))
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"the model takes {num_points(few)} points but not one alone ({error}); call model.eval(), and let it "
                "take batches of any size."
            ) from error
    slack = model.eps**0.5 * (1 + outputs.abs().max())
    if bool(((outputs[:1] - alone).abs() > slack).any()):
        raise ValueError(
            "a point's outputs depend on the other points of its batch; call model.eval(), or use a normalisation "
            "that sees one point at a time."
        )
    return shape


def _random_state(device: torch.device) -> Tensor:
    """The state of the device's default generator, as bytes."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
