"""Fingerprints of tensors, which show whether numbers or their order changed.

A fingerprint is a weighted sum of a tensor's bits, read as integers, modulo 2^64. With odd weights a change of one word
always changes it, and with random 64-bit weights any other change (a swap, a shuffle) is missed with a probability of
about 2^-30. Integer sums do not depend on their order, so threads and devices cannot raise a false alarm.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

CHUNK = 2**18
"""Words per partial sum: after widening to 64 bits they still fit in the processor's cache."""


GENERATOR = 0x2545F4914F6CDD1D
"""A number whose powers modulo 2^64 repeat after 2^62 steps only."""


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 0-d int64 fingerprint of the values of some tensors on one device, without waiting for the device.

    Shapes and dtypes do not enter. Costs one pass over the data, at about 5 GB/s on a core for 32- and 64-bit numbers.
    """
    device, sums = tensors[0].device, []
    weights = _odd_weights(device)
    for tensor in tensors:
        words = _words(tensor)
        wide = weights.new_empty(min(CHUNK, len(words)))  # one small buffer: new ones would take five times as long
        for chunk in words.split(CHUNK):
            sums.append(wide[: len(chunk)].copy_(chunk).mul_(weights[: len(chunk)]).sum())
    chunk_sums = torch.stack(sums)
    return (chunk_sums * weights[CHUNK : CHUNK + len(chunk_sums)]).sum()


def point_prints(tensors: Sequence[Tensor]) -> Tensor:
    """Return a 64-bit number (n,) for each row of some tensors of n rows, equal for equal rows; without waiting.

    Shapes and dtypes do not enter. Bits are mixed, so that sums over points change if points exchange values. Costs
    one pass over the data, as `fingerprint` does.
    """
    device, n = tensors[0].device, len(tensors[0])
    weights = _odd_weights(device)
    # The odd factors of MurmurHash3 and SplitMix64, as signed numbers.
    mixing = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
    prints = torch.zeros(n, dtype=torch.int64, device=device)
    for tensor in tensors:
        words = _words(tensor)
        # Halves of 32 bits: sums of numbers that differ in their highest bits alone would differ in few bits.
        rows = (words if words.element_size() == 1 else words.view(torch.int16)).view(n, -1)
        for i, columns in enumerate(rows.split(CHUNK, 1) if rows.shape[1] else ()):
            prints = prints * weights[CHUNK + i] + _row_sums(columns, weights[: columns.shape[1]])
        for factor in mixing:  # each bit of a print depends on all bits of the row; shifts are unsigned
            prints = (prints ^ ((prints >> 32) & 0xFFFFFFFF)) * factor
        prints = prints ^ ((prints >> 32) & 0xFFFFFFFF)
    return prints


def ordered_sum(prints: Tensor, start: int = 0) -> Tensor:
    """Return Σ_i g^(start + i) u_i modulo 2^64, 0-d, for the prints u of points in order, after `start` others.

    Sums of parts, each with its own start, add up to the sum of the whole; see `join_sums` for parts without one.
    """
    powers = torch.full_like(prints, GENERATOR).cumprod(0)
    return (powers * prints).sum() * in_64_bits(pow(GENERATOR, start, 2**64))


def join_sums(sums: Sequence[int], counts: Sequence[int]) -> int:
    """Return the `ordered_sum` of consecutive parts, given the sum of each from start 0 and its number of points."""
    starts = accumulate(counts, initial=0)
    return in_64_bits(sum(total * pow(GENERATOR, start, 2**64) for total, start in zip(sums, starts)))


def in_64_bits(number: int) -> int:
    """Return a whole number modulo 2^64, as a signed integer."""
    return (number + 2**63) % 2**64 - 2**63


def in_single(tensor: Tensor) -> Tensor:
    """Round a floating-point tensor to single precision, so that its copy in double precision has its fingerprint."""
    if tensor.is_complex():
        return tensor.to(torch.complex64)
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor


def _row_sums(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each row, a few rows at a time: widened to 64 bits they stay in the cache."""
    step = max(1, CHUNK // rows.shape[1]) * (1 if rows.device.type == "cpu" else 64)
    return torch.cat([some.to(torch.int64).mul_(weights).sum(1) for some in rows.split(step)])


def _words(tensor: Tensor) -> Tensor:
    """Return the bits as a vector of integers of at most 32 bits.

    Not 64: floats often differ in their highest bits only, which products modulo 2^64 would push out.
    """
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = real.detach().reshape(-1)
    if flat.stride(0) != 1:  # a single number is contiguous with any stride, but cannot be viewed with another dtype
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view({1: torch.int8, 2: torch.int16}.get(real.element_size(), torch.int32))


@lru_cache
def _odd_weights(device: torch.device) -> Tensor:
    # NumPy guarantees that these bits never change, so later versions can compare saved fingerprints.
    most_chunks = 2**16  # in one call, 16 G words in total
    table = np.random.PCG64(0).random_raw(CHUNK + most_chunks).view(np.int64)
    return torch.from_numpy(table).bitwise_or_(1).to(device)
