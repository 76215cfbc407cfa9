"""The projections of `nn.MultiheadAttention`, which computes them by functional calls that run no hooks.

If query, key and value are the same tensor, `in_proj_weight` is one linear layer; `out_proj` always is one. In the
recorded pass both are computed separately, with points first, and torch's attention is called with identity matrices
in their place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# (the projection as a linear layer, its arguments and keywords, output, the module that owns the parameters)
Note = Callable[[nn.Module, Any, Any, Tensor, nn.Module], None]
SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def owns_projection(module: nn.Module, local: str) -> bool:
    """Return whether a parameter belongs to the common projection of query, key and value."""
    return type(module) is nn.MultiheadAttention and local in ("in_proj_weight", "in_proj_bias")


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
