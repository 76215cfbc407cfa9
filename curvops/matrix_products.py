"""Matrix products by the library that is fastest on the processor.

torch multiplies float32 matrices on a CPU by Intel's MKL, which has AVX-512 kernels for Intel's processors alone. On
AMD's processors that have AVX-512 it reaches half of the speed of oneDNN, which torch comes with as well.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checks import in_transform

LEAST = 2**21
"""The multiply-adds of a product from which on oneDNN is faster; a call of it takes longer."""


def multiply(
    a: Float[Tensor, "m k"], b: Float[Tensor, "k n"], added: Float[Tensor, " n"] | None = None
) -> Float[Tensor, "m n"]:
    """Return a b, plus a vector in every row if one is given."""
    if _is_slow(a, b):
        row = None if added is None else added.contiguous()  # oneDNN does not look at its stride
        found: Tensor = torch.ops.mkldnn._linear_pointwise(_packed(a), _packed(b).mT, row, "none", [], "")
        return found
    return a @ b if added is None else torch.addmm(added, a, b)


def _packed(matrix: Tensor) -> Tensor:
    """Return a matrix with contiguous rows or columns; for a part of a wider one oneDNN takes 1,000 times as long."""
    return matrix if matrix.is_contiguous() or matrix.mT.is_contiguous() else matrix.contiguous()


def _is_slow(a: Tensor, b: Tensor) -> bool:
    """Return whether oneDNN is faster than `a @ b`, and nothing is to be differentiated, which it cannot be."""
    return (
        len(a) * b.numel() >= LEAST
        and a.dtype == b.dtype == torch.float32
        and type(a) is type(b) is Tensor
        and a.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not in_transform()
        and torch._C._get_mkldnn_enabled()
        and _is_of_amd()
    )


@functools.cache
def _is_of_amd() -> bool:
    """Return whether the processor is AMD's and has AVX-512, and torch has both libraries."""
    described = Path("/proc/cpuinfo")
    text = described.read_text() if described.exists() else platform.processor()
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    is_wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return "AuthenticAMD" in text and is_wide and both and hasattr(torch.ops.mkldnn, "_linear_pointwise")
