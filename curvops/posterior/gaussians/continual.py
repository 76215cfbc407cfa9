"""Continual learning: an earlier posterior as a penalty in training on new data, and as the prior for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor, nn

from curvops.checks import carries_graph, check_choice, check_kind, check_like, checked_whole
from curvops.linalg import Damped, Estimate, low_rank
from curvops.linalg.core.sources import sources_of
from curvops.linalg.estimators.frobenius import relative_distance
from curvops.operators import Linearization
from curvops.operators.kfac.kfac_sum import has_kronecker_blocks
from curvops.operators.linearized.user_operator import UserOperator

FORMS = ("low_rank", "low_rank_diagonal", "kronecker")
"""The forms in which an earlier posterior can be kept."""


def quadratic(precision: LinearOperator, gap: Float[Tensor, "*k D"]) -> Float[Tensor, "*k"]:
    """Return ½ gapᵀ P gap per row, with its gradient P gap, by one product with P; on demand also in P's tensors.

    It is computed in float64, since it may be as large as 1e6 nats.
    """
    rows = torch.atleast_2d(gap)
    if carries_graph(precision.representation()):
        found = 0.5 * (rows * precision.matmul(rows.mT).mT).double().sum(-1)
    else:
        with torch.no_grad():
            product = precision._matmul(rows.detach().mT).mT
        found = (rows * product).double().sum(-1)
        found = found - 0.5 * found.detach()
    return found.reshape(gap.shape[:-1])


def flatten_weights(lin: Linearization, params: Any, rows: bool = False) -> Float[Tensor, "*k D"]:
    """Return a model's weights, named ones, a vector or, if allowed, rows as one tensor that keeps its graph."""
    if isinstance(params, Mapping | nn.Module):
        params = lin.flatten(params)
    check_kind("params", params, Tensor, f"the model, named tensors or a vector ({lin.num_parameters},)")
    if params.shape[-1:] != (lin.num_parameters,) or params.ndim > 1 + rows:
        or_rows = f" or rows (k, {lin.num_parameters})" if rows else ""
        raise ValueError(f"params must be a vector ({lin.num_parameters},){or_rows}, got shape {tuple(params.shape)}.")
    check_like("params", params, lin.theta, "the posterior")
    return params


def require_new_data(lin: Linearization, precision: LinearOperator) -> None:
    """Raise ValueError if an earlier posterior, or its prior, has the same data, which would count twice."""
    known = sources_of(precision)
    if known is not None and lin.source in known.counts:
        raise ValueError("the earlier posterior has these data, which would count twice: linearise with the new data.")


def remake_curvature(
    curvature: LinearOperator, lin: Linearization, generator: torch.Generator | None, remedy: str
) -> LinearOperator:
    """Build the curvature of `lin` with an earlier one's class and options, or raise ValueError with the remedy."""
    found = curvature.of(lin, generator) if isinstance(curvature, UserOperator) else None
    if found is None:
        raise ValueError(f"this {type(curvature).__name__} does not record how it was built: {remedy}")
    return found


def checked_form(form: Any, rank: Any) -> str | None:
    """Return the form in which an earlier posterior is to be kept; a rank alone means "low_rank"."""
    if form is not None:
        check_choice("form", form, FORMS)
    if rank is not None:
        checked_whole("rank", rank)
    if rank is not None and form == "kronecker":
        raise ValueError(f"rank={rank} is for form='low_rank' or 'low_rank_diagonal'; a Kronecker form has none.")
    return "low_rank" if form is None and rank is not None else form


def compress_precision(
    form: str | None, precision: LinearOperator, rank: int | None, generator: torch.Generator | None
) -> tuple[LinearOperator, Estimate | None]:
    """Return P in the given form (None: unchanged), and the error ‖C − Ĉ‖_F / ‖C‖_F of its curvature."""
    if form is None:
        return precision, None
    if not isinstance(precision, Damped):
        raise ValueError(f"form={form!r} needs a curvature plus a number or a vector: use co.low_rank(prior operator).")
    curvature = precision.base
    if form == "kronecker":
        if not has_kronecker_blocks(curvature):
            raise ValueError("form='kronecker' needs a KFAC: start with curvature=co.KFAC, or use form='low_rank'.")
        return precision, None
    found = low_rank(curvature, rank, generator=generator)
    if form == "low_rank":
        return found.add_diagonal(precision.shift), found.error
    kept = found.with_diagonal(curvature.diagonal())
    return kept.add_diagonal(precision.shift), relative_distance(curvature, kept, generator)
