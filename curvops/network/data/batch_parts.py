"""The parts of a batch in the forms in which users give them: inputs, targets and sample weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from curvops.errors import MissingLabelsError
from curvops.network.data.inputs import Inputs, batch_inputs, normalise, num_points, tensor_of
from curvops.network.data.objects import Objects

ACCEPTED = (
    "Pass a pair (inputs, targets) of tensors or arrays, a torch Dataset, a DataLoader, or a list (any re-iterable) of "
    "batches (inputs, targets); with weights=True (inputs, targets, weights), or mappings with these three names. In a "
    "mapping with 'labels' (Hugging Face's batches) these are the targets, and all other entries the inputs. A batch "
    "of graphs has its targets as y. Without labels, write (inputs, None), or pass one tensor."
)
TARGETS = (
    "Several targets are a mapping of tensors, with a likelihood under each name; convert a list of numbers with "
    "torch.tensor; those of an autoencoder are its inputs; without labels pass None."
)
JOINED = " For points of unequal sizes, joined in one tensor, pass the points themselves and collate= to co.linearize."
NAMES = ("inputs", "targets", "weights")
LABELS = ("labels", "label")
"""The names of the targets in Hugging Face collators and data sets."""


class BatchParts(NamedTuple):
    """Inputs, targets and sample weights of as many points each, checked together; None for what a batch lacks."""

    inputs: Inputs
    targets: Any
    weights: Any


def holds_all(data: object) -> bool:
    """Return whether data are tensors of all points: one, a pair, a triple, or a mapping that names its targets."""
    if isinstance(data, Mapping):
        return _is_named(data) or any(name in data for name in LABELS)
    if not isinstance(data, (tuple, list)) or len(data) not in (2, 3):
        return only_inputs(data) is not None
    # In a list of batches none is a tensor: if the first item is one, these are inputs and targets, of whatever type.
    if isinstance(data[0], Tensor | np.ndarray | Objects):
        return True
    return all(labels is None or _is_of_points(labels) for labels in data[1:]) and unlabelled_source(data) is None


def _is_of_points(value: object) -> bool:
    """Return whether this is a tensor, or a mapping of them that is no batch."""
    if isinstance(value, Mapping):
        batch = _is_named(value) or any(name in value for name in LABELS)
        return not batch and all(map(_is_of_points, value.values()))
    return isinstance(value, Tensor | np.ndarray)


def unlabelled_source(data: object) -> Dataset[Any] | DataLoader[Any] | None:
    """Return the Dataset or the DataLoader of a pair (source of inputs, None)."""
    if not isinstance(data, (tuple, list)) or len(data) != 2 or data[1] is not None:
        return None
    return data[0] if isinstance(data[0], Dataset | DataLoader) else None


def only_inputs(item: object) -> Tensor | np.ndarray | None:
    """Return the inputs of a batch that is one tensor, or, as from a `TensorDataset` of inputs alone, a list of one."""
    only = item[0] if isinstance(item, (tuple, list)) and len(item) == 1 else item
    return only if isinstance(only, Tensor | np.ndarray) else None


def parts_of(item: object, weights: bool) -> tuple[object, Any, Any]:
    """Return what `split_batch` does, for a batch that has targets; raise MissingLabelsError for one without."""
    inputs, targets, w = split_batch(item, weights)
    if targets is None:
        raise MissingLabelsError("this call", "A batch is (inputs, targets); this one has inputs alone. ")
    return inputs, targets, w


def split_batch(item: object, weights: bool) -> tuple[object, Any, Any]:
    """Return inputs, targets and weights of one batch: a tuple, a list, a mapping with these names or with labels.

    Several targets are a mapping or a tuple of tensors, and so may be their weights.

    An object with targets `y`, such as a batch of graphs, is the inputs itself.

    Without labels a batch is (inputs, None) or one tensor; nothing else is read so, since other tuples and mappings may
    hold labels.

    weights: whether a third item was declared to be weights. Raises TypeError for another form, and for a third item
    that was not declared; ValueError for labels that a causal language model shifts.
    """
    if isinstance(item, (tuple, list)) and len(item) in (2, 3):
        if len(item) == 3 and not weights:
            raise TypeError(_describe_undeclared(item[2]))
        inputs, targets, *rest = item
    elif isinstance(item, Mapping) and _is_named(item):
        inputs, targets, *rest = (item[name] for name in NAMES if name in item)
    elif isinstance(item, Mapping) and any(name in item for name in LABELS):
        inputs, targets, *rest = _split_labels(item, weights)
    elif (only := only_inputs(item)) is not None:
        inputs, targets, *rest = only, None
    elif isinstance(getattr(item, "y", None), Tensor):  # a batch of torch_geometric
        inputs, targets, rest = item, item.y, []  # type: ignore[attr-defined]
    else:
        named = "Name the targets of a mapping 'labels', or pass (inputs, targets); without labels (inputs, None)."
        hint = named if isinstance(item, Mapping) else ACCEPTED
        raise TypeError(f"A batch is (inputs, targets); this is a {type(item).__name__}. {hint}")
    if weights and not rest:
        raise TypeError("weights=True, but there are only inputs and targets. Add the weights, or drop weights=True.")
    y, w = targets_of(targets), targets_of(rest[0]) if rest else None
    if (y is None and targets is not None) or (rest and w is None):
        kinds = type(targets).__name__ + (f", {type(rest[0]).__name__}" if rest else "")
        raise TypeError(f"Targets (and weights, if any) must be tensors; given {kinds}. {TARGETS} {ACCEPTED}")
    return inputs, y, w


def sizes_of(targets: Any) -> set[int]:
    """Return the leading dimensions of targets, one if all have the same number of points."""
    return {len(tensor) if tensor.ndim else 0 for tensor in tree_leaves(targets)}


def targets_of(targets: object) -> Any:
    """Return targets as a tensor, or several as a mapping or a tuple of tensors; None for anything else."""
    if isinstance(targets, Tensor):
        return targets
    y: Any = tensor_of(targets)
    if isinstance(y, Mapping):
        y = {name: tensor_of(value) for name, value in y.items()}
    elif isinstance(y, (tuple, list)):
        y = tuple(map(tensor_of, y))
    values = list(y.values()) if isinstance(y, dict) else y if isinstance(y, tuple) else [y]
    return y if values and all(isinstance(value, Tensor) for value in values) else None


def _is_named(item: Mapping[Any, Any]) -> bool:
    """Return whether a mapping names inputs, targets and perhaps weights, and nothing else."""
    return set(NAMES[:2]) <= set(item) <= set(NAMES)


def _split_labels(item: Mapping[str, Any], weights: bool) -> list[Any]:
    """Return inputs, targets and perhaps weights of a Hugging Face batch: every entry but the labels is an input."""
    label = next(name for name in LABELS if name in item)
    apart = (label, *(("weights",) if weights and "weights" in item else ()))
    inputs = {name: value for name, value in item.items() if name not in apart}
    y, ids = (tensor_of(item.get(name)) for name in (label, "input_ids"))
    alike = isinstance(y, Tensor) and isinstance(ids, Tensor) and y.ndim > 1 and y.shape == ids.shape
    if alike and bool(((y == ids) | (y == -100)).all()):  # Hugging Face ignores this label
        raise ValueError(
            "the labels are the input_ids themselves: pass (inputs, targets) with the targets shifted, "
            "torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)."
        )
    return [inputs, *(item[name] for name in apart)]


def _describe_undeclared(third: object) -> str:
    what = f"{third.dtype} of shape {tuple(third.shape)}" if isinstance(third, Tensor) else type(third).__name__
    return (
        f"There is a third item ({what}) of unknown meaning. Declare sample weights by weights=True, or by a mapping "
        "{'inputs': ..., 'targets': ..., 'weights': ...}. Nest the targets of several outputs: (x, (y1, y2)). Leave "
        "out an index or an identifier, as [(x, y) for x, y, _ in loader] does."
    )


def aligned_parts(x: object, targets: Any, w: Any, whole: bool | None = None) -> BatchParts:
    """Return the parts that `split_batch` finds with their inputs as `batch_inputs` reads them.

    Raises ValueError unless all have the same number of points, and what `batch_inputs` raises.
    """
    inputs = normalise(x) if targets is None else batch_inputs(x, max(sizes_of(targets)), whole)
    n = num_points(inputs)
    for name, parts in (("targets", targets), ("sample weights", w)):
        for leaf in [] if parts is None else tree_leaves(parts):  # a tensor is its own leaf
            if leaf.ndim == 0 or len(leaf) != n:
                count = f"There are {n} inputs, but the {name} have shape {tuple(leaf.shape)}"
                hint = JOINED if isinstance(inputs, tuple | dict) else ""
                raise ValueError(f"{count}. The leading dimension of both counts points.{hint}")
    return BatchParts(inputs, targets, w)
