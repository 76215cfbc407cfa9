"""The selected parameters: how a vector of length D maps onto them, priors by their names, and their tangent space.

Prior precisions and means are given as a number, a vector or a mapping over parameter names; `read_precision` and
`read_mean` make tensors like θ of them.
"""

from __future__ import annotations

import fnmatch
import math
import numbers
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from curvops.checks import check_like, check_shape, checked_indices, in_functorch, refuse, refuse_tangents, shown
from curvops.fingerprints import fingerprint, in_single
from curvops.network.data.inputs import copy_unless_recorded, is_finite, tensor_of, within

Blocks = dict[str, Tensor]
PIECE_BYTES = 2**25
"""The bytes that a pass or a product makes at a time on a CPU, where larger ones save no time."""


@dataclass(frozen=True, eq=False)
class FlatLayout:
    """Names and shapes of tensors, in their order in a vector (d,)."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of entries of each tensor."""
        return tuple(map(torch.Size.numel, self.shapes))

    @cached_property
    def size(self) -> int:
        """The length d of the vector."""
        return sum(self.sizes)

    def parts(self, vector: Shaped[Tensor, "*k d"]) -> list[Tensor]:
        """Return the tensors (*k, *shape) in their order, views of the vector."""
        blocks = torch.split_with_sizes(vector, self.sizes, -1)
        return [block.view(block.shape[:-1] + shape) for shape, block in zip(self.shapes, blocks)]

    def named(self, vector: Shaped[Tensor, "*k d"]) -> Blocks:
        """Return the tensors (*k, *shape) by name, views of the vector."""
        return dict(zip(self.names, self.parts(vector)))

    def concatenate(self, tensors: Sequence[Tensor], leading: int = 0) -> Float[Tensor, "*k d"]:
        """Return the vector of tensors (*k, *shape), a copy; `leading` is the number of dimensions k."""
        return torch.cat(
            [tensor.flatten(leading) if tensor.ndim > leading else tensor.unsqueeze(-1) for tensor in tensors], -1
        )


@dataclass(frozen=True, eq=False)
class Selection(FlatLayout):
    """The selected parameters, by name, as one vector of length D.

    For a subnetwork, `index` (D,) selects entries of the concatenated tensors, of which there are `size` in total; None
    selects all of them.
    """

    index: Int[Tensor, " D"] | None = None

    @property
    def num_parameters(self) -> int:
        """The number D of selected entries."""
        return self.size if self.index is None else len(self.index)

    def size_of(self, names: Collection[str]) -> int:
        """Return the number of entries in the named tensors."""
        return sum(size for name, size in zip(self.names, self.sizes) if name in names)

    def matching(self, *globs: str) -> list[str]:
        """Return the names that match any of the globs, in their order."""
        return matching(self.names, *globs)

    def positions(self) -> Blocks:
        """Return, for each entry of the selected tensors, its position in the vector; −1 outside a subnetwork."""
        full = torch.arange(self.size)
        if self.index is not None:
            full = torch.full_like(full, -1).index_copy(0, self.index.cpu(), torch.arange(len(self.index)))
        return self.named(full)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Float[Tensor, " D"]:
        """Join named tensors into one vector. Raises ValueError for a missing name or a wrong shape."""
        if not isinstance(tensors, Mapping):
            raise TypeError(f"expected a mapping from the names {list(self.names)} to tensors, got {shown(tensors)}.")
        for name, shape in zip(self.names, self.shapes):
            refuse(name not in tensors, f"the mapping lacks {name!r}; it must name {list(self.names)}.")
            check_shape(repr(name), tensors[name], shape)
        vector = self.concatenate([tensors[name] for name in self.names])
        return vector if self.index is None else vector[self.index]

    def unflatten(self, vector: Float[Tensor, " D"]) -> Blocks:
        """Split a tangent vector into named tensors; entries outside a subnetwork are zero."""
        if self.index is not None:
            vector = vector.new_zeros(self.size).index_copy(0, self.index, vector)
        return self.named(vector)

    def split(self, block: Float[Tensor, "D K"]) -> Blocks:
        """Split a block of vectors into `{name: (K, *shape)}`: views where the block is stored as `(K, D).mT`."""
        rows = block.mT
        if self.index is not None:
            rows = rows.new_zeros(rows.shape[0], self.size).index_copy(1, self.index, rows)
        return self.named(rows)

    def join(self, blocks: Blocks) -> Float[Tensor, "D K"]:
        """Join `{name: (K, *shape)}` into a block of vectors, stored as `(K, D).mT`; this empties the mapping.

        Each tensor is freed once it is copied, so that the tensors and the block are never in memory together.
        """
        first = blocks[self.names[0]]
        if first.requires_grad:
            rows = self.concatenate([blocks[name] for name in self.names], 1)
        else:
            rows = first.new_empty(len(first), self.size)
            for name, target in self.named(rows).items():
                target.copy_(blocks.pop(name))
        return (rows if self.index is None else rows[:, self.index]).mT


def select(parameters: Mapping[str, Tensor], trainable: Sequence[str], spec: Any) -> Selection:
    """Return the selection that a user's `parameters=` argument describes, unless it is "last_layer".

    `parameters` are all named tensors, `trainable` the names that require a gradient. `spec` is None, a glob or a list
    of globs, a predicate (name, tensor) -> bool, positions (integers or a boolean mask) in the flat vector of the
    trainable parameters, or an existing selection of these tensors.

    Raises ValueError if nothing is selected, a name is unknown, an index is out of range or repeated, or the selected
    tensors differ in device or dtype or hold NaN or Inf; TypeError for another kind of `spec`.
    """
    index = None
    if isinstance(spec, Selection):
        names, index = list(spec.names), spec.index
    elif spec is None:
        names = list(trainable)
    elif isinstance(spec, Tensor):
        names, index = _from_positions(parameters, trainable, spec)
    elif isinstance(spec, str) or (isinstance(spec, Sequence) and all(isinstance(glob, str) for glob in spec)):
        names = _from_globs(parameters, [spec] if isinstance(spec, str) else list(spec))
    elif callable(spec) and not isinstance(spec, nn.Module):
        names = [name for name, tensor in parameters.items() if spec(name, tensor)]
    else:
        raise TypeError(
            f"parameters= got {type(spec).__name__}; expected None, 'last_layer', a glob, a list of globs, "
            f"a predicate (name, tensor) -> bool, an index tensor or a boolean mask. {_instead_of(spec, parameters)}"
        )
    if not names:
        hint = "none requires a gradient: call requires_grad_(), or name parameters; " if spec is None else ""
        raise ValueError(f"parameters={spec!r} selects nothing; {hint}the model has {_some(parameters)}.")
    first, shapes = names[0], []
    remedy = f"convert it, or select weights of one dtype by patterns of their names, parameters=[{first!r}, ...]"
    for name in names:
        tensor = parameters[name]
        check_like(f"parameter {name!r}", tensor, parameters[first], f"parameter {first!r}", remedy)
        if not tensor.is_floating_point():
            raise TypeError(f"parameter {name!r} is {tensor.dtype}; only floating-point ones can be selected.")
        shapes.append(tensor.shape)
    return Selection(tuple(names), tuple(shapes), index)


def matching(names: Iterable[str], *globs: str) -> list[str]:
    """Return the names that match any of the globs, in the order of the names; letter case counts."""
    return [name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]


def layer_of(name: str) -> str:
    """Return the path of the module that owns a parameter, or its own name if the model owns it."""
    return name.rpartition(".")[0] or name


def _from_globs(parameters: Mapping[str, Tensor], globs: list[str]) -> list[str]:
    for glob in globs:
        if not matching(parameters, glob):
            inside = f"; {glob + '.*'!r} names those inside it" if matching(parameters, f"{glob}.*") else ""
            raise ValueError(f"parameters={glob!r} names no parameter{inside}; the model has {_some(parameters)}.")
    return matching(parameters, *globs)


def _instead_of(spec: Any, parameters: Mapping[str, Tensor]) -> str:
    """Return the advice on a selection that was given as a list of positions, or as modules or tensors."""
    if isinstance(spec, np.ndarray) or (isinstance(spec, Sequence) and all(isinstance(i, int) for i in spec)):
        return "Pass positions as torch.as_tensor(positions)."
    return f"Modules and tensors are selected by their names: {_some(parameters)}."


def _from_positions(
    parameters: Mapping[str, Tensor], trainable: Sequence[str], spec: Tensor
) -> tuple[list[str], Int[Tensor, " D"]]:
    """Return the tensors that the positions touch, and the positions within only those tensors."""
    sizes = [parameters[name].numel() for name in trainable]
    touched, within = locate(sizes, checked_indices(spec, sum(sizes)))
    names = [trainable[i] for i in touched]
    return names, within.to(parameters[names[0]].device)


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of reals (*shape, 2), and any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def at_even_place(pairs: Shaped[Tensor, "*shape 2"]) -> Shaped[Tensor, "*shape 2"]:
    """Return pairs that `torch.view_as_complex` takes: a view of a vector may begin between two of them."""
    if in_functorch() or pairs.storage_offset() % 2 or pairs.data_ptr() % (2 * pairs.element_size()):
        return pairs.clone(memory_format=torch.contiguous_format)
    return pairs


def as_stored(vector: Tensor) -> Tensor:
    """Return one vector of a block as parameters are stored: kernels of complex and of grouped matrices need that."""
    vector = vector.contiguous()
    return at_even_place(vector) if vector.shape[-1:] == (2,) else vector


def locate(sizes: Sequence[int], positions: Int[Tensor, " S"]) -> tuple[list[int], Int[Tensor, " S"]]:
    """Return which of the concatenated tensors are touched, and the positions within only those."""
    lengths = torch.tensor(sizes, device=positions.device)
    owners = torch.searchsorted(lengths.cumsum(0), positions, right=True)
    touched = torch.zeros_like(lengths, dtype=torch.bool).index_fill(0, owners, True)
    left_out = lengths.masked_fill(touched, 0).cumsum(0)  # untouched entries before each tensor
    return touched.nonzero().squeeze(1).tolist(), positions - left_out[owners]


def _some(parameters: Mapping[str, Tensor], most: int = 8) -> str:
    names = list(parameters) or ["no parameters"]
    return ", ".join(names[:most]) + (f", … ({len(names)} in all)" if len(names) > most else "")


class Fingerprints(Mapping[str, int]):
    """The fingerprints of tensors by name, computed on first comparison; until then the tensors are kept.

    They are computed from the values in float32, so that a network and its copy in float64 are at the same point.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
        self._prints: dict[str, int] = {}

    def take(self) -> dict[str, int]:
        """Return the fingerprints as a dict; the first call makes one pass over the tensors."""
        if self._tensors:
            tensors = self._tensors
            prints = torch.stack([fingerprint([in_single(tensor)]) for tensor in tensors.values()]).tolist()
            self._prints = dict(zip(tensors, prints))
            self._tensors = {}  # cleared last, since another thread may be here, too
        return self._prints

    def __getitem__(self, name: str) -> int:
        return self.take()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.take())

    def __len__(self) -> int:
        return len(self.take())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.take(),)


@dataclass(frozen=True, eq=False)
class TangentSpace:
    """The tangent space at θ, to which steps, gradients and curvatures belong; it keeps fingerprints, not weights.

    `held` maps the name of every tensor of the model to its fingerprint, so that frozen weights and buffers count, too.
    `index` holds the positions of a subnetwork within the named tensors, or None if all of them are selected.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    held: Mapping[str, int]
    index: Int[Tensor, " S"] | None = None

    def difference(self, other: Any) -> str | None:
        """Describe how two tangent spaces differ, and the remedy; return None if they do not differ."""
        if not isinstance(other, TangentSpace):
            return f"one belongs to a network's parameters, the other to {other!r}."
        if (self.names, self.shapes) != (other.names, other.shapes) or not _same_index(self.index, other.index):
            return (
                f"they belong to different parameters ({self._text()} and {other._text()}); linearise both with "
                "the same parameters=."
            )
        # A tensor in only one of them belongs to another model (the head of another task) and has not changed.
        moved = [name for name, value in self.held.items() if other.held.get(name, value) != value]
        if moved:
            return (
                f"they were linearised at different weights (of {quoted(moved)}), so their sum is the curvature at "
                "neither; linearise both data sets at one set of weights. If the sum is intended (yesterday's "
                "curvature as a prior, merged Fishers), use a copy without its weights: op.detached_from_weights()."
            )
        return None

    def is_at(self, other: TangentSpace) -> bool:
        """Return whether both have the same parameters, and the same tensors with the same values."""
        return self is other or (self.held == other.held and self.difference(other) is None)

    def join(self, other: TangentSpace) -> TangentSpace:
        """Combine the fingerprints of two spaces that do not differ."""
        if other.held.keys() <= self.held.keys():
            return self
        return other if self.held.keys() <= other.held.keys() else replace(self, held={**self.held, **other.held})

    def detached(self) -> TangentSpace:
        """Return the space of these parameters without the values of any tensor."""
        return replace(self, held={})

    def part(self, indices: Int[Tensor, " S"]) -> TangentSpace:
        """Return the space of a subnetwork, as if its positions had been selected."""
        index = indices if self.index is None else self.index[indices.to(self.index.device)]
        touched, within = locate([shape.numel() for shape in self.shapes], index)
        names, shapes = tuple(self.names[i] for i in touched), tuple(self.shapes[i] for i in touched)
        return TangentSpace(names, shapes, self.held, _unless_all(within, sum(shape.numel() for shape in shapes)))

    def _text(self) -> str:
        count = sum(shape.numel() for shape in self.shapes) if self.index is None else len(self.index)
        return f"{count} in {quoted(self.names)}"


def tangent_space(selection: Selection, values: Mapping[str, Tensor]) -> TangentSpace:
    """Return the tangent space of a selection in a model with these values."""
    index = None if selection.index is None else _unless_all(selection.index, selection.size)
    return TangentSpace(selection.names, selection.shapes, Fingerprints(values), index)


def _unless_all(index: Tensor, size: int) -> Tensor | None:
    """Return the positions; None if they are all positions in order."""
    return None if torch.equal(index, torch.arange(size, device=index.device)) else index


def _same_index(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one is other or torch.equal(one, other.to(one.device))


def quoted(names: Sequence[str], most: int = 4) -> str:
    """Return the first names, and how many there are."""
    return ", ".join(map(repr, names[:most])) + (f", … ({len(names)} in all)" if len(names) > most else "")


def read_precision(name: str, value: Any, selection: Selection, theta: Tensor, others: str = "") -> Tensor:
    """Read a diagonal precision, 0-d or (D,). Raises TypeError or ValueError unless it is positive and finite."""
    hint = "wrap a matrix as co.linalg.Dense(matrix, psd=True)"
    precision = _read_vector(name, value, selection, theta, "a positive number", others, hint)
    if not within(precision, 0.0, strict=True):
        low, high = (float(end) for end in torch.aminmax(precision.detach()))
        wrong = low if not low > 0 else high
        given = float(value) if isinstance(value, numbers.Real) else 0.0
        why = (
            f": {given:.3g} is beyond the numbers of {theta.dtype}; use model.double()" if 0 < given < math.inf else ""
        )
        raise ValueError(f"{name} must be positive and finite, got {wrong:.3g}{why}.")
    return precision


def read_mean(value: Any, selection: Selection, theta: Tensor) -> Tensor:
    """Read a prior mean, 0-d or (D,). Raises TypeError or ValueError unless it is finite."""
    hint = "lin.flatten(mapping) makes a vector of named tensors"
    mean = _read_vector("prior_mean", value, selection, theta, "a number", "", hint)
    refuse(not is_finite(mean), "prior_mean holds NaN or Inf.")
    return mean


def _read_vector(
    name: str, value: Any, selection: Selection, theta: Tensor, number: str, others: str, hint: str
) -> Tensor:
    """Read a number, vector or mapping as a tensor like θ, 0-d or (D,): the user's own if it requires a gradient."""
    if isinstance(value, Mapping):
        return _by_parameter(value, selection, theta, name)
    value = tensor_of(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real | Tensor):
        raise TypeError(
            f"{name} must be {number}, a tensor ({selection.num_parameters},) of them, a mapping {{glob over parameter "
            f"names: number or tensor}}{others}, got {shown(value)}."
        )
    vector = torch.as_tensor(value, dtype=theta.dtype, device=theta.device)
    refuse_tangents([vector])
    if vector.ndim > 1 or (vector.ndim == 1 and len(vector) != selection.num_parameters):
        raise ValueError(f"{name} must be a number or have {selection.num_parameters} entries; {hint}.")
    return copy_unless_recorded(value, vector, name) if isinstance(value, Tensor) else vector


def _by_parameter(
    values_by_glob: Mapping[Any, Any], selection: Selection, theta: Tensor, what: str
) -> Float[Tensor, " D"]:
    """Return the vector for a mapping {glob over parameter names: number, or tensor of the parameter's shape}.

    Raises ValueError unless each selected parameter is matched exactly once and each glob matches one.
    """
    entries: dict[str, tuple[str, Any]] = {}
    for glob, entry in values_by_glob.items():
        value = tensor_of(entry)
        if isinstance(value, bool) or not isinstance(value, numbers.Real | Tensor):
            raise TypeError(f"{what}[{glob!r}] must be a number, got {value!r}.")
        matched = matching(selection.names, glob)
        refuse(not matched, f"{what}: {glob!r} matches none of the selected parameters {list(selection.names)}.")
        for name in matched:
            if name in entries:
                raise ValueError(f"{what}: {name!r} is matched by {entries[name][0]!r} and {glob!r}; name it once.")
            entries[name] = glob, value
    left = [name for name in selection.names if name not in entries]
    refuse(left, f"{what}: no glob matches {left}; each selected parameter needs one.")
    tensors = {}
    for name, shape in zip(selection.names, selection.shapes):
        glob, value = entries[name]
        if isinstance(value, Tensor) and value.ndim and value.shape != shape:
            raise ValueError(f"{what}[{glob!r}] has shape {tuple(value.shape)}, but {name!r} has {tuple(shape)}.")
        used = torch.as_tensor(value, dtype=theta.dtype, device=theta.device).expand(shape)
        tensors[name] = copy_unless_recorded(value, used, f"{what}[{glob!r}]") if isinstance(value, Tensor) else used
    return selection.flatten(tensors)
