"""Solve and log-determinant as functions with gradients: in the right-hand side and in the tensors inside A."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from curvops.linalg.results import Reason, Solution


def accept(solution: Solution, rtol: float) -> Tensor:
    """The solution's x where every column is accepted, else raise; a precision limit is accepted with a warning."""
    if Reason.PRECISION_LIMIT in solution.reasons:
        warnings.warn(Reason.PRECISION_LIMIT.value, stacklevel=3)
    return solution.raise_if_failed(rtol).x


def solve(operator: LinearOperator, rhs: Tensor, rtol: float | None = None) -> Tensor:
    """A⁻¹ B for B (n,), (n, K) or (..., n, K), with gradients (Aᵀ y = g once more in the backward pass)."""
    return _Solve.apply(  # type: ignore[no-untyped-call]
        operator.representation_tree(), rtol, rhs, *operator.representation()
    )


def logdet(operator: LinearOperator) -> Tensor:
    """log det A in nats (0-d), with the gradient tr(A⁻¹ dA) from the probes and solves of the value."""
    value: Tensor = operator._logdet_estimate().value
    return value


def inverse_root(dense: Tensor) -> Tensor:
    """A^-½ of a symmetric positive definite tensor (..., n, n), its gradient finite where eigenvalues coincide."""
    return _InverseRoot.apply(dense)  # type: ignore[no-untyped-call]


class _InverseRoot(Function):
    @staticmethod
    def forward(ctx: Any, dense: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(dense)
        ctx.save_for_backward(values, vectors)
        return vectors @ (values.rsqrt().unsqueeze(-1) * vectors.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # In the eigenbasis, d(A^-½)_ij = −dA_ij / (√λ_i √λ_j (√λ_i + √λ_j)): no difference of eigenvalues.
        values, vectors = ctx.saved_tensors
        root = values.sqrt()
        left, right = root.unsqueeze(-1), root.unsqueeze(-2)
        inner = vectors.mT @ gradient @ vectors
        result: Tensor = vectors @ (-inner / (left * right * (left + right))) @ vectors.mT
        return result


class _Solve(Function):
    @staticmethod
    def forward(ctx: Any, tree: Any, rtol: float | None, rhs: Tensor, *tensors: Tensor) -> Tensor:
        ctx.tree, ctx.rtol = tree, rtol
        solution = _solve_any(tree(*tensors), rhs, rtol)
        ctx.save_for_backward(solution, *tensors)
        return solution

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        solution, *tensors = ctx.saved_tensors
        operator = ctx.tree(*tensors)
        adjoint = _solve_any(operator.mT, gradient, ctx.rtol)
        inside: tuple[Tensor | None, ...] = (None,) * len(tensors)
        if any(ctx.needs_input_grad[3:]):
            columns = [t.unsqueeze(-1) if t.ndim == 1 else t for t in (-adjoint, solution)]
            inside = operator._bilinear_derivative(*columns)
        return (None, None, adjoint, *inside)


def _solve_any(operator: LinearOperator, rhs: Tensor, rtol: float | None = None) -> Tensor:
    """Solve for a vector or a block, looping over a batch of different operators."""
    if operator.ndim == 2:
        if rhs.ndim <= 2:
            return operator._solve_block(rhs, rtol)
        columns = rhs.movedim(-2, 0)
        solved = operator._solve_block(columns.reshape(columns.shape[0], -1), rtol)
        return solved.reshape(columns.shape).movedim(0, -2)
    rhs = rhs.expand(*torch.broadcast_shapes(operator.batch_shape, rhs.shape[:-2]), *rhs.shape[-2:])
    parts = [_solve_any(operator[i], rhs[i], rtol) for i in range(operator.shape[0])]
    return torch.stack(parts)
