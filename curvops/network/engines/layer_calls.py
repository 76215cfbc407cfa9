"""What a forward pass leaves of each layer: its input a and its place in the graph, from which δ follows.

`nn.MultiheadAttention` computes its projections by functional calls that run no hooks. If query, key and value are the
same tensor, `in_proj_weight` is one linear layer; `out_proj` always is one. In the recorded pass both are computed
separately, with points first, and torch's attention is called with identity matrices in their place.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import TorchFunctionMode

from curvops.ambient import CACHE_BYTES
from curvops.checks import in_functorch
from curvops.network.data.inputs import num_points
from curvops.network.data.objects import WholeBatch
from curvops.network.engines.rows_of_points import (
    SEVERAL,
    RaggedRows,
    SharedLayers,
    beside_others,
    digit_weights,
    for_each_point,
    points_of_rows,
)
from curvops.network.engines.rules import Rule, SingleRows, rule_for, rule_of
from curvops.network.engines.rules.layer_rules import LinearRule
from curvops.network.model.model import NOTHING, Model
from curvops.network.model.parameters import Blocks

Owners = dict[nn.Module, dict[str, str]]
# Operations that change the shape of numbers, but not their order.
RESHAPES = ("View", "UnsafeView", "ReshapeAlias", "Alias", "Squeeze", "Unsqueeze", "Clone", "ToCopy")
# Functions of one number at a time.
ELEMENTWISE = (
    *("Relu", "LeakyRelu", "Elu", "Celu", "Gelu", "Silu", "Mish", "Softplus", "Tanh", "Sigmoid", "LogSigmoid"),
    *("Hardtanh", "Hardswish", "Hardsigmoid", "Threshold"),
)


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer with its rule, the names of its selected parameters, and the shape of its output.

    `is_last`: its outputs are the model's outputs, position by position. `feeds_last`: an elementwise function of its
    outputs is the last layer's input, with no positions, and that layer's weight is selected. `is_ragged`: its rows
    belong to points unevenly; its output is the table of these rows.
    """

    path: str
    module: Any
    rule: Rule
    names: dict[str, str]  # "weight" -> the parameter's name in the model
    output: torch.Size
    inputs: int  # numbers per point of its input that are kept in the parameters' dtype
    multiply_adds: int
    is_last: bool = False
    feeds_last: bool = False
    is_ragged: bool = False

    @property
    def size(self) -> int:
        """The number of selected parameters of this layer."""
        return sum(self.shape_of(local).numel() for local in self.names)

    def as_rows(self, columns: int) -> bool:
        """Return whether `columns` rows per point of the layer's Jacobian are fewer numbers than its input a and δ."""
        return columns * self.size <= columns * self.output[1:].numel() + self.inputs

    def shape_of(self, local: str) -> torch.Size:
        """Return the shape of the layer's "weight" or "bias"."""
        return getattr(self.module, local).shape

    @property
    def width(self) -> int:
        """The number q of columns of the layer's matrix (g, p, q) of weight and bias; see `Rule.left`, `Rule.right`."""
        shape = self.shape_of("weight")
        return (shape[0] if self.rule.matrix_is_transposed else shape[1:].numel()) + ("bias" in self.names)

    @property
    def height(self) -> int:
        """The number g·p of rows of all groups of the layer's matrix."""
        return self.shape_of("weight")[1 if self.rule.matrix_is_transposed else 0]

    def to_matrix(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the layer's matrix (g, p, q) from tensors by parameter name, the bias as its last column."""
        weight, groups = tensors[self.names["weight"]], getattr(self.module, "groups", 1)
        if self.rule.matrix_is_transposed:
            weight = weight.mT
        matrix = weight.reshape(groups, weight.shape[0] // groups, -1)
        if "bias" not in self.names:
            return matrix
        return torch.cat([matrix, tensors[self.names["bias"]].reshape(groups, -1, 1)], -1)

    def from_matrix(self, matrix: Tensor) -> Blocks:
        """Return tensors by parameter name, the inverse of `to_matrix`."""
        tensors = {}
        if "bias" in self.names:
            matrix, bias = matrix.tensor_split((-1,), -1)
            tensors[self.names["bias"]] = bias.flatten()
        turned = matrix[0].mT if self.rule.matrix_is_transposed else matrix
        return tensors | {self.names["weight"]: turned.reshape(self.shape_of("weight"))}


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a layer in a recorded pass: its input a, and its position in the graph.

    `layer_input` is what the rule keeps of a, and `shape` that of the output. With `rows`, the rows of the call belong
    to points unevenly, and `layer_input` is their table.
    """

    owner: nn.Module
    layer: Layer
    a: Tensor
    version: int  # of a
    layer_input: Tensor
    shape: torch.Size
    edge: GradientEdge
    rows: RaggedRows | None = None


Recording = tuple[Tensor, list[Call], set[str]]
"""The outputs of a pass with their graph, the calls of layers, and the parameters of layers that ran differently."""


# (the projection as a linear layer, its arguments and keywords, output, the module that owns the parameters)
Note = Callable[[nn.Module, Any, Any, Tensor, nn.Module], None]
SIGNATURE = inspect.signature(F.multi_head_attention_forward)


class Projections(TorchFunctionMode):
    """A context that calls `note` with each projection of these attention modules."""

    def __init__(self, modules: Sequence[nn.MultiheadAttention], note: Note) -> None:
        super().__init__()
        self.modules, self.note = modules, note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.multi_head_attention_forward:
            arguments = SIGNATURE.bind(*args, **(kwargs or {})).arguments
            for module in self.modules:
                if arguments["out_proj_weight"] is module.out_proj.weight and arguments["query"].ndim == 3:
                    return self._attention(module, arguments)
        return func(*args, **(kwargs or {}))

    def _attention(self, module: nn.MultiheadAttention, arguments: dict[str, Any]) -> Any:
        query, out_weight, out_bias = arguments["query"], arguments["out_proj_weight"], arguments["out_proj_bias"]
        if query is arguments["key"] is arguments["value"] and arguments["in_proj_weight"] is not None:
            weight, bias = arguments["in_proj_weight"], arguments["in_proj_bias"]
            projections = self._project(module, _as_layer(weight, bias), query, weight, bias).chunk(3, -1)
            identity = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device).repeat(3, 1)
            arguments = arguments | dict(zip(("query", "key", "value"), projections)) | {"in_proj_weight": identity}
            arguments["in_proj_bias"] = None
        identity = torch.eye(out_weight.shape[1], dtype=out_weight.dtype, device=out_weight.device)
        attended, weights = F.multi_head_attention_forward(
            **{**arguments, "out_proj_weight": identity, "out_proj_bias": None}
        )
        return self._project(module.out_proj, module.out_proj, attended, out_weight, out_bias), weights

    def _project(self, owner: nn.Module, layer: nn.Linear, a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the projection of (positions, points, width)."""
        first = a.transpose(0, 1)
        output = F.linear(first, weight, bias)
        self.note(layer, (first,), {}, output, owner)
        return output.transpose(0, 1)


def _as_layer(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a layer of these shapes, without data."""
    return nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")


def owners_of(model: Model) -> Owners:
    """Return layers with a rule and their selected parameters: {layer: {"weight": the parameter's name}}.

    A parameter is left out unless every module that holds it (weights may be tied) is such a layer.
    """
    ruled = {module for module in model.paths if rule_for(module) is not None}
    left = set(model.selection.names) - model.complex
    projections = ("in_proj_weight", "in_proj_bias")  # of query, key and value
    for module, local, name in model.slots:
        if not (module in ruled or (type(module) is nn.MultiheadAttention and local in projections)):
            left.discard(name)
    owners: Owners = {}
    for module, local, name in model.slots:
        if name in left:
            owners.setdefault(module, {})[local] = name
    return owners


def record(
    model: Model,
    inputs: Any,
    owners: Owners,
    graph: bool = False,
    ragged: Collection[str] | None = None,
    shared: SharedLayers | None = None,
) -> Recording:
    """Return one forward pass with its graph, the calls of the layers in `owners`, and the parameters of misfits.

    With `graph`, kept inputs have their graph, too.

    A misfit is a layer that ran without gradients, on rows that belong to several points (a single query), in another
    dtype (autocast), with further arguments, or on a tensor that was written to later. Rows that belong to points
    unevenly, or in another order (positions first), are those of all calls with another number of rows than points, and
    of the layers of the parameters in `ragged`; without such a collection, their layers are misfits, too. Rows of the
    layers in `shared` are repeated for each point. All hooks are removed after the pass.
    """
    calls: list[Call] = []
    forms: dict[int, SingleRows] = {}  # of ragged calls, by their positions among the calls
    misfits: set[str] = set()
    dtype, n, paths = model.theta.dtype, num_points(inputs), model.paths
    attentions = [module for module in paths if isinstance(module, nn.MultiheadAttention)]
    names_of_ragged, shared = frozenset(ragged or ()), shared or {}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Tensor, owner: nn.Module | None = None) -> None:
        """Note the call of a layer, or of a projection that the attention module `owner` computes."""
        owner = module if owner is None else owner
        if owner not in owners:
            return
        path, names = paths[owner], owners[owner]
        if module not in paths:  # the common projection of query, key and value
            path, names = f"{path}.in_proj".lstrip("."), {k.removeprefix("in_proj_"): name for k, name in names.items()}
        rule, node = rule_of(type(module)), output.grad_fn
        assert rule is not None  # only such layers have hooks
        arguments = [value for value in (*args, *kwargs.values()) if value is not None]
        tensors = [t for t in arguments if isinstance(t, Tensor)]
        coarse = [t for t in (*tensors, output) if t.dtype != dtype and t.is_floating_point()]
        even = (
            len(arguments) == 1
            and output.ndim > 1
            and output.shape[0] == n
            and names_of_ragged.isdisjoint(names.values())
        )
        form = None
        if not even and ragged is not None and arguments and len(tensors) == len(arguments) and not in_functorch():
            form = rule.single_rows(module, *(t if graph else t.detach() for t in tensors))
        if node is None or coarse or not (even or form):
            misfits.update(names.values())
            return
        a, count, work = tensors[0], output.shape[0] if form else n, rule.multiply_adds(module, output)
        layer_input = form.layer_input if form else rule.keep(module, a if graph else a.detach())
        size = layer_input.nbytes // (n * output.element_size())
        layer = Layer(path, module, rule, names, output.shape, size, work * count // n, is_ragged=form is not None)
        if form:
            forms[len(calls)] = form
        calls.append(Call(owner, layer, a, a._version, layer_input, output.shape, _edge_of(output)))

    def repeat_and_note(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        *args, output = for_each_point(args, output, shared[module], n)
        note(module, args, kwargs, output)
        return output

    handles: list[Any] = []
    try:
        for module in owners:
            if rule_of(type(module)) is not None:
                hook = repeat_and_note if module in shared else note
                handles.append(module.register_forward_hook(hook, with_kwargs=True))
        with model.differentiating(), Projections(attentions, note) if attentions else NOTHING:
            outputs = model(model.leaves(), inputs)
    finally:
        for handle in handles:
            handle.remove()
    behind, before = _follow(outputs.grad_fn, RESHAPES), list[Node]()
    for i, call in enumerate(calls):
        if call.edge.node in behind and isinstance(call.layer.rule, LinearRule) and i not in forms:
            calls[i] = replace(call, layer=replace(call.layer, is_last=True))
            if call.a.ndim == 2 and call.layer.names.get("weight") in model.values:
                before = _follow(call.a.grad_fn, ELEMENTWISE)
        if call.a._version != call.version:
            misfits.update(call.layer.names.values())
    for i, call in enumerate(calls):
        if call.edge.node in before and i not in forms:
            calls[i] = replace(call, layer=replace(call.layer, feeds_last=True))
    if forms:
        # A table may be this many times as large as its rows; otherwise fewer points are taken, unless there are none.
        most_padding = math.inf if isinstance(inputs, WholeBatch) else 8.0
        _find_points(model, outputs, calls, forms, misfits, most_padding)
    return outputs, calls, misfits


def _edge_of(output: Tensor) -> GradientEdge:
    """Return the place of a layer's output in the graph, at which an in-place activation after the layer leaves it.

    What writes to a view, as of several positions, moves it on in the graph, but not what it is a view of.
    """
    base = output._base if output._is_view() and output.is_contiguous() else None
    if base is not None and base.grad_fn is not None and base.is_contiguous() and base.numel() == output.numel():
        output = base
    assert output.grad_fn is not None
    return GradientEdge(output.grad_fn, output.output_nr)


def _find_points(
    model: Model,
    outputs: Tensor,
    calls: list[Call],
    forms: Mapping[int, SingleRows],
    misfits: set[str],
    most_padding: float,
) -> None:
    """Put the rows of ragged calls into tables, after backward passes that show the point of each row of all calls.

    A call with a row on which several points depend, a ragged one whose table would be too large, and another one whose
    rows are not those of the points in their order, are misfits.
    """
    n, weights = len(outputs), digit_weights(len(outputs), outputs)
    generator = torch.Generator(device=outputs.device).manual_seed(0)
    u = torch.randn(outputs.shape, dtype=outputs.dtype, device=outputs.device, generator=generator)
    deltas = sensitivities(model, outputs, calls, weights.unsqueeze(2) * u) if n > 1 else [None] * len(calls)
    for i, (call, delta) in enumerate(zip(calls, deltas)):
        form = forms.get(i)
        if delta is None:
            delta = outputs.new_zeros(()).expand(call.layer.output[0], len(weights), *call.layer.output[1:])
        of_rows = delta.transpose(0, 1) if form is None else form.split(delta.transpose(0, 1))
        points = points_of_rows(of_rows, n, model.eps)
        apart = not bool((points == SEVERAL).any())
        if apart and form is None and bool(((points < 0) | (points == torch.arange(n).to(points))).all()):
            continue
        rows = RaggedRows(form, beside_others(points, n), n) if apart and form is not None else None
        if rows is None or n * rows.width > most_padding * max(n, len(rows.places)):
            misfits.update(call.layer.names.values())
            continue
        assert form is not None
        output = torch.Size((n, rows.width, *of_rows.shape[2:]))
        size = rows.layer_input[0].nbytes // outputs.element_size()
        layer = replace(call.layer, rule=form.rule, output=output, inputs=size)
        calls[i] = replace(call, layer=layer, layer_input=rows.layer_input, rows=rows)


def positions_of_rows(model: Model, outputs: Tensor, calls: Sequence[Call], positions: int) -> list[Tensor | None]:
    """Return the positions of the outputs to which rows belong, in the table (n, T) of each ragged call; else None.

    The entry of a row that several positions depend on, or none, is negative.
    """
    n, weights = len(outputs), digit_weights(positions, outputs)
    generator = torch.Generator(device=outputs.device).manual_seed(0)
    u = torch.randn(outputs.shape, dtype=outputs.dtype, device=outputs.device, generator=generator)
    cotangents = (u.unflatten(1, (positions, -1)) * weights[:, None, :, None]).flatten(2)
    deltas = iter(sensitivities(model, outputs, [call for call in calls if call.rows is not None], cotangents))
    tables: list[Tensor | None] = []
    for call in calls:
        delta = None if call.rows is None else next(deltas)
        rows = None if delta is None else delta.transpose(0, 1).flatten(1, 2)
        tables.append(None if rows is None else points_of_rows(rows, positions, model.eps).view(n, -1))
    return tables


def _follow(node: Node | None, kinds: Collection[str]) -> list[Node]:
    """Return a node and its predecessors as long as each is of these kinds, with one operand; the last may differ."""
    path = []
    while node is not None:
        path.append(node)
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        node = parents[0] if len(parents) == 1 and node.name().partition("Backward")[0] in kinds else None
    return path


def never_ran(calls: Sequence[Call], owners: Owners) -> set[str]:
    """Return the names of parameters whose layers were not called."""
    ran = {id(call.owner) for call in calls}
    return {name for module, names in owners.items() if id(module) not in ran for name in names.values()}


def bytes_of_one(calls: Sequence[Call], itemsize: int) -> int:
    """Return the bytes of δ of all calls for one cotangent of the outputs."""
    return sum(call.layer.output.numel() for call in calls) * itemsize


def sensitivities(
    model: Model, outputs: Tensor, calls: Sequence[Call], cotangents: Float[Tensor, "r n C"], graph: bool = False
) -> list[Tensor | None]:
    """Return δ (n, r, *out) of each call for r cotangents of the outputs; None for branches that do not reach them.

    With `graph` the results have their own graph. Those of ragged rows are in tables.
    """
    if not calls or not outputs.requires_grad:
        return [None] * len(calls)
    edges, deltas = [call.edge for call in calls], list[Tensor | None]()
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "create_graph": graph}
    # On a CPU, cotangents of larger δ get a backward pass each, since batching rules copy.
    small = outputs.is_cuda or bytes_of_one(calls, outputs.element_size()) < CACHE_BYTES
    with model.differentiating(), model.holding(model.leaves()):
        if small and len(cotangents) > 1:
            with suppress(RuntimeError):  # an operation without a batching rule
                together = torch.autograd.grad(outputs, edges, cotangents, is_grads_batched=True, **options)
                pairs = zip(calls, together)
                deltas = [None if d is None else d.reshape(-1, *call.shape).transpose(0, 1) for call, d in pairs]
        if not deltas:
            passes = [torch.autograd.grad(outputs, edges, u, **options) for u in cotangents]
            by_call = [list(gradients) for gradients in zip(*passes)]
            del passes
            # Those of a call are freed once they are copied.
            deltas = [_side_by_side(by_call.pop(0), call.shape) for call in calls]
    for i, (call, delta) in enumerate(zip(calls, deltas)):
        if call.rows is not None and delta is not None:
            deltas[i] = call.rows.sensitivities(delta.transpose(0, 1))
    return deltas


def _side_by_side(gradients: list[Tensor | None], shape: torch.Size) -> Tensor | None:
    """Return the δ of one call for all cotangents, zeros where there is none, in the shape of its output."""
    like = next((g for g in gradients if g is not None), None)
    if like is None or len(gradients) == 1:
        return None if like is None else like.reshape(shape).unsqueeze(1)
    return torch.stack([(torch.zeros_like(like) if g is None else g).reshape(shape) for g in gradients], 1)
