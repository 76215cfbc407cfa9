"""The data and the likelihood of a sum, by fingerprints, so that small operators keep no data."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvops.network.data.absent_batches import AbsentBatches
from curvops.network.data.batches import Batches
from curvops.network.data.fingerprints import fingerprint, in_single
from curvops.network.likelihoods.likelihood import Likelihood


@dataclass(frozen=True)
class Source:
    """The data of a log-likelihood and the likelihood itself; equal where both are.

    Data are equal where all batches are: the same points in other batches differ.
    """

    num_data: int
    data: int
    likelihood: str

    def __str__(self) -> str:
        """The data alone: a likelihood that holds a function has a name that each process draws anew."""
        return f"{self.num_data} points of fingerprint {self.data}"


def source_of(data: Batches | AbsentBatches, likelihood: Likelihood, token: str) -> Source:
    """The source of a linearisation; `token` stands for a likelihood that holds more than tensors and numbers."""
    return Source(data.num_data, data.fingerprint, likelihood_state(likelihood, token))


def likelihood_state(likelihood: Likelihood, token: str = "") -> str:
    """A text that is equal for equal likelihoods of the same hyperparameters."""
    return repr(_state(likelihood, token))


def _state(likelihood: Likelihood, token: str) -> Hashable:
    """Return a key that distinguishes likelihoods, at the present values of their tensors."""
    attributes = sorted(vars(likelihood).items())
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
    found: Hashable = value
    return found
