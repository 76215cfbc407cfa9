"""Systems A X = B as solvers take them: arguments checked, columns scaled to unit norm, and results put together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float
from linear_operator import LinearOperator
from torch import Tensor

from curvops.linalg.core.limits import check_limits
from curvops.linalg.core.memory import columns_at_a_time, holding, room_for, vector_bytes
from curvops.linalg.core.results import Reason, Solution, converged
from curvops.linalg.core.vectors import (
    Description,
    Matrix,
    Vectors,
    as_block,
    columns,
    describe,
    empty_block,
    largest,
    norm,
    part,
    product,
    put,
    put_columns,
    zero_block,
)
from curvops.progress import aside

MOST_ITERATIONS = 10_000
Callback: TypeAlias = Callable[[int, Tensor], object]
Block: TypeAlias = Callable[[Vectors], Vectors]


@runtime_checkable
class Multiplies(Protocol):
    """Anything that a block of vectors can be multiplied by with ``@``."""

    def __matmul__(self, other: Vectors, /) -> Vectors:
        """The product with a block."""


Preconditioner: TypeAlias = Multiplies | Block | Tensor | LinearOperator


def check(
    facts: Description,
    B: Vectors,
    rtol: float | int | None,
    maxiter: int | None,
    x0: Vectors | None = None,
    memory_budget: int | None = None,
    max_matvecs: int | None = None,
) -> None:
    """Whether right-hand sides, initial guess and options fit the matrix.

    Raises:
        TypeError: A is of half precision, or B or x0 not of A's dtype.
        ValueError: shapes or devices do not fit, or a limit is negative or not finite.
    """
    m, n, dtype, device = facts
    for name, V in (("B", B), ("x0", x0)):
        if V is not None and V.dtype != dtype:
            raise TypeError(f"{name} must have A's dtype {dtype}, got {V.dtype}.")
        if V is not None and V.device != device:
            raise ValueError(f"{name} must be on A's device {device}, got {V.device}.")
    if B.ndim not in (1, 2) or B.shape[0] != m:
        raise ValueError(f"B must have shape ({m},) or ({m}, K) for A of {m} x {n}, got {tuple(B.shape)}.")
    if x0 is not None and x0.shape != (n, *B.shape[1:]):
        raise ValueError(f"x0 must have shape {(n, *B.shape[1:])}, got {tuple(x0.shape)}.")
    check_limits(rtol, maxiter, max_matvecs, memory_budget)


def iterations_allowed(n: int, maxiter: int | None) -> int:
    """The limit given, or 10 n, at least 100 and at most 10,000."""
    return min(max(10 * n, 100), MOST_ITERATIONS) if maxiter is None else maxiter


def shifted(A: Matrix, shift: float) -> Matrix:
    """A + shift I."""
    if shift == 0:
        return A
    if isinstance(A, Tensor):
        return A + shift * torch.eye(len(A), dtype=A.dtype, device=A.device)
    return A.add_diagonal(torch.tensor(shift, dtype=A.dtype, device=A.device))


def applied(preconditioner: Preconditioner | None) -> Block:
    """The preconditioner as a function on blocks.

    Raises:
        TypeError: it is nothing that a block can be given to.
    """
    if preconditioner is None:
        return lambda V: V
    if isinstance(preconditioner, (Tensor, LinearOperator)):
        return aside(product(preconditioner))
    if isinstance(preconditioner, Multiplies):
        known = preconditioner
        return aside(lambda V: known @ V)
    if callable(preconditioner):
        return aside(preconditioner)
    kind = type(preconditioner).__name__
    raise TypeError(f"preconditioner must be a matrix, have __matmul__, or be a function on blocks, got {kind}.")


@dataclass(frozen=True, eq=False)
class Columns:
    """The right-hand sides that need a solve, scaled to unit norm, and where they belong.

    A column of B is ``unit * length * height``: in two factors, since the norm itself may overflow.
    """

    unit: Float[Vectors, "m k"]
    X: Float[Vectors, "n k"]
    height: Float[Tensor, " k"]
    length: Float[Tensor, " k"]
    live: Tensor
    K: int
    known: dict[int, Reason]

    @classmethod
    def of(cls, B: Float[Vectors, "m K"], X0: Vectors | None, like: Vectors | Description) -> Columns:
        """Leave out zero and non-finite columns; solutions are ``like`` these vectors. One small transfer."""
        heights = largest(B).cpu()
        known = dict.fromkeys((heights == 0).nonzero().squeeze(1).tolist(), Reason.ZERO_RIGHT_HAND_SIDE)
        known |= dict.fromkeys((~torch.isfinite(heights)).nonzero().squeeze(1).tolist(), Reason.NON_FINITE)
        live = torch.tensor([j for j in range(B.shape[1]) if j not in known], dtype=torch.long)
        height = heights[live].to(B.device, B.dtype)
        unit = columns(B, live) / height
        length = norm(unit).to(B.dtype)
        if X0 is None:
            X = zero_block(like, len(live))
        else:
            X = as_block(columns(X0, live) / height / length)
        return cls(unit / length, X, height, length, live, B.shape[1], known)

    def spread(self, callback: Callback | None) -> Callback | None:
        """The callback on all columns, those without a solve showing 0."""
        if callback is None:
            return None
        full = torch.zeros(self.K, dtype=torch.float64)
        return lambda iteration, residuals: callback(iteration, full.index_copy(0, self.live, residuals))

    def solution(self, outcome: Outcome) -> Solution:
        """What was reached, in the order and scale of B."""
        reasons = self.known | {column: outcome.reasons[j] for j, column in enumerate(self.live.tolist())}
        residuals, backward = self._placed(outcome.best), self._placed(outcome.backward)
        history = torch.zeros(len(outcome.history), self.K, dtype=torch.float64)
        shape = (len(outcome.history), len(self.live))
        history[:, self.live] = torch.tensor(outcome.history, dtype=torch.float64).reshape(shape)
        X = outcome.X
        x = zero_block(X, self.K)
        put_columns(x, self.live, X * self.length * self.height)
        overflowed = ~torch.isfinite(largest(x)).cpu()
        for j in range(self.K):
            if bool(overflowed[j]):
                reasons[j] = Reason.NON_FINITE
            if self.known.get(j) is Reason.NON_FINITE:
                put(x, j, part(x, j, j + 1) * math.nan)
            if reasons[j] is Reason.NON_FINITE and (bool(overflowed[j]) or j in self.known):
                residuals[j] = backward[j] = math.inf
        ordered = tuple(reasons[j] for j in range(self.K))
        normal = None if outcome.normal is None else self._placed(outcome.normal)
        matvecs, iteration = outcome.matvecs, outcome.iteration
        return Solution(
            x, ordered, converged(ordered), residuals, backward, iteration, matvecs, history, normal_residuals=normal
        )

    def _placed(self, values: list[float]) -> Tensor:
        return torch.zeros(self.K, dtype=torch.float64).index_copy(
            0, self.live, torch.tensor(values, dtype=torch.float64)
        )


class Outcome(Protocol):
    """What a finished run returns: a number per column on the host, and the best answers."""

    X: Vectors
    reasons: dict[int, Reason]
    best: list[float]
    backward: list[float]
    history: list[list[float]]
    iteration: int
    matvecs: int

    @property
    def normal(self) -> list[float] | None:
        """‖Aᵀr‖/(‖A‖‖r‖), where least-squares problems are answered."""


def in_groups(
    solve: Callable[[Vectors, Vectors | None], Solution],
    A: Matrix,
    B: Vectors,
    X0: Vectors | None,
    vectors: int,
    memory_budget: int | None,
) -> Solution:
    """Solve as many columns at a time as memory has room for at ``vectors`` working vectors each, at least one."""
    column, K = vectors * vector_bytes(describe(A)), max(B.shape[1], 1)
    width = columns_at_a_time(K, column, room_for(A, memory_budget, column))
    with holding(A, width * column):
        found = [solve(part(B, 0, width), None if X0 is None else part(X0, 0, width))]
        if width >= K:
            return found[0]
        X = empty_block(found[0].x, K)
        put(X, 0, found[0].x)
        for i in range(width, K, width):
            found[-1] = replace(found[-1], x=X)  # its own is freed
            found.append(solve(part(B, i, i + width), None if X0 is None else part(X0, i, i + width)))
            put(X, i, found[-1].x)
    return _joined(found, X)


def _joined(parts: list[Solution], X: Vectors) -> Solution:
    steps = max(len(part.history) for part in parts)
    histories = [torch.cat([p.history, p.history[-1:].expand(steps - len(p.history), -1)]) for p in parts]
    normal = [part.normal_residuals for part in parts if part.normal_residuals is not None]
    return Solution(
        X,
        tuple(reason for part in parts for reason in part.reasons),
        torch.cat([part.converged for part in parts]),
        torch.cat([part.relative_residuals for part in parts]),
        torch.cat([part.backward_errors for part in parts]),
        max(part.iterations for part in parts),
        sum(part.matvecs for part in parts),
        torch.cat(histories, 1),
        normal_residuals=torch.cat(normal) if normal else None,
        exact_matvecs=sum(part.exact_matvecs for part in parts),
        groups=len(parts),
    )


def shaped_as(solution: Solution, B: Vectors) -> Solution:
    """The solution with x (n,) where B was a vector."""
    return solution if B.ndim == 2 else replace(solution, x=solution.x.squeeze(1))
