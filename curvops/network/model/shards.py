"""Parameters that a model shares among processes: what tells such a model, and what cannot be linearised."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor, without importing the module before anyone has one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_fully_sharded(part: nn.Module) -> bool:
    """Return whether `torch.distributed.fsdp.fully_shard` was applied to a module itself."""
    return any(_is_fsdp(kind, "FSDPModule") for kind in type(part).__mro__)


def _is_fsdp(kind: type, name: str) -> bool:
    return kind.__name__ == name and kind.__module__.startswith("torch.distributed")


def require_whole(source: Any) -> None:
    """Raise ValueError where a model's parameters are shared among processes."""
    if isinstance(source, nn.Module):
        for path, part in source.named_modules():
            where = f"the module {path!r}" if path else "the model"
            if any(_is_fsdp(kind, "FullyShardedDataParallel") for kind in type(part).__mro__):
                raise ValueError(
                    f"{where} is a FullyShardedDataParallel, which keeps the parameters of all its layers as one "
                    "vector: linearise the module inside, on each process, with a shard of the data and process_group=."
                )
            if is_fully_sharded(part):
                raise ValueError(
                    f"{where} is sharded by fully_shard, so that a process holds a part of each parameter: linearise "
                    "an unsharded copy of it, on each process, with a shard of the data and process_group=."
                )
        named: Mapping[str, Any] = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    else:
        named = source[1] if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping) else {}
    held = [name for name, tensor in named.items() if is_dtensor(tensor)]
    if held:
        raise ValueError(
            f"parameter {held[0]!r} is a DTensor, of which each process of its mesh holds a part: linearise a model of "
            "whole tensors (tensor.full_tensor()), on each process, with a shard of the data and process_group=."
        )
