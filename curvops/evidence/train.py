"""Training of weights and hyperparameters in one run, with steps up the evidence (Immer et al. 2021)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.data import Dataset

from curvops.argument_types import Collate, CurvatureChoice, Data, LikelihoodChoice, PriorPrecision
from curvops.checkpoint import digest
from curvops.checks import check_options, refuse
from curvops.errors import MaxStepsWarning, ModeWarning, warn
from curvops.evidence.maximize import maximize
from curvops.network.data.inputs import batch_inputs, holds_all, move, move_tensor, parts_of, sizes_of, value_of
from curvops.network.data.layouts import checked_outputs
from curvops.network.data.point_sources import with_collate
from curvops.network.model.parameters import as_real
from curvops.operators import KFAC, Linearization, linearize
from curvops.posterior.gaussians.laplace import Laplace, make_laplace
from curvops.posterior.gaussians.updating import checked_posterior, tell_choice
from curvops.posterior.linear_mode import TOLERATED, in_words, nats_below_mode
from curvops.posterior.log_evidence import Tuning
from curvops.ranks.process_group import Ranks
from curvops.ranks.shard import ChosenPoints, Shard

Parameters = Iterable[nn.Parameter]


@torch.inference_mode(False)
def train(
    model: nn.Module,
    data: Data,
    likelihood: LikelihoodChoice,
    *,
    epochs: int,
    every: int = 5,
    prior_precision: PriorPrecision = 1.0,
    over: str | Sequence[str] = "layers",
    curvature: CurvatureChoice = KFAC,
    batch_size: int | None = None,
    optimizer: Callable[[Parameters], torch.optim.Optimizer] = torch.optim.Adam,
    steps: int = 3,
    generator: torch.Generator | None = None,
    process_group: ProcessGroup | None = None,
    collate: Collate | None = None,
) -> Laplace:
    """Train a network to a mode of its posterior while the evidence tunes the prior precision and, if asked, the noise.

    The loss of a batch is the mean negative log-likelihood plus ½ θᵀAθ / N. After every few epochs the network is
    linearised, and `maximize` takes a few steps in A (and the noise) at these weights; training continues with the new
    values. No held-out data are needed.

    Args:
        model: the network, trained in place and left in evaluation mode. After an error or an interruption its modules
            have their original modes, and the weights are those reached so far. Parameters that require a gradient
            are trained. Modules in evaluation mode within a model in training mode (such as frozen normalisation
            layers) stay in evaluation mode; a model that is given in evaluation mode is trained as a whole.
        data: all training points, as in `co.linearize`: tensors (X, y), a Dataset, or a DataLoader (or list of
            batches), whose own batches are then used, in their own order.
        likelihood: as in `co.linearize`.
        epochs: the number of passes over the data.
        every: the number of epochs between updates of the hyperparameters, and before the first update.
        prior_precision: A for the first epochs, as in `co.laplace`, of diagonal form; for "scalar" a number.
        over: the hyperparameters to tune, as in `maximize`; "scalar" alone uses its search, the others a few steps.
        curvature: the operator class of the posterior's curvature.
        batch_size: the number of points per step, shuffled anew in each epoch; None uses all points. A DataLoader has
            its own batches.
        optimizer: a function from parameters to their optimiser, such as `lambda p: torch.optim.SGD(p, 0.1)`, without
            weight decay. For weights that are almost trained, `lambda p: torch.optim.LBFGS(p, max_iter=100,
            line_search_fn="strong_wolfe")` reaches a mode in few epochs, on all points at once (`batch_size=None`).
        steps: the number of steps of `maximize` in each update, of at most one nat (a factor e) each.
        generator: the source of the batches and of probes.
        process_group: as in `co.linearize`. The data are then the points of this rank, tensors or a Dataset, and
            minibatches are drawn from the points of all ranks. All ranks take the steps that one process would take,
            with equal models, optimisers and seeds, at one all-reduce per step. Noise in the model (dropout) and batch
            statistics would differ between ranks: with the latter the ranks' models differ, which is an error.
        collate: as in `co.linearize`.

    Returns:
        The posterior at the final weights and hyperparameters; `tuning.steps` are those of all updates, and
        `tuning.ending` says why the last update ended.

    Raises:
        TypeError, ValueError: sample weights, numbers out of range, an optimiser with weight decay, a loss that is not
            finite (a step that is too long), and everything that `co.linearize`, `co.laplace` and `maximize` reject.

    Warns with `co.errors.ModeWarning` if training ended away from a mode.

    Cost: that of training, and for each update a linearisation, the curvature and the shares of the weights.

    Examples:
        >>> optimizer = lambda parameters: torch.optim.LBFGS(parameters, line_search_fn="strong_wolfe")
        >>> post = co.evidence.train(nn.Linear(2, 2), (x, y), "classification", epochs=4, every=2, optimizer=optimizer)
        >>> post.tuning.groups
        ('weight', 'bias')
    """
    check_options(epochs=epochs, every=every, batch_size=batch_size, steps=steps)
    if isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError("optimizer must be a function, such as functools.partial(torch.optim.Adam), got an instance.")
    stepper = optimizer([p for p in model.parameters() if p.requires_grad])
    if any(group.get("weight_decay", 0) for group in stepper.param_groups):
        raise ValueError("the optimiser has a weight decay: leave it out, since prior_precision takes its place.")

    data = data if collate is None else with_collate(data, collate)
    given_modes = [(module, module.training) for module in model.modules()]
    training_modes = given_modes if model.training else [(module, True) for module, _ in given_modes]
    with _restore_on_failure(given_modes):

        def laplace(likelihood: Any, prior_precision: Any) -> Laplace:
            """Return the posterior at the present weights."""
            lin = linearize(model.eval(), data, likelihood, process_group=process_group)
            return checked_posterior(make_laplace(lin, curvature, prior_precision), check_mode=False)

        post, record = laplace(likelihood, prior_precision), list[Tuning]()
        epoch_of = _batches(data, batch_size, generator, post.lin.passes.shard)
        for epoch in range(1, epochs + 1):
            lin = post.lin
            penalties = lin.unflatten_tangent(post.prior_precision.detach().expand_as(lin.theta))
            prior = [(penalties[name], p) for name, p in model.named_parameters() if name in penalties]
            _set(training_modes)
            for item, points in epoch_of():
                stepper.step(partial(_loss_with_gradient, model, lin, prior, item, points, epoch))
            if epoch % every == 0 or epoch == epochs:
                post = tell_choice(laplace(post.lin.likelihood, post.prior_precision), post.prior.chosen_by)
            if epoch % every == 0 and epoch < epochs:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", MaxStepsWarning)  # the next update continues
                    post = maximize(post, over, generator=generator, steps=steps)
                if isinstance(post.tuning, Tuning):
                    record.append(post.tuning)
    if (nats := nats_below_mode(post.terms, TOLERATED)[0]) > TOLERATED:
        warn(
            f"training ended about {in_words(nats)} nats from a mode of the posterior, so that the evidence by which "
            "it chose the hyperparameters is too low by as much. Use more epochs, larger batches or smaller learning "
            "rates; or train on, co.fit_mode(model, data, likelihood, prior_precision). Kinks (ReLU) limit both.",
            ModeWarning,
        )
    if not record:
        return post
    whole = replace(record[-1], steps=tuple(step for tuning in record for step in tuning.steps))
    return replace(post, tuning=whole)


def _loss_with_gradient(
    model: nn.Module,
    lin: Linearization,
    prior: list[tuple[Tensor, nn.Parameter]],
    item: Any,
    points: int | None,
    epoch: int,
) -> float:
    """Return minus the log posterior of a batch, divided by N, and leave its gradient in the parameters.

    An optimiser with a line search calls it several times per step.
    """
    layout, shard, at = lin.model.layout, lin.passes.shard, (lin.theta.device, lin.theta.dtype)
    assert layout is not None
    for _, p in prior:
        p.grad = None
    penalty = torch.stack([(precision * as_real(p).square()).sum() for precision, p in prior]).sum()
    loss = penalty / (2 * lin.num_data * (1 if shard is None else shard.ranks.size))
    batch = None if item is None else parts_of(item, False)
    if batch is not None and max(sizes_of(batch[1])):
        inputs, y = move(batch_inputs(batch[0], batch[1]), *at), move_tensor(layout.targets(batch[1]), *at)
        arguments, named = lin.model.calls.arguments(value_of(inputs))
        outputs = checked_outputs(model(*arguments, **named), layout)
        fit = lin.likelihood.log_prob(layout.rows(outputs), y)
        loss = loss - fit.sum() / (len(fit) if points is None else points)
    loss.backward()
    loss = loss.detach() if shard is None else _add_up(loss.detach(), [p for _, p in prior], shard.ranks)
    if not math.isfinite(value := float(loss)):
        raise ValueError(f"the loss is not finite in epoch {epoch}: use a smaller learning rate.")
    return value


Modes = list[tuple[nn.Module, bool]]
"""The modules, parents first, each with its training flag."""


def _set(modes: Modes) -> None:
    for module, training in modes:  # parents first, because each call also sets the modules below
        module.train(training)


@contextmanager
def _restore_on_failure(modes: Modes) -> Iterator[None]:
    """Restore these modes after any interruption, including Ctrl-C."""
    try:
        yield
    except BaseException:
        _set(modes)
        raise


def _batches(
    data: Any, batch_size: int | None, generator: torch.Generator | None, shard: Shard | None
) -> Callable[[], Iterable[tuple[Any, int | None]]]:
    """Return a function that yields the batches of an epoch, and the number of points of each on all ranks if known."""
    if isinstance(data, Dataset) or holds_all(data):
        chosen = ChosenPoints.of(data, False, shard)

        def epoch() -> Iterator[tuple[Any, int]]:
            if shard is not None:  # each time: a model that draws from torch's own generator advances it
                state = torch.get_rng_state() if generator is None else generator.get_state()
                shard.ranks.require_equal({"the generator of minibatches": digest([state])})
            return chosen.minibatches(batch_size or chosen.total, generator)

        return epoch
    refuse(batch_size is not None, f"batch_size={batch_size} is given, but the data come in batches: leave it out.")
    refuse(shard is not None, "over a process group pass this rank's points, (X, y) or a Dataset, and batch_size=.")
    return lambda: ((item, None) for item in data)


def _add_up(loss: Tensor, parameters: list[nn.Parameter], ranks: Ranks) -> Tensor:
    """Write the gradients' sums over the ranks into the parameters, and return the sum of their losses. One message."""
    flat = torch.cat([*(p.grad.flatten() for p in parameters if p.grad is not None), loss.reshape(1)])
    *sums, total = ranks.add_up(flat).split([*(p.numel() for p in parameters), 1])
    for p, gradient in zip(parameters, sums):
        p.grad = gradient.view_as(p)
    return total[0]
