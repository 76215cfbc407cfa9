"""The distance from a mode in nats: what the log posterior would still gain, and a warning where that matters.

The evidence is an expansion around a mode. At other weights, with the gradient g of the negative log posterior, the
same expansion has a linear term, and the evidence without it is ½ gᵀP⁻¹g nats too low.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.errors import ModeWarning, warn
from curvops.linalg import cg
from curvops.linalg.core.vectors import inner, norm
from curvops.posterior.core.priors import PrecisionTerms, Prior

TOLERATED = 1.0
"""Nats by which an evidence may be too low before there is a warning: a factor e in the probability of the data."""
MOST_STEPS = 1000


@torch.no_grad()
def nats_below_mode(terms: PrecisionTerms, enough: float) -> tuple[float, float]:
    """Return bounds of ½ gᵀP⁻¹g, the gain of the log posterior's quadratic model from θ* to its mode; NaN without data.

    Costs a gradient, and a solve unless the prior alone bounds the result by `enough`. Conjugate gradients approach it
    from below, and what their residual r leaves is at most ½ rᵀA⁻¹r, since P is A plus a curvature. Under a prior
    that is an operator the upper bound is an estimate.
    """
    of_data, A = terms.cache.gradient(), terms.A
    if of_data is None:
        return math.nan, math.nan
    gradient = of_data + terms.prior.gradient(terms.lin.theta)
    bound = nats_of_prior(terms.prior, gradient)
    if bound <= enough:
        return 0.0, bound
    rtol = 1e-3 if A is None else min(0.1, math.sqrt(0.1 * enough / bound))
    M = None if terms.closed_form is None else terms.precision.preconditioner(1)
    found = cg(terms.precision, gradient, preconditioner=M, rtol=rtol, maxiter=MOST_STEPS)
    lower = 0.5 * float(inner(gradient.unsqueeze(1), found.x.unsqueeze(1)))
    if A is None:
        return lower, lower
    residual = found.relative_residuals.to(gradient.device) * norm(gradient.unsqueeze(1))
    return lower, min(bound, lower + 0.5 * float((residual.square() / A.min()).sum()))


def nats_of_prior(prior: Prior, gradient: Float[Tensor, " D"]) -> float:
    """Return ½ gᵀA⁻¹g, an upper bound of the nats to the mode; ∞ for a prior that is an operator."""
    A = prior.diagonal
    return math.inf if A is None else 0.5 * float((gradient.double().square() / A.detach().double()).sum())


def in_words(nats: float) -> str:
    """Return a number of nats with two digits, and no exponent."""
    return f"{nats:.1f}" if nats < 10 else f"{nats:,.0f}"


def warn_of_mode(post: Any) -> None:
    """Warn once for a linearisation and a curvature if the evidence at these weights is too low by `TOLERATED`."""
    if not post.cache.checks_mode or not (nats := nats_below_mode(post.terms, TOLERATED)[0]) > TOLERATED:
        return
    post.cache.checks_mode = False
    warn(
        f"the log evidence is about {in_words(nats)} nats too low, because the weights are not a mode of the posterior "
        "under this prior: training under another prior or with AdamW, early stopping and the kinks of a ReLU leave "
        "them elsewhere. A prior chosen by it may harm predictions. Either train on to a mode under this prior, "
        "co.fit_mode(model, data, likelihood, prior_precision); or take the evidence at the mode of the linearised "
        'network, mode="linear"; or choose the prior by held-out data, co.evidence.validate.',
        ModeWarning,
    )
