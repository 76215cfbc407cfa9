"""Solving A X = B for symmetric positive definite A by block conjugate gradients.

>>> import torch
>>> from curvops.linalg.cg import cg
>>> solution = cg(torch.diag(torch.tensor([1.0, 2.0, 4.0])), torch.tensor([1.0, 2.0, 4.0]))
>>> solution.x.round(decimals=4), solution.reasons[0].name
(tensor([1., 1., 1.]), 'CONVERGED')
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Shaped
from linear_operator import LinearOperator
from torch import Tensor

from curvops.linalg.conjugate import Run
from curvops.linalg.directions import BlockDirections, ColumnDirections
from curvops.linalg.refinement import Callback, refined
from curvops.linalg.results import Reason, Solution
from curvops.linalg.vectors import Matrix, as_block, columns, describe_square, largest, norm, product

MOST_ITERATIONS = 10_000


@runtime_checkable
class Multiplies(Protocol):
    """Anything that a block of vectors can be multiplied by with ``@``."""

    def __matmul__(self, other: Tensor, /) -> Tensor:
        """The product with a block."""


Preconditioner: TypeAlias = Multiplies | Callable[[Tensor], Tensor] | Tensor | LinearOperator


def cg(
    A: Matrix,
    B: Shaped[Tensor, "n *K"],
    *,
    preconditioner: Preconditioner | None = None,
    rtol: float | int = 1e-6,
    maxiter: int | None = None,
    x0: Tensor | None = None,
    callback: Callback | None = None,
    block: bool = True,
    refine: bool = False,
) -> Solution:
    """Solve A x = b for every column b of B; failures come back as reasons, never as answers.

    Args:
        A: (n, n), symmetric positive definite.
        B: (n,) or (n, K). Columns may be zero, dependent, of any scale, or more than n.
        preconditioner: M⁻¹ as an object with ``@``, a matrix, or a function on blocks (n, k).
        rtol: a column has converged when its true residual ‖b − Ax‖ is at most rtol ‖b‖. 0 asks for all the dtype has.
        maxiter: most block products; by default 10 n, at least 100, at most 10 000.
        x0: initial guess, shaped as B.
        callback: called as ``callback(iteration, relative_residuals (K,))`` in every iteration.
        block: search all columns' directions together; False gives K textbook recurrences that share the product.
        refine: iterative refinement with residuals in float64, ``A.to(torch.float64)``. The answer is float64.

    Returns:
        A Solution; ``x`` is shaped as B. One iteration costs one product per active column. Each column's residual is
        recomputed every 50 iterations and at its end, one product each.

    Raises:
        TypeError: A, B or x0 is not of one real floating dtype.
        ValueError: shapes or devices do not fit, A is not square, or rtol or maxiter is negative.

    Source: O'Leary 1980, with orthonormal directions and dependent ones dropped (Ji & Li 2017); residual replacement
    as in van der Vorst & Ye 2000.
    """
    n = _check(A, B, float(rtol), maxiter, x0)
    maxiter = min(max(10 * n, 100), MOST_ITERATIONS) if maxiter is None else maxiter
    wide = B.reshape(n, -1)
    start = None if x0 is None else x0.reshape(n, -1)
    apply = _applied(preconditioner)
    with torch.no_grad():
        if refine:
            solution = refined(A, wide, start, partial(_solve, A, apply, block), float(rtol), maxiter, callback)
        else:
            solution = _solve(A, apply, block, wide, start, float(rtol), maxiter, callback)
    return solution if B.ndim == 2 else replace(solution, x=solution.x.squeeze(1))


def _check(A: Matrix, B: Tensor, rtol: float, maxiter: int | None, x0: Tensor | None) -> int:
    n, _, dtype, device = describe_square(A)
    for name, V in (("B", B), ("x0", x0)):
        if V is None:
            continue
        if V.dtype != dtype:
            raise TypeError(f"{name} must have A's dtype {dtype}, got {V.dtype}.")
        if V.device != device:
            raise ValueError(f"{name} must be on A's device {device}, got {V.device}.")
    if B.ndim not in (1, 2) or B.shape[0] != n:
        raise ValueError(f"B must have shape ({n},) or ({n}, K) for A of {n} x {n}, got {tuple(B.shape)}.")
    if x0 is not None and x0.shape != B.shape:
        raise ValueError(f"x0 must be shaped as B, {tuple(B.shape)}, got {tuple(x0.shape)}.")
    if not rtol >= 0:
        raise ValueError(f"rtol must not be negative, got {rtol}.")
    if maxiter is not None and maxiter < 0:
        raise ValueError(f"maxiter must not be negative, got {maxiter}.")
    return n


def _applied(preconditioner: Preconditioner | None) -> Callable[[Tensor], Tensor]:
    if preconditioner is None:
        return lambda V: V
    if isinstance(preconditioner, (Tensor, LinearOperator)):
        return product(preconditioner)
    if isinstance(preconditioner, Multiplies):
        known = preconditioner
        return lambda V: known @ V
    if callable(preconditioner):
        return preconditioner
    kind = type(preconditioner).__name__
    raise TypeError(f"preconditioner must be a matrix, have __matmul__, or be a function on blocks, got {kind}.")


def _solve(
    A: Matrix,
    precondition: Callable[[Tensor], Tensor],
    block: bool,
    B: Tensor,
    X0: Tensor | None,
    rtol: float,
    maxiter: int,
    callback: Callback | None,
) -> Solution:
    """Scale each column to unit norm, leave out those that need no solve, run, and put all together."""
    multiply = product(A)
    heights = largest(B).cpu()
    reasons = dict.fromkeys((heights == 0).nonzero().squeeze(1).tolist(), Reason.ZERO_RIGHT_HAND_SIDE)
    reasons |= dict.fromkeys((~torch.isfinite(heights)).nonzero().squeeze(1).tolist(), Reason.NON_FINITE)
    live = torch.tensor([j for j in range(B.shape[1]) if j not in reasons], dtype=torch.long)
    height = heights[live].to(B)
    unit = columns(B, live) / height
    lengths = norm(unit).to(B)
    unit = unit / lengths
    X = torch.zeros_like(unit) if X0 is None else as_block(columns(X0, live) / height / lengths)
    R = as_block(unit)
    if X0 is not None and len(live):
        R -= multiply(X)
    eps = torch.finfo(B.dtype).eps
    directions = (BlockDirections if block else ColumnDirections)(20 * eps)
    run = Run(multiply, precondition, directions, unit, X, R, rtol, maxiter, _spread(callback, live, B.shape[1]))
    run.matvecs = 0 if X0 is None else len(live)
    run.solve()
    return _assemble(run, B, X * lengths * height, live, reasons)


def _spread(callback: Callback | None, live: Tensor, K: int) -> Callback | None:
    """The callback on all columns, those without a solve showing 0."""
    if callback is None:
        return None
    return lambda iteration, residuals: callback(iteration, torch.zeros(K).double().index_copy(0, live, residuals))


def _assemble(run: Run, B: Tensor, X: Tensor, live: Tensor, known: dict[int, Reason]) -> Solution:
    K = B.shape[1]
    reasons = known | {column: run.reasons[j] for j, column in enumerate(live.tolist())}
    residuals, backward = torch.zeros(2, K, dtype=torch.float64)
    residuals[live] = torch.tensor(run.best, dtype=torch.float64)
    backward[live] = torch.tensor(run.backward, dtype=torch.float64)
    history = torch.zeros(len(run.history), K, dtype=torch.float64)
    history[:, live] = torch.tensor(run.history, dtype=torch.float64).reshape(len(run.history), len(live))
    x = torch.zeros(K, len(B), dtype=B.dtype, device=B.device).mT
    x[:, live.to(B.device)] = X
    overflowed = ~torch.isfinite(largest(x)).cpu()
    for j in range(K):
        if bool(overflowed[j]):
            reasons[j] = Reason.NON_FINITE
        if known.get(j) is Reason.NON_FINITE:
            x[:, j] = math.nan
        if reasons[j] is Reason.NON_FINITE and (bool(overflowed[j]) or j in known):
            residuals[j] = backward[j] = math.inf
    ordered = tuple(reasons[j] for j in range(K))
    converged = torch.tensor([r in (Reason.CONVERGED, Reason.ZERO_RIGHT_HAND_SIDE) for r in ordered], dtype=torch.bool)
    return Solution(x, ordered, converged, residuals, backward, run.iteration, run.matvecs, history)
