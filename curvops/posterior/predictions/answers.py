"""Answers from the outputs' moments or draws: class probabilities, the uncertainty of the target, test log-likelihoods.

The uncertainty is decomposed into noise (aleatoric) and uncertainty about the weights (epistemic). For labels, with
draws f_k of the outputs: the entropy of the mean is the total, and the mean of the entropies is the part that would
remain if the weights were known (aleatoric). Their difference, the mutual information of target and weights, is the
rest (epistemic; Depeweg et al. 2018). Where each label has a normal logit of its own, the means are integrals over it,
and so is the likelihood of a target with a single normal output.
For numbers the same holds with variances, by the law of total variance, in closed form where the likelihood has one,
otherwise over draws.

For a network with several outputs the answers have their names (`NamedPredictions`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.argument_types import Points
from curvops.checks import check_choice, refuse, shown
from curvops.errors import NotLogitsWarning, warn
from curvops.linalg import Estimate
from curvops.metrics import divergences
from curvops.network.data.inputs import as_tensors, move, num_points, sizes_of
from curvops.network.likelihoods import (
    Bernoulli,
    BradleyTerry,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    Sequences,
)
from curvops.operators import Linearization

MOST_MOVED = 1.0
"""The most, in nats, by which a constant in all logits may move one against another without a warning."""
DYADIC_COPIES = 10
"""The number of copies of its two points in each pair of the dyadic score."""
NODES, FARTHEST = 1001, 8.5
"""The points of the integrals over a normal logit, and the standard deviations to which they reach on both sides.

They are evenly spaced: the error of this rule falls exponentially with their distance, and is below rounding for logits
with a standard deviation of up to 60 (Trefethen & Weideman 2014).
"""
WIDEST, NEGLIGIBLE = 40.0, 40.0
"""The standard deviations to which the search for a likelihood's integrand reaches, and the nats below its maximum at
which the integrand no longer matters."""


ErrorOfMean = Callable[[Float[Tensor, "k *N"]], Float[Tensor, "*N"]]
"""A function from the series that is averaged over draws to the standard error of its mean."""


def error_of_mean(series: Float[Tensor, "k *N"]) -> Float[Tensor, "*N"]:
    """Return the standard error of the mean over independent draws."""
    k = len(series)
    return series.std(0) / k**0.5 if k > 1 and series.numel() else torch.full_like(series[0], math.inf)


def log_mean_exp(log_p: Float[Tensor, "k N"], error: ErrorOfMean = error_of_mean) -> Estimate:
    """Return log mean_k exp(log_p) per point, with its standard error by the delta method."""
    k = len(log_p)
    value = log_p.logsumexp(0) - math.log(k)
    return Estimate(value, error((log_p - value).exp()), k, 0)


def targets_by_position(lin: Linearization, x: Any, y: Any) -> Tensor:
    """Return the targets of test data by position; raise TypeError or ValueError for unsuitable ones."""
    argument, y = y, as_tensors(y)
    if y is None or (isinstance(y, Tensor) and not y.ndim):
        raise TypeError(f"y must be a tensor of targets as the likelihood takes them, got {shown(argument)}.")
    device, dtype = lin.theta.device, lin.theta.dtype
    points = num_points(lin.inputs_of(x))
    if sizes_of(y) != {points}:
        sizes = ", ".join(map(str, sorted(sizes_of(y))))
        raise ValueError(f"there are {points} inputs, but {sizes} targets: pass one target per point.")
    layout = lin.model.layout
    y = move(y if layout is None else layout.targets(y), device, dtype)
    lin.likelihood.check_targets(y, lin.num_outputs)
    return y.flatten(0, 1) if isinstance(lin.likelihood, Sequences) else y


def log_likelihoods(
    likelihood: Likelihood, drawn: Iterable[Float[Tensor, "k n C"]], targets: Tensor
) -> Float[Tensor, "k N"]:
    """Yield log p(y | f_k) of each target under draws of the outputs, some points at a time."""
    start, parts = 0, []
    for draws in drawn:
        some = targets[start : start + draws.shape[1]]
        together = some.repeat(len(draws), *[1] * (some.ndim - 1))  # all draws in one call
        parts.append(likelihood.log_prob(draws.flatten(0, 1), together).unflatten(0, draws.shape[:2]))
        start += len(some)
    return torch.cat(parts, 1)


def dyadic_score(
    log_p: Float[Tensor, "k N"], generator: torch.Generator | None, error: ErrorOfMean = error_of_mean
) -> Estimate:
    """Return log mean_k p_k(y₁|x₁)^n₁ p_k(y₂|x₂)^n₂ of random pairs of points (Osband et al. 2022), (⌊N/2⌋,).

    The copies in a pair are n₁ ~ U{1, …, 9} and n₂ = 10 − n₁. It measures how predictions vary together, which a mean
    over points does not show.
    """
    n, device = log_p.shape[1], None if generator is None else generator.device
    order = torch.randperm(n, generator=generator, device=device)[: n - n % 2].view(2, -1)
    first = torch.randint(1, DYADIC_COPIES, order.shape[1:], generator=generator, device=device)
    copies = torch.stack([first, DYADIC_COPIES - first]).to(log_p.device)
    return log_mean_exp((log_p[:, order.to(log_p.device)] * copies).sum(1), error)


def gaussian_log_density(
    mean: Float[Tensor, "N C"], covariance: Float[Tensor, "N C C"], y: Float[Tensor, "N C"]
) -> Float[Tensor, " N"]:
    """Return log N(y; mean, covariance) of each point, in nats, over the targets that are not NaN."""
    present = ~y.isnan()
    # A missing target counts as one of its own, with the variance 1 and equal to its mean.
    both = present.unsqueeze(-1) & present.unsqueeze(-2)
    L = torch.linalg.cholesky(covariance.where(both, torch.diag_embed(torch.ones_like(y))))
    gap = (y - mean).where(present, 0)
    whitened = torch.linalg.solve_triangular(L, gap.unsqueeze(-1), upper=False).squeeze(-1)
    half_logdet = (
        L.diagonal(dim1=-2, dim2=-1).log().sum(-1) + present.sum(-1, dtype=y.dtype) * math.log(2 * math.pi) / 2
    )
    return -whitened.square().sum(-1) / 2 - half_logdet


LABELS = (Categorical, Bernoulli)
"""Likelihoods of classes and labels whose outputs are logits."""
NUMBERS = (Gaussian, HeteroscedasticGaussian, Poisson)
"""Likelihoods of numbers whose moments have a closed form if the outputs are normal."""
NAMED = ("classes", "labels")
"""The forms of targets that have probabilities."""


@dataclass(frozen=True, eq=False)
class Uncertainty:
    """The uncertainty of the target at each point, total = aleatoric + epistemic, and the target's mean.

    Entropies in nats (`unit` "nats") for a categorical target, (N,), and for each label of a Bernoulli target, (N, C);
    variances (`unit` "variance") for each number, (N, C). Several categorical targets of a point, as a distribution of
    the user's may have, give (N, targets), and a mean (N, targets, classes). Of positions, N stands for (N, T) or
    (N, h, w), and C is where the model has it. `stderr` is the standard error of the epistemic part if it comes from
    draws (always for classes), and None if it is exact.

    Examples:
        >>> found = post.uncertainty(x)
        >>> found.unit, torch.allclose(found.total, found.aleatoric + found.epistemic)
        ('nats', True)
    """

    mean: Float[Tensor, "N *m"]
    total: Float[Tensor, "N *C"]
    aleatoric: Float[Tensor, "N *C"]
    epistemic: Float[Tensor, "N *C"]
    stderr: Float[Tensor, "N *C"] | None
    unit: str

    def __repr__(self) -> str:
        parts = (f"{name} {float(getattr(self, name).mean()):.3g}" for name in ("total", "aleatoric", "epistemic"))
        return f"Uncertainty({len(self.total)} points, means in {self.unit}: {', '.join(parts)})"


def decompose_normal_labels(
    likelihood: Bernoulli, mean: Float[Tensor, "n C"], variance: Float[Tensor, "n C"]
) -> Uncertainty:
    """Return the decomposition in nats of labels with normal logits, by an integral over each."""
    nodes = torch.linspace(-FARTHEST, FARTHEST, NODES, dtype=mean.dtype, device=mean.device)
    density = (-0.5 * nodes.square()).softmax(0)
    deviation = variance.clamp_min(torch.finfo(mean.dtype).tiny).sqrt()
    logits = mean + deviation * nodes.view(-1, 1, 1)
    return decompose_labels(likelihood, logits, None, lambda series: torch.tensordot(density, series, 1))


def decompose_labels(
    likelihood: Likelihood,
    outputs: Float[Tensor, "k n C"],
    error: ErrorOfMean | None = error_of_mean,
    average: Callable[[Float[Tensor, "k *n"]], Float[Tensor, "*n"]] = lambda series: series.mean(0),
) -> Uncertainty:
    """Return the decomposition in nats, averaged over outputs; `error` gives the standard error of means over draws."""
    log_p = of_draws(likelihood.log_probabilities, outputs)
    p = log_p.exp()
    mean, aleatoric = average(p), -average((p * log_p).sum(-1))
    of_each = divergences(log_p, mean)
    epistemic, stderr = average(of_each), None if error is None else error(of_each)
    mean = mean[..., 0] if likelihood.form == "labels" else mean
    return Uncertainty(mean, aleatoric + epistemic, aleatoric, epistemic, stderr, "nats")


def normal_log_likelihoods(
    likelihood: Likelihood, mean: Float[Tensor, "n 1"], variance: Float[Tensor, "n 1"], targets: Tensor
) -> Float[Tensor, " n"]:
    """Return log p(y) of targets that have one normal output each, by an integral over it.

    The integrand may be far from the mean of the output, and narrow: wide nodes find where it is, and as many nodes
    integrate there.
    """
    deviation = variance.clamp_min(torch.finfo(mean.dtype).tiny).sqrt()
    wide = torch.linspace(-WIDEST, WIDEST, NODES, dtype=mean.dtype, device=mean.device).unsqueeze(1)

    def integrand(z: Float[Tensor, "k n"]) -> Float[Tensor, "k n"]:
        f = mean + deviation * z.unsqueeze(-1)
        log_p = log_likelihoods(likelihood, [f], targets)
        # Far out a density may overflow, as that of a count does with its rate: it is zero there.
        overflows = log_p.isnan() & f.squeeze(-1).isfinite()
        return log_p.masked_fill(overflows, -math.inf) - z.square() / 2

    with torch.no_grad():
        found, step = integrand(wide.expand(-1, len(mean))), wide[1] - wide[0]
        matters = found >= found.amax(0) - NEGLIGIBLE
        first, last = wide.where(matters, math.inf).amin(0) - step, wide.where(matters, -math.inf).amax(0) + step
    z = first + (last - first) * (wide / WIDEST + 1) / 2
    return integrand(z).logsumexp(0) + ((last - first) / (NODES - 1)).log() - math.log(2 * math.pi) / 2


def join_uncertainties(parts: Sequence[Uncertainty]) -> Uncertainty:
    """Concatenate the uncertainties of groups of points."""
    names = [name for name, value in vars(parts[0]).items() if isinstance(value, Tensor)]
    tensors: dict[str, Any] = {name: torch.cat([getattr(uncertainty, name) for uncertainty in parts]) for name in names}
    return replace(parts[0], **tensors)


def add_noise(
    likelihood: Likelihood, mean: Float[Tensor, "N C"], covariance: LinearOperator
) -> tuple[Float[Tensor, "N m"], LinearOperator]:
    """Return the moments of Gaussian targets from those of the outputs, which may be joint within some points."""
    C = mean.shape[-1]
    noise = likelihood.variance(mean)
    if isinstance(likelihood, HeteroscedasticGaussian):
        variance = covariance.diagonal(dim1=-2, dim2=-1).reshape_as(mean)
        targets = decompose_numbers(likelihood, mean, variance)
        mean, noise = targets.mean, targets.aleatoric
        means = torch.arange(covariance.shape[-1], device=mean.device).view(-1, C)[:, : C // 2].flatten()
        covariance = covariance[..., means, :][..., means]
    return mean, covariance.add_diagonal(noise.reshape(covariance.shape[:-1]))


def decompose_numbers(
    likelihood: Likelihood, mean: Float[Tensor, "N C"], variance: Float[Tensor, "N C"]
) -> Uncertainty:
    """Return the decomposition as variances, from the mean and variance of each output."""
    if isinstance(likelihood, Gaussian):
        return _of_variances(mean, likelihood.variance(mean), variance)
    if isinstance(likelihood, HeteroscedasticGaussian):
        (m, s), (v, v_s) = mean.chunk(2, -1), variance.chunk(2, -1)
        return _of_variances(m, (s + v_s / 2).exp(), v)
    rate = (mean + variance / 2).exp()  # for a Poisson target, the mean of a log-normal rate
    return _of_variances(rate, rate, rate.square() * variance.expm1())


def decompose_drawn_numbers(
    likelihood: Likelihood, draws: Float[Tensor, "k N C"], error: ErrorOfMean, correction: int
) -> Uncertainty:
    """Return the decomposition as variances, by the law of total variance over draws of the outputs."""
    mean, deviations, aleatoric = moments_of_draws(likelihood, draws, correction)
    squares = deviations.square()
    epistemic = squares.mean(0)
    return Uncertainty(mean, aleatoric + epistemic, aleatoric, epistemic, error(squares), "variance")


def moments_of_draws(
    likelihood: Likelihood, draws: Float[Tensor, "k N C"], correction: int
) -> tuple[Float[Tensor, "N m"], Float[Tensor, "k N m"], Float[Tensor, "N m"]]:
    """Return the mean of the targets, the deviations from it of their mean at each draw, and their mean variance.

    The deviations are scaled such that their mean square is the variance with this correction, as in `torch.var`.
    """
    means, k = of_draws(likelihood.mean, draws), len(draws)
    mean = means.mean(0)
    scale = math.sqrt(k / max(k - correction, 1))
    return mean, (means - mean) * scale, average(likelihood.variance, draws)


def _of_variances(mean: Tensor, aleatoric: Tensor, epistemic: Tensor) -> Uncertainty:
    return Uncertainty(mean, aleatoric + epistemic, aleatoric, epistemic, None, "variance")


def checked_link(link: str | None, likelihood: Likelihood) -> str:
    """Return the link, of logits "probit" if it is None, otherwise "mc".

    Raises ValueError for an unknown link, one that does not fit the likelihood, or one without probabilities.
    """
    refuse(likelihood.form not in NAMED, f"{likelihood!r} has no class probabilities; use predict or functions(x, k).")
    links = ("mc", "network")
    if isinstance(likelihood, LABELS):  # whose outputs are logits
        links = ("probit", *links, *(("bridge", "bridge_norm") if isinstance(likelihood, Categorical) else ()))
    link = links[0] if link is None else link
    check_choice(f"link of {likelihood!r}", link, links)
    return link


def normal_probabilities(
    link: str, likelihood: Likelihood, mean: Callable[[], Float[Tensor, "N C"]], covariance: LinearOperator
) -> Float[Tensor, "N C"]:
    """Return the probabilities of normal logits by "probit", "bridge" or "bridge_norm".

    `mean` is called after the covariance is computed, whose passes may have found the outputs, too.
    """
    if link.startswith("bridge"):
        blocks = covariance.to_dense()
        return bridge(mean(), blocks, normalised=link == "bridge_norm")
    logits = probit_logits(likelihood, mean, covariance)
    return logits.sigmoid() if isinstance(likelihood, Bernoulli) else logits.softmax(-1)


def probit_logits(
    likelihood: Likelihood, mean: Callable[[], Float[Tensor, "N C"]], covariance: LinearOperator
) -> Float[Tensor, "N C"]:
    """Return the logits of the probabilities by "probit"."""
    if isinstance(likelihood, BradleyTerry):
        blocks = covariance.to_dense()
        return preference(mean(), blocks)
    variance, logits = covariance.diagonal(dim1=-2, dim2=-1), mean()
    kappa = probit_factors(variance)
    if isinstance(likelihood, Categorical):
        _warn_of_common_part(logits.detach(), kappa.detach())
    return logits * kappa


def _warn_of_common_part(logits: Float[Tensor, "N C"], kappa: Float[Tensor, "N C"]) -> None:
    """Warn if a constant in all logits of a point, which the softmax ignores, decides its probabilities by "probit"."""
    common = logits.mean(-1)
    moved = common.abs() * (kappa.amax(-1) - kappa.amin(-1))
    if len(moved) and bool(moved.median() > MOST_MOVED):
        warn(
            f"the logits of a point have a constant in common, {float(common.median()):.3g}, which changes no softmax. "
            "But link='probit' divides each logit by a number of its own, and then it does: pass link='mc', also to "
            "co.evidence.validate, or subtract the mean of the logits in the model's forward.",
            NotLogitsWarning,
        )


def scale_logits(mean: Float[Tensor, "*N"], variance: Float[Tensor, "*N"]) -> Float[Tensor, "*N"]:
    """Return the logits times κ each: σ(κ f) is close to E[σ(f)] (MacKay 1992; Gibbs 1997)."""
    return mean * probit_factors(variance)


def probit_factors(variance: Float[Tensor, "*N"]) -> Float[Tensor, "*N"]:
    """Return κ = (1 + π v / 8)^-½ for the variance of each logit."""
    return (1 + math.pi / 8 * variance).rsqrt()


def preference(mean: Float[Tensor, "N 2"], covariance: Float[Tensor, "N 2 2"]) -> Float[Tensor, "N 2"]:
    """Return logits of each of two rewards being the larger, from their difference."""
    apart = covariance[:, 0, 0] + covariance[:, 1, 1] - covariance[:, 0, 1] - covariance[:, 1, 0]
    first = scale_logits(mean[:, 0] - mean[:, 1], apart)
    return torch.stack([first, -first], -1) / 2


def of_draws(function: Callable[[Tensor], Tensor], draws: Float[Tensor, "k n C"]) -> Float[Tensor, "k n *m"]:
    """Return a function of the outputs (n, C) at all draws, in one call."""
    return function(draws.flatten(0, 1)).unflatten(0, draws.shape[:2])


def average(function: Callable[[Tensor], Tensor], draws: Float[Tensor, "k n C"]) -> Float[Tensor, "n *m"]:
    """Average a function over draws of the outputs; the standard error of probabilities is at most ½ / √k."""
    return of_draws(function, draws).mean(0)


def bridge(
    mean: Float[Tensor, "N C"], covariance: Float[Tensor, "N C C"], normalised: bool = False
) -> Float[Tensor, "N C"]:
    """Return the mean of the Laplace bridge's Dirichlet (Hobbhahn et al. 2022), for logits that sum to zero.

    The approximation fails for large variances. `normalised` scales logits and variances to a mean variance of √(C/2)
    if it is above that, as the authors advise.
    """
    c, eps, least = mean.shape[-1], torch.finfo(mean.dtype).eps, torch.finfo(mean.dtype).tiny
    rows = covariance.sum(-1)
    total = rows.sum(-1, keepdim=True)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    resolved = total > c * eps * variance.sum(-1, keepdim=True)
    share = torch.where(resolved, rows / torch.where(resolved, total, 1.0), 1 / c)
    f = mean - share * mean.sum(-1, keepdim=True)
    v = torch.maximum(variance - share * rows, eps * variance).clamp_min(least)  # the rounding error of the difference
    if normalised:
        scale = (v.mean(-1, keepdim=True) / math.sqrt(c / 2)).clamp_min(1.0)
        f, v = f / scale.sqrt(), v / scale
    log_sum = torch.logsumexp(-f, -1, keepdim=True)
    log_alpha = f + log_sum - 2 * math.log(c)  # in logs, because e^f overflows at 89 in float32
    if c > 2:
        log_alpha = torch.logaddexp(log_alpha, log_alpha.new_tensor(math.log(1 - 2 / c)))
    return (log_alpha - v.log()).softmax(-1)


@dataclass(frozen=True, eq=False)
class NamedPredictions(Mapping[Any, Any]):
    """The predictions of a posterior at inputs x for several outputs, a mapping from names to `Predictions`.

    Its methods answer for each output for which the answer exists, as mappings with the same names, and raise
    ValueError if there is none. Log-likelihoods are of the targets under all names together.

    Examples:
        >>> heads = lambda params, x: {name: x @ weight for name, weight in params.items()}
        >>> weights = {"kind": torch.ones(2, 2), "value": torch.ones(2, 1)}
        >>> choice = {"kind": "classification", "value": co.likelihoods.Gaussian(0.1)}
        >>> lin = co.linearize((heads, weights), (x, {"kind": y, "value": x[:, :1]}), choice)
        >>> at = co.laplace(lin, co.GGN, prior_precision=1.0, check_mode=False).at(x)
        >>> at["value"].predict().mean.shape, list(at.probabilities())
        (torch.Size([8, 1]), ['kind'])
    """

    whole: Any
    """The predictions of all outputs, as one row per point."""
    outputs: dict[Any, Any]

    def __getitem__(self, name: Any) -> Any:
        if name not in self.outputs:
            raise KeyError(f"{name!r} is not one of the outputs {list(self.outputs)}.")
        return self.outputs[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.outputs)

    def __len__(self) -> int:
        return len(self.outputs)

    def predict(self, joint: bool = False, noise: bool = False, groups: int | None = None) -> dict[Any, Any]:
        """Return the distribution of each output; with noise=True, of the targets that are numbers."""
        return self._each(
            lambda output: output.predict(joint, noise, groups),
            lambda form: noise is not True or form == "numbers",
            "observation noise",
        )

    def functions(self) -> dict[Any, Any]:
        """Return the linearised network as a function at each of the samples, for each output."""
        return self._each(lambda output: output.functions(), lambda form: True, "outputs")

    def probabilities(self, link: str | None = None, generator: torch.Generator | None = None) -> dict[Any, Any]:
        """Return class probabilities for each output that has some."""
        return self._each(
            lambda output: output.probabilities(link, generator), lambda form: form in NAMED, "probabilities"
        )

    def uncertainty(self, generator: torch.Generator | None = None) -> dict[Any, Any]:
        """Return the uncertainty of each output's targets."""
        return self._each(
            lambda output: output.uncertainty(generator), lambda form: form is not None, "a decomposed uncertainty"
        )

    def log_likelihood(
        self, y: Points, joint: bool = False, generator: torch.Generator | None = None, link: str = "mc"
    ) -> Estimate:
        """Return log p(y | x, data) of the targets under all names together, which depend on the same weights."""
        score: Estimate = self.whole.log_likelihood(y, joint, generator, link)
        return score

    def _each(self, ask: Callable[[Any], Any], suits: Callable[[str | None], bool], what: str) -> dict[Any, Any]:
        """Return an answer for each output whose targets have a form that suits it."""
        targets = {name: output.lin.likelihood.of_position for name, output in self.outputs.items()}
        answers = {name: ask(self.outputs[name]) for name, target in targets.items() if suits(target.form)}
        refuse(not answers, f"none of the likelihoods of {list(targets)} has {what}: {list(targets.values())}.")
        return answers
