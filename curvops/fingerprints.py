"""Fingerprints of tensors, which show whether numbers or their order changed.

A fingerprint is a weighted sum of a tensor's bits, read as integers, modulo 2^64. With odd weights a change of one word
always changes it, and with random 64-bit weights any other change (a swap, a shuffle) is missed with a probability of
about 2^-30. Integer sums do not depend on their order, so threads and devices cannot raise a false alarm.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

CHUNK = 2**18
"""Words per partial sum: widened to 64 bits they stay in the processor's cache."""

SMALL = 2**12
"""Up to this many words, a buffer costs more calls than it saves."""

MAX_CHUNKS = 2**16
"""The largest number of chunks in one call, 16 G words in total."""


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 0-d int64 fingerprint of the values of some tensors on one device, without waiting for the device.

    Shapes and dtypes do not enter. Costs one pass over the data, at about 5 GB/s on a core for 32- and 64-bit numbers.
    """
    weights = _odd_weights(tensors[0].device)
    chunk_sums = _chunk_sums_in_cache if tensors[0].device.type == "cpu" else _chunk_sums_at_once
    with torch.no_grad():
        sums = torch.cat([chunk_sums(_words(tensor), weights[:CHUNK]) for tensor in tensors])
        return (sums * weights[CHUNK : CHUNK + len(sums)]).sum()


def in_single(tensor: Tensor) -> Tensor:
    """Round a floating-point tensor to single precision, so that its copy in double precision has its fingerprint."""
    if tensor.is_complex():
        return tensor.to(torch.complex64)
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor


def _chunk_sums_in_cache(words: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each chunk, on a CPU through one small buffer: a new one takes five times as long."""
    if len(words) <= SMALL:
        return words.to(torch.int64).dot(weights[: len(words)]).unsqueeze(0)
    wide = torch.empty(min(CHUNK, len(words)), dtype=torch.int64)
    sums = [wide[: len(chunk)].copy_(chunk).dot(weights[: len(chunk)]) for chunk in torch.split(words, CHUNK)]
    return torch.stack(sums)


def _chunk_sums_at_once(words: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each chunk by three kernels, for an accelerator (which has no integer dot product)."""
    rows = len(words) // CHUNK
    tail = words[rows * CHUNK :]
    whole = (words[: rows * CHUNK].view(rows, CHUNK) * weights).sum(1)
    return torch.cat([whole, (tail * weights[: len(tail)]).sum().unsqueeze(0)])


def _words(tensor: Tensor) -> Tensor:
    """Return the bits as a vector of integers of at most 32 bits.

    Not 64: floats often differ in their highest bits only, which products modulo 2^64 would push out.
    """
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.reshape(-1).contiguous().view({1: torch.int8, 2: torch.int16}.get(real.element_size(), torch.int32))


@lru_cache
def _odd_weights(device: torch.device) -> Tensor:
    # NumPy guarantees that these bits never change, so later versions can compare saved fingerprints.
    table = np.random.PCG64(0).random_raw(CHUNK + MAX_CHUNKS).view(np.int64)
    return torch.from_numpy(table).bitwise_or_(1).to(device)
