"""Least squares min ‖Ax − b‖² + damp² ‖x‖² for rectangular A, by LSMR.

>>> import torch
>>> from curvops.linalg.solvers.lsmr import lsmr
>>> A = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
>>> solution = lsmr(A, torch.tensor([1.0, 2.0, 3.0]))
>>> solution.x.round(decimals=4), solution.reasons[0].name, bool(solution.relative_residuals[0] > 0.5)
(tensor([1., 1.]), 'CONVERGED', True)
"""

from __future__ import annotations

import torch
from jaxtyping import Shaped
from torch import Tensor

from curvops.linalg.core.results import Solution
from curvops.linalg.core.vectors import Matrix, describe, product, transposed_product
from curvops.linalg.solvers.bidiagonal import Run
from curvops.linalg.solvers.stacked import Augmented
from curvops.linalg.solvers.systems import Callback, Columns, check, in_groups, iterations_allowed, shaped_as
from curvops.progress import Progress, at_work

VECTORS = 14
"""Working vectors per right-hand side, temporaries included."""


def lsmr(
    A: Matrix,
    B: Shaped[Tensor, "m *K"],
    *,
    damp: float | int = 0.0,
    consistent: bool = False,
    rtol: float | int = 1e-6,
    maxiter: int | None = None,
    x0: Tensor | None = None,
    callback: Callback | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> Solution:
    """Minimise ‖Ax − b‖² + damp² ‖x‖² for every column b of B; of all minimisers, the one nearest to x0.

    Args:
        A: (m, n), any shape and rank; its transposed product is needed too.
        B: (m,) or (m, K). The columns share the block products and nothing else.
        damp: the square root of a ridge. Not negative.
        consistent: a solution of Ax = b is wanted: a minimum with a residual above rtol counts as SINGULAR (as
            STAGNATION where rounding hides the minimum: in float32, b less than about 1e-4 ‖b‖ outside the range).
        rtol: a column has converged when ‖b − Ax‖ ≤ rtol ‖b‖ (damp = 0) or ‖Aᵀr − damp² x‖ ≤ rtol ‖A‖ ‖(r, damp x)‖,
            by true products.
        maxiter: most iterations; by default 10 min(m, n), at least 100, at most 10 000.
        x0: initial guess, (n,) or (n, K) as B.
        callback: called as ``callback(iteration, relative_residuals (K,))`` in every iteration.
        memory_budget: bytes for the working vectors; columns are solved in groups that fit, of at least one column.
            None is what the linearisation behind A has left of its own budget.
        progress: as in `cg`.

    Returns:
        A Solution. ``relative_residuals`` says whether a converged column solves Ax = b, ``normal_residuals`` how
        near it is to a minimum. An iteration costs one product of A and one of Aᵀ per active column, and so does each
        check of the true residual, every 50 iterations and at the end.

    Raises:
        TypeError: A, B or x0 is not of one real dtype, float32 or float64.
        ValueError: shapes or devices do not fit, or damp, rtol, maxiter or memory_budget is negative.

    Source: Fong & Saunders 2011. Conjugate gradients on AᵀA would square the condition number in the answer's error.
    """
    facts = describe(A)
    check(facts, B, float(rtol), maxiter, x0, memory_budget)
    if not damp >= 0:
        raise ValueError(f"damp must not be negative, got {damp}.")
    m, n = facts.rows, facts.columns
    limit = iterations_allowed(min(m, n), maxiter)
    operator = Augmented(product(A), transposed_product(A), float(damp))

    def solve(part: Tensor, start: Tensor | None) -> Solution:
        system = Columns.of(part, start, facts)
        run = Run(operator, system, start is not None, consistent, float(rtol), limit, callback)
        run.solve()
        return system.solution(run.records)

    with torch.no_grad(), at_work("lsmr", None, progress, A):
        start = None if x0 is None else x0.reshape(n, -1)
        return shaped_as(in_groups(solve, A, B.reshape(m, -1), start, VECTORS, memory_budget), B)
