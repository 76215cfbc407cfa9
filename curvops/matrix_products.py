"""Matrix products by the library that is fastest on the processor.

torch multiplies float32 matrices on a CPU by Intel's MKL, which has AVX-512 kernels for Intel's processors alone. On
AMD's processors that have AVX-512 it reaches half of the speed of oneDNN, which torch comes with as well. `multiply` is
for our own products, and `fast_products` for those that torch makes in passes through a network.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from curvops.checks import in_functorch, in_transform
from curvops.eager_mode import EagerMode

LEAST = 2**21
"""The multiply-adds of a product from which on oneDNN is faster; a call of it takes longer."""
ADDED_BYTES = 2**22
"""Bytes of a product that is added to another matrix, formed at a time, so that it stays in a cache."""
LEAST_SIDE = 4
"""The least of the three sizes of a product for which oneDNN is faster, as it copies the factors."""
WIDE = 2**18
"""The numbers of a layer's weight from which on its products save more than the mode adds to all operations."""


def multiply(
    a: Float[Tensor, "m k"], b: Float[Tensor, "k n"], added: Float[Tensor, " n"] | None = None
) -> Float[Tensor, "m n"]:
    """Return a b, plus a vector in every row if one is given."""
    if _goes_by_onednn(a, b):
        return _by_onednn(a, b, added)
    return a @ b if added is None else torch.addmm(added, a, b)


def add_product(total: Float[Tensor, "m n"], a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> None:
    """Compute total ← total + a b in place."""
    if not _goes_by_onednn(a, b):
        total.addmm_(a, b)
        return
    step = max(1, ADDED_BYTES // (total.shape[1] * total.element_size()))
    for some, rows in zip(total.split(step), a.split(step)):
        some.add_(multiply(rows, b))


def multiply_each(
    a: Float[Tensor, "g m k"], b: Float[Tensor, "g k n"], out: Float[Tensor, "g m n"] | None = None
) -> Float[Tensor, "g m n"]:
    """Return a_g b_g for each g, in `out` if that is given."""
    if not len(a) or not _goes_by_onednn(a[0], b[0]):
        return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
    if out is None and len(a) == 1:
        return multiply(a[0], b[0]).unsqueeze(0)
    out = a.new_empty(*a.shape[:2], b.shape[2]) if out is None else out
    for left, right, product in zip(a, b, out):
        product.copy_(multiply(left, right))
    return out


class _FastProducts(EagerMode):
    """A mode in which large products of matrices are computed by oneDNN, in forward and in backward passes.

    It acts below automatic differentiation, so that graphs and derivatives are torch's own.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return that the mode is off while torch compiles, as `flex_attention` does without being asked."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and _is_slow(*args):
            return _by_onednn(*args)
        if func is torch.ops.aten.addmm.default and not kwargs and args[0].shape == args[2].shape[1:]:
            added, a, b = args
            if type(added) is Tensor and added.dtype == a.dtype and _is_slow(a, b):
                return _by_onednn(a, b, added)
        return func(*args, **(kwargs or {}))


def fast_products() -> AbstractContextManager[Any]:
    """Return a context in which torch's products are the fastest; it does nothing inside transforms and other modes."""
    if in_functorch() or torch._C._len_torch_dispatch_stack() or not torch._C._get_mkldnn_enabled():
        return nullcontext()
    return _FastProducts()  # type: ignore[no-untyped-call]


def has_slow_products(layers: Iterable[nn.Module]) -> bool:
    """Return whether `fast_products` saves time in passes through these layers: some are wide, on such a processor.

    Older versions of torch refuse operators of higher order, such as `flex_attention`, in a mode.
    """
    knows = hasattr(TorchDispatchMode, "ignore_compile_internals")
    tensors = (p for part in layers if not isinstance(part, nn.Embedding) for p in part._parameters.values())
    return knows and _is_of_amd() and any(p is not None and p.ndim == 2 and p.numel() >= WIDE for p in tensors)


def _by_onednn(a: Tensor, b: Tensor, added: Tensor | None = None) -> Tensor:
    row = None if added is None else added.contiguous()  # oneDNN does not look at its stride
    found: Tensor = torch.ops.mkldnn._linear_pointwise(_packed(a), _packed(b).mT, row, "none", [], "")
    return found


def _packed(matrix: Tensor) -> Tensor:
    """Return a matrix with contiguous rows or columns; for a part of a wider one oneDNN takes 1,000 times as long."""
    return matrix if matrix.is_contiguous() or matrix.mT.is_contiguous() else matrix.contiguous()


def _goes_by_onednn(a: Tensor, b: Tensor) -> bool:
    """Return whether our own product is computed by oneDNN: nothing is to be differentiated, which it cannot be."""
    return not torch.is_grad_enabled() and not in_transform() and _is_slow(a, b)


def _is_slow(a: Tensor, b: Tensor) -> bool:
    """Return whether oneDNN is faster than `a @ b` and can compute it."""
    return (
        len(a) * b.numel() >= LEAST
        and min(*a.shape, b.shape[1]) >= LEAST_SIDE
        and a.dtype == b.dtype == torch.float32
        and type(a) is type(b) is Tensor
        and a.device.type == "cpu"
        and not (a._is_zerotensor() or b._is_zerotensor())  # of forward mode
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
