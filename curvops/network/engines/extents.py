"""The memory of tensors, compared by the extents of their storages, so that a view is found in its base."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from torch import Tensor


class Held:
    """The memory of some tensors; another tensor is in it where its storage lies within one of theirs."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._extents = sorted(extent(tensor) for tensor in tensors)
        self._starts = [start for start, _ in self._extents]

    def __contains__(self, tensor: Tensor) -> bool:
        start, end = extent(tensor)
        i = bisect_right(self._starts, start) - 1
        return i >= 0 and end <= self._extents[i][1]


def extent(tensor: Tensor) -> tuple[int, int]:
    """Where the memory of a tensor's storage starts and ends."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
