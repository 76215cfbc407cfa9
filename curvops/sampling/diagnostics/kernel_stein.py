"""The kernel Stein discrepancy between draws and a target with a known score, and the scores of log posteriors.

Liu, Lee & Jordan 2016 and Chwialkowski, Strathmann & Gretton 2016, with the inverse multiquadric kernel of Gorham &
Mackey 2017, which detects draws that do not converge.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.argument_types import Density, Draws, GivenBatch
from curvops.checks import check_kind, checked_number
from curvops.linalg import Estimate
from curvops.sampling.core.chain_draws import Chain, checked_draws
from curvops.sampling.core.evaluation import Evaluation
from curvops.sampling.core.log_density import LogPosterior

AT_A_TIME = 2**22
"""How many numbers of the draws are converted at a time."""


@torch.no_grad()
def stein_discrepancy(draws: Draws, scores: Any, scale: float | str = 1.0) -> Estimate:
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
    if len(products[0]) < 4:
        raise ValueError(f"there are {len(products[0])} draws, but the standard error of a U-statistic needs four.")
    squares = _squared_distances(products[0])
    u = stein_kernel(*products, squares, dimension, _checked_scale(scale, squares))
    return u_statistic(u)


def stein_kernel(
    points: Float[Tensor, "n n"],
    crossed: Float[Tensor, "n n"],
    scores: Float[Tensor, "n n"],
    squares: Float[Tensor, "n n"],
    dimension: int,
    scale: float,
) -> Float[Tensor, "n n"]:
    """Return u(θ_i, θ_j) from θ_iᵀθ_j, θ_iᵀs_j, s_iᵀs_j and ‖θ_i − θ_j‖²."""
    own = crossed.diagonal()
    apart = own.unsqueeze(1) + own - crossed - crossed.mT  # (θ_i − θ_j)ᵀ(s_i − s_j)
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
    found = u.new_tensor(value)
    return Estimate(found, found.new_tensor(math.sqrt(max(value**2 - apart, least))), n, 0)


def _products(points: dict[str, Tensor], slopes: dict[str, Tensor]) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
    """Return θθᵀ, θsᵀ and ssᵀ over all draws in float64, with θ less its mean, and D, a few entries at a time."""
    first = next(iter(points.values()))
    n, dimension = first.shape[0] * first.shape[1], 0
    found = first.new_zeros(3, n, n, dtype=torch.float64)
    for name, tensor in points.items():
        for x, s in zip(_parts(tensor, n), _parts(slopes[name], n)):
            x = x - x.mean(0)  # distances lose digits if weights are far from zero
            dimension += x.shape[1]
            found[0] += x @ x.mT
            found[1] += x @ s.mT
            found[2] += s @ s.mT
    return (found[0], found[1], found[2]), dimension


def _parts(tensor: Tensor, n: int) -> Iterator[Float[Tensor, "n d"]]:
    flat = tensor.flatten(0, 1).reshape(n, -1)
    return (part.double() for part in flat.split(max(1, AT_A_TIME // n), 1))


def _squared_distances(products: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    own = products.diagonal()
    return (own.unsqueeze(1) + own - 2 * products).clamp_min_(0)


def _checked_scale(scale: Any, squares: Tensor) -> float:
    if scale == "median":
        n = len(squares)
        i, j = torch.triu_indices(n, n, 1, device=squares.device)
        found = float(squares[i, j].median().sqrt())
        if not found > 0:
            raise ValueError("scale='median' is zero: at least half of the pairs of draws are the same; pass a number.")
        return found
    return checked_number("scale", scale, kind="a positive number or 'median'")


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
    check_kind("chain", chain, Chain, "the chain that co.sampling.run returned")
    assert isinstance(log_posterior, LogPosterior)
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
