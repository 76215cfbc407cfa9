"""What are the training data, and are they the same on every pass?

Operators sum over the data once per product, so the data must be finite, repeatable and unchanged. :func:`as_batches`
turns what users have into :class:`Batches`, which checks the values on the first pass and their fingerprints on every
later one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from curvops.network.fingerprints import fingerprint
from curvops.network.inputs import Inputs, components, move, move_tensor, normalise, num_points, require_finite, take
from curvops.network.layout import Layout

ACCEPTED = (
    "Pass a pair (inputs, targets) of tensors, a torch Dataset, a DataLoader, or a list (any re-iterable) of batches "
    "(inputs, targets) or (inputs, targets, weights)."
)


class DataChanged(RuntimeError):
    """A pass over the data met other batches than the first pass did."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Some points: inputs, targets with leading dimension n, and sample weights (n,), (n, T) or None for ones.

    `start` is the position of the first point among all data.
    """

    inputs: Inputs
    targets: Tensor
    weights: Tensor | None = None
    start: int = 0

    @property
    def num_points(self) -> int:
        """The number n of points."""
        return len(self.targets)

    def labels(self, points: slice) -> Batch:
        """Some of the points without their inputs."""
        weights = None if self.weights is None else self.weights[points]
        return Batch((), self.targets[points], weights, self.start + (points.start or 0))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors with the names that messages use for them."""
        yield from components(self.inputs)
        yield "targets", self.targets
        if self.weights is not None:
            yield "weights", self.weights


class Batches:
    """The training data: iterating yields each :class:`Batch`, floating tensors in the chosen dtype, on one device.

    Built by :func:`as_batches`. The first pass, made at construction, checks every value (it waits for the device once
    a tensor). Every complete later pass compares fingerprints without waiting for the device until its end, and raises
    :class:`DataChanged` there. Iterators share no state, so two threads may iterate at once.
    """

    def __init__(
        self,
        source: Iterable[object],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        check: Callable[[Tensor], None] | None,
        layout: Layout | None,
    ) -> None:
        self._source, self._device, self._dtype, self._check = source, device, dtype, check
        self._layout = layout
        sizes: list[int] = []
        signatures: list[object] = []
        prints: list[Tensor] = []
        for index, item in enumerate(source):
            batch = self._read(item, index)
            _require_valid(batch, index, check)
            sizes.append(batch.num_points)
            signatures.append(_signature(batch))
            prints.append(_fingerprint(batch))
        if not sizes:
            raise ValueError(f"The data are empty: a pass over this {type(source).__name__} gave no batch. {ACCEPTED}")
        self._signatures = signatures
        self._fingerprints = torch.stack(prints)
        self.sizes = tuple(sizes)
        """The number of points of each batch."""

    @property
    def num_data(self) -> int:
        """The number N of points."""
        return sum(self.sizes)

    @property
    def num_batches(self) -> int:
        """The number of batches."""
        return len(self.sizes)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        prints: list[Tensor] = []
        for index, item in enumerate(self._source):
            if index == self.num_batches:
                raise DataChanged(self._changed(f"there are more than the first pass's {self.num_batches} batches"))
            batch = self._read(item, index)
            if _signature(batch) != self._signatures[index]:
                raise DataChanged(self._changed(f"batch {index} has other shapes or dtypes"))
            prints.append(_fingerprint(batch))
            yield batch
        if len(prints) < self.num_batches:
            raise DataChanged(self._changed(f"only {len(prints)} of the first pass's {self.num_batches} batches came"))
        changed = (torch.stack(prints) != self._fingerprints).tolist()
        if any(changed):
            raise DataChanged(
                self._changed(f"batch {changed.index(True)} has other values ({sum(changed)} batches do)")
            )

    def verify(self) -> None:
        """Make one pass only to compare. Raises :class:`DataChanged`."""
        for _ in self:
            pass

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Batches:
        """The same data on another device or in another floating dtype (None keeps it). Costs two passes."""
        self.verify()
        return Batches(self._source, device or self._device, dtype or self._dtype, self._check, self._layout)

    def _read(self, item: object, index: int) -> Batch:
        """One item of the source as a batch on the device, its form checked but not its values."""
        if not isinstance(item, (tuple, list)) or len(item) not in (2, 3):
            raise TypeError(_not_a_batch(item, index))
        targets, weights = item[1], item[2] if len(item) == 3 else None
        if not isinstance(targets, Tensor) or not isinstance(weights, Tensor | None):
            kinds = ", ".join(type(part).__name__ for part in item[1:])
            raise TypeError(f"Targets (and weights, if any) must be tensors; batch {index} has {kinds}. {ACCEPTED}")
        inputs = normalise(item[0])
        _require_aligned(f"batch {index}", inputs, targets, weights)
        if weights is not None and not weights.is_floating_point():
            weights = weights.to(self._dtype or torch.get_default_dtype())
        layout = self._layout or Layout(torch.Size((1,)))
        with _of_batch(index):
            targets = layout.targets(targets)
            weights = None if weights is None else layout.weights(weights)
        return Batch(
            move(inputs, self._device, self._dtype),
            move_tensor(targets, self._device, self._dtype),
            None if weights is None else move_tensor(weights, self._device, self._dtype),
        )

    def _changed(self, what: str) -> str:
        shuffles = isinstance(self._source, DataLoader) and isinstance(self._source.sampler, RandomSampler)
        cause = (
            "This DataLoader shuffles: build it with shuffle=False."
            if shuffles
            else "Usual causes are shuffling, random augmentation and tensors changed in place: turn off the first "
            "two, give a copy of the tensors, or linearise again if the change was meant."
        )
        return f"The data differ from the first pass: {what}. {cause}"


def as_batches(
    data: object,
    batch_size: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    check: Callable[[Tensor], None] | None = None,
    layout: Layout | None = None,
) -> Batches:
    """The batches in ``data``, checked by a first pass.

    data: a tuple or list (inputs, targets[, weights]) of tensors in memory; a Dataset; a DataLoader or any re-iterable
        of such tuples. Inputs may be a tensor, a tuple or list of tensors, or a mapping of tensors. Nothing is copied.
    batch_size: points per batch, used for tensors in memory and Datasets only.
    device, dtype: where batches go, and the dtype of their floating tensors; None leaves them as they are.
    check: called with each batch's targets; raises when they do not suit the likelihood.
    layout: of the outputs, where a point has several positions: targets (n, *positions, ...) become (n, T, ...), and
        weights may be (n, *positions) beside (n,).

    Raises TypeError for data of another form or a one-shot iterator, and ValueError for empty data, lengths that
    disagree, NaN or Inf, and negative weights.
    """
    return Batches(as_source(data, batch_size), device, dtype, check, layout)


@dataclass(frozen=True, eq=False)
class _InMemory:
    """Re-iterable slices of tensors in memory."""

    inputs: Inputs
    labels: tuple[Tensor, ...]
    batch_size: int

    def __iter__(self) -> Iterator[tuple[Inputs | Tensor, ...]]:
        for start in range(0, num_points(self.inputs), self.batch_size):
            part = slice(start, start + self.batch_size)
            yield take(self.inputs, part), *(tensor[part] for tensor in self.labels)


def as_source(data: object, batch_size: int) -> Iterable[object]:
    """The re-iterable of (inputs, targets[, weights]) in ``data``, in whatever form it came; nothing is read yet."""
    if isinstance(data, (tuple, list)) and len(data) in (2, 3) and all(isinstance(part, Tensor) for part in data[1:]):
        _require_batch_size(batch_size)
        inputs = normalise(data[0])
        _require_aligned("data", inputs, data[1], data[2] if len(data) == 3 else None)
        return _InMemory(inputs, tuple(data[1:]), batch_size)
    if isinstance(data, Dataset):
        _require_batch_size(batch_size)
        # Without a generator of its own, each pass of a DataLoader would draw from torch's default one.
        return DataLoader(data, batch_size=batch_size, shuffle=False, generator=torch.Generator())
    if isinstance(data, Iterator):
        raise TypeError(
            f"The data are read many times, but a {type(data).__name__} can be read only once. Pass a list of its "
            "batches, a DataLoader or a Dataset."
        )
    if isinstance(data, (str, Mapping)) or not isinstance(data, Iterable):
        raise TypeError(f"Data of type {type(data).__name__} cannot be read. {ACCEPTED}")
    return data


def _require_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; given {batch_size}.")


def _require_aligned(where: str, inputs: Inputs, targets: Tensor, weights: Tensor | None) -> None:
    n = num_points(inputs)
    if targets.ndim == 0 or len(targets) != n:
        raise ValueError(
            f"In {where} there are {n} inputs, but the targets have shape {tuple(targets.shape)}. The leading "
            "dimension of both counts points; wrap single points in a DataLoader."
        )
    if weights is not None and (weights.ndim == 0 or len(weights) != n):
        raise ValueError(
            f"In {where} there are {n} points, but the sample weights have shape {tuple(weights.shape)}. Give one "
            "weight per point, or per position of one."
        )


def _require_valid(batch: Batch, index: int, check: Callable[[Tensor], None] | None) -> None:
    """The checks of values, which wait for the device."""
    if batch.num_points == 0:
        raise ValueError(f"Batch {index} is empty. Leave it out.")
    for name, tensor in batch.named_tensors():
        require_finite(f"Batch {index}: {name}", tensor)
    if batch.weights is not None and bool((batch.weights < 0).any()):
        raise ValueError(f"Batch {index} has negative sample weights. They multiply log-likelihoods: use 0 or more.")
    if check is not None:
        with _of_batch(index):
            check(batch.targets)


@contextlib.contextmanager
def _of_batch(index: int) -> Iterator[None]:
    """Say in which batch something was wrong."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"Batch {index}: {error}") from error


def _signature(batch: Batch) -> object:
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in batch.named_tensors())


def _fingerprint(batch: Batch) -> Tensor:
    return fingerprint([tensor for _, tensor in batch.named_tensors()])


def _not_a_batch(item: object, index: int) -> str:
    hint = ACCEPTED
    if isinstance(item, Mapping):
        hint = "Split mappings into (inputs, targets), such as (batch, batch.pop('labels')) on a copy of the batch."
    return f"Batch {index} is a {type(item).__name__}, not (inputs, targets) or (inputs, targets, weights). {hint}"
