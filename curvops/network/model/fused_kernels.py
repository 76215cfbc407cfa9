"""Kernels with derivatives of both modes, switched on for the duration of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from curvops.network.model.lookups import PlainLookups, needs_plain_lookups


def _has_tf32() -> bool:
    """Return whether cuDNN rounds convolutions to TF32, torch's own default, which J and its transpose do unequally."""
    try:
        return bool(torch._C._get_cudnn_allow_tf32())
    except RuntimeError:  # set for convolutions and recurrent layers apart: the user knows
        return False


KERNELS = [
    (getattr(torch._C, f"_get_{name}_sdp_enabled"), getattr(torch._C, f"_set_sdp_use_{name}"), name == "math")
    for name in ("math", "flash", "mem_efficient", "cudnn", "overrideable")
] + [(_has_tf32, torch._C._set_cudnn_allow_tf32, False)]
"""The getter and the setter of each attention kernel, on if it has forward mode, and of TF32 in convolutions, off."""


def settings_for(parts: Collection[nn.Module]) -> list[Callable[[], Any]]:
    """Return contexts, in addition to `unfused`, that keep these modules on kernels with derivatives of both modes."""
    settings: list[Callable[[], Any]] = []
    if any(isinstance(part, nn.MultiheadAttention | nn.TransformerEncoderLayer) for part in parts):
        settings.append(_no_fast_path)  # in eval mode these take a fused path without derivatives
    if any(isinstance(part, nn.RNNBase) for part in parts):
        # Of RNNs in float32 the one has no forward mode, the other no backward pass in eval mode.
        settings += [partial(_without, "mkldnn"), partial(_without, "cudnn")]
    return settings


def stand_ins_for(parts: Collection[nn.Module]) -> list[Callable[[], Any]]:
    """Return contexts that replace slow operations, or those without derivatives, by others of equal values."""
    stand_ins: list[Callable[[], Any]] = [PlainLookups] if any(needs_plain_lookups(part) for part in parts) else []
    if any(isinstance(part, torch.jit.ScriptModule) for part in parts):
        # Fused kernels have no forward mode.
        stand_ins.append(partial(torch.jit.optimized_execution, False))  # type: ignore[attr-defined]
    return [*stand_ins, eagerly] if any(map(is_compiled, parts)) else stand_ins


@contextlib.contextmanager
def unfused(settings: Sequence[Callable[[], Any]] = ()) -> Iterator[None]:
    """Keep attention on its kernel with forward mode and convolutions in full precision; enter further settings.

    This does what `torch.nn.attention.sdpa_kernel(MATH)` does, which itself takes as long as a small layer.
    """
    changed = []
    try:
        for get, choose, wanted in KERNELS:
            if get() != wanted:
                changed.append((choose, not wanted))
                choose(wanted)
        if not settings:
            yield
            return
        with contextlib.ExitStack() as stack:
            for setting in settings:
                stack.enter_context(setting())
            yield
    finally:
        for choose, was in changed:
            choose(was)


@contextlib.contextmanager
def _without(library: str) -> Iterator[None]:
    """Switch off a library of kernels; the flags of `torch.backends` would also set and look up other things."""
    get, choose = getattr(torch._C, f"_get_{library}_enabled"), getattr(torch._C, f"_set_{library}_enabled")
    enabled = get()
    choose(False)
    try:
        yield
    finally:
        choose(enabled)


@contextlib.contextmanager
def _no_fast_path() -> Iterator[None]:
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is compiled."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def eagerly() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which compiled code runs in its original, uncompiled form.

    A compiled graph has no forward mode, and differentiating it would compile it again.
    """
    return torch.compiler.set_stance("force_eager")
