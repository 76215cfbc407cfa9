"""Small systems solved by a dense factorisation and certified by their residuals, as in an iteration."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from linear_operator import LinearOperator
from torch import Tensor

from curvops.linalg.core.results import Reason, Solution, accept, converged
from curvops.linalg.core.rounding import rounding_level
from curvops.linalg.core.symmetry import clearly_indefinite
from curvops.linalg.solvers.verdicts import precision_limited


def solve_dense(operator: LinearOperator, B: Tensor, rtol: float, symmetric: bool, definite: bool) -> Tensor:
    """Compute A⁻¹ B (..., n, K) by LU, with gradients; raise NotConverged for a numerically singular A.

    With ``definite``, for covariances and precisions, an indefinite A raises NotPositiveDefinite, as in `cg`, at the
    cost of a Cholesky factorisation.
    """
    matrix = operator.to_dense()
    if symmetric:
        matrix = (matrix + matrix.mT) / 2  # so that gradients inside A are symmetric, too
    x, info = torch.linalg.solve_ex(matrix, B)
    with torch.no_grad():
        found = _certify(matrix.detach(), x.detach(), B.detach(), info, rtol)
        if definite and clearly_indefinite(matrix.detach()):
            reasons = (Reason.NOT_POSITIVE_DEFINITE,) * len(found.reasons)
            found = replace(found, reasons=reasons, converged=converged(reasons))
        accept(found, rtol)
    return x


def _certify(matrix: Tensor, x: Tensor, B: Tensor, info: Tensor, rtol: float) -> Solution:
    r = B - matrix @ x
    sizes = (torch.linalg.vector_norm(V, dim=-2, dtype=torch.float64) for V in (r, x, B.expand_as(r)))
    residual, size, length = sizes
    scale = torch.linalg.vector_norm(matrix, dim=(-2, -1), dtype=torch.float64).unsqueeze(-1) * size + length
    backward = torch.where(scale > 0, residual / scale, 0.0).flatten().cpu()
    relative = torch.where(length > 0, residual / length, residual).flatten().cpu()
    level = rounding_level(x.dtype, x.shape[-2])
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
    return Reason.PRECISION_LIMIT if precision_limited(residual, backward, level) else Reason.SINGULAR
