"""Recognises torch's tensors and modules that are sharded among processes, and says what share each process has."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor; its module is not imported before something else imports it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_fully_sharded(part: nn.Module) -> bool:
    """Return whether `torch.distributed.fsdp.fully_shard` was applied to a module itself."""
    return any(is_fsdp(kind, "FSDPModule") for kind in type(part).__mro__)


def holds_shards(model: Any) -> bool:
    """Return whether `fully_shard` was applied to a model or to a part of it."""
    return isinstance(model, nn.Module) and any(map(is_fully_sharded, model.modules()))


def is_fsdp(kind: type, name: str) -> bool:
    """Return whether a class is the one of this name in torch.distributed."""
    return kind.__name__ == name and kind.__module__.startswith("torch.distributed")


def even_share(length: int, ranks: int, rank: int) -> range:
    """Return the positions that `Shard` gives a rank: ⌈n/ranks⌉ each, fewer or none at the end."""
    step = -(-length // ranks)
    return range(min(length, rank * step), min(length, (rank + 1) * step))
