"""Likelihoods whose targets are independent given the outputs: Bernoulli, Poisson and heteroscedastic Gaussian."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from curvops.errors import MissingLabelsError
from curvops.network.data.inputs import within
from curvops.network.likelihoods.likelihood import (
    Independent,
    Outputs,
    check_rows,
    checked_missing,
    normal_like,
    require_known,
    weight_of,
)
from curvops.summary import summary


class Bernoulli(Independent):
    """The Bernoulli likelihood, p = sigmoid(f): several labels per point, or two classes from one logit (C = 1).

    Targets (n, C) are 0 or 1 of any dtype, or probabilities. The options have the meaning of those of
    `torch.nn.BCEWithLogitsLoss` with ``reduction="sum"``: with the target mass a = pos_weight y + 1 - y, the
    residual is weight (a p - pos_weight y) and H = diag(weight a p (1 - p)).

    Args:
        weight: non-negative; 0-d, one entry per output (C,), or for sequences of T positions one per position and
            output (T, C). Weights of points are sample weights and belong to the data.
        pos_weight: as `weight`. With either one, exp(log-likelihood) is no longer normalised over y.
        missing: "ignore" leaves out targets that are NaN, as if each had the sample weight zero; None refuses them.

    Raises:
        TypeError: the weights are neither tensors nor arrays.
        ValueError: the weights have another form, or `missing` is something else.

    Examples:
        >>> lin = co.linearize(nn.Linear(2, 1), (x, y[:, None].float()), co.likelihoods.Bernoulli())
        >>> lin.likelihood.log_prob(torch.zeros(1, 1), torch.ones(1, 1))
        tensor([-0.6931])
    """

    form = "labels"

    def __init__(
        self,
        weight: Tensor | np.ndarray | None = None,
        pos_weight: Tensor | np.ndarray | None = None,
        missing: str | None = None,
    ) -> None:
        self.missing = checked_missing(missing)
        weight, pos_weight = weight_of("weight", weight), weight_of("pos_weight", pos_weight)
        for name, tensor in (("weight", weight), ("pos_weight", pos_weight)):
            if tensor is not None and not (tensor.ndim <= 2 and tensor.is_floating_point() and within(tensor, 0.0)):
                raise ValueError(f"Bernoulli {name} must be 0-d, (C,) or (T, C), finite, at least 0; given {tensor}.")
        lengths = {len(tensor) for tensor in (weight, pos_weight) if tensor is not None and tensor.ndim == 2}
        self.positions = next(iter(lengths), None)
        self.weight, self.pos_weight = weight, pos_weight

    def __repr__(self) -> str:
        missing = "" if self.missing is None else f", missing={self.missing!r}"
        return f"Bernoulli(weight={summary(self.weight)}, pos_weight={summary(self.pos_weight)}{missing})"

    def log_factors(self, f: Outputs, y: Tensor) -> Tensor:
        yes, no = self._mass(f, y)
        return yes * logsigmoid(f) + no * logsigmoid(-f)

    def slope(self, f: Outputs, y: Tensor) -> Outputs:
        yes, no = self._mass(f, y)
        return no * f.sigmoid() - yes * (-f).sigmoid()  # avoids p - 1, which would lose digits

    def curvature(self, f: Outputs, y: Tensor) -> Tensor:
        return self._total_mass(f, y) * f.sigmoid() * (-f).sigmoid()

    def curvature_root(self, f: Outputs, y: Tensor) -> Tensor:
        return self._total_mass(f, y).sqrt() * (0.5 * (logsigmoid(f) + logsigmoid(-f))).exp()

    def sample(self, f: Outputs, generator: torch.Generator | None = None) -> Tensor:
        return torch.bernoulli(f.detach().sigmoid(), generator=generator)

    def drawn_slope(self, f: Outputs, y: Tensor, generator: torch.Generator | None) -> Outputs:
        drawn = self.sample(f, generator)
        return self._total_mass(f, y).sqrt() * ((1 - drawn) * f.sigmoid() - drawn * (-f).sigmoid())

    def mean(self, f: Outputs) -> Outputs:
        return f.sigmoid()

    def log_probabilities(self, f: Outputs) -> Float[Tensor, "n C 2"]:
        return logsigmoid(torch.stack([f, -f], -1))

    def check_targets(self, y: Tensor, num_outputs: int | None = None) -> None:
        check_rows(y, num_outputs, "Bernoulli")
        for name, tensor in (("weight", self.weight), ("pos_weight", self.pos_weight)):
            if num_outputs is not None and tensor is not None and tensor.shape[-1:].numel() not in (1, num_outputs):
                raise ValueError(f"{name} has {tensor.shape[-1]} entries, but the model has {num_outputs} outputs.")
        y, _ = self.observed(y, None)
        if y.numel() and not bool(((y >= 0) & (y <= 1)).all()):
            raise ValueError("Bernoulli targets lie in [0, 1]; convert -1 and 1 with (y + 1) / 2.")

    def any_targets(self, f: Outputs) -> Tensor:
        if self.pos_weight is not None:
            raise MissingLabelsError("a point's curvature under pos_weight")
        return torch.zeros_like(f)

    def _mass(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target mass of yes and of no, (n, C) each."""
        yes = y.to(f.dtype)
        no = 1 - yes
        if self.pos_weight is not None:
            yes = _each_row(self.pos_weight, f) * yes
        if self.weight is None:
            return yes, no
        weight = _each_row(self.weight, f)
        return weight * yes, weight * no

    def _total_mass(self, f: Tensor, y: Tensor) -> Tensor:
        if self.weight is None and self.pos_weight is None:
            return f.new_ones(())  # for y in [0, 1]
        yes, no = self._mass(f, y)
        return yes + no


def _each_row(weight: Tensor, f: Tensor) -> Tensor:
    """Expand a weight (T, C) to rows f (n, C) of whole sequences, position by position; return others unchanged."""
    return weight.repeat(len(f) // len(weight), 1) if weight.ndim == 2 else weight


class Poisson(Independent):
    """The Poisson likelihood of counts with rate e^f: the residual is e^f - y, and H = diag(e^f).

    Targets (n, C) are whole numbers, at least 0, of any dtype. For counts with different exposures (areas, times), let
    the model add the log exposure to its outputs. Rates must be representable: f < 88 in float32.

    Args:
        missing: "ignore" leaves out targets that are NaN, as if each had the sample weight zero; None refuses them.

    Raises:
        ValueError: `missing` is something else.

    Examples:
        >>> counts = torch.arange(8.0)[:, None]
        >>> lin = co.linearize(nn.Linear(2, 1), (x, counts), co.likelihoods.Poisson())
    """

    form = "counts"

    def log_factors(self, f: Outputs, y: Tensor) -> Tensor:
        counts = y.to(f.dtype)
        return counts * f - f.exp() - (counts + 1).lgamma()

    def slope(self, f: Outputs, y: Tensor) -> Outputs:
        return f.exp() - y.to(f.dtype)

    def curvature(self, f: Outputs, y: Tensor) -> Tensor:
        return f.exp()

    def curvature_root(self, f: Outputs, y: Tensor) -> Tensor:
        return (0.5 * f).exp()

    def sample(self, f: Outputs, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(f.detach().exp(), generator=generator)

    def mean(self, f: Outputs) -> Outputs:
        return f.exp()

    def variance(self, f: Outputs) -> Outputs:
        return f.exp()

    def check_targets(self, y: Tensor, num_outputs: int | None = None) -> None:
        if y.dtype == torch.bool:
            raise TypeError(f"Poisson targets are counts; given {y.dtype}. For yes or no use Bernoulli.")
        check_rows(y, num_outputs, "Poisson")
        y, _ = self.observed(y, None)
        if y.numel() and not bool(((y >= 0) & (y == y.round()) & y.isfinite()).all()):
            raise ValueError("Poisson targets are whole numbers, at least 0: let the outputs hold the log exposure.")

    def any_targets(self, f: Outputs) -> Tensor:
        return torch.zeros_like(f)


class HeteroscedasticGaussian(Independent):
    """The Gaussian likelihood of targets y ~ N(mu, sigma^2) with predicted variances: f = (mu_1 .. mu_m, s_1 .. s_m).

    The 2m outputs are first m means, then m log variances s = log sigma^2; targets are (n, m). H is the output Fisher
    diag(1 / sigma^2, 1/2), which is positive; the Hessian of -log p is not (at mu = s = 0 and y = 2 it has an
    eigenvalue of -0.56). Variances must be representable: |s| < 87 in float32. `predict(x)` is the distribution of the
    2m outputs, `predict(x, noise=True)` that of the m targets.

    Args:
        missing: "ignore" leaves out targets that are NaN, as if each had the sample weight zero; None refuses them.

    Raises:
        ValueError: `missing` is something else.

    Examples:
        >>> likelihood = co.likelihoods.HeteroscedasticGaussian()
        >>> lin = co.linearize(nn.Linear(2, 2), (x, torch.zeros(8, 1)), likelihood)
    """

    form = "numbers"

    def log_factors(self, f: Outputs, y: Tensor) -> Tensor:
        z, s = _standardise(f, y)
        return -0.5 * (z.square() + s + math.log(2 * math.pi))

    def slope(self, f: Outputs, y: Tensor) -> Outputs:
        return _score(*_standardise(f, y))

    def curvature(self, f: Outputs, y: Tensor) -> Tensor:
        s = f.chunk(2, -1)[1]
        return torch.cat([(-s).exp(), torch.full_like(s, 0.5)], -1)

    def curvature_root(self, f: Outputs, y: Tensor) -> Tensor:
        s = f.chunk(2, -1)[1]
        return torch.cat([(-0.5 * s).exp(), torch.full_like(s, math.sqrt(0.5))], -1)

    def sample(self, f: Outputs, generator: torch.Generator | None = None) -> Tensor:
        mu, s = f.detach().chunk(2, -1)
        return mu + (0.5 * s).exp() * normal_like(mu, generator)

    def drawn_slope(self, f: Outputs, y: Tensor, generator: torch.Generator | None) -> Outputs:
        s = f.chunk(2, -1)[1]
        # Drawn in standardised form: mu + sigma z would round z away if sigma is far below mu.
        return _score(normal_like(s, generator), s)

    def mean(self, f: Outputs) -> Float[Tensor, "n m"]:
        return f.chunk(2, -1)[0]

    def variance(self, f: Outputs) -> Float[Tensor, "n m"]:
        return f.chunk(2, -1)[1].exp()

    def check_targets(self, y: Tensor, num_outputs: int | None = None) -> None:
        if not y.is_floating_point():
            raise TypeError(f"HeteroscedasticGaussian targets must be floating-point; given {y.dtype}. Use y.float().")
        if y.ndim != 2 or (num_outputs is not None and 2 * y.shape[1] != num_outputs):
            half = f"(n, m), half of the model's {num_outputs or '2 m'} outputs"
            raise ValueError(f"HeteroscedasticGaussian targets have shape {half}; given {tuple(y.shape)}.")
        require_known(y, self.missing)

    def any_targets(self, f: Outputs) -> Tensor:
        return torch.zeros_like(self.mean(f))


def _standardise(f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return (y - mu) / sigma and s, (n, m) each."""
    mu, s = f.chunk(2, -1)
    return (y - mu) * (-0.5 * s).exp(), s


def _score(z: Tensor, s: Tensor) -> Tensor:
    """Return the residual (n, 2m) at standardised targets z."""
    return torch.cat([-z * (-0.5 * s).exp(), 0.5 * (1 - z.square())], -1)
