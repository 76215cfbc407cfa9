"""Diagnostics of chains: mixing, effective sample size, and the distance of their distribution from the target.

Rank-normalised split R̂ and effective sample sizes of each entry are computed by ArviZ (Vehtari et al. 2021); for chains
of many weights there are a few random projections (Hron et al. 2022). The kernel Stein discrepancy (Liu, Lee & Jordan
2016; Chwialkowski, Strathmann & Gretton 2016) has the inverse multiquadric kernel of Gorham & Mackey 2017, which
detects draws that do not converge.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.argument_types import Density, Draws, GivenBatch
from curvops.checkpoint import digest
from curvops.checks import check_choice, check_kind, check_options, checked_number, refuse
from curvops.linalg import Estimate
from curvops.ranks.process_group import Spread
from curvops.sampling.log_density import Evaluation, LogPosterior
from curvops.sampling.state import Chain, checked_draws
from curvops.summary import Summarised

__all__ = ["RandomProjections", "ess", "random_projections", "rhat", "scores", "stein_discrepancy", "to_inference_data"]


def to_inference_data(draws: Draws) -> Any:
    """Convert draws to an `arviz.InferenceData` with a group `posterior`, for ArviZ's tables and plots.

    Args:
        draws: {name: tensor (chain, draw, ...)} or one such tensor, which gets the name "x".

    Returns:
        The `arviz.InferenceData`.

    Raises:
        ImportError: ArviZ is not installed (`pip install curvops[diagnostics]`).
        TypeError, ValueError: draws are of another kind, or not finite.

    Tensors on the CPU are not copied.

    Examples:
        >>> draws = torch.randn(2, 100, 3, generator=torch.Generator().manual_seed(0))
        >>> co.sampling.diagnostics.to_inference_data(draws).posterior.sizes["chain"]
        2
    """
    return _dataset(checked_draws(draws))


def rhat(draws: Draws) -> dict[str, Tensor]:
    """Compute the rank-normalised split R̂ of each entry; above 1.01, chains have not mixed (Vehtari et al. 2021).

    Args:
        draws: {name: tensor (chain, draw, ...)} or one such tensor, with at least two chains.

    Returns:
        {name: tensor of the parameter's shape}, in float64.

    Raises:
        ImportError, TypeError, ValueError: as `to_inference_data`, for a single chain, and for fewer than four draws
            per chain.

    Cost: about a millisecond for each entry; for many weights use `random_projections`.

    Examples:
        >>> draws = torch.randn(2, 100, 3, generator=torch.Generator().manual_seed(0))
        >>> bool((co.sampling.diagnostics.rhat(draws)["x"] < 1.1).all())
        True
    """
    checked = checked_draws(draws, chains=2, least=4)
    return _tensors(_arviz().rhat(_dataset(checked), method="rank"), checked)


def ess(draws: Draws, kind: str = "bulk") -> dict[str, Tensor]:
    """Compute the effective sample size of each entry, over all chains together (Vehtari et al. 2021).

    Args:
        draws: {name: tensor (chain, draw, ...)} or one such tensor.
        kind: "bulk" for the rank-normalised draws, which measures the accuracy at the centre of the distribution;
            "tail" for the smaller one at the 5 % and the 95 % quantile, which measures it in the tails.

    Returns:
        {name: tensor of the parameter's shape}, in float64.

    Raises:
        ImportError, TypeError, ValueError: as `to_inference_data`, for fewer than four draws, and for another kind.

    Cost: as for `rhat`.

    Examples:
        >>> draws = torch.randn(2, 100, 3, generator=torch.Generator().manual_seed(0))
        >>> co.sampling.diagnostics.ess(draws)["x"].shape
        torch.Size([3])
    """
    check_choice("kind", kind, ("bulk", "tail"))
    checked = checked_draws(draws, least=4)
    return _tensors(_arviz().ess(_dataset(checked), method=kind), checked)


def _arviz() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # ArviZ announces its next version once a day
            import arviz
    except ImportError as error:
        raise ImportError("R̂ and effective sample sizes need ArviZ: pip install curvops[diagnostics].") from error
    return arviz


def _dataset(checked: dict[str, Tensor]) -> Any:
    return _arviz().from_dict(posterior={name: tensor.detach().cpu().numpy() for name, tensor in checked.items()})


def _tensors(dataset: Any, checked: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.as_tensor(dataset[name].values, dtype=torch.float64, device=tensor.device)
        for name, tensor in checked.items()
    }


AT_A_TIME = 2**22
"""How many numbers of the draws are converted at a time."""


@dataclass(frozen=True, eq=False, repr=False)
class RandomProjections(Summarised):
    """R̂² and effective sample sizes of chains under p random projections.

    ``r_squared`` (p,) is R̂² = Var(θ) / E_chain[Var(θ | chain)], without the root: 1 if the chains agree; None for a
    single chain. ``ess`` (chains, p) is S / (1 + 2 Σ (1 − l/S) ρ̂_l) for each chain separately, summed up to the first
    negative ρ̂ (Hron et al. 2022, with autocorrelations ρ̂_l at lag l as in TensorFlow Probability); it does not detect
    a disagreement between chains. ``series`` (chains, draws, p) are the projections.

    Examples:
        >>> draws = torch.randn(2, 100, 5, generator=torch.Generator().manual_seed(0))
        >>> projections = co.sampling.diagnostics.random_projections(draws, count=10)
        >>> projections.ess.shape
        torch.Size([2, 10])
    """

    r_squared: Float[Tensor, " p"] | None
    ess: Float[Tensor, "chains p"]
    series: Float[Tensor, "chains draws p"]


@torch.no_grad()
def random_projections(draws: Draws, count: int = 100, generator: torch.Generator | None = None) -> RandomProjections:
    """Compute R̂² and effective sample sizes of random projections of the weights, or of functions.

    Args:
        draws: {name: tensor (chain, draw, ...)} or one such tensor: weights, or outputs (chain, draw, N, C) of the
            network at some inputs. For chains spread over ranks without `gather`, only the projections are gathered.
        count: the number of projections, onto standard normal vectors.
        generator: the source of these vectors.

    Returns:
        RandomProjections with `r_squared` (count,) and `ess` (chain, count).

    Raises:
        TypeError, ValueError: draws are of another kind, fewer than two per chain, or not finite, or count is not a
            positive whole number.

    Cost: a product of the draws with a D × count matrix, made in parts, without a copy of the draws.

    Source: Hron et al. 2022.

    Examples:
        >>> draws = torch.randn(2, 100, 5, generator=torch.Generator().manual_seed(0))
        >>> projections = co.sampling.diagnostics.random_projections(draws, count=10)
        >>> projections.series.shape
        torch.Size([2, 100, 10])
    """
    check_options(count=count, generator=generator)
    spread = draws.spread if isinstance(draws, Chain) else None
    checked = checked_draws(draws.params if isinstance(draws, Chain) and spread is not None else draws, least=2)
    series = project(checked, count, generator, spread)
    within = series.var(1, correction=0)
    refuse((within == 0).any(), f"{int((within == 0).all(1).sum())} of the {len(series)} chains do not move.")
    total = series.flatten(0, 1).var(0, correction=0)
    r_squared = total / within.mean(0) if len(series) > 1 else None
    return RandomProjections(r_squared, effective_sizes(series), series)


def project(
    checked: dict[str, Tensor], count: int, generator: torch.Generator | None, spread: Spread | None = None
) -> Float[Tensor, "chains draws p"]:
    """Multiply draws by standard normal columns in float64, up to a constant per column, a few entries at a time.

    For chains spread over ranks, the result covers all chains, on all ranks.
    """
    first = next(iter(checked.values()))
    series = first.new_zeros((*first.shape[:2], count), dtype=torch.float64)
    device = first.device if generator is None else generator.device
    for tensor in checked.values():
        for entries in _some_entries(tensor):
            columns = torch.randn(entries.shape[2], count, generator=generator, device=device, dtype=torch.float64)
            first_draw = entries[:1, :1] if spread is None else spread.ranks.line_up(entries[:1, :1])[:1]
            moved = entries - first_draw  # weights may be far from zero compared with their spread
            series += moved @ columns.to(series.device)
    if spread is None:
        return series
    spread.ranks.require_equal({"the projections, from count and generator": digest([columns])})
    return spread.line_up(series)


def effective_sizes(series: Float[Tensor, "chains draws *p"]) -> Float[Tensor, "chains *p"]:
    """Return S / (1 + 2 Σ (1 − l/S) ρ̂_l) for each chain, with the sum up to the first negative ρ̂."""
    rho = autocorrelation(series)
    draws = series.shape[1]
    before_first_negative = (rho >= 0).cumprod(1)
    lags = torch.arange(draws, dtype=rho.dtype, device=rho.device).view(1, -1, *[1] * (rho.ndim - 2))
    sizes: Tensor = draws / (2 * (before_first_negative * rho * (1 - lags / draws)).sum(1) - 1)
    return sizes


def effective_size(series: Float[Tensor, "chains draws *p"]) -> Float[Tensor, "*p"]:
    """Return the effective sample size of all chains together, at least one; it is smaller if they disagree.

    It is k S / (1 + 2 Σ ρ̂_l), ρ̂_l = 1 − (W − mean acov_l) / var⁺, where the variance var⁺ includes that between the
    chains (Gelman et al. 2013, eq. 11.7). The sum ends at the first pair of lags with a negative sum (Geyer 1992),
    because an oscillating chain has negative correlations at odd lags. Chains of one draw each count as independent
    draws.
    """
    chains, draws = series.shape[:2]
    if draws == 1 or not series.numel():
        return series.new_full(series.shape[2:], chains, dtype=torch.float64)
    series = series.double()
    within = series.var(1).mean(0)
    between = series.mean(1).var(0) if chains > 1 else torch.zeros_like(within)
    total = within * (draws - 1) / draws + between
    variances = series.var(1, correction=0).unsqueeze(1)
    left = (1 - torch.arange(draws, dtype=series.dtype, device=series.device) / draws).view(1, -1, *[1] * within.ndim)
    covariances = autocorrelation(series) * variances * left
    covariances = covariances.nan_to_num().mean(0)  # a chain that does not move has no correlation
    rho = 1 - (within - covariances) / total
    rho = torch.where(total > 0, rho, 0.0)
    rho[0] = 1.0
    pairs = rho[: draws - draws % 2].unflatten(0, (-1, 2)).sum(1)
    initial = (pairs > 0).cumprod(0)
    return (chains * draws / (2 * (initial * pairs).sum(0) - 1).clamp_min(1.0)).clamp_min(1.0)


def autocorrelation(series: Float[Tensor, "chains draws *p"]) -> Float[Tensor, "chains draws *p"]:
    """Return ρ̂_l at each lag l: the mean of the S − l products of deviations from the chain's mean, scaled to ρ̂_0 = 1.

    The result is NaN if a chain does not move. Uses a Fourier transform, O(S log S).
    """
    draws = series.shape[1]
    moved = series.double() - series.double().mean(1, keepdim=True)
    spectrum = torch.fft.rfft(moved, 2 * draws, dim=1)
    sums = torch.fft.irfft(spectrum.abs().square(), 2 * draws, dim=1)[:, :draws]
    counts = torch.arange(draws, 0, -1, dtype=sums.dtype, device=sums.device).view(1, -1, *[1] * (sums.ndim - 2))
    means = sums / counts
    return means / means[:, :1]


@torch.no_grad()
def stein_discrepancy(draws: Draws, scores: Draws, scale: float | str = 1.0) -> Estimate:
    """Estimate the squared kernel Stein discrepancy between draws and a target, by a U-statistic.

    It is E u(θ, θ') over pairs of draws, zero if the draws come from the target, with
    u = s(θ)ᵀs(θ')k + s(θ)ᵀ∇'k + s(θ')ᵀ∇k + tr ∇∇'k with the score s and the kernel k = (c² + ‖θ − θ'‖²)^-½.

    Args:
        draws: {name: tensor (chain, draw, ...)} or one such tensor; all chains count together.
        scores: tensors of the same names and shapes, the gradient of the *full* log density at each draw. For a
            posterior it is the gradient of the summed log-likelihood plus the log prior, N times that of
            `log_posterior` over all data; for a tempered posterior, divide it by τ. Unbiased scores of minibatches
            leave the mean unchanged unless two draws share a minibatch: the mean then grows by the expected product of
            their noises.
        scale: c, in the units of the weights, or "median" for the median distance of the draws.

    Returns:
        An `Estimate`: the value is unbiased and may be negative. Its standard error is that of a U-statistic of
        *independent* draws (a third too large if they come from the target): thin chains first, or multiply the error
        by the factor √(draws / effective sample size).

    Raises:
        TypeError, ValueError: draws or scores are of another kind, have different names or shapes, there are fewer
            than four draws, or the scale is not positive.

    Cost: three Gram matrices of n draws, n²D operations each, and memory for n² numbers.

    Source: Liu, Lee & Jordan 2016; Gorham & Mackey 2017.

    Examples:
        >>> draws = torch.randn(1, 100, 2, generator=torch.Generator().manual_seed(0))
        >>> scores = -draws  # of the density N(0, I)
        >>> float(co.sampling.diagnostics.stein_discrepancy(draws, scores)) < 0.1
        True
    """
    points, slopes = checked_draws(draws), checked_draws(scores, "scores")
    if list(points) != list(slopes) or any(points[name].shape != slopes[name].shape for name in points):
        raise ValueError("scores must have the names and the shapes of the draws.")
    products, dimension = _products(points, slopes)
    squares = products[0].diagonal()
    squares = (squares.unsqueeze(1) + squares - 2 * products[0]).clamp_min_(0)  # the distances of all pairs
    if scale == "median":
        i, j = torch.triu_indices(len(squares), len(squares), 1, device=squares.device)
        scale = float(squares[i, j].median().sqrt())
    scale = checked_number("scale", scale, kind="a positive number or 'median'")
    return u_statistic(stein_kernel(*products, squares, dimension, scale))


def stein_kernel(
    points: Float[Tensor, "n n"],
    crossed: Float[Tensor, "n n"],
    scores: Float[Tensor, "n n"],
    squares: Float[Tensor, "n n"],
    dimension: int,
    scale: float,
) -> Float[Tensor, "n n"]:
    """Return u(θ_i, θ_j) from θ_iᵀθ_j, θ_iᵀs_j, s_iᵀs_j and ‖θ_i − θ_j‖²."""
    diagonal = crossed.diagonal()
    apart = diagonal.unsqueeze(1) + diagonal - crossed - crossed.mT  # (θ_i − θ_j)ᵀ(s_i − s_j)
    w = scale**2 + squares
    return w.rsqrt() * (scores + (apart + dimension - 3 * squares / w) / w)


def u_statistic(u: Float[Tensor, "n n"]) -> Estimate:
    """Return the mean of u over pairs of different draws, with its standard error for independent draws.

    The variance is the square of the mean minus the mean of u_ij u_kl over four different indices, which is unbiased.
    If it is below the contribution of pairs alone (draws from the target, for which u is degenerate), that
    contribution replaces it, and makes the error a third too large on average.
    """
    n = len(u)
    u = u - u.diagonal().diag()
    rows, squares = u.sum(1), float(u.square().sum())
    total = float(rows.sum())
    pairs = n * (n - 1)
    value = total / pairs
    shared = float(rows.square().sum()) - squares
    apart = (total**2 - 4 * shared - 2 * squares) / (pairs * (n - 2) * (n - 3))
    least = 2 * max(squares / pairs - value**2, 0.0) / pairs
    mean = u.new_tensor(value)
    return Estimate(mean, mean.new_tensor(math.sqrt(max(value**2 - apart, least))), n, 0)


def _products(points: dict[str, Tensor], slopes: dict[str, Tensor]) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
    """Return θθᵀ, θsᵀ and ssᵀ over all draws in float64, with θ less its mean, and D, a few entries at a time."""
    first = next(iter(points.values()))
    n, dimension = first.shape[0] * first.shape[1], 0
    sums = first.new_zeros(3, n, n, dtype=torch.float64)
    for name, tensor in points.items():
        for entries, their_slopes in zip(_some_entries(tensor), _some_entries(slopes[name])):
            x, s = entries.flatten(0, 1), their_slopes.flatten(0, 1)
            x = x - x.mean(0)  # distances lose digits if weights are far from zero
            dimension += x.shape[1]
            sums[0] += x @ x.mT
            sums[1] += x @ s.mT
            sums[2] += s @ s.mT
    return (sums[0], sums[1], sums[2]), dimension


def _some_entries(tensor: Tensor) -> Iterator[Float[Tensor, "chains draws d"]]:
    """Yield a few entries of all draws at a time, in float64."""
    flat = tensor.reshape(*tensor.shape[:2], -1)
    return (entries.double() for entries in flat.split(max(1, AT_A_TIME // (len(flat) * flat.shape[1])), 2))


@torch.no_grad()
def scores(log_posterior: Density, chain: Chain, batches: Iterable[GivenBatch], *, part: bool = False) -> Any:
    """Compute ∇ log p(θ | data) at each draw of a run, for `stein_discrepancy(chain, scores)`.

    It is N times the gradient of `log_posterior`, a mean over N points, summed over the batches weighted by their
    sizes. For a tempered posterior divide it by τ.

    Args:
        log_posterior: the result of `co.sampling.log_posterior`.
        chain: the result of `co.sampling.run`.
        batches: all data, `[(X, y)]` or a list of batches.
        part: True accepts batches that are only a part of the data, and multiplies their sum by N/n: the scores are
            unbiased if the part is chosen at random. `stein_discrepancy` describes the effect on its value.

    Returns:
        A tree like `chain.params`, tensors (k, S, *shape).

    Raises:
        TypeError: the log posterior, the draws or the batches are of another kind.
        ValueError: the batches do not contain all N points, and `part` is False.

    Cost: a gradient for each draw, many draws together if `torch.vmap` can run the model.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> chain = co.sampling.run(co.sampling.sgld(density, 1e-3), density.params, [(x, y)], steps=5)
        >>> co.sampling.diagnostics.scores(density, chain, [(x, y)])["0.bias"].shape
        torch.Size([1, 5, 3])
    """
    check_kind("log_posterior", log_posterior, LogPosterior, "co.sampling.log_posterior(...), which carries N")
    assert isinstance(log_posterior, LogPosterior)
    check_kind("chain", chain, Chain, "the chain that co.sampling.run returned")
    if isinstance(batches, Tensor | tuple):
        raise TypeError(f"batches must be a list of batches, [(X, y)] for all data, got a {type(batches).__name__}.")
    rows = chain.theta.flatten(0, 1)
    density, total, count = Evaluation(log_posterior), torch.zeros_like(rows), 0
    for batch in batches:
        points = log_posterior.num_points(batch)
        total += points * density.gradient(rows, chain.structure, batch)[1]
        count += points
    if count != log_posterior.data_size and not part:
        raise ValueError(f"the batches have {count} of {log_posterior.data_size} points: pass all, or part=True.")
    return chain.structure.unflatten((total * (log_posterior.data_size / count)).view_as(chain.theta))
