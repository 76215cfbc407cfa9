"""Trees of parameters as one vector: samplers move the vector, and the model is called with the tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from curvops.checks import check_kind, check_like
from curvops.network.model.parameters import FlatLayout


@dataclass(frozen=True, eq=False)
class Structure(FlatLayout):
    """The layout of a tree of tensors in one vector (d,), with the tree's structure (`spec`)."""

    spec: Any

    def __repr__(self) -> str:
        return f"Structure({len(self.names)} tensors, d={self.size})"

    def tree(self, parts: Sequence[Tensor]) -> Any:
        """Return the tensors as the user's tree: a mapping by name, a tuple, one tensor, …"""
        return pytree.tree_unflatten(list(parts), self.spec)

    def unflatten(self, vector: Float[Tensor, "*k d"]) -> Any:
        """Return the tree of a vector, with tensors (*k, *shape) that are views of it."""
        return self.tree(self.parts(vector))


def flatten(params: Any) -> tuple[Float[Tensor, " d"], Structure]:
    """Copy a tree of parameters into one vector; return it and its layout.

    Raises:
        TypeError: params is a module, or a leaf is not a real floating-point tensor.
        ValueError: there is no tensor, or tensors differ in dtype or device, or hold NaN or Inf.
    """
    if isinstance(params, nn.Module):
        raise TypeError("params is a module: pass its tensors, dict(model.named_parameters()).")
    found, spec = pytree.tree_flatten_with_path(params)
    if not found:
        raise ValueError(f"params contain no tensor: {params!r}.")
    leaves: dict[str, Tensor] = {}
    for path, leaf in found:
        name = f"params{pytree.keystr(path)}"
        check_kind(name, leaf, Tensor, "a tensor: params are a tree (dict, tuple, …) of tensors")
        if not leaf.is_floating_point():
            raise TypeError(f"{name} is {leaf.dtype}, which cannot be sampled: keep it inside log_posterior.")
        leaves[name] = leaf.detach()
    first_name, first = next(iter(leaves.items()))
    for name, leaf in leaves.items():
        check_like(name, leaf, first, first_name)
        if not bool(leaf.isfinite().all()):
            raise ValueError(f"{name} holds NaN or Inf.")
    structure = Structure(tuple(leaves), tuple(leaf.shape for leaf in leaves.values()), spec)
    return structure.concatenate(list(leaves.values())), structure


def flatten_starts(starts: list[Any], chains: int) -> tuple[Float[Tensor, "k d"], Structure]:
    """Copy a list of trees, one for each chain, into vectors (k, d); return them and their layout.

    Raises:
        ValueError: the list is longer or shorter than k, or the trees differ in their tensors.
    """
    if len(starts) != chains:
        raise ValueError(
            f"the list has {len(starts)} starts for {chains} chains: pass params that are a list as a tuple."
        )
    rows, structures = zip(*[flatten(start) for start in starts])
    first = structures[0]
    for i, other in enumerate(structures):
        if (other.spec, other.shapes) != (first.spec, first.shapes):
            raise ValueError(f"start {i} has {_describe(other)}, start 0 {_describe(first)}: all chains need the same.")
    return torch.stack(rows), first


def _describe(structure: Structure) -> str:
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in zip(structure.names, structure.shapes))


FOLD = 8
"""How many numbers are summed in their own dtype; these sums are added in float64."""


def long_dot(a: Float[Tensor, "*k d"], b: Float[Tensor, "*k d"]) -> Float64[Tensor, "*k"]:
    """Return Σ a b along the last dimension in float64, without a float64 copy, which takes several times as long."""
    products = a * b
    width = products.shape[-1] // FOLD
    whole, rest = products.split([FOLD * width, products.shape[-1] - FOLD * width], -1)
    sums = whole.unflatten(-1, (FOLD, width)).sum(-2)
    return torch.cat([sums, rest], -1).sum(-1, dtype=torch.float64)
