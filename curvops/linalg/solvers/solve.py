"""Solutions of A X = B by the method that suits the known properties of A.

>>> import torch
>>> from curvops.linalg import Diagonal, method_for, solve
>>> A = Diagonal(torch.tensor([1.0, 2.0, 4.0]))
>>> method_for(A), solve(A, torch.tensor([1.0, 2.0, 4.0]))
('closed form', tensor([1., 1., 1.]))

| known of A                                           | method        |
|------------------------------------------------------|---------------|
| rectangular                                          | `lsmr`        |
| it has a closed form                                 | `closed form` |
| at most 256 rows, or a tensor of at most 2048        | `dense`       |
| positive semidefinite, or a curvature plus a prior   | `cg`          |
| symmetric by its tag, or by a test with two products | `minres`      |
| none of these                                        | `lsmr`        |

The rules are in `linalg/core/solve_routes.py`; `print(A.plan())` shows them for one operator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from jaxtyping import Shaped
from linear_operator import LinearOperator, to_linear_operator
from torch import Tensor
from torch.autograd import Function

from curvops.ambient import Progress, running
from curvops.checks import (
    carries_graph,
    check_choice,
    check_options,
    check_tensor,
    checked_number,
    refuse_tangents,
)
from curvops.linalg.core import vectors as vec
from curvops.linalg.core.algorithm import algorithm, longest
from curvops.linalg.core.cache import require_first_derivative
from curvops.linalg.core.results import Reason, Solution, accept, default_rtol
from curvops.linalg.core.solve_routes import MOST_COLUMNS, SKETCHED, System, chosen, routes
from curvops.linalg.core.structure import clearly_indefinite
from curvops.linalg.core.vectors import Given, Matrix
from curvops.linalg.solvers.cg import cg
from curvops.linalg.solvers.lsmr import lsmr
from curvops.linalg.solvers.minres import minres
from curvops.linalg.solvers.systems import Preconditioner, precision_limited
from curvops.ranks.sharded_vectors import Sharded

Method: TypeAlias = Literal["closed form", "dense", "cg", "minres", "lsmr"]


def method_for(A: Matrix) -> Method:
    """Return the method that `solve` uses for A, by the module's table.

    The symmetry of a foreign operator costs two products.

    Args:
        A: a tensor or operator.

    Returns:
        The name of the method, as `solve` accepts it.

    Examples:
        >>> co.linalg.method_for(torch.eye(3)), co.linalg.method_for(torch.ones(3, 2))
        ('dense', 'lsmr')
    """
    check_tensor("A", A)
    return _method_for(system_of(A))


def _method_for(system: System) -> Method:
    first = chosen(routes(system))
    assert first is not None  # lsmr works for any matrix
    return cast(Method, "cg" if first.name == SKETCHED else first.name)


def system_of(A: Matrix, columns: int = 1, whole: bool = False) -> System:
    """Collect the facts about A that decide the route: those needed now, or all of them (`whole`)."""
    square = A.shape[-1] == A.shape[-2]
    form = square and hasattr(A, "exact_solver") and A.exact_solver() is not None
    tagged = whole or not form  # tags may read numbers from a device
    system = System(
        rows=max(A.shape[-2:]),
        columns=columns,
        square=square,
        longest=longest(A) if whole else 0,
        itemsize=A.dtype.itemsize,
        closed_form=form,
        at_hand=isinstance(A, Tensor) or getattr(A, "at_hand", False),
        symmetric=tagged and vec.is_symmetric(A),
        definite=tagged and getattr(A, "definite", False),
        recorded=whole and hasattr(A, "definite") and carries_graph(to_linear_operator(A).representation()),
    )
    if square and len(A.shape) == 2 and not system.symmetric and _method_for(system) == "lsmr":
        return replace(system, symmetric=seems_symmetric(A))
    return system


def seems_symmetric(A: Matrix) -> bool:
    """Return whether ⟨u, Av⟩ = ⟨v, Au⟩ for two random vectors to half of the digits; it errs with probability √eps."""
    facts = vec.describe(A)
    pair = vec.random_block(facts, 2, "gaussian", torch.Generator().manual_seed(0))
    image = vec.product(A)(pair)
    gap = vec.inner(vec.columns(pair, torch.tensor([1, 0])), image)
    scale = vec.norm(image).amax() * torch.finfo(facts.dtype).eps ** 0.5
    return bool((gap[0] - gap[1]).abs() <= scale)


@algorithm
def solve(
    A: Matrix | Given,
    B: Shaped[Tensor, "*batch"],
    *,
    method: str = "auto",
    rtol: float | None = None,
    maxiter: int | None = None,
    preconditioner: Preconditioner | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> Tensor:
    """Return A⁻¹ B for B (n,), (n, K) or (..., n, K), or the least-squares solution of smallest norm for rectangular A.

    Differentiable in B and the tensors inside A, at the cost of one more solve in the backward pass (up to three for
    a rectangular A). The solvers themselves (`cg`, `minres`, `lsmr`) return a `Solution` with residuals and reasons.

    Args:
        A: a tensor or operator; its known properties decide the method, see `method_for`.
        B: the right-hand sides.
        method: "auto", or one of the table.
        rtol: the true relative residual to reach; None means 1e-6, and 1.5e-8 in float64. A PrecisionWarning says that
            the dtype did not allow it; for None, only if it allowed less than half of its digits.
        maxiter: the maximum number of iterations of an iterative method.
        preconditioner: as in `cg`; by default an `Operator` gives `cg` its own.
        memory_budget: bytes for the working vectors of an iterative method, and as many for the sketch of an
            `Operator`'s own preconditioner; a sketch kept from an earlier solve is used whatever its size. None is the
            rest of the budget of the linearisation behind A, for both together.
        progress: as in `cg`.

    Returns:
        The solution, of the shape of B for square A.

    Raises:
        TypeError: A and B do not share one real dtype, float32 or float64.
        ConvergenceError: a column failed; the error has the `Solution` and its reasons.
        NotPositiveDefiniteError: A is indefinite, and is a curvature plus a prior or solved by `cg`. The error is also
            linear_operator's NotPSDError. A closed form raises NotPositiveSemidefiniteError. To solve with an
            indefinite A, name the method.
        ValueError: shapes do not fit, the method does not exist, or a limit is negative or not finite.

    Examples:
        >>> A = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> co.linalg.solve(A, torch.tensor([3.0, 4.0])).round(decimals=4)
        tensor([1., 1.])
    """
    A = vec.as_matrix(A, B)
    check_choice("method", method, ("auto", *get_args(Method)))
    check_tensor("A", A)
    check_tensor("B", B)
    if not A.dtype.is_floating_point or B.dtype != A.dtype:
        raise TypeError(f"A and B must have one real floating-point dtype, got {A.dtype} and {B.dtype}.")
    vec.require_precision(A.dtype, A.device)
    if len(A.shape) < 2 or not A.shape.numel():
        raise ValueError(f"A must have at least one row and one column, got {tuple(A.shape)}.")
    check_options(maxiter=maxiter)
    if not vec.has_rows(B, A.shape[-2]):
        raise ValueError(f"A of {tuple(A.shape)} cannot be solved for B of {tuple(B.shape)}.")
    operator = to_linear_operator(A)
    system = system_of(A) if method == "auto" else None
    route = cast(Method, method) if system is None else _method_for(system)
    tolerance = None if rtol is None else checked_number("rtol", rtol, "[0, inf)")
    tensors = operator.representation()
    recorded = carries_graph((B, *tensors))
    if route == "closed form" and recorded and hasattr(A, "definite") and System(rows=operator.shape[-1]).small:
        cast(Any, A).require_definite()  # the dense matrix has more gradients, for example those of eigenvectors
        route = "dense"
    if route == "dense":
        # A curvature is positive semidefinite by its formula, a matrix only by its user's word.
        promised = system is not None and getattr(A, "definite", False) and (system.at_hand or not vec.is_psd(A))
        dense = partial(solve_dense, operator, rtol=tolerance, symmetric=vec.is_symmetric(A), definite=promised)
        return vec.shaped_as(B.multiplied(dense) if isinstance(B, Sharded) else dense(vec.as_columns(B)), B)
    refuse_tangents((B, *tensors))
    request = Request(route, tolerance, maxiter, preconditioner, memory_budget, progress)
    if not operator.is_square and (operator.batch_shape or B.ndim > 2):
        raise ValueError(f"least squares need one matrix and one block, got {operator.shape}, {tuple(B.shape)}.")
    rhs = B.unsqueeze(-1) if operator.batch_shape and B.ndim == 1 else B
    if operator.batch_shape:
        batch = torch.broadcast_shapes(operator.batch_shape, rhs.shape[:-2])
        operator = operator if batch == operator.batch_shape else operator.expand(*batch, *operator.shape[-2:])
        rhs, tensors = rhs.expand(*batch, *rhs.shape[-2:]), operator.representation()
    if recorded:
        X = _Solve.apply(operator.representation_tree(), request, rhs, *tensors)  # type: ignore[no-untyped-call]
    else:
        X = request(operator, rhs)
    return X if rhs is B or B.ndim > 1 else X.squeeze(-1)


@dataclass(frozen=True)
class Request:
    """The options of a solve; calling it solves without a graph."""

    method: Method
    rtol: float | None
    maxiter: int | None = None
    preconditioner: Preconditioner | None = None
    memory_budget: int | None = None
    progress: Progress = None

    def __call__(self, operator: LinearOperator, rhs: Tensor) -> Tensor:
        """Solve a batch of operators one by one; raise ConvergenceError if a column failed."""
        if operator.batch_shape:
            return torch.stack([self(operator[i], rhs[i]) for i in range(operator.shape[0])])
        if rhs.ndim > 2:
            X = self(operator, rhs.movedim(-2, 0).flatten(1))
            return X.reshape(len(X), *rhs.shape[:-2], rhs.shape[-1]).movedim(0, -2)
        goal = default_rtol(operator.dtype) if self.rtol is None else self.rtol
        common: dict[str, Any] = {"rtol": goal, "maxiter": self.maxiter}
        if self.method == "closed form":
            exact = operator.exact_solver() if hasattr(operator, "exact_solver") else None
            if exact is None:
                raise ValueError(f"no closed form of {type(operator).__name__} is known; use method='auto'.")
            return vec.shaped_as(exact(vec.as_columns(rhs)), rhs)
        if self.method == "lsmr":
            return accept(lsmr(operator, rhs, consistent=operator.is_square, **common), self.rtol)
        if self.method == "minres":
            return accept(minres(operator, rhs, preconditioner=self.preconditioner, **common), self.rtol)
        M, K = self.preconditioner, 1 if rhs.ndim == 1 else rhs.shape[1]
        if M is None and hasattr(operator, "definite"):
            M = operator.preconditioner(K, memory_budget=self.memory_budget)
        if K <= MOST_COLUMNS:
            return accept(cg(operator, rhs, preconditioner=M, **common), self.rtol)
        X = vec.empty_block(rhs, K)
        for start in range(0, K, MOST_COLUMNS):
            block = vec.part(rhs, start, start + MOST_COLUMNS)
            vec.put(X, start, accept(cg(operator, block, preconditioner=M, **common), self.rtol))
        return X

    def in_backward(self, operator: LinearOperator, rhs: Tensor) -> Tensor:
        """Solve in a backward pass, outside of the call that made the request."""
        with running("solve", operator, self.progress, self.memory_budget):
            return self(operator, rhs)


def solve_dense(operator: LinearOperator, B: Tensor, rtol: float | None, symmetric: bool, definite: bool) -> Tensor:
    """Compute A⁻¹ B (..., n, K) by LU, with gradients; raise ConvergenceError for a numerically singular A.

    With ``definite``, for covariances and precisions, an indefinite A raises NotPositiveDefiniteError, as in `cg`, at
    the cost of a Cholesky factorisation.
    """
    matrix = operator.to_dense()
    if symmetric:
        matrix = (matrix + matrix.mT) / 2  # makes gradients inside A symmetric, too
    x, info = _solve_by_lu(matrix, B)
    with torch.no_grad():
        solution = certify_dense(matrix.detach(), x.detach(), B.detach(), info, rtol)
        if definite and clearly_indefinite(matrix.detach()):
            solution = replace(solution, reasons=(Reason.NOT_POSITIVE_DEFINITE,) * len(solution.reasons))
        accept(solution, rtol)
    return x


def _solve_by_lu(matrix: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Return A⁻¹ B and LAPACK's info of each matrix; one at a time on a CPU.

    There torch factorises the matrices of a batch side by side, and those of more than 150 rows wrongly
    (https://github.com/pytorch/pytorch/issues/142815).
    """
    if matrix.ndim == 2 or matrix.is_cuda:
        x, info = torch.linalg.solve_ex(matrix, B)
        return x, info
    batch = torch.broadcast_shapes(matrix.shape[:-2], B.shape[:-2])
    A, B = (block.expand(*batch, *block.shape[-2:]).flatten(0, -3) for block in (matrix, B))
    x, info = map(torch.stack, zip(*(torch.linalg.solve_ex(one, right) for one, right in zip(A, B))))
    return x.unflatten(0, batch), info.unflatten(0, batch)


def certify_dense(matrix: Tensor, x: Tensor, B: Tensor, info: Tensor, rtol: float | None = None) -> Solution:
    """Return x (..., n, K) as the solution for B with its true residuals; a nonzero `info` means that A is singular."""
    r = B - matrix @ x
    sizes = (torch.linalg.vector_norm(V, dim=-2, dtype=torch.float64) for V in (r, x, B.expand_as(r)))
    residual, size, length = sizes
    scale = torch.linalg.vector_norm(matrix, dim=(-2, -1), dtype=torch.float64).unsqueeze(-1) * size + length
    backward = torch.where(scale > 0, residual / scale, 0.0).flatten().cpu()
    relative = torch.where(length > 0, residual / length, residual).flatten().cpu()
    level = vec.rounding_level(x.dtype, x.shape[-2])
    goal = max(default_rtol(x.dtype) if rtol is None else rtol, level)
    singular = bool((info != 0).any())
    if not singular and bool((relative <= goal).all()):  # a loop over thousands of columns is slow
        reasons = (Reason.CONVERGED,) * len(relative)
    else:
        pairs = zip(relative.tolist(), backward.tolist())
        reasons = tuple(_dense_reason(r, b, goal, level, singular) for r, b in pairs)
    history = relative.unsqueeze(0)
    flat = x.movedim(-2, 0).reshape(x.shape[-2], -1)
    return Solution(flat, reasons, relative, backward, 0, len(reasons), history)


def _dense_reason(residual: float, backward: float, rtol: float, level: float, singular: bool) -> Reason:
    if singular:
        return Reason.SINGULAR
    if not math.isfinite(residual):
        return Reason.NON_FINITE
    if residual <= rtol:
        return Reason.CONVERGED
    return Reason.PRECISION_LIMIT if precision_limited(residual, backward, level) else Reason.SINGULAR


class _Solve(Function):
    """A⁺ B as an autograd function, with gradients as long as the rank does not change.

    dA⁺ = −A⁺ dA A⁺ + A⁺A⁺ᵀ dAᵀ (I − AA⁺) + (I − A⁺A) dAᵀ A⁺ᵀA⁺ (Golub & Pereyra 1973), where only the first term is not
    zero for a square A.
    """

    @staticmethod
    def forward(ctx: Any, tree: Any, request: Request, rhs: Tensor, *tensors: Tensor) -> Tensor:
        ctx.tree, ctx.request = tree, request
        solution = request(tree(*tensors), rhs)
        ctx.save_for_backward(rhs, solution, *tensors)
        return solution

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        require_first_derivative()
        rhs, solution, *tensors = ctx.saved_tensors
        operator = ctx.tree(*tensors)
        adjoint = ctx.request.in_backward(operator.mT, gradient)
        inside: tuple[Tensor | None, ...] = (None,) * len(tensors)
        if any(ctx.needs_input_grad[3:]):
            B, X, G, Y = (t.unsqueeze(-1) if t.ndim == 1 else t for t in (rhs, solution, gradient, adjoint))
            left, right = [-Y], [X]
            if not operator.is_square:
                left += [B - operator._matmul(X), ctx.request.in_backward(operator.mT, X)]
                right += [ctx.request.in_backward(operator, Y), G - operator._t_matmul(Y)]
            inside = operator._bilinear_derivative(torch.cat(left, -1), torch.cat(right, -1))
        return (None, None, adjoint, *inside)
