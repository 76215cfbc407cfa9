"""Values that an operator has computed for itself, kept as long as its tensors are unchanged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from curvops.checks import carries_graph, refuse_tangents

Value = TypeVar("Value")
SHORT = 256
"""A vector of up to this many numbers is compared by value, too."""


def require_first_derivative() -> None:
    """Raise RuntimeError in a backward pass that is itself recorded: a missing derivative would count as zero.

    torch's `once_differentiable` raises only if the incoming gradient has a graph: the second derivative of a sum
    would silently be zero.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "products, solves, determinants and draws have first derivatives only: no create_graph=True."
        )


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
    found: Tensor = _DifferentiableOnce.apply(value)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True, eq=False)
class _Entry:
    """A value with the tensors it came from; references to them keep their addresses from being reused."""

    value: Any
    sources: tuple[Tensor, ...]
    versions: tuple[int, ...]
    watched: tuple[Tensor, ...]
    inference: bool

    def fits(self, tensors: Sequence[Tensor], watched: Sequence[Tensor]) -> bool:
        return (
            self.inference == torch.is_inference_mode_enabled()
            and len(tensors) == len(self.sources)
            and all(_same_storage(a, b) for a, b in zip(tensors, self.sources))
            and self.versions == tuple(map(_version, tensors))
            and all(torch.equal(a, b) for a, b in zip(watched, self.watched))
        )


@dataclass(eq=False)
class Cache:
    """The factorisations and the preconditioner of one operator; pickling and copying drop them."""

    lock: Any = field(default_factory=threading.RLock)
    _entries: dict[str, _Entry] = field(default_factory=dict)

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
            entry = self._fitting(name, tensors, watched)
            found: Value = self.put(name, tensors, compute(), watched) if entry is None else entry.value
            return found

    def put(self, name: str, tensors: Sequence[Tensor], value: Value, watched: Sequence[Tensor] = ()) -> Value:
        """Keep and return a value without a graph, computed from these tensors; ``watched`` as for `get_or_compute`."""
        with self.lock:
            self._entries[name] = _Entry(
                value,
                tuple(tensor.detach() for tensor in tensors),
                tuple(map(_version, tensors)),
                tuple(tensor.detach().clone() for tensor in _short_vectors(tensors, watched)),
                torch.is_inference_mode_enabled(),
            )
        return value

    def get(self, name: str, tensors: Sequence[Tensor], watched: Sequence[Tensor] = ()) -> Any:
        """Return the value kept for these tensors, or None."""
        entry = self._fitting(name, tensors, watched)
        return None if entry is None else entry.value

    def _fitting(self, name: str, tensors: Sequence[Tensor], watched: Sequence[Tensor]) -> _Entry | None:
        with self.lock:
            entry = self._entries.get(name)
            return entry if entry is not None and entry.fits(tensors, _short_vectors(tensors, watched)) else None

    def __reduce__(self) -> tuple[type[Cache], tuple[()]]:
        return Cache, ()


def _short_vectors(tensors: Sequence[Tensor], others: Sequence[Tensor] = ()) -> list[Tensor]:
    """Return those of these tensors that are short vectors, and those of the others that are not among them."""
    found = [tensor for tensor in tensors if tensor.ndim < 2 and tensor.numel() <= SHORT]
    return [*found, *(other for other in others if not any(other is tensor for tensor in found))]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _same_storage(left: Tensor, right: Tensor) -> bool:
    return (
        left.data_ptr() == right.data_ptr()
        and left.shape == right.shape
        and left.stride() == right.stride()
        and left.dtype == right.dtype
        and left.device == right.device
    )
