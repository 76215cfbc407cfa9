"""The hyperparameters of largest held-out log-likelihood, for use if data can be spared."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from curvops.argument_types import Points
from curvops.checks import check_choice, check_options, drawn_seed, refuse
from curvops.errors import MaxStepsWarning, NotLogitsWarning, PrecisionWarning, UndeterminedWarning, warn
from curvops.evidence.hyperparameters import gaussians, named_noises, noises_of, why_it_does_not_scale
from curvops.evidence.maximize import checked_precisions
from curvops.network.data.batches import Batches, as_source
from curvops.network.data.inputs import aligned_parts, group_alike, holds_all, join, parts_of, sizes_of
from curvops.network.data.randomness import items
from curvops.network.likelihoods import Categorical, Gaussian, Likelihood, Sequences
from curvops.operators import Linearization
from curvops.posterior.gaussians.laplace import Laplace, check_posterior
from curvops.posterior.gaussians.updating import tell_choice
from curvops.posterior.log_evidence import Validation
from curvops.posterior.precision import require_usable
from curvops.posterior.predictions.answers import LABELS, targets_by_position
from curvops.posterior.terms import Prior
from curvops.ranks.split_points import split_points

PARTS = (("scalar",), ("noise",), ("scalar", "noise"))
POINTS, ROWS = 20, 2000
"""The outputs by which a prior precision is chosen: so many, at no fewer points or positions than this."""
AT_EDGE = {
    "scalar": (
        "the smaller the prior precision is: these data do not determine it",
        "the larger the prior precision is: averaging over the weights does not improve them, and predictions are now "
        "those of the network itself",
    ),
    "noise": (
        "the smaller the noise is: were they used for training?",
        "the larger the noise is: are the targets in the units of training?",
    ),
}
"""What a search that ends at the smallest, or at the largest, value says."""


def validate(
    post: Laplace,
    x: Points,
    y: Tensor | None = None,
    over: str | Sequence[str] = "scalar",
    *,
    prior_precisions: Sequence[float] | Tensor | None = None,
    joint: bool = False,
    link: str = "probit",
    xtol: float = 0.01,
    generator: torch.Generator | None = None,
) -> Laplace:
    """Find the hyperparameters of largest log-likelihood of held-out data, with the weights held fixed.

    The search tries factors from 1e-4 to 1e4 of the current value, a decade apart (and beyond, as long as that gains
    more than 1e-4 nats per point), and then refines the best one. Values under which G + A proves to be indefinite, as
    for a Hessian, are passed over. Labels of a single output are scored as they are, without the label smoothing of
    training. Of points with many positions, such as tokens or pixels, all values are scored at the same positions,
    chosen at random by a fixed seed among those with targets: at 20, or at as many as give 2,000 outputs in all.

    Args:
        post: a posterior from `co.laplace`.
        x: held-out inputs; or, without y, held-out data as in `co.linearize`: (X, y), a Dataset, a DataLoader, or
            batches, which are read once and kept. Over a process group, ranks that hold different data are scored
            together.
        y: the targets of x.
        over: "scalar" for a factor of the prior precision, whatever its form (a vector or an operator keeps its shape);
            "noise" for a factor of the variance of a Gaussian likelihood, or one of all of its variances and of those
            of several outputs; or ("scalar", "noise") for both.
        prior_precisions: numbers to try instead of a search; for "scalar" only.
        joint: score random pairs of points, as in `Laplace.log_likelihood`.
        link: the probabilities of classes or labels that are scored, "probit" or "mc", as in `probabilities`: choose
            the link that will predict, since a precision that suits one may harm the other. Numbers have no link, nor
            have pairs; several outputs are scored by draws together, as with "mc", even if all are classes.
        xtol: the relative accuracy of the maximum for these draws.
        generator: the source of the draws; all values are scored with the same ones.

    Returns:
        A new posterior; its `tuning` is a `Validation` with all that was tried and the scores.

    Cost: a `post.log_likelihood(x, y)` at the scored positions for each value tried, some 20 for one hyperparameter and
    80 for both, and a reading of the training data.

    Raises:
        TypeError, ValueError: `post` is not a posterior, the likelihood cannot score the targets, precisions are not
            positive numbers, the data are those of training, "noise" is given with another likelihood, or the curvature
            cannot be built again at another noise.
        MissingLabelsError: the held-out data have no labels.

    Warns with `UndeterminedWarning` if most of the points are training points, or all have the same target, such as one
    class; or if the best value is at the edge of those tried: often the largest precision, under which predictions are
    those of the network itself; or if a prior precision ten times as large or as small as that of the search over both
    is as good, to 1e-4 nats per point; with `MaxStepsWarning` if it ended before it reached its accuracy.

    Examples:
        >>> tuned = co.evidence.validate(post, x + 0.1, y, prior_precisions=[0.5, 1.0, 2.0])
        >>> float(tuned.prior_precision) in (0.5, 1.0, 2.0)
        True
    """
    check_posterior(post, "validate")
    check_options(xtol=xtol, generator=generator)
    check_choice("link", link, ("probit", "mc"))
    parts = (over,) if isinstance(over, str) else over
    if not isinstance(parts, Sequence) or tuple(parts) not in PARTS:
        raise ValueError(f"over must be 'scalar', 'noise' or ('scalar', 'noise'); got {over!r}.")
    held_out = [(x, y)] if y is not None else _held_out_data(x, post)
    held_out = [(post.lin.model.calls.read(x), y) for x, y in held_out]
    checks = [(x, partial(targets_by_position, post.lin, x, y)) for x, y in held_out]
    splits = [split_points(post.lin, x, False, "validation", targets=targets) for x, targets in checks]
    if post.lin.ranks is None:
        _check_points(post, held_out, [split.targets for split in splits if split.targets is not None])
    by_draws = joint or not isinstance(post.lin.likelihood.of_position, LABELS)
    is_split = splits[0].is_split
    part = _scored_positions(post.lin, [split.targets for split in splits if split.targets is not None], is_split)
    search = _Search(post, held_out, joint, "mc" if by_draws else link, generator, is_split, part)
    with torch.no_grad(), warnings.catch_warnings():
        for of_predictions in (NotLogitsWarning, PrecisionWarning):  # the posterior that is returned gives its own
            warnings.simplefilter("ignore", of_predictions)
        if prior_precisions is not None:
            refuse(tuple(parts) != ("scalar",), "prior_precisions need over='scalar'; leave them out to search.")
            for value in checked_precisions(prior_precisions):
                search.score(post.with_prior(value).prior)
            return search.result()
        if "noise" in parts and not gaussians(post.lin.likelihood):
            _ = post.observation_noise  # raises an error that names the likelihood
        # Averaging may not pay under the first noise: a precision is sought again, from the start, under the best one.
        for name in parts if len(parts) == 1 else (*parts, "scalar"):
            search.along(name, xtol, says_edge=len(parts) == 1 or name == "noise")
        if len(parts) > 1:
            search.together(xtol)
        return search.result("held-out data" if "scalar" in parts else post.prior.chosen_by)


def _check_points(post: Laplace, held_out: Sequence[tuple[Any, Any]], targets: Sequence[Tensor]) -> None:
    """Warn if most held-out points are training points, or if all have the same target; raise if they are all those."""
    data, count, why = post.lin.data, sum(max(sizes_of(y)) for _, y in held_out), None
    refuse(not count, "the held-out data hold no points.")
    known = data.count_known(held_out) if isinstance(data, Batches) else 0
    if known == count == post.lin.num_data:
        raise ValueError("these are the training data: pass others, or co.laplace(lin) chooses without them.")
    if 2 * known > count:
        why = f"{known} of the {count} held-out points are training points"
    every = torch.cat(list(targets))
    counted = post.lin.likelihood.of_position.counted(every)
    every = every if counted is None else every[counted]
    if len(every) and bool((every == every[:1]).all()):
        why = f"all {count} held-out points have the same target"
    if why is not None:
        warn(
            f"{why}: what they choose may harm predictions of new points. Pass points that were left out of training, "
            "as many and as different as those to come.",
            UndeterminedWarning,
        )


def _scored_positions(lin: Linearization, targets: Sequence[Tensor], is_split: bool) -> Linearization | None:
    """Return the network with the outputs that are scored, at `some_positions` whose targets count; None for all."""
    if not isinstance(lin.likelihood, Sequences):
        return None
    every, T = torch.cat(list(targets)), lin.likelihood.positions
    counted = lin.likelihood.of_position.counted(every)
    used = every.new_full((T,), len(every) // T).long() if counted is None else counted.view(-1, T).sum(0)
    used = lin.passes.add_up(used) if is_split else used
    return some_positions(lin, int(used.max()), used > 0)


def some_positions(lin: Linearization, points: int, used: Tensor | None = None) -> Linearization | None:
    """Return the network with the outputs at random positions of those used, by a fixed seed; None if all are needed.

    Rows of J take a pass for each output of a point, and the outputs at the positions of a point say much the same:
    `ROWS` outputs of all points, at `POINTS` positions or more, choose a prior precision as well. Those of a last layer
    take no such passes.
    """
    if not isinstance(lin.likelihood, Sequences) or lin.passes.engines.plan.is_last_layer:
        return None
    T, C = lin.output_shape
    most = max(POINTS, ROWS // max(1, points * C))
    order = torch.randperm(T, generator=torch.Generator().manual_seed(0))
    order = order if used is None else order[used.cpu()[order]]
    return lin.at_positions(order[:most].sort().values.tolist()) if most < T and len(order) else None


def of_labels_as_they_are(likelihood: Likelihood) -> Likelihood:
    """Return the likelihood without label smoothing, under which the most likely posterior would be too unsure."""
    if not isinstance(likelihood, Categorical) or not likelihood.label_smoothing:
        return likelihood
    unsmoothed = copy.copy(likelihood)
    unsmoothed.label_smoothing = 0.0
    return unsmoothed


def _held_out_data(data: Any, post: Laplace) -> list[tuple[Any, Any]]:
    """Return the inputs and targets of data in any form; those of one form, such as one length of texts, together."""
    data = post.lin.model.calls.read_data(data)
    source = [data] if holds_all(data) else items(as_source(data, post.lin.data.largest), post.mean.device)
    parts = [aligned_parts(*parts_of(item, False))[:2] for item in source]
    kinds = group_alike(parts) if post.lin.ranks is None else [parts]
    return [(join(inputs), join(labels)) for inputs, labels in (zip(*kind) for kind in kinds)]


class _Trial(NamedTuple):
    """A prior and a factor of the noise, with the mean held-out log-likelihood and its standard error."""

    prior: Prior
    noise: float
    score: float
    stderr: float


@dataclass(eq=False)
class _Search:
    post: Laplace
    held_out: Sequence[tuple[Any, Any]]
    joint: bool
    link: str
    generator: torch.Generator | None
    gather: bool
    part: Linearization | None
    trials: list[_Trial] = field(default_factory=list)
    refusal: NotPSDError = field(default_factory=NotPSDError)

    def __post_init__(self) -> None:
        self.seed = drawn_seed(self.generator)

    def under(self, prior: Prior) -> Laplace:
        """Return the posterior under another prior."""
        return self.post if prior is self.post.prior else replace(self.post, prior=prior, prior_error=None)

    def score(self, prior: Prior, noise: float = 1.0) -> float:
        """Return the mean log-likelihood per point, or per pair, from the same draws for every posterior."""
        device = self.post.mean.device if self.generator is None else self.generator.device
        draws = torch.Generator(device=device).manual_seed(self.seed)
        try:
            post = predicting_at(self.under(prior), noise)
            require_usable(post.terms)
            scored = [(post.at(x, gather=self.gather), y) for x, y in self.held_out]
            lin, trained = post.lin if self.part is None else self.part, post.lin.likelihood
            likelihood = of_labels_as_they_are(trained.of_position)
            if self.part is not None or likelihood is not trained.of_position:
                likelihood = Sequences(likelihood, *lin.output_shape) if isinstance(trained, Sequences) else likelihood
                scored = [(at.of(lin.with_likelihood(likelihood)), y) for at, y in scored]
            estimates = [at.log_likelihood(y, self.joint, draws, self.link) for at, y in scored]
        except NotPSDError as error:  # a Hessian under a small prior is no precision: there is no such posterior
            self.refusal = error
            return -math.inf
        scores = torch.cat([estimate.value for estimate in estimates])
        errors = torch.cat([estimate.stderr for estimate in estimates])
        value = float(scores.mean())
        self.trials.append(_Trial(prior, noise, value, float(errors.norm()) / scores.numel()))
        return -math.inf if math.isnan(value) else value  # a density that overflows

    @property
    def best(self) -> _Trial:
        """The trial with the largest score so far; raises the last error if the precision was definite in none."""
        if not self.trials:
            raise self.refusal
        return max(self.trials, key=lambda trial: -math.inf if math.isnan(trial.score) else trial.score)

    def moves(self, from_start: bool = False) -> Callable[[float, float], float]:
        """Return the score as a function of factors of the precision and the noise of the best trial so far.

        The precision may be that of the start instead.
        """
        prior, noise = (self.best.prior, self.best.noise) if self.trials else (self.post.prior, 1.0)
        prior = self.post.prior if from_start else prior

        def score(scale: float, of_noise: float) -> float:
            scaled = prior if scale == 1 else replace(prior, precision=prior.precision * scale)
            return self.score(scaled, noise * of_noise)

        return score

    def along(self, name: str, xtol: float, says_edge: bool) -> None:
        """Search around the best trial so far, in one hyperparameter; warn if it ends at an edge, where asked to."""
        from scipy.optimize import minimize_scalar  # a slow import, needed for tuning only

        score_at = self.moves(from_start=name == "scalar")

        def score(factor: float) -> float:
            return score_at(factor, 1.0) if name == "scalar" else score_at(1.0, factor)

        scores = {power: score(10.0**power) for power in range(-4, 5)}
        for step in (-1, 1):
            end = 4 * step
            # On to 10^±8, as long as the value at the end is the best, by more than 1e-4 nats per point.
            while abs(end) < 8 and scores[end] > scores[end - step] + 1e-4 and scores[end] == max(scores.values()):
                end += step
                scores[end] = score(10.0**end)
        best = max(scores, key=scores.__getitem__)
        if best in (min(scores), max(scores)):
            if says_edge:
                self.warn_of_edge(name, best > 0)
            return
        span = math.log(10) * (best - 1), math.log(10) * (best + 1)
        minimize_scalar(lambda u: -score(math.exp(u)), bounds=span, method="bounded", options={"xatol": xtol})

    def together(self, xtol: float) -> None:
        """Search from the best trial so far, in both hyperparameters at once (Nelder & Mead 1965)."""
        from scipy.optimize import minimize

        score_at = self.moves()

        def loss(logs: Any) -> float:
            scale, noise = (math.exp(float(u)) for u in logs)
            return -score_at(scale, noise)

        simplex = [[0.0, 0.0], [0.5, 0.0], [0.0, 0.5]]
        # The tolerance applies to each hyperparameter.
        options = {"xatol": xtol, "fatol": math.inf, "initial_simplex": simplex, "maxfev": 80}
        found = minimize(loss, [0.0, 0.0], method="Nelder-Mead", options=options)
        best, score_at = self.best, self.moves()
        # A precision that these data do not determine is followed without bound, and no further steps would settle it.
        flat = [factor for factor in (10.0, 0.1) if abs(score_at(factor, 1.0) - best.score) < 1e-4]
        if flat:
            has_grown = _precision(self.best.prior.diagonal) > _precision(self.post.prior.diagonal)
            self.warn_of_edge("scalar", has_grown if len(flat) == 2 else flat[0] > 1)
        elif not found.success:
            warn(
                "the search over prior precision and noise together tried 80 values before it reached its accuracy. "
                "Tune the returned posterior again, co.evidence.validate(post, x, y, ('scalar', 'noise')), which goes "
                "on from its values and accepts a larger xtol.",
                MaxStepsWarning,
            )

    def warn_of_edge(self, name: str, is_large: bool) -> None:
        """Warn that the held-out likelihood has no maximum in a hyperparameter."""
        of_noise = name == "noise"
        value = self.best.noise * mean_noise(self.post) if of_noise else _precision(self.best.prior.diagonal)
        warn(
            f"held-out data are predicted the better, {AT_EDGE[name][is_large]}. The returned posterior has the last "
            f"value tried, {value:.3g}.",
            UndeterminedWarning,
        )

    def result(self, by: str = "held-out data") -> Laplace:
        """Return the best posterior, with the record of all trials and what chose its prior."""
        best, (priors, noises, scores, stderrs) = self.best, zip(*self.trials)
        precisions, variances = tuple(_precision(prior.diagonal) for prior in priors), None
        if self.post.lin.likelihood.hyperparameters:
            first = mean_noise(self.post)
            variances = tuple(first * factor for factor in noises)
        post = self.under(best.prior) if best.noise == 1 else with_noises(self.under(best.prior), best.noise)
        return tell_choice(replace(post, tuning=Validation(precisions, variances, scores, stderrs)), by)


def _precision(A: Tensor | None) -> float:
    """Return a number, the geometric mean of a vector, or NaN for an operator."""
    if A is None:
        return math.nan
    return float(A.double().log().mean().exp() if A.ndim else A)


def mean_noise(post: Laplace) -> float:
    """Return the mean of the likelihood's hyperparameters."""
    return float(torch.cat([noise.detach().flatten() for noise in post.lin.likelihood.hyperparameters]).mean())


def with_noises(post: Laplace, factor: float) -> Laplace:
    """Return the posterior at a multiple of all of its noises, with its curvature built again."""
    likelihood = post.lin.likelihood
    return post.with_noise(named_noises(likelihood, noises_of(likelihood) * factor))


def predicting_at(post: Laplace, noise: float) -> Laplace:
    """Return a posterior with the predictions of this one at a multiple c of its noises.

    Where the curvature falls as 1/c, G/c + A = (G + cA)/c: the predictions are those of the present curvature under the
    prior precision cA at c times the temperature, and nothing is built again.
    """
    likelihood, A = post.lin.likelihood, post.prior.diagonal
    if noise == 1:
        return post
    of_noise_alone = all(isinstance(member.of_position, Gaussian) for member in likelihood.members)
    if A is None or not of_noise_alone or why_it_does_not_scale(post) is not None:
        return with_noises(post, noise)
    lin = post.lin.with_likelihood(likelihood.with_hyperparameters([h * noise for h in likelihood.hyperparameters]))
    prior = replace(post.prior, precision=A * noise)
    return replace(post, lin=lin, prior=prior, temperature=post.temperature * noise)
