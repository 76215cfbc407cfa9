"""Inverse square roots as functions with gradients in the block and in the tensors inside A."""

from __future__ import annotations

from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor
from torch.autograd import Function

from curvops.errors import PrecisionWarning, warn
from curvops.linalg.core.cache import require_first_derivative
from curvops.linalg.core.results import Reason, indefinite
from curvops.linalg.core.vectors import join
from curvops.linalg.functions.contour import ContourProduct, contour


def inverse_root(dense: Tensor) -> Tensor:
    """Return A^-½ of a positive definite tensor (..., n, n), with a finite gradient even if eigenvalues coincide."""
    return _InverseRoot.apply(dense)  # type: ignore[no-untyped-call]


def inverse_root_product(operator: LinearOperator, rhs: Tensor, lower_bound: float | None) -> Tensor:
    """Return A^-½ B for B (n, K) by contour quadrature, with gradients in B and in the tensors inside A."""
    return _InverseRootProduct.apply(  # type: ignore[no-untyped-call]
        operator.representation_tree(), lower_bound, rhs, *operator.representation()
    )


class _InverseRootProduct(Function):
    @staticmethod
    def forward(ctx: Any, tree: Any, lower_bound: float | None, rhs: Tensor, *tensors: Tensor) -> Tensor:
        ctx.tree, ctx.lower_bound = tree, lower_bound
        ctx.save_for_backward(rhs, *tensors)
        return _contour(tree(*tensors), rhs, lower_bound).product.value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        require_first_derivative()
        rhs, *tensors = ctx.saved_tensors
        operator = ctx.tree(*tensors)
        inside: tuple[Tensor | None, ...] = (None,) * len(tensors)
        if not any(ctx.needs_input_grad[3:]):
            return (None, None, _contour(operator, gradient, ctx.lower_bound).product.value, *inside)
        # dA^-½ = −Σ w (A + σ)⁻¹ dA (A + σ)⁻¹: both sides use one rule, since their columns run together.
        both = _contour(operator, join(gradient, rhs), ctx.lower_bound, keep=True)
        K = rhs.shape[1]
        if both.rule is not None:
            weights = both.rule.weights.tolist()
            left = join(*(-w * x[:, :K] for w, x in zip(weights, both.solutions)))
            right = join(*(x[:, K:] for x in both.solutions))
            inside = operator._bilinear_derivative(join(left, right) / 2, join(right, left))
        return (None, None, both.product.value[:, :K], *inside)


def _contour(operator: LinearOperator, rhs: Tensor, lower_bound: float | None, keep: bool = False) -> ContourProduct:
    rtol = min(1e-6, torch.finfo(rhs.dtype).eps ** 0.7)
    found = contour(operator, rhs, inverse=True, lower_bound=lower_bound, rtol=rtol, keep=keep)
    if Reason.PRECISION_LIMIT in found.product.reasons:
        warn(Reason.PRECISION_LIMIT.value, PrecisionWarning)
    found.product.raise_if_failed(rtol)
    return found


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
        left, right = root.unsqueeze(-1), root.unsqueeze(-2)
        inner = vectors.mT @ gradient @ vectors
        result: Tensor = vectors @ (-inner / (left * right * (left + right))) @ vectors.mT
        return result
