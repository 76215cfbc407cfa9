"""Endless batches: passes over the data, one after the other, that a later run can continue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, RandomSampler


class Feed:
    """An endless sequence of batches; `Feed(batches, position)` continues from a `position`.

    batches: an iterable that can be read again (a list, a DataLoader), or None for a density without data.
    """

    def __init__(self, batches: Any, position: Any = None) -> None:
        self._batches = _checked(batches)
        self._spec: Any = None
        self._last: Any = None
        self._index = 0 if position is None else position["index"]
        self._generator: Tensor | None = None if position is None else position["generator"]
        self._pass: Iterator[Any] | None = None

    @property
    def position(self) -> dict[str, Any]:
        """The number of batches used in this pass, and the state of the loader's generator when the pass began."""
        return {"index": self._index, "generator": self._generator}

    def next(self) -> Any:
        """Return the next batch."""
        if self._batches is None:
            return None
        if self._pass is None:
            self._pass = self._open_pass()
        batch = next(self._pass, self)
        if batch is self:
            if self._index == 0:
                raise ValueError(f"the data are empty: a pass over this {type(self._batches).__name__} gave no batch.")
            self._index, self._generator, self._pass = 0, None, None
            return self.next()
        if batch is not self._last:
            self._check(batch)
            self._last = batch
        self._index += 1
        return batch

    def _check(self, batch: Any) -> None:
        """Raise ValueError if a batch has another structure than the first."""
        spec = pytree.tree_structure(batch)
        if self._spec is None:
            self._spec = spec
        elif spec != self._spec:
            raise ValueError(f"batch {self._index} has another structure than the first: {_describe(spec)}.")

    def _open_pass(self) -> Iterator[Any]:
        """Begin a pass at the batch where the last run stopped."""
        source = getattr(self._batches, "generator", None)
        if isinstance(source, torch.Generator):
            if self._generator is None:
                self._generator = source.get_state()
            else:
                source.set_state(self._generator.cpu())
        assert self._batches is not None
        each = iter(self._batches)
        for _ in range(self._index):
            next(each, None)
        return each


def require_repeatable(batches: Any) -> None:
    """Raise ValueError if passes are shuffled by a generator that a later run cannot restore."""
    if isinstance(batches, DataLoader) and isinstance(batches.sampler, RandomSampler) and batches.generator is None:
        raise ValueError(
            "a checkpoint needs the same batches again: build the DataLoader with generator=torch.Generator()."
        )


def _checked(batches: Any) -> Iterable[Any] | None:
    """Return the batches; raise TypeError unless they can be read again in every pass."""
    pair = isinstance(batches, tuple) and len(batches) in (2, 3) and all(isinstance(item, Tensor) for item in batches)
    if isinstance(batches, Iterator | Tensor | str) or pair or not (batches is None or isinstance(batches, Iterable)):
        raise TypeError(
            "batches must be a list of batches, [(inputs, targets)] if each step uses all data, or a DataLoader, got "
            f"{type(batches).__name__}. Pass torch.utils.data.DataLoader(dataset, batch_size=..., shuffle=True)."
        )
    return batches


def _describe(spec: Any) -> str:
    return f"{spec.num_leaves} tensors as {getattr(spec.type, '__name__', 'one')}"
