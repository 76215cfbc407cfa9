"""Making a linearisation: model, data and likelihood are checked against each other here, once."""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from curvops.checks import check_choice, check_flag, check_limits
from curvops.network.data.batches import as_batches, as_source, parts_of
from curvops.network.data.inputs import Inputs, move, move_tensor, normalise, num_points, take
from curvops.network.data.layout import Layout
from curvops.network.data.randomness import items, own_randomness
from curvops.network.engines.engine import Engines
from curvops.network.engines.plan import EngineChoice
from curvops.network.likelihoods import FromLoss, Sequences, as_likelihood
from curvops.network.likelihoods.likelihood import Likelihood
from curvops.network.likelihoods.torch_losses import reading_of, require_same_loss
from curvops.network.model.last_layer import last_layer
from curvops.network.model.model import Model
from curvops.network.walks.budget import Budget, default_budget
from curvops.operators.linearized.linearization import Linearization
from curvops.progress import Progress, check_progress


class NoCurvature(UserWarning):
    """The likelihood of a target does not depend on the outputs, so that every curvature is zero."""


def linearize(
    model: Any,
    data: Any,
    likelihood: Any,
    parameters: Any = None,
    memory_budget: int | None = None,
    *,
    engine: EngineChoice = "auto",
    weights: Any = False,
    progress: Progress = None,
) -> Linearization:
    """Linearise a network at its present weights.

    Args:
        model: an `nn.Module`, or a pair (function(params, inputs) -> outputs, mapping of parameters). Outputs are
            (N, C), or (N, ..., C) where a point has several positions (tokens of a sequence, pixels of an image):
            targets are then (N, ...) or (N, ..., m), and positions are left out by ignore_index or by zeros in weights
            (N, ...).
        data: tensors or NumPy arrays (X, y), a Dataset, a DataLoader (one that shuffles is read in the order of its
            dataset, each point once) or any iterable of (inputs, targets) that can be read again; inputs may be a
            tensor, a tuple or a mapping. Floating data are cast to the parameters' dtype. Each item may be a mapping
            instead: {"inputs": ..., "targets": ..., "weights": ...}, or a batch of Hugging Face's, whose "labels" are
            the targets and everything else the inputs. Weights, (N,) or one per position, multiply log-likelihoods.
        likelihood: one of `co.likelihoods` (`Categorical(...)`, `Gaussian(noise=variance)`, `Bernoulli(...)`,
            `Poisson()`, `HeteroscedasticGaussian()`); `nn.CrossEntropyLoss(...)`, `nn.BCEWithLogitsLoss(...)`,
            `nn.PoissonNLLLoss()` or `nn.MSELoss()`; a function from outputs to a `torch.distributions.Distribution`;
            "classification" or "regression"; or any other loss, a function of (outputs, targets) that returns one a
            point, or a module such as `nn.HuberLoss()` (see `co.likelihoods.FromLoss`). A loss of torch takes outputs
            and targets in its own layout: `nn.CrossEntropyLoss` has the C classes at dimension 1, all others have the
            outputs last. Its `reduction` is not used, since likelihoods are sums. The gradient of a loss that is read
            as one of `co.likelihoods` is compared with that likelihood's on the first points.
        parameters: None (all that require a gradient), "last_layer" (the one in whose output the model's is linear,
            found by running it), a glob or a list of globs over names, a predicate (name, tensor) -> bool, or positions
            (indices or a mask) in the flat vector of all parameters: a subnetwork.
        memory_budget: bytes for the linearisations kept between products and for the working vectors of algorithms on
            the operators made from this (solvers, bases, sketches, predictions) that are given no budget of their own.
            None is a quarter of the memory free on the device at the call. Where both want more, each gets half. An
            algorithm always gets the least that it needs, about a dozen vectors, and its results come on top.
        engine: "auto" leaves the choice to the cost rule of `lin.plan`; "autodiff" and "layerwise" force one;
            "streamed" is autodiff that keeps nothing between products (within one, a push and a pull share a pass
            where the budget allows it). Results are the same: layer by layer, rows and factors come from layer rules.
        weights: True says that the third item of a batch holds weights; without it a third item is refused.
        progress: for passes over the data, and for algorithms on the operators made from this that are not told
            otherwise. None shows a bar after two seconds where standard error is a terminal, False never, True always;
            a function is called with (what, points or products done, how many in all or None) after each batch and each
            product.

    Returns:
        A `Linearization`. The model's inputs and torch's random state are left as they were. Weights, buffers, the
        likelihood's tensors and positions are copied: changing them afterwards changes nothing here. A noise that
        requires a gradient is being learned, and is followed as far as the curvature can; a posterior whose curvature
        cannot says so. Tensors inside a function of one's own are not copied; neither are data, which must stay as
        they are (a pass over changed data raises `DataChanged`).

    Raises:
        TypeError: an argument of another kind than those above.
        ValueError: empty, one-shot or non-finite data, targets that do not suit the likelihood, a module in train mode
            that is random or depends on its batch, outputs that are not (N, C) or (N, ..., C), or a selection that
            matches nothing or mixes dtypes. The message says what to do.

    Warns with `NoCurvature` where every curvature is zero under the likelihood. Costs one pass over the data and a few
    passes over two points, about twenty for the first network of its structure: what is proven of its derivatives then
    is not proven again.
    """
    check_choice("engine", engine, get_args(EngineChoice))
    check_progress(progress)
    check_limits(memory_budget=memory_budget)
    check_flag("weights", weights, "Give them with the data: (X, y, w) and weights=True.")
    by_running = isinstance(parameters, str) and parameters == "last_layer"
    network = Model(model, None if by_running else parameters)
    if by_running:
        first, _, network.calls.mapping_type = first_points(data, network.theta, weights)
        network = Model(model, parameters, last_layer(network, first))
    theta = network.theta
    budget = default_budget(theta.device) if memory_budget is None else memory_budget
    few, first_targets, kind = first_points(data, theta, weights)
    network.calls.mapping_type = kind
    reading = reading_of(likelihood)
    if reading is None:
        layout, outputs = checked_layout(network, few)
    else:
        layout, outputs = checked_layout(network, few, reading.class_dim, numbers=not reading.indices)
    given = as_likelihood(likelihood, layout.shape).snapshot(theta.device, theta.dtype)
    probability, layout = at_positions(given, layout)
    memory = Budget(budget, theta.device)
    engines = Engines(network, few, engine, memory.budget)  # the probe belongs to this call, not to the first product
    step = max(1, budget // (8 * max(1, engines.plan.routes.saved_bytes)))
    check = partial(probability.check_targets, num_outputs=layout.output_shape.numel())
    batches = as_batches(data, step, theta.device, theta.dtype, check, layout, weights, network.admit)
    _check_scores(network, probability, outputs, first_targets, likelihood if reading else None)
    shape = output_shape(probability, layout)
    return Linearization(network, batches, probability, shape, engine, memory, progress, engines=engines)


def at_positions(likelihood: Likelihood, layout: Layout) -> tuple[Likelihood, Layout]:
    """The likelihood of all positions of a point, and the layout, which may learn of them from it.

    Raises ValueError where they disagree.
    """
    if layout.positions:
        return _over_positions(likelihood, layout), layout
    if isinstance(likelihood, Sequences):
        return likelihood, dataclasses.replace(layout, positions_in_rows=likelihood.positions)
    if likelihood.positions is not None:
        raise ValueError(f"{likelihood} is for {likelihood.positions} positions a point; the model returns one.")
    return likelihood, layout


def output_shape(likelihood: Likelihood, layout: Layout) -> torch.Size:
    """(C,) or (T, C): a likelihood of sequences has positions where the model returns rows (N, T·C), too."""
    return likelihood.output_shape if isinstance(likelihood, Sequences) else layout.output_shape


def _over_positions(likelihood: Likelihood, layout: Layout) -> Sequences:
    """The likelihood of all positions of a point, unless it is one already."""
    if not isinstance(likelihood, Sequences):
        return Sequences(likelihood, *layout.output_shape)
    if likelihood.output_shape != layout.output_shape:
        shape = ", ".join(str(length) for length in layout.shape)
        raise ValueError(f"the model returns (N, {shape}), not the outputs of {likelihood}.")
    return likelihood


def first_points(data: Any, theta: Tensor, weights: bool) -> tuple[Inputs, Any, type]:
    """The inputs of the first two points, their targets as they are given, and the type of mappings."""
    source = as_source(data, 2, weights)
    for item in items(source, theta.device):
        try:
            given, targets, _ = parts_of(item, weights)
        except TypeError:
            break
        inputs, kind = normalise(given), getattr(source, "mapping_type", type(given))
        if num_points(inputs) > 0:
            return move(take(inputs, slice(0, 2)), theta.device, theta.dtype), targets, kind
    as_batches(data, 1, weights=weights)  # says what is wrong with the data
    raise ValueError("the data hold no points.")


def _check_scores(
    model: Model, likelihood: Likelihood, outputs: Tensor, targets: Tensor, loss: nn.Module | None
) -> None:
    """Score the outputs at the first points: errors which need them and targets together are raised at the call.

    Raises ValueError where it was given as a loss of torch that computes something else.
    """
    assert model.layout is not None
    y = move_tensor(targets[: len(outputs)], model.theta.device, model.theta.dtype)
    f, rows = model.layout.rows(outputs).to(model.theta.dtype), model.layout.targets(y)
    likelihood.check_scores(f, rows)
    _warn_of_no_curvature(likelihood, f, rows)
    if loss is not None and not isinstance(likelihood.of_position, FromLoss):
        require_same_loss(loss, likelihood, model.layout, outputs, y, f)


def _warn_of_no_curvature(likelihood: Likelihood, f: Tensor, y: Tensor) -> None:
    """Warn where residuals at drawn targets, or H, are zero: at these outputs, at smaller ones, near the targets."""
    if not bool(likelihood.counted(y).any()):
        return  # nothing can be said of points that do not count
    generator = torch.Generator(device=f.device).manual_seed(0)
    noise = torch.randn(f.shape, dtype=f.dtype, device=f.device, generator=generator)
    near = [y + 1e-3 * noise] if y.shape == f.shape and y.is_floating_point() else []
    of_loss = isinstance(likelihood.of_position, FromLoss)
    for g in (f, f / (1 + f.abs().max()), *near):
        try:
            if of_loss:
                slopes = likelihood.hessian_product(g, noise, y)
            else:
                slopes = likelihood.mc_residual(_repeated(g), _repeated(y), None, generator)
        except (TypeError, ValueError, RuntimeError):
            return  # it cannot draw, or is not convex
        if bool(slopes.any()):
            return
    why = "whatever target it draws at the first points, the gradient of log p is zero. The GGN, the Fishers and KFAC"
    if of_loss:
        why = "it is linear in the outputs at the first points. The GGN and KFAC"
    warnings.warn(
        f"{likelihood} has no curvature: {why} will be zero, and a posterior the prior. Use a likelihood that changes "
        "with the outputs, of losses one that curves.",
        NoCurvature,
        stacklevel=4,
    )


def _repeated(x: Tensor, times: int = 8) -> Tensor:
    return torch.cat([x] * times)


def checked_layout(
    model: Model, few: Inputs, class_dim: int = -1, numbers: bool = False
) -> tuple[Layout, Float[Tensor, "n ..."]]:
    """The outputs' layout, as `Model.fix_layout` finds it, and the outputs of these points as the model returns them.

    Raises ValueError where outputs are random or depend on the other points of the batch.
    """
    device = model.theta.device
    with torch.no_grad(), model.differentiating(), torch.no_grad(), own_randomness(device):
        layout, first = model.fix_layout(few, class_dim, numbers)
        state = _random_state(device)
        returned = model.raw(model.values, few)
        drew = not torch.equal(state, _random_state(device))
        outputs = model.rows(returned)
        if outputs.shape[0] != num_points(few):
            raise ValueError(
                f"{num_points(few)} points gave outputs of shape {(len(outputs), *layout.shape)}, expected one row a "
                "point."
            )
        if not bool(outputs.isfinite().all()):
            raise ValueError("the model's outputs hold NaN or Inf; look at its buffers and at the scale of the inputs.")
        # The first pass may prepare what later ones find, and runs through other calls: it can agree, but not differ.
        times = 17 if drew else 0 if torch.equal(first, returned) else 1
        if not all(torch.equal(outputs, model(model.values, few)) for _ in range(times)):
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
    return layout, returned


def _random_state(device: torch.device) -> Tensor:
    """The state of the device's default generator, as bytes."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
