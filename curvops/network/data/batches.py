"""The training data in batches, checked to be the same in every pass.

Operators sum over the data once per product, so the data must be finite, repeatable and unchanged. :func:`as_source`
turns the user's data into batches, of which :class:`Batches` checks the values on the first pass and the fingerprints
on every later one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from curvops.checks import refuse
from curvops.errors import DataChangedError, MissingLabelsError, NoDataError
from curvops.fingerprints import fingerprint, ordered_sum, point_prints
from curvops.network.data.inputs import (
    ACCEPTED,
    MISSING,
    BatchParts,
    Inputs,
    aligned_parts,
    as_tensors,
    components,
    copy,
    cut,
    first_of,
    group_alike,
    holds_all,
    join,
    move,
    move_tensor,
    normalise,
    num_points,
    require_finite,
    rows_of,
    split_batch,
    take,
    unlabelled_source,
)
from curvops.network.data.layouts import Layout
from curvops.network.data.objects import Objects, PointPairs, WholeBatch
from curvops.network.data.point_sources import InputsAlone, LoaderPasses, in_order, stacked_items
from curvops.network.data.randomness import items

NONE = torch.zeros(())
"""A target for data without labels while the likelihood is unknown."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Some points: inputs, targets with leading dimension n, and sample weights, or None for ones.

    Weights are (n,), (n, T), of the targets' shape, or (n, K) for K outputs by name.

    any_targets: the targets; for data that are not `labelled` some others, which a curvature may take in their place,
        since H is the same for all (`Likelihood.any_targets`).
    start: the position of the first point among all data.
    """

    inputs: Inputs
    any_targets: Tensor
    weights: Tensor | None = None
    start: int = 0
    labelled: bool = True

    @property
    def targets(self) -> Tensor:
        """The targets of the data. Raises MissingLabelsError if they have none."""
        if not self.labelled:
            raise MissingLabelsError
        return self.any_targets

    @property
    def num_points(self) -> int:
        """The number n of points."""
        return len(self.any_targets)

    def labels(self, points: slice | Tensor) -> Batch:
        """Return the points in a range or at positions, without their inputs; positions keep the batch's `start`."""
        weights = None if self.weights is None else self.weights[points]
        first = (points.start or 0) if isinstance(points, slice) else 0
        return Batch((), self.any_targets[points], weights, self.start + first, self.labelled)

    def named_labels(self) -> list[tuple[str, Tensor]]:
        """Return the targets and the weights of the data, those that there are, by name."""
        named = [("targets", self.any_targets)] if self.labelled else []
        return named if self.weights is None else [*named, ("weights", self.weights)]

    @cached_property
    def rows(self) -> dict[str, Tensor]:
        """The tensors whose rows identify the points, by name: as `rows_of` finds them, and targets and weights."""
        place = self.any_targets.device
        return {name: tensor.to(place) for name, tensor in rows_of(self.inputs)} | dict(self.named_labels())

    @property
    def form(self) -> object:
        """The names, shapes and dtypes of these tensors."""
        return [(name, tensor.shape, tensor.dtype) for name, tensor in self.rows.items()]


@dataclass(frozen=True)
class DataPrints:
    """Fingerprints of all points, whatever the batches and shards: `contents` ignores the order, `order` does not."""

    contents: int
    order: int


@dataclass(frozen=True, eq=False)
class Reading:
    """How a user's batches are read: their device and dtype, the layout of targets, and the checks.

    device, dtype: the device of batches, and the dtype of their floating-point tensors; None keeps each.
    check: called with each batch's targets; raises if they do not suit the likelihood.
    layout: the layout of the outputs if a point has several positions: targets (n, *positions, ...) become
        (n, T, ...), and weights may be (n,) or (n, *positions). None leaves both as they are.
    weights: whether a third item holds sample weights; in mappings they are named.
    missing: whether targets may be NaN, because they are missing.
    admit: called with each batch's inputs; raises if the model cannot be run on them.
    labelled: whether the batches have targets; None reads both kinds.
    any_target: the target of each point without one, in the layout's form.
    whole: whether only the model can read a batch; None decides by the batch.
    """

    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    check: Callable[[Tensor], None] | None = None
    layout: Layout | None = None
    weights: bool = False
    missing: bool = False
    admit: Callable[[Inputs], None] | None = None
    labelled: bool | None = None
    any_target: Tensor = NONE
    whole: bool | None = None

    def read(self, item: object, index: int = 0) -> Batch:
        """Read one item of the source as a batch on the device, checking its form but not its values."""
        inputs, targets, w = self.parts(item, index)
        with _in_batch(index):
            if self.layout is not None:
                w = None if w is None else self.layout.weights(w, getattr(targets, "shape", torch.Size()))
                targets = None if targets is None else self.layout.targets(targets)
            if w is not None and not w.is_floating_point():
                w = w.to(self.dtype or torch.get_default_dtype())
        w = None if w is None else move_tensor(w, self.device, self.dtype)
        y = self.any_target.repeat(num_points(inputs), *[1] * self.any_target.ndim) if targets is None else targets
        y = move_tensor(y, self.device, self.dtype)
        return Batch(move(inputs, self.device, self.dtype), y, w, labelled=targets is not None)

    def parts(self, item: object, index: int = 0) -> BatchParts:
        """Return inputs, targets and weights of one item as they are given, of as many points each."""
        if isinstance(item, BatchParts):
            return item
        with _in_batch(index):
            x, targets, w = split_batch(item, self.weights)
            if self.labelled not in (None, targets is not None):
                what = "no labels, and others do" if self.labelled else "labels, and others do not"
                raise ValueError(f"this batch has {what}: give all of them labels, or none.")
            return aligned_parts(x, targets, w, self.whole)

    def read_checked(self, item: object, index: int = 0) -> Batch:
        """Read one batch and check its values, too, without copying. Waits for the device once per tensor."""
        batch = self.read(item, index)
        refuse(batch.num_points == 0, f"Batch {index} is empty. Leave it out.")
        for name, tensor in [*components(batch.inputs), *batch.named_labels()]:
            if name != "targets":
                require_finite(f"Batch {index}: {name}", tensor)
            elif not self.missing:  # otherwise `check` looks for Inf
                require_finite(f"Batch {index}: {name}", tensor, MISSING)
        is_wrong = batch.weights is not None and bool((batch.weights < 0).any())
        refuse(is_wrong, f"Batch {index} has negative sample weights, which multiply log-likelihoods: use 0 or more.")
        with _in_batch(index):
            if self.check is not None:
                self.check(batch.any_targets)
            if self.admit is not None:
                self.admit(batch.inputs)
        return batch


class Batches:
    """The training data: iterating yields each :class:`Batch`, in the chosen floating-point dtype, on one device.

    The first pass, made at construction, checks every value (it waits for the device once per tensor). Every complete
    later pass compares fingerprints without waiting for the device until its end, and raises :class:`DataChangedError`
    there. Iterators share no state, so two threads may iterate at once.

    source, reading: a re-iterable of batches, as from `as_source`, and the way in which they are read.

    Raises TypeError for data of another form, and ValueError for empty data, lengths that differ, NaN or Inf, negative
    weights, and a third item that was not declared to be weights.
    """

    is_present: ClassVar[bool] = True
    start = 0
    """The position of the first point among all points; for a shard, after those of the preceding ranks."""

    def __init__(self, source: Iterable[object], reading: Reading) -> None:
        self._source, self._reading = source, reading
        self._forms: list[object] = []
        self._sums = torch.zeros(())
        points, sizes, prints = 0, [], []
        for index, item in enumerate(self._items()):
            batch = reading.read_checked(item, index)
            rows = [*batch.rows.values()]
            self._note_points(point_prints(rows), points)
            prints.append(fingerprint(rows))
            self._forms.append(batch.form)
            sizes.append(batch.num_points)
            points += batch.num_points
            if index == 0:
                self._few, self.labelled = copy(first_of(batch.inputs)), batch.labelled
        source = source.source if isinstance(source, InputsAlone) else source
        if not sizes:
            kind = type(source.loader if isinstance(source, LoaderPasses) else source).__name__
            raise NoDataError(f"The data are empty: a pass over this {kind} gave no batch. {ACCEPTED}")
        self._batch_prints = torch.stack(prints)
        if isinstance(source, LoaderPasses):
            source.require_parts_apart(self._batch_prints)
        self.fingerprint_dtype = reading.dtype
        """The dtype of floating data when the fingerprint was taken."""
        self.sizes = tuple(sizes)
        """The number of points of each batch."""
        # Points that collate= joins may be of any size, so that only batches that were read show what fits.
        if isinstance(source, _InMemory) and not isinstance(source.whole.inputs, Objects):
            sizes.append(source.batch_size)
        self.largest = max(sizes)
        """The most points that a batch on any rank has, or would have of more tensors: other code's own batch size."""

    @cached_property
    def prints(self) -> DataPrints:
        """The fingerprints of the points; they stay the same for data moved to another device or dtype."""
        return DataPrints(*self._sums.tolist())

    @property
    def own_prints(self) -> DataPrints:
        """The fingerprints of the points of this process."""
        return self.prints

    def restrict(self, chosen: Tensor, factor: float, like: Tensor) -> Batches:
        """Return some points, in ascending order, on the device of `like`; their weights are multiplied by a factor."""
        return Batches(self._chosen(chosen, factor, like), self.reading_again(like, weights=True))

    def reading_again(self, like: Tensor, weights: bool) -> Reading:
        """Return the reading of batches made from these, on the device and in the dtype of `like`."""
        read = self._reading
        return Reading(like.device, like.dtype, weights=weights, missing=read.missing, any_target=read.any_target)

    @property
    def of_whole_batches(self) -> bool:
        """Whether only the model can read the batches, so that no point can be taken alone."""
        return isinstance(self._few, WholeBatch)

    def evenly_spaced(self, count: int) -> Tensor:
        """Return the positions of so many points in ascending order; or of random whole batches here with as many."""
        if not self.of_whole_batches:
            return torch.arange(count) * self.num_data // count
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(0))
        enough = torch.tensor(self.sizes)[order].cumsum(0) >= count
        some = order[: int((~enough).sum()) + 1].tolist()
        batches = torch.arange(self.start, self.start + sum(self.sizes)).split(self.sizes)
        return torch.cat([batches[index] for index in sorted(some)])

    def _chosen(self, chosen: Tensor, factor: float, like: Tensor) -> list[tuple[Inputs, Tensor | None, Tensor]]:
        """Return those of the chosen points that this process has, with their weights.

        Points of one form are in as few batches as the largest of the data allows.
        """
        batches, start = [], self.start
        for batch in self:
            inside = chosen[(chosen >= start) & (chosen < start + batch.num_points)] - start
            start += batch.num_points
            if len(inside):
                index = inside.to(batch.any_targets.device)
                ones = batch.any_targets.new_ones(batch.num_points, dtype=like.dtype)
                weights = (ones if batch.weights is None else batch.weights)[index] * factor
                targets = batch.targets[index] if batch.labelled else None
                batches.append((take(batch.inputs, index), targets, weights))
        # Where points differ in size, only batches that were read show what fits.
        are_objects = any(isinstance(inputs, Objects) for inputs, _, _ in batches)
        if are_objects or len(group_alike(batch[:2] for batch in batches)) != 1:
            return batches
        inputs, all_targets, all_weights = zip(*batches)
        targets, weights = torch.cat(all_targets) if self.labelled else None, torch.cat(all_weights)
        pieces = cut(join(inputs), self.largest)
        return [(some, None if targets is None else targets[at], weights[at]) for at, some in pieces]

    def count_known(self, batches: Sequence[tuple[object, object]]) -> int:
        """Return how many of these (inputs, targets) are points of the data, by a pass; 0 if it cannot be known.

        That is so if the data have weights or no labels, or if a batch is one whole.
        """
        pairs = [(normalise(x), as_tensors(y)) for x, y in batches]
        if self.weighted or not self.labelled or any(isinstance(x, WholeBatch) for x, _ in pairs):
            return 0
        others = torch.cat([point_prints([*self._reading.read(pair).rows.values()]) for pair in pairs])
        known = torch.zeros_like(others, dtype=torch.bool)
        for batch in self:
            known |= torch.isin(others, point_prints([*batch.rows.values()]))
        return int(known.sum())

    @property
    def print_of_batches(self) -> int:
        """The fingerprint of the batches one after the other, by which earlier versions identified the data."""
        return int(fingerprint([self._batch_prints]))

    def _note_points(self, prints: Tensor, start: int) -> None:
        """Add the fingerprints of these points to both sums, with and without regard to their order."""
        sums = torch.stack([prints.sum(), ordered_sum(prints, start)])
        self._sums = sums if start == 0 else self._sums + sums

    @property
    def num_data(self) -> int:
        """The number N of points."""
        return sum(self.sizes)

    @property
    def weighted(self) -> bool:
        """Whether a third item of each batch holds weights."""
        return self._reading.weights

    @property
    def few(self) -> Inputs:
        """Copies of the inputs of the first two points, or of the only one."""
        return copy(self._few)

    @property
    def num_batches(self) -> int:
        """The number of batches."""
        return len(self.sizes)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        prints = []
        for index, item in enumerate(self._items()):
            if index == len(self):
                raise self._changed(f"there are more than the first pass's {len(self)} batches")
            batch = self._reading.read(item, index)
            prints.append(fingerprint([*batch.rows.values()]))
            if batch.form != self._forms[index]:
                raise self._changed(f"batch {index} has other shapes or dtypes")
            yield batch
        if len(prints) < len(self):
            raise self._changed(f"there are only {len(prints)} of the first pass's {len(self)} batches")
        changed = (torch.stack(prints) != self._batch_prints).tolist()
        if any(changed):
            raise self._changed(f"batch {changed.index(True)} has other values ({sum(changed)} batches do)")

    def _items(self) -> Iterator[object]:
        return items(self._source, torch.device(self._reading.device or "cpu"))

    def verify(self) -> None:
        """Compare the data with the first pass, in one pass; raise :class:`DataChangedError` if they differ."""
        for _ in self:
            pass

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Batches:
        """Return the data on another device or in another floating-point dtype (None keeps it). Costs two passes."""
        self.verify()
        reading = self._reading
        reading = replace(reading, device=device or reading.device, dtype=dtype or reading.dtype, admit=None)
        converted = Batches(self._source, reading)
        converted.prints, converted.fingerprint_dtype = self.prints, self.fingerprint_dtype
        return converted

    def _changed(self, what: str) -> DataChangedError:
        return DataChangedError(
            f"The data differ from the first pass: {what}. Usual causes are shuffling, random augmentation and "
            "tensors changed in place: turn off the first two, pass a copy of the tensors, or linearise again if "
            "the change was intended."
        )


@dataclass(frozen=True, eq=False)
class AbsentBatches:
    """The properties of `Batches` without the data themselves; reading a batch raises ValueError.

    `few` are the inputs of one or two points, on which a model is tried; `sizes` are the sizes of the batches.
    """

    few: Inputs
    num_data: int
    sizes: tuple[int, ...]
    prints: DataPrints
    fingerprint_dtype: torch.dtype | None
    weighted: bool
    labelled: ClassVar[bool] = True
    is_present: ClassVar[bool] = False
    start: ClassVar[int] = 0

    @property
    def own_prints(self) -> DataPrints:
        """The fingerprints of the points of this process."""
        return self.prints

    @property
    def largest(self) -> int:
        """The number of points of the largest batch."""
        return max(self.sizes)

    def __iter__(self) -> Iterator[NoReturn]:
        raise ValueError("this needs the training points: pass them, co.load(path, model, data).")

    def evenly_spaced(self, count: int) -> Any:
        """Raise ValueError, as reading a batch does."""
        return iter(self)

    def restrict(self, chosen: Tensor, factor: float, like: Tensor) -> Any:
        """Raise ValueError, as reading a batch does."""
        return iter(self)

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> AbsentBatches:
        """Return a copy on another device or in another floating-point dtype."""
        return replace(self, few=move(self.few, device, dtype))


@dataclass(frozen=True, eq=False)
class _InMemory:
    """Re-iterable slices of tensors in memory."""

    whole: BatchParts
    batch_size: int
    mapping_type: type  # the type of the inputs, if they were a mapping

    def __iter__(self) -> Iterator[BatchParts]:
        inputs, targets, weights = self.whole
        for start in range(0, num_points(inputs), self.batch_size):
            chosen = slice(start, start + self.batch_size)
            yield BatchParts(
                take(inputs, chosen),
                None if targets is None else take(targets, chosen),
                None if weights is None else take(weights, chosen),
            )


def as_source(data: object, batch_size: int, weights: bool = False) -> Iterable[object]:
    """Return a re-iterable of the batches in ``data``; nothing is read yet, and nothing copied.

    data: a tuple or list (inputs, targets[, weights]) of tensors in memory, or a mapping of them with these names; a
        Dataset; a DataLoader (a shuffling one is read in the order of its dataset) or any re-iterable of such tuples
        or mappings. Inputs may be a tensor, a tuple or list of tensors, or a mapping of tensors; NumPy arrays may
        replace tensors. `split_batch` finds inputs, targets and weights in each item. Without labels one tensor, or
        (inputs, None), where inputs may also be a Dataset or a DataLoader of inputs.
    batch_size: points per batch, only for tensors in memory and Datasets.

    Raises TypeError for data of another form, or that can be read only once.
    """
    if holds_all(data):
        x, targets, w = split_batch(data, weights)
        return _InMemory(aligned_parts(x, targets, w, whole=False), batch_size, type(x))
    if (source := unlabelled_source(data)) is not None:
        return InputsAlone(as_source(source, batch_size))
    if isinstance(data, (tuple, list)) and data and all(isinstance(value, Tensor | np.ndarray) for value in data):
        raise TypeError(
            f"A {type(data).__name__} of {len(data)} tensors can be read in several ways. If all are inputs, without "
            "labels, write ((a, b, ...), None); nest the targets of several outputs, (x, (y1, y2))."
        )
    if isinstance(data, Dataset):
        # Without its own generator, each pass of a DataLoader would draw from torch's default one.
        gather = data.gather if isinstance(data, PointPairs) else stacked_items
        return DataLoader(data, batch_size, shuffle=False, generator=torch.Generator(), collate_fn=gather)
    if isinstance(data, DataLoader):
        return LoaderPasses(in_order(data)) if type(data) is DataLoader else in_order(data)
    if isinstance(data, Iterator):
        raise TypeError(f"The data are read many times, a {type(data).__name__} only once: pass a list of batches.")
    if isinstance(data, (str, Mapping)) or not isinstance(data, Iterable):
        raise TypeError(f"Data of type {type(data).__name__} cannot be read. {ACCEPTED}")
    return data


@contextlib.contextmanager
def _in_batch(index: int) -> Iterator[None]:
    """Add the number of the batch to an error."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"Batch {index}: {error}") from error


class LabelledSource:
    """The training data as (inputs, batch without its inputs), so that a cached engine keeps little of a batch."""

    def __init__(self, data: Batches | AbsentBatches) -> None:
        self._data = data

    def __iter__(self) -> Any:
        start = self._data.start
        for batch in self._data:
            # Clone: stored parts of a batch must not change with the user's tensors.
            weights = None if batch.weights is None else batch.weights.clone()
            yield batch.inputs, Batch((), batch.any_targets.clone(), weights, start, batch.labelled)
            start += batch.num_points
