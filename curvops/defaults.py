"""`co.laplace`, and the choices that it makes for arguments that are left out.

The choices are those which `benchmarks/defaults.py` finds never worse than the network itself.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from curvops.argument_types import CurvatureChoice, Data, PriorMean, PriorPrecision
from curvops.checks import refuse
from curvops.errors import ConvergenceError, MissingLabelsError, UndeterminedWarning
from curvops.evidence.maximize import maximize, secant_step
from curvops.evidence.validate import POINTS, ROWS, some_positions, validate
from curvops.linalg.core.solve_routes import MOST_DECOMPOSED
from curvops.network import Batch
from curvops.network.data.batches import Batches
from curvops.network.data.inputs import group_alike, join, num_points
from curvops.network.likelihoods import Gaussian, Poisson
from curvops.operators import GGN, KFAC, DiagonalGGN, Linearization
from curvops.operators.linearized.user_operator import UserOperator
from curvops.posterior import Laplace
from curvops.posterior.gaussians.laplace import make_laplace
from curvops.posterior.gaussians.updating import checked_posterior, tell_choice, warn_of_noise, warn_of_other_noise
from curvops.posterior.predictions.answers import NAMED
from curvops.posterior.terms import CurvatureCache, check_linearization

VARIANCE = 0.25
"""The variance of the logits at the training inputs if nothing else chooses the prior precision.

A standard deviation of a half is enough to rank inputs by their uncertainty, and too little to change probabilities
that are right. The evidence, a precision of 1, and weight decay × N harm classifiers that are not at a mode.
"""
DRAWS = 32


def laplace(
    lin: Linearization,
    curvature: CurvatureChoice | None = None,
    prior_precision: PriorPrecision | None = None,
    prior_mean: PriorMean = 0.0,
    temperature: float = 1.0,
    check_mode: bool = True,
    *,
    validation: Data | None = None,
) -> Laplace:
    """Make the Laplace posterior N(θ*, T (G + A)⁻¹) of a linearised network under the prior N(m, A⁻¹).

        >>> import torch, curvops as co
        >>> x, y = torch.linspace(-1, 1, 40).view(20, 2), torch.arange(20) // 10
        >>> lin = co.linearize(torch.nn.Linear(2, 2), (x, y), "classification")
        >>> post = co.laplace(lin)                     # or validation=(x_held_out, y_held_out)
        >>> post.probabilities(x).shape, post.prior.chosen_by
        (torch.Size([20, 2]), 'the variance of the logits')

    Args:
        lin: the linearisation, from `co.linearize`.
        curvature: G, a name ("kfac", "ekfac", "ggn", "diagonal", "block_diagonal", "empirical_fisher", "hessian"), an
            operator class to be built from `lin`, or an operator (D, D). None is KFAC, and the full GGN for single
            entries of parameters (a subnetwork), which a Kronecker product cannot describe.
        prior_precision: A. A positive number: weight decay × N if training minimised a *mean* loss
            + ½ · weight decay · ‖θ − m‖². A vector (D,) of positive numbers, or a mapping {glob over parameter names:
            number} that matches each selected parameter once, such as `{"0.*": 1.0, "2.*": 10.0}`. A positive
            semidefinite operator (D, D); one that was linearised at other weights needs `op.detached_from_weights()`.
            Or an earlier posterior, which then is the prior, with its mean and its temperature. None chooses a number,
            and `repr` shows which, and by what: by `validation`; without it, for classes and labels, such that the
            logits have a variance of 1/4 at the training inputs (the outputs, under a distribution of the user's);
            otherwise by the evidence, as `co.evidence.maximize`: for Gaussian noise and counts, and for several outputs
            of numbers, counts and classes, that of the linearised network, mode="linear". Of more than 2,000 numbers,
            it is that of random training points, which say as much. Held-out data also choose a noise that was not
            given, unless there are several outputs, whose noises remain those of the residuals.
        prior_mean: m, a number, a vector (D,), or a mapping {glob: number, or tensor of the parameter's shape}. Tensors
            of the prior are copied, so that later in-place changes have no effect, unless they require a gradient: then
            the posterior always uses their current values. (An operator is not copied: do not change it.)
        temperature: T, which multiplies the covariance: T·P⁻¹ is that of the posterior to the power 1/T. For a
            tempered *likelihood* use the curvature `(1 / T) * co.GGN(lin)` instead.
        check_mode: whether the gradient of the log-likelihood is checked to be finite, at the cost of one gradient, and
            whether the first evidence of this posterior that assumes a mode of it warns with `ModeWarning` if the
            weights are none (`log_evidence`, `evidence.maximize`, `evidence.grid`, at mode="map"). Likewise whether a
            given Gaussian noise is compared with the mean squared residual of the training data, at the cost of one
            forward pass, with a `NoiseWarning` if one is more than three times the other, and not by the chance of few
            points; and a noise that is estimated with that of an earlier posterior. Without labels, nothing is checked.
        validation: held-out data, (X, y), a Dataset, a DataLoader or batches, as in `co.evidence.validate`: they choose
            the prior precision, whatever training did, as the one under which they are most likely. Some hundred
            points are enough; training points, or points of one class alone, draw an `UndeterminedWarning`.

    Returns:
        A `Laplace`. No matrix is formed, except for the factors of KFAC.

    Raises:
        ValueError: the prior precision is not positive and finite, does not name each parameter once, is an operator
            not known to be positive semidefinite, or is given in addition to `validation`; it is left out, and cannot
            be chosen (the evidence has no maximum); the temperature is not positive; the curvature has another size,
            was linearised at other weights or is not known to be symmetric; G + A is indefinite; or (with check_mode)
            a gradient is not finite.
        TypeError: an argument is of another kind, or parameters are in half precision.
        MissingLabelsError: the evidence is to choose the prior precision, and the data have no labels.

    Cost: KFAC takes about one gradient for each output. A prior precision that is chosen then costs some 20 predictions
    of the held-out points, four of the training points that have 2,000 outputs, of tokens or pixels at some positions
    (`co.evidence.validate`), or for numbers and counts some six modes of the linear model of 2,000 outputs, a second or
    two (up to five for counts); the full GGN of more than 1,024 weights may take solves for each value tried. The same
    call makes the same choice. A curvature that may be indefinite (co.Hessian, differences) is tested with 20 products,
    about 80 gradients for a Hessian; if they show that G + A is indefinite, the error names the prior precision that is
    needed.

    Under a Gaussian likelihood without a given noise, the posterior's noise is the mean squared residual of the
    training data or, if it is larger, the mean squared error on each training point of the linear model with all of the
    network's weights fitted to the others (in closed form from J Jᵀ, up to 2,000 training outputs). The first is too
    small for a network that overfits. An operator that is given for G keeps the noise of `lin`.

    Source: MacKay 1992; the predictions of the linearised network as in Immer, Korzepa & Bauer 2021.
    """
    check_linearization(lin)
    if prior_precision is not None and validation is not None:
        raise ValueError("prior_precision and validation both give the prior precision: leave one of them out.")
    default = KFAC if lin.model.selection.index is None else GGN
    chosen = default if curvature is None else curvature
    start = 1.0 if prior_precision is None else prior_precision
    post = make_laplace(lin, chosen, start, prior_mean, temperature)
    post.cache.checks_mode = check_mode
    if prior_precision is None:
        post = choose_prior(post, validation)
    if check_mode:
        warn_of_noise(lin)
    if check_mode and isinstance(prior_precision, Laplace):
        warn_of_other_noise(prior_precision, post.lin)
    return checked_posterior(post, check_mode)


def choose_prior(post: Laplace, validation: Any = None) -> Laplace:
    """Return the posterior under the scalar prior precision that held-out data choose.

    Without them, the variance of the logits chooses it or, if outputs are no logits, the evidence.
    """
    if validation is not None:
        with warnings.catch_warnings():
            # It is an answer, too, that averaging over the weights does not pay.
            warnings.filterwarnings("ignore", ".*the larger the prior precision", UndeterminedWarning)
            one_noise = isinstance(post.lin.likelihood.of_position, Gaussian) and post.lin.likelihood.needs_noise
            over = ("scalar", "noise") if one_noise else "scalar"
            return validate(post, validation, over=over, generator=_seeded(post))
    try:
        targets = [member.of_position for member in post.lin.likelihood.members]
        of_labels = [target.form in NAMED for target in targets]
        if all(of_labels):
            return limit_variance(post)
        # That of the linearised network needs no mode of the network, and for a Gaussian likelihood a single solve.
        # Counts, and classes among several outputs, need it, too: the evidence at weights that are no mode chooses a
        # posterior that is too wide. Where a variance is an output, the linear model fits more weights than targets
        # exactly, and has no mode.
        linear = all(labels or isinstance(target, (Gaussian, Poisson)) for labels, target in zip(of_labels, targets))
        return _maximize_on_some(post) if linear else _maximize(post, "auto")
    except MissingLabelsError as error:
        remedy = "Pass prior_precision= (weight decay × N of training on a mean loss), or validation=(x, y). "
        raise MissingLabelsError("the choice of a prior precision by the evidence", remedy) from error
    except ValueError as error:
        raise ValueError(
            "the prior precision was left out, and cannot be chosen without held-out data: pass validation=(x, y), or "
            f"prior_precision= (weight decay × N of training on a mean loss). The reason: {error}"
        ) from error


def _maximize_on_some(post: Laplace) -> Laplace:
    """Return the posterior under the prior precision of largest linear evidence of random points, by a fixed seed.

    The evidence of all points takes a linear mode of all of them for each value tried, and chooses much the same.
    """
    lin = post.lin
    few = lin.num_data * lin.num_outputs <= ROWS
    if few or not isinstance(lin.data, Batches) or not isinstance(post.curvature, UserOperator):
        return _maximize(post, "linear")
    points = _random_points(lin, lin.data)
    some = lin.restrict(points, 1.0) if len(points) else None
    curvature = None if some is None else post.curvature.of(some, _seeded(post))
    if some is None or curvature is None:
        return _maximize(post, "linear")
    trial = replace(post, lin=some, curvature=curvature, cache=CurvatureCache(some, curvature))
    best = _maximize(trial, "linear")
    by = f"the evidence of {some.num_data:,} points"
    return tell_choice(replace(post.with_prior(float(best.prior_precision)), tuning=best.tuning), by)


def _random_points(lin: Linearization, data: Batches) -> Int[Tensor, " m"]:
    """Return the positions of random points that say as much as `most_points` of weight one.

    Points without weight are left out. The number of points of weight one that say as much as others is at most the sum
    of their weights w, and at most (Σw)² / Σw² (Kish 1965). Whole batches are taken only if all weights are one.
    """
    count = most_points(lin)
    weights = lin.passes.line_up([lin.theta.new_zeros(0), *(_weights(lin, batch) for batch in data)]).double().cpu()
    if data.of_whole_batches:
        return data.evenly_spaced(count) if bool((weights == 1).all()) else torch.arange(lin.num_data)
    order = torch.randperm(lin.num_data, generator=torch.Generator().manual_seed(0))
    order = order[weights[order] > 0]
    w = weights[order]
    total, squares = w.cumsum(0), w.square().cumsum(0)
    too_few = (total < count) | (total.square() < count * squares)
    return order[: int(too_few.cumprod(0).sum()) + 1].sort().values


def _weights(lin: Linearization, batch: Batch) -> Float[Tensor, " n"]:
    """Return what each point counts: the mean weight of its positions, zero for targets that are left out."""
    likelihood, ones = lin.likelihood, lin.theta.new_ones(batch.num_points)
    weights = likelihood.weights_of_points(batch.targets, batch.weights)
    counted = likelihood.counted(batch.targets, batch.weights)
    for factor in (weights, counted):
        if factor is not None:
            ones = ones * factor.to(ones).view(len(ones), -1).mean(1)
    return ones


def _maximize(post: Laplace, mode: str) -> Laplace:
    """Return the posterior under the prior precision of largest evidence, searched from 1 or from its own unit.

    Of targets in a unit of their own, the precision has that of their curvature, and a search from 1 may not reach it.
    """
    try:
        return maximize(post, generator=_seeded(post), mode=mode)
    except (ValueError, ConvergenceError):
        typical = float(DiagonalGGN(post.lin).entries.double().mean())
        if not 0 < typical < math.inf:
            raise
        return maximize(post.with_prior(typical), generator=_seeded(post), mode=mode)


@torch.no_grad()
def limit_variance(post: Laplace) -> Laplace:
    """Return the posterior under the scalar prior precision at which the logits have the variance `VARIANCE`.

    This is the mean over the classes and the `training_inputs`, at `some_positions`. A large curvature without a closed
    form estimates it from `DRAWS` draws of the weights. If the variance is smaller whatever the prior is, the precision
    is 1e-4.
    """
    alike = training_inputs(post.lin)
    part = some_positions(post.lin, sum(map(num_points, alike)))
    by_draws = post.precision._closed_form() is None and post.lin.num_parameters > MOST_DECOMPOSED

    def excess(power: float) -> float:
        trial = replace(post.with_prior(10.0**power), temperature=1.0)
        draws = trial.sample(DRAWS, _seeded(post)) if by_draws else None
        variances = []
        for inputs in alike:
            at = trial.at(inputs, draws)
            predicted = (at if part is None else at.of(part)).predict()
            normals = predicted.values() if isinstance(predicted, dict) else [predicted]
            variances += [normal.variance.flatten() for normal in normals]
        variance = float(torch.cat(variances).mean())
        refuse(not 0 < variance < math.inf, f"the logits have a variance of {variance:.3g} at the training inputs.")
        return math.log(variance / VARIANCE)

    # The variance falls no faster than the precision grows, and is flat where data determine all weights.
    steepest, before, power = -math.log(10), None, 0.0
    for _ in range(30):
        now = power, excess(power)
        power = max(power + secant_step(before, now, steepest, (steepest, 0.1 * steepest), most=4.0), -4.0)
        if abs(power - now[0]) < 0.005:
            break
        before = now
    return tell_choice(post.with_prior(10.0**power), "the variance of the logits")


def training_inputs(lin: Linearization) -> list[Any]:
    """Return training inputs of all ranks, `most_points` of them, evenly spaced in their order.

    Those of one form, such as one length of texts, are together.
    """
    data = lin.restrict(lin.data.evenly_spaced(most_points(lin)), 1.0).gathered().data
    return [join(kind) for kind in group_alike(batch.inputs for batch in data)]


def most_points(lin: Linearization) -> int:
    """Return the number of training points that choose a prior precision: with `ROWS` outputs, or at least `POINTS`."""
    return min(lin.num_data, max(POINTS, ROWS // lin.num_outputs))


def _seeded(post: Laplace) -> torch.Generator:
    """Return a generator with a fixed seed, so that the same call makes the same choice."""
    return torch.Generator(device=post.mean.device).manual_seed(0)
