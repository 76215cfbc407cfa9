"""The decomposition of predictive uncertainty into noise (aleatoric) and uncertainty about the weights (epistemic).

For labels, with draws f_k of the outputs: the entropy of the mean is the total, and the mean of the entropies is the
part that would remain if the weights were known (aleatoric). Their difference, the mutual information of target and
weights, is the rest (epistemic; Depeweg et al. 2018). For numbers the same holds with variances, by the law of total
variance, in closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from curvops.metrics import divergences
from curvops.network.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood, Poisson
from curvops.posterior.predictions.held_out import ErrorOfMean, error_of_mean

LABELS = (Categorical, Bernoulli)
NUMBERS = (Gaussian, HeteroscedasticGaussian, Poisson)


@dataclass(frozen=True, eq=False)
class Uncertainty:
    """The uncertainty of the target at each point, total = aleatoric + epistemic, and the target's mean.

    Entropies in nats (`unit` "nats") for a categorical target, (N,), and for each label of a Bernoulli target, (N, C);
    variances (`unit` "variance") for each number, (N, C). `stderr` is the standard error of the epistemic part if it
    comes from draws (always for nats), and None if it has a closed form.

    Examples:
        >>> found = post.uncertainty(x)
        >>> found.unit, torch.allclose(found.total, found.aleatoric + found.epistemic)
        ('nats', True)
    """

    mean: Float[Tensor, "N C"]
    total: Float[Tensor, "N *C"]
    aleatoric: Float[Tensor, "N *C"]
    epistemic: Float[Tensor, "N *C"]
    stderr: Float[Tensor, "N *C"] | None
    unit: str

    def __repr__(self) -> str:
        parts = (f"{name} {float(getattr(self, name).mean()):.3g}" for name in ("total", "aleatoric", "epistemic"))
        return f"Uncertainty({len(self.total)} points, means in {self.unit}: {', '.join(parts)})"


def decompose_labels(
    likelihood: Likelihood, draws: Float[Tensor, "k N C"], error: ErrorOfMean = error_of_mean
) -> Uncertainty:
    """Return the decomposition in nats, from draws of the logits; `error` gives the standard error of means."""
    if isinstance(likelihood, Categorical):
        return Uncertainty(*_entropies(draws.log_softmax(-1), error), "nats")
    yes_no = F.logsigmoid(torch.stack([draws, -draws], -1))
    mean, total, aleatoric, epistemic, stderr = _entropies(yes_no, error)
    return Uncertainty(mean[..., 0], total, aleatoric, epistemic, stderr, "nats")


def _entropies(log_p: Float[Tensor, "k *N c"], error: ErrorOfMean) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return mean probabilities, and total, aleatoric and epistemic entropies, the last with its error."""
    p = log_p.exp()
    mean, aleatoric = p.mean(0), -(p * log_p).sum(-1).mean(0)
    of_each = divergences(log_p, mean)
    epistemic = of_each.mean(0)
    return mean, aleatoric + epistemic, aleatoric, epistemic, error(of_each)


def join_uncertainties(parts: Sequence[Uncertainty]) -> Uncertainty:
    """Concatenate the entropies of groups of points."""
    names = ("mean", "total", "aleatoric", "epistemic", "stderr")
    tensors: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return Uncertainty(unit=parts[0].unit, **tensors)


def decompose_numbers(
    likelihood: Likelihood, mean: Float[Tensor, "N C"], variance: Float[Tensor, "N C"]
) -> Uncertainty:
    """Return the decomposition as variances, from the mean and variance of each output."""
    if isinstance(likelihood, Gaussian):
        noise = likelihood.noise.to(mean).expand_as(mean)
        return _of_variances(mean, noise, variance)
    if isinstance(likelihood, HeteroscedasticGaussian):
        (m, s), (v, v_s) = mean.chunk(2, -1), variance.chunk(2, -1)
        return _of_variances(m, (s + v_s / 2).exp(), v)
    rate = (mean + variance / 2).exp()  # for a Poisson target, the mean of a log-normal rate
    return _of_variances(rate, rate, rate.square() * variance.expm1())


def decompose_drawn_numbers(likelihood: Likelihood, draws: Float[Tensor, "k N C"], error: ErrorOfMean) -> Uncertainty:
    """Return the decomposition as variances, by the law of total variance over draws of the outputs."""
    if isinstance(likelihood, Gaussian):
        means, noise = draws, likelihood.noise.to(draws).expand(draws.shape[-1]).expand_as(draws)
    elif isinstance(likelihood, HeteroscedasticGaussian):
        means, log_variance = draws.chunk(2, -1)
        noise = log_variance.exp()
    else:
        means = noise = draws.exp()
    squares = (means - means.mean(0)).square()
    aleatoric, epistemic = noise.mean(0), squares.mean(0)
    return Uncertainty(means.mean(0), aleatoric + epistemic, aleatoric, epistemic, error(squares), "variance")


def _of_variances(mean: Tensor, aleatoric: Tensor, epistemic: Tensor) -> Uncertainty:
    return Uncertainty(mean, aleatoric + epistemic, aleatoric, epistemic, None, "variance")
