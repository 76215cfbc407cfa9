"""A module sharded by `fully_shard`, run in place: only this rank's part of its parameters is copied."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from curvops.distributed_types import is_dtensor, is_fully_sharded
from curvops.network.data.inputs import Inputs
from curvops.network.data.randomness import own_randomness
from curvops.network.model.calls import Calls
from curvops.network.model.fused_kernels import contexts_for
from curvops.network.model.model import Model, form_of, require_all_finite, slots_of
from curvops.network.model.parameters import Blocks, Selection, select
from curvops.network.model.shards import ShardedParameters
from curvops.network.model.tangent_space import TangentSpace, tangent_space
from curvops.process_group import Ranks


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
        self._sharded = [part for part in module.modules() if is_fully_sharded(part)]
        self._reshard()
        self.paths = {part: path for path, part in module.named_modules()}
        self.slots, tensors, buffers = slots_of(self.paths)
        if not is_fully_sharded(module):
            raise ValueError("parts of the model are sharded: call fully_shard on the model, too, after its parts.")
        self._require_known(tensors)
        trainable = [name for name, tensor in tensors.items() if tensor.requires_grad]
        self.selection: Selection = select(tensors, trainable, _checked_spec(parameters), ())
        self._require_selectable(tensors)
        chosen = {name: tensors[name] for name in self.selection.names}
        self.shards = ShardedParameters.of(ranks, chosen)
        self._snapshot = {name: _local(tensor).clone() for name, tensor in {**tensors, **buffers}.items()}
        self.complex: set[str] = set()
        self._modes = {part: part.training for part in self.paths}
        own = {name: self._snapshot[name] for name in self.selection.names}
        self._flat = torch.cat([tensor.flatten() for tensor in own.values()])
        self.frozen = {name: self._snapshot[name] for name in tensors if name not in own}
        self._buffers = {name: self._snapshot[name] for name in buffers}
        require_all_finite(own.values(), own, "leave it out of the selection")
        require_all_finite(self.frozen.values(), self.frozen, "load other weights")
        self._settings, self._stand_ins = contexts_for(self.paths)
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
        tensors, modes_before, held = {}, {part: part.training for part in modes}, self._held()
        for name, value in values.items():
            present = held[name].data  # no graph of the user's depends on its version
            if not torch.equal(present, value):
                tensors[name] = present.clone()
                present.copy_(value)
        for part, mode in modes.items():
            part.training = mode
        return tensors, modes_before

    def _held(self) -> Blocks:
        """Return the module's present values; its first pass, and users, may have moved some of its tensors."""
        tensors = {}
        for part, local, name in self.slots:
            tensor = part._parameters.get(local, part._buffers.get(local))
            value = self._snapshot[name]
            if tensor is None or (_local(tensor).shape, tensor.dtype) != (value.shape, value.dtype):
                raise ValueError(f"{name!r} has changed since the model was linearised: linearise it again.")
            tensors[name] = _local(tensor)
        return tensors

    def _reshard(self) -> None:
        for part in self._sharded:
            part.reshard()  # type: ignore[operator]

    def _checked_call(self, inputs: Any) -> Any:
        return self._call({}, inputs)

    def at(self, weights: Tensor) -> NoReturn:
        raise ValueError("a model that is sharded over ranks takes no other weights: set the weights of the module.")

    def cast(self, dtype: torch.dtype | None, device: torch.device | None) -> NoReturn:
        raise ValueError("a model that is sharded over ranks cannot be converted: convert it before fully_shard.")

    def unflatten(self, weights: Tensor) -> NoReturn:
        raise ValueError("weights of a model that is sharded over ranks are named DTensors, not one vector.")

    def __getstate__(self) -> NoReturn:
        raise TypeError("a model that is sharded over ranks cannot be pickled or copied.")

    def _require_known(self, tensors: Mapping[str, Any]) -> None:
        """Raise ValueError for several meshes, meshes of several dimensions, other ranks, offloading, low precision."""
        ours = dist.get_process_group_ranks(self.ranks.group)
        meshes = {}
        for name, tensor in tensors.items():
            if not is_dtensor(tensor):
                continue
            mesh, kinds = tensor.device_mesh, [type(placement).__name__ for placement in tensor.placements]
            if mesh.ndim != 1 or kinds != ["Shard"]:
                raise ValueError(
                    f"parameter {name!r}: only meshes of one dimension are supported, fully_shard(model, mesh=)."
                )
            meshes[mesh] = name
            theirs = dist.get_process_group_ranks(mesh.get_group())
            if theirs != ours:
                raise ValueError(f"parameter {name!r} is sharded over {theirs}, not {ours}: see process_group=.")
        if len(meshes) > 1:
            raise ValueError(f"the parameters {sorted(meshes.values())} lie on different meshes: use one mesh for all.")
        dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
        for part in self._sharded:
            self._require_plain_policies(part, dtypes)

    def _require_plain_policies(self, part: Any, dtypes: set[torch.dtype]) -> None:
        state, where = part._get_fsdp_state(), self.paths.get(part) or "the model"
        policy = state._mp_policy
        for what in ("param_dtype", "output_dtype"):
            asked = getattr(policy, what, None)
            if asked is not None and {asked} != dtypes:
                raise ValueError(f"{where} has MixedPrecisionPolicy({what}={asked}): shard it without mp_policy.")
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in groups:
            if type(getattr(group, "offload_policy", None)).__name__ == "CPUOffloadPolicy":
                raise ValueError(f"{where} is sharded with a CPUOffloadPolicy, which is not supported: remove it.")

    def _require_selectable(self, tensors: Mapping[str, Any]) -> None:
        for name in self.selection.names:
            if not is_dtensor(tensors[name]):
                raise ValueError(f"parameter {name!r} is not sharded: leave it out of parameters=, or shard it.")
            if not tensors[name].requires_grad:
                raise ValueError(f"parameter {name!r} requires no gradient: call requires_grad_(), or leave it out.")


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return local.detach()


def _checked_spec(parameters: Any) -> Any:
    """Return `parameters=`; raise ValueError for values that need a whole vector or a copy of the model."""
    if isinstance(parameters, Tensor) or (isinstance(parameters, str) and parameters == "last_layer"):
        what = "a subnetwork" if isinstance(parameters, Tensor) else "'last_layer'"
        raise ValueError(f"parameters= got {what}: name a sharded model's parameters, by globs or a predicate.")
    if isinstance(parameters, Selection):
        raise ValueError("parameters= got a selection of another model: name the parameters.")
    return parameters
