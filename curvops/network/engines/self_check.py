"""The self-check: each way to multiply by J is compared with a plain backward pass, which training used.

Autodiff is tried at a point or two: J v comes from forward mode, a replay of it, the derivative of the backward pass,
or rows of J, and each must be the adjoint, ⟨u, Jv⟩ = ⟨Jᵀu, v⟩. If the backward of a custom `autograd.Function` leaves
autograd (numpy, no_grad, a detached part), its double backward pass is not right; if it is another function's
derivative (a straight-through estimator), it nevertheless defines a J. Layer rules must multiply by the same J as
autograd does. A Hessian must be symmetric.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from curvops.network.data.batches import Batch
from curvops.network.data.inputs import cut, num_points
from curvops.network.engines.autodiff import (
    Operations,
    Pushes,
    Recorded,
    Streamed,
    count_saved,
    hessian_product,
    record_graph,
    record_replay,
)
from curvops.network.engines.layer_calls import Recording
from curvops.network.engines.layerwise import Layerwise
from curvops.network.engines.plan import Routes
from curvops.network.likelihoods.gaussian import Gaussian
from curvops.network.likelihoods.output_fisher import Root, Sampled
from curvops.network.model.model import Model
from curvops.network.model.parameters import Blocks
from curvops.network.model.skeleton import nodes_behind

Push = Callable[[Mapping[str, Tensor]], Tensor]
Pull = Callable[[Tensor], Blocks]
MOVING = {
    *("Index", "IndexSelect", "IndexAdd", "IndexCopy", "IndexPut", "IndexReduce", "Gather", "Take", "Sort"),
    *("Scatter", "ScatterAdd", "ScatterReduce", "MaskedSelect", "MaskedScatter"),
}
"""Operations that may reorder points, depending on the numbers they are given."""
CUTTING = {"Slice", "Select", "Split", "SplitWithSizes", "Unbind", "Roll"}
"""Operations that may cut a batch into pieces of some points, whose sizes may depend on numbers, too."""

# Autodiff


def find_routes(model: Model, inputs: Any, names: Sequence[str]) -> Routes:
    """Return the fastest routes to J v that are right for these parameters at these points.

    Raises ValueError if the model has no derivatives that an engine could use: if there is no backward pass, or if it
    is not linear, so that no J exists.
    """
    with Operations() as seen:
        graph, saved = count_saved(model, inputs, names)
    generator = torch.Generator(device=graph.outputs.device).manual_seed(0)
    u = _randn_like(graph.outputs.detach().unsqueeze(0), generator)
    # Far beyond the range in which a backward pass may clip, and exact in floating point.
    factor = -(2.0**20) if model.eps <= torch.finfo(torch.float32).eps else -(2.0**6)
    try:
        # One after the other: together they would be stacked and take the memory of two more parameter vectors.
        pulled = graph.pull(u)
        scaled = graph.pull(factor * u, keep=False)
    except RuntimeError as error:
        raise ValueError(
            f"the model uses an operation with no backward-mode derivative: {error} Replace the operation (a "
            "reentrant checkpoint by use_reentrant=False, the model's own autograd.grad by one with "
            "create_graph=True), or leave the parameters before it out of the selection."
        ) from error
    if not all(bool(value.any()) for value in pulled.values()):
        _refuse_lost_gradients(model, inputs, names)
    # Not in place: gradients of two parameters may be one tensor.
    linear = all(_close(scaled[name] / factor, value) for name, value in pulled.items())
    custom = custom_functions(graph.outputs)
    where = custom or "the model"
    del scaled, graph
    if not linear or (custom and not _adds_points(Streamed(model, inputs, names), u, pulled, generator)):
        raise ValueError(
            f"the backward pass of {where} is not linear in its incoming gradient (it clips, rounds or normalises it, "
            "or mixes the points of a batch), so there is no Jacobian: give it a linear backward, remove hooks that "
            "change gradients, or leave the parameters before it out of the selection."
        )
    v = _revealing(pulled, generator)
    saved, made, work = (total // num_points(inputs) for total in (saved, seen.nbytes, seen.multiply_adds))
    # Forward mode is wrong for a padding row, which later batches may contain even if this one does not.
    streamed = Streamed(model, inputs, names)
    with suppress(RuntimeError):  # there is no forward mode
        if not seen.looks_up_padding and is_adjoint(streamed.push, u, v, pulled, generator):
            return Routes("forward mode", True, True, saved, saved, made, work, tried=False)
    pushes: Pushes = "double backward"
    try:
        right, why = is_adjoint(record_graph(model, inputs, names).push, u, v, pulled, generator), ""
    except RuntimeError as error:
        right, why = False, f"there is neither a forward-mode nor a second derivative ({str(error).splitlines()[0]})"
    if not right:
        pushes, why = (
            "rows",
            why or (f"neither forward mode nor differentiating the backward pass gives the adjoint of Jᵀ ({where})"),
        )
    return Routes(pushes, False, right, saved, 3 * saved, made, work, why=why)


def _refuse_lost_gradients(model: Model, inputs: Any, names: Sequence[str]) -> None:
    """Raise ValueError if torch warns that a block loses its gradients, as a reentrant checkpoint may."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record_graph(model, inputs, names)
    if any("None of the inputs have requires_grad" in str(warning.message) for warning in caught):
        raise ValueError("a block under checkpoint(use_reentrant=True) loses its gradients: pass use_reentrant=False.")


def _adds_points(engine: Streamed, u: Tensor, pulled: Blocks, generator: torch.Generator) -> bool:
    """Return whether Jᵀu is a sum over points; a custom backward may break this."""
    total: Blocks = {}
    for points, inputs in cut(engine.inputs, 1):
        alone = record_graph(engine.model, inputs, engine.names).pull(u[:, points], keep=False)
        total = {name: value + total[name] if name in total else value for name, value in alone.items()}
    if all(_close(total[name], value) for name, value in pulled.items()):
        return True
    noise = rounding(lambda block: engine.pull(block[""]), {"": u}, pulled, generator)
    return all(_close(total[name], value, noise[name]) for name, value in pulled.items())


def try_recording(routes: Routes, model: Model, inputs: Any, names: Sequence[str]) -> Routes:
    """Return these routes after trying, at these points, whether a pass can be recorded."""
    if routes.tried:
        return routes
    for replay in dict.fromkeys((record_replay(model, inputs, names), None)):
        engine = Recorded(model, inputs, names, replay)
        with suppress(RuntimeError):
            # Twice: a replay that changes its constants would be right only once.
            if proves_itself(engine, times=2):
                size = -(-engine.nbytes // num_points(inputs))
                return replace(routes, replayed=replay is not None, recorded_bytes=size, tried=True)
        del engine
    return replace(routes, replayed=False, recordable=False, tried=True)


def proves_itself(engine: Recorded, times: int = 1) -> bool:
    """Return whether an engine's pushes are the adjoint of its pulls at its own points. Costs one product."""
    generator = torch.Generator(device=engine.outputs.device).manual_seed(0)
    u = _randn_like(engine.outputs.unsqueeze(0), generator)
    pulled = engine.pull(u)
    v = _revealing(pulled, generator)
    return all(is_adjoint(engine.push, u, v, pulled, generator) for _ in range(times))


def is_adjoint(push: Push, u: Tensor, v: Blocks, pulled: Blocks, generator: torch.Generator) -> bool:
    """Return whether ⟨u, Jv⟩ = ⟨Jᵀu, v⟩ for a route to J v, to the accuracy that the model's own rounding allows."""
    pushed = push(v)
    gap, size = (_inner(pushed, u) - sum(map(_inner, pulled.values(), v.values()))).abs(), u.norm().double()
    if bool(gap <= allowance(pushed) * size):
        return True
    noise = rounding(lambda block: {"": push(block)}, v, {"": pushed}, generator)[""]
    return bool(gap <= allowance(pushed, noise) * size)


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """Return ⟨left, right⟩, summed in float64 with few products in memory at a time."""
    pairs = zip(left.flatten().split(2**16), right.flatten().split(2**16))
    return torch.stack([(a * b).sum(dtype=torch.float64) for a, b in pairs]).sum()


def _revealing(pulled: Blocks, generator: torch.Generator) -> Blocks:
    """Return a v that reveals errors of a route to J v, whichever blocks it concerns.

    In each block, v is the part of Jᵀu plus noise of the same size, scaled so that all blocks contribute equally to
    ⟨u, Jv⟩: a route that loses a block fails the check, however small the block's gradient.
    """
    norms = {name: value.norm() for name, value in pulled.items()}
    largest = torch.stack(list(norms.values())).max()
    floor = torch.where(largest > 0, 1e-4 * largest, torch.ones_like(largest))
    blocks = {}
    for name, value in pulled.items():
        noise = _randn_like(value, generator)
        noise.div_(noise.norm().clamp_min(torch.finfo(noise.dtype).tiny))
        scale = norms[name].clamp_min(floor)
        blocks[name] = noise.add_(value / scale).div_(scale).mul_(largest.clamp_min(floor))
    return blocks


# Rounding


def rounding(
    product: Callable[[Blocks], Blocks], vectors: Blocks, results: Mapping[str, Tensor], generator: torch.Generator
) -> Blocks:
    """Return ‖Px − P(x − y) − Py‖ by name for a random y, with `results` = Px: the effect of rounding alone on Px.

    It may exceed what the dtype of x explains, for example with a frozen base in half precision under adapters in
    single precision.
    """
    y = {name: _randn_like(vector, generator) for name, vector in vectors.items()}
    first, second = product(y), product({name: vectors[name] - y[name] for name in vectors})
    return {name: (result - first[name] - second[name]).norm() for name, result in results.items()}


def allowance(value: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """Return the allowed norm of the difference between two routes to `value`, by dtype or as a few times the noise.

    It is at most a tenth of `value`, because noise of that size measures something other than rounding.
    """
    size = value.norm().double()
    return torch.maximum(tolerance(value.dtype) * size, (8 * torch.as_tensor(noise).to(size)).clamp(max=0.1 * size))


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative difference that rounding may make between two routes to one product."""
    return 10 * float(torch.finfo(dtype).eps) ** 0.5


def _close(value: Tensor, expected: Tensor, noise: Tensor | float = 0.0) -> bool:
    return bool((value - expected).norm() <= allowance(expected, noise))


def _randn_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(tensor.shape, dtype=tensor.dtype, device=tensor.device, generator=generator)


# Second derivatives


@torch.inference_mode(False)
def require_symmetric(model: Model, inputs: Any) -> None:
    """Raise RuntimeError unless uᵀHv equals vᵀHu for two random vectors, with H of squared distances to random targets.

    Those at the likelihood's own targets may be rounding errors: a good fit has no residuals.
    """
    theta, layout = model.theta, model.layout
    assert layout is not None
    generator = torch.Generator(device=theta.device).manual_seed(0)
    vectors = torch.randn(2, len(theta), dtype=theta.dtype, device=theta.device, generator=generator).mT
    shape = num_points(inputs), layout.output_shape.numel()
    targets = torch.randn(shape, dtype=theta.dtype, device=theta.device, generator=generator)
    products = hessian_product(model, Gaussian(), vectors, inputs, Batch((), targets))
    form = vectors.mT @ products
    # Of the size of each form, and of what rounding of the products changes in it: entries of u and v are independent.
    scale = products.norm()
    if not bool((form[0, 1] - form[1, 0]).abs() <= tolerance(theta.dtype) * scale):
        raise RuntimeError("the model's second derivatives are not symmetric: write them out, or use co.GGN(lin).")


# Custom functions


def custom_functions(outputs: Tensor) -> str:
    """Return the names of the custom functions behind the outputs of a pass; empty if there are none. Needs no pass."""
    functions = [getattr(type(node), "_forward_cls", None) for node in nodes_behind(outputs)]
    # Hooks of modules are custom functions, too.
    names = [f.__name__ for f in functions if f is not None and not f.__module__.startswith("torch.nn.modules")]
    return ", ".join(dict.fromkeys(names))


# Layer rules


def mismatches(engine: Layerwise, reference: Pull, names: Iterable[str] = ()) -> tuple[set[str], bool]:
    """Return the parameters for which Jᵀu differs from autograd's, or J from the adjoint of Jᵀ.

    The random u of each point multiplies its rows alone, which shows that the rows are its own. Also return whether the
    parameters `names` had a gradient each, without which nothing shows.
    """
    generator = torch.Generator(device=engine.outputs.device).manual_seed(0)
    u = _randn_like(engine.outputs.new_empty(()).expand(1, len(engine.outputs), engine.num_columns), generator)
    pulled = engine.pull(u)
    expected = {name: value for name, value in reference(u).items() if name in pulled}
    tol = tolerance(u.dtype)
    rest = tol**2 * torch.stack([value.norm() for value in expected.values()]).norm()
    gaps = {name: (pulled[name] - value).norm() for name, value in expected.items()}
    wrong = {name for name, value in expected.items() if not bool(gaps[name] <= allowance(value) + rest)}
    if wrong:  # by more than the model rounds
        noise = rounding(lambda block: reference(block[""]), {"": u}, expected, generator)
        wrong = {name for name in wrong if not bool(gaps[name] <= allowance(expected[name], noise[name]))}
    for part in engine.parts:
        layer = part.layer
        tangents = {
            local: torch.randn(1, *layer.shape_of(local), dtype=u.dtype, device=u.device, generator=generator)
            for local in layer.names
        }
        pushed = part.push(tangents)
        back = part.pull(pushed)  # not relative to u: ⟨u, Jv⟩ may be small by chance and hide a wrong push
        left = pushed.square().sum()
        right = torch.stack([(back[local] * tangent).sum() for local, tangent in tangents.items()]).sum()
        if not bool((left - right).abs() <= tol * left):
            wrong |= set(layer.names.values())
    return wrong, all(bool(expected[name].any()) for name in names)


def random_root(points: int, num_outputs: int, like: Tensor) -> Root:
    """Return one random column per point, along which J is checked without targets, whose residuals may be zero."""
    generator = torch.Generator(device=like.device).manual_seed(0)
    draws = torch.randn(1, points, num_outputs, dtype=like.dtype, device=like.device, generator=generator)
    return Root(Sampled(Gaussian(), draws), Batch((), torch.empty(points)))


def bypassed(model: Model, recording: Recording, names: Collection[str]) -> set[str]:
    """Find those of these parameters that the outputs also depend on by a path through no call of their layers.

    The graph shows this at points without a gradient, too: a weight that is used elsewhere, or a layer whose output was
    written to through a view.
    """
    outputs, calls, _ = recording
    inputs = {call.edge.node: call.a for call in calls}
    todo = [] if outputs.grad_fn is None else [outputs.grad_fn]
    seen = {*todo}
    places = set()
    for node in todo:  # the list grows
        parents: list[Node | None] = []
        if node in inputs:
            parents += [get_gradient_edge(inputs[node]).node] if inputs[node].requires_grad else []
        else:
            parents += [parent for parent, _ in node.next_functions]
            if (variable := getattr(node, "variable", None)) is not None:
                places.add(model.place_of(variable))
        new = [parent for parent in dict.fromkeys(parents) if parent is not None and parent not in seen]
        todo += new
        seen.update(new)
    used = {name for name, leaf in model.leaves().items() if model.place_of(leaf) in places}
    return used.intersection(names)


def path_of(model: Model, recording: Recording) -> int | None:
    """Return a number that is equal for passes with the same operations and calls of layers, at any number of points.

    It determines whether layer rules are right: which paths lead from the outputs to a parameter, and which of them
    lead through the call of a layer. Return None if an operation may move or cut points, as a sort does, unless the
    pass has ragged rows: then backward passes have shown the point of each row of each layer.
    """
    outputs, calls, _ = recording
    n, shown = len(outputs), any(call.rows is not None for call in calls)
    order = [] if outputs.grad_fn is None else [outputs.grad_fn]
    numbers: dict[Any, int] = dict.fromkeys(order, 0)
    path: list[Hashable] = [n == 1]
    for node in order:  # the list grows
        if not node.next_functions:
            variable = getattr(node, "variable", None)
            path.append(None if variable is None else model.place_of(variable))
            continue
        name = node.name()
        kind = name.partition("Backward")[0]
        if not shown and ((kind in MOVING and _moves_points(node, n)) or (kind in CUTTING and _cuts_points(node, n))):
            return None
        path.append(name)
        for parent, place in node.next_functions:
            if parent is not None and parent not in numbers:
                numbers[parent] = len(order)
                order.append(parent)
            path.append((None if parent is None else numbers[parent], place))
    for call in calls:
        path.append((call.layer.path, call.layer.is_ragged, numbers.get(call.edge.node), call.edge.output_nr))
    return hash(tuple(path))


def _moves_points(node: Any, n: int) -> bool:
    """Return whether an indexing operation may move points, unless it acts within each of the n leading points."""
    shape = node._input_metadata[0].shape
    if len(shape) == 0 or shape[0] != n:
        return True
    indices = getattr(node, "_saved_indices", None)
    if indices is not None:
        first = indices[0]
        return first is not None and not torch.equal(first.flatten(), torch.arange(n, device=first.device))
    dim = getattr(node, "_saved_dim", 0)
    return dim == 0 or dim == 2**64 - len(shape)


def _cuts_points(node: Any, n: int) -> bool:
    """Return whether an operation of `CUTTING` cuts the first dimension of a tensor, which has n entries."""
    if hasattr(node, "_saved_dims"):
        return node._input_metadata[0].shape[:1] == (n,) and 0 in (node._saved_dims or (0,))
    shape = getattr(node, "_saved_self_sym_sizes", None)
    if shape is None:  # an unbound dimension has an output for each entry
        return node._saved_dim == 0 and len(node._input_metadata) == n
    whole = getattr(node, "_saved_start", None) == 0 and node._saved_end >= n and node._saved_step == 1
    return node._saved_dim in (0, 2**64 - len(shape)) and shape[0] == n and not whole
