"""The last layer of a model, found by running it, whatever the order of registration."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.utils.parametrize import ParametrizationList

from curvops.network.data.inputs import Inputs
from curvops.network.model.calls import explain
from curvops.network.model.model import Model

# Linear whatever the model computes beside them: all others may choose or weigh entries by their values.
VIEWS = {
    "AccumulateGrad", "Alias", "AsStrided", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split",
    "SplitWithSizes", "Squeeze", "T", "ToCopy", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View",
}  # fmt: skip
# Linear in one factor if the others are constants.
MATRIX_PRODUCTS = {"Addmm", "Baddbmm", "Bmm", "Convolution", "Dot", "Linear", "Mm", "Mv", "SparseAddmm"}
PRODUCTS = MATRIX_PRODUCTS | {"Div", "Mul"}
LayerCalls = list[tuple[nn.Module, Node]]


def last_layer(model: Model, inputs: Inputs) -> tuple[str, ...]:
    """Return the names of the parameters of the last layer, in whose output the model's output is affine.

    It is the layer after which no other with parameters runs, or several side by side, whose outputs are added up or
    joined. Views, choices, sums (over the atoms of a molecule, say), means, resampling and products with constants may
    follow, and any other operation that proves affine; a skip connection may lead around the layer. Parameters that are
    added to its output belong to it. Of modules around each other that own parameters it is the innermost; a parameter
    that multiplies as a matrix outside of them counts as a layer, and in a function every factor does. A tied weight is
    given its first name in the model. Costs one forward pass, and three more if other operations than views follow,
    which prove them affine: if they are not for all parameters that act after the layer, three for each.

    Raises ValueError if there is no such layer, for example if the outputs are a softmax or a product of two layers'.
    """
    search = _LastLayers(model, inputs)
    why = search.why_not()
    if why:
        raise ValueError(
            f"parameters='last_layer': not linear in the output of one layer ({why}); name its parameters, as "
            f"{search.remedy}."
        )
    return search.names


def layer_of_outputs(model: Model, inputs: Inputs) -> nn.Module | None:
    """Return the single module with parameters whose output becomes the model's by linear operations alone, or None.

    The model must be a module. One forward pass, and three more if other operations than views follow.
    """
    search = _LastLayers(model, inputs)
    return search.modules[0] if search.is_direct and len(search.modules) == 1 and not search.why_not() else None


class _LastLayers:
    """The layers after which no other runs, by one forward pass.

    A layer is the call of a module, or a product with a parameter outside of such calls. `steps` are all operations
    after these layers but views, and `beside` the parameters that act after them.
    """

    def __init__(self, model: Model, inputs: Inputs) -> None:
        self.model, self.inputs, self.leaves = model, inputs, model.leaves()
        self._named = {id(leaf): name for name, leaf in self.leaves.items()}
        outputs, self.calls = self._run()
        self._outputs = outputs.detach()
        self._numbers = {node: number for number, (_, node) in enumerate(self.calls)}

        after = _behind([outputs.grad_fn], lambda node: not self._is_layer(node))
        self.steps = [node for node in after if not (self._is_layer(node) or _kind(node) in VIEWS)]
        layers = [node for node in after if self._is_layer(node)]
        earlier = _behind(_before(layers), lambda _: True)

        self.last = [node for node in layers if node not in earlier]
        numbers = sorted(self._numbers[node] for node in self.last if node in self._numbers)
        self.modules = list(dict.fromkeys(self.calls[number][0] for number in numbers))
        self.factors = {name for node in self.last for name in self._factors(node)}
        names = (self._name(node) for node in after if node not in earlier)
        self.beside = {name for name in names if name is not None}
        self.is_direct = self.last == layers and not (self.factors or self.beside)
        self.added, self.is_affine = self._find_added()

    def _find_added(self) -> tuple[set[str], bool]:
        """Return the parameters added after these layers, and whether the outputs are affine in both together."""
        if not self.steps or self._proves_affine(self.beside):
            return self.beside, True
        added = {name for name in self.beside if self._proves_affine({name})}
        return added, added < self.beside and self._proves_affine(added)

    def why_not(self) -> str:
        """Return a clause on why the outputs are not affine in what these layers return; empty if they are."""
        if not (self.is_affine and self.beside.intersection(self._of_modules) <= self.added):
            first, *others = dict.fromkeys(map(_kind, self.steps))
            if first in PRODUCTS:
                return f"they come from a product of parts that both depend on parameters, {first}"
            which = "of which one" if others else "which"
            return f"they come from {', '.join([first, *others][:4])}, {which} is not linear"
        if not self.last and not (self.model.module is None and self.added):
            return "no layer with parameters is called before them"
        return ""

    @property
    def _of_modules(self) -> list[str]:
        root = self.model.module
        return [] if root is None else [name for module in self.modules for name in _names(root, module)]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the layers' parameters, and of those added to what they return."""
        others = (name for name in self.leaves if name in self.factors | self.added)
        return tuple(dict.fromkeys([*self._of_modules, *others]))

    @property
    def remedy(self) -> str:
        """The parameters of the layers that ran last, or that multiply what came from them, as arguments."""
        scales = {name for node in self.steps if _kind(node) in PRODUCTS for name in self._leaves_of(node)}
        if scales - {*self.names}:
            names = [name for name in self.leaves if name in self.beside]
            return f"parameters={(names[0] if len(names) == 1 else names)!r}"
        ran = dict.fromkeys(module for module, _ in reversed(self.calls))
        globs = [f"{self.model.paths[module]}.*".lstrip(".") for module in [*ran][:3]]
        if not globs:
            return f"parameters={sorted(self.factors) or 'head.*'!r}"
        first, *others = globs
        return f"parameters={first!r}" + (f" (layers before it: {', '.join(map(repr, others))})" if others else "")

    def _run(
        self, amount: float = 0.0, moved: Container[int] = (), factors: Iterable[str] = ()
    ) -> tuple[Tensor, LayerCalls]:
        """Return the outputs and the calls of layers, once an amount is added to what some return, and to factors."""
        calls: LayerCalls = []

        def note(module: nn.Module, args: Any, output: Any) -> Tensor | None:
            if not isinstance(output, Tensor) or output.grad_fn is None:
                return None
            calls.append((module, output.grad_fn))
            return output + amount * _noise(output, len(calls)) if len(calls) - 1 in moved else None

        leaves = dict(self.leaves)
        for number, name in enumerate(sorted(factors)):
            leaves[name] = leaves[name] + amount * _noise(leaves[name], -1 - number)
        hookable = [module for module in self.model.paths if not isinstance(module, torch.jit.ScriptModule)]
        handles = [layer.register_forward_hook(note) for layer in _innermost(hookable)]
        try:
            with explain(self.inputs), self.model.differentiating():
                return self.model.raw(leaves, self.inputs), calls
        finally:
            for handle in handles:
                handle.remove()

    def _proves_affine(self, added: Set[str]) -> bool:
        """Return whether outputs follow changes Δ of what layers return, and of parameters added to it, in proportion.

        That is f(h + a Δ) − f(h) = a s for a = 1 and for a so large in both directions that no kink or bound lies
        beyond. The slope s is that of a large a, in which an offset's rounding does not show.
        """
        dtype = self._outputs.dtype
        large = 2.0**20 if torch.finfo(dtype).max > 2.0**100 else 8.0
        moved = [self._numbers[node] for node in self.last if node in self._numbers]
        features = [node for node in _before(self.last) if not self._name(_through_views(node))]
        factors = (self.factors | added) - {self._name(node) for node in _behind(features, lambda _: True)}
        if not (moved or factors):
            return not self.steps  # of a factor that also acts earlier, nothing is known alone
        try:
            far, *others = (self._run(a, moved, factors)[0].detach() - self._outputs for a in (large, -large, 1.0))
        except (TypeError, ValueError):
            return False  # the model itself refuses such values
        slope, eps = far / large, max(self.model.eps, torch.finfo(dtype).eps)
        proved = (slope != 0).any() & slope.isfinite().all()
        for change, a in zip(others, (-large, 1.0)):
            slack = 32 * eps * self._outputs.abs().amax(0) + max(eps**0.7, 1e-8) * abs(a) * slope.abs().amax(0)
            proved &= ((change - a * slope).abs() <= slack).all()  # False for NaN
        return bool(proved)

    def _is_layer(self, node: Node) -> bool:
        return node in self._numbers or bool(self._factors(node))

    def _name(self, node: Node) -> str | None:
        return self._named.get(id(getattr(node, "variable", None)))

    def _factors(self, node: Node) -> list[str]:
        """Return the parameters that are factors of a product outside of calls, in a module only of matrices."""
        if node in self._numbers or _kind(node) not in (PRODUCTS if self.model.module is None else MATRIX_PRODUCTS):
            return []
        return self._leaves_of(node)

    def _leaves_of(self, node: Node) -> list[str]:
        """Return the parameters that a node takes as they are, or as views."""
        names = [self._name(_through_views(parent)) for parent in _parents(node)]
        return [name for name in names if name is not None]


def _innermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that own parameters and contain no other such module, except for parametrisations."""
    owners = {
        module: None
        for module in modules
        if any(True for _ in module.parameters(recurse=False)) and not isinstance(module, ParametrizationList)
    }
    return [
        module for module in owners if not any(other in owners for other in module.modules() if other is not module)
    ]


def _names(module: nn.Module, layer: nn.Module) -> list[str]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for parameter in layer.parameters()]


def _behind(starts: Iterable[Node | None], passes: Callable[[Node], bool]) -> dict[Node, None]:
    """Return nodes and those behind them, in the order of the walk, which goes on from nodes that let it pass."""
    waiting, reached = [node for node in starts if node is not None], dict[Node, None]()
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached[node] = None
            waiting += _parents(node) if passes(node) else []
    return reached


def _before(nodes: Iterable[Node]) -> list[Node]:
    return [parent for node in nodes for parent in _parents(node)]


def _noise(like: Tensor, seed: int) -> Tensor:
    """Return random numbers of the size of a tensor's own, but at least 1."""
    size = like.detach().abs().mean().clamp_min(1.0)
    drawn = torch.Generator(like.device).manual_seed(seed)
    return size * torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=drawn)


def _through_views(node: Node) -> Node:
    """Return the first node before this one that is not a view."""
    while _kind(node) in VIEWS and len(_parents(node)) == 1:
        (node,) = _parents(node)
    return node


def _parents(node: Node) -> list[Node]:
    return [parent for parent, _ in node.next_functions if parent is not None]


def _kind(node: Node) -> str:
    return node.name().rpartition("::")[2].partition("Backward")[0]
