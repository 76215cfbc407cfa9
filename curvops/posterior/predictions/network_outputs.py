"""Outputs of the network itself at draws of its weights: many draws in one pass where `vmap` allows it."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.core.cache import recorded
from curvops.network.data.inputs import Inputs, components, num_points, take
from curvops.network.engines.autodiff import saved_bytes
from curvops.operators import Linearization

SHARE = 4
"""The activations of one pass take at most one part in this many of the memory that is left."""
LARGE = 2**18
"""Bytes of activations a draw from which on a processor's passes gain nothing by being made together (convolutions
with weights of their own for each draw take 2.5 times as long)."""


def network_outputs(lin: Linearization, x: Any, samples: Float[Tensor, "k D"]) -> Float[Tensor, "k N C"]:
    """Return f(x, θ_k), sequences position by position; inputs may require a gradient, at a pass for each draw."""
    inputs = lin.admitted(x, differentiable=True)
    found = None
    if len(samples) > 1 and num_points(inputs) and not recorded([tensor for _, tensor in components(inputs)]):
        found = _together(lin, inputs, samples)
    if found is None:
        found = torch.stack([lin.predict(x, weights) for weights in samples])
    return found.reshape(len(samples), found[0].numel() // lin.output_shape[-1], lin.output_shape[-1])


@torch.no_grad()
def _together(lin: Linearization, inputs: Inputs, samples: Tensor) -> Tensor | None:
    """Return the outputs by `vmap`, some draws and points at a time; None where that fails or is slower.

    The outputs of the first draw at the first points are compared with the model's own.
    """
    count, points = num_points(inputs), max(lin.data.sizes)
    first = take(inputs, slice(0, 2))
    each = saved_bytes(lin.model, first) // num_points(first) * min(points, count) + samples[0].nbytes
    if each > LARGE and samples.device.type == "cpu":
        return None
    draws = max(1, int(max(0, lin.memory.room()) // (SHARE * max(1, each))))
    run, starts = torch.func.vmap(lin.model, (0, None)), range(0, count, points)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of operations that vmap runs one by one
            mapped = run(_named(lin, samples[:1]), first)[0]
            alone = lin.model(lin.unflatten_weights(samples[0]), first)
            slack = lin.model.eps**0.5 * alone.abs().max()
            if not bool(((mapped - alone).abs() <= slack).all()):
                return None
            named = [_named(lin, some) for some in samples.split(draws)]
            parts = [[run(some, take(inputs, slice(i, i + points))) for i in starts] for some in named]
    except (RuntimeError, TypeError, ValueError, Warning):  # no rule, control flow by values, randomness, memory
        return None
    return torch.cat([torch.cat(row, 1) for row in parts])


def _named(lin: Linearization, samples: Float[Tensor, "k D"]) -> dict[str, Tensor]:
    return torch.func.vmap(lin.unflatten_weights)(samples)
