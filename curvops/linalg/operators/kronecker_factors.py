"""The factors of Kronecker products: what rounding to their dtype removed, and their eigendecompositions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.ambient import PATIENCE, Memories, Memory, Progress, hold, progress_bar, room_in
from curvops.checks import carries_graph
from curvops.errors import NotPositiveSemidefiniteError
from curvops.linalg.core.structure import eigh_in_place
from curvops.linalg.operators.closed_form import not_finite
from curvops.linalg.operators.given_matrix import round_with_rest

AT_ONCE = 2**26
"""From this many operations on, eigendecompositions run in parallel, since LAPACK gains little from threads."""
WORK_COPIES = 3
"""Matrices in float64 that a decomposition holds: the factor, whose memory its vectors take, and two for LAPACK."""


@dataclass(frozen=True, eq=False)
class Details:
    """The parts of a factor that rounding to its dtype removed, for its eigendecomposition.

    `rest` (g, m, m) is added to the factor in float64; `root` (g, r, m) gives the factor as rootᵀ root; `rounding` is
    the largest error of the factor's eigenvalues, relative to the largest one, if it is a sum of many terms; and
    `of_rows` is the error of the rows whose outer products are summed, relative to the root of the factor's trace.
    """

    rest: Tensor | None = None
    root: Tensor | None = None
    rounding: float = 0.0
    of_rows: float = 0.0

    def map(self, change: Any, change_root: Any) -> Details:
        """Return the details of a changed factor."""
        rest, root = self.rest, self.root
        rest, root = None if rest is None else change(rest), None if root is None else change_root(root)
        return replace(self, rest=rest, root=root)

    def formed(self, factor: Tensor) -> tuple[Tensor, Details]:
        """Return the factor without a root, with `rest` instead, to be changed by more than a multiple."""
        if self.root is None:
            return factor, self
        matrix, rest = round_with_rest(to_double(factor, self), factor.dtype)
        return matrix, replace(self, rest=rest, root=None)

    def block(self, factor: Tensor, indices: slice) -> tuple[Tensor, Details]:
        """Return a diagonal block of the factor, and its details."""
        return factor[:, indices, indices], self.map(
            lambda rest: rest[:, indices, indices], lambda root: root[:, :, indices]
        )

    @property
    def short_root(self) -> Tensor | None:
        """The root, if it has fewer rows than columns, so that eigenvectors are cheaper from it."""
        return self.root if self.root is not None and self.root.shape[1] < self.root.shape[2] else None


Factor = tuple[Tensor, Details, str]


def decompositions(
    factors: Sequence[Factor], progress: Progress = None, memory: Memory | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Run `_eigh` on each factor; on a CPU large ones run in parallel, sharing torch's threads."""
    costs = list(map(operations, factors))
    tensors = [factor for factor, *_ in factors]
    if sum(costs) < AT_ONCE or any(tensor.is_cuda for tensor in tensors) or carries_graph(tensors):
        return [_eigh(*factor) for factor in factors]
    threads = torch.get_num_threads()
    numbers = (len(tensor) * tensor.shape[2] ** 2 for tensor in tensors if tensor.ndim == 3)
    held = sorted((8 * WORK_COPIES * number for number in numbers), reverse=True)
    memories: Memories = frozenset() if memory is None else frozenset((memory,))
    workers = max(1, min(threads, math.ceil(sum(costs) / max(costs))))
    if memory is not None and workers > 1:
        room = room_in(memories)
        workers = max(1, min(workers, sum(total <= (room or 0) for total in accumulate(held))))
    inference = torch.is_inference_mode_enabled()

    def work(factor: Factor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(inference), torch.no_grad():  # each thread has its own modes
            return _eigh(*factor)

    limit: Callable[[int], None] = torch.set_num_threads
    try:
        with (
            hold(memories, sum(held[:workers])),
            progress_bar("eigendecompositions", len(factors), progress) as steps,
            ThreadPoolExecutor(workers, initializer=limit, initargs=(threads // workers,)) as pool,
        ):
            largest_first = sorted(range(len(factors)), key=lambda i: -costs[i])
            futures = {i: pool.submit(work, factors[i]) for i in largest_first}
            waiting = set(futures.values())
            try:
                while waiting:
                    done, waiting = wait(waiting, PATIENCE, FIRST_COMPLETED)
                    steps.advance(len([future.result() for future in done]))  # raises the error of any that failed
                return [futures[i].result() for i in range(len(factors))]
            finally:
                pool.shutdown(wait=False, cancel_futures=True)  # after an interruption no other one starts
    finally:
        torch.set_num_threads(threads)  # for later threads


def operations(factor: Factor) -> int:
    """Return the order of magnitude of the operations that an eigendecomposition takes."""
    tensor, details, _ = factor
    if tensor.ndim == 2:
        return 0
    root = details.short_root
    return tensor.shape[0] * tensor.shape[2] ** 2 * (tensor.shape[2] if root is None else root.shape[1])


def _eigh(factor: Tensor, details: Details, name: str) -> tuple[Tensor, Tensor]:
    """Return eigenvalues (g, m) in float64, zero within rounding, and vectors in the factor's dtype, or ones."""
    try:
        if factor.ndim == 2:
            values, vectors = factor.double(), torch.ones_like(factor)
        else:
            values, vectors = _eigh_of_matrix(factor, details)
        return without_rounding(values, factor, details, name), vectors
    except (RuntimeError, NotPositiveSemidefiniteError) as error:  # LAPACK's, or that of eigenvalues which are NaN
        if bool(factor.isfinite().all()):
            raise
        raise not_finite(f"the {name} factor of a Kronecker product", factor.dtype) from error


def _eigh_of_matrix(factor: Tensor, details: Details) -> tuple[Tensor, Tensor]:
    """Return eigenvalues of matrices, or of the rows that stand for them, and vectors in the factor's dtype."""
    if (root := details.short_root) is not None:
        return _eigh_of_root(root)
    matrix = to_double(factor, details)
    if matrix.requires_grad:
        values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    else:
        values, vectors = torch.linalg.eigh(matrix) if matrix is factor else eigh_in_place(matrix)
    return values, vectors.to(factor.dtype)


def without_rounding(values: Tensor, factor: Tensor, details: Details, name: str) -> Tensor:
    """Return eigenvalues with zeros in place of those within rounding of zero; raise if one is below that."""
    m, eps = factor.shape[-1], torch.finfo(factor.dtype).eps
    # A sum of many outer products in the factor's dtype is this far from being positive semi-definite.
    slack, noise = 0.0 if factor.ndim == 2 else max(eps**0.5, 10 * m * eps), noise_of(details, factor)
    eigenvalues = values.detach()
    least, largest = eigenvalues.aminmax(dim=1, keepdim=True)
    if not all(0 <= margin < math.inf for margin in (least + slack * largest).flatten().tolist()):  # false for NaN
        ends = f"from {float(least.min()):.3g} to {float(largest.max()):.3g}"
        raise NotPositiveSemidefiniteError(f"the {name} factor of a Kronecker product has eigenvalues {ends}.")
    return values - eigenvalues.masked_fill(eigenvalues > noise * largest, 0)


def noise_of(details: Details, factor: Tensor) -> float:
    """Return the relative error of a factor's eigenvalues, including that of its decomposition in float64."""
    if factor.ndim == 2:
        return 0.0
    return max(10 * factor.shape[2] * torch.finfo(torch.float64).eps, details.rounding)


def to_double(factor: Tensor, details: Details) -> Tensor:
    """Return the factor in float64, with the part that rounding to its dtype removed."""
    if details.root is not None:
        rows = details.root.double()
        return rows.mT @ rows
    return factor.double() if details.rest is None else factor.double() + details.rest


def _eigh_of_root(root: Float[Tensor, "g r m"]) -> tuple[Tensor, Tensor]:
    """Return the eigendecomposition of rootᵀ root from that of root rootᵀ, (r, r) in float64, ascending.

    QR orders the eigenvectors by decreasing eigenvalues, so that rounding remains in the smallest ones, and completes
    them by a basis of the null space.
    """
    g, r, m = root.shape
    rows = root.double()
    values, inner = torch.linalg.eigh(rows @ rows.mT)
    values, inner = values.flip(1), inner.flip(2)
    floor = (r * torch.finfo(torch.float64).eps * values[:, :1].abs()).clamp_min(torch.finfo(torch.float64).tiny)
    outer = (rows.mT @ inner.mul_(values.clamp_min(floor).rsqrt().unsqueeze(1))).to(root.dtype)
    del rows, inner  # before the vectors, which take far more
    vectors = torch.linalg.qr(outer, mode="complete").Q
    values = torch.cat([values, values.new_zeros(g, m - r)], 1)
    return values.flip(1), vectors.flip(2)
