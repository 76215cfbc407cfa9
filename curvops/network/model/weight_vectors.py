"""Prior precisions and means, given as a number, a vector or a mapping over parameter names, as tensors like θ."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checks import refuse_tangents, shown
from curvops.network.data.inputs import is_finite, own, tensor_of, within
from curvops.network.model.model import Model
from curvops.network.model.parameters import matching


def read_precision(name: str, value: Any, network: Model, others: str = "") -> Tensor:
    """Read a diagonal precision, 0-d or (D,). Raises TypeError or ValueError unless it is positive and finite."""
    hint = "wrap a matrix as co.linalg.Dense(matrix, psd=True)"
    precision = read_vector(name, value, network, "a positive number", others, hint)
    if not within(precision, 0.0, strict=True):
        raise ValueError(f"{name} must be positive and finite, got {float(precision.detach().min()):.3g}.")
    return precision


def read_mean(value: Any, network: Model) -> Tensor:
    """Read a prior mean, 0-d or (D,). Raises TypeError or ValueError unless it is finite."""
    hint = "lin.flatten(mapping) makes a vector of named tensors"
    mean = read_vector("prior_mean", value, network, "a number", hint=hint)
    if not is_finite(mean):
        raise ValueError("prior_mean holds NaN or Inf.")
    return mean


def read_vector(name: str, value: Any, network: Model, number: str, others: str = "", hint: str = "") -> Tensor:
    """Read a number, vector or mapping as a tensor like θ, 0-d or (D,): the user's own if it requires a gradient."""
    if isinstance(value, Mapping):
        return _by_parameter(value, network, name)
    value = tensor_of(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real | Tensor):
        raise TypeError(
            f"{name} must be {number}, a tensor ({network.num_parameters},) of them, a mapping {{glob over parameter "
            f"names: number or tensor}}{others}, got {shown(value)}."
        )
    vector = _like(network, value, name)
    if vector.ndim > 1 or (vector.ndim == 1 and len(vector) != network.num_parameters):
        raise ValueError(f"{name} must be a number or have {network.num_parameters} entries; {hint}.")
    return vector


def _like(network: Model, value: Any, name: str) -> Tensor:
    used = torch.as_tensor(value, dtype=network.theta.dtype, device=network.theta.device)
    refuse_tangents([used])
    return own(value, used, name) if isinstance(value, Tensor) else used


def _by_parameter(values_by_glob: Mapping[Any, Any], network: Model, what: str) -> Float[Tensor, " D"]:
    """Return the vector for a mapping {glob over parameter names: number, or tensor of the parameter's shape}.

    Raises ValueError unless each selected parameter is matched exactly once and each glob matches one.
    """
    selection = network.selection
    entries: dict[str, tuple[str, Any]] = {}
    for glob, entry in values_by_glob.items():
        value = tensor_of(entry)
        if not isinstance(glob, str):
            raise TypeError(f"{what}: a key must be a glob over parameter names, got {glob!r}.")
        if isinstance(value, bool) or not isinstance(value, numbers.Real | Tensor):
            raise TypeError(f"{what}[{glob!r}] must be a number, got {value!r}.")
        matched = matching(selection.names, glob)
        if not matched:
            raise ValueError(f"{what}: {glob!r} matches none of the selected parameters {list(selection.names)}.")
        for name in matched:
            if name in entries:
                raise ValueError(f"{what}: {name!r} is matched by {entries[name][0]!r} and {glob!r}; name it once.")
            entries[name] = glob, value
    left = [name for name in selection.names if name not in entries]
    if left:
        raise ValueError(f"{what}: no glob matches {left}; each selected parameter needs one.")
    tensors = {}
    for name, shape in zip(selection.names, selection.shapes):
        glob, value = entries[name]
        if isinstance(value, Tensor) and value.ndim and value.shape != shape:
            raise ValueError(f"{what}[{glob!r}] has shape {tuple(value.shape)}, but {name!r} has {tuple(shape)}.")
        used = torch.as_tensor(value, dtype=network.theta.dtype, device=network.theta.device).expand(shape)
        tensors[name] = own(value, used, f"{what}[{glob!r}]") if isinstance(value, Tensor) else used
    return selection.flatten(tensors)
