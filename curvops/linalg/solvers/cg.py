"""Solving A X = B for symmetric positive definite A by block conjugate gradients.

>>> import torch
>>> from curvops.linalg.solvers.cg import cg
>>> solution = cg(torch.diag(torch.tensor([1.0, 2.0, 4.0])), torch.tensor([1.0, 2.0, 4.0]))
>>> solution.x.round(decimals=4), solution.reasons[0].name
(tensor([1., 1., 1.]), 'CONVERGED')
"""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Shaped

from curvops.linalg.core.results import Solution
from curvops.linalg.core.vectors import Matrix, Vectors, as_block, as_columns, describe_square, product
from curvops.linalg.solvers.conjugate import Run
from curvops.linalg.solvers.directions import BlockDirections, ColumnDirections
from curvops.linalg.solvers.refinement import refined
from curvops.linalg.solvers.systems import (
    Block,
    Callback,
    Columns,
    Preconditioner,
    applied,
    check,
    in_groups,
    iterations_allowed,
    shaped_as,
)
from curvops.progress import Progress, at_work

VECTORS = 12
"""Working vectors per right-hand side, temporaries included."""
REFINED = 16
"""As many more for iterative refinement: what it keeps in float64."""


def cg(
    A: Matrix,
    B: Shaped[Vectors, "n *K"],
    *,
    preconditioner: Preconditioner | None = None,
    rtol: float | int = 1e-6,
    maxiter: int | None = None,
    x0: Vectors | None = None,
    callback: Callback | None = None,
    block: bool = True,
    refine: bool | torch.dtype = False,
    memory_budget: int | None = None,
    progress: Progress = None,
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
        refine: iterative refinement with residuals in float64, ``A.to(torch.float64)``. The answer is float64. True
            solves for corrections in A's dtype; torch.float32 in ``A.to(torch.float32)``, so that of the products with
            a float64 operator only ``exact_matvecs``, one per column and four digits, are taken in float64.
        memory_budget: bytes for the working vectors; columns are solved in groups that fit, of at least one column.
            None is what the linearisation behind A has left of its own budget.
        progress: None shows a bar of the products on a terminal after two seconds, True wherever standard error leads,
            False nothing at all. A function (what, products so far, total or None) is called after each product.

    Returns:
        A Solution; ``x`` is shaped as B. One iteration costs one product per active column. Each column's residual is
        recomputed every 50 iterations and at its end, one product each.

    Raises:
        TypeError: A, B or x0 is not of one real dtype, float32 or float64 (half precision is for storage: solve with
            ``A.to(torch.float32)``, which loses nothing).
        ValueError: shapes or devices do not fit, A is not square, rtol, maxiter or memory_budget is negative, or refine
            is a dtype other than these.

    Source: O'Leary 1980, with orthonormal directions and dependent ones dropped (Ji & Li 2017); residual replacement
    as in van der Vorst & Ye 2000.
    """
    facts = describe_square(A)
    check(facts, B, float(rtol), maxiter, x0, memory_budget)
    if not isinstance(refine, bool) and refine not in (torch.float32, torch.float64):
        raise ValueError(f"refine must be True, False, torch.float32 or torch.float64, got {refine}.")
    maxiter = iterations_allowed(facts.rows, maxiter)
    start = None if x0 is None else as_columns(x0)
    apply = applied(preconditioner)

    low = facts.dtype if isinstance(refine, bool) else refine

    def solve(part: Vectors, start: Vectors | None) -> Solution:
        if refine is False:
            return _solve(A, apply, block, part, start, float(rtol), maxiter, callback)
        correct = partial(_solve, A.to(low), _in_dtype(apply, facts.dtype), block)
        return refined(A.to(torch.float64), low, part, start, correct, float(rtol), maxiter, callback)

    vectors = VECTORS + (0 if refine is False else REFINED)
    with torch.no_grad(), at_work("cg", None, progress, A):
        return shaped_as(in_groups(solve, A, as_columns(B), start, vectors, memory_budget), B)


def _in_dtype(precondition: Block, dtype: torch.dtype) -> Block:
    """The preconditioner in the dtype it was made for, on blocks of another."""
    return lambda V: precondition(V.to(dtype)).to(V.dtype)


def _solve(
    A: Matrix,
    precondition: Block,
    block: bool,
    B: Vectors,
    X0: Vectors | None,
    rtol: float,
    maxiter: int,
    callback: Callback | None,
) -> Solution:
    """Scale each column to unit norm, leave out those that need no solve, run, and put all together."""
    multiply = product(A)
    system = Columns.of(B, X0, B)
    R = as_block(system.unit)
    if X0 is not None and len(system.live):
        R -= multiply(system.X)
    directions = (BlockDirections if block else ColumnDirections)(20 * torch.finfo(B.dtype).eps)
    callback = system.spread(callback)
    run = Run(multiply, precondition, directions, system.unit, system.X, R, rtol, maxiter, callback)
    run.matvecs = 0 if X0 is None else len(system.live)
    run.solve()
    return system.solution(run)
