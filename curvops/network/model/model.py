"""The user's model as a pure function of its parameters: a snapshot that later changes do not affect."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from curvops.checkpoint import digest, identify, settings_of
from curvops.checks import refuse, refuse_modes
from curvops.network.data.inputs import Inputs, components, copy, first_of, is_finite, map_inputs, value_of
from curvops.network.data.layouts import Layout, checked_outputs, layout_of
from curvops.network.data.objects import Objects, digest_of
from curvops.network.data.randomness import own_randomness
from curvops.network.model.calls import Calls, explain
from curvops.network.model.fused_kernels import NORMS, ContiguousNorms, contexts_for, unfused
from curvops.network.model.parameters import (
    Blocks,
    Selection,
    TangentSpace,
    as_real,
    at_even_place,
    select,
    tangent_space,
)
from curvops.network.model.skeleton import (
    TensorUse,
    changed_in,
    containers_in,
    entries_of,
    restore,
    skeleton_of,
    state_of,
)
from curvops.ranks.process_group import require_whole

STOCHASTIC = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
NOTHING = contextlib.nullcontext()
PROCESS_LOCK = threading.RLock()
"""The lock of any model that is computing derivatives; acquired after the model's own lock, never before it."""


class Model:
    """The function f(θ, inputs) -> outputs (n, C) of the selected parameters θ; all else stays at its snapshot.

    Outputs at several positions per point, (n, ..., C), become rows (n, T·C) by its `layout`, once that is fixed.

    It is built from an `nn.Module` (without its compiled or parallel wrapper) or from a pair (function(params, inputs),
    params). A module is copied with its present settings (`skeleton`), and only the copy is called: the user's module
    is never changed, and later changes to it have no effect. The copy can hold only one set of values at a time, so
    every call takes `lock`. A function is called directly. The parameters in `complex` are pairs of reals in θ. Raises
    ValueError for a module that is random or depends on its batch (train mode), or for an invalid selection.
    """

    @torch.inference_mode(False)  # inference tensors could never be differentiated
    @torch.no_grad()
    def __init__(self, source: Any, parameters: Any = None) -> None:
        self.lock = threading.RLock()
        self.module, self._function, tensors = _read_source(source)
        trainable = list(tensors)
        self.paths: dict[nn.Module, str] = {}
        self.slots: list[Slot] = []
        self._elsewhere: list[tuple[Any, Any, str]] = []  # containers that also hold these tensors, with key and name
        self._written: list[Any] = []  # containers that a pass changes in the module, which is undone after each
        self._computed: list[tuple[str, Tensor]] = []  # computed from the named tensor before
        self._buffers: Blocks = {}
        if self.module is not None:
            self.module, elsewhere, computed = skeleton_of(self.module)
            self.paths = {module: path for path, module in self.module.named_modules()}
            self.slots, tensors, buffers = slots_of(self.paths)
            names = {id(tensor): name for name, tensor in {**tensors, **buffers}.items()}
            self._elsewhere = [(container, key, names[id(tensor)]) for container, key, tensor in elsewhere]
            self._computed = [(names[id(tensor)], copied) for copied, tensor in computed]
            self._buffers = {name: buffer.detach().clone() for name, buffer in buffers.items()}
            trainable = [name for name, tensor in tensors.items() if tensor.requires_grad]
        self._find_places()
        self.trainable = tuple(trainable)
        """The names of all parameters that require a gradient."""
        self.complex = {name for name, tensor in tensors.items() if tensor.is_complex()}
        tensors = {name: as_real(tensor) for name, tensor in tensors.items()}
        self.selection: Selection = select(tensors, trainable, parameters)
        self._pairs = {name for name in tensors if tensors[name].shape[-1:] == (2,)}
        self.frozen = {
            name: tensor.detach().clone() for name, tensor in tensors.items() if name not in self.selection.names
        }
        # One flat copy; the named parameters are views of it.
        chosen = {name: tensors[name].detach() for name in self.selection.names}
        self._flat = torch.cat([tensor.flatten() for tensor in chosen.values()])
        require_all_finite([self._flat], chosen, "leave it out of the selection")
        require_all_finite(self.frozen.values(), self.frozen, "load other weights")
        self._views: tuple[Tensor | None, Blocks, Blocks] = (None, {}, {})  # their snapshot, values, leaves
        self._switches, self._stand_ins = contexts_for(self.paths)
        self.layout: Layout | None = None
        self.calls = Calls(self.module)
        self._writes = self._differentiates = False
        self._admitted: set[Hashable] = set()

    @property
    def theta(self) -> Float[Tensor, " D"]:
        """The selected parameters as one vector."""
        index = self.selection.index
        return self._flat if index is None else self._flat[index]

    @property
    def num_parameters(self) -> int:
        """The number D of selected entries."""
        return self.selection.num_parameters

    @property
    def values(self) -> Blocks:
        """The selected parameters by name, as views of the snapshot."""
        if self._views[0] is not self._flat:
            self._views = self._flat, self.selection.named(self._flat), {}
        return dict(self._views[1])

    def unflatten(self, weights: Float[Tensor, " D"]) -> Blocks:
        """Return the selected parameters by name, with entries outside a subnetwork as in the snapshot."""
        index = self.selection.index
        flat = weights if index is None else self._flat.to(weights.dtype).index_copy(0, index, weights)
        return self.selection.named(flat)

    def at(self, weights: Float[Tensor, " D"]) -> Model:
        """Return this network with other values of the selected parameters, copied."""
        index, values = self.selection.index, weights.detach()
        return self._with(_flat=values.clone() if index is None else self._flat.index_copy(0, index, values))

    def with_layout(self, layout: Layout) -> Model:
        """Return this network with the outputs of another layout, such as that of one among several outputs."""
        return self._with(layout=layout)

    def selecting(self, names: Sequence[str]) -> Model:
        """Return this network with these parameters selected, at the same values."""
        tensors = {**self.frozen, **self.selection.named(self._flat)}
        selection = select(tensors, names, None)
        others = {name: tensor for name, tensor in tensors.items() if name not in selection.names}
        return self._with(
            selection=selection,
            # Copies: a pickled view of the vector would contain all of it.
            frozen={name: tensor if name in self.frozen else tensor.clone() for name, tensor in others.items()},
            _flat=torch.cat([tensors[name].flatten() for name in selection.names]),
        )

    def _with(self, **changed: Any) -> Model:
        """Return this network with other attributes; both share the module and its lock."""
        other = object.__new__(Model)
        attributes = {name: value for name, value in self.__dict__.items() if name != "tangent_space"}
        other.__dict__.update(attributes | {"_views": (None, {}, {})} | changed)
        return other

    @cached_property
    def tangent_space(self) -> TangentSpace:
        """The tangent space at the snapshot; a cast keeps it."""
        return tangent_space(self.selection, {**self.values, **self.frozen, **self._buffers})

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the snapshot."""
        return [self._flat, *self.frozen.values(), *self._buffers.values()]

    @property
    def identified_by(self) -> dict[str, Any]:
        """By name the facts that distinguish this network from others. Costs a pass over the weights."""
        index, held = self.selection.index, {**self.frozen, **self._buffers}
        return {
            "the dtype": str(self._flat.dtype),
            "the parameters": [*self.selection.names, *([] if index is None else [digest([index])])],
            "the network's modules and their settings": identify(
                self._function if self.module is None else settings_of(self.module)
            ),
            "the network's tensors": digest([self._flat, *(held[name] for name in sorted(held))]),
        }

    @property
    def kept_tensors(self) -> Blocks:
        """The tensors of the snapshot by name, without buffers that are not persistent (see `tensors_of`)."""
        tensors = {**self.values, **self.frozen, **self._buffers}
        if self.module is None:
            return tensors
        computed = _computed_buffers(self.module)
        return {name: tensor for name, tensor in tensors.items() if name not in computed}

    @property
    def eps(self) -> float:
        """The largest machine epsilon among the tensors' dtypes: a frozen base may be in half precision."""
        return max(torch.finfo(tensor.dtype).eps for tensor in self.tensors() if tensor.is_floating_point())

    def refuse_modes(self) -> None:
        """Raise an error under `torch.autocast` in single precision, or inside a transform of `torch.func`."""
        refuse_modes(self._flat.dtype, self._flat.device)

    @property
    def training(self) -> bool:
        """Whether a part of the module was in train mode at the snapshot."""
        return any(getattr(module, "training", False) for module in self.paths)  # frozen TorchScript has no mode

    def place_of(self, variable: Tensor) -> int | None:
        """Return a number that distinguishes this leaf of a graph from the model's other leaves, in every pass.

        Return None for a leaf that the model makes itself, such as inputs by which it differentiates an energy.
        """
        offset = variable.data_ptr() - self._flat.data_ptr()
        return offset if 0 <= offset < self._flat.nbytes else None

    def leaves(self) -> Blocks:
        """Return the selected parameters by name, as leaves of a graph to be recorded."""
        values, leaves = self.values, self._views[2]
        if not leaves:  # made on demand: functorch transforms do not allow making them, and do not use them
            leaves.update((name, value.detach().requires_grad_()) for name, value in values.items())
        return dict(leaves)

    def __call__(self, values: Mapping[str, Tensor], inputs: Any) -> Float[Tensor, "n C"]:
        """Return the outputs at the selected parameters `values` in θ's dtype, one row per point, position by position.

        Raises TypeError or ValueError unless the model returns (n, C) or (n, ..., C), in the layout that was fixed.
        """
        outputs = self.raw(values, inputs)
        return (self.layout or Layout(outputs.shape[1:])).rows(outputs).to(self._flat.dtype)

    def raw(self, values: Mapping[str, Tensor], inputs: Any) -> Tensor:
        """Return the model's outputs (n, ...) in its own shape."""
        outputs = checked_outputs(self._call(values, copy(inputs) if self._writes else inputs), self.layout)
        if isinstance(inputs, Objects) and inputs.size not in (None, len(outputs)):
            raise ValueError(f"{inputs!r} gave outputs {tuple(outputs.shape)}, expected one row for each point.")
        return outputs

    def fix_layout(
        self, inputs: Any, layouts: Callable[[Any], Layout] | None = None
    ) -> tuple[Layout, Float[Tensor, "n ..."]]:
        """Fix the layout of the outputs at these inputs for all later calls; return it with the outputs.

        layouts: from what the model returns to its layout, by default `layout_of`. The pass also shows how the model is
        called, and whether it writes into its inputs or takes derivatives itself. Raises ValueError or TypeError.
        """
        self.calls.arguments(value_of(inputs, apart=True))
        self.calls.example = inputs.copy() if isinstance(inputs, Objects) else None
        inputs_copy = copy(inputs)
        with torch.no_grad(), explain(inputs):
            try:
                outputs, read = self._first_call(inputs_copy)
            except (TypeError, RuntimeError) as error:
                self._differentiates = isinstance(error, RuntimeError)
                if not (self._differentiates or self.calls.turn(value_of(inputs, apart=True))):
                    raise
                inputs_copy = copy(inputs)
                outputs, read = self._first_call(inputs_copy)
        if read:
            raise ValueError(
                f"the model's forward reads {sorted(read)} from elsewhere than the modules that own them (a tuple, a "
                "global name, a tensor computed from them before): read them from self in forward, as "
                "self.layer.weight, and store constants detached; empty caches, in GPyTorch by model.train().eval()."
            )
        self._writes = _differ(inputs_copy, inputs)
        self.layout = (layouts or layout_of)(outputs)
        self._admitted.add(form_of(inputs))
        return self.layout, checked_outputs(outputs, self.layout)

    def admit(self, inputs: Inputs) -> None:
        """Run the model on two points of these inputs if their dtypes or shapes have not occurred before.

        Raises ValueError or TypeError, with the remedy, for an error inside the model or outputs of another shape.
        """
        if (form := form_of(inputs)) in self._admitted or (isinstance(inputs, Objects) and not len(inputs)):
            return
        few = first_of(inputs)
        self.calls.arguments(value_of(few, apart=True))
        try:
            with torch.no_grad(), explain(few):
                self.raw(self.values, few)
        except (TypeError, ValueError) as error:
            if isinstance(inputs, Tensor) and ((("inputs", inputs.dtype, inputs.shape),) in self._admitted):
                raise ValueError(
                    f"inputs {tuple(inputs.shape)} have the shape of a single point, and were read as {len(inputs)} "
                    "points: pass x[None]."
                ) from error
            raise
        self._admitted.add(form)

    def require_points_apart(self, outputs: Tensor, alone: Tensor) -> None:
        """Raise ValueError unless the first of these outputs equals the output of its point `alone`, up to rounding."""
        slack = self.eps**0.5 * (1 + outputs.abs().max())
        if bool(((outputs[: len(alone)] - alone).abs() > slack).any()):
            across = [
                repr(path) for module, path in self.paths.items() if getattr(module, "batch_first", True) is False
            ]
            where = f" (not so {', '.join(across[:3])})" if across else ""
            raise ValueError(
                f"a point's outputs depend on the other points of its batch of {len(outputs)}; call model.eval(), use "
                "a normalisation that acts on one point at a time, and recurrent layers and attention with "
                f"batch_first=True{where}."
            )

    def _call(self, values: Mapping[str, Tensor], inputs: Any) -> Any:
        """Call the model and return its result unchecked."""
        if self._differentiates and not torch.is_grad_enabled():
            with torch.inference_mode(False), torch.enable_grad():
                outputs = self._call(values, inputs)
            return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)
        with self.holding(values) as tensors:
            inputs = inputs.value() if isinstance(inputs, Objects) else map_inputs(_recordable, inputs)
            if self._function is not None:
                return self._function(tensors, self.calls.as_given(inputs))
            assert self.module is not None
            args, kwargs = self.calls.arguments(inputs)
            return self.module(*args, **kwargs)

    def _first_call(self, inputs: Any) -> tuple[Any, set[str]]:
        """Call the model at the snapshot. From now on, if it normalises, it does so as `ContiguousNorms`.

        Also return the names of the user's own parameters that it read, or of which it read what was computed before.
        """
        state, self._written = state_of([] if self.module is None else containers_in(self.module)), []
        computed = {id(tensor): name for name, tensor in self._computed if name in self.selection.names}
        theirs = {} if self.module is None else {id(tensor): name for name, tensor in self.module.named_parameters()}
        with TensorUse(theirs | computed) as use:
            outputs = self._call(self.values, inputs)
        self._written = changed_in(state)
        restore(state)
        if use.functions & NORMS and ContiguousNorms not in self._stand_ins:
            self._stand_ins = [*self._stand_ins, ContiguousNorms]
        return outputs, use.names

    @contextlib.contextmanager
    def holding(self, values: Mapping[str, Tensor]) -> Iterator[Blocks]:
        """Make the module hold `values` and its snapshot, and give them by name as it holds them.

        Backward passes need this, too, since they rerun checkpointed blocks. Random numbers are the library's own, and
        some of torch's functions are replaced by others of equal values.
        """
        with contextlib.ExitStack() as stack:
            if self.module is not None:
                stack.enter_context(self.lock)
            stack.enter_context(own_randomness(self._flat.device))
            for stand_in in self._stand_ins:
                stack.enter_context(stand_in())
            tensors = {**self.frozen, **self._buffers, **self.values, **values}
            for name in self._pairs:
                pairs = at_even_place(tensors[name])
                tensors[name] = torch.view_as_complex(pairs) if name in self.complex else pairs
            if self._written:  # no call may find what another one has computed from its values and cached
                stack.callback(restore, state_of(self._written))
            # As in `torch.func.functional_call`, which walks to each place by its path.
            before = []
            try:
                for holder, key, name in self._places:
                    before.append((holder, key, holder[key]))
                    holder[key] = tensors[name]
                yield tensors
            finally:
                for holder, key, tensor in before:
                    holder[key] = tensor

    def _find_places(self) -> None:
        """List all that holds a tensor of the snapshot while the module runs, with the key there and the name."""
        self._places: list[tuple[Any, Any, str]] = [
            (module._parameters if local in module._parameters else module._buffers, local, name)
            for module, local, name in self.slots
        ]
        self._places += [(entries_of(container), key, name) for container, key, name in self._elsewhere]

    @contextlib.contextmanager
    def differentiating(self) -> Iterator[None]:
        """Record derivatives even under no_grad or inference_mode, with kernels that have them.

        Torch keeps the choice of kernels and the nesting of dual numbers per process, so only one thread at a time may
        enter.
        """
        # Set inference mode off even if it is off: this switches on forward mode, which custom functions switch off.
        with self.lock, PROCESS_LOCK, torch.inference_mode(False), torch.enable_grad(), unfused(self._switches):
            yield

    @torch.inference_mode(False)
    def cast(self, dtype: torch.dtype | None, device: torch.device | None) -> Model:
        """Return a copy with parameters and buffers converted."""

        def convert(tensor: Tensor) -> Tensor:
            wanted = dtype.to_complex() if dtype is not None and tensor.is_complex() else dtype
            real = tensor.is_floating_point() or tensor.is_complex()
            return tensor.to(device=device, dtype=wanted if real else None)

        _ = dict(self.tangent_space.held)  # computed before rounding
        return self._with(
            tangent_space=self.tangent_space,
            _flat=convert(self._flat),
            _admitted=set(),
            frozen={name: convert(tensor) for name, tensor in self.frozen.items()},
            _buffers={name: convert(buffer) for name, buffer in self._buffers.items()},
        )

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("lock", "_places")  # a copy of the module has other places
        state = {key: value for key, value in self.__dict__.items() if key not in left_out}
        return state | {"_views": (None, {}, {})}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.lock = threading.RLock()
        self._find_places()


def tensors_of(source: Any) -> Blocks:
    """Return the present parameters and buffers of a user's model by name, complex parameters as pairs of reals.

    Buffers that are not persistent are left out: a model computes them itself, and files of weights do not contain
    them.
    """
    module, _, tensors = _read_source(source)
    if module is None:
        return {name: as_real(tensor) for name, tensor in tensors.items()}
    computed = _computed_buffers(module)
    buffers = {name: buffer for name, buffer in module.named_buffers() if name not in computed}
    return {name: as_real(parameter) for name, parameter in module.named_parameters()} | buffers


def _computed_buffers(module: nn.Module) -> set[str]:
    """Return the names of buffers that are not persistent."""
    return {
        f"{path}.{name}" if path else name
        for path, submodule in module.named_modules()
        for name in submodule._non_persistent_buffers_set
    }


def require_all_finite(tensors: Iterable[Tensor], named: Blocks, remedy: str) -> None:
    """Raise ValueError, with the parameter's name, if one of these tensors is not finite."""
    if not all(map(is_finite, tensors)):
        name = next(name for name, tensor in named.items() if not is_finite(tensor))
        raise ValueError(f"parameter {name!r} holds NaN or Inf; train again, or {remedy}.")


class Slot(NamedTuple):
    """A module that holds a parameter or buffer, the name there, and the first name of that tensor in the model."""

    part: nn.Module
    local: str
    name: str


def slots_of(paths: Mapping[nn.Module, str]) -> tuple[list[Slot], Blocks, Blocks]:
    """Return every place that holds a parameter or buffer, once; all parameters, and all buffers, by their first name.

    `functional_call` could handle tied names itself, but leaves the tensors of the call in a module that has two names.
    Raises ValueError if a module is in a mode that makes its outputs random or dependent on the batch.
    """
    names: dict[int, str] = {}
    slots: list[Slot] = []
    parameters: Blocks = {}
    buffers: Blocks = {}
    for module, path in paths.items():
        if isinstance(module, STOCHASTIC):
            _require_deterministic(module, path)
        for named, tensors in ((parameters, module._parameters), (buffers, module._buffers)):
            for local, tensor in tensors.items():
                if tensor is None:
                    continue
                name = names.get(id(tensor))
                if name is None:
                    name = names[id(tensor)] = f"{path}.{local}" if path else local
                    named[name] = tensor
                slots.append(Slot(module, local, name))
    return slots, parameters, buffers


def _require_deterministic(module: Any, name: str) -> None:
    what = f"{name or 'the model'} ({type(module).__name__})"
    random = module.training and getattr(module, "p", 1) > 0
    refuse(random, f"{what} is in train mode, so outputs are random or depend on their batch; call model.eval().")
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
        raise ValueError(
            f"{what} keeps no running statistics, so each point's output depends on its batch: use "
            "track_running_stats=True, or another normalisation."
        )


def unwrap(model: Any) -> Any:
    """Return the model inside `torch.compile`, `DataParallel` or `DistributedDataParallel`; names lose the prefix.

    A wrapper with its own hooks stays.
    """
    if not isinstance(model, nn.Module):
        return getattr(model, "_torchdynamo_orig_callable", model)
    inner = dict(model._modules.items()).get("_orig_mod")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner = model.module
    hooked = model._forward_hooks or model._forward_pre_hooks
    return model if inner is None or hooked else unwrap(inner)


def _read_source(source: Any) -> tuple[nn.Module | None, Callable[..., Any] | None, Blocks]:
    """Return the module, or the function and its tensors by name."""
    source = unwrap(source)
    require_whole(source)
    if isinstance(source, nn.Module):
        return source, None, {}
    if isinstance(source, tuple) and len(source) == 2 and callable(source[0]) and isinstance(source[1], Mapping):
        function, tensors = unwrap(source[0]), dict(source[1])
        return None, function, tensors
    hint = ""
    if isinstance(getattr(source, "__self__", None), nn.Module):
        hint = " Pass the module itself, not one of its methods."
    elif isinstance(source, type) and issubclass(source, nn.Module):
        hint = f" Pass an instance of {source.__name__}, with its trained weights."
    elif isinstance(source, Mapping):
        hint = " Load weights into the module, model.load_state_dict(weights), and pass the module."
    elif isinstance(source, torch.export.ExportedProgram):
        hint = " Pass program.module()."
    raise TypeError(
        f"model must be an nn.Module or a pair (function(params, inputs), params), got {type(source).__name__}.{hint}"
    )


def _differ(inputs_copy: Inputs, inputs: Inputs) -> bool:
    """Return whether a call of the model changed the inputs that it was given, which were a copy of others."""
    if isinstance(inputs_copy, Objects):
        return digest_of(inputs_copy.points) != digest_of(inputs.points)  # type: ignore[union-attr]
    return any(
        new.is_inference() or new._version > 0 or not torch.equal(new, old)
        for (_, new), (_, old) in zip(components(inputs_copy), components(inputs))
    )


def form_of(inputs: Inputs) -> Hashable:
    """Return names, dtypes and shapes without the points; besides the values, a model may depend on these."""
    if isinstance(inputs, Objects):
        return inputs.form
    return tuple((name, tensor.dtype, tensor.shape[1:]) for name, tensor in components(inputs))


def _recordable(tensor: Tensor) -> Tensor:
    """Return an input for one call: detached, so that flags set on it are not the user's, unless it is recorded.

    One that was made in inference mode is copied if it is now to be differentiated.
    """
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return tensor.clone()
    # A slice made without gradients may say that it requires one, but is not in the graph of what it is used for.
    return tensor if tensor.requires_grad and torch.is_grad_enabled() else tensor.detach()
