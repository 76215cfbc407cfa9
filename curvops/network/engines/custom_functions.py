"""Custom `autograd.Function`s and the modules that run them, which errors name: their derivatives are the author's."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from curvops.network.engines.replay import tensors_in
from curvops.network.model.model import Model


def has_custom_functions(outputs: Tensor) -> bool:
    """Whether the graph of these outputs holds one. Visits its nodes, no pass."""
    return bool(_found(outputs, set()))


def named_custom_functions(model: Model, inputs: Any) -> str:
    """ "'act' (Round)", the modules with the functions that ran in them; "the model" where none did. One pass."""
    seen: set[Node] = set()
    found: dict[str, None] = {}
    running = ["the model"]
    paths = {} if model.module is None else {module: path for path, module in model.module.named_modules()}

    def note(values: Any) -> None:
        """Assign nodes that are new in the graph behind these values to the running module."""
        for tensor in tensors_in(values):
            found.update(dict.fromkeys(f"{running[-1]} ({name})" for name in _found(tensor, seen)))

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        note([args, kwargs])
        running.append(repr(paths[module]) if paths[module] else "the model")

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        note(output)
        running.pop()

    handles: list[Any] = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in paths]
    handles += [module.register_forward_hook(leave) for module in paths]
    try:
        with model.differentiating():
            note(model(model.leaves(), inputs))
    finally:
        for handle in handles:
            handle.remove()
    return ", ".join(found) or "the model"


def _found(tensor: Tensor, seen: set[Node]) -> list[str]:
    """Names of the custom functions among the nodes behind a tensor that were not seen yet."""
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
