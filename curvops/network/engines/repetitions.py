"""Runs of a function that repeat the operations of an earlier run: steps of samplers and filters on small networks.

Between two operations on a few numbers pass modules, hooks, `vmap` and autograd, which together take several times as
long as the operations. A repetition runs the operations alone, on other numbers in tensors of the same shapes.

That is right if nothing but shapes decides which operations run: `is_plain` accepts modules of torch's own layers and
none of a user's code. What Python reads from a tensor is noticed while operations are recorded, and before the first
use results at other numbers must be those of the function itself, bit by bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from curvops.network.engines.proofs import MOST, Unlike, surroundings
from curvops.network.engines.replay import Recorder, Replay
from curvops.network.model.fused_kernels import is_compiled
from curvops.network.model.model import Model
from curvops.network.model.shards import has_hooks

LAYERS = {
    nn.Sequential, nn.Identity, nn.Flatten, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.GroupNorm,
    nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.ReLU,
    nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign, nn.Tanh,
    nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid,
}  # fmt: skip
"""Layers whose operations depend on shapes alone, and draw nothing."""
PLAIN_RUNS = 8
"""The number of runs before operations are recorded, which takes as long as about so many."""
LARGEST = 2**18
"""Numbers in the largest argument above which operations take most of the time."""
AS_STRIDED = torch.ops.aten.as_strided.default
"""An operation on the memory behind an argument, whatever part of it the argument is."""
TRIED = 0.1
"""The size of the changes at which a repetition is compared with the function."""

Function = Callable[..., Tensor | None]


def is_plain(model: Model) -> bool:
    """Return whether the shapes of its inputs decide alone which operations a pass of the model runs."""
    tensors = model.module is not None and all(type(tensor) is Tensor for tensor in model.tensors())
    return tensors and all(map(_is_plain, model.paths))


def _is_plain(part: nn.Module) -> bool:
    kind = type(part)
    own = kind in LAYERS and kind.forward.__module__.startswith("torch.nn.") and "forward" not in vars(part)
    return own and not has_hooks(part) and not is_compiled(part)


def are_small(given: Sequence[Any]) -> bool:
    """Return whether these are dense tensors of so few numbers that a function of them may be worth repeating."""
    return all(type(each) is Tensor and each.layout is torch.strided and each.numel() <= LARGEST for each in given)


class Repetitions:
    """Functions of tensors that are repeated for as long as the arguments have the shapes of an earlier run."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, int | Replay | None] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return Repetitions, ()

    def run(
        self,
        key: Hashable,
        function: Function,
        given: Sequence[Tensor],
        allowed: Callable[[], bool],
        bare: Function | None = None,
    ) -> Any:
        """Return `function(*given)`, by the operations of an earlier run with this key and arguments like these.

        `allowed` says, after some runs, whether its operations depend on shapes alone. `bare` has the same result
        without checks that read numbers, and is recorded in place of the function.
        """
        try:
            around = surroundings(given[0].device)
        except Unlike:
            return function(*given)
        if not are_small(given):
            return function(*given)
        key = key, around, *[(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in given]
        known = self._known.get(key, 0)
        if isinstance(known, int) and known >= PLAIN_RUNS:
            known = self._known[key] = _recorded(function, given, bare or function) if allowed() else None
        if isinstance(known, Replay):
            with torch.no_grad():
                return known({str(i): tensor for i, tensor in enumerate(given)})
        if isinstance(known, int):
            self._known[key] = known + 1
            while len(self._known) > MOST:
                self._known.popitem(last=False)
        return function(*given)


def _recorded(function: Function, given: Sequence[Tensor], bare: Function) -> Replay | None:
    """Return the operations of a run, if they give the function's own results at other numbers."""
    own, recorder = [tensor.detach() for tensor in given], Recorder()  # so that one tensor given twice is two
    with suppress(RuntimeError, NotImplementedError, ValueError):
        with recorder:
            for i, tensor in enumerate(own):
                recorder.follow(str(i), tensor)
            replay = recorder.replay(bare(*own))
        if replay is None or AS_STRIDED in replay.operations:
            return None
        others = [_changed(tensor) for tensor in own]
        with torch.no_grad():
            found = replay({str(i): tensor for i, tensor in enumerate(others)})
        expected = function(*others)
        return replay if expected is not None and torch.equal(found, expected) else None
    return None


def _changed(tensor: Tensor) -> Tensor:
    """Return other numbers in a tensor of the same shape and strides: moved, or integers in another order.

    None becomes negative where none is, such as sample weights. Raises RuntimeError if numbers share their memory.
    """
    other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    if not tensor.is_floating_point():
        return other.copy_(tensor.flip(0) if tensor.ndim else tensor)
    generator = torch.Generator(tensor.device).manual_seed(0)
    moved = tensor + torch.empty_like(tensor).normal_(std=TRIED, generator=generator)
    return other.copy_(moved if bool((tensor < 0).any()) else moved.abs())
