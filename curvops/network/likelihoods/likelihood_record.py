"""Records of likelihoods as plain values, the class by name and its arguments; and strings that identify them."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from curvops.fingerprints import fingerprint, in_single
from curvops.network.likelihoods.categorical import BradleyTerry, Categorical
from curvops.network.likelihoods.gaussian import Gaussian
from curvops.network.likelihoods.independent import Bernoulli, HeteroscedasticGaussian, Poisson
from curvops.network.likelihoods.likelihood import Likelihood
from curvops.network.likelihoods.sequences import Sequences

STORED: dict[str, type[Likelihood]] = {
    kind.__name__: kind
    for kind in (Bernoulli, BradleyTerry, Categorical, Gaussian, HeteroscedasticGaussian, Poisson, Sequences)
}
"""Classes that store their constructor's arguments as attributes of the same names."""


def record_of_likelihood(likelihood: Likelihood) -> dict[str, Any] | None:
    """Return class and arguments; None for other classes, and for those with a function, such as `FromDistribution`."""
    if STORED.get(type(likelihood).__name__) is not type(likelihood):
        return None
    arguments = {name: getattr(likelihood, name) for name in inspect.signature(type(likelihood)).parameters}
    if isinstance(inner := arguments.get("likelihood"), Likelihood):
        arguments["likelihood"] = record_of_likelihood(inner)
        if arguments["likelihood"] is None:
            return None
    return {"class": type(likelihood).__name__, "arguments": arguments}


def recorded_likelihood(record: Mapping[str, Any], device: torch.device) -> Likelihood:
    """Build the likelihood of a record. Raises ValueError for a class of a later version."""
    if record["class"] not in STORED:
        raise ValueError(f"it holds a likelihood {record['class']}, which this version does not have; upgrade curvops.")
    arguments = dict(record["arguments"])
    if isinstance(arguments.get("likelihood"), Mapping):
        arguments["likelihood"] = recorded_likelihood(arguments["likelihood"], device)
    return STORED[record["class"]](**arguments).to(device=device)


def likelihood_state(likelihood: Likelihood, token: str = "") -> str:
    """Return a string that is the same for equal likelihoods with the same hyperparameters."""
    return repr(_state(likelihood, token))


def _state(likelihood: Likelihood, token: str) -> Hashable:
    """Return a key that distinguishes likelihoods, at the current values of their tensors."""
    # An estimated noise is told by its value.
    attributes = sorted(item for item in vars(likelihood).items() if item[0] not in ("estimated", "found"))
    if all(_is_plain(value) for _, value in attributes):
        kind = f"{type(likelihood).__module__}.{type(likelihood).__qualname__}"
        return kind, tuple((name, _value(value, token)) for name, value in attributes)
    return token, tuple(_value(tensor, token) for tensor in likelihood.hyperparameters)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | torch.Size | Tensor | Likelihood)


def _value(value: Any, token: str) -> Hashable:
    if isinstance(value, Likelihood):
        return _state(value, token)
    if isinstance(value, Tensor):
        return tuple(value.shape), int(fingerprint([in_single(value.detach())])) if value.numel() else 0
    known: Hashable = value
    return known
