"""Embeddings as plain lookups, which have derivatives of every order and mode, with the values of torch's kernels.

`F.embedding_bag` has no forward mode and no second derivative; `sparse=True` gives gradients that no product can use,
`scale_grad_by_freq=True` makes gradients depend on the other points of a batch, and `max_norm` writes into the weight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def needs_plain_lookups(module: nn.Module) -> bool:
    """Return whether a module is an embedding with one of the options above, or a bag."""
    if isinstance(module, nn.Embedding):
        return module.sparse or module.scale_grad_by_freq or module.max_norm is not None
    return isinstance(module, nn.EmbeddingBag)


class PlainLookups(TorchFunctionMode):
    """A mode in which embeddings, and bags of fixed length, are computed by a lookup and a reduction.

    Rows longer than `max_norm` are shortened only in the result and, as in torch, have the derivative of the original
    row. Bags given by offsets are left to torch.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            return _embedding(*args, **kwargs)
        if func is F.embedding_bag:
            composed = _bag(*args, **kwargs)
            return func(*args, **kwargs) if composed is None else composed
        return func(*args, **kwargs)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    return _limit_norms(F.embedding(input, weight, padding_idx), max_norm, norm_type)


def _bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor | None:
    """Return the bags (n, E) of indices (n, t); None if they are given by offsets."""
    if offsets is not None or input.ndim != 2:
        return None
    rows = _limit_norms(F.embedding(input, weight), max_norm, norm_type)
    padding = -1 if padding_idx is None else padding_idx % len(weight)
    counted = (input != padding).unsqueeze(-1)
    if mode == "max":
        largest = rows.masked_fill(~counted, -torch.inf).max(1).values
        return torch.where(counted.any(1), largest, torch.zeros_like(largest))
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    total = torch.where(counted, rows, torch.zeros_like(rows)).sum(1)
    return total / counted.sum(1).clamp_min(1) if mode == "mean" else total


def _limit_norms(rows: Tensor, max_norm: float | None, norm_type: float) -> Tensor:
    if max_norm is None:
        return rows
    fixed = rows.detach()
    norms = fixed.norm(norm_type, -1, keepdim=True)
    return rows + torch.where(norms > max_norm, fixed * (max_norm / (norms + 1e-7) - 1), torch.zeros_like(fixed))
