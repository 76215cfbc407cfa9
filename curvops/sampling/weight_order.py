"""Parameters by name in the order of a linearisation's vector, once they are seen to be its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from curvops.operators import Linearization
from curvops.sampling.log_density import SUBNETWORK
from curvops.sampling.state import State


def in_order(lin: Linearization, tensors: Any, leading: int, what: str) -> Float[Tensor, "*k D"]:
    """{name: tensor (*k, *shape)}, with `leading` dimensions k, as vectors in the order of `lin.flatten`, a copy.

    One tensor without a name, or that of a subnetwork, holds such vectors. Raises ValueError for other names or shapes.
    """
    selection = lin.model.selection
    named = tensors if isinstance(tensors, Mapping) else {SUBNETWORK: tensors}
    if list(named) == [SUBNETWORK] and SUBNETWORK not in selection.names and isinstance(named[SUBNETWORK], Tensor):
        vectors = named[SUBNETWORK]
        if vectors.shape[leading:] != (lin.num_parameters,):
            raise ValueError(
                f"{what} without names must be vectors of the {lin.num_parameters} weights in the order of "
                f"lin.flatten, got {tuple(vectors.shape)}."
            )
        return vectors.clone()
    if set(named) != set(selection.names) or selection.index is not None:
        wanted = "vectors of a subnetwork" if selection.index is not None else list(selection.names)
        raise ValueError(
            f"{what} are of {list(named)}, the linearisation selects {wanted}: linearise with the parameters that were "
            "sampled, parameters=[...]."
        )
    for name, shape in zip(selection.names, selection.shapes):
        if named[name].shape[leading:] != shape:
            raise ValueError(
                f"{what}[{name!r}] are of shape {tuple(named[name].shape[leading:])}, the network's own of "
                f"{tuple(shape)}: they are of another network."
            )
    return torch.cat([named[name].flatten(leading) for name in selection.names if named[name].numel()], leading)


def order_at_mean(lin: Linearization, state: State) -> Int[Tensor, " D"]:
    """For each of the linearisation's weights its position in the state's vector.

    Raises ValueError where the linearisation is of other parameters, or at other weights than the state's.
    """
    positions = torch.arange(state.structure.size, device=state.theta.device, dtype=torch.float64)
    order = in_order(lin, state.structure.unflatten(positions), 0, "the state's params").long()
    mean = state.theta[order]
    if lin.theta.dtype != mean.dtype or lin.theta.device != mean.device:
        raise ValueError(
            f"the state is {mean.dtype} on {mean.device}, the linearisation {lin.theta.dtype} on {lin.theta.device}."
        )
    if not torch.equal(lin.theta, mean):
        raise ValueError(
            f"the linearisation is at other weights than the mean (they differ by up to "
            f"{float((lin.theta - mean).abs().max()):.3g}): put the mean into the model, "
            "model.load_state_dict(state.params, strict=False), and linearise again."
        )
    return order
