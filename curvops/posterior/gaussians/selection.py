"""Selecting the weights to infer: scores that rank them, and the distance of a subnetwork's posterior to the full one.

Daxberger et al. 2021: among Gaussians over S weights with a point mass on the others, the one over the S largest
marginal variances is nearest to the full posterior in Wasserstein distance, for a diagonal precision. Weights that no
output depends on have the largest variance of all; if only such weights are selected, predictions have no uncertainty.
`InertWeightsWarning` warns of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from curvops.argument_types import Points, PriorPrecision
from curvops.checks import check_choice, check_options, checked_indices, checked_whole, refuse
from curvops.errors import InertWeightsWarning, warn
from curvops.linalg import Diagonal, Estimate, Reason, diagonal, trace
from curvops.linalg.core import solve_routes as routes
from curvops.linalg.estimators.dense_spectrum import ROUNDING_UNITS
from curvops.network import squared_columns
from curvops.operators import GGN, DiagonalGGN, Linearization
from curvops.operators.curvatures.subnetwork import principal_block
from curvops.posterior.gaussians.laplace import Laplace, check_posterior
from curvops.posterior.precision import inverse_of_rows
from curvops.posterior.terms import check_linearization, read_prior


@dataclass(frozen=True, eq=False)
class Ingredients:
    """The quantities behind the scores, each computed on first access."""

    lin: Linearization
    prior: Tensor
    x: Any = None
    snapshots: Iterable[Any] | None = None
    generator: torch.Generator | None = None

    @cached_property
    def curvature(self) -> Float[Tensor, " D"]:
        """The diagonal of the GGN."""
        entries: Tensor = DiagonalGGN(self.lin).entries
        return entries

    @property
    def variance(self) -> Float[Tensor, " D"]:
        """The variance of each weight under a diagonal posterior."""
        return 1 / (self.curvature + self.prior)


def _marginal(ingredients: Ingredients) -> Tensor:
    """Return the marginal variances: to some 5 %, by 400 solves, or exactly, by one for each of fewer weights."""
    precision = GGN(ingredients.lin).add_diagonal(ingredients.prior)
    estimate = diagonal(precision.inverse(), method="bekas", max_matvecs=400, generator=ingredients.generator)
    return estimate.value.clamp_min(ingredients.variance)  # [P⁻¹]_dd ≥ 1 / P_dd, whatever the probes give


def _swag(ingredients: Ingredients) -> Tensor:
    if ingredients.snapshots is None:
        raise ValueError("score='swag' needs snapshots=, the weights after each epoch of SGD.")
    count, mean, squares = 0, torch.zeros_like(ingredients.lin.theta), torch.zeros_like(ingredients.lin.theta)
    for snapshot in ingredients.snapshots:
        weights = (
            ingredients.lin.flatten(snapshot) if isinstance(snapshot, Mapping) else torch.as_tensor(snapshot).to(mean)
        )
        count, gap = count + 1, weights.detach() - mean
        mean = mean + gap / count
        squares = squares + gap * (weights.detach() - mean)
    refuse(count < 2, f"snapshots= gave {count}: a variance needs at least two (a generator is read once).")
    return squares / (count - 1)


def _random(ingredients: Ingredients) -> Tensor:
    theta, generator = ingredients.lin.theta, ingredients.generator
    device = theta.device if generator is None else generator.device
    return torch.rand(len(theta), generator=generator, device=device).to(theta)


def _predictive(ingredients: Ingredients) -> Tensor:
    return squared_columns(ingredients.lin.jacobian(ingredients.x).passes) * ingredients.variance


SCORES: dict[str, Callable[[Ingredients], Tensor]] = {
    "variance": lambda ingredients: ingredients.variance,
    "swag": _swag,
    "marginal": _marginal,
    "predictive": _predictive,
    "magnitude": lambda ingredients: ingredients.lin.theta.abs(),
    "obd": lambda ingredients: 0.5 * ingredients.lin.theta.square() * ingredients.curvature,
    "obs": lambda ingredients: 0.5 * ingredients.lin.theta.square() / _marginal(ingredients),
    "random": _random,
}
"""The scores by name; the weights with the largest scores are selected."""
WITHOUT_WARNING = ("swag", "magnitude", "random", "predictive")
"""Scores that do not need a curvature, which could take minutes, and one that leaves out what adds nothing at x."""


def select(
    lin: Linearization,
    k: int,
    score: str = "variance",
    *,
    prior_precision: PriorPrecision = 1.0,
    modules: str | Sequence[str] | None = None,
    x: Points | None = None,
    snapshots: Iterable[Any] | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, " k"]:
    """Select k weights to infer by a score, and return their positions in ascending order.

    Args:
        lin: the linearisation of all weights to choose from.
        k: the number of weights.
        score: "variance", 1/(G_dd + λ) of the diagonal posterior; "swag", the variance of the `snapshots` of SGD;
            "marginal", diag((G + A)⁻¹) of the full posterior, by 400 solves to some 5 % (exact up to as many weights);
            "predictive", Σ_n ‖J_n e_d‖² / (G_dd + λ) at the inputs `x`, the contribution of each weight to the variance
            there; "magnitude", |θ_d|; "obd", ½ θ_d² G_dd (LeCun et al. 1990); "obs", ½ θ_d² / [(G + A)⁻¹]_dd, the
            increase of the loss without weight d once the others have adapted (Hassibi & Stork 1993), with the solves
            of "marginal"; "random".
        prior_precision: λ, as in `co.laplace` (but not an operator).
        modules: a glob or globs over parameter names; only their weights can be selected.
        x: the inputs for "predictive"; by default the training inputs.
        snapshots: the weights for "swag", as vectors (D,) or mappings by name, at least two.
        generator: the source of "random" and of the probes of "marginal" and "obs".

    Returns:
        Indices for `co.linearize(…, parameters=indices)` if `lin` selects all trainable parameters, for
        `co.Subnetwork(op, indices)` and for `co.wasserstein(post, indices)`.

    Cost: that of `co.DiagonalGGN(lin)`, except for "swag", "magnitude" and "random", which take a pass over the
    weights. "predictive" costs as much again at x; "marginal" and "obs" add their solves.

    Raises:
        TypeError, ValueError: k is not a whole number between 1 and the number of weights to choose from, the score is
            unknown, a glob matches nothing, snapshots are missing, fewer than two or of another size, or the prior is
            an operator.

    Warns with `InertWeightsWarning`, naming their share, if weights without curvature are selected; not with "swag",
    "magnitude" and "random", which do not compute it, nor with "predictive", by which such weights count at other x.

    Source: Daxberger et al. 2021.

    Examples:
        >>> indices = co.select(lin, 5, "variance")
        >>> len(indices), len(indices.unique())
        (5, 5)
    """
    check_linearization(lin)
    check_options(generator=generator)
    check_choice("score", score, SCORES)
    prior = read_prior(prior_precision, 0.0, lin.model).diagonal
    if prior is None:
        raise ValueError("prior_precision is an operator; scores need a number, a vector or a mapping.")
    allowed = _within(lin, modules)
    k = checked_whole("k", k, 1, len(allowed), "a whole number of weights (for a share, int(share * D))")
    ingredients = Ingredients(lin, prior.detach(), x, snapshots, generator)
    with torch.no_grad():
        values = SCORES[score](ingredients)[allowed]
        order = values.argsort(descending=True, stable=True)
        chosen = allowed[order[: int(k)]].sort().values
        if score not in WITHOUT_WARNING:
            _warn_of_inert(ingredients, chosen, score)
    return chosen


def _within(lin: Linearization, modules: str | Sequence[str] | None) -> Int[Tensor, " m"]:
    """Return the positions of the parameters that the globs match."""
    if modules is None:
        return torch.arange(lin.num_parameters, device=lin.theta.device)
    globs, places = [modules] if isinstance(modules, str) else modules, lin.model.selection.positions()
    for glob in globs:
        if not lin.model.selection.matching(glob):
            raise ValueError(f"modules={glob!r} matches none of the parameters {list(places)}.")
    positions = torch.cat([places[name].flatten() for name in lin.model.selection.matching(*globs)])
    return positions[positions >= 0].sort().values.to(lin.theta.device)


def _warn_of_inert(ingredients: Ingredients, chosen: Tensor, score: str) -> None:
    curvature = ingredients.curvature
    inert = curvature[chosen] <= torch.finfo(curvature.dtype).eps * curvature.max()
    if bool(inert.any()):
        warn(
            f"{inert.double().mean():.0%} of the {len(chosen):,} weights selected by {score!r} have no curvature (no "
            "training output depends on them): their posterior is the prior, and they add nothing to predictions. Use "
            "score='predictive', which leaves them out.",
            InertWeightsWarning,
        )


def wasserstein(
    post: Laplace,
    indices: Tensor | Sequence[int],
    method: str = "exact",
    rtol: float = 0.01,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Return W₂² between the posterior N(θ*, T P⁻¹) and a subnetwork's, which is a point mass outside `indices`.

    The subnetwork's precision is the conditional one, P_SS. The exact distance is tr P⁻¹ + tr P_SS⁻¹
    − 2 tr (P_SS^-½ [P⁻¹]_SS P_SS^-½)^½, computed as a sum of two non-negative parts: the variances left out, and the
    distance within S. Up to 1,024 weights P is formed and inverted; beyond, it takes S products, S solves with P and
    the trace of the rest of P⁻¹. "diagonal" replaces P by its diagonal; the distance is then the sum of the variances
    left out.

    Args:
        post: a posterior over all weights, from `co.laplace`.
        indices: the subnetwork's positions, such as those from `co.select`.
        method: "exact" or "diagonal".
        rtol: the relative accuracy of the variances left out if they have to be estimated (a large P without a closed
            form), and the largest share that rounding may have.
        generator: the source of the probes.

    Returns:
        The squared distance in squared units of the weights, never negative. The reason is PRECISION_LIMIT if the two
        Gaussians are so close within S that rounding decides; the bias bound says by how much.

    Memory: four matrices of S² numbers in float64, 3.2 GB at S = 10,000, and 64 vectors at a time.

    Raises:
        TypeError, ValueError: `post` is not a posterior, the method is unknown, or indices are out of range or
            repeated.

    Source: Daxberger et al. 2021.

    Examples:
        >>> few = co.select(lin, 5)
        >>> float(co.wasserstein(post, few)) > float(co.wasserstein(post, torch.arange(17)))
        True
    """
    check_posterior(post, "wasserstein")
    check_options(rtol=rtol, generator=generator)
    check_choice("method", method, ("exact", "diagonal"))
    P, T = post.precision, post.temperature
    chosen = checked_indices(indices, P.shape[-1]).to(P.device)
    with torch.no_grad():
        rest = torch.ones(P.shape[-1], dtype=torch.bool, device=P.device)
        rest[chosen] = False
        if method == "diagonal":
            return Estimate.exact(T * P.diagonal().double().reciprocal()[rest].sum())
        if not bool(rest.any()):
            return Estimate.exact(torch.zeros((), dtype=torch.float64, device=P.device))
        factor = torch.linalg.cholesky(principal_block(P, chosen).double())
        left_out, whitened = _parts_of_inverse(post, rest, chosen, rtol, generator)
        sizes = whitened.trace()
        _solve_in_place(factor, whitened)
        _solve_in_place(factor, whitened.mT)
        cross = torch.linalg.eigvalsh(whitened).clamp_min(0).sqrt().sum()
        sizes += _solve_in_place(factor, whitened.zero_().fill_diagonal_(1)).square_().sum()
        estimate = left_out + (sizes - 2 * cross).clamp_min(0)
        error = torch.finfo(P.dtype).eps * sizes
        if estimate.reason is Reason.CONVERGED and float(error) > rtol * float(estimate.value):
            estimate = replace(estimate, reason=Reason.PRECISION_LIMIT, stderr=estimate.stderr.clamp_min(error))
        return replace(estimate, bias_bound=estimate.bias_bound + error) * T


def _parts_of_inverse(
    post: Laplace, rest: Tensor, chosen: Tensor, rtol: float, generator: torch.Generator | None
) -> tuple[Estimate, Float[Tensor, "S S"]]:
    """Return the trace of P⁻¹ over the weights left out, and the block of P⁻¹ over the others, in float64."""
    P = post.precision
    form = P._closed_form()
    if form is None and len(rest) <= routes.MOST_DECOMPOSED:
        whole = principal_block(P, torch.arange(len(rest), device=P.device)).double()
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(whole))
        # P⁻¹EP⁻¹ for an error E of P, the rounding of its products.
        delta = ROUNDING_UNITS * torch.finfo(P.dtype).eps * torch.linalg.matrix_norm(whole, torch.inf)
        error = delta * inverse[rest].square().sum()
        return Estimate.rounded(inverse.diagonal()[rest].sum(), error, rtol), inverse[chosen][:, chosen]
    inverse = inverse_of_rows(post.terms, len(chosen), None)
    block = principal_block(inverse, chosen).double()
    if form is not None:
        variances, errors = (
            entries.double()[rest].sum() for entries in (form.inverse_diagonal(), form.inverse_diagonal_error())
        )
        return Estimate.rounded(variances, errors, rtol), block
    only = Diagonal(rest.to(P.dtype))
    return trace(only @ inverse @ only, rtol=rtol, method="hutchinson", generator=generator), block


def _solve_in_place(factor: Float[Tensor, "S S"], block: Float[Tensor, "S K"]) -> Float[Tensor, "S K"]:
    """Replace B by L⁻¹ B, some columns at a time, since matrices of S² numbers may be large."""
    for columns in block.split(512, 1):
        columns.copy_(torch.linalg.solve_triangular(factor, columns, upper=False))
    return block
