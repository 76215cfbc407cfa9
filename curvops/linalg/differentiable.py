"""Solve and log-determinant as functions with gradients: in the right-hand side and in the tensors inside A."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from curvops.linalg.results import NotConverged, NotPositiveDefinite, Reason, Solution
from curvops.linalg.vectors import random_block

# Probes of Hutchinson's estimator of tr(A⁻¹ dA), the gradient of the log-determinant.
GRADIENT_PROBES = 16


def accept(solution: Solution) -> Tensor:
    """The solution's x where every column converged, else raise; a precision limit is accepted with a warning."""
    if Reason.NOT_POSITIVE_DEFINITE in solution.reasons:
        raise NotPositiveDefinite(solution)
    if any(reason is Reason.PRECISION_LIMIT for reason in solution.reasons):
        warnings.warn(Reason.PRECISION_LIMIT.value, stacklevel=3)
    accepted = {Reason.CONVERGED, Reason.ZERO_RIGHT_HAND_SIDE, Reason.PRECISION_LIMIT}
    if not accepted.issuperset(solution.reasons):
        raise NotConverged(solution)
    return solution.x


def solve(operator: LinearOperator, rhs: Tensor) -> Tensor:
    """A⁻¹ B for B (n,), (n, K) or (..., n, K), with gradients (Aᵀ y = g once more in the backward pass)."""
    result = _Solve.apply(operator.representation_tree(), rhs, *operator.representation())
    return result  # type: ignore[no-any-return]


def logdet(operator: LinearOperator) -> Tensor:
    """log det A in nats (0-d), with the stochastic gradient tr(A⁻¹ dA) ≈ mean_z zᵀ A⁻¹ dA z over Rademacher z."""
    result = _LogDet.apply(operator.representation_tree(), *operator.representation())
    return result  # type: ignore[no-any-return]


class _Solve(Function):
    @staticmethod
    def forward(ctx: Any, tree: Any, rhs: Tensor, *tensors: Tensor) -> Tensor:
        ctx.tree = tree
        solution = _solve_any(tree(*tensors), rhs)
        ctx.save_for_backward(solution, *tensors)
        return solution

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        solution, *tensors = ctx.saved_tensors
        operator = ctx.tree(*tensors)
        adjoint = _solve_any(operator.mT, gradient)
        inside: tuple[Tensor | None, ...] = (None,) * len(tensors)
        if any(ctx.needs_input_grad[2:]):
            columns = [t.unsqueeze(-1) if t.ndim == 1 else t for t in (-adjoint, solution)]
            inside = operator._bilinear_derivative(*columns)
        return (None, adjoint, *inside)


class _LogDet(Function):
    @staticmethod
    def forward(ctx: Any, tree: Any, *tensors: Tensor) -> Tensor:
        ctx.tree = tree
        ctx.save_for_backward(*tensors)
        return tree(*tensors)._logdet_estimate().value  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        operator = ctx.tree(*ctx.saved_tensors)
        probes = random_block(operator.shape[-1], GRADIENT_PROBES, dtype=operator.dtype, device=operator.device)
        solved = _solve_any(operator, probes)
        inside = operator._bilinear_derivative(solved * (gradient / GRADIENT_PROBES), probes)
        return (None, *inside)


def _solve_any(operator: LinearOperator, rhs: Tensor) -> Tensor:
    """Solve for a vector or a block, looping over a batch of different operators."""
    if operator.ndim == 2:
        from_block = operator._solve_block
        if rhs.ndim <= 2:
            return from_block(rhs)  # type: ignore[no-any-return]
        columns = rhs.movedim(-2, 0)
        solved = from_block(columns.reshape(columns.shape[0], -1))
        return solved.reshape(columns.shape).movedim(0, -2)  # type: ignore[no-any-return]
    rhs = rhs.expand(*torch.broadcast_shapes(operator.batch_shape, rhs.shape[:-2]), *rhs.shape[-2:])
    parts = [_solve_any(operator[i], rhs[i]) for i in range(operator.shape[0])]
    return torch.stack(parts)
