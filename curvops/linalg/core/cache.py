"""Values that an operator has computed for itself, kept as long as its tensors are unchanged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function

from curvops.checks import carries_graph, refuse_tangents

Value = TypeVar("Value")


def require_first_derivative() -> None:
    """Raise RuntimeError in a backward pass that is itself recorded: a missing derivative would count as zero.

    torch's `once_differentiable` raises only if the incoming gradient has a graph: the second derivative of a sum
    would silently be zero.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("answers of linalg have first derivatives only: no create_graph=True.")


class _DifferentiableOnce(Function):
    """The identity, whose backward pass must not be recorded."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        require_first_derivative()
        return gradient


def differentiable_once(value: Tensor) -> Tensor:
    """Return the value, with second derivatives that raise as `require_first_derivative` does."""
    marked: Tensor = _DifferentiableOnce.apply(value)  # type: ignore[no-untyped-call]
    return marked


@dataclass(eq=False)
class Cache:
    """The factorisations and the preconditioner of one operator; pickling and copying drop them.

    An entry is the state of the tensors that it came from, copies of short ones, the tensors themselves (so that their
    addresses are not used again), and the value.
    """

    lock: Any = field(default_factory=threading.RLock)
    _entries: dict[str, tuple[list[Any], list[Tensor], Sequence[Tensor], Any]] = field(default_factory=dict)

    def get_or_compute(
        self, name: str, tensors: Sequence[Tensor], compute: Callable[[], Value], watched: Sequence[Tensor] = ()
    ) -> Value:
        """Return `compute()`, computed once for these tensors, and again if a graph is recorded through them.

        Tensors are compared by storage and version; short vectors (a noise, a prior) and those in `watched` are also
        compared by value, which detects changes that leave the version unchanged (`.data`, fused optimisers).
        """
        refuse_tangents(tensors)
        if carries_graph(tensors):
            return compute()
        with self.lock:
            kept = self.get(name, tensors, watched, self)  # the cache itself stands for no value
            return self.put(name, tensors, compute(), watched) if kept is self else cast(Value, kept)

    def put(self, name: str, tensors: Sequence[Tensor], value: Value, watched: Sequence[Tensor] = ()) -> Value:
        """Keep and return a value without a graph, computed from these tensors; ``watched`` as for `get_or_compute`."""
        state, numbers = _compared(tensors, watched)
        copies = [tensor.detach().clone() for tensor in numbers]
        with self.lock:
            self._entries[name] = state, copies, [tensor.detach() for tensor in tensors], value
        return value

    def get(self, name: str, tensors: Sequence[Tensor], watched: Sequence[Tensor] = (), default: Any = None) -> Any:
        """Return the value kept for these tensors, or the default."""
        with self.lock:
            if name not in self._entries:
                return default
            before, copies, _, value = self._entries[name]
            state, numbers = _compared(tensors, watched)
            return value if state == before and all(map(torch.equal, numbers, copies)) else default

    def __reduce__(self) -> tuple[type[Cache], tuple[()]]:
        return Cache, ()


def _compared(tensors: Sequence[Tensor], watched: Sequence[Tensor]) -> tuple[list[Any], list[Tensor]]:
    """Return storage and version of these tensors, and those that are compared by value."""
    state: list[Any] = [torch.is_inference_mode_enabled()]
    numbers = dict(zip(map(id, watched), watched))
    for tensor in tensors:
        version = 0 if tensor.is_inference() else tensor._version
        state.append((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, version))
        if tensor.ndim < 2 and tensor.numel() <= 256:  # a noise or a prior
            numbers[id(tensor)] = tensor
    return state, list(numbers.values())
