"""Automatic differentiation: the general engine, J of one batch, streamed or recorded, and Hessian products."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, Literal

import torch
import torch.autograd.forward_ad as forward_ad
from jaxtyping import Float
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from torch.utils.flop_counter import flop_registry

from curvops.network.data.batches import Batch
from curvops.network.data.inputs import components, in_pieces, map_inputs, normalise, num_points, take
from curvops.network.data.objects import Objects, WholeBatch
from curvops.network.engines.replay import EagerMode, Recorder, Replay, all_of, bytes_beside
from curvops.network.likelihoods.likelihood import Likelihood
from curvops.network.likelihoods.output_fisher import IDENTITY, Root
from curvops.network.model.model import PROCESS_LOCK, Model
from curvops.network.model.parameters import Blocks, as_stored

Pushes = Literal["forward mode", "double backward", "rows"]
"""The ways to compute J v from a model's derivatives."""


class Streamed:
    """The streamed engine: J of one batch, by new passes in every product; nothing is kept between products.

    A push costs a forward-mode pass per vector (1 gradient), a pull a forward pass and a backward pass per vector (1
    gradient). With `pushes` by double backward, a push takes a second backward pass. By rows it needs only first
    derivatives: C backward passes for each point, whose rows all vectors share. Outputs alone are computed for
    `at_once` points at a time (0: all).
    """

    kind = "streamed"
    nbytes = 0

    def __init__(
        self,
        model: Model,
        inputs: Any,
        names: Sequence[str],
        pushes: Pushes = "forward mode",
        at_once: int = 0,
    ) -> None:
        self.model, self.inputs, self.names = model, inputs, tuple(names)
        self.pushes, self.at_once = pushes, at_once
        self._outputs: Tensor | None = None
        self._graph: _Graph | None = None

    @property
    def outputs(self) -> Float[Tensor, "n C"]:
        """The outputs f(θ, inputs)."""
        if self._outputs is None:
            with torch.no_grad():
                outputs = [self.model(self.model.values, subset) for subset in in_pieces(self.inputs, self.at_once)]
            self._outputs = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self._outputs

    def record(self) -> None:
        """Record a pass that gives the outputs and is used by the next pull."""
        self._graph = record_graph(self.model, self.inputs, self.names)
        self._outputs = self._graph.outputs.detach()

    def push(self, tangents: Mapping[str, Tensor]) -> Float[Tensor, "K n C"]:
        """Return J V for K tangents by name, (K, *shape) each."""
        if self.pushes == "double backward":
            return record_graph(self.model, self.inputs, self.names).push(tangents)
        if self.pushes == "rows":
            return self._push_by_rows(tangents)
        _load_forward_mode()
        pushed, values = [], self.model.values
        for k in range(len(next(iter(tangents.values())))):
            with self.model.differentiating(), torch.no_grad(), forward_ad.dual_level():
                duals = {name: _dual(values[name], as_stored(tangents[name][k])) for name in self.names}
                outputs, result = forward_ad.unpack_dual(self.model({**values, **duals}, self.inputs))
            self._outputs = outputs.detach()
            pushed.append(torch.zeros_like(outputs) if result is None else result.detach())
        return _stack(pushed)

    def _push_by_rows(self, tangents: Mapping[str, Tensor]) -> Float[Tensor, "K n C"]:
        points = range(num_points(self.inputs))
        graphs = (record_graph(self.model, take(self.inputs, slice(n, n + 1)), self.names) for n in points)
        return torch.stack([graph.push_by_rows(tangents) for graph in graphs], 1)

    def pull(self, cotangents: Float[Tensor, "K n C"]) -> Blocks:
        """Return Jᵀ U for K cotangents, by name, (K, *shape) each."""
        graph, self._graph = self._graph, None
        return (graph or record_graph(self.model, self.inputs, self.names)).pull(cotangents, keep=False)


class Recorded:
    """The recorded engine: J of one batch from one kept forward pass, 1.33 gradients per push and pull instead of 2.

    Pulls run backward through the graph. Pushes run the replay of a forward-mode pass or, without one, differentiate
    the pull (double backward).
    """

    kind = "recorded"

    def __init__(self, model: Model, inputs: Any, names: Sequence[str], replay: Replay | None) -> None:
        self.model, self.names, self._replay = model, tuple(names), replay
        self._graph, saved = count_saved(model, inputs, names)
        tensors = [tensor for _, tensor in components(normalise(inputs))]
        # The graph of a pull, for a double backward pass, kept at most twice as much again when measured.
        self.nbytes = saved * 3 if replay is None else saved + replay.nbytes([*model.tensors(), *tensors])

    @property
    def outputs(self) -> Float[Tensor, "n C"]:
        """The outputs f(θ, inputs)."""
        return self._graph.outputs.detach()

    def push(self, tangents: Mapping[str, Tensor]) -> Float[Tensor, "K n C"]:
        """Return J V for K tangents by name, (K, *shape) each."""
        if self._replay is None:
            return self._graph.push(tangents)
        columns = next(iter(tangents.values())).shape[0]
        with torch.no_grad():
            return _stack([self._replay(_one_of(tangents, self.names, k)) for k in range(columns)])

    def pull(self, cotangents: Float[Tensor, "K n C"]) -> Blocks:
        """Return Jᵀ U for K cotangents, by name, (K, *shape) each."""
        return self._graph.pull(cotangents)


class KeptRows:
    """The engine of few outputs: the rows of J of one batch, or of Lᵀ J for a root L, as a matrix.

    Building it costs a forward pass and a backward pass per row for each point alone. Products then take no pass.
    `at_once` is as in `Streamed`, `together` as in `_Graph.pull`.
    """

    kind = "formed"

    def __init__(self, model: Model, inputs: Any, at_once: int, together: int, root: Root = IDENTITY) -> None:
        self._layout = model.selection
        self.outputs = Streamed(model, inputs, self._layout.names, at_once=at_once).outputs
        n, columns = len(self.outputs), root.num_columns(self.outputs.shape[1])
        with torch.no_grad():
            cotangents = root.columns(self.outputs, 0, columns)
        self._rows = model.theta.new_empty(n, columns, self._layout.size)
        of_points = point_rows(model, inputs, self._layout.names, cotangents, together, outputs=self.outputs)
        for rows, pulled in zip(self._rows, of_points):
            for name, target in self._layout.named(rows).items():
                target.copy_(pulled[name])
        self.nbytes = self._rows.nbytes

    def push(self, tangents: Mapping[str, Tensor]) -> Float[Tensor, "K n R"]:
        """Return Lᵀ J V for K tangents by name, (K, *shape) each."""
        with torch.no_grad():
            rows = self._layout.named(self._rows.flatten(0, 1))
            pushed = [_as_matrix(tangents[name]) @ _as_matrix(block).mT for name, block in rows.items()]
            return torch.stack(pushed).sum(0).unflatten(1, self._rows.shape[:2])

    def pull(self, cotangents: Float[Tensor, "K n R"]) -> Blocks:
        """Return Jᵀ L U for K cotangents, by name, (K, *shape) each."""
        with torch.no_grad():
            return self._layout.named(cotangents.flatten(1) @ self._rows.flatten(0, 1))


def record_replay(model: Model, inputs: Any, names: Sequence[str]) -> Replay | None:
    """Return one recorded forward-mode pass over the tangents; None if it fails or cannot be run again."""
    recorder = Recorder()
    with (
        contextlib.suppress(RuntimeError, NotImplementedError),
        model.differentiating(),
        torch.no_grad(),
        forward_ad.dual_level(),
        recorder,
    ):
        values = model.values
        duals = {}
        for name in names:
            duals[name] = _dual(values[name], values[name])  # any tangent serves, such as the weights, which exist
            recorder.follow(name, forward_ad.unpack_dual(duals[name]).tangent)
        return recorder.replay(forward_ad.unpack_dual(model({**values, **duals}, inputs)).tangent)
    return None


class _Graph:
    """One recorded forward pass: pulls by backward passes, pushes by differentiating a pull (always its adjoint)."""

    def __init__(self, model: Model, leaves: Blocks, outputs: Float[Tensor, "n C"]) -> None:
        self.model, self.names, self._leaves, self.outputs = model, tuple(leaves), leaves, outputs

    def pull(
        self, cotangents: Float[Tensor, "K n C"], keep: bool = True, together: int = 1, graph: bool = False
    ) -> Blocks:
        """Return Jᵀ U, by a backward pass for `together` cotangents, or for each if an operation has no batching rule.

        Without `keep` the last pass frees the graph behind it, and must be the last one. With `graph` the result has
        its own graph.
        """
        leaves, rows = [*self._leaves.values()], list[list[Tensor]]()
        if not self.outputs.requires_grad:
            return {name: leaf.new_zeros(len(cotangents), *leaf.shape) for name, leaf in self._leaves.items()}
        with self.model.differentiating(), self.model.holding(self._leaves):
            if not graph and min(together, len(cotangents)) > 1:
                with contextlib.suppress(RuntimeError):
                    return self._pull_batched(cotangents.split(together), leaves)
            for k, u in enumerate(cotangents):
                options: dict[str, Any] = {"create_graph": graph, "materialize_grads": True}
                options["retain_graph"] = graph or keep or k + 1 < len(cotangents)
                # A copy: a custom backward that writes into its argument would write into the caller's vector.
                gradients = torch.autograd.grad(self.outputs, leaves, u.clone(), **options)
                rows.append([gradient if graph else gradient.detach() for gradient in gradients])
        return {name: _stack([row.pop(0) for row in rows]) for name in self.names}  # freed as they are stacked

    def _pull_batched(self, blocks: Sequence[Float[Tensor, "k n C"]], leaves: list[Tensor]) -> Blocks:
        """Return Jᵀ U by a backward pass for each block."""
        options: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "is_grads_batched": True}
        parts = [torch.autograd.grad(self.outputs, leaves, U, **options) for U in blocks]
        pulled = {}
        for (name, leaf), *gradients in zip(self._leaves.items(), *parts):
            unused = (leaf.new_zeros(len(U), *leaf.shape) for U in blocks)  # the outputs do not depend on it
            pulled[name] = torch.cat([*unused] if gradients[0] is None else gradients)
        return pulled

    @cached_property
    def _adjoint(self) -> tuple[Tensor, Blocks]:
        """A dummy cotangent w and the recorded pull g(w) = Jᵀw, linear in w."""
        dummy = torch.zeros_like(self.outputs).requires_grad_()
        gradients = torch.autograd.grad(
            self.outputs, list(self._leaves.values()), dummy, create_graph=True, allow_unused=True
        )
        pairs = zip(self.names, gradients)
        return dummy, {name: g for name, g in pairs if g is not None and g.requires_grad}

    def push(self, tangents: Mapping[str, Tensor]) -> Float[Tensor, "K n C"]:
        """Return J V by double backward passes."""
        columns = len(next(iter(tangents.values())))
        with self.model.differentiating(), self.model.holding(self._leaves):
            pushed = self.outputs.detach().new_zeros(columns, *self.outputs.shape)
            dummy, pulled = self._adjoint if self.outputs.requires_grad else (self.outputs, {})
            for k in range(columns if pulled else 0):  # without any, the derivative is zero whatever the cotangent
                along = [
                    tangent.clone() if tangent.is_inference() else tangent
                    for tangent in _one_of(tangents, pulled, k).values()
                ]
                (result,) = torch.autograd.grad(list(pulled.values()), dummy, along, retain_graph=True)
                pushed[k] = result.detach()
        return pushed

    def push_by_rows(self, tangents: Mapping[str, Tensor]) -> Float[Tensor, "K C"]:
        """Return J V at the one point of this graph; its rows come one at a time from backward passes."""
        (outputs,) = self.outputs.detach()
        columns = next(iter(tangents.values())).shape[0]
        result = outputs.new_empty(columns, len(outputs))
        for c in range(len(outputs)):
            unit = torch.zeros_like(outputs).index_fill(0, torch.tensor(c, device=outputs.device), 1.0)
            row = self.pull(unit.view(1, 1, -1), keep=c + 1 < len(outputs))
            result[:, c] = sum(tangents[name].flatten(1) @ row[name].flatten() for name in self.names)
        return result


def record_graph(model: Model, inputs: Any, names: Sequence[str]) -> _Graph:
    """Return one forward pass with its graph."""
    with model.differentiating():
        values = model.values
        leaves = {name: values[name].detach().requires_grad_() for name in names}
        return _Graph(model, leaves, model({**values, **leaves}, inputs))


def record_each(model: Model, inputs: Any, names: Sequence[str], outputs: Float[Tensor, "n C"] | None) -> _Graph | None:
    """Return a pass in which each point has its own copy of these parameters, so that pulls are its rows (n, *shape).

    That of several points is one by `vmap`, and None if it fails or does not give these `outputs`.
    """
    n = num_points(inputs)
    with model.differentiating():
        values = model.values
        leaves = {name: values[name].detach().expand(n, *values[name].shape).clone().requires_grad_() for name in names}
        if n == 1:
            own = {name: leaf[0] for name, leaf in leaves.items()}
            return _Graph(model, leaves, model({**values, **own}, inputs))
        if outputs is None or isinstance(inputs, Objects):
            return None

        def of_one(own: Blocks, point: Any) -> Tensor:
            return model({**values, **own}, map_inputs(lambda tensor: tensor.unsqueeze(0), point)).squeeze(0)

        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")  # point by point would be no faster
                mapped = torch.func.vmap(of_one)(leaves, inputs)
        except (RuntimeError, TypeError, ValueError):  # no rule, control flow by values, randomness
            return None
    slack = model.eps**0.5 * outputs.abs().max()
    return _Graph(model, leaves, mapped) if bool(((mapped - outputs).abs() <= slack).all()) else None


def point_rows(
    model: Model,
    inputs: Any,
    names: Sequence[str],
    cotangents: Float[Tensor, "r n C"],
    together: int = 1,
    graph: bool = False,
    outputs: Float[Tensor, "n C"] | None = None,
) -> Iterator[Blocks]:
    """Yield the rows of Jᵀ U point by point, (r, *shape) by name.

    If their `outputs` are there, a pass is one of several points, as many as make `together` backward passes, or of one
    each, once a pass of several has failed.
    """
    start, total, width = 0, num_points(inputs), 1 if outputs is None else max(1, together // max(1, len(cotangents)))
    if isinstance(inputs, WholeBatch):  # such as the nodes of a graph, of which none runs alone
        with model.lock:
            whole = record_graph(model, inputs, names)
        for n in range(total):
            alone = torch.zeros_like(cotangents)
            alone[:, n] = cotangents[:, n]
            with model.lock:
                rows = whole.pull(alone, keep=n + 1 < total, together=together, graph=graph)
            yield rows
        return
    while start < total:
        points = slice(start, min(total, start + width))
        some, U = take(inputs, points), cotangents[:, points]
        with model.lock:
            recorded = record_each(model, some, names, None if outputs is None else outputs[points])
            if recorded is not None:
                rows = recorded.pull(U, keep=False, together=max(1, together // width), graph=graph)
            if recorded is None or (points.stop > start + 1 and not _add_up(model, some, U, rows)):
                width = 1
                continue
        for n in range(points.stop - start):
            yield {name: row[:, n] for name, row in rows.items()}
        start = points.stop


def _add_up(model: Model, inputs: Any, cotangents: Float[Tensor, "r n C"], rows: Blocks) -> bool:
    """Return whether random combinations of rows (r, n, *shape) are those of a pass of the model over these points.

    The derivatives of a mapped pass may be wrong where its outputs are not: those of `F.embedding` with a padding row.
    """
    shares = torch.randn(cotangents.shape[:2], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shares = shares.to(cotangents)
    whole = record_graph(model, inputs, [*rows]).pull(
        torch.einsum("rn,rnc->nc", shares, cotangents).unsqueeze(0), False
    )
    for name, row in rows.items():
        gap = torch.einsum("rn,rn...->...", shares, row) - whole[name][0]
        size = torch.einsum("rn,rn...->...", shares.abs(), row.abs())
        slack = model.eps**0.5 * size + 1000 * model.eps * size.amax() if size.numel() else size
        if not bool((gap.abs() <= slack).all()):
            return False
    return True


def _stack(rows: list[Tensor]) -> Tensor:
    """Return the rows as one tensor; a single one is not copied."""
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)


def _as_matrix(block: Float[Tensor, "K *shape"]) -> Float[Tensor, "K d"]:
    return block.reshape(len(block), -1)


def _one_of(tangents: Mapping[str, Tensor], names: Iterable[str], k: int) -> Blocks:
    return {name: as_stored(tangents[name][k]) for name in names}


@cache
def _load_forward_mode() -> None:
    """Let torch load what its forward mode needs, once, without the warning of a deprecation of its own.

    Levels of dual numbers are those of the process, so only one thread at a time may do so.
    """
    with PROCESS_LOCK, warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore")
        forward_ad.make_dual(torch.zeros(()), torch.zeros(()))


def _dual(value: Tensor, tangent: Tensor) -> Tensor:
    dual: Tensor = forward_ad.make_dual(_own_storage(value), _own_storage(tangent))
    return dual


def _own_storage(view: Tensor) -> Tensor:
    """Return these numbers in a storage of their own size, in the same memory if possible.

    A dual number keeps a tangent unchanged only if both storages have the same layout; for views into the flat vector
    it would allocate a tangent as large as all weights.
    """
    if view.device.type in ("cpu", "cuda") and not view.is_inference():
        return from_dlpack(view.detach().resolve_neg())  # DLPack knows no bit for a sign
    return view.detach().clone()


def hessian_product(
    model: Model, likelihood: Likelihood, block: Float[Tensor, "D K"], inputs: Any, batch: Batch
) -> Float[Tensor, "D K"]:
    """Return the Hessian of one batch's negative log-likelihood times a block of vectors."""
    tangents, leaves = model.selection.split(block), model.leaves()
    with model.differentiating(), model.holding(leaves):
        loss = -likelihood.log_prob(model(leaves, inputs), batch.targets, batch.weights).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, allow_unused=True)
        used = {name: g for name, g in zip(leaves, gradients) if g is not None and g.requires_grad}
        rows = [_derivative(used, leaves, {name: tangents[name][k] for name in used}) for k in range(block.shape[1])]
        return model.selection.join({name: torch.stack([row[name] for row in rows]) for name in leaves})


def _derivative(outputs: Blocks, leaves: Blocks, along: Blocks) -> Blocks:
    """Return the gradient of Σ ⟨outputs, along⟩, by the leaves' names."""
    if not outputs:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    cotangents = [along[name].clone() for name in outputs]
    try:
        gradients = torch.autograd.grad(
            list(outputs.values()), list(leaves.values()), cotangents, retain_graph=True, materialize_grads=True
        )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f"an operation of the model or the loss has no second derivatives: {error}. Write it out (torch's "
            "hardsigmoid as (x + 3).clamp(0, 6) / 6), or use co.GGN(lin), which needs only the model's first ones."
        ) from error
    return {name: gradient.detach() for name, gradient in zip(leaves, gradients)}


def count_saved(model: Model, inputs: Any, names: Sequence[str]) -> tuple[_Graph, int]:
    """Return a pass with its graph, and the bytes of the inputs and of the distinct storages that autograd saves in it.

    The model's own storages are not counted, and for inputs, which may be slices of all data, only their own bytes are.
    A model that differentiates itself by `torch.func` allows no hooks of saved tensors: it runs again, and the results
    of all operations count, of which the saved ones are a part.
    """
    tensors = [tensor for _, tensor in components(normalise(inputs))]
    own_bytes = sum([tensor.nbytes for tensor in tensors])
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())  # an operation that saves its own output would never be freed
        return saved[-1]

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            graph = record_graph(model, inputs, names)
        total = own_bytes + bytes_beside(saved, [*model.tensors(), *tensors])
        saved.clear()  # the graph holds its hooks
        return graph, total
    except RuntimeError:
        with Operations() as operations:
            graph = record_graph(model, inputs, names)
        return graph, own_bytes + operations.nbytes


class Operations(EagerMode):
    """The operations of a pass: their bytes, their multiply-adds, and whether they look up a padding row.

    Bytes are those of results; multiply-adds those of the operations that torch counts.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes, self.multiply_adds, self.looks_up_padding = 0, 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.embedding.default:
            padding = args[2] if len(args) > 2 else (kwargs or {}).get("padding_idx", -1)
            self.looks_up_padding = self.looks_up_padding or (padding >= 0 and args[0].requires_grad)
        results = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.multiply_adds += count(*args, **(kwargs or {}), out_val=results) // 2
        if not any(result.alias_info for result in func._schema.returns):  # neither views nor written in place
            self.nbytes += sum(result.nbytes for result in all_of(Tensor, results) if result.layout is torch.strided)
        return results
