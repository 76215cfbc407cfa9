"""A module sharded by `fully_shard`, run in place: only this rank's part of its parameters is copied.

`ShardedParameters` says which rank holds which entries of the parameters, and of vectors over them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from curvops.checks import check_tensor
from curvops.network.data.inputs import Inputs
from curvops.network.data.randomness import own_randomness
from curvops.network.model.calls import Calls
from curvops.network.model.fused_kernels import contexts_for
from curvops.network.model.model import Model, form_of, require_all_finite, slots_of
from curvops.network.model.parameters import Blocks, FlatLayout, Selection, TangentSpace, select, tangent_space
from curvops.ranks.process_group import Ranks, even_share, is_dtensor, is_fully_sharded


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

    @cached_property
    def _dim(self) -> dict[str, int]:
        return dict(zip(self.layout.names, self.dims))

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of the whole parameters."""
        return dict(zip(self.layout.names, self.layout.shapes))

    @cached_property
    def _starts(self) -> dict[str, int]:
        return dict(zip(self.layout.names, accumulate(self.layout.sizes, initial=0)))

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
            for (name, *_), values in zip(pieces, held.split([rows.stop - rows.start for *_, rows in pieces], 1)):
                gathered[name].append(values)
        return {name: torch.cat(slices, 1).view(-1, *self.shapes[name]) for name, slices in gathered.items()}

    def add_scattered(self, total: Float[Tensor, "d K"], blocks: Mapping[str, Tensor]) -> None:
        """Add the sum over ranks of some parameters' blocks (K, *shape) to this rank's rows. One all-to-all."""
        names, sent = tuple(blocks), []
        for rank in range(self.ranks.size):
            slices = [blocks[name].flatten(1)[:, entries] for name, entries, _ in self._pieces(names, rank)]
            sent.append(torch.cat(slices, 1) if slices else total.new_empty(total.shape[1], 0))
        received = self.ranks.add_up_apart(sent)
        row_slices = [rows for *_, rows in self._pieces(names, self.ranks.rank)]
        for rows, values in zip(row_slices, received.split([rows.stop - rows.start for rows in row_slices], 1)):
            total[rows] += values.mT

    def to_dtensors(self, block: Float[Tensor, "d *K"]) -> dict[str, Any]:
        """Return vectors as DTensors by name, laid out as the parameters: (*shape), or (K, *shape) for a block.

        Sends every vector to all ranks, one parameter at a time.
        """
        one, tensors = block.ndim == 1, {}
        for name, shape in self.shapes.items():
            whole = self.gather(block.unsqueeze(1) if one else block, (name,))[name]
            dim = self._dim[name]
            share = even_share(shape[dim], self.ranks.size, self.ranks.rank)
            weight_slice = whole.narrow(dim + 1, min(share.start, shape[dim]), len(share)).clone()
            tensors[name] = self.as_parameter(name, weight_slice[0] if one else weight_slice)
        return tensors

    def as_parameter(self, name: str, weight_slice: Float[Tensor, "*slice"]) -> Any:
        """Return this rank's slice of a parameter, or K of them, as a DTensor laid out as the parameter."""
        from torch.distributed.tensor import DTensor, Shard

        shape = self.shapes[name]
        extra = weight_slice.ndim - len(shape)
        size = torch.Size((*weight_slice.shape[:extra], *shape))
        stride, placement = torch.empty(size, device="meta").stride(), [Shard(self._dim[name] + extra)]
        return DTensor.from_local(weight_slice, self.mesh, placement, run_check=False, shape=size, stride=stride)

    def from_named(self, tensors: Mapping[str, Any], like: Tensor) -> Float[Tensor, "d *K"]:
        """Return this rank's rows of vectors by name: DTensors laid out as the parameters, or whole tensors on all.

        Raises ValueError for a missing or unknown name, another shape, dtype or placement; TypeError for non-tensors.
        """
        if set(tensors) != set(self.layout.names):
            lacking = sorted(set(self.layout.names) - set(tensors))
            unknown = sorted(set(tensors) - set(self.layout.names))
            raise ValueError(f"the mapping lacks {lacking} and has unknown names {unknown}.")
        (K,) = {self._columns(name, tensors[name], like) for name in self.layout.names}
        total = like.new_zeros(1 if K is None else K, len(self.own)).mT
        for name, shape in self.shapes.items():
            tensor, dim = tensors[name].detach(), self._dim[name] + 1
            tensor = tensor.unsqueeze(0) if K is None else tensor
            whole = total.new_zeros(len(tensor), *shape)
            share = even_share(shape[dim - 1], self.ranks.size, self.ranks.rank)
            own_slice = whole.narrow(dim, min(share.start, shape[dim - 1]), len(share))
            if is_dtensor(tensor):
                own_slice.copy_(tensor.to_local())
            else:
                own_slice.copy_(tensor.narrow(dim, min(share.start, shape[dim - 1]), len(share)))
            self.add_scattered(total, {name: whole})
        return total.squeeze(1) if K is None else total

    def _columns(self, name: str, tensor: Any, like: Tensor) -> int | None:
        """Return the number K of vectors of a named tensor, None for a single one, after checking it."""
        check_tensor(name, tensor)
        shape = self.shapes[name]
        extra = tensor.ndim - len(shape)
        if extra not in (0, 1) or tensor.shape[extra:] != shape or tensor.dtype != like.dtype:
            raise ValueError(
                f"{name!r} is {tuple(tensor.shape)}, {tensor.dtype}: expected {tuple(shape)}, or K of it, {like.dtype}."
            )
        if is_dtensor(tensor):
            dim = self._dim[name] + extra
            held: Any = tensor
            kinds = [(type(placement).__name__, getattr(placement, "dim", None)) for placement in held.placements]
            if held.device_mesh != self.mesh or kinds != [("Shard", dim)]:
                raise ValueError(f"{name!r} has placements {held.placements}: redistribute it like the parameter.")
        return tensor.shape[0] if extra else None


class ShardedModel(Model):
    """The function of a model whose parameters are sharded over the ranks of a process group by `fully_shard`.

    The module itself is run, since it cannot be copied. While it runs, it holds the values and modes that it had when
    this object was made; before and after, it holds its own, and its parameters are resharded. A pass gathers
    parameters, so all ranks make the same passes, each on its own data.

    Raises ValueError, by name, for features that products layer by layer do not support; see `_require_known`.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, module: nn.Module, parameters: Any, ranks: Ranks) -> None:
        self.lock = threading.RLock()
        self.module, self._function, self.ranks = module, None, ranks
        self._sharded = [submodule for submodule in module.modules() if is_fully_sharded(submodule)]
        self._reshard()
        self.paths = {submodule: path for path, submodule in module.named_modules()}
        self.slots, tensors, buffers = slots_of(self.paths)
        if not is_fully_sharded(module):
            raise ValueError("parts of the model are sharded: call fully_shard on the model, too, after its parts.")
        self._require_known(tensors)
        trainable = [name for name, tensor in tensors.items() if tensor.requires_grad]
        self.selection: Selection = select(tensors, trainable, _checked_spec(parameters))
        self._require_selectable(tensors)
        chosen: list[Any] = [tensors[name] for name in self.selection.names]
        dims = tuple(tensor.placements[0].dim for tensor in chosen)
        self.shards = ShardedParameters(ranks, chosen[0].device_mesh, self.selection, dims)
        self._snapshot = {name: _local(tensor).clone() for name, tensor in {**tensors, **buffers}.items()}
        self.complex: set[str] = set()
        self._modes = {submodule: submodule.training for submodule in self.paths}
        weight_slices = {name: self._snapshot[name] for name in self.selection.names}
        self._flat = torch.cat([tensor.flatten() for tensor in weight_slices.values()])
        self.frozen = {name: self._snapshot[name] for name in tensors if name not in weight_slices}
        self._buffers = {name: self._snapshot[name] for name in buffers}
        require_all_finite(weight_slices.values(), weight_slices, "leave it out of the selection")
        require_all_finite(self.frozen.values(), self.frozen, "load other weights")
        self._switches, self._stand_ins = contexts_for(self.paths)
        self.layout, self.calls = None, Calls(module)
        self._writes = self._differentiates = False
        self._admitted, self._depth = set(), 0

    @property
    def values(self) -> Blocks:
        """An empty mapping: the module reads its parameters itself."""
        return {}

    @property
    def num_parameters(self) -> int:
        return self.selection.size

    def leaves(self) -> Blocks:
        return {}

    def tensors(self) -> list[Tensor]:
        return list(self._snapshot.values())

    @property
    def kept_tensors(self) -> Blocks:
        return dict(self._snapshot)

    def named_snapshot(self) -> dict[str, Any]:
        """Return the selected parameters of the snapshot by name, laid out as the parameters are."""
        return {name: self.shards.as_parameter(name, self._snapshot[name].clone()) for name in self.selection.names}

    @cached_property
    def tangent_space(self) -> TangentSpace:
        """The tangent space at the snapshot, by fingerprints of this rank's slices."""
        return tangent_space(self.selection, self._snapshot)

    def place_of(self, variable: Tensor) -> int:
        return id(variable)  # fully_shard frees and allocates the memory of a parameter, which stays one object

    def admit(self, inputs: Inputs) -> None:
        """Raise ValueError for inputs of another form than the first points, since trying them would take all ranks."""
        if form_of(inputs) not in self._admitted:
            raise ValueError("the inputs have another shape or dtype than the first points: pad sequences.")

    @contextlib.contextmanager
    def holding(self, values: Mapping[str, Tensor]) -> Iterator[Blocks]:
        with self.at_snapshot(), contextlib.ExitStack() as stack:
            stack.enter_context(own_randomness(self._flat.device))
            for stand_in in self._stand_ins:
                stack.enter_context(stand_in())
            yield {}

    @contextlib.contextmanager
    def at_snapshot(self) -> Iterator[None]:
        """Make the module hold the snapshot; a forward pass and its backward passes belong in one such block."""
        with self.lock:
            self._depth += 1
            try:
                if self._depth > 1:
                    yield
                    return
                self._reshard()
                before = self._exchanged(self._snapshot, self._modes)
                try:
                    yield
                finally:
                    self._reshard()
                    self._exchanged(*before)
            finally:
                self._depth -= 1

    @torch.inference_mode(False)
    @torch.no_grad()
    def _exchanged(self, values: Blocks, modes: Mapping[nn.Module, bool]) -> tuple[Blocks, dict[nn.Module, bool]]:
        """Write values and modes that differ, and return those that were there before."""
        tensors, modes_before, held = {}, {module: module.training for module in modes}, self._held()
        for name, value in values.items():
            present = held[name].data  # no graph of the user's depends on its version
            if not torch.equal(present, value):
                tensors[name] = present.clone()
                present.copy_(value)
        for module, mode in modes.items():
            module.training = mode
        return tensors, modes_before

    def _held(self) -> Blocks:
        """Return the module's present values; its first pass, and users, may have moved some of its tensors."""
        tensors = {}
        for module, local, name in self.slots:
            tensor = module._parameters.get(local, module._buffers.get(local))
            value = self._snapshot[name]
            if tensor is None or (_local(tensor).shape, tensor.dtype) != (value.shape, value.dtype):
                raise ValueError(f"{name!r} has changed since the model was linearised: linearise it again.")
            tensors[name] = _local(tensor)
        return tensors

    def _reshard(self) -> None:
        for module in self._sharded:
            module.reshard()  # type: ignore[operator]

    def _first_call(self, inputs: Any) -> tuple[Any, set[str]]:
        return self._call({}, inputs), set()  # the module itself is run, and reads its own parameters

    def _require_known(self, tensors: Mapping[str, Any]) -> None:
        """Raise ValueError for meshes of several dimensions, other ranks, offloading and low precision."""
        ours = dist.get_process_group_ranks(self.ranks.group)
        for name, tensor in tensors.items():
            if not is_dtensor(tensor):
                continue
            mesh, kinds = tensor.device_mesh, [type(placement).__name__ for placement in tensor.placements]
            if mesh.ndim != 1 or kinds != ["Shard"]:
                raise ValueError(f"parameter {name!r}: only meshes of one dimension are supported.")
            theirs = dist.get_process_group_ranks(mesh.get_group())
            if theirs != ours:
                raise ValueError(f"parameter {name!r} is sharded over {theirs}, not {ours}: see process_group=.")
        dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
        for module in self._sharded:
            self._require_plain_policies(module, dtypes)

    def _require_plain_policies(self, module: Any, dtypes: set[torch.dtype]) -> None:
        state, where = module._get_fsdp_state(), self.paths.get(module) or "the model"
        policy = state._mp_policy
        for what in ("param_dtype", "output_dtype"):
            policy_dtype = getattr(policy, what, None)
            if policy_dtype is not None and {policy_dtype} != dtypes:
                raise ValueError(f"{where} has MixedPrecisionPolicy({what}={policy_dtype}): leave mp_policy out.")
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in groups:
            if type(getattr(group, "offload_policy", None)).__name__ == "CPUOffloadPolicy":
                raise ValueError(f"{where} is sharded with a CPUOffloadPolicy, which is not supported: remove it.")

    def _require_selectable(self, tensors: Mapping[str, Any]) -> None:
        for name in self.selection.names:
            if not is_dtensor(tensors[name]):
                raise ValueError(f"parameter {name!r} is not sharded: leave it out of parameters=, or shard it.")


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return local.detach()


def _checked_spec(parameters: Any) -> Any:
    """Return `parameters=`; raise ValueError for values that need a whole vector or a copy of the model."""
    if isinstance(parameters, Tensor) or (isinstance(parameters, str) and parameters == "last_layer"):
        what = "a subnetwork" if isinstance(parameters, Tensor) else "'last_layer'"
        raise ValueError(f"parameters= got {what}: name a sharded model's parameters, by globs or a predicate.")
    return parameters
