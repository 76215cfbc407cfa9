"""Solves as functions with gradients: in the right-hand side and in the tensors inside A."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Solver: TypeAlias = Callable[[LinearOperator, Tensor], Tensor]


def solve(operator: LinearOperator, rhs: Tensor, solver: Solver) -> Tensor:
    """A⁻¹ B for B (n,), (n, K) or (..., n, K), with gradients (Aᵀ y = g once more in the backward pass)."""
    return _Solve.apply(  # type: ignore[no-untyped-call]
        operator.representation_tree(), solver, rhs, *operator.representation()
    )


def least_squares(operator: LinearOperator, rhs: Tensor, solver: Solver) -> Tensor:
    """A⁺ B for a single rectangular A (m, n) and B (m,) or (m, K), with gradients where the rank does not change."""
    if operator.ndim != 2 or rhs.ndim > 2:
        raise ValueError(f"least squares take one matrix and one block, got {operator.shape} and {tuple(rhs.shape)}.")
    return _LeastSquares.apply(  # type: ignore[no-untyped-call]
        operator.representation_tree(), solver, rhs, *operator.representation()
    )


class _Solve(Function):
    @staticmethod
    def forward(ctx: Any, tree: Any, solver: Solver, rhs: Tensor, *tensors: Tensor) -> Tensor:
        ctx.tree, ctx.solver = tree, solver
        solution = _solve_any(tree(*tensors), rhs, solver)
        ctx.save_for_backward(solution, *tensors)
        return solution

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        solution, *tensors = ctx.saved_tensors
        operator = ctx.tree(*tensors)
        adjoint = _solve_any(operator.mT, gradient, ctx.solver)
        inside: tuple[Tensor | None, ...] = (None,) * len(tensors)
        if any(ctx.needs_input_grad[3:]):
            columns = [t.unsqueeze(-1) if t.ndim == 1 else t for t in (-adjoint, solution)]
            inside = operator._bilinear_derivative(*columns)
        return (None, None, adjoint, *inside)


class _LeastSquares(Function):
    @staticmethod
    def forward(ctx: Any, tree: Any, solver: Solver, rhs: Tensor, *tensors: Tensor) -> Tensor:
        ctx.tree, ctx.solver = tree, solver
        solution = solver(tree(*tensors), rhs)
        ctx.save_for_backward(rhs, solution, *tensors)
        return solution

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # dA⁺ = −A⁺ dA A⁺ + A⁺A⁺ᵀ dAᵀ (I − AA⁺) + (I − A⁺A) dAᵀ A⁺ᵀA⁺ (Golub & Pereyra 1973)
        rhs, solution, *tensors = ctx.saved_tensors
        operator = ctx.tree(*tensors)
        adjoint = ctx.solver(operator.mT, gradient)
        inside: tuple[Tensor | None, ...] = (None,) * len(tensors)
        if any(ctx.needs_input_grad[3:]):
            B, X, G, Y = (t.unsqueeze(-1) if t.ndim == 1 else t for t in (rhs, solution, gradient, adjoint))
            left = [-Y, B - operator._matmul(X), ctx.solver(operator.mT, X)]
            right = [X, ctx.solver(operator, Y), G - operator._t_matmul(Y)]
            inside = operator._bilinear_derivative(torch.cat(left, 1), torch.cat(right, 1))
        return (None, None, adjoint, *inside)


def _solve_any(operator: LinearOperator, rhs: Tensor, solver: Solver) -> Tensor:
    """Solve for a vector or a block, looping over a batch of different operators."""
    if operator.ndim == 2:
        if rhs.ndim <= 2:
            return solver(operator, rhs)
        columns = rhs.movedim(-2, 0)
        solved = solver(operator, columns.reshape(columns.shape[0], -1))
        return solved.reshape(columns.shape).movedim(0, -2)
    rhs = rhs.expand(*torch.broadcast_shapes(operator.batch_shape, rhs.shape[:-2]), *rhs.shape[-2:])
    parts = [_solve_any(operator[i], rhs[i], solver) for i in range(operator.shape[0])]
    return torch.stack(parts)
