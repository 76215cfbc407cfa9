"""The last layer of a model, found by running it once, whatever the order of registration."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from curvops.network.data.inputs import Inputs
from curvops.network.model.calls import explain
from curvops.network.model.model import Model

# Linear or affine in every differentiated input: views, casts, choices, sums, means, paddings, resampling.
LINEAR = {
    "Add", "AdaptiveAvgPool1D", "AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "Alias", "AsStrided", "AvgPool2D",
    "AvgPool3D", "Cat", "Clone", "ConstantPadNd", "Cumsum", "Diagonal", "Expand", "Flip", "Gather", "Index",
    "IndexSelect", "MaskedFill", "Mean", "Neg", "Permute", "PixelShuffle", "Repeat", "ReshapeAlias", "Roll", "Rsub",
    "Select", "Slice", "Split", "SplitWithSizes", "Squeeze", "Stack", "Sub", "Sum", "T", "ToCopy", "Transpose",
    "Unbind", "Unfold", "UnsafeView", "Unsqueeze", "UpsampleBilinear2D", "UpsampleNearest2D", "View", "Where",
}  # fmt: skip
# Linear in one factor if the others are constants.
PRODUCTS = {"Addmm", "Mm", "Bmm", "Baddbmm", "Mv", "Dot", "Convolution", "Linear", "Mul", "Div"}
REMEDY = "name its parameters by globs, as parameters='head.*'"


def last_layer(model: Model, inputs: Inputs) -> tuple[str, ...]:
    """Return the names of the parameters of the single layer in whose output the model's output is linear.

    Views, choices, permutations, sums, means and products with constants may follow the layer. For a model given as a
    function, these are the parameters of the last product and those added to it. A tied weight is given its first name
    in the model. Costs one forward pass.

    Raises ValueError if there is no such layer, for example if the outputs are a softmax or a sum over two layers.
    """
    if model.module is None:
        found = _of_function(model, inputs)
    else:
        layer = layer_of_outputs(model, inputs)
        found = () if layer is None else _names(model, layer)
    if not found:
        raise ValueError(
            "parameters='last_layer': the model's output is not linear in the output of one layer (a softmax, a sum of "
            f"branches or parameters outside a layer come after it); {REMEDY}."
        )
    return found


def layer_of_outputs(model: Model, inputs: Inputs) -> nn.Module | None:
    """Return the single module with parameters in whose output the model's output is linear, or None.

    The model must be a module. One forward pass.
    """
    assert model.module is not None
    calls: list[tuple[nn.Module, Node]] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.grad_fn is not None:
            calls.append((module, output.grad_fn))

    own = [part for part in model.hookable if any(True for _ in part.parameters(recurse=False))]
    handles = [module.register_forward_hook(note) for module in own]
    try:
        with explain(inputs), model.differentiating():
            outputs = model.raw(model.leaves(), inputs)
    finally:
        for handle in handles:
            handle.remove()
    found: dict[int, nn.Module] = {}
    waiting, seen = [outputs.grad_fn], set[Node]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        here = {id(module): module for module, made in calls if made is node}
        found |= here
        if here:
            continue
        if _is_linear(node):
            waiting += _parents(node)
        else:
            return None
    return next(iter(found.values())) if len(found) == 1 else None


def _names(model: Model, layer: nn.Module) -> tuple[str, ...]:
    assert model.module is not None
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    return tuple(names[id(parameter)] for parameter in layer.parameters(recurse=False))


def _of_function(model: Model, inputs: Inputs) -> tuple[str, ...]:
    leaves = model.leaves()
    with model.differentiating():
        node = model.raw(leaves, inputs).grad_fn
    names = {id(leaf): name for name, leaf in leaves.items()}
    found: dict[str, None] = {}
    while node is not None:
        behind = [_before_views(parent) for parent in _parents(node)]
        given = [names.get(id(getattr(end, "variable", None))) for end in behind]
        found.update(dict.fromkeys(name for name in given if name is not None))
        rest = [end for end, name in zip(behind, given) if name is None]
        if any(given) and _kind(node) in PRODUCTS:
            break
        if not _is_linear(node) or len(rest) > 1:
            return ()
        node = rest[0] if rest else None  # a bias was added to this
    return tuple(name for name in leaves if name in found)


def _before_views(node: Node) -> Node:
    """Return the first node before this one that is not a linear operation on one input without a constant factor."""
    while _kind(node) in LINEAR and len(_parents(node)) == 1:
        (node,) = _parents(node)
    return node


def _is_linear(node: Node) -> bool:
    """Return whether the result of a node is linear or affine in every differentiated input."""
    if _kind(node) == "Div" and node.next_functions[1][0] is not None:
        return False
    return _kind(node) in LINEAR or (_kind(node) in PRODUCTS and len(_parents(node)) == 1)


def _parents(node: Node) -> list[Node]:
    return [parent for parent, _ in node.next_functions if parent is not None]


def _kind(node: Node) -> str:
    return node.name().partition("Backward")[0]
