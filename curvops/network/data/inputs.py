"""Inputs of a network, and the parts of a batch in the forms in which users give them; copies of tensors.

Inputs are a tensor, a tuple (positional arguments), a dict (keyword arguments), or objects. Tensors have the same
leading dimension n, the number of points. NumPy arrays become tensors. Points of any other kind are `Objects`, which
become what the model takes where it is called (`value_of`). A batch is inputs, targets and sample weights
(`split_batch`).

A linearisation, a posterior and a sampler keep copies of the small tensors that they are given (noise, class weights,
prior precision and mean, positions), so that later in-place changes have no effect. A tensor that requires a gradient
is not copied, so that results and gradients belong to its current value. Data are not copied but compared by
fingerprints (`network.data.batches`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, tree_unflatten
from torch.utils.data import DataLoader, Dataset
from torch.utils.hooks import unserializable_hook

from curvops.errors import MissingLabelsError
from curvops.network.data.objects import Objects, WholeBatch, join_objects

Inputs: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor] | Objects


def as_inputs(x: object, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Inputs:
    """Read a user's inputs and move them as :func:`move` does.

    Lists become tuples, and mappings (Hugging Face batches) dicts. Gradients flow through. Raises TypeError if ``x``
    has none of the three forms, and ValueError if its components differ in the number of points or contain NaN or Inf
    (waits for the device once per tensor).
    """
    inputs = normalise(x)
    num_points(inputs)
    for name, tensor in components(inputs):
        require_finite(name, tensor)
    return move(inputs, device, dtype)


def normalise(x: object) -> Inputs:
    """Convert tensors or NumPy arrays to a tensor, tuple or dict of tensors. Raises TypeError for anything else."""
    inputs = x if isinstance(x, Objects) else as_tensors(x)
    if inputs is None:
        raise TypeError(
            "Inputs are a tensor, a non-empty tuple or list of tensors, or a mapping of names to tensors (or NumPy "
            f"arrays in their place); given {_kind(x)}. {_conversion(x)}"
        )
    return inputs


def as_tensors(x: object) -> Tensor | tuple[Tensor, ...] | dict[str, Tensor] | None:
    """Return a tensor, a tuple or a dict of them, for a user's tensors or arrays; None for anything else."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Mapping):
        named = {name: tensor_of(value) for name, value in x.items()}
        return named if named and all(isinstance(value, Tensor) for value in named.values()) else None
    if isinstance(x, (tuple, list)):
        values = tuple(map(tensor_of, x))
        return values if values and all(isinstance(value, Tensor) for value in values) else None
    only = tensor_of(x)
    return only if isinstance(only, Tensor) else None


def batch_inputs(x: object, targets: Any, whole: bool | None = None) -> Inputs:
    """Convert the inputs of a batch with targets to a `WholeBatch` if `whole`; None does so for no tensors of points.

    Raises TypeError as `normalise` does if `whole` is False, and for one text.
    """
    if isinstance(x, Objects) or whole is False or (whole is None and isinstance(x, Tensor | np.ndarray)):
        return normalise(x)
    n = max(sizes_of(targets))
    if whole:
        return WholeBatch(x, n)
    if isinstance(x, str | bytes) and n > 1:
        raise TypeError(f"{n} targets have the inputs {x!r:.40}: if the data are one batch, pass a list, [batch].")
    try:
        inputs = normalise(x)
        if num_points(inputs) == n:
            return inputs
    except (TypeError, ValueError):
        pass
    return WholeBatch(x, n)


def value_of(inputs: Inputs, apart: bool = False) -> Any:
    """Return what the model takes for these inputs, or for a copy of objects (`apart`): a collate may change them."""
    if not isinstance(inputs, Objects):
        return inputs
    return (inputs.copy() if apart else inputs).value()


def described(inputs: Inputs) -> str:
    """Return the names, shapes and dtypes of the inputs, or the number and the kind of objects, for messages."""
    if isinstance(inputs, Objects):
        return repr(inputs)
    return ", ".join(f"{name} {tuple(tensor.shape)} of {tensor.dtype}" for name, tensor in components(inputs))


def components(inputs: Inputs) -> list[tuple[str, Tensor]]:
    """Return the tensors of the inputs with the names that messages use for them; of objects, those in containers."""
    if isinstance(inputs, Tensor):
        return [("inputs", inputs)]
    if isinstance(inputs, Objects):
        return inputs.named_tensors()
    if isinstance(inputs, tuple):
        return [(f"inputs[{i}]", tensor) for i, tensor in enumerate(inputs)]
    return [(f"inputs[{name!r}]", tensor) for name, tensor in inputs.items()]


def names_with_gradient(inputs: Inputs) -> tuple[str, ...]:
    """Return the names of the tensors that require a gradient, if gradients are being recorded."""
    if not torch.is_grad_enabled():
        return ()
    return tuple(name for name, tensor in components(inputs) if tensor.requires_grad)


def rows_of(inputs: Inputs) -> list[tuple[str, Tensor]]:
    """Return tensors whose rows identify the points, by name: the inputs themselves, or the prints of objects."""
    return [("inputs", inputs.prints())] if isinstance(inputs, Objects) else components(inputs)


def num_points(inputs: Inputs) -> int:
    """Return the common leading dimension n. Raises ValueError when there is none."""
    if isinstance(inputs, Tensor) and inputs.ndim:
        return inputs.shape[0]
    if isinstance(inputs, Objects):
        return len(inputs)
    first, *others = (tensor.shape[:1] for _, tensor in components(inputs))
    if not first or any(other != first for other in others):
        shapes = ", ".join(f"{name} of shape {tuple(tensor.shape)}" for name, tensor in components(inputs))
        raise ValueError(
            f"All inputs need one leading dimension, the number of points; given {shapes}. Keep what does not vary "
            "between points inside the model; for points of unequal sizes pass collate= to co.linearize."
        )
    return first[0]


def map_inputs(change: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Return the inputs with each tensor changed; objects, which are constants, as they are."""
    if isinstance(inputs, Objects):
        return inputs
    return change(inputs) if isinstance(inputs, Tensor) else tree_map(change, inputs)


def take(inputs: Inputs, index: slice | Tensor) -> Inputs:
    """Return the points in a slice, as views, or those at given positions, as copies.

    Raises ValueError for some points of a `WholeBatch`.
    """
    if isinstance(inputs, Objects):
        return inputs.take(index)
    return inputs[index] if isinstance(inputs, Tensor) else map_inputs(lambda tensor: tensor[index], inputs)


def join(parts: Sequence[Inputs]) -> Inputs:
    """Return the points of several parts in one. Raises ValueError for several parts with a `WholeBatch`."""
    if isinstance(parts[0], Objects):
        return join_objects([inputs for inputs in parts if isinstance(inputs, Objects)])
    return tree_map(lambda *tensors: torch.cat(tensors), *parts)


def group_alike(parts: Iterable[Any]) -> list[list[Any]]:
    """Return the parts that can be joined together: inputs, or pairs with targets, whose points have equal shapes."""
    groups: dict[Any, list[Any]] = {}
    for part in parts:
        leaves = tree_leaves(part, is_leaf=lambda value: isinstance(value, WholeBatch))
        alone = any(isinstance(leaf, WholeBatch) for leaf in leaves)
        form = id(part) if alone else tuple(leaf.shape[1:] for leaf in leaves if isinstance(leaf, Tensor))
        groups.setdefault(form, []).append(part)
    return list(groups.values())


def cut(inputs: Inputs, step: int) -> Iterator[tuple[slice, Inputs]]:
    """Yield (some consecutive points, their inputs), `step` at a time; a `WholeBatch` comes in one."""
    total = num_points(inputs)
    if isinstance(inputs, WholeBatch):
        step = max(1, total)
    for start in range(0, total, step):
        points = slice(start, min(start + step, total))
        yield points, inputs if step >= total else take(inputs, points)


def in_pieces(inputs: Inputs, most: int) -> Iterator[Inputs]:
    """Yield the inputs of at most so many points at a time, in pieces of equal size; 0 is all of them."""
    total = num_points(inputs)
    if not most or total <= most:
        yield inputs
        return
    yield from (subset for _, subset in cut(inputs, math.ceil(total / math.ceil(total / most))))


def first_of(inputs: Inputs, most: int = 2) -> Inputs:
    """Return the first points, or a `WholeBatch`, to try a model on; if there are no points, one of zeros."""
    if isinstance(inputs, WholeBatch):
        return inputs
    if num_points(inputs) or isinstance(inputs, Objects):
        return take(inputs, slice(0, most))
    return map_inputs(lambda tensor: tensor.new_zeros(1, *tensor.shape[1:]), inputs)


def copy(inputs: Inputs) -> Inputs:
    """Return a copy of the inputs."""
    return inputs.copy() if isinstance(inputs, Objects) else map_inputs(torch.clone, inputs)


def replace_tensors(inputs: Inputs, tensors: Mapping[str, Tensor]) -> Inputs:
    """Replace the named tensors of the inputs by others; the rest lose their graph. Objects have no such tensors."""
    if isinstance(inputs, Objects):
        return inputs
    copies = [tensors.get(name, tensor.detach()) for name, tensor in components(inputs)]
    return tree_unflatten(copies, tree_structure(inputs))


def move(inputs: Inputs, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Inputs:
    """Move the inputs to a device and cast floating-point tensors (only) to ``dtype``; None keeps either."""
    if isinstance(inputs, Tensor):
        return move_tensor(inputs, device, dtype)
    if isinstance(inputs, Objects):
        return inputs.move(device, dtype)
    return map_inputs(lambda tensor: move_tensor(tensor, device, dtype), inputs)


def move_tensor(tensor: Tensor, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    """Move one tensor as :func:`move` does."""
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)


MISSING = (
    "Remove or impute them. Targets that are missing may be NaN under co.likelihoods.Gaussian(missing='ignore'), and "
    "likewise Bernoulli and Poisson."
)


def require_finite(name: str, tensor: Tensor, remedy: str = "Remove or impute them.") -> None:
    """Raise ValueError if a floating-point tensor holds NaN or Inf. Waits for the device once."""
    if not is_finite(tensor):
        raise ValueError(f"{name} of shape {tuple(tensor.shape)} holds NaN or infinite values. {remedy}")


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds no NaN and no Inf. Waits for the device once."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return not tensor.is_complex() or bool(tensor.isfinite().all())
    return all(map(math.isfinite, extremes(tensor)))


def extremes(tensor: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest number, or NaN if there is one, ten times faster than `isfinite().all()`.

    Waits for the device once.
    """
    if tensor.numel() == 1:
        return (only := tensor.item()), only
    low, high = torch.stack(tensor.detach().aminmax()).tolist()
    return low, high


def within(x: Tensor, low: float, strict: bool = False) -> bool:
    """Return whether all entries are finite and above ``low``. Waits for the device."""
    if x.numel() == 0:
        return True
    least, largest = extremes(x)
    return (low < least if strict else low <= least) and largest < math.inf


def _conversion(x: object) -> str:
    """Return the advice on how to make inputs from the given object."""
    if hasattr(x, "to_numpy"):
        return "Pass x.to_numpy()."
    if isinstance(x, Dataset | DataLoader):
        return "Call this for the inputs of each batch: for x, y in loader."
    return (
        "Drop entries that are neither, and convert lists with torch.tensor(x). For points of another kind pass "
        "collate= to co.linearize: a function of a list of points that returns what the model takes."
    )


def _kind(x: object) -> str:
    if isinstance(x, (tuple, list)):
        shown = ", ".join(type(value).__name__ for value in x[:4]) + (", ..." if len(x) > 4 else "")
        return f"a {type(x).__name__} of ({shown})"
    if isinstance(x, Mapping):
        return "a mapping of " + ", ".join(f"{name!r}: {type(value).__name__}" for name, value in x.items())
    return f"a {type(x).__name__}"


def tensor_of(x: Any) -> Any:
    """Convert a NumPy array to a tensor, sharing its memory if torch can; return anything else unchanged."""
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype.kind == "u" and x.dtype.itemsize > 1:
        x = x.astype(np.int64)  # torch has few operations for unsigned integers
    return torch.from_numpy(x if x.flags.writeable and min(x.strides, default=0) >= 0 else x.copy())


def copy_unless_recorded(original: Tensor, used: Tensor, what: str) -> Tensor:
    """Copy `used`, the tensor made from `original`, or return `original` itself if it requires a gradient.

    If `original` requires a gradient and `used` is a conversion of it (another dtype, an entry of a mapping), the
    conversion keeps the value at the call, and a backward pass through it after a change raises ValueError.
    """
    if not used.requires_grad:
        return used.clone()
    if used is original:
        return used
    value = original.detach().clone()

    def require_unchanged(gradient: Tensor) -> None:
        if not bool((original.detach() == value).all()):
            raise ValueError(f"{what} changed after it was given: build the linearisation or the posterior again.")

    used = used.view_as(used)
    used.register_hook(unserializable_hook(require_unchanged))
    return used


# The parts of a batch

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
    y, w = as_tensors(targets), as_tensors(rest[0]) if rest else None
    if (y is None and targets is not None) or (rest and w is None):
        kinds = type(targets).__name__ + (f", {type(rest[0]).__name__}" if rest else "")
        raise TypeError(f"Targets (and weights, if any) must be tensors; given {kinds}. {TARGETS} {ACCEPTED}")
    return inputs, y, w


def sizes_of(targets: Any) -> set[int]:
    """Return the leading dimensions of targets, one if all have the same number of points."""
    return {len(tensor) if tensor.ndim else 0 for tensor in tree_leaves(targets)}


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
    inputs = normalise(x) if targets is None else batch_inputs(x, targets, whole)
    n = num_points(inputs)
    for name, parts in (("targets", targets), ("sample weights", w)):
        for leaf in [] if parts is None else tree_leaves(parts):  # a tensor is its own leaf
            if leaf.ndim == 0 or len(leaf) != n:
                count = f"There are {n} inputs, but the {name} have shape {tuple(leaf.shape)}"
                hint = JOINED if isinstance(inputs, tuple | dict) else ""
                raise ValueError(f"{count}. The leading dimension of both counts points.{hint}")
    return BatchParts(inputs, targets, w)
