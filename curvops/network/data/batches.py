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

from curvops.network.data.fingerprints import fingerprint
from curvops.network.data.inputs import (
    Inputs,
    components,
    copy,
    move,
    move_tensor,
    normalise,
    num_points,
    require_finite,
    take,
)
from curvops.network.data.layout import Layout
from curvops.network.data.randomness import items

ACCEPTED = (
    "Pass a pair (inputs, targets) of tensors, a torch Dataset, a DataLoader, or a list (any re-iterable) of batches "
    "(inputs, targets); with weights=True (inputs, targets, weights), or mappings with these three names."
)
NAMES = ("inputs", "targets", "weights")


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

    def labels(self, points: slice | Tensor) -> Batch:
        """Some of the points, a range or positions, without their inputs; positions keep the batch's own `start`."""
        weights = None if self.weights is None else self.weights[points]
        first = (points.start or 0) if isinstance(points, slice) else 0
        return Batch((), self.targets[points], weights, self.start + first)

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
        weights: bool,
        admit: Callable[[Inputs], None] | None,
    ) -> None:
        self._source, self._device, self._dtype, self._check = source, device, dtype, check
        self._layout, self._weights, self._admit = layout, weights, admit
        sizes: list[int] = []
        signatures: list[object] = []
        prints: list[Tensor] = []
        for index, item in enumerate(self._items()):
            batch = self._read(item, index)
            _require_valid(batch, index, check)
            if admit is not None:
                with _of_batch(index):
                    admit(batch.inputs)
            sizes.append(batch.num_points)
            signatures.append(_signature(batch))
            prints.append(_fingerprint(batch))
        if not sizes:
            raise ValueError(f"The data are empty: a pass over this {type(source).__name__} gave no batch. {ACCEPTED}")
        self._signatures = signatures
        self._fingerprints = torch.stack(prints)
        self.fingerprint = int(fingerprint([self._fingerprints]))
        """That of all batches; data on another device or in another dtype keep it."""
        self.fingerprint_dtype = dtype
        """The dtype of floating data when it was taken."""
        self.sizes = tuple(sizes)
        """The number of points of each batch."""

    @property
    def num_data(self) -> int:
        """The number N of points."""
        return sum(self.sizes)

    @property
    def weighted(self) -> bool:
        """Whether a third item of each batch holds weights."""
        return self._weights

    @property
    def few(self) -> Inputs:
        """Copies of the inputs of the first two points, or of one where there are no more."""
        return copy(take(next(iter(self)).inputs, slice(0, 2)))

    @property
    def num_batches(self) -> int:
        """The number of batches."""
        return len(self.sizes)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        prints: list[Tensor] = []
        for index, item in enumerate(self._items()):
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

    def _items(self) -> Iterator[object]:
        return items(self._source, torch.device(self._device or "cpu"))

    def verify(self) -> None:
        """Make one pass only to compare. Raises :class:`DataChanged`."""
        for _ in self:
            pass

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Batches:
        """The same data on another device or in another floating dtype (None keeps it). Costs two passes."""
        self.verify()
        converted = Batches(
            self._source, device or self._device, dtype or self._dtype, self._check, self._layout, self._weights, None
        )
        converted.fingerprint, converted.fingerprint_dtype = self.fingerprint, self.fingerprint_dtype
        return converted

    def _read(self, item: object, index: int) -> Batch:
        """One item of the source as a batch on the device, its form checked but not its values."""
        with _of_batch(index):
            given, targets, weights = parts_of(item, self._weights)
        inputs = normalise(given)
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
    weights: bool = False,
    admit: Callable[[Inputs], None] | None = None,
) -> Batches:
    """The batches in ``data``, checked by a first pass.

    data: a tuple or list (inputs, targets[, weights]) of tensors in memory, or a mapping of them with these names; a
        Dataset; a DataLoader or any re-iterable of such tuples or mappings. Inputs may be a tensor, a tuple or list of
        tensors, or a mapping of tensors. Nothing is copied.
    batch_size: points per batch, used for tensors in memory and Datasets only.
    device, dtype: where batches go, and the dtype of their floating tensors; None leaves them as they are.
    check: called with each batch's targets; raises when they do not suit the likelihood.
    layout: of the outputs, where a point has several positions: targets (n, *positions, ...) become (n, T, ...), and
        weights may be (n, *positions) beside (n,).
    weights: whether a third item holds sample weights; mappings name theirs.
    admit: called with each batch's inputs; raises where the model cannot be run on them.

    Raises TypeError for data of another form or a one-shot iterator, and ValueError for empty data, lengths that
    disagree, NaN or Inf, negative weights, and a third item that was not declared to be weights.
    """
    return Batches(as_source(data, batch_size, weights), device, dtype, check, layout, weights, admit)


@dataclass(frozen=True, eq=False)
class _InMemory:
    """Re-iterable slices of tensors in memory."""

    inputs: Inputs
    labels: dict[str, Tensor]
    batch_size: int
    mapping_type: type  # of the inputs, where they were a mapping

    def __iter__(self) -> Iterator[Mapping[str, object]]:
        for start in range(0, num_points(self.inputs), self.batch_size):
            part = slice(start, start + self.batch_size)
            yield {"inputs": take(self.inputs, part)} | {name: tensor[part] for name, tensor in self.labels.items()}


def as_source(data: object, batch_size: int, weights: bool = False) -> Iterable[object]:
    """The re-iterable of batches in ``data``, in whatever form it came; nothing is read yet.

    `parts_of` finds inputs, targets and weights in what it gives.
    """
    pairs = isinstance(data, (tuple, list)) and len(data) in (2, 3) and all(isinstance(p, Tensor) for p in data[1:])
    if pairs or _is_named(data):
        _require_batch_size(batch_size)
        given, targets, w = parts_of(data, weights)
        inputs = normalise(given)
        _require_aligned("data", inputs, targets, w)
        return _InMemory(inputs, {"targets": targets} | ({} if w is None else {"weights": w}), batch_size, type(given))
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


def parts_of(item: object, weights: bool) -> tuple[object, Tensor, Tensor | None]:
    """Inputs, targets and weights of one batch: a tuple or list, or a mapping with these names.

    weights: whether a third item was declared to be weights. Raises TypeError for another form, for a third item that
    was not declared, and for weights that are neither floating nor boolean.
    """
    if _is_named(item):
        assert isinstance(item, Mapping)
        found = [item[name] for name in NAMES if name in item]
    elif isinstance(item, (tuple, list)) and len(item) in (2, 3):
        found = list(item)
        if len(found) == 3 and not weights:
            raise TypeError(_undeclared(found[2]))
    else:
        raise TypeError(_not_a_batch(item))
    if weights and len(found) == 2:
        raise TypeError("weights=True, but there are inputs and targets alone. Add the weights, or leave weights out.")
    if not all(isinstance(part, Tensor) for part in found[1:]):
        kinds = ", ".join(type(part).__name__ for part in found[1:])
        raise TypeError(f"Targets (and weights, if any) must be tensors; given {kinds}. {ACCEPTED}")
    w = found[2] if len(found) == 3 else None
    if w is not None and not (w.is_floating_point() or w.dtype == torch.bool):
        raise TypeError(
            f"Sample weights are floating or boolean; given {w.dtype}, as indices or labels are. Convert counts with "
            "w.float() and masks with w.bool(); leave out what is neither."
        )
    return found[0], found[1], w


def _is_named(item: object) -> bool:
    """Whether a mapping names inputs, targets and perhaps weights, and nothing else."""
    return isinstance(item, Mapping) and set(NAMES[:2]) <= set(item) <= set(NAMES)


def _undeclared(third: object) -> str:
    what = f"{third.dtype} of shape {tuple(third.shape)}" if isinstance(third, Tensor) else type(third).__name__
    return (
        f"There is a third item ({what}), and nothing says what it is. Sample weights need saying: weights=True, or a "
        "mapping {'inputs': ..., 'targets': ..., 'weights': ...}. Leave out an index or an identifier, as "
        "[(x, y) for x, y, _ in loader] does."
    )


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


def _not_a_batch(item: object) -> str:
    hint = ACCEPTED
    if isinstance(item, Mapping):
        hint = "Split mappings into (inputs, targets), such as (batch, batch.pop('labels')) on a copy of the batch."
    return f"A batch is (inputs, targets); this is a {type(item).__name__}. {hint}"
