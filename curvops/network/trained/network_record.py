"""Records of networks without the model and the data, and networks read again from all three.

The record contains what distinguishes a wrong model or other data from the right ones: fingerprints of every tensor,
and the inputs and outputs of two points. It also contains the selected weights, so that they can be restored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvops.ambient import Progress
from curvops.argument_types import Collate
from curvops.checks import check_options, refuse
from curvops.fingerprints import fingerprint
from curvops.network.data.batches import AbsentBatches, Batches, DataPrints, Reading, as_source
from curvops.network.data.inputs import Inputs, as_inputs, batch_inputs, first_of, num_points
from curvops.network.data.layouts import Layout, NamedLayout, TargetShape, layout_of
from curvops.network.data.objects import Objects
from curvops.network.likelihoods import FromLoss, Multitask, Sequences
from curvops.network.likelihoods.likelihood import Likelihood, likelihood_state
from curvops.network.model.model import Model, tensors_of
from curvops.network.model.parameters import Selection, quoted
from curvops.network.trained.first_points import (
    OWN,
    at_positions,
    checked_layout,
    first_points,
    likelihood_for,
    output_shape,
    reading_for,
)
from curvops.network.trained.trained_network import N, TrainedNetwork
from curvops.network.walks.budget import Budget

STORED: dict[str, type[Likelihood]] = {kind.__name__: kind for kind in (*OWN, Multitask, Sequences)}
"""Classes that store their constructor's arguments as attributes of the same names."""


@torch.no_grad()
def record_of_network(lin: TrainedNetwork, inputs: Any = None) -> dict[str, Any]:
    """Return the record; models are tried on `inputs` of one or two points, by default the first two of the data."""
    model, data, layout = lin.model, lin.data, lin.model.layout
    assert layout is not None
    few = data.few if inputs is None else lin.admit(inputs)
    if not num_points(few):
        raise ValueError("inputs= has no points; pass one or two, on which the model is tried when it is loaded.")
    few = first_of(few)
    outputs = model(model.values, few)
    # Objects are not saved, since nothing is pickled, but their prints.
    tried: dict[str, Any] = (
        {"inputs": None, "prints": few.prints().tolist()} if isinstance(few, Objects) else {"inputs": few}
    )
    return {
        "tensors": identity_of(model.kept_tensors),
        "weights": dict(model.values),
        "names": list(model.selection.names),
        "index": model.selection.index,
        "outputs": {"shape": list(layout.shape), "class_dim": layout.class_dim, **_members_of(layout)},
        "tried": tried | {"outputs": outputs, "device": outputs.device.type},
        "likelihood": _record_of(lin.likelihood) or _describe(lin, outputs),
        "token": lin.token,
        "engine": lin.engine,
        "data": {
            "points": data.num_data,
            "contents": data.prints.contents,
            "fingerprint": data.prints.order,
            "dtype": None if data.fingerprint_dtype is None else str(data.fingerprint_dtype),
            "largest_batch": data.largest,
            "weighted": data.weighted,
        },
    }


def recorded_network(
    kind: type[N],
    record: Mapping[str, Any],
    model: Any,
    data: Any = None,
    likelihood: Any = None,
    load_weights: bool = False,
    memory_budget: int | None = None,
    progress: Progress = None,
    inputs: Any = None,
    collate: Collate | None = None,
) -> N:
    """Read the network of this record again, with the model, and with the data if they are given.

    With `load_weights`, the selected weights of the record are first written into the model. Points that are objects
    are not in the record: those that the model was tried on are the first of the data, or `inputs`. Raises ValueError
    if the model, the data or the likelihood are not those of the record.
    """
    check_options(progress=progress, memory_budget=memory_budget)
    held = tensors_of(model)
    stored: Mapping[str, Tensor] = record["weights"]
    require_same_network(record["tensors"], held, stored if load_weights else {})
    if load_weights:
        with torch.no_grad():
            for name, tensor in stored.items():
                held[name].copy_(tensor)
    names, index = record["names"], record["index"]
    index = None if index is None else index.to(held[names[0]].device)
    network = Model(model, Selection(tuple(names), tuple(held[name].shape for name in names), index))
    theta, saved = network.theta, record["data"]
    if inputs is not None and collate is not None:
        inputs = Objects((), collate).like(inputs)
    few = targets = None
    if data is not None:
        read = first_points(data, theta, saved["weighted"], collate)
        data, points, targets, network.calls.mapping_type = read
        few = first_of(points)
    tried = as_inputs(_tried_points(record, few, inputs), theta.device, theta.dtype)
    layout, outputs = _try_network(network, tried, record)
    probability, layout = _likelihood(record, likelihood, layout, record["tried"]["outputs"].to(theta.device))
    network.layout = layout
    if data is None:
        sizes, dtype = (saved["largest_batch"],), _dtype(saved)
        prints = DataPrints(saved.get("contents", saved["fingerprint"]), saved["fingerprint"])
        source: Batches | AbsentBatches = AbsentBatches(tried, saved["points"], sizes, prints, dtype, saved["weighted"])
    else:
        reading = reading_for(network, probability, layout, saved["weighted"], outputs, targets is not None)
        source = _same_data(saved, data, reading, network)
    shape, memory = output_shape(probability, layout), Budget.of(memory_budget, theta.device)
    lin = kind(network, source, probability, shape, record["engine"], memory, progress, record["token"])
    _ = lin.passes.engines  # probe now, not in the first product
    return lin


def _tried_points(record: Mapping[str, Any], few: Inputs | None, inputs: Any) -> Inputs:
    """Return the points on which the model was tried: saved, or objects that are `inputs`, or the first of the data."""
    tried = record["tried"]
    if tried["inputs"] is not None:
        return tried["inputs"]
    points = few if inputs is None else batch_inputs(inputs, torch.tensor(tried["prints"]))
    if not isinstance(points, Objects) or points.prints().tolist() != tried["prints"]:
        raise ValueError(
            "the points at which the model was tried are objects, which are not saved, and not those given: pass the "
            "training data in their order, or inputs=, the first two points or those of post.save(path, inputs=)."
        )
    return points


def _try_network(network: Model, few: Inputs, record: Mapping[str, Any]) -> tuple[Layout, Tensor]:
    """Return layout and outputs, once the model has reproduced the outputs that it had when it was saved."""
    saved_outputs = record["outputs"]
    shape = torch.Size(saved_outputs["shape"])
    if "members" in saved_outputs:
        layouts: Callable[[Any], Layout] = partial(_named_layout, saved_outputs["members"], saved_outputs["targets"])
    else:
        layouts = partial(layout_of, class_dim=saved_outputs["class_dim"], numbers=not shape)
    layout, outputs = checked_layout(network, few, layouts)
    saved = record["tried"]["outputs"].to(network.theta.device)
    with torch.no_grad():
        present = network(network.values, few)
    # Another kind of device may round its products to half of the digits (TF32).
    digits = 0.5 if record["tried"]["device"] == saved.device.type else 0.25
    slack = network.eps**digits * (1 + saved.abs().max())
    if layout.shape != shape or not bool(((present - saved).abs() <= slack).all()):
        raise ValueError("the model has the saved weights, but other outputs: restore its forward and its settings.")
    return layout, outputs


def _members_of(layout: Layout) -> dict[str, Any]:
    """Return the record of several outputs and of the form of their targets."""
    if not isinstance(layout, NamedLayout):
        return {}
    members = [[member.name, list(member.shape), member.class_dim] for member in layout.members]
    return {"members": members, "targets": [[list(form.shape), form.floating] for form in layout.forms]}


def _named_layout(members: Sequence[Any], targets: Sequence[Any], outputs: Any) -> NamedLayout:
    """Return the layout of several outputs by their record."""
    layout = NamedLayout.of([layout_of(outputs, class_dim, not shape, name) for name, shape, class_dim in members])
    return replace(layout, forms=tuple(TargetShape(tuple(shape), floating) for shape, floating in targets))


def _same_data(saved: Mapping[str, Any], data: Any, reading: Reading, network: Model) -> Batches:
    """Return the batches, after checking the saved fingerprint (taken before the network was cast, if it was)."""
    theta, dtype = network.theta, _dtype(saved)
    reading = replace(reading, dtype=dtype, admit=network.admit if dtype == theta.dtype else None)
    batches = Batches(as_source(data, saved["largest_batch"], saved["weighted"]), reading)
    counts = f"{batches.num_data:,} points, but those of the saved posterior were {saved['points']:,}"
    refuse(batches.num_data != saved["points"], f"the data have {counts}.")
    wrong = "the data are not those of the saved posterior: they have other values"
    if "contents" in saved:
        refuse(batches.prints.contents != saved["contents"], f"{wrong}.")
    else:  # saved by an earlier version
        refuse(batches.print_of_batches != saved["fingerprint"], f"{wrong}, or another order.")
    return batches if dtype in (None, theta.dtype) else batches.to(dtype=theta.dtype)


def _dtype(saved: Mapping[str, Any]) -> torch.dtype | None:
    dtype: torch.dtype | None = None if saved["dtype"] is None else getattr(torch, saved["dtype"].split(".")[-1])
    return dtype


def _record_of(likelihood: Likelihood) -> dict[str, Any] | None:
    """Return class and arguments; None for other classes, and for those with a function, such as `FromDistribution`."""
    if STORED.get(type(likelihood).__name__) is not type(likelihood):
        return None
    arguments = {name: getattr(likelihood, name) for name in inspect.signature(type(likelihood)).parameters}
    if isinstance(inner := arguments.get("likelihood"), Likelihood):
        arguments["likelihood"] = _record_of(inner)
        if arguments["likelihood"] is None:
            return None
    if isinstance(likelihood, Multitask):
        arguments["likelihoods"] = [[name, _record_of(member)] for name, member in likelihood.likelihoods.items()]
        arguments["targets"] = [[list(shape), floating] for shape, floating in likelihood.targets]
        if any(member is None for _, member in arguments["likelihoods"]):
            return None
    return {"class": type(likelihood).__name__, "arguments": arguments}


def _recorded(record: Mapping[str, Any], device: torch.device) -> Likelihood:
    """Build the likelihood of a record. Raises ValueError for a class of a later version."""
    if record["class"] not in STORED:
        raise ValueError(f"it holds a likelihood {record['class']}, which this version does not have; upgrade curvops.")
    arguments = dict(record["arguments"])
    if isinstance(arguments.get("likelihood"), Mapping):
        arguments["likelihood"] = _recorded(arguments["likelihood"], device)
    if "likelihoods" in arguments:
        arguments["likelihoods"] = {name: _recorded(member, device) for name, member in arguments["likelihoods"]}
        arguments["targets"] = [(tuple(shape), floating) for shape, floating in arguments["targets"]]
    return STORED[record["class"]](**arguments).to(device=device)


def _describe(lin: TrainedNetwork, outputs: Tensor) -> dict[str, Any]:
    """Describe a likelihood that cannot be stored by log p of targets drawn from it, or of the given ones."""
    likelihood, generator = lin.likelihood, torch.Generator(device=outputs.device).manual_seed(0)
    try:
        if any(isinstance(member.of_position, FromLoss) for member in likelihood.members):
            drawn = next(iter(lin.data)).targets[: len(outputs)]
        else:
            drawn = likelihood.sample(outputs, generator)
        scores = likelihood.log_prob(outputs, drawn)
    except (TypeError, ValueError, RuntimeError):
        return {"given": repr(likelihood), "drawn": None, "scores": None}
    return {"given": repr(likelihood), "drawn": drawn, "scores": scores}


def _likelihood(record: Mapping[str, Any], spec: Any, layout: Layout, outputs: Tensor) -> tuple[Likelihood, Layout]:
    saved, device, dtype = record["likelihood"], outputs.device, outputs.dtype
    named = None if spec is None else likelihood_for(spec, layout).to(device, dtype)
    if "class" in saved:
        stored = _recorded(saved, device)
        if (
            named is not None
            and not named.needs_noise
            and likelihood_state(at_positions(named, layout)[0]) != likelihood_state(stored)
        ):
            raise ValueError(f"the posterior was saved with {stored}, but likelihood={spec!r} is given; leave it out.")
        return at_positions(stored, layout)
    if named is None:
        raise ValueError(f"this likelihood, {saved['given']}, cannot be saved: co.load(path, model, likelihood=...).")
    likelihood, layout = at_positions(named, layout)
    drawn, scores = saved["drawn"], saved["scores"]
    if drawn is not None:
        present, scores = likelihood.log_prob(outputs, drawn.to(device)), scores.to(device)
        slack = torch.finfo(dtype).eps ** 0.5 * (1 + scores.abs().max())
        if not bool(((present - scores).abs() <= slack).all()):
            raise ValueError(f"the likelihood is not that of the saved posterior, {saved['given']}.")
    return likelihood, layout


def identity_of(named: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return dtype, shape and fingerprint of each tensor by name. One pass over the values."""
    return {
        name: {
            "dtype": str(tensor.dtype),
            "shape": list(tensor.shape),
            "fingerprint": int(fingerprint([tensor.detach()])) if tensor.numel() else 0,
        }
        for name, tensor in named.items()
    }


def require_same_network(
    saved: Mapping[str, Any], tensors: Mapping[str, Tensor], restored: Mapping[str, Tensor]
) -> None:
    """Raise ValueError, with the names and the remedy, unless the given tensors equal the saved ones.

    Of the tensors that will be restored, only shape and dtype are compared.
    """
    missing, further = saved.keys() - tensors.keys(), tensors.keys() - saved.keys()
    if missing or further:
        lacks, more = (quoted(sorted(names)) or "nothing" for names in (missing, further))
        raise ValueError(f"this is not the saved model: it lacks {lacks}, and also has {more}.")
    identities = identity_of(tensors)
    for what in ("shape", "dtype"):
        other = [name for name in saved if saved[name][what] != identities[name][what]]
        if other:
            was, now = (records[other[0]][what] for records in (saved, identities))
            names = quoted(other)
            raise ValueError(f"the saved model has another {what} of {names} ({other[0]!r}: {was}, here {now}).")
    compared = [name for name in saved if name not in restored]
    other = [name for name in compared if saved[name]["fingerprint"] != identities[name]["fingerprint"]]
    if other:
        raise ValueError(
            f"the model has other values than when it was saved in {len(other)} of {len(saved)} tensors: "
            f"{quoted(other)}. Load the weights (model.load_state_dict); load_weights=True restores those linearised."
        )
