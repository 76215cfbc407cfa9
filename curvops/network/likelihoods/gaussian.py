"""The Gaussian likelihood of real-valued targets: the outputs are their means."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from curvops.network.data.inputs import require_finite, tensor_of, within
from curvops.network.likelihoods.likelihood import Independent, Outputs, Weights, check_rows, normal_like, weigh
from curvops.summary import summary


class Gaussian(Independent):
    """The Gaussian likelihood of independent targets around the outputs: y ~ N(f, noise), H = I / noise.

    Targets have the outputs' shape (n, C). A different known variance per point is a sample weight.

    Args:
        noise: the *variance*, as in gpytorch: a positive number, or a floating-point tensor or array, 0-d or one entry
            per output (C,); a tensor may require a gradient.

    Raises:
        TypeError: the noise is neither a number nor a tensor.
        ValueError: the noise is not positive and finite.
    """

    def __init__(self, noise: float | int | Tensor | np.ndarray = 1.0) -> None:
        noise = tensor_of(noise)
        if isinstance(noise, bool) or not isinstance(noise, Tensor | numbers.Real):
            raise TypeError(f"Gaussian noise must be a variance, as a number or a tensor, got {noise!r}.")
        tensor = noise if isinstance(noise, Tensor) else torch.tensor(float(noise), dtype=torch.float64)
        if tensor.ndim > 1 or not tensor.is_floating_point() or not within(tensor, 0.0, strict=True):
            raise ValueError(
                "Gaussian noise is a variance: a positive finite number, or a floating-point tensor of them, 0-d or of "
                f"shape (C,); given {noise!r}."
            )
        self.noise = tensor

    @property
    def always_curved(self) -> bool:
        return within(self.noise, 0.0, strict=True)  # a cast may have made it infinite

    def __repr__(self) -> str:
        return f"Gaussian(noise={summary(self.noise)})"

    def log_prob(self, f: Outputs, y: Tensor, w: Weights = None) -> Float[Tensor, " n"]:
        squares = (f - y).square() / self.noise + (2.0 * math.pi * self.noise).log()
        return weigh(-0.5 * squares, w).sum(-1)

    def residual(self, f: Outputs, y: Tensor, w: Weights = None) -> Outputs:
        return weigh((f - y) / self.noise, w)

    def curvature(self, f: Outputs, y: Tensor) -> Tensor:
        return 1 / self.noise

    def curvature_root(self, f: Outputs, y: Tensor) -> Tensor:
        return self.noise.rsqrt()

    def sample(self, f: Outputs, generator: torch.Generator | None = None) -> Tensor:
        return (f + self.noise.sqrt() * normal_like(f, generator)).detach()

    def mc_residual(
        self,
        f: Outputs,
        y: Tensor,
        w: Weights = None,
        generator: torch.Generator | None = None,
    ) -> Outputs:
        return self.root_product(f, normal_like(f, generator), y, w)

    def mean(self, f: Outputs) -> Outputs:
        return f

    def check_targets(self, y: Tensor, num_outputs: int | None = None) -> None:
        if not y.is_floating_point():
            raise TypeError(
                f"Gaussian targets must have a floating-point dtype; given {y.dtype}. Convert with y.float(); "
                'for class labels use likelihood="classification".'
            )
        check_rows(y, num_outputs, "Gaussian")
        if num_outputs is not None and self.noise.numel() not in (1, num_outputs):
            raise ValueError(
                f"{self.noise.numel()} noise variances were given, but the model has {num_outputs} outputs."
            )
        require_finite("targets", y)

    @property
    def single_noise(self) -> Tensor | None:
        return self.noise if self.noise.numel() == 1 else None

    @property
    def hyperparameters(self) -> tuple[Tensor, ...]:
        return (self.noise,)

    def with_hyperparameters(self, tensors: Sequence[Tensor]) -> Gaussian:
        (noise,) = tensors
        new = copy.copy(self)
        new.noise = noise
        return new
