"""Kernels with derivatives of both modes, switched on for the duration of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Contexts = Sequence[Callable[[], Any]]
Switch = tuple[Callable[[], bool], Callable[[bool], None], bool]
"""The getter and the setter of a setting of torch, and its value while derivatives are recorded."""


def _has_tf32() -> bool:
    """Return whether cuDNN rounds convolutions to TF32, torch's own default, which J and its transpose do unequally."""
    try:
        return bool(torch._C._get_cudnn_allow_tf32())
    except RuntimeError:  # set for convolutions and recurrent layers apart: the user knows
        return False


KERNELS: list[Switch] = [
    (getattr(torch._C, f"_get_{name}_sdp_enabled"), getattr(torch._C, f"_set_sdp_use_{name}"), name == "math")
    for name in ("math", "flash", "mem_efficient", "cudnn", "overrideable")
] + [(_has_tf32, torch._C._set_cudnn_allow_tf32, False)]
"""Each attention kernel, on if it has forward mode, and TF32 in convolutions, off."""
FAST_PATH: Switch = torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
"""The fused path of attention modules in eval mode, which has no derivatives."""
FUSED_RNNS: tuple[Switch, ...] = (
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled, False),
)
"""Fused recurrent layers: in float32 oneDNN's have no forward mode, cuDNN's no backward in eval mode."""


def contexts_for(modules: Iterable[nn.Module]) -> tuple[Sequence[Switch], Contexts]:
    """Return the switches, in addition to `KERNELS`, with which these modules have derivatives of both modes, and more.

    Switches are set where derivatives are recorded. The contexts replace slow operations, or those without derivatives,
    by others of equal values, and are entered in every pass.
    """
    switches: dict[Switch, None] = {}
    stand_ins: dict[Callable[[], Any], None] = {}
    for module in modules:
        if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer):
            switches[FAST_PATH] = None
        elif isinstance(module, nn.RNNBase):
            switches |= dict.fromkeys(FUSED_RNNS)
        elif isinstance(module, nn.EmbeddingBag) or (
            isinstance(module, nn.Embedding)
            and (module.sparse or module.scale_grad_by_freq or module.max_norm is not None)
        ):
            stand_ins[PlainLookups] = None
        elif isinstance(module, torch.jit.ScriptModule):
            stand_ins[_unoptimised] = None
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            stand_ins[eagerly] = None
    return [*switches], [*stand_ins]


@contextlib.contextmanager
def unfused(switches: Sequence[Switch] = ()) -> Iterator[None]:
    """Keep attention on its kernel with forward mode and convolutions in full precision; set further switches.

    This does what `torch.nn.attention.sdpa_kernel(MATH)` does, which itself takes as long as a small layer.
    """
    changed = []
    try:
        for get, choose, wanted in (*KERNELS, *switches):
            if get() != wanted:
                changed.append((choose, not wanted))
                choose(wanted)
        yield
    finally:
        for choose, was in changed:
            choose(was)


def _unoptimised() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which TorchScript fuses no kernels, which have no forward mode."""
    return torch.jit.optimized_execution(False)  # type: ignore[attr-defined]


def eagerly() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which compiled code runs in its original, uncompiled form.

    A compiled graph has no forward mode, and differentiating it would compile it again.
    """
    return torch.compiler.set_stance("force_eager")


# Embeddings as plain lookups, which have derivatives of every order and mode, with the values of torch's kernels.
# `F.embedding_bag` has no forward mode and no second derivative; `sparse=True` gives gradients that no product can
# use, `scale_grad_by_freq=True` makes gradients depend on the other points of a batch, and `max_norm` writes into the
# weight.


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


# Batch and instance normalisation: torch's own backward pass is wrong, by as much as the gradient, where input and
# gradient differ in the order of channels and positions and torch takes one order for the other, as the strides of a
# single image allow: that of an image whose gradient was transposed, as tokens are. Instance normalisation makes one
# image of every batch.

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
