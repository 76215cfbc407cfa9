"""What a call launches, moves and multiplies, counted on any machine, and the least time that a card needs for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

MADE_WITHOUT_A_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}


@dataclass(frozen=True)
class Counts:
    """Launches of kernels, bytes that they read and write, and multiply-adds of matrix products and convolutions."""

    launches: float
    bytes: float
    multiply_adds: float

    def at(self, points: float, other: Counts, more: float) -> Counts:
        """Return the counts at the number of points `more`, from these at `points` and others at twice as many.

        Launches stay: it is for the caches of a CPU that a product cuts what is large into pieces.
        """
        steps = (more - points) / points
        return Counts(
            min(self.launches, other.launches),
            self.bytes + steps * (other.bytes - self.bytes),
            self.multiply_adds + steps * (other.multiply_adds - self.multiply_adds),
        )


@dataclass(frozen=True)
class Card:
    """A card's rates in single precision without TF32: multiply-adds and bytes a second, seconds to launch a kernel."""

    name: str
    multiply_adds: float
    bytes: float
    launch: float

    def seconds(self, counts: Counts) -> dict[str, float]:
        """Return the least seconds by what they are spent on: launches by Python, memory, arithmetic."""
        return {
            "launches": counts.launches * self.launch,
            "memory": counts.bytes / self.bytes,
            "arithmetic": counts.multiply_adds / self.multiply_adds,
        }


H100 = Card("H100", 33.5e12, 3.35e12, 5e-6)
"""Data sheet of the SXM card; 5 µs is what PyTorch takes to issue an operation from Python."""


class Counter(TorchDispatchMode):
    """A context that counts the operations inside it, below automatic differentiation; views count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.bytes, self.multiply_adds = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        returns = func._schema.returns
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in returns)
        if is_view or func._overloadpacket.__name__ in MADE_WITHOUT_A_KERNEL:
            return result
        self.launches += 1
        self.bytes += sum(t.nbytes for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.multiply_adds += formula(*args, **kwargs, out_val=result) // 2
        return result


def count(call: Callable[[], object]) -> Counts:
    """Count what a call launches."""
    with Counter() as counter:
        call()
    return Counts(counter.launches, counter.bytes, counter.multiply_adds)
