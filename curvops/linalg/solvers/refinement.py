"""Iterative refinement: corrections solved in the operator's dtype, residuals taken in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.core.results import Reason, Solution, converged
from curvops.linalg.core.vectors import (
    Matrix,
    Vectors,
    as_block,
    columns,
    finite_part,
    largest,
    norm,
    product,
    put_columns,
    zero_block,
)
from curvops.linalg.solvers.systems import Callback

# What float32 can give of a well-conditioned system, and what it can nearly always give.
FIRST_DIGITS, FEWER_DIGITS = 1e-5, 1e-3


def refined(
    exact: Matrix,
    dtype: torch.dtype,
    B: Vectors,
    X0: Vectors | None,
    solve: Callable[[Vectors, Vectors | None, float, int, Callback | None], Solution],
    rtol: float,
    maxiter: int,
    callback: Callback | None,
) -> Solution:
    """Solve A X = B with residuals by the float64 matrix; ``solve(B, X0, rtol, maxiter, callback)`` works in dtype.

    Raises:
        ValueError: the exact matrix is not of float64, so A has no float64 version.
    """
    if exact.dtype != torch.float64:
        raise ValueError(f"refine needs A.to(torch.float64), which gave {exact.dtype}; solve without refine.")
    multiply, target = product(exact), B.to(torch.float64)
    height = largest(target)
    zero, finite = (height == 0).cpu(), torch.isfinite(height).cpu()
    size = torch.where((height > 0) & torch.isfinite(height), norm(target), 1.0)
    X = zero_block(target, target.shape[1])
    if X0 is not None:
        begin = (~zero).nonzero().squeeze(1)
        put_columns(X, begin, columns(X0.to(torch.float64), begin))
    residual, last = as_block(target), torch.where(zero, 0.0, math.inf).double()
    history = torch.ones(1, B.shape[1], dtype=torch.float64)
    reasons = [Reason.ZERO_RIGHT_HAND_SIDE if z else Reason.NON_FINITE for z in zero.tolist()]
    iterations = matvecs = taken = 0
    begun, best, digits = X0 is not None, as_block(X), FIRST_DIGITS
    norm_A = torch.zeros((), dtype=torch.float64, device=B.device)
    todo = (~zero & finite).nonzero().squeeze(1)
    while len(todo):
        where = todo.to(B.device)
        if begun:
            x = columns(X, where)
            image = multiply(x)
            taken += len(todo)
            put_columns(residual, where, columns(target, where) - image)
            norm_A = torch.maximum(norm_A, torch.nan_to_num(norm(image) / norm(x), nan=0.0).amax())
        begun = True
        now = (norm(columns(residual, where)) / size[where]).cpu()
        gained, better = now < 0.5 * last[todo], todo[now < last[todo]].to(B.device)
        put_columns(best, better, columns(X, better))
        last[todo] = torch.where(now < last[todo], now, last[todo])
        history[-1] = last.nan_to_num(posinf=1.0)
        todo = todo[(now > rtol) & gained]
        if not len(todo) or iterations >= maxiter:
            break
        where = todo.to(B.device)
        inner = max(digits, 0.5 * rtol / float(last[todo].amax()))
        part = solve(
            (columns(residual, where) / size[where]).to(dtype), None, min(inner, 0.5), maxiter - iterations, None
        )
        iterations, matvecs = iterations + part.iterations, matvecs + part.matvecs
        if Reason.PRECISION_LIMIT in part.reasons:
            digits = FEWER_DIGITS
        rows = history[-1].repeat(len(part.history), 1)
        rows[:, todo] *= part.history
        history = torch.cat([history, rows[1:], rows[-1:]])
        for j, reason in zip(todo.tolist(), part.reasons):
            reasons[j] = reason
        norm_A = torch.maximum(norm_A, _scale(part, norm(columns(residual, where)) / size[where]))
        step = part.x.to(torch.float64) * size[where]
        put_columns(X, where, columns(X, where) + finite_part(step))
        if callback is not None:
            callback(iterations, history[-1])
    backward = last / ((norm_A * norm(best) / size).cpu() + 1)
    lost = (~finite).nonzero().squeeze(1)
    put_columns(best, lost, columns(best, lost) * math.nan)
    level = 10 * torch.finfo(torch.float64).eps * math.sqrt(B.shape[0])
    at_limit, exhausted = (backward <= level).tolist(), iterations >= maxiter
    ordered = tuple(
        _final(reason, residual <= rtol, at_level and residual <= 0.1, exhausted)
        for reason, residual, at_level in zip(reasons, last.tolist(), at_limit)
    )
    total = matvecs + taken
    return Solution(best, ordered, converged(ordered), last, backward, iterations, total, history, exact_matvecs=taken)


def _scale(part: Solution, lengths: Float[Tensor, " K"]) -> Tensor:
    """The ‖A‖ that a solve for a correction has seen, from its backward errors ‖r‖/(‖A‖‖x‖ + ‖b‖).

    The products that refinement itself takes are close to B, and say little of ‖A‖.
    """
    ratio = (part.relative_residuals / part.backward_errors - 1).to(part.x.device) * lengths / norm(part.x)
    return torch.nan_to_num(ratio, nan=0.0, posinf=0.0).amax()


def _final(last_solve: Reason, met: bool, at_level: bool, exhausted: bool) -> Reason:
    """Why a column stopped, from how its last correction ended and its residual in float64."""
    if last_solve is Reason.ZERO_RIGHT_HAND_SIDE:
        return last_solve
    if met:
        return Reason.CONVERGED
    if at_level and last_solve not in (Reason.NON_FINITE, Reason.NOT_POSITIVE_DEFINITE, Reason.NOT_SYMMETRIC):
        return Reason.PRECISION_LIMIT
    if last_solve not in (Reason.CONVERGED, Reason.PRECISION_LIMIT):
        return last_solve
    return Reason.ITERATION_LIMIT if exhausted else Reason.STAGNATION
