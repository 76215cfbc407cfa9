"""Indices of an operator's rows and columns, given as for a tensor, in the form that linear_operator needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def full_index(index: Any, shape: Sequence[int]) -> tuple[Any, ...]:
    """Return an index without an ellipsis, its integers counted from the first entry; IndexError out of range."""
    given = index if isinstance(index, tuple) else (index,)
    at = next((i for i, part in enumerate(given) if part is Ellipsis), None)
    if at is not None:
        given = (*given[:at], *(slice(None),) * (len(shape) + 1 - len(given)), *given[at + 1 :])
    if len(given) > len(shape):
        raise IndexError(f"{len(given)} indices for an operator of shape {tuple(shape)}.")
    return tuple(map(_from_start, given, shape))


def _from_start(index: Any, size: int) -> Any:
    """Return an integer or integer tensor as counted from the first entry, which linear_operator requires."""
    if isinstance(index, int) and not isinstance(index, bool):
        if not -size <= index < size:
            raise IndexError(f"index {index} is out of range for a dimension of size {size}.")
        return index % size
    if isinstance(index, list):
        index = torch.tensor(index)
    if isinstance(index, Tensor) and not index.is_floating_point() and index.dtype != torch.bool:
        return torch.where(index < 0, index + size, index)
    return index


def takes_all(index: Any) -> bool:
    """Return whether an index is the slice of everything."""
    return isinstance(index, slice) and index == slice(None)


def positions(index: Any, size: int, device: torch.device) -> Tensor | None:
    """Return a row or column index as a tensor of positions, None for all; raise IndexError out of range."""
    return None if takes_all(index) else torch.arange(size, device=device)[index].reshape(-1)
