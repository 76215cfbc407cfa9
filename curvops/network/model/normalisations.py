"""Batch and instance normalisation with the right backward pass for any layout of their tensors in memory.

torch's own is wrong, by as much as the gradient, where input and gradient differ in the order of channels and positions
and torch takes one order for the other, as the strides of a single image allow: that of an image whose gradient was
transposed, as tokens are. Instance normalisation makes one image of every batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

INSTANCE_NORMS = frozenset({F.instance_norm, torch.instance_norm})
NORMS = INSTANCE_NORMS | {F.batch_norm, torch.batch_norm}


class ContiguousNorms(TorchFunctionMode):
    """A mode in which inputs and gradients of these functions are contiguous wherever their order is ambiguous."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func not in NORMS:
            return func(*args, **kwargs)
        x, *others = args or [kwargs.pop("input")]
        if len(x) > 1 and func not in INSTANCE_NORMS:
            return func(x, *others, **kwargs)
        outputs = func(x.contiguous(), *others, **kwargs)
        if outputs.requires_grad:
            outputs.register_hook(Tensor.contiguous)
        return outputs
