"""Solving A X = B by the method that suits what is known of A.

>>> import torch
>>> from curvops.linalg import Diagonal, method_for, solve
>>> A = Diagonal(torch.tensor([1.0, 2.0, 4.0]))
>>> method_for(A), solve(A, torch.tensor([1.0, 2.0, 4.0]))
('closed form', tensor([1., 1., 1.]))

| what is known of A                                   | method        |
|------------------------------------------------------|---------------|
| rectangular                                          | `lsmr`        |
| it has a closed form                                 | `closed form` |
| at most 256 rows, or a tensor of at most 2048        | `dense`       |
| positive semidefinite, or a curvature plus a prior   | `cg`          |
| symmetric, by promise, or as far as two products tell | `minres`     |
| none of these                                        | `lsmr`        |
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, cast, get_args, runtime_checkable

import torch
from jaxtyping import Shaped
from linear_operator import LinearOperator, to_linear_operator
from torch import Tensor

from curvops.linalg.core.cache import recorded
from curvops.linalg.core.limits import check_choice, check_limits
from curvops.linalg.core.results import Reason, Solution, converged
from curvops.linalg.core.symmetry import clearly_indefinite, is_known_psd
from curvops.linalg.core.vectors import (
    Matrix,
    describe,
    empty_block,
    inner,
    norm,
    product,
    put,
    random_block,
    require_precision,
)
from curvops.linalg.solvers import implicit
from curvops.linalg.solvers.cg import cg
from curvops.linalg.solvers.lsmr import lsmr
from curvops.linalg.solvers.minres import minres
from curvops.linalg.solvers.systems import Preconditioner
from curvops.progress import Progress, at_work, check_progress

Method: TypeAlias = Literal["closed form", "dense", "cg", "minres", "lsmr"]
DENSE_TENSOR = 2048
"""Rows up to which a tensor, which is there already, is factorised."""
FEW_ROWS = 256
"""Rows up to which a foreign operator is formed."""
MOST_COLUMNS = 128
"""Right-hand sides of one CG block: beyond, the K × K work and the vectors grow faster than the products fall."""


class Promises(NamedTuple):
    """What an operator vouches for. ``definite``: to be solved by CG, for which negative curvature is an error."""

    symmetric: bool
    definite: bool
    small: bool


@runtime_checkable
class Informed(Protocol):
    """An operator that declares its own properties."""

    def promises(self) -> Promises:
        """What it vouches for."""

    def exact_solver(self) -> Callable[..., Tensor] | None:
        """The function (block, rtol) -> A⁻¹ block where there is a closed form."""

    def require_definite(self) -> None:
        """Raise where a closed form shows that A is singular or indefinite."""

    def preconditioner(self, columns: int = 1, *, memory_budget: int | None = None) -> Any:
        """M ≈ A⁻¹ for so many right-hand sides, None where none pays."""


def default_rtol(dtype: torch.dtype) -> float:
    """The relative residual that `solve` promises: 1e-6, tightened towards √eps in float64."""
    return min(1e-6, math.sqrt(torch.finfo(dtype).eps))


def method_for(A: Matrix) -> Method:
    """The method that `solve` takes for A, of the table above. A foreign operator's symmetry costs two products."""
    rows, columns = A.shape[-2:]
    if rows != columns:
        return "lsmr"
    if isinstance(A, Informed):
        known = A.promises()
        if A.exact_solver() is not None:
            return "closed form"
        if known.small:
            return "dense"
        if known.definite:
            return "cg"
        if known.symmetric:
            return "minres"
    elif rows <= (DENSE_TENSOR if isinstance(A, Tensor) else FEW_ROWS):
        return "dense"
    return "minres" if len(A.shape) == 2 and seems_symmetric(A) else "lsmr"


def seems_symmetric(A: Matrix) -> bool:
    """Whether ⟨u, Av⟩ = ⟨v, Au⟩ for two random vectors, to half the digits: wrong with a probability of about √eps."""
    facts = describe(A)
    pair = random_block(facts, 2, "gaussian", torch.Generator().manual_seed(0))
    image = product(A)(pair)
    gap = inner(pair.flip(1), image)
    scale = norm(image).amax() * torch.finfo(facts.dtype).eps ** 0.5
    return bool((gap[0] - gap[1]).abs() <= scale)


@dataclass(frozen=True)
class Options:
    """How a block is solved for."""

    method: Method | None = None
    rtol: float | None = None
    maxiter: int | None = None
    preconditioner: Preconditioner | None = None
    memory_budget: int | None = None
    progress: Progress = None

    def __call__(self, operator: LinearOperator, block: Tensor) -> Tensor:
        """A⁻¹ B for one operator and a vector or block, NotConverged where a column failed. Records no graph."""
        with at_work("solve", None, self.progress, operator):
            return self._solve(operator, block)

    def _solve(self, operator: LinearOperator, block: Tensor) -> Tensor:
        columns = block.unsqueeze(-1) if block.ndim == 1 else block
        method = method_for(operator) if self.method is None else self.method
        rtol = default_rtol(operator.dtype) if self.rtol is None else self.rtol
        if method == "closed form":
            exact = operator.exact_solver() if isinstance(operator, Informed) else None
            if exact is None:
                raise ValueError(f"no closed form of {type(operator).__name__} is known; use method='auto'.")
            found = exact(columns, self.rtol)
        elif method == "dense":
            found = dense(operator, columns, rtol)
        else:
            found = self._iterate(operator, columns, method, rtol)
        return found.squeeze(-1) if block.ndim == 1 else found

    def _iterate(self, operator: LinearOperator, columns: Tensor, method: Method, rtol: float) -> Tensor:
        common: dict[str, Any] = {"rtol": rtol, "maxiter": self.maxiter, "memory_budget": self.memory_budget}
        if method == "lsmr":
            square = operator.shape[-1] == operator.shape[-2]
            return accept(lsmr(operator, columns, consistent=square, **common), rtol)
        common["preconditioner"] = self.preconditioner
        if method == "minres":
            return accept(minres(operator, columns, **common), rtol)
        if self.preconditioner is None and isinstance(operator, Informed):
            common["preconditioner"] = operator.preconditioner(columns.shape[-1], memory_budget=self.memory_budget)
        if columns.shape[1] <= MOST_COLUMNS:
            return accept(cg(operator, columns, **common), rtol)
        X = empty_block(columns, columns.shape[1])
        for start in range(0, columns.shape[1], MOST_COLUMNS):
            part = columns[:, start : start + MOST_COLUMNS]
            put(X, start, accept(cg(operator, part, **common), rtol))
        return X


def solve(
    A: Matrix,
    B: Shaped[Tensor, "*batch"],
    *,
    method: str = "auto",
    rtol: float | None = None,
    maxiter: int | None = None,
    preconditioner: Preconditioner | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> Tensor:
    """A⁻¹ B for B (n,), (n, K) or (..., n, K), or the least-squares solution of least norm where A is rectangular.

    Differentiable in B and the tensors inside A, at the cost of one more solve in the backward pass (up to three for
    a rectangular A). The solvers themselves (`cg`, `minres`, `lsmr`) return a `Solution` with residuals and reasons.

    Args:
        A: a tensor or operator; what is known about it decides the method, see `method_for`.
        B: the right-hand sides.
        method: "auto", or one of the table's.
        rtol: the true relative residual to be reached; None: 1e-6, in float64 1.5e-8.
        maxiter: most iterations of an iterative method.
        preconditioner: as in `cg`; without one, operators of ours bring their own to `cg`.
        memory_budget: bytes for the working vectors of an iterative method, and as many for the sketch that operators
            of ours bring as a preconditioner; one that was kept from an earlier solve is used whatever its size. None
            is what the linearisation behind A has left of its own budget, for both together.
        progress: as in `cg`.

    Raises:
        TypeError: A and B are not of one real dtype, float32 or float64.
        NotConverged: a column was not solved for; the error carries the `Solution` and its reasons.
        NotPositiveDefinite: A, a curvature plus a prior or under `cg`, is indefinite. It is also linear_operator's
            NotPSDError. A closed form raises NotPositiveSemidefinite. To solve with an indefinite A, name the method.
        ValueError: shapes do not fit, the method does not exist, or a limit is negative or not finite.
    """
    check_choice("method", method, ("auto", *get_args(Method)))
    if not A.dtype.is_floating_point or B.dtype != A.dtype:
        raise TypeError(f"A and B must have one real floating dtype, got {A.dtype} and {B.dtype}.")
    require_precision(A.dtype)
    if not A.shape.numel():
        raise ValueError(f"A must have at least one row and one column, got {tuple(A.shape)}.")
    check_limits(rtol, maxiter, memory_budget=memory_budget)
    check_progress(progress)
    if B.shape[-1 if B.ndim == 1 else -2] != A.shape[-2]:
        raise ValueError(f"A of {tuple(A.shape)} cannot be solved for B of {tuple(B.shape)}.")
    operator = to_linear_operator(A)
    chosen = method_for(A) if method == "auto" else cast(Method, method)
    if chosen == "closed form" and isinstance(A, Informed) and _wants_dense(A, operator, B):
        A.require_definite()
        chosen = "dense"
    rtol_used = default_rtol(operator.dtype) if rtol is None else float(rtol)
    if chosen == "dense":
        promised = method == "auto" and isinstance(A, Informed) and A.promises().definite and not is_known_psd(A)
        found = dense(operator, B.unsqueeze(-1) if B.ndim == 1 else B, rtol_used, promised)
        return found.squeeze(-1) if B.ndim == 1 else found
    options = Options(chosen, None if rtol is None else float(rtol), maxiter, preconditioner, memory_budget, progress)
    if operator.shape[-1] != operator.shape[-2]:
        return implicit.least_squares(operator, B, options)
    return implicit.solve(operator, B, options)


def _wants_dense(A: Informed, operator: LinearOperator, B: Tensor) -> bool:
    """The dense matrix has more gradients than closed forms, those with respect to eigenvectors for one."""
    return A.promises().small and recorded((*operator.representation(), B))


def dense(operator: LinearOperator, columns: Tensor, rtol: float, definite: bool = False) -> Tensor:
    """A⁻¹ B (..., n, K) by LU, with gradients; NotConverged where A is singular to working precision.

    ``definite`` says that A is no covariance or precision unless it is positive definite: NotPositiveDefinite where it
    is indefinite, as from `cg`. It costs a Cholesky factorisation.
    """
    matrix = operator.to_dense()
    if isinstance(operator, Informed) and operator.promises().symmetric:
        matrix = (matrix + matrix.mT) / 2  # so that gradients inside A are symmetric, too
    x, info = torch.linalg.solve_ex(matrix, columns)
    with torch.no_grad():
        found = _certified(matrix.detach(), x.detach(), columns.detach(), info, rtol)
        if definite and clearly_indefinite(matrix.detach()):
            reasons = (Reason.NOT_POSITIVE_DEFINITE,) * len(found.reasons)
            found = replace(found, reasons=reasons, converged=converged(reasons))
        accept(found, rtol)
    return x


def _certified(matrix: Tensor, x: Tensor, columns: Tensor, info: Tensor, rtol: float) -> Solution:
    r = columns - matrix @ x
    sizes = (torch.linalg.vector_norm(V, dim=-2, dtype=torch.float64) for V in (r, x, columns.expand_as(r)))
    residual, size, length = sizes
    scale = torch.linalg.vector_norm(matrix, dim=(-2, -1), dtype=torch.float64).unsqueeze(-1) * size + length
    backward = torch.where(scale > 0, residual / scale, 0.0).flatten().cpu()
    relative = torch.where(length > 0, residual / length, residual).flatten().cpu()
    level = 10 * torch.finfo(x.dtype).eps * math.sqrt(x.shape[-2])
    singular = bool((info != 0).any())
    reasons = tuple(
        _reason(r, b, max(rtol, level), level, singular) for r, b in zip(relative.tolist(), backward.tolist())
    )
    history = relative.unsqueeze(0)
    flat = x.movedim(-2, 0).reshape(x.shape[-2], -1)
    return Solution(flat, reasons, converged(reasons), relative, backward, 0, len(reasons), history)


def _reason(residual: float, backward: float, rtol: float, level: float, singular: bool) -> Reason:
    if singular:
        return Reason.SINGULAR
    if not math.isfinite(residual):
        return Reason.NON_FINITE
    if residual <= rtol:
        return Reason.CONVERGED
    return Reason.PRECISION_LIMIT if backward <= level and residual <= 0.1 else Reason.SINGULAR


def accept(solution: Solution, rtol: float) -> Tensor:
    """The solution's x where every column is accepted, else raise; a precision limit is accepted with a warning."""
    if Reason.PRECISION_LIMIT in solution.reasons:
        warnings.warn(Reason.PRECISION_LIMIT.value, stacklevel=3)
    return solution.raise_if_failed(rtol).x
