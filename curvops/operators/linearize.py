"""May this model be linearised with these data under this likelihood? All that can be wrong is found here, once."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from curvops.network.autodiff import saved_bytes
from curvops.network.data import as_batches, as_source
from curvops.network.inputs import Inputs, move, move_tensor, normalise, num_points, take
from curvops.network.layout import Layout
from curvops.network.likelihood import Likelihood
from curvops.network.likelihoods import Sequences, as_likelihood
from curvops.network.memory import Memory, default_budget
from curvops.network.model import Model
from curvops.network.plan import Choice
from curvops.network.torch_losses import Reading, reading_of, require_same_loss
from curvops.operators.linearization import Linearization


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
        or (N, ..., C) where a point has several positions (a sequence's tokens, an image's pixels): then targets are
        (N, ...) or (N, ..., m), and positions are left out by ignore_index or by weights (N, ...) of zeros.
    data: (X, y) tensors, a Dataset, a DataLoader or any re-iterable of (inputs, targets[, weights]); inputs may be a
        tensor, a tuple or a mapping. Floating data are cast to the parameters' dtype.
    likelihood: of `co.likelihoods`, `Categorical(...)`, `Gaussian(noise=variance)`, `Bernoulli(...)`, `Poisson()`,
        `HeteroscedasticGaussian()`; `nn.CrossEntropyLoss(...)`, `nn.BCEWithLogitsLoss(...)`, `nn.PoissonNLLLoss()`,
        `nn.MSELoss()`; a function from outputs to a `torch.distributions.Distribution`; "classification" or
        "regression". A loss of torch takes outputs and targets of its own shapes: `nn.CrossEntropyLoss` has the C
        classes at dimension 1, all else has them last. Its `reduction` is not used: likelihoods are sums. Whether its
        gradient is the likelihood's is tried on the first points.
    parameters: None (all that require a gradient), "last_layer", a glob or a list of globs over names, a predicate
        (name, tensor) -> bool, or positions (indices or a mask) in the flat vector: a subnetwork.
    memory_budget: bytes for cached linearisations and, beside them, the working vectors of every algorithm on the
        operators made from this (solvers, bases, sketches, predictions), where it is given no budget of its own; None
        is a quarter of the memory free on the device now. Where both want more, each has half. An algorithm takes what
        it needs at least, about a dozen vectors, and results that were asked for come on top.
    engine: "auto" lets the cost rule of `lin.plan` choose; "autodiff" and "layerwise" force one; "streamed" is autodiff
        that keeps nothing between products (within one, a push and a pull share a pass where the budget holds it).

    Costs one pass over the data and a few passes over two points. Raises TypeError or ValueError, naming what to do,
    for empty, one-shot or non-finite data, targets that do not suit the likelihood, a module in train mode that is
    random or depends on its batch, outputs that are not (N, C) or (N, ..., C), a selection that matches nothing or
    mixes dtypes.
    """
    if engine not in get_args(Choice):
        raise ValueError(f"engine={engine!r}; expected 'auto', 'streamed', 'autodiff' or 'layerwise'.")
    if memory_budget is not None and memory_budget < 0:
        raise ValueError(f"memory_budget={memory_budget} must be a number of bytes, at least 0.")
    network = Model(model, parameters)
    theta = network.theta
    budget = default_budget(theta.device) if memory_budget is None else memory_budget
    few, first_targets = _first_points(data, theta)
    reading = reading_of(likelihood)
    layout = _check_outputs(network, few, reading)
    probability = as_likelihood(likelihood, layout.shape).to(device=theta.device, dtype=theta.dtype)
    if layout.positions:
        probability = _over_positions(probability, layout)
    elif isinstance(probability, Sequences):
        layout = dataclasses.replace(layout, positions_in_rows=probability.positions)
    elif probability.positions is not None:
        raise ValueError(f"{probability} is for {probability.positions} positions a point; the model returns one.")
    step = max(1, budget // (8 * max(1, saved_bytes(network, few) // num_points(few))))
    check = partial(probability.check_targets, num_outputs=layout.output_shape.numel())
    batches = as_batches(data, step, theta.device, theta.dtype, check, layout)
    _check_scores(network, probability, few, first_targets, likelihood if reading else None)
    # A likelihood given as one of sequences has positions where the model returns rows (N, T·C), too.
    output_shape = probability.output_shape if isinstance(probability, Sequences) else layout.output_shape
    lin = Linearization(network, batches, probability, output_shape, engine, Memory(budget, theta.device))
    _ = lin.plan  # the probe is part of the door, not of the first product
    return lin


def _over_positions(likelihood: Likelihood, layout: Layout) -> Sequences:
    """The likelihood of all positions of a point, unless it is one already."""
    if not isinstance(likelihood, Sequences):
        return Sequences(likelihood, *layout.output_shape)
    if likelihood.output_shape != layout.output_shape:
        shape = ", ".join(str(length) for length in layout.shape)
        raise ValueError(f"the model returns (N, {shape}), not the outputs of {likelihood}.")
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


def _check_scores(model: Model, likelihood: Likelihood, few: Inputs, targets: Tensor, loss: nn.Module | None) -> None:
    """Score the first points: what a likelihood can say only when it sees outputs and targets together, it says now.

    Raises ValueError where it was given as a loss of torch that computes something else.
    """
    assert model.layout is not None
    y = move_tensor(targets[: num_points(few)], model.theta.device, model.theta.dtype)
    with torch.no_grad():
        outputs = model.raw(model.values, few)
    f = model.layout.rows(outputs).to(model.theta.dtype)
    likelihood.log_prob(f, model.layout.targets(y))
    if loss is not None:
        require_same_loss(loss, likelihood, model.layout, outputs, y, f)


def _check_outputs(model: Model, few: Inputs, reading: Reading | None) -> Layout:
    """Their layout; raises ValueError where outputs are random or depend on the other points of the batch."""
    with torch.no_grad(), model.differentiating(), torch.no_grad():
        if reading is None:
            layout = model.fix_layout(few)
        else:
            layout = model.fix_layout(few, reading.class_dim, numbers=not reading.indices)
        outputs = model(model.values, few)
        state = _random_state(outputs.device)
        again = model(model.values, few)
        drew = not torch.equal(state, _random_state(outputs.device))
        if outputs.shape[0] != num_points(few):
            raise ValueError(
                f"{num_points(few)} points gave outputs of shape {(len(outputs), *layout.shape)}, expected one row a "
                "point."
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
    return layout


def _random_state(device: torch.device) -> Tensor:
    """The state of the device's default generator, as bytes."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
