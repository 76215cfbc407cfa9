"""The last layer of a model, found by running it once, whatever the order of registration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.utils.parametrize import ParametrizationList

from curvops.network.data.inputs import Inputs
from curvops.network.model.calls import explain
from curvops.network.model.model import Model
from curvops.network.model.parameters import Blocks

# Linear or affine in every differentiated input: views, casts, choices, sums, means, scatters, paddings, resampling.
LINEAR = {
    "Add", "AdaptiveAvgPool1D", "AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "Alias", "AsStrided", "AvgPool2D",
    "AvgPool3D", "Cat", "Clone", "ConstantPadNd", "Copy", "Cumsum", "Diagonal", "Expand", "Flip", "Gather", "Index",
    "IndexAdd", "IndexCopy", "IndexPut", "IndexSelect", "MaskedFill", "MaskedScatter", "MaskedSelect", "Mean", "Neg",
    "Permute", "PixelShuffle", "Repeat", "ReshapeAlias", "Roll", "Rsub", "Scatter", "ScatterAdd", "Select",
    "SelectScatter", "Slice", "SliceScatter", "Split", "SplitWithSizes", "Squeeze", "Stack", "Sub", "Sum", "T", "Take",
    "ToCopy", "Transpose", "Unbind", "Unfold", "UnsafeView", "Unsqueeze", "UpsampleBilinear2D", "UpsampleNearest2D",
    "View", "Where",
}  # fmt: skip
# Linear if they add up or average, and not if they take the largest.
REDUCTIONS = {"ScatterReduce", "SegmentReduce"}
# Linear in one factor if the others are constants.
PRODUCTS = {"Addmm", "Baddbmm", "Bmm", "Convolution", "Div", "Dot", "Linear", "Mm", "Mul", "Mv", "SparseAddmm"}


def last_layer(model: Model, inputs: Inputs) -> tuple[str, ...]:
    """Return the names of the parameters of the single layer in whose output the model's output is linear.

    Views, choices, permutations, sums (over the atoms of a molecule, say), means and products with constants may follow
    the layer; parameters that are added to its output belong to it. Of modules around each other that own parameters it
    is the innermost. For a model given as a function, these are the parameters of the last product and those added to
    it. A tied weight is given its first name in the model. Costs one forward pass.

    Raises ValueError if there is no such layer, for example if the outputs are a softmax or a sum over two layers.
    """
    if model.module is None:
        names, why, remedy = _of_function(model, inputs), "or of no single product", "parameters='head.*'"
    else:
        search = _BehindOutputs(model, inputs)
        names, why, remedy = search.names, search.why, search.remedy
    if not names:
        raise ValueError(
            f"parameters='last_layer': not linear in the output of one layer ({why}); name its parameters, as {remedy}."
        )
    return names


def layer_of_outputs(model: Model, inputs: Inputs) -> nn.Module | None:
    """Return the single module with parameters in whose output the model's output is linear, or None.

    The model must be a module. One forward pass.
    """
    search = _BehindOutputs(model, inputs)
    return None if search.why or search.added else search.layers[0]


class _BehindOutputs:
    """The layers, and other parameters, in which a module's outputs are linear, by one forward pass.

    `why` is a sentence on why these are not one layer; empty if they are.
    """

    def __init__(self, model: Model, inputs: Inputs) -> None:
        assert model.module is not None
        self.module, self.paths = model.module, model.paths
        self.layers: list[nn.Module] = []
        self.added: dict[str, None] = {}
        self.calls: list[tuple[nn.Module, Node]] = []
        leaves = model.leaves()
        outputs = self._run(model, leaves, inputs)
        self.why = self._follow(outputs.grad_fn, {id(leaf): name for name, leaf in leaves.items()})

    def _run(self, model: Model, leaves: Blocks, inputs: Inputs) -> Tensor:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.grad_fn is not None:
                self.calls.append((module, output.grad_fn))

        handles = [layer.register_forward_hook(note) for layer in _innermost(model.hookable)]
        try:
            with explain(inputs), model.differentiating():
                return model.raw(leaves, inputs)
        finally:
            for handle in handles:
                handle.remove()

    def _follow(self, last: Node | None, names: dict[int, str]) -> str:
        """Note the layers behind the outputs, through linear operations; return why they are not one."""
        layers: dict[nn.Module, None] = {}
        waiting, seen = [last], set[Node]()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            layer = next((module for module, made in self.calls if made is node), None)
            if layer is not None:
                layers[layer] = None
            elif (name := names.get(id(getattr(node, "variable", None)))) is not None:
                self.added[name] = None
            elif _is_linear(node):
                waiting += _parents(node)
            elif _kind(node) in PRODUCTS:
                return f"they come from a product of parts that both depend on parameters, {node.name()}"
            else:
                return f"they come from {node.name()}, which is not linear"
        self.layers = [*layers]
        if len(layers) == 1:
            return ""
        if not layers:
            return "no layer with parameters is called before them"
        return f"they add up the outputs of {_listed([self.paths[layer] for layer in layers])}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the layer's parameters and of those added to its output; none if there is not one layer."""
        own = () if self.why else (*_names(self.module, self.layers[0]), *self.added)
        return tuple(dict.fromkeys(own))

    @property
    def remedy(self) -> str:
        """The parameters of the layers that ran last, as arguments."""
        ran = dict.fromkeys(layer for layer, _ in reversed(self.calls))
        globs = [f"{self.paths[layer]}.*".lstrip(".") for layer in [*ran][:3]]
        first, *rest = globs or ["head.*"]
        return f"parameters={first!r}" + (f" (layers before it: {_listed(rest)})" if rest else "")


def _innermost(parts: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that own parameters and contain no other such module, except for parametrisations."""
    own = {
        part: None
        for part in parts
        if any(True for _ in part.parameters(recurse=False)) and not isinstance(part, ParametrizationList)
    }
    return [part for part in own if not any(other in own for other in part.modules() if other is not part)]


def _names(module: nn.Module, layer: nn.Module) -> list[str]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for parameter in layer.parameters()]


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))


def _of_function(model: Model, inputs: Inputs) -> tuple[str, ...]:
    leaves = model.leaves()
    with model.differentiating():
        node = model.raw(leaves, inputs).grad_fn
    names = {id(leaf): name for name, leaf in leaves.items()}
    factors: dict[str, None] = {}
    while node is not None:
        behind = [_before_views(parent) for parent in _parents(node)]
        given = [names.get(id(getattr(end, "variable", None))) for end in behind]
        factors.update(dict.fromkeys(name for name in given if name is not None))
        rest = [end for end, name in zip(behind, given) if name is None]
        if any(given) and _kind(node) in PRODUCTS:
            break
        if not _is_linear(node) or len(rest) > 1:
            return ()
        node = rest[0] if rest else None  # a bias was added to this
    return tuple(name for name in leaves if name in factors)


def _before_views(node: Node) -> Node:
    """Return the first node before this one that is not a linear operation on one input without a constant factor."""
    while _kind(node) in LINEAR and len(_parents(node)) == 1:
        (node,) = _parents(node)
    return node


def _is_linear(node: Node) -> bool:
    """Return whether the result of a node is linear or affine in every differentiated input."""
    if _kind(node) == "Div" and node.next_functions[1][0] is not None:
        return False
    if _kind(node) in REDUCTIONS:
        return getattr(node, "_saved_reduce", "") in ("sum", "mean")
    return _kind(node) in LINEAR or (_kind(node) in PRODUCTS and len(_parents(node)) == 1)


def _parents(node: Node) -> list[Node]:
    return [parent for parent, _ in node.next_functions if parent is not None]


def _kind(node: Node) -> str:
    return node.name().rpartition("::")[2].partition("Backward")[0]
