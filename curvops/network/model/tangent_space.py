"""The point at which a network was linearised: the selected parameters, and the values of all tensors of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from curvops.fingerprints import fingerprint, in_single
from curvops.network.model.parameters import Selection, locate


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
        if (self.names, self.shapes) != (other.names, other.shapes) or not _same(self.index, other.index):
            return (
                f"they belong to different parameters ({self._text()} and {other._text()}); linearise both with "
                "the same parameters=."
            )
        # A tensor in only one of them belongs to another model (the head of another task) and has not changed.
        moved = [name for name, value in self.held.items() if other.held.get(name, value) != value]
        if moved:
            return (
                f"they were linearised at different weights (of {_some(moved)}), so their sum is the curvature at "
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
        return f"{count} in {_some(self.names)}"


def tangent_space(selection: Selection, values: Mapping[str, Tensor]) -> TangentSpace:
    """Return the tangent space of a selection in a model with these values."""
    index = None if selection.index is None else _unless_all(selection.index, selection.size)
    return TangentSpace(selection.names, selection.shapes, Fingerprints(values), index)


def _unless_all(index: Tensor, size: int) -> Tensor | None:
    """Return the positions; None if they are all positions in order."""
    return None if torch.equal(index, torch.arange(size, device=index.device)) else index


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one is other or torch.equal(one, other.to(one.device))


def _some(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(repr(name) for name in names[:most]) + (", …" if len(names) > most else "")
