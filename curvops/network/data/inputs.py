"""Inputs of a network: a tensor, a tuple (positional arguments), a dict (keyword arguments), or objects; and copies.

Tensors have the same leading dimension n, the number of points. NumPy arrays become tensors. Points of any other kind
are `Objects`, which become what the model takes where it is called (`value_of`).

A linearisation, a posterior and a sampler keep copies of the small tensors that they are given (noise, class weights,
prior precision and mean, positions), so that later in-place changes have no effect. A tensor that requires a gradient
is not copied, so that results and gradients belong to its current value. Data are not copied but compared by
fingerprints (`network.data.batches`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, tree_unflatten
from torch.utils.data import DataLoader, Dataset
from torch.utils.hooks import unserializable_hook

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
    if isinstance(x, Tensor | Objects):
        return x
    if isinstance(x, (tuple, list)):
        inputs: object = tuple(map(tensor_of, x))
    else:
        inputs = {name: tensor_of(value) for name, value in x.items()} if isinstance(x, Mapping) else tensor_of(x)
    if isinstance(inputs, Tensor):
        return inputs
    if isinstance(inputs, tuple) and inputs and all(isinstance(value, Tensor) for value in inputs):
        return inputs
    if isinstance(inputs, dict) and inputs and all(isinstance(value, Tensor) for value in inputs.values()):
        return inputs
    raise TypeError(
        "Inputs are a tensor, a non-empty tuple or list of tensors, or a mapping of names to tensors (or NumPy arrays "
        f"in their place); given {_kind(x)}. {_conversion(x)}"
    )


def batch_inputs(x: object, n: int, whole: bool | None = None) -> Inputs:
    """Convert the inputs of a batch of n targets, to a `WholeBatch` if `whole`; None does so for no tensors of points.

    Raises TypeError as `normalise` does if `whole` is False, and for one text.
    """
    if whole and not isinstance(x, Objects):
        return WholeBatch(x, n)
    if whole is False or isinstance(x, Tensor | np.ndarray | Objects):
        return normalise(x)
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
