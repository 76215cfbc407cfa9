"""Inverse square roots as functions with gradients in the block and in the tensors inside A."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor
from torch.autograd import Function

from curvops.ambient import running
from curvops.errors import PrecisionWarning, warn
from curvops.linalg.core.cache import require_first_derivative
from curvops.linalg.core.memory import working
from curvops.linalg.core.results import FunctionProduct, Reason, indefinite
from curvops.linalg.core.vectors import join
from curvops.linalg.functions.apply_function import FunctionRun
from curvops.linalg.spectra.lanczos import LEAST_VECTORS


def inverse_root(dense: Tensor) -> Tensor:
    """Return A^-½ of a positive definite tensor (..., n, n), with a finite gradient even if eigenvalues coincide."""
    return _InverseRoot.apply(dense)  # type: ignore[no-untyped-call]


def inverse_root_product(operator: LinearOperator, rhs: Tensor, lower_bound: float | None) -> Tensor:
    """Return A^-½ B for B (n, K) by Lanczos, with gradients in B and in the tensors inside A."""
    return _InverseRootProduct.apply(  # type: ignore[no-untyped-call]
        operator.representation_tree(), lower_bound, rhs, *operator.representation()
    )


class _InverseRootProduct(Function):
    @staticmethod
    def forward(ctx: Any, tree: Any, lower_bound: float | None, rhs: Tensor, *tensors: Tensor) -> Tensor:
        ctx.tree, ctx.lower_bound = tree, lower_bound
        ctx.save_for_backward(rhs, *tensors)
        return _root_of_columns(tree(*tensors), rhs, lower_bound)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        require_first_derivative()
        rhs, *tensors = ctx.saved_tensors
        operator = ctx.tree(*tensors)
        inside: tuple[Tensor | None, ...] = (None,) * len(tensors)
        if not any(ctx.needs_input_grad[3:]):
            return (None, None, _root_of_columns(operator, gradient, ctx.lower_bound)[0], *inside)
        value, pairs = _root_of_columns(operator, join(gradient, rhs), ctx.lower_bound, with_pairs=True)
        if pairs is not None:
            left, right = pairs
            # Both orders, since an operator may take the symmetry of its derivative for granted.
            inside = operator._bilinear_derivative(join(left, right) / 2, join(right, left))
        return (None, None, value[:, : rhs.shape[1]], *inside)


def _root_of_columns(
    operator: LinearOperator, block: Tensor, lower_bound: float | None, with_pairs: bool = False
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Return A^-½ times each column, and with the gradients in the first half of the columns L and R of `_pairs`."""
    rtol = min(1e-6, torch.finfo(block.dtype).eps ** 0.7)
    with running("inverse_sqrt", operator), working(operator, LEAST_VECTORS) as (multiply, room):
        run = FunctionRun(multiply, torch.rsqrt, block, lower_bound, room, None)
        # A gradient needs the vectors of each Krylov space to more digits than their product.
        run.solve(1e-3 * rtol if with_pairs else rtol, None, None)
        value = run.value(rtol)
        reasons = [
            Reason.CONVERGED if error <= rtol else reason for error, reason in zip(run.errors.tolist(), run.reasons)
        ]
        product = FunctionProduct(value, run.errors, tuple(reasons), run.depth, run.matvecs)
        if Reason.PRECISION_LIMIT in product.reasons:
            warn(Reason.PRECISION_LIMIT.value, PrecisionWarning)
        product.raise_if_failed(rtol)
        return value, _pairs(run) if with_pairs else None


def _pairs(run: FunctionRun) -> tuple[Tensor, Tensor] | None:
    """Return L and R with d(Σ gᵀ A^-½ b) = Σ lᵀ dA r over their columns, for the columns g and then b of the run.

    By the Ritz pairs (θᵢ, yᵢ) for g and (θⱼ, yⱼ) for b, gᵀ dA^-½ b ≈ Σ (gᵀyᵢ) F(θᵢ, θⱼ) (yⱼᵀb) yᵢᵀ dA yⱼ with the
    divided differences F of x^-½ (Kandolf et al. 2021), whose singular values decrease fast.
    """
    K = run.B.shape[1] // 2
    position = {j: k for k, j in enumerate(run.usable.live.tolist())}
    both = [(position[j], position[j + K]) for j in range(K) if j in position and j + K in position]
    weights = [torch.zeros(0, 0, dtype=torch.float64)] * len(position)
    for first, second in both:
        (root, V), (other, W) = (_ritz(run, k) for k in (first, second))
        differences = inverse_root_differences(root, other)
        U, S, X = torch.linalg.svd(V[0][:, None] * differences * W[0])
        rank = int((torch.finfo(run.B.dtype).eps * S[0] < S).sum())
        size = run.size(first) * run.size(second)
        weights[first], weights[second] = V @ U[:, :rank] * (size * S[:rank]), W @ X[:rank].mT
    blocks, _ = run.run.combinations(weights)
    if not both:
        return None
    left, right = zip(*((blocks[first], blocks[second]) for first, second in both))
    return join(*left), join(*right)


def _ritz(run: FunctionRun, k: int) -> tuple[Tensor, Tensor]:
    """Return the roots of the Ritz values of one column, and the eigenvectors of T."""
    values, V = torch.linalg.eigh(run.run.tridiagonal(k))
    return run.f.on_ritz_values(values[None], run.run.scale)[0].reciprocal(), V


def inverse_root_differences(
    left: Float[Tensor, "*batch i"], right: Float[Tensor, "*batch j"]
) -> Float[Tensor, "*batch i j"]:
    """Return (1/a − 1/b)/(a² − b²) for the roots a and b of eigenvalues, without their differences."""
    a, b = left.unsqueeze(-1), right.unsqueeze(-2)
    return -1 / (a * b * (a + b))


class _InverseRoot(Function):
    @staticmethod
    def forward(ctx: Any, dense: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(dense)
        if not bool((values > 0).all()):
            raise indefinite(f"A^-½ needs a positive definite A: an eigenvalue is {float(values.min()):.3g}.")
        ctx.save_for_backward(values, vectors)
        return vectors @ (values.rsqrt().unsqueeze(-1) * vectors.mT)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        require_first_derivative()
        # In the eigenbasis, d(A^-½)_ij = −dA_ij / (√λ_i √λ_j (√λ_i + √λ_j)), without differences of eigenvalues.
        values, vectors = ctx.saved_tensors
        root = values.sqrt()
        inner = vectors.mT @ gradient @ vectors
        result: Tensor = vectors @ (inner * inverse_root_differences(root, root)) @ vectors.mT
        return result
