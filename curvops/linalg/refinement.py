"""Iterative refinement: corrections solved in the operator's dtype, residuals taken in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from curvops.linalg.results import Reason, Solution
from curvops.linalg.systems import Callback
from curvops.linalg.vectors import Matrix, columns, largest, norm, product

# A correction good to three digits costs a third of a solve to nine, and float32 can nearly always give it.
DIGITS_PER_ROUND = 1e-3


def refined(
    A: Matrix,
    B: Tensor,
    X0: Tensor | None,
    solve: Callable[[Tensor, Tensor | None, float, int, Callback | None], Solution],
    rtol: float,
    maxiter: int,
    callback: Callback | None,
) -> Solution:
    """Solve A X = B with float64 residuals; ``solve(B, X0, rtol, maxiter, callback)`` works in A's dtype.

    Raises:
        ValueError: ``A.to(torch.float64)`` is not a float64 matrix.
    """
    exact = A.double() if isinstance(A, Tensor) else A.to(torch.float64)
    if exact.dtype != torch.float64:
        raise ValueError(f"refine=True needs A.to(torch.float64), which gave {exact.dtype}; solve without refine.")
    multiply, target = product(exact), B.double()
    height = largest(target)
    zero, finite = (height == 0).cpu(), torch.isfinite(height).cpu()
    size = torch.where((height > 0) & torch.isfinite(height), norm(target), 1.0)
    X = torch.zeros_like(target)
    if X0 is not None:
        X[:, ~zero] = X0.double()[:, ~zero]
    residual, last = target.clone(), torch.where(zero, 0.0, math.inf).double()
    history = torch.ones(1, B.shape[1], dtype=torch.float64)
    reasons = [Reason.ZERO_RIGHT_HAND_SIDE if z else Reason.NON_FINITE for z in zero.tolist()]
    iterations = matvecs = 0
    norm_A = torch.zeros((), dtype=torch.float64, device=B.device)
    todo = (~zero & finite).nonzero().squeeze(1)
    while len(todo):
        where = todo.to(B.device)
        image = multiply(X[:, where])
        matvecs += len(todo)
        residual[:, where] = target[:, where] - image
        norm_A = torch.maximum(norm_A, torch.nan_to_num(norm(image) / norm(X[:, where]), nan=0.0).amax())
        now = (norm(residual[:, where]) / size[where]).cpu()
        gained = now < 0.5 * last[todo]
        last[todo] = torch.where(now < last[todo], now, last[todo])
        history[-1] = last.nan_to_num(posinf=1.0)
        todo = todo[(now > rtol) & gained]
        if not len(todo) or iterations >= maxiter:
            break
        where = todo.to(B.device)
        inner = max(DIGITS_PER_ROUND, 0.5 * rtol / float(last[todo].amax()))
        part = solve((residual[:, where] / size[where]).to(B.dtype), None, min(inner, 0.5), maxiter - iterations, None)
        iterations, matvecs = iterations + part.iterations, matvecs + part.matvecs
        rows = history[-1].repeat(len(part.history), 1)
        rows[:, todo] *= part.history
        history = torch.cat([history, rows[1:], rows[-1:]])
        for j, reason in zip(todo.tolist(), part.reasons):
            reasons[j] = reason
        step = columns(part.x, torch.arange(len(todo))).double() * size[where]
        X[:, where] += torch.where(torch.isfinite(step), step, 0.0)
        if callback is not None:
            callback(iterations, history[-1])
    backward = last / ((norm_A * norm(X) / size).cpu() + 1)
    X[:, ~finite.to(B.device)] = math.nan
    level = 10 * torch.finfo(torch.float64).eps * math.sqrt(len(B))
    for j, reason in enumerate(reasons):
        if not zero[j] and bool(last[j] <= rtol):
            reasons[j] = Reason.CONVERGED
        elif reason in (Reason.CONVERGED, Reason.PRECISION_LIMIT):
            at_limit = bool(backward[j] <= level)
            reasons[j] = Reason.PRECISION_LIMIT if at_limit else Reason.STAGNATION
            if iterations >= maxiter:
                reasons[j] = Reason.ITERATION_LIMIT
    converged = torch.tensor([r in (Reason.CONVERGED, Reason.ZERO_RIGHT_HAND_SIDE) for r in reasons], dtype=torch.bool)
    return Solution(X, tuple(reasons), converged, last, backward, iterations, matvecs, history)
