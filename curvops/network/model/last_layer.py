"""Which layer's output is the model's output? Found by running the model once, whatever the order of registration."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from curvops.network.data.inputs import Inputs
from curvops.network.model.model import Model

# What leaves numbers as they are: views, reshapes, casts, copies, and picking some of them out.
MOVES = ("Alias", "View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Squeeze", "Unsqueeze",
         "ToCopy", "Clone", "Select", "Slice", "Index", "IndexSelect", "Gather", "SqueezeDim")  # fmt: skip
PRODUCTS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Mv", "Dot", "Convolution", "Linear", "Mul")
REMEDY = "name its parameters by globs, as parameters='head.*'"


def last_layer(model: Model, inputs: Inputs) -> tuple[str, ...]:
    """Names of the parameters of the layer whose output is the model's, but for its shape, dtype and choice of entries.

    Of a function of its parameters, those that enter its outputs by one product, or are added to it. A weight that is
    tied to another layer's has the name that the model gives it first. One forward pass.

    Raises ValueError where there is none: the outputs are a softmax or a sum of two layers', say.
    """
    if model.module is None:
        found = _of_function(model, inputs)
    else:
        layer = layer_of_outputs(model, inputs)
        found = () if layer is None else _names(model, layer)
    if not found:
        raise ValueError(
            "parameters='last_layer': no single layer's output is the model's output (a softmax, a sum of branches or "
            f"parameters outside a layer come after it); {REMEDY}."
        )
    return found


def layer_of_outputs(model: Model, inputs: Inputs) -> nn.Module | None:
    """The one module with parameters whose output is the model's, but for its shape, dtype and choice of entries.

    None where there is none. One forward pass of a model that is a module.
    """
    assert model.module is not None
    calls: list[tuple[nn.Module, Node]] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.grad_fn is not None:
            calls.append((module, output.grad_fn))

    own = [module for module in model.module.modules() if any(True for _ in module.parameters(recurse=False))]
    handles = [module.register_forward_hook(note) for module in own]
    try:
        with model.differentiating():
            outputs = model.raw(model.leaves(), inputs)
    finally:
        for handle in handles:
            handle.remove()
    behind = _moved(outputs.grad_fn)
    owners = {id(module): module for module, node in calls if node in behind}
    return next(iter(owners.values())) if len(owners) == 1 else None


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
    waiting = [node]
    while waiting:
        ends = _moved(waiting.pop())
        node = ends[-1] if ends else None
        if node is None:
            continue
        kind = _kind(node)
        parents = [_moved(parent) for parent, _ in node.next_functions]
        given = [names.get(id(getattr(path[-1], "variable", None))) for path in parents if path]
        found.update(dict.fromkeys(name for name in given if name is not None))
        if kind == "Add" and any(name is not None for name in given):  # a bias, and what it is added to
            waiting += [path[-1] for path, name in zip([p for p in parents if p], given) if name is None]
        elif kind not in PRODUCTS:
            return ()
    return tuple(name for name in leaves if name in found)


def _moved(node: Node | None) -> list[Node]:
    """A node and those before it as far as numbers are only moved."""
    path = []
    while node is not None:
        path.append(node)
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        node = parents[0] if _kind(node) in MOVES and len(parents) == 1 else None
    return path


def _kind(node: Node) -> str:
    return node.name().partition("Backward")[0]
