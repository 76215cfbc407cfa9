"""The noise of a Gaussian likelihood that the residuals of the training data show."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.errors import NoiseWarning, warn
from curvops.network.likelihoods.gaussian import Gaussian
from curvops.network.likelihoods.likelihood import Likelihood

EXACT_FIT = 64.0
"""Residuals within this many eps of the targets' root mean square are rounding, and tell nothing of the noise."""


def gaps_and_weights(likelihood: Likelihood, f: Tensor, y: Tensor, w: Tensor | None) -> Float[Tensor, "2 n c"]:
    """Return f − y and the weights, both in the outputs' shape."""
    unit = likelihood.with_hyperparameters([torch.ones_like(noise) for noise in likelihood.hyperparameters])
    weights = f.new_ones(len(f), 1) if w is None else w.reshape(len(f), -1)
    each = weights.unsqueeze(-1).expand(-1, likelihood.positions or 1, f.shape[1] // (likelihood.positions or 1))
    return torch.stack([unit.residual(f, y), each.flatten(1)])


def sums_of_squares(likelihood: Likelihood, f: Tensor, y: Tensor, w: Tensor | None) -> Float[Tensor, "3 C"]:
    """Return Σ w (y − f)², Σ w y² and Σ w of each output, over points and positions, in float64."""
    T = likelihood.positions or 1
    (gap, weights), (target, _) = (gaps_and_weights(likelihood, at, y, w).double() for at in (f, torch.zeros_like(f)))
    each = torch.stack([weights * gap.square(), weights * target.square(), weights])
    return each.view(3, len(f) * T, -1).sum(1)


def mean_squares(likelihood: Likelihood, sums: Float[Tensor, "3 C"], eps: float) -> Float[Tensor, " m"] | None:
    """Return the mean squared residual, over all outputs or for each if the noise is; None if one is but rounding."""
    gaussian = likelihood.of_position
    assert isinstance(gaussian, Gaussian)
    if gaussian.estimated != "per_output" and gaussian.noise.numel() == 1:
        sums = sums.sum(1, keepdim=True)
    squares, sizes, weights = sums
    shown = (weights > 0) & (squares > (EXACT_FIT * eps) ** 2 * sizes)
    return squares / weights if bool(shown.all()) else None


def needs_noise(likelihood: Likelihood) -> bool:
    """Return whether the likelihood is a Gaussian one whose noise is to be estimated."""
    return isinstance(likelihood.of_position, Gaussian) and likelihood.of_position.estimated is not None


def estimated_noise(likelihood: Likelihood, sums: Float[Tensor, "3 C"], like: Tensor) -> Likelihood:
    """Return the likelihood with its noise estimated from these sums, in the dtype of `like`, to four digits.

    Another order or other batches change the sums by rounding, but not the noise. Warns with `NoiseWarning` if the
    residuals do not show it: it then stays unknown, and counts as 1.
    """
    gaussian, limits = likelihood.of_position, torch.finfo(like.dtype)
    assert isinstance(gaussian, Gaussian)
    if not bool(sums.isfinite().all()):
        return likelihood  # the outputs hold NaN, of which a posterior tells
    found = mean_squares(likelihood, sums, limits.eps)
    if found is None or not bool(((found > limits.tiny) & (found < limits.max)).all()):
        warn(
            "the noise of this regression is unknown, and its residuals do not show it: the network's outputs equal "
            "its targets to rounding. It counts as 1 (co.laplace tries to estimate it from left-out points). Pass it, "
            "co.likelihoods.Gaussian(noise=variance), or find it with points that were left out of training, "
            "co.evidence.validate(post, x, y, over='noise').",
            NoiseWarning,
        )
        return likelihood
    noise = like.new_tensor([float(f"{value:.4g}") for value in found.tolist()])
    new = likelihood.with_hyperparameters([noise if gaussian.estimated == "per_output" else noise[0]])
    assert isinstance(new.of_position, Gaussian)
    new.of_position.estimated, new.of_position.found = gaussian.estimated, True
    return new
