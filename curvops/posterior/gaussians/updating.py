"""A Laplace posterior under another noise or after further data, and the checks of a new posterior."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checks import check_choice, check_generator, checked_number, checked_whole, refuse
from curvops.errors import NoiseWarning, warn
from curvops.linalg.core.matrix_identity import form_of
from curvops.network import Model, estimated_noise, gaps_and_weights, gaussians_with_sums, mean_squares
from curvops.network.likelihoods import Gaussian, Likelihood, Multitask
from curvops.operators import Linearization
from curvops.operators.function_space.gram_matrix import gram_matrix
from curvops.operators.linearized.user_operator import UserOperator
from curvops.posterior.gaussians.gaussian_posterior import GaussianWeights
from curvops.posterior.precision import require_usable
from curvops.posterior.terms import (
    CurvatureCache,
    KroneckerPrior,
    Prior,
    check_linearization,
    checked_curvature,
    read_prior,
)
from curvops.summary import summary

FAR_NOISE = 3.0
"""A given noise that differs by more than this factor from the mean squared residual is named in a warning, unless a
right one would differ as much for so few residuals in one case of a hundred."""


BY_DATA = "curvature= is needed, such as curvature=co.KFAC(lin, ...)."
BY_NOISE = "build the posterior again, from a linearisation whose likelihood has the other noise."
FORMS = ("low_rank", "low_rank_diagonal", "kronecker")
"""The forms in which an earlier posterior can be kept."""
Updated = TypeVar("Updated", bound=Any)
"""The type of `Laplace`, whose class calls these functions."""


def as_prior(prior_precision: Any, prior_mean: Any, network: Model, lin: Linearization | None = None) -> Prior:
    """Return the prior that a user's arguments describe, as `read_prior` does; it may be an earlier posterior.

    The data of that posterior must not be those of the linearisation.
    """
    if not isinstance(prior_precision, GaussianWeights):
        return read_prior(prior_precision, prior_mean, network)
    if not (isinstance(prior_mean, float | int) and prior_mean == 0):
        raise ValueError("prior_precision is an earlier posterior, which has its own mean: leave prior_mean out.")
    return read_prior(prior_precision.prior_for(lin)[0], prior_precision.mean, network, posterior=True)


def tell_choice(post: Updated, by: str) -> Updated:
    """Return the posterior with what chose its prior precision, which its repr shows."""
    return replace(post, prior=replace(post.prior, chosen_by=by))


def require_equal_on_ranks(post: Any) -> None:
    """Raise RanksDifferError, on all ranks that share the data, unless they were given the same posterior."""
    if post.lin.passes.is_shared:
        facts = {"the curvature": form_of(post.curvature), "the temperature": post.temperature}
        post.lin.passes.agree(post.prior.facts() | facts)


def replace_noise(post: Updated, noise: Any, generator: torch.Generator | None) -> Updated:
    """Return the posterior under another observation noise, with its curvature built again."""
    likelihood, theta = post.lin.likelihood, post.lin.theta
    check_generator(generator)
    if isinstance(likelihood, Multitask) and isinstance(noise, Mapping):
        if unknown := noise.keys() - likelihood.likelihoods.keys():
            raise ValueError(f"noise names {sorted(unknown)}, but the outputs are {list(likelihood.likelihoods)}.")
        parts = zip(likelihood.likelihoods.items(), likelihood.num_outputs)
        new: Likelihood = likelihood.with_members(
            _with_noise(member, noise[name], R // (member.positions or 1), theta) if name in noise else member
            for (name, member), R in parts
        )
    elif isinstance(likelihood.of_position, Gaussian):
        new = _with_noise(likelihood, noise, post.lin.output_shape[-1], theta)
    else:
        _ = post.observation_noise  # raises an error that names the likelihood
    lin = post.lin.with_likelihood(new)
    curvature = remake_curvature(post.curvature, lin, generator, BY_NOISE)
    cache = CurvatureCache(lin, curvature, checks_mode=post.cache.checks_mode)
    return replace(post, lin=lin, curvature=curvature, cache=cache, tuning=None)


def _with_noise(likelihood: Likelihood, noise: Any, num_outputs: int, theta: Tensor) -> Likelihood:
    """Return a Gaussian likelihood with another noise, a number or a tensor with one for each output."""
    refuse(not isinstance(likelihood.of_position, Gaussian), f"{likelihood!r} has no noise.")
    if isinstance(noise, Tensor):
        unfit = noise.shape not in ((), (1,), (num_outputs,))
        refuse(unfit, f"noise must be a number or a tensor ({num_outputs},), got one of shape {tuple(noise.shape)}.")
        variance = Gaussian(noise).noise
    else:
        variance = torch.tensor(checked_number("noise", noise), dtype=torch.float64)
    return likelihood.with_hyperparameters([variance.detach().to(theta)])


@torch.no_grad()
def with_left_out_noise(lin: Linearization) -> Linearization:
    """Return the linearisation with the larger of its residuals' and the left-out points' mean square as its noise.

    It is `lin` itself if its noise is not to be estimated, if its data are not here, if there are several outputs by
    name, whose noises are those of the residuals, or if the data have more than 2,000 outputs in total, for which J Jᵀ
    is not decomposed unasked. Over a process group each rank takes the data of all, and the result of the first. J Jᵀ
    is decomposed once for a linearisation, whatever posteriors are made from it.
    """
    if not lin.likelihood.needs_noise or not lin.data.is_present or lin.num_data * lin.num_outputs > 2000:
        return lin
    if isinstance(lin.likelihood, Multitask):
        return lin
    sums, results = lin.squared_residuals(), lin.results_now()
    if (squares := results.get("left-out squares")) is None:
        squares = left_out_squares(lin.gathered(), sums)
        if lin.ranks is not None:
            squares = squares.new_tensor(lin.ranks.gather(squares.tolist())[0])
        results["left-out squares"] = squares
    sums[0] = sums[0].maximum(squares.where(sums[2] > 0, 0))  # an output without targets has errors of rounding
    return lin.with_likelihood(estimated_noise(lin.likelihood, sums, lin.theta))


def left_out_squares(lin: Linearization, sums: Float[Tensor, "4 C"]) -> Float[Tensor, " C"]:
    """Return Σ w a², the squared errors of left-out points for each output, or 0 if J Jᵀ is not finite.

    All outputs of a point are left out together. For a noise of each output, outputs count in units of their targets.
    """
    whole, shape = lin.of_whole_network(), (lin.num_data, lin.num_outputs)
    gaps, weights = lin.passes.rows(
        lambda batch, J: gaps_and_weights(lin.likelihood, J.outputs, batch.targets, batch.weights), 2
    ).mT.double()
    units = (sums[1] / sums[2]).sqrt() if lin.likelihood.hyperparameters[0].numel() > 1 else torch.ones_like(sums[0])
    units = torch.where(units > 0, units, 1.0).repeat(lin.num_outputs // len(units)).repeat(lin.num_data)
    J = whole.jacobian()
    K = gram_matrix(J, J, torch.ones_like(whole.theta[0])).double()
    scale = weights.sqrt() / units
    t = scale * (J._matmul(whole.theta.unsqueeze(1)).squeeze(1).double() - gaps)
    K = scale.unsqueeze(1) * K * scale
    if not bool(K.isfinite().all() & t.isfinite().all()):
        return torch.zeros_like(sums[0])
    values, vectors = torch.linalg.eigh(K)
    values, largest = values.clamp_min(0), float(values[-1].clamp_min(torch.finfo(K.dtype).tiny))
    turned, blocks = vectors.mT @ t, vectors.view(*shape, -1)
    least = len(K) * torch.finfo(lin.theta.dtype).eps
    squares = blocks.square() if shape[1] == 1 else blocks  # bmm is slow for single rows
    errors_by_shift = []
    for power in torch.linspace(math.log10(least), 3, 20).tolist():
        inverse = 1 / (values + largest * 10**power)
        point_blocks = (squares @ inverse).unsqueeze(2) if shape[1] == 1 else torch.bmm(blocks * inverse, blocks.mT)
        errors_by_shift.append(torch.linalg.solve(point_blocks, (vectors @ (inverse * turned)).view(*shape)).flatten())
    errors = min(errors_by_shift, key=lambda errors: float(errors.square().sum()))
    return (errors * units).square().view(-1, len(sums[0])).sum(0)


def warn_of_noise(lin: Linearization) -> None:
    """Warn with `NoiseWarning` if a given noise is more than FAR_NOISE times the mean squared residual, or below.

    An estimated noise, one that is being learned, and one without data or with an exact fit are left alone.
    """

    def is_given(likelihood: Likelihood) -> bool:
        gaussian = likelihood.of_position
        return isinstance(gaussian, Gaussian) and not gaussian.needs_noise and not gaussian.noise.requires_grad

    if not lin.data.is_present or not lin.data.labelled or not any(map(is_given, lin.likelihood.members)):
        return
    for member, sums in gaussians_with_sums(lin.likelihood, lin.squared_residuals()):
        squares = None if sums is None else mean_squares(member, sums, torch.finfo(lin.theta.dtype).eps)
        if sums is not None and squares is not None and is_given(member):
            weights, counts = sums[2:] if len(squares) > 1 else sums[2:].sum(1, keepdim=True)
            _warn_of_one_noise(member.of_position, squares, weights / counts, counts)


def warn_of_other_noise(earlier: Any, lin: Linearization) -> None:
    """Warn with `NoiseWarning` if a noise estimated from further data is far from the earlier posterior's."""
    noises = earlier.lin.likelihood.single_noise, lin.likelihood.single_noise
    before, now = (math.nan if noise is None else float(noise) for noise in noises)
    if lin.likelihood.needs_noise and (now > FAR_NOISE * before or FAR_NOISE * now < before):
        warn(
            f"the noise estimated from these {lin.num_data:,} points alone is {now:.3g}, where the earlier posterior "
            f"has {before:.3g}; the new posterior has the former. Few points say little about a noise: to keep the "
            "earlier one, linearise with co.likelihoods.Gaussian(noise=post.observation_noise). check_mode=False skips "
            "this check.",
            NoiseWarning,
        )


def _warn_of_one_noise(
    gaussian: Any, squares: Float[Tensor, " C"], weights: Float[Tensor, " C"], counts: Float[Tensor, " C"]
) -> None:
    # Real weights may also be reciprocal variances, under which residuals times their roots have the noise.
    noise, scaled = gaussian.noise.detach().double(), squares * weights
    squares = squares.where((noise / squares).log().abs() <= (noise / scaled).log().abs(), scaled)
    ratios = (noise / squares).nan_to_num(1.0).flatten()  # of outputs that have targets
    below = torch.special.gammainc(counts / 2, counts / 2 / ratios)  # the chance of residuals that are no larger
    ratios = ratios.where((below - 0.5).abs() > 0.495, 1.0)
    worst = float(ratios[ratios.log().abs().argmax()])
    if 1 / FAR_NOISE <= worst <= FAR_NOISE:
        return
    error = f"{worst**0.5:.2g} times too wide" if worst > 1 else f"{worst**-0.5:.2g} times too narrow"
    warn(
        f"the noise of {gaussian!r} is {worst:.2g} times the mean squared residual of the training data, "
        f"{summary(squares if len(squares) > 1 else squares[0])}: if these residuals show the noise, error bars are "
        f"{error}. 'regression' and co.likelihoods.Gaussian() estimate it. Keep a noise that is known; "
        "check_mode=False skips this check.",
        NoiseWarning,
    )


def add_data(
    post: Updated,
    lin: Linearization,
    curvature: Any,
    rank: int | None,
    generator: torch.Generator | None,
    form: str | None,
) -> Updated:
    """Return the posterior after further data, with this one in the given form as its prior."""
    check_linearization(lin)
    if not isinstance(curvature, LinearOperator):
        lin = with_left_out_noise(lin)
    if form is not None:
        check_choice("form", form, FORMS)
    if rank is not None:
        checked_whole("rank", rank)
        form = form or "low_rank"
    if rank is not None and form == "kronecker":
        raise ValueError(f"rank={rank} is for form='low_rank' or 'low_rank_diagonal'; a Kronecker form has none.")
    chosen = remake_curvature(post.curvature, lin, generator, BY_DATA) if curvature is None else curvature
    compressed, error = post.prior_for(lin, form, rank, generator)
    prior = read_prior(compressed, post.mean, lin.model, posterior=True)
    if form == "kronecker":
        prior = KroneckerPrior(prior.precision, prior.mean)
    operator = checked_curvature(chosen, lin)
    changed = replace(post, lin=lin, curvature=operator, prior=prior, cache=CurvatureCache(lin, operator))
    return replace(changed, prior_error=error, temperature=1.0, tuning=None)


def remake_curvature(
    curvature: LinearOperator, lin: Linearization, generator: torch.Generator | None, remedy: str
) -> LinearOperator:
    """Build the curvature of `lin` with an earlier one's class and options, or raise ValueError with the remedy."""
    remade = curvature.of(lin, generator) if isinstance(curvature, UserOperator) else None
    if remade is None:
        raise ValueError(f"this {type(curvature).__name__} does not record how it was built: {remedy}")
    return remade


def checked_posterior(post: Updated, check_mode: bool) -> Updated:
    """Return the posterior; raise as `laplace` does. Its evidences warn of weights that are no mode with check_mode."""
    require_equal_on_ranks(post)
    require_usable(post.terms)
    post.cache.checks_mode &= check_mode  # False if it has warned
    labelled = isinstance(post.cache.data, str) or all(lin.data.labelled for lin in post.cache.data)
    gradient = post.cache.gradient() if check_mode and labelled else None
    if gradient is not None and not bool(gradient.isfinite().all()):
        raise ValueError("the log-likelihood's gradient holds NaN or Inf: see lin.outputs(), leave such points out.")
    return post
