"""Recognises torch's tensors and modules that are sharded among processes, and says what share each process has."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

FSDP = "torch.distributed.fsdp"


def _class_of(module: str, name: str) -> Any:
    """Return a class of torch; () if its module was never imported, for then nothing is of this class."""
    return getattr(sys.modules.get(module), name, ())


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor."""
    return isinstance(value, _class_of("torch.distributed.tensor", "DTensor"))


def is_fully_sharded(part: nn.Module) -> bool:
    """Return whether `torch.distributed.fsdp.fully_shard` was applied to a module itself."""
    return isinstance(part, _class_of(FSDP, "FSDPModule"))


def holds_shards(model: Any) -> bool:
    """Return whether `fully_shard` was applied to a model or to a part of it."""
    return isinstance(model, nn.Module) and any(map(is_fully_sharded, model.modules()))


def even_share(length: int, ranks: int, rank: int) -> range:
    """Return the positions that `Shard` gives a rank: ⌈n/ranks⌉ each, fewer or none at the end."""
    step = -(-length // ranks)
    return range(min(length, rank * step), min(length, (rank + 1) * step))


def unsharded_class(kind: type) -> type:
    """Return the class that a module had before `fully_shard`, which derives a new one from it."""
    marked = len(kind.__bases__) == 2 and kind.__bases__[0] is _class_of(FSDP, "FSDPModule")
    return kind.__bases__[1] if marked else kind


def has_hooks(part: Any) -> bool:
    """Return whether a module has hooks of its forward pass, other than those of `fully_shard`."""
    hooks = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
    if not hooks or not is_fully_sharded(part):
        return bool(hooks)
    own = part._get_fsdp_state()
    return any(getattr(hook, "__self__", None) is not own for hook in hooks)


def require_whole(source: Any) -> None:
    """Raise ValueError if the parameters of a model, or of a function with its own, are shared among processes."""
    named: Any = {}
    if isinstance(source, nn.Module):
        for path, part in source.named_modules():
            if isinstance(part, _class_of(FSDP, "FullyShardedDataParallel")):
                raise ValueError(
                    f"{f'the module {path!r}' if path else 'the model'} is a FullyShardedDataParallel, which keeps the "
                    "parameters of all its layers as one vector: linearise the module inside, on each process, with a "
                    "shard of the data and process_group=."
                )
        named = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    elif isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping):
        named = source[1]
    for name, tensor in named.items():
        if is_dtensor(tensor):
            raise ValueError(
                f"parameter {name!r} is a DTensor, and each process of its mesh holds a part of it: linearise a model "
                "of whole tensors (tensor.full_tensor()), on each process, with a shard of the data and "
                "process_group=. (co.linearize itself takes a whole model that fully_shard has sharded.)"
            )
