"""The density of the targets of a conjugate linear regression, its weights integrated out, with a slope in closed form.

The slope takes an inverse in place of the derivative of a Cholesky factor, which takes several times as long.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function, forward_ad

from curvops.sampling.reprior_conjugate import DataSpace, FeatureSpace, ReadoutFeatures, Targets, log_root


def log_marginal(space: FeatureSpace | DataSpace, features: ReadoutFeatures, targets: Targets) -> Float[Tensor, ""]:
    """log N(Y; 0, S) − log N(0; 0, λI) of all columns, S = λI + ΨΨᵀ, in float64.

    Differentiable in Ψ by reverse mode alone, any number of times: PyTorch (2.13) has a wrong forward derivative of
    `cholesky_inverse`, and one of any `Function` where forward modes are nested.
    """
    value: Tensor = _LogMarginal.apply(space, features, targets, space.factor(features))  # type: ignore[no-untyped-call]
    return value


def in_forward_mode() -> bool:
    """Whether the call is inside of `torch.func.jvp`, `jacfwd` or a level of dual numbers."""
    return bool(forward_ad._current_level >= 0)


class _LogMarginal(Function):
    """log √det(λS⁻¹)ᵏ − ½ tr YᵀS⁻¹Y of Ψ, Y and a factor L of Ψ's. Its slope in Ψ is αμᵀ − k S⁻¹Ψ, with α = S⁻¹Y.

    That holds what comes by way of L, too. L is handed over so that the slope, made of Ψ and L by differentiable
    operations, has derivatives of its own.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(space: FeatureSpace | DataSpace, features: Tensor, targets: Tensor, L: Tensor) -> Tensor:
        alpha, mean = space.posterior(L, features, targets)
        squares = space.level * _squares(alpha) + _squares(mean)  # of Y, by S⁻¹, without a difference
        return log_root(L, space.level, targets.shape[-1]) - 0.5 * squares

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.space, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        features, targets, L = ctx.saved_tensors
        alpha, mean = ctx.space.posterior(L, features, targets)
        slope = alpha @ mean.mT - targets.shape[-1] * ctx.space.decorrelated(L, features)
        return None, grads[0].to(slope.dtype) * slope, None, None


def _squares(block: Tensor) -> Tensor:
    return block.square().sum(dtype=torch.float64)
