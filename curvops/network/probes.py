"""Which derivatives does a model have, and are they right? Tried on a point or two before an engine relies on them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from curvops.network.autodiff import Recorded, Streamed
from curvops.network.inputs import num_points
from curvops.network.model import Model
from curvops.network.parameters import Blocks


def require_derivatives(model: Model, inputs: Any, names: Sequence[str], forward_mode: bool) -> None:
    """Raise ValueError where the model has no derivatives that an engine could use, or loses them silently."""
    streamed = Streamed(model, inputs, names, forward_mode=False)
    ones = torch.ones_like(streamed.outputs).unsqueeze(0)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            streamed.pull(ones)
        if not forward_mode:
            streamed.push({name: torch.ones_like(model.values[name]).unsqueeze(0) for name in names})
    except RuntimeError as error:
        lacks = "no backward-mode derivative" if forward_mode else "neither a forward-mode nor a second derivative"
        raise ValueError(
            f"the model uses an operation with {lacks}: {error} Replace the operation (F.embedding_bag by an "
            "Embedding and a mean, a reentrant checkpoint by use_reentrant=False), or leave the parameters before it "
            "out of the selection."
        ) from error
    if any("None of the inputs have requires_grad" in str(warning.message) for warning in caught):
        raise ValueError(
            "a block under torch.utils.checkpoint(use_reentrant=True) would lose its gradients; "
            "pass use_reentrant=False."
        )


def forward_mode_works(model: Model, inputs: Any, names: Sequence[str], roomy: bool = False) -> bool:
    """Whether forward-mode products of this batch exist and are the adjoint of backward-mode ones.

    They are not where an operation has no forward derivative, or a wrong one: an embedding's padding row, which the
    batches to come may hold even if this one does not. With `roomy` one pass serves both modes: some functions have a
    forward mode only while gradients are off.
    """
    if _operations(model, inputs).padded:
        return False
    generator = torch.Generator(device=model.theta.device).manual_seed(0)
    tangents = {name: _randn_like(model.values[name].unsqueeze(0), generator) for name in names}
    streamed = Streamed(model, inputs, names, forward_mode=True, roomy=roomy)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pushed = streamed.push(tangents)
            cotangents = _randn_like(pushed, generator)
            pulled = streamed.pull(cotangents)
    except (RuntimeError, NotImplementedError):
        return False
    if adjoint(pushed, cotangents, tangents, pulled):
        return True
    noise = rounding(lambda block: {"": streamed.push(block)}, tangents, {"": pushed}, generator)[""]
    return adjoint(pushed, cotangents, tangents, pulled, noise)


def replayable_bytes(model: Model, inputs: Any, names: Sequence[str]) -> int:
    """Bytes a point that a recorded pass keeps where `torch.func.linearize` may be replayed, else 0.

    It may where no operation mutates a tensor and two replays equal a JVP.
    """
    if _operations(model, inputs).mutating:
        return 0
    recorded = Recorded(model, inputs, names, replayable=True)
    if recorded._replay is None:
        return 0
    generator = torch.Generator(device=model.theta.device).manual_seed(1)
    streamed = Streamed(model, inputs, names, forward_mode=True)
    for _ in range(2):
        tangents = {name: _randn_like(model.values[name].unsqueeze(0), generator) for name in names}
        try:
            replayed = recorded.push(tangents)
        except Exception:  # a trace that cannot be replayed is a trace that is not used
            return 0
        expected = streamed.push(tangents)
        if not bool((replayed - expected).norm() <= tolerance(expected.dtype) * expected.norm()):
            return 0
    return -(-recorded.nbytes // num_points(inputs))


def adjoint(
    pushed: Tensor,
    cotangents: Tensor,
    tangents: Mapping[str, Tensor],
    pulled: Mapping[str, Tensor],
    noise: Tensor | float = 0.0,
) -> bool:
    """Whether ⟨u, Jv⟩ = ⟨Jᵀu, v⟩ to the dtype's accuracy, or to that of a Jv of which rounding changes `noise`."""
    left = (pushed * cotangents).sum(dtype=torch.float64)
    right = sum(((pulled[name] * tangents[name]).sum(dtype=torch.float64) for name in pulled), torch.zeros_like(left))
    return bool((left - right).abs() <= allowance(pushed, noise) * cotangents.norm().double())


def rounding(
    product: Callable[[Blocks], Blocks], vectors: Blocks, results: Mapping[str, Tensor], generator: torch.Generator
) -> Blocks:
    """‖Px − P(x − y) − Py‖ by name for a random y and `results` = Px: what rounding alone changes in a product with P.

    It may be more than the dtype of x explains: a frozen base in half precision under adapters in single precision.
    """
    part = {name: _randn_like(vector, generator) for name, vector in vectors.items()}
    first, second = product(part), product({name: vectors[name] - part[name] for name in vectors})
    return {name: (result - first[name] - second[name]).norm() for name, result in results.items()}


def allowance(value: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """The norm of the difference from `value` that two routes to it may have, by dtype or by a few times the noise.

    Never more than a tenth of `value`: noise of that size measures something else than rounding.
    """
    size = value.norm().double()
    return torch.maximum(tolerance(value.dtype) * size, (8 * torch.as_tensor(noise).to(size)).clamp(max=0.1 * size))


def tolerance(dtype: torch.dtype) -> float:
    """The relative difference that rounding may make between two routes to one product."""
    return 10 * float(torch.finfo(dtype).eps) ** 0.5


def _randn_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(tensor.shape, dtype=tensor.dtype, device=tensor.device, generator=generator)


class _Operations(TorchDispatchMode):
    """Notices operations that write into their arguments, and lookups in a differentiated table with a padding row."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mutating = self.padded = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.mutating = self.mutating or func._schema.is_mutable
        if func is torch.ops.aten.embedding.default:
            padding = args[2] if len(args) > 2 else (kwargs or {}).get("padding_idx", -1)
            self.padded = self.padded or (padding >= 0 and args[0].requires_grad)
        return func(*args, **(kwargs or {}))


def _operations(model: Model, inputs: Any) -> _Operations:
    """What one forward pass does."""
    seen = _Operations()
    with seen, model.differentiating():
        model(model.leaves(), inputs)
    return seen
