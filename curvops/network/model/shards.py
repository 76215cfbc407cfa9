"""The places on the ranks of parameters that a model shares among processes, and of vectors over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.distributed_types import even_share, is_dtensor
from curvops.network.model.parameters import Blocks, FlatLayout
from curvops.process_group import Ranks


@dataclass(frozen=True, eq=False)
class ShardedParameters:
    """The positions of the entries of parameters and vectors on the ranks.

    Each rank holds a slice of each parameter, along one of its `dims`, as `fully_shard` puts it. A vector (D,) has all
    parameters in the same order as on a single process; each rank holds a run of ⌈D/ranks⌉ rows, as `Shard(0)` puts it.
    """

    ranks: Ranks
    mesh: Any
    layout: FlatLayout
    dims: tuple[int, ...]

    @classmethod
    def of(cls, ranks: Ranks, tensors: Mapping[str, Any]) -> ShardedParameters:
        """Return the layout of these DTensors."""
        dims = tuple(tensor.placements[0].dim for tensor in tensors.values())
        mesh = next(iter(tensors.values())).device_mesh
        return cls(ranks, mesh, FlatLayout(tuple(tensors), tuple(tensor.shape for tensor in tensors.values())), dims)

    @cached_property
    def _dim(self) -> dict[str, int]:
        return dict(zip(self.layout.names, self.dims))

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of the whole parameters."""
        return dict(zip(self.layout.names, self.layout.shapes))

    @cached_property
    def _starts(self) -> dict[str, int]:
        sizes = [shape.numel() for shape in self.layout.shapes]
        return dict(zip(self.layout.names, accumulate(sizes, initial=0)))

    @property
    def own(self) -> range:
        """The rows of this rank."""
        return self.rows_of(self.ranks.rank)

    def rows_of(self, rank: int) -> range:
        """Return the rows of a rank."""
        return even_share(self.layout.size, self.ranks.size, rank)

    def _pieces(self, names: Sequence[str], rank: int) -> Iterator[tuple[str, slice, slice]]:
        """Yield the pieces of parameters that a rank holds: the name, the entries of it, and the rank's own rows."""
        rows = self.rows_of(rank)
        for name in names:
            start = self._starts[name]
            low, high = max(rows.start, start), min(rows.stop, start + self.shapes[name].numel())
            if low < high:
                yield name, slice(low - start, high - start), slice(low - rows.start, high - rows.start)

    def gather(self, block: Float[Tensor, "d K"], names: Sequence[str]) -> Blocks:
        """Return some parameters' parts of K vectors whole, (K, *shape) each. Their owners broadcast them."""
        gathered: dict[str, list[Tensor]] = {name: [] for name in names}
        for rank in range(self.ranks.size):
            pieces = list(self._pieces(names, rank))
            if not pieces:
                continue
            if rank == self.ranks.rank:
                held = torch.cat([block[rows].mT for *_, rows in pieces], 1)
            else:
                held = block.new_empty(block.shape[1], sum(rows.stop - rows.start for *_, rows in pieces))
            held = self.ranks.broadcast(held, rank)
            for (name, *_), part in zip(pieces, held.split([rows.stop - rows.start for *_, rows in pieces], 1)):
                gathered[name].append(part)
        return {name: torch.cat(parts, 1).view(-1, *self.shapes[name]) for name, parts in gathered.items()}

    def add_scattered(self, total: Float[Tensor, "d K"], blocks: Mapping[str, Tensor]) -> None:
        """Add the sum over ranks of some parameters' blocks (K, *shape) to this rank's rows. One all-to-all."""
        names, sent = tuple(blocks), []
        for rank in range(self.ranks.size):
            parts = [blocks[name].flatten(1)[:, entries] for name, entries, _ in self._pieces(names, rank)]
            sent.append(torch.cat(parts, 1) if parts else total.new_empty(total.shape[1], 0))
        received = self.ranks.add_up_apart(sent)
        own = [rows for *_, rows in self._pieces(names, self.ranks.rank)]
        for rows, part in zip(own, received.split([rows.stop - rows.start for rows in own], 1)):
            total[rows] += part.mT

    def to_dtensors(self, block: Float[Tensor, "d *K"]) -> dict[str, Any]:
        """Return vectors as DTensors by name, laid out as the parameters: (*shape), or (K, *shape) for a block.

        Sends every vector to all ranks, one parameter at a time.
        """
        one, tensors = block.ndim == 1, {}
        for name, shape in self.shapes.items():
            whole = self.gather(block.unsqueeze(1) if one else block, (name,))[name]
            dim = self._dim[name]
            own = even_share(shape[dim], self.ranks.size, self.ranks.rank)
            part = whole.narrow(dim + 1, min(own.start, shape[dim]), len(own)).clone()
            tensors[name] = self.as_parameter(name, part[0] if one else part)
        return tensors

    def as_parameter(self, name: str, own: Float[Tensor, "*slice"]) -> Any:
        """Return this rank's slice of a parameter, or K of them, as a DTensor laid out as the parameter."""
        from torch.distributed.tensor import DTensor, Shard

        shape = self.shapes[name]
        extra = own.ndim - len(shape)
        size = torch.Size((*own.shape[:extra], *shape))
        stride, placement = torch.empty(size, device="meta").stride(), [Shard(self._dim[name] + extra)]
        return DTensor.from_local(own, self.mesh, placement, run_check=False, shape=size, stride=stride)

    def from_named(self, tensors: Mapping[str, Any], like: Tensor) -> Float[Tensor, "d *K"]:
        """Return this rank's rows of vectors by name: DTensors laid out as the parameters, or whole tensors on all.

        Raises ValueError for a missing or unknown name, another shape, dtype or placement; TypeError for non-tensors.
        """
        if set(tensors) != set(self.layout.names):
            lacking = sorted(set(self.layout.names) - set(tensors))
            unknown = sorted(set(tensors) - set(self.layout.names))
            raise ValueError(
                f"the mapping lacks {lacking} and has unknown names {unknown}; it must name {list(self.layout.names)}."
            )
        columns = {self._columns(name, tensors[name], like) for name in self.layout.names}
        if len(columns) != 1:
            raise ValueError(f"the tensors hold different numbers of vectors: {sorted(columns, key=str)}.")
        (K,) = columns
        total = like.new_zeros(1 if K is None else K, len(self.own)).mT
        for name, shape in self.shapes.items():
            part, dim = tensors[name].detach(), self._dim[name] + 1
            part = part.unsqueeze(0) if K is None else part
            whole = total.new_zeros(len(part), *shape)
            own = even_share(shape[dim - 1], self.ranks.size, self.ranks.rank)
            own_slice = whole.narrow(dim, min(own.start, shape[dim - 1]), len(own))
            if is_dtensor(part):
                own_slice.copy_(part.to_local())
            else:
                own_slice.copy_(part.narrow(dim, min(own.start, shape[dim - 1]), len(own)))
            self.add_scattered(total, {name: whole})
        return total.squeeze(1) if K is None else total

    def _columns(self, name: str, tensor: Any, like: Tensor) -> int | None:
        """Return the number K of vectors of a named tensor, None for a single one, after checking it."""
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name!r} is {type(tensor).__name__}, expected a tensor.")
        shape = self.shapes[name]
        extra = tensor.ndim - len(shape)
        if extra not in (0, 1) or tensor.shape[extra:] != shape:
            raise ValueError(f"{name!r} has shape {tuple(tensor.shape)}, expected {tuple(shape)}, or K of these.")
        if tensor.dtype != like.dtype:
            raise ValueError(f"{name!r} is {tensor.dtype}, expected {like.dtype}, the dtype of the parameters.")
        if is_dtensor(tensor):
            dim = self._dim[name] + extra
            held: Any = tensor
            kinds = [(type(placement).__name__, getattr(placement, "dim", None)) for placement in held.placements]
            if held.device_mesh != self.mesh or kinds != [("Shard", dim)]:
                raise ValueError(
                    f"{name!r} has placements {list(held.placements)}, not those of the parameter: redistribute it."
                )
        return tensor.shape[0] if extra else None
