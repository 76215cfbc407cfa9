"""The derivatives of a model, each checked at a point or two before an engine uses it.

The reference is Jᵀu by a plain backward pass, which training used. J v comes from forward mode, a replay of it, the
derivative of the backward pass, or rows of J; each must be the adjoint, ⟨u, Jv⟩ = ⟨Jᵀu, v⟩. If the backward of a custom
`autograd.Function` leaves autograd (numpy, no_grad, a detached part), its double backward pass is not right; if it is
another function's derivative (a straight-through estimator), it nevertheless defines a J.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from curvops.network.data.inputs import num_points, take
from curvops.network.engines.autodiff import (
    Operations,
    Pushes,
    Recorded,
    Streamed,
    count_saved,
    record_graph,
    record_replay,
)
from curvops.network.engines.replay import tensors_in
from curvops.network.model.model import Model
from curvops.network.model.parameters import Blocks

Push = Callable[[Mapping[str, Tensor]], Tensor]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Routes:
    """How J v is computed for some parameters, and what a recorded pass keeps. Bytes are per point.

    `replayed` says whether a stored linearisation replays forward mode, `recordable` whether it may be stored at all
    (rows are computed anew at each product). Until recording has been `tried`, both are assumed, with the bytes of the
    graph alone. `made_bytes` are those of the results of all operations of a pass, `multiply_adds` (per point) those of
    its matrix products and convolutions. `why` is the reason why only rows remain, without forward mode and double
    backward.
    """

    pushes: Pushes
    replayed: bool
    recordable: bool
    saved_bytes: int
    recorded_bytes: int
    made_bytes: int
    multiply_adds: int
    why: str = ""
    tried: bool = True


class Reference:
    """A reference Jᵀu at some points by a plain backward pass, and a v that reveals errors of another route.

    In each block, v is the part of Jᵀu plus noise of the same size, scaled so that all blocks contribute equally to
    ⟨u, Jv⟩: a route that loses a block fails the check, however small the block's gradient.

    Raises ValueError if there is no backward pass, or if it is not linear, so that no J exists.
    """

    def __init__(self, model: Model, inputs: Any, names: Sequence[str]) -> None:
        self.model, self.inputs, self.names = model, inputs, tuple(names)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with Operations() as self.operations:
                graph, saved = count_saved(model, inputs, lambda: record_graph(model, inputs, names))
        generator = torch.Generator(device=graph.outputs.device).manual_seed(0)
        self.u = _randn_like(graph.outputs.detach().unsqueeze(0), generator)
        # Far beyond the range in which a backward pass may clip, and exact in floating point.
        factor = -(2.0**20) if model.eps <= torch.finfo(torch.float32).eps else -(2.0**6)
        try:
            # One after the other: together they would be stacked and take the memory of two more parameter vectors.
            self.pulled = graph.pull(self.u)
            scaled = graph.pull(factor * self.u, keep=False)
        except RuntimeError as error:
            raise ValueError(
                f"the model uses an operation with no backward-mode derivative: {error} Replace the operation (a "
                "reentrant checkpoint by use_reentrant=False, the model's own autograd.grad by one with "
                "create_graph=True), or leave the parameters before it out of the selection."
            ) from error
        if any("None of the inputs have requires_grad" in str(warning.message) for warning in caught):
            raise ValueError(
                "a block under checkpoint(use_reentrant=True) would lose its gradients: pass use_reentrant=False."
            )
        self.saved_bytes = saved // num_points(inputs)
        # Not in place: gradients of two parameters may be one tensor.
        self._require(all(_close(scaled[name] / factor, pulled) for name, pulled in self.pulled.items()))
        del scaled
        if has_custom_functions(graph.outputs):
            self._require_points_apart(generator)
        self.v = _sharp(self.pulled, generator)
        self.generator = generator

    def is_adjoint(self, push: Push) -> bool:
        """Return whether ⟨u, Jv⟩ = ⟨Jᵀu, v⟩ for a route's J v, to the accuracy that the model's own rounding allows."""
        return is_adjoint(push, self.u, self.v, self.pulled, self.generator)

    def _require_points_apart(self, generator: torch.Generator) -> None:
        """Raise ValueError unless Jᵀu is a sum over points; a custom backward may break this."""
        alone: list[Blocks] = []
        for n in range(num_points(self.inputs)):
            graph = record_graph(self.model, take(self.inputs, slice(n, n + 1)), self.names)
            alone.append(graph.pull(self.u[:, n : n + 1], keep=False))
        total = {name: torch.stack([pulled[name] for pulled in alone]).sum(0) for name in self.names}
        if not all(_close(total[name], expected) for name, expected in self.pulled.items()):
            streamed = Streamed(self.model, self.inputs, self.names)
            noise = rounding(lambda block: streamed.pull(block[""]), {"": self.u}, self.pulled, generator)
            pairs = self.pulled.items()
            self._require(all(_close(total[name], expected, noise[name]) for name, expected in pairs))

    def _require(self, linear: bool) -> None:
        if not linear:
            raise ValueError(
                f"the backward pass of {named_custom_functions(self.model, self.inputs)} is not linear in its "
                "incoming gradient (it clips, rounds or normalises it, or mixes the points of a batch), so there is "
                "no Jacobian: give it a linear backward, remove hooks that change gradients, or leave the "
                "parameters before it out of the selection."
            )


def find_routes(model: Model, inputs: Any, names: Sequence[str]) -> Routes:
    """Return the fastest routes to J v that are right for these parameters at these points.

    Raises ValueError if the model has no derivatives that an engine could use.
    """
    reference = Reference(model, inputs, names)
    seen, saved = reference.operations, reference.saved_bytes
    made, work = (total // num_points(inputs) for total in (seen.nbytes, seen.multiply_adds))
    # Forward mode is wrong for a padding row, which later batches may contain even if this one does not.
    if not seen.looks_up_padding and _try(lambda: reference.is_adjoint(Streamed(model, inputs, names).push)):
        return Routes("forward mode", True, True, saved, saved, made, work, tried=False)
    why = _lacks_double_backward(reference)
    pushes: Pushes = "rows" if why else "double backward"
    return Routes(pushes, False, not why, saved, 3 * saved, made, work, why=why)


def try_recording(routes: Routes, model: Model, inputs: Any, names: Sequence[str]) -> Routes:
    """Return these routes after trying, at these points, whether a pass can be recorded."""
    if routes.tried:
        return routes
    for replay in dict.fromkeys((record_replay(model, inputs, names), None)):
        engine = Recorded(model, inputs, names, replay)
        # Twice: a replay that changes its constants would be right only once.
        if _try(partial(proves_itself, engine, times=2)):
            size = -(-engine.nbytes // num_points(inputs))
            return replace(routes, replayed=replay is not None, recorded_bytes=size, tried=True)
        del engine
    return replace(routes, replayed=False, recordable=False, tried=True)


def proves_itself(engine: Recorded, times: int = 1) -> bool:
    """Return whether an engine's pushes are the adjoint of its pulls at its own points. Costs one product."""
    generator = torch.Generator(device=engine.outputs.device).manual_seed(0)
    u = _randn_like(engine.outputs.unsqueeze(0), generator)
    pulled = engine.pull(u)
    v = _sharp(pulled, generator)
    return all(is_adjoint(engine.push, u, v, pulled, generator) for _ in range(times))


def is_adjoint(push: Push, u: Tensor, v: Blocks, pulled: Blocks, generator: torch.Generator) -> bool:
    """Return whether ⟨u, Jv⟩ = ⟨Jᵀu, v⟩ for a route to J v, to the accuracy that the model's own rounding allows."""
    pushed = push(v)
    if adjoint(pushed, u, v, pulled):
        return True
    noise = rounding(lambda block: {"": push(block)}, v, {"": pushed}, generator)[""]
    return adjoint(pushed, u, v, pulled, noise)


def _lacks_double_backward(reference: Reference) -> str:
    """Return why differentiating the backward pass does not give J v; an empty string if it does."""
    graph = record_graph(reference.model, reference.inputs, reference.names)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            right = reference.is_adjoint(graph.push)
    except (RuntimeError, NotImplementedError) as error:
        return f"there is neither a forward-mode nor a second derivative ({str(error).splitlines()[0]})"
    if right:
        return ""
    who = named_custom_functions(reference.model, reference.inputs)
    return f"neither forward mode nor differentiating the backward pass gives the adjoint of Jᵀ ({who})"


def _try(run: Callable[[], T]) -> T | None:
    """Return what `run` returns, without its warnings; None if some derivative does not exist."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run()
    except (RuntimeError, NotImplementedError):
        return None


def _sharp(pulled: Blocks, generator: torch.Generator) -> Blocks:
    """Return tangents: in each block its part of Jᵀu plus as much noise, scaled to contribute equally to ⟨Jᵀu, v⟩."""
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


def adjoint(
    pushed: Tensor,
    cotangents: Tensor,
    tangents: Mapping[str, Tensor],
    pulled: Mapping[str, Tensor],
    noise: Tensor | float = 0.0,
) -> bool:
    """Return whether ⟨u, Jv⟩ = ⟨Jᵀu, v⟩ to the dtype's accuracy, or to that of a Jv with rounding `noise`."""
    left = _inner(pushed, cotangents)
    right = sum((_inner(pulled[name], tangents[name]) for name in pulled), torch.zeros_like(left))
    return bool((left - right).abs() <= allowance(pushed, noise) * cotangents.norm().double())


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """Return ⟨left, right⟩, summed in float64 with few products in memory at a time."""
    pairs = zip(left.flatten().split(2**16), right.flatten().split(2**16))
    return torch.stack([(a * b).sum(dtype=torch.float64) for a, b in pairs]).sum()


def rounding(
    product: Callable[[Blocks], Blocks], vectors: Blocks, results: Mapping[str, Tensor], generator: torch.Generator
) -> Blocks:
    """Return ‖Px − P(x − y) − Py‖ by name for a random y, with `results` = Px: the effect of rounding alone on Px.

    It may exceed what the dtype of x explains, for example with a frozen base in half precision under adapters in
    single precision.
    """
    part = {name: _randn_like(vector, generator) for name, vector in vectors.items()}
    first, second = product(part), product({name: vectors[name] - part[name] for name in vectors})
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


def has_custom_functions(outputs: Tensor) -> bool:
    """Return whether the graph of these outputs contains a custom function. Visits its nodes; needs no pass."""
    return bool(_custom_functions(outputs, set()))


def named_custom_functions(model: Model, inputs: Any) -> str:
    """Return "'act' (Round)", the modules with the custom functions that ran in them, or "the model". One pass."""
    seen: set[Node] = set()
    found: dict[str, None] = {}
    running = ["the model"]
    paths = model.paths

    def note(values: Any) -> None:
        """Assign nodes that are new in the graph behind these values to the running module."""
        for tensor in tensors_in(values):
            found.update(dict.fromkeys(f"{running[-1]} ({name})" for name in _custom_functions(tensor, seen)))

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        note([args, kwargs])
        running.append(repr(paths[module]) if paths[module] else "the model")

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        note(output)
        running.pop()

    handles: list[Any] = [part.register_forward_pre_hook(enter, with_kwargs=True) for part in model.hookable]
    handles += [part.register_forward_hook(leave) for part in model.hookable]
    try:
        with model.differentiating():
            note(model(model.leaves(), inputs))
    finally:
        for handle in handles:
            handle.remove()
    return ", ".join(found) or "the model"


def _custom_functions(tensor: Tensor, seen: set[Node]) -> list[str]:
    """Return names of the custom functions among the nodes behind a tensor that were not seen yet."""
    names, waiting = [], [tensor.grad_fn] if tensor.grad_fn is not None else []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        function = getattr(type(node), "_forward_cls", None)
        if function is not None and not function.__module__.startswith("torch.nn.modules"):  # hooks of modules
            names.append(function.__name__)
        waiting += [parent for parent, _ in node.next_functions if parent is not None]
    return names
