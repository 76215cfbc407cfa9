"""Solving A X = B for symmetric A, indefinite or singular, by the minimum-residual method MINRES-QLP.

>>> import torch
>>> from curvops.linalg.solvers.minres import minres
>>> solution = minres(torch.diag(torch.tensor([1.0, -2.0, 0.0])), torch.tensor([1.0, 2.0, 0.0]))
>>> solution.x.round(decimals=4) + 0.0, solution.reasons[0].name
(tensor([ 1., -1.,  0.]), 'CONVERGED')
"""

from __future__ import annotations

import torch
from jaxtyping import Shaped
from torch import Tensor

from curvops.linalg.core.results import Solution
from curvops.linalg.core.vectors import Matrix, describe_square, product
from curvops.linalg.solvers.minimal_residual import Run
from curvops.linalg.solvers.systems import (
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

VECTORS = 16
"""Working vectors per right-hand side, temporaries included."""


def minres(
    A: Matrix,
    B: Shaped[Tensor, "n *K"],
    *,
    shift: float | int = 0.0,
    preconditioner: Preconditioner | None = None,
    rtol: float | int = 1e-6,
    maxiter: int | None = None,
    x0: Tensor | None = None,
    callback: Callback | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> Solution:
    """Solve (A + shift I) x = b for every column b of B, and in the least-squares sense where there is no solution.

    Args:
        A: (n, n), symmetric; it may be indefinite or singular.
        B: (n,) or (n, K). The columns share the block product and nothing else.
        shift: added to the diagonal; of any sign.
        preconditioner: M⁻¹, symmetric positive definite, as in `cg`.
        rtol: a column has converged when its true residual is at most rtol ‖b‖. 0 asks for all the dtype has.
        maxiter: most block products; by default 10 n, at least 100, at most 10 000.
        x0: initial guess, shaped as B.
        callback: called as ``callback(iteration, relative_residuals (K,))`` in every iteration.
        memory_budget: bytes for the working vectors; columns are solved in groups that fit, of at least one column.
            None is what the linearisation behind A has left of its own budget.
        progress: as in `cg`.

    Returns:
        A Solution. Of all solutions (CONVERGED), or of all minimisers of the residual (SINGULAR: b leaves the range), x
        is the one nearest to x0 (without x0, of least norm) in the preconditioner's metric. Minimisers have at least a
        third of the digits, as ``normal_residuals`` shows. NOT_SYMMETRIC says that ⟨u, Av⟩ = ⟨Au, v⟩ does not hold.
        An iteration costs one product per active column; a check of the true residual, every 50 iterations and at the
        end, one more, and one for A r where the residual stagnates.

    Raises:
        TypeError: A, B or x0 is not of one real dtype, float32 or float64.
        ValueError: shapes or devices do not fit, A is not square, the preconditioner is not positive definite, or
            rtol, maxiter or memory_budget is negative.

    Source: Choi, Paige & Saunders 2011, MINRES-QLP, restarted from the true residual where rounding has taken over.
    """
    facts = describe_square(A)
    check(facts, B, float(rtol), maxiter, x0, memory_budget)
    n, sigma = facts.rows, float(shift)
    limit = iterations_allowed(n, maxiter)
    plain, multiply = product(A), product(A)
    if sigma:
        multiply = lambda V: plain(V) + sigma * V  # noqa: E731
    precondition = None if preconditioner is None else applied(preconditioner)

    def solve(part: Tensor, start: Tensor | None) -> Solution:
        system = Columns.of(part, start, facts)
        run = Run(multiply, precondition, system, start is not None, float(rtol), limit, callback)
        run.solve()
        return system.solution(run.records)

    with torch.no_grad(), at_work("minres", None, progress, A):
        start = None if x0 is None else x0.reshape(n, -1)
        return shaped_as(in_groups(solve, A, B.reshape(n, -1), start, VECTORS, memory_budget), B)
