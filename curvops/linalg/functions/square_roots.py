"""A^½ B and A^-½ B for a symmetric positive (semi)definite matrix A known by its products.

>>> import torch
>>> from curvops.linalg import inverse_sqrt, sqrt
>>> A = torch.diag(torch.tensor([1.0, 4.0, 16.0]))
>>> sqrt(A, torch.ones(3)).value.round(decimals=4)
tensor([1., 2., 4.])
>>> inverse_sqrt(A, torch.ones(3)).value.round(decimals=4)
tensor([1.0000, 0.5000, 0.2500])
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Shaped

from curvops.ambient import current_run
from curvops.checks import check_callable, checked_number
from curvops.linalg.core.results import FunctionProduct
from curvops.linalg.core.sharded import algorithm
from curvops.linalg.core.vectors import Given, Matrix, Vectors, as_matrix
from curvops.linalg.functions.apply_function import apply_function
from curvops.linalg.solvers.systems import Callback
from curvops.progress import Progress


@algorithm
def inverse_sqrt(
    A: Matrix | Given,
    B: Shaped[Vectors, "n *K"],
    *,
    lower_bound: float | int | None = None,
    rtol: float | int = 1e-6,
    maxiter: int | None = None,
    max_matvecs: int | None = None,
    memory_budget: int | None = None,
    callback: Callback | None = None,
    progress: Progress = None,
) -> FunctionProduct:
    """Compute A^-½ b, with the symmetric root, for every column b of B (n,) or (n, K) and positive definite A.

    Args:
        A: (n, n), symmetric positive definite.
        B: a vector (n,) or a block (n, K).
        lower_bound: a known positive lower bound of the spectrum, such as the prior precision. It is not verified.
            Without one, eigenvalues are assumed to exceed eps ‖A‖, and more products are spent on checking that.
        rtol: the relative error to reach.
        maxiter: the largest depth, as in `apply_function`.
        max_matvecs: a limit on products; None is none.
        memory_budget: bytes for the bases; where that is too little, Lanczos runs twice, as in `apply_function`.
        callback: called after each iteration, as in `apply_function`.
        progress: as in `cg`.

    Returns:
        A FunctionProduct as from `apply_function`, with a reason for each column. SINGULAR means that an eigenvalue is
        zero to working precision, and that b has a component along its eigenvector.

    Raises:
        NotPositiveSemidefiniteError: a clearly negative direction was found (it is also a ValueError).

    Source: Ilić, Turner & Simpson 2010.

    Examples:
        >>> A = torch.diag(torch.tensor([4.0, 25.0]).double())
        >>> co.linalg.inverse_sqrt(A, torch.ones(2).double()).value.round(decimals=6)
        tensor([0.5000, 0.2000], dtype=torch.float64)
    """
    A = as_matrix(A, B)
    return _root(
        A,
        B,
        True,
        lower_bound,
        rtol=rtol,
        maxiter=maxiter,
        max_matvecs=max_matvecs,
        callback=callback,
    )


@algorithm
def sqrt(
    A: Matrix | Given,
    B: Shaped[Vectors, "n *K"],
    *,
    lower_bound: float | int | None = None,
    rtol: float | int = 1e-6,
    maxiter: int | None = None,
    max_matvecs: int | None = None,
    memory_budget: int | None = None,
    callback: Callback | None = None,
    progress: Progress = None,
) -> FunctionProduct:
    """Compute A^½ b, with the symmetric root, for every column b of B (n,) or (n, K) and positive semidefinite A.

    Args:
        A: (n, n), symmetric positive semidefinite; it may be singular.
        B: a vector (n,) or a block (n, K).
        lower_bound: as in `inverse_sqrt`.
        rtol: the relative error to reach.
        maxiter: as in `inverse_sqrt`.
        max_matvecs: a limit on products; None is none.
        memory_budget: as in `inverse_sqrt`.
        callback: as in `apply_function`.
        progress: as in `cg`.

    Returns:
        A FunctionProduct as from `apply_function`, with a reason for each column.

    Raises:
        NotPositiveSemidefiniteError: a clearly negative direction was found (it is also a ValueError).

    Source: as `inverse_sqrt`.

    Examples:
        >>> A = torch.diag(torch.tensor([4.0, 25.0]).double())
        >>> co.linalg.sqrt(A, torch.ones(2).double()).value.round(decimals=6)
        tensor([2., 5.], dtype=torch.float64)
    """
    A = as_matrix(A, B)
    return _root(
        A,
        B,
        False,
        lower_bound,
        rtol=rtol,
        maxiter=maxiter,
        max_matvecs=max_matvecs,
        callback=callback,
    )


def _root(
    A: Matrix,
    B: Vectors,
    inverse: bool,
    lower_bound: float | int | None,
    **options: Any,
) -> FunctionProduct:
    check_callable("callback", options["callback"])
    if lower_bound is not None:
        checked_number("lower_bound", lower_bound, "[0, inf)")
    bound = float(lower_bound) if lower_bound else (None if inverse else 0.0)
    current_run().expect(options["max_matvecs"])
    return apply_function(A, torch.rsqrt if inverse else torch.sqrt, B, lower_bound=bound, **options)
