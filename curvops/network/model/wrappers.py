"""Wrappers around a model (compiled, parallel), and how to run compiled code as it was written.

Products differentiate through the model: a compiled graph has no forward mode, and tracing it would compile it again.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn


def unwrapped(model: Any) -> Any:
    """Return the model that `torch.compile`, `DataParallel` or `DistributedDataParallel` wraps; names lose the prefix.

    A wrapper with hooks of its own stays.
    """
    if not isinstance(model, nn.Module):
        return getattr(model, "_torchdynamo_orig_callable", model)
    inner = model._modules.get("_orig_mod")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner = model.module
    hooked = model._forward_hooks or model._forward_pre_hooks
    return model if inner is None or hooked else unwrapped(inner)


def holds_compiled(module: nn.Module) -> bool:
    """Whether a module or one of its parts is compiled."""
    return any("_orig_mod" in part._modules or part._compiled_call_impl is not None for part in module.modules())


def eagerly() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which compiled code runs as it was written."""
    return torch.compiler.set_stance("force_eager")
