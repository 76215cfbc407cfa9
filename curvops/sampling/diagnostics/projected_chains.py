"""Diagnostics of chains of many weights by a few random projections (Hron et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.argument_types import Draws
from curvops.checkpoint import digest
from curvops.checks import check_generator
from curvops.posterior.core.arguments import checked_count
from curvops.sampling.core.chain_draws import Chain, checked_draws
from curvops.sampling.core.spread import Spread
from curvops.summary import Summarised

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
        >>> found = co.sampling.diagnostics.random_projections(draws, count=10)
        >>> found.ess.shape
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
        TypeError, ValueError: draws are of another kind, fewer than two per chain, or not finite, chains do not move,
            or count is not a positive whole number.

    Cost: a product of the draws with a D × count matrix, made in parts, without a copy of the draws.

    Source: Hron et al. 2022.

    Examples:
        >>> draws = torch.randn(2, 100, 5, generator=torch.Generator().manual_seed(0))
        >>> found = co.sampling.diagnostics.random_projections(draws, count=10)
        >>> found.series.shape
        torch.Size([2, 100, 10])
    """
    count = checked_count(count)
    check_generator(generator)
    spread = draws.spread if isinstance(draws, Chain) else None
    checked = checked_draws(draws.params if isinstance(draws, Chain) and spread is not None else draws, each=2)
    series = project(checked, count, generator, spread)
    within = series.var(1, correction=0)
    if not bool((within > 0).all()):
        still = int((within == 0).all(1).sum())
        raise ValueError(f"{still} of the {len(series)} chains do not move: their draws are all the same.")
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
    found = first.new_zeros((*first.shape[:2], count), dtype=torch.float64)
    device = first.device if generator is None else generator.device
    for tensor in checked.values():
        flat = tensor.flatten(2) if tensor.ndim > 2 else tensor.unsqueeze(2)
        for part in flat.split(max(1, AT_A_TIME // (len(flat) * flat.shape[1])), 2):
            columns = torch.randn(part.shape[2], count, generator=generator, device=device, dtype=torch.float64)
            first_draw = part[:1, :1] if spread is None else spread.ranks.line_up(part[:1, :1])[:1]
            moved = part.double() - first_draw.double()  # weights may be far from zero compared with their spread
            found += moved @ columns.to(found.device)
    if spread is None:
        return found
    spread.ranks.require_equal({"the projections, from count and generator": digest([columns])})
    return spread.line_up(found)


def effective_sizes(series: Float[Tensor, "chains draws *p"]) -> Float[Tensor, "chains *p"]:
    """Return S / (1 + 2 Σ (1 − l/S) ρ̂_l) for each chain, with the sum up to the first negative ρ̂."""
    rho = autocorrelation(series)
    draws = series.shape[1]
    kept = (rho >= 0).cumprod(1)
    lags = torch.arange(draws, dtype=rho.dtype, device=rho.device).view(1, -1, *[1] * (rho.ndim - 2))
    sizes: Tensor = draws / (2 * (kept * rho * (1 - lags / draws)).sum(1) - 1)
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
    covariances = (
        (autocorrelation(series) * variances * left).nan_to_num().mean(0)
    )  # a chain that does not move has no correlation
    rho = 1 - (within - covariances) / total
    rho = torch.where(total > 0, rho, 0.0)
    rho[0] = 1.0
    pairs = rho[: draws - draws % 2].unflatten(0, (-1, 2)).sum(1)
    kept = (pairs > 0).cumprod(0)
    return (chains * draws / (2 * (kept * pairs).sum(0) - 1).clamp_min(1.0)).clamp_min(1.0)


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
