"""Checks of the model, the data and the likelihood against each other: at the first points once, and at joined points.

Where a user's function joins points for the model, every batch is tried: the first points do not show all.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from curvops.argument_types import Collate
from curvops.checks import in_functorch
from curvops.errors import MissingLabelsError, NoCurvatureWarning, NoDataError, NotLogitsWarning, warn
from curvops.network.data.batches import Batches, Reading, as_source
from curvops.network.data.inputs import (
    ACCEPTED,
    Inputs,
    first_of,
    holds_all,
    in_pieces,
    is_finite,
    move,
    move_tensor,
    num_points,
    split_batch,
    take,
    value_of,
)
from curvops.network.data.layouts import Layout, Name, NamedLayout, layout_of, part_of
from curvops.network.data.objects import WholeBatch, digest_of
from curvops.network.data.point_sources import LoaderOfPoints, with_collate
from curvops.network.data.randomness import items, own_randomness
from curvops.network.likelihoods import (
    Bernoulli,
    BradleyTerry,
    Categorical,
    FromLoss,
    Gaussian,
    HeteroscedasticGaussian,
    Multitask,
    Poisson,
    Sequences,
    as_likelihood,
)
from curvops.network.likelihoods.by_autograd import ByAutograd, shrunk
from curvops.network.likelihoods.conversions import interpretation_of
from curvops.network.likelihoods.likelihood import ROUNDINGS, Independent, Likelihood
from curvops.network.model.model import Model
from curvops.ranks.process_group import Ranks
from curvops.ranks.shard import Shard

WRONG = "so that curvature, posterior and predictions are not those of your classifier"
LOOKED_AT = 16
"""How many points of a Dataset are looked at, or positions of a point: a text has thousands, over a vocabulary each."""
SCORED = 2**16
"""How many numbers of targets, and of outputs, show whether a function of the user's couples the points of a batch."""
OWN = (Categorical, BradleyTerry, Gaussian, Bernoulli, Poisson, HeteroscedasticGaussian)
"""Likelihoods of the package that can score all targets which pass their checks."""


@dataclasses.dataclass(frozen=True, eq=False)
class FirstPoints:
    """Data whose first points, `inputs` and `targets` (in the user's form, if any), suit a model and a likelihood."""

    data: Any
    inputs: Inputs
    targets: Any
    likelihood: Likelihood
    layout: Layout
    outputs: Float[Tensor, "n ..."]

    @classmethod
    def of(
        cls, model: Model, data: Any, likelihood: Any, weights: bool, collate: Collate | None, ranks: Ranks | None
    ) -> FirstPoints:
        """Try a model and a likelihood on the first points of a user's data; fix the model's layout there."""
        theta = model.theta
        points, few, targets, model.calls.mapping_type = first_points(data, theta, weights, collate, ranks)
        interpreted, layout, outputs = likelihood_at(model, few, likelihood, targets)
        return cls(points, few, targets, interpreted.to(theta.device, theta.dtype), layout, outputs)

    def batches(self, model: Model, step: int, weights: bool, ranks: Ranks | None) -> Batches:
        """Read all data, `step` points at a time where that is free, and check them; of a rank these are its shard."""
        reading = reading_for(model, self.likelihood, self.layout, weights, self.outputs, self.targets is not None)
        source = as_source(self.data, step, weights)
        batches = Batches(source, reading) if ranks is None else Shard(source, reading, ranks)
        if isinstance(batches, Shard):
            batches.require_apart()
        _check_scores(self.likelihood, self.layout, self.outputs, self.targets, model.theta)
        return batches


def likelihood_at(
    model: Model, few: Inputs, spec: Any, targets: Any = None
) -> tuple[Likelihood, Layout, Float[Tensor, "n ..."]]:
    """Interpret a likelihood or a loss at the first points; return it with the outputs' layout and these outputs.

    A mapping or a tuple of them is for several outputs; their targets at some points show in which form they are.
    Raises ValueError or TypeError if the model's outputs, or their positions, do not suit it. Warns with
    `NotLogitsWarning`.
    """
    if (specs := likelihoods_by_name(spec)) is not None:
        return _several_at(model, few, specs, targets)
    interpretation = interpretation_of(spec)
    class_dim = -1 if interpretation is None else interpretation.class_dim
    of_classes = spec == "classification" or isinstance(spec, Categorical)
    numbers = not (of_classes if interpretation is None else interpretation.indices)
    layout, outputs = checked_layout(model, few, partial(layout_of, class_dim=class_dim, numbers=numbers))
    likelihood, layout = at_positions(as_likelihood(spec, layout.shape), layout)
    model.layout = layout  # a noise may have placed the outputs along another dimension
    _warn_of_no_logits(model, likelihood, layout.rows(outputs), outputs.dtype)
    return likelihood, layout, outputs


def likelihoods_by_name(spec: Any) -> dict[Name, Any] | None:
    """Return the likelihoods of several outputs by name; None for a single one."""
    if isinstance(spec, Multitask):
        return dict(spec.likelihoods)
    if isinstance(spec, Mapping):
        return dict(spec)
    return dict(enumerate(spec)) if isinstance(spec, tuple | list) else None


def _several_at(
    model: Model, few: Inputs, specs: dict[Name, Any], targets: Any
) -> tuple[Multitask, NamedLayout, Float[Tensor, "n R"]]:
    """Interpret the likelihoods of several outputs, as `likelihood_at` does for one."""
    if torch.finfo(model.theta.dtype).eps > 1e-4:
        raise ValueError("several outputs in half precision: their targets would be rounded. Use model.float().")

    def layouts(outputs: Any) -> NamedLayout:
        kinds = {name: interpretation_of(spec) for name, spec in specs.items()}
        return NamedLayout.of(
            [layout_of(outputs, -1 if kind is None else kind.class_dim, True, name) for name, kind in kinds.items()]
        )

    first, _ = checked_layout(model, few, layouts)
    assert isinstance(first, NamedLayout)
    placed = {name: at_positions(*pair) for name, pair in _members(specs, first).items()}
    model.layout = layout = NamedLayout.of([member for _, member in placed.values()])
    with model.differentiating(), torch.no_grad():
        outputs = model.raw(model.values, few)
    widths = [member.output_shape.numel() for member in layout.members]
    rows = dict(zip(placed, outputs.split(widths, 1)))
    if targets is None:
        targets = {n: at.in_given_form(member.any_targets(rows[n])) for n, (member, at) in placed.items()}
    model.layout = layout = layout.for_targets(targets)
    likelihood = Multitask({name: member for name, (member, _) in placed.items()}, widths, layout.forms)
    for name, member in likelihood.likelihoods.items():
        _warn_of_no_logits(model, member, rows[name], outputs.dtype)
    return likelihood, layout, outputs


def _members(specs: dict[Name, Any], layout: NamedLayout) -> dict[Name, tuple[Likelihood, Layout]]:
    """Return the likelihood of each output, with its layout."""
    return {
        name: (as_likelihood(spec, member.shape), member) for (name, spec), member in zip(specs.items(), layout.members)
    }


def likelihood_for(spec: Any, layout: Layout) -> Likelihood:
    """Interpret a likelihood or a loss, or those of several outputs by name, for outputs whose layout is known.

    Raises ValueError if the names are not those of the layout.
    """
    if not isinstance(layout, NamedLayout):
        return as_likelihood(spec, layout.shape)
    specs, names = likelihoods_by_name(spec), [member.name for member in layout.members]
    if specs is None or set(specs) != set(names):
        raise ValueError(f"the outputs are {names}: pass a likelihood for each, under these names; given {spec!r}.")
    ordered = {name: specs[name] for name in sorted(specs, key=names.index)}
    members = {name: likelihood for name, (likelihood, _) in _members(ordered, layout).items()}
    return Multitask(members, [member.output_shape.numel() for member in layout.members], layout.forms)


def at_positions(likelihood: Likelihood, layout: Layout) -> tuple[Likelihood, Layout]:
    """Return the likelihood of all positions of a point, and the layout, which may get them from the likelihood.

    A Gaussian noise for each output determines which dimension holds these. Raises ValueError if they disagree.
    """
    if isinstance(likelihood, Multitask) and isinstance(layout, NamedLayout):
        members, layouts = zip(*map(at_positions, likelihood.members, layout.members))
        return likelihood.with_members(members), dataclasses.replace(layout, members=layouts)
    if isinstance(likelihood, Gaussian):
        likelihood, class_dim = likelihood.along(layout.shape)
        layout = layout if class_dim is None else dataclasses.replace(layout, class_dim=class_dim)
    layout = dataclasses.replace(layout, apart=isinstance(likelihood.of_position, Independent))
    if layout.positions and not isinstance(likelihood, Sequences):
        return Sequences(likelihood, *layout.output_shape), layout
    if isinstance(likelihood, Sequences):
        if not layout.positions:
            return likelihood, dataclasses.replace(layout, positions_in_rows=likelihood.positions)
        if likelihood.output_shape != layout.output_shape:
            shape = ", ".join(str(length) for length in layout.shape)
            raise ValueError(f"the model returns (N, {shape}), not the outputs of {likelihood}.")
    elif likelihood.positions is not None:
        raise ValueError(f"{likelihood} needs {likelihood.positions} positions per point; the model returns one.")
    return likelihood, layout


def output_shape(likelihood: Likelihood, layout: Layout) -> torch.Size:
    """Return (C,) or (T, C); a likelihood of sequences has positions even if the model returns rows (N, T·C)."""
    return likelihood.output_shape if isinstance(likelihood, Sequences) else layout.output_shape


def reading_for(
    model: Model,
    likelihood: Likelihood,
    layout: Layout,
    weights: bool,
    outputs: Tensor | None = None,
    labelled: bool = True,
) -> Reading:
    """Return how batches for a model and a likelihood are read.

    With `outputs` of some points, a likelihood that is a function has to score each point of a batch by itself. Raises
    MissingLabelsError if the batches are not `labelled`, and H depends on their labels.
    """
    theta = model.theta
    check = partial(likelihood.check_targets, num_outputs=layout.output_shape.numel())
    if outputs is not None and any(isinstance(member.of_position, ByAutograd) for member in likelihood.members):
        f = layout.rows(outputs).to(theta.dtype)
        check = partial(_check_targets, likelihood, f[: max(1, SCORED // f.shape[1])])
    missing, example = likelihood.of_position.missing is not None, model.calls.example
    reading = Reading(
        theta.device,
        theta.dtype,
        check,
        layout,
        weights,
        missing or isinstance(likelihood, Multitask),  # whose check names the targets
        admit=model.admit if example is None else partial(try_objects, model, in_order=True),
        labelled=labelled,
        whole=isinstance(example, WholeBatch),
    )
    if labelled:
        return reading
    if missing:
        raise MissingLabelsError("which of them count")
    assert outputs is not None
    return dataclasses.replace(reading, any_target=likelihood.any_targets(layout.rows(outputs).to(theta.dtype))[0])


def first_points(
    data: Any, theta: Tensor, weights: bool, collate: Collate | None, ranks: Ranks | None = None
) -> tuple[Any, Inputs, Any, type]:
    """Return the data, the inputs of some points, their targets in the user's form, if any, and the type of mappings.

    The data are those given, as points that `collate` joins if there is one; of a DataLoader whose batches are no
    tensors of points, its single points. The points are the first two, the middle and the last of the first batch (of
    all data in memory). For a shard they are of the first rank that has points, so that all ranks try the model on the
    same ones.
    """
    if collate is not None:
        data = with_collate(data, collate)
    # Of a Dataset some points are fetched, of tensors in memory all are looked at.
    source, reading = as_source(data, sys.maxsize if holds_all(data) else LOOKED_AT, weights), Reading(weights=weights)
    sample: tuple[Inputs, Any, type] | None = None
    for index, item in enumerate(items(source, theta.device)):
        all_inputs, labels, _ = reading.parts(item, index)
        if isinstance(all_inputs, WholeBatch) and (points := LoaderOfPoints.of(data, weights)) is not None:
            return first_points(points, theta, weights, None, ranks)
        if num_points(all_inputs):
            few = few_of(all_inputs)
            kind = getattr(source, "mapping_type", None) or type(split_batch(item, weights)[0])
            inputs = move(take(all_inputs, few), theta.device, theta.dtype)
            sample = inputs, None if labels is None else take(labels, few), kind
            break
    if ranks is not None:
        sample = next((of_rank for of_rank in ranks.gather(sample) if of_rank is not None), None)
    if sample is None:
        whose = "The data are empty: they" if ranks is None else f"the shards of all {ranks.size} ranks"
        raise NoDataError(f"{whose} hold no points. {ACCEPTED}")
    inputs, targets, kind = sample
    return data, move(inputs, theta.device), targets, kind


def few_of(inputs: Inputs) -> Tensor:
    """Return the positions of the first two points, the middle and the last; of a `WholeBatch` those of all."""
    every = range(num_points(inputs))
    if isinstance(inputs, WholeBatch):
        return torch.tensor(every)
    return torch.tensor(sorted({*every[:2], *every[len(every) // 2 :][:1], *every[-1:]}), dtype=torch.long)


def _check_scores(likelihood: Likelihood, layout: Layout, outputs: Tensor, targets: Any, theta: Tensor) -> None:
    """Score the outputs at the first points by a user's function, so that its errors are raised at the call.

    Without targets these are the likelihood's `any_targets`.
    """
    if isinstance(likelihood, Multitask) and isinstance(layout, NamedLayout):
        for member, (name, of_name), rows in zip(
            layout.members, likelihood.likelihoods.items(), outputs.split(likelihood.num_outputs, 1)
        ):
            own_targets = None if targets is None else part_of(targets, name)
            _check_scores(of_name, member, member.restored(rows), own_targets, theta)
        return
    if type(likelihood.of_position) in OWN:
        return
    f = layout.rows(outputs).to(theta.dtype)
    targets = layout.in_given_form(likelihood.any_targets(f)) if targets is None else targets
    y = move_tensor(targets[: len(outputs)], theta.device, theta.dtype)
    rows, labels = f, layout.targets(y)  # raises if these are targets of other positions
    position = likelihood
    if isinstance(likelihood, Sequences) and likelihood.likelihood.positions is None:
        position, step = likelihood.likelihood, max(1, likelihood.positions // LOOKED_AT)
        rows = f.unflatten(1, (likelihood.positions, -1))[:, ::step].flatten(0, 1)
        labels = labels[:, ::step].flatten(0, 1)
    position.log_prob(rows, labels)
    if isinstance(position, FromLoss):
        position.check_scores(rows, labels)
    _warn_of_no_curvature(position, rows, labels)


def _check_targets(likelihood: Likelihood, f: Tensor, y: Tensor) -> None:
    """Raise ValueError if the score of a point changes with the points beside it, or with its place among them.

    Targets from all of a batch are scored, with outputs of any points: classes may be rare, and events censored.
    """
    likelihood.check_targets(y, f.shape[1])
    y = y[:: 1 + max(f.shape[1] * len(y), y.numel()) // SCORED]
    if not (n := len(y)):
        return
    order = torch.arange(n, device=f.device)
    f = f[order % len(f)]
    subsets = [order[:1], order[n // 2 :][:1], order[-1:], order.flip(0), order[::2], order[(n > 1) :: 2]]
    try:
        together, *others = (likelihood.log_prob(f[subset], y[subset].clone()) for subset in [order, *subsets])
    except (TypeError, ValueError, RuntimeError):
        return  # it cannot score other outputs
    eps, finite = torch.finfo(f.dtype).eps, together.isfinite()
    slack = eps**0.5 * together.where(finite, 0).abs().amax() + 8 * eps * (1 + f.abs().amax())
    differ = [finite[subset] & ~((apart - together[subset]).abs() <= slack) for subset, apart in zip(subsets, others)]
    if bool(torch.cat(differ).any()):
        raise ValueError(
            f"{likelihood!r} couples the points of a batch: the loss of a point depends on the other points of its "
            "batch, or on its place among them. Compute class weights and the like once, from all targets"
            + (", and pass y.unsqueeze(-1) for one output: (n,) broadcasts." if y.ndim < f.ndim else ".")
        )


def _warn_of_no_curvature(likelihood: Likelihood, f: Tensor, y: Tensor) -> None:
    """Warn if residuals at drawn targets, or H, are zero: at these outputs, at smaller ones, near the targets."""
    counted = likelihood.counted(y)
    if counted is not None and not bool(counted.any()):
        return  # points that do not count show nothing
    generator = torch.Generator(device=f.device).manual_seed(0)
    noise = torch.randn(f.shape, dtype=f.dtype, device=f.device, generator=generator)
    of_loss, times = isinstance(likelihood, FromLoss), max(1, LOOKED_AT // len(f))
    near_targets = [y + 1e-3 * noise] if y.shape == f.shape and y.is_floating_point() else []
    for g in (f, shrunk(f), *near_targets):
        try:
            if of_loss:
                slopes = likelihood.hessian_product(g, noise, y)
            else:
                slopes = likelihood.mc_residual(torch.cat([g] * times), torch.cat([y] * times), None, generator)
        except (TypeError, ValueError, RuntimeError):
            return  # it cannot draw, or is not convex
        if bool(slopes.any()):
            return
    why = "the gradient of log p is zero for every target drawn at the first points. The GGN, the Fishers and KFAC"
    cure = "or a loss that is curved"
    if of_loss:
        why = "it is linear in the outputs at the first points. The GGN and KFAC"
        cure = "a loss that is curved, or, if outputs are log densities, co.laplace(lin, 'empirical_fisher')"
    warn(
        f"{likelihood} has no curvature: {why} will be zero, and the posterior is the prior. Use a likelihood that "
        f"changes with the outputs, {cure}.",
        NoCurvatureWarning,
    )


def _warn_of_no_logits(model: Model, likelihood: Likelihood, f: Tensor, dtype: torch.dtype) -> None:
    """Warn if the outputs at the first points, computed in `dtype`, are probabilities or their logarithms.

    Equal rows prove nothing: a new head whose bias is the logarithms of the class frequencies has them.
    """
    last, what = "softmax", None
    if isinstance(likelihood.of_position, Categorical):
        C = likelihood.output_shape[-1] if isinstance(likelihood, Sequences) else f.shape[-1]
        if f.shape[-1] % C:
            return  # outputs of another shape are refused later
        rows = f.reshape(-1, C)
        rows = rows[:: max(1, len(rows) // (2 * LOOKED_AT))].double()
        slack = min(ROUNDINGS * torch.finfo(dtype).eps, 1e-2)
        if bool((rows == rows[:1]).all()):
            return
        if bool((rows >= 0).all() & ((rows.sum(-1) - 1).abs() <= slack).all()):
            what = f"probabilities: each row is at least 0 and sums to 1. The likelihood takes their softmax, {WRONG}"
        elif bool((rows <= 0).all() & (rows.logsumexp(-1).abs() <= slack).all()):
            what = (
                "log-probabilities: the exponentials of each row sum to 1. Likelihood and curvature are those of the "
                "logits, but variances of outputs and link='probit' are not"
            )
    elif isinstance(likelihood.of_position, Bernoulli) and isinstance(_last_module(model.module), nn.Sigmoid):
        last, what = "sigmoid", f"probabilities: the model ends with a sigmoid. The likelihood takes another, {WRONG}"
    if what is not None:
        warn(
            f"the outputs at the first points are {what}. Return the logits: leave out the model's last {last}, as in "
            "co.linearize(model[:-1], ...) of an nn.Sequential that ends with it.",
            NotLogitsWarning,
        )


def _last_module(module: nn.Module | None) -> nn.Module | None:
    """Return the module that makes the outputs of an nn.Sequential, and any other module itself."""
    while isinstance(module, nn.Sequential) and len(module):
        module = list(module.children())[-1]
    return module


def checked_layout(
    model: Model, points: Inputs, layouts: Callable[[Any], Layout]
) -> tuple[Layout, Float[Tensor, "n ..."]]:
    """Return the outputs' layout, as `Model.fix_layout` finds it, and the outputs of the first two points as returned.

    Raises ValueError if outputs are random or depend on the other points of the batch. The first point is compared
    with itself before others and after them, as what runs along the points changes only later ones.
    """
    device, few, total = model.theta.device, first_of(points), num_points(points)
    with model.differentiating(), torch.no_grad(), own_randomness(device):
        layout, first = model.fix_layout(few, layouts)
        state = _random_state(device)
        outputs = model.raw(model.values, few)
        drew = not torch.equal(state, _random_state(device))
        if len(outputs) != num_points(few):
            raise ValueError(f"{num_points(few)} points gave {tuple(outputs.shape)}, expected one row per point.")
        if not is_finite(outputs):
            raise ValueError("the model's outputs hold NaN or Inf; check its buffers and the scale of the inputs.")
        # The first pass may prepare what later ones use, and goes through other calls, so its outputs prove nothing.
        times = 17 if drew else 0 if torch.equal(first, outputs) else 1
        for _ in range(times):
            if not torch.equal(outputs, model.raw(model.values, few)):
                raise ValueError("two passes over the same points gave different outputs; call model.eval() first.")
        if drew and model.training:  # two masks of few entries are often the same
            raise ValueError("the model is in train mode and draws random numbers; call model.eval() first.")
        alone = _outputs_alone(model, first_of(few, 1))
        model.require_points_apart(outputs, alone)
        try:
            turned = model.raw(model.values, take(points, torch.arange(total - 1, -1, -1)))
        except (RuntimeError, ValueError):  # packed sequences may have to come in order of their lengths
            return layout, outputs
        model.require_points_apart(turned.flip(0), alone)
    return layout, outputs


def _outputs_alone(model: Model, point: Inputs) -> Tensor:
    """Return the outputs of a single point.

    Raises ValueError if the model rejects it, as a norm over it alone may, or if they have no gradient in any selected
    parameter, so that J would be zero. Inside a transform, as of a sampler's chains, there is no graph that shows this.
    """
    graph = not in_functorch()
    try:
        with torch.set_grad_enabled(graph):
            outputs = model.raw(model.leaves() if graph else model.values, point)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the model has to take a batch of any size, and rejects a single point: {error}") from error
    if graph and not outputs.requires_grad:
        names = model.selection.names
        raise ValueError(
            f"the outputs have no gradient in the {len(names)} selected parameters ({names[0]!r}, ...): leave "
            "torch.no_grad, inference_mode, detach and NumPy out of forward, or select parameters that it uses."
        )
    return outputs.detach()


def _random_state(device: torch.device) -> Tensor:
    """Return the state of the device's default generator, as bytes."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def try_objects(model: Model, inputs: Inputs, most: int = 0, in_order: bool = False) -> None:
    """Try the model on objects as `Model.admit` does, and then on all of them, `most` at a time.

    What is inside an object is not looked at, but its outputs have to be finite. With `in_order`, the points must also
    be joined in their order, and equally each time. Costs one forward pass, or two. Raises ValueError or TypeError.
    """
    model.admit(inputs)
    if not num_points(inputs):
        return
    start = 0
    with torch.no_grad():
        for subset in in_pieces(inputs, most):
            outputs = model.raw(model.values, subset)
            _require_finite_outputs(outputs, start)
            start += num_points(subset)
            if in_order and not isinstance(subset, WholeBatch):
                _require_order(model, subset, outputs)


def _require_finite_outputs(outputs: Tensor, start: int) -> None:
    if not is_finite(outputs):
        finite = outputs.flatten(1).isfinite().all(1)
        raise ValueError(
            f"the model's outputs at point {start + int(finite.logical_not().nonzero()[0])} hold NaN or infinite "
            "values: look for them in that point, and remove it or impute them."
        )


def _require_order(model: Model, points: Inputs, outputs: Tensor) -> None:
    with own_randomness(model.theta.device):
        differ = digest_of(value_of(points, apart=True)) != digest_of(value_of(points, apart=True))
    # What differs may be without effect, such as a time.
    if differ and any(not torch.equal(model.raw(model.values, points), outputs) for _ in range(2)):
        raise ValueError(
            "the function that joins the points (collate=, collate_fn) made something else of the same points when "
            "called again. It must not be random, as cropping and other augmentation are: do that once, before."
        )
    turned = take(points, torch.arange(num_points(points) - 1, -1, -1))
    try:
        again = model.raw(model.values, turned)
    except (RuntimeError, ValueError):  # packed sequences may have to come in order of their lengths
        return
    slack = model.eps**0.5 * (1 + outputs.abs().max())
    if bool(((again.flip(0) - outputs).abs() > slack).any()):
        raise ValueError(
            "a point's outputs depend on its place among the points of its batch: the function that joins them "
            "(collate=, collate_fn) has to keep their order. Sort inside the model, and restore the order there."
        )
