"""The Gaussian likelihood of real-valued targets, whose means are the outputs, and the noise that residuals show."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from curvops.errors import MissingLabelsError, NoiseWarning, warn
from curvops.network.data.inputs import tensor_of, within
from curvops.network.likelihoods.composite import Multitask
from curvops.network.likelihoods.likelihood import (
    ROUNDINGS,
    Independent,
    Likelihood,
    Outputs,
    check_rows,
    checked_missing,
    normal_like,
    require_known,
)
from curvops.summary import summary


class Gaussian(Independent):
    """The Gaussian likelihood of independent targets around the outputs: y ~ N(f, noise), H = I / noise.

    Targets have the outputs' shape (n, C). Of points whose variances are known, the model returns their logarithms as
    well, for `HeteroscedasticGaussian`: a weight w counts a point w times, in the noise and in the evidence, too.

    Args:
        noise: the *variance*, as in gpytorch: a positive number, or a floating-point tensor or array, 0-d or one entry
            per output (C,); a tensor may require a gradient. For a model of images (N, C, ...) it goes with the
            channels, if the last dimension has not C entries, too; one of shape (C, 1, 1) with C > 1 always does, since
            a noise with several dimensions, all but one of length 1, broadcasts over a point's outputs as in torch. A
            single variance, of whatever shape, leaves the outputs in the last dimension. None, as for "regression",
            means unknown: `co.linearize` estimates it by the (weighted) mean squared residual of the training data, to
            four digits, and `co.laplace` by that of left-out points, if it is larger. "per_output" is the same for each
            of the C outputs. Before that, if the residuals are zero, and for an output without targets it counts as 1.
        missing: "ignore" leaves out targets that are NaN, as if each had the sample weight zero; None refuses them.

    Raises:
        TypeError: the noise is neither a number nor a tensor, nor None or "per_output".
        ValueError: the noise is not positive and finite, or `missing` is something else.

    Examples:
        >>> line = torch.linspace(-1, 1, 50).unsqueeze(1)
        >>> noisy = line + 0.1 * torch.where(torch.arange(50) % 2 == 0, 1.0, -1.0).unsqueeze(1)
        >>> identity = nn.Linear(1, 1)
        >>> _ = identity.weight.data.fill_(1.0), identity.bias.data.fill_(0.0)
        >>> co.linearize(identity, (line, noisy), co.likelihoods.Gaussian()).likelihood
        Gaussian(noise=0.01, estimated)
        >>> co.likelihoods.Gaussian(noise=0.1)  # the variance
        Gaussian(noise=0.1)
    """

    form = "numbers"

    def __init__(
        self, noise: float | int | Tensor | np.ndarray | str | None = None, missing: str | None = None
    ) -> None:
        self.missing = checked_missing(missing)
        self.estimated, self.found = None, False
        """Whether it was estimated: not before, nor if the residuals are zero to rounding."""
        if noise is None or (isinstance(noise, str) and noise == "per_output"):
            self.estimated, noise = noise or "one", 1.0
        noise = tensor_of(noise)
        if isinstance(noise, bool) or not isinstance(noise, Tensor | numbers.Real):
            raise TypeError(f"Gaussian noise is a variance, a number or a tensor, None or 'per_output'; got {noise!r}.")
        tensor = noise if isinstance(noise, Tensor) else torch.tensor(float(noise), dtype=torch.float64)
        one = sum(length != 1 for length in tensor.shape) <= 1
        if not one or not tensor.is_floating_point() or not within(tensor, 0.0, strict=True):
            raise ValueError(
                f"Gaussian noise is a variance: positive and finite, 0-d, (C,) or such as (C, 1, 1); given {noise!r}."
            )
        self.noise = tensor

    @property
    def described(self) -> str:
        return f"Gaussian with {self.printed_noise}"

    @property
    def printed_noise(self) -> str:
        """The noise in words, and whether it was estimated."""
        if self.estimated and not self.found:
            return "unknown noise"
        return f"noise {summary(self.noise)}{' (estimated)' if self.estimated else ''}"

    def __repr__(self) -> str:
        noise = f"noise={summary(self.noise)}{', estimated' if self.estimated else ''}"
        if self.estimated and not self.found:
            noise = "" if self.estimated == "one" else f"noise={self.estimated!r}"
        missing = "" if self.missing is None else f"missing={self.missing!r}"
        return f"Gaussian({', '.join(filter(None, (noise, missing)))})"

    def along(self, shape: torch.Size) -> tuple[Gaussian, int | None]:
        """Return this likelihood with noise (C,), and the dimension of outputs (N, *shape) that holds the C outputs.

        It is 1 or −1, or None for a single variance. Raises ValueError if neither has C entries, or if both have.
        """
        noise, C = self.noise, self.noise.numel()
        if self.estimated == "per_output" and len(shape) > 2:
            raise ValueError("noise='per_output' needs outputs (N, C) or (N, T, C): pass a tensor such as (C, 1, 1).")
        if C == 1 or len(shape) == noise.ndim == 1:
            class_dim = None
        else:
            ends = (d for d in {-len(shape), -1} if shape[d] == C)
            fits = [d for d in ends if noise.ndim == 1 or (noise.ndim >= -d and noise.shape[d] == C)]
            if len(fits) != 1:
                ones = (1,) * (len(shape) - 1)
                shapes = " or ".join(dict.fromkeys(str(form) for form in ((shape[0], *ones), (*ones, shape[-1]))))
                raise ValueError(
                    f"Gaussian noise {tuple(noise.shape)} does not show along which dimension of the outputs it goes: "
                    f"pass one variance, or a tensor of shape {shapes}."
                )
            class_dim = -1 if fits == [-1] else 1
        new = copy.copy(self)
        new.noise = noise.flatten() if noise.ndim > 1 else noise
        return new, class_dim

    def log_factors(self, f: Outputs, y: Tensor) -> Tensor:
        return -0.5 * ((f - y).square() / self.noise + (2.0 * math.pi * self.noise).log())

    def slope(self, f: Outputs, y: Tensor) -> Outputs:
        return (f - y) / self.noise

    def drawn_slope(self, f: Outputs, y: Tensor, generator: torch.Generator | None) -> Outputs:
        return self.noise.rsqrt() * normal_like(f, generator)

    def curvature(self, f: Outputs, y: Tensor) -> Tensor:
        return 1 / self.noise

    def curvature_root(self, f: Outputs, y: Tensor) -> Tensor:
        return self.noise.rsqrt()

    def sample(self, f: Outputs, generator: torch.Generator | None = None) -> Tensor:
        return (f + self.noise.sqrt() * normal_like(f, generator)).detach()

    def mean(self, f: Outputs) -> Outputs:
        return f

    def variance(self, f: Outputs) -> Outputs:
        return self.noise.to(f).expand_as(f)

    def check_targets(self, y: Tensor, num_outputs: int | None = None) -> None:
        if not y.is_floating_point():
            raise TypeError(f"Gaussian targets must be floating-point, as y.float(), not {y.dtype}.")
        check_rows(y, num_outputs, "Gaussian")
        if num_outputs is not None and self.noise.shape not in ((), (1,), (num_outputs,)):
            raise ValueError(f"the model has {num_outputs} outputs, and the noise has shape {tuple(self.noise.shape)}.")
        require_known(y, self.missing)

    def any_targets(self, f: Outputs) -> Tensor:
        if self.estimated and not self.found:
            raise MissingLabelsError("the noise", "Pass it, co.likelihoods.Gaussian(noise=variance). ")
        return torch.zeros_like(f)

    @property
    def single_noise(self) -> Tensor | None:
        return self.noise if self.noise.numel() == 1 else None

    @property
    def hyperparameters(self) -> tuple[Tensor, ...]:
        return (self.noise,)

    def with_hyperparameters(self, tensors: Sequence[Tensor]) -> Gaussian:
        (noise,) = tensors
        new = copy.copy(self)
        new.noise, new.estimated = noise, None
        return new


def gaps_and_weights(likelihood: Likelihood, f: Tensor, y: Tensor, w: Tensor | None) -> Float[Tensor, "2 n c"]:
    """Return f − y, zero for missing targets, and the weights, both in the outputs' shape."""
    unit = likelihood.with_hyperparameters([torch.ones_like(noise) for noise in likelihood.hyperparameters])
    return torch.stack([unit.residual(f, y), unit.hessian_product(f, torch.ones_like(f), y, w)])


def sums_of_squares(likelihood: Likelihood, f: Tensor, y: Tensor, w: Tensor | None) -> Float[Tensor, "4 C"]:
    """Return Σ w (y − f)², Σ w y², Σ w and the number of w > 0 of each output, over points and positions, in float64.

    Of several outputs these are the Gaussian ones, one after the other.
    """
    members = [member for member in likelihood.split(f, y, w) if isinstance(member[0].of_position, Gaussian)]
    return torch.cat([_sums_of_squares(*member) for member in members], 1)


def _sums_of_squares(likelihood: Likelihood, f: Tensor, y: Tensor, w: Tensor | None) -> Float[Tensor, "4 C"]:
    T = likelihood.positions or 1
    (gap, weights), (target, _) = (gaps_and_weights(likelihood, at, y, w).double() for at in (f, torch.zeros_like(f)))
    terms = torch.stack([weights * gap.square(), weights * target.square(), weights, (weights > 0).double()])
    return terms.view(4, len(f) * T, -1).sum(1)


def mean_squares(likelihood: Likelihood, sums: Float[Tensor, "4 C"], eps: float) -> Float[Tensor, " m"] | None:
    """Return the mean squared residual, over all outputs or for each if the noise is; None if one is but rounding.

    It is NaN for an output without targets, if others have some.
    """
    gaussian = likelihood.of_position
    assert isinstance(gaussian, Gaussian)
    if gaussian.estimated != "per_output" and gaussian.noise.numel() == 1:
        sums = sums.sum(1, keepdim=True)
    squares, sizes, weights, _ = sums
    # Residuals that are rounding tell nothing of the noise.
    seen, shown = weights > 0, squares > (ROUNDINGS * eps) ** 2 * sizes
    return squares / weights if bool((shown | ~seen).all() & seen.any()) else None


def gaussians_with_sums(
    likelihood: Likelihood, sums: Float[Tensor, "4 C"]
) -> list[tuple[Likelihood, Float[Tensor, "4 c"] | None]]:
    """Return each of the likelihood's members with its columns of `sums_of_squares`; None for one not Gaussian."""
    if not isinstance(likelihood, Multitask):
        return [(likelihood, sums)]
    members, start = list[tuple[Likelihood, Tensor | None]](), 0
    for member, R in zip(likelihood.members, likelihood.num_outputs):
        stop = start + (R // (member.positions or 1) if isinstance(member.of_position, Gaussian) else 0)
        members.append((member, sums[:, start:stop] if stop > start else None))
        start = stop
    return members


def estimated_noise(likelihood: Likelihood, sums: Float[Tensor, "4 C"], like: Tensor) -> Likelihood:
    """Return the likelihood with its noise estimated from these sums, in the dtype of `like`, to four digits.

    Another order or other batches change the sums by rounding, but not the noise. Warns with `NoiseWarning` if the
    residuals do not show it: it then stays unknown, and counts as 1, as does that of an output without targets. Of
    several outputs each has its own.
    """
    if isinstance(likelihood, Multitask):
        members = gaussians_with_sums(likelihood, sums)
        return likelihood.with_members(
            estimated_noise(member, member_sums, like) if member_sums is not None and member.needs_noise else member
            for member, member_sums in members
        )
    gaussian, limits = likelihood.of_position, torch.finfo(like.dtype)
    assert isinstance(gaussian, Gaussian)
    if not bool(sums.isfinite().all()):
        return likelihood  # the outputs hold NaN, of which a posterior tells
    squares = mean_squares(likelihood, sums, limits.eps)
    if squares is None or not bool((squares.isnan() | (squares > limits.tiny) & (squares < limits.max)).all()):
        why = "the network's outputs equal its targets to rounding" if bool(sums[2].any()) else "it has no targets"
        warn(
            f"the noise of this regression is unknown, and its residuals do not show it: {why}. "
            "It counts as 1 (co.laplace tries to estimate it from left-out points). Pass it, "
            "co.likelihoods.Gaussian(noise=variance), or find it with points that were left out of training, "
            "co.evidence.validate(post, x, y, over='noise').",
            NoiseWarning,
        )
        return likelihood
    values = squares.tolist()
    if unseen := [output for output, value in enumerate(values) if math.isnan(value)]:
        warn(
            f"the noise of outputs {unseen} is unknown, since all their targets are missing or have the weight zero. "
            "It counts as 1. Pass that of each output, co.likelihoods.Gaussian(noise=tensor), or leave these out.",
            NoiseWarning,
        )
    noise = like.new_tensor([1.0 if math.isnan(value) else float(f"{value:.4g}") for value in values])
    new = likelihood.with_hyperparameters([noise if gaussian.estimated == "per_output" else noise[0]])
    assert isinstance(new.of_position, Gaussian)
    new.of_position.estimated, new.of_position.found = gaussian.estimated, True
    return new
