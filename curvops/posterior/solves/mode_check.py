"""The distance from a mode in nats: what the log posterior would still gain, and a warning where that matters.

The evidence is an expansion around a mode. At other weights, with the gradient g of the negative log posterior, the
same expansion has a linear term, and the evidence without it is ½ gᵀP⁻¹g nats too low.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from curvops.errors import ModeWarning
from curvops.linalg import cg
from curvops.linalg.core.vectors import inner
from curvops.posterior.core.priors import PrecisionTerms

TOLERATED = 1.0
"""Nats by which an evidence may be too low before there is a warning: a factor e in the probability of the data."""
MOST_PRODUCTS = 200


@torch.no_grad()
def nats_below_mode(terms: PrecisionTerms, enough: float = 0.0) -> float:
    """Return ½ gᵀP⁻¹g, what the log posterior gains in its quadratic model from θ* to the mode; NaN without data.

    Costs a gradient, and a solve unless the prior alone bounds the result by `enough`, which is then returned. The
    solve ends early: conjugate gradients approach the result from below.
    """
    of_data = terms.cache.gradient()
    if of_data is None:
        return math.nan
    gradient = of_data + terms.prior.gradient(terms.lin.theta)
    # Since P is A plus a curvature, ½ gᵀA⁻¹g is an upper bound.
    if terms.A is not None and (bound := 0.5 * float((gradient.double().square() / terms.A.double()).sum())) <= enough:
        return bound
    P = terms.precision
    M = None if terms.closed_form is None else P.preconditioner(1)
    step = cg(P, gradient, preconditioner=M, rtol=0.1, maxiter=MOST_PRODUCTS).x
    return 0.5 * float(inner(gradient.unsqueeze(1), step.unsqueeze(1)))


def warn_of_mode(post: Any, stacklevel: int) -> None:
    """Warn once for a linearisation and a curvature if the evidence at these weights is too low by `TOLERATED`."""
    if not post.cache.checks_mode or not (nats := nats_below_mode(post.terms, TOLERATED)) > TOLERATED:
        return
    post.cache.checks_mode = False
    warnings.warn(
        f"the log evidence is about {nats:.2g} nats too low, because the weights are not a mode of the posterior under "
        "this prior: training under another prior or with AdamW, early stopping and the kinks of a ReLU leave them "
        "elsewhere. A prior chosen by it may harm predictions. Either train on to a mode under this prior, "
        "co.fit_mode(model, data, likelihood, prior_precision); or take the evidence at the mode of the linearised "
        'network, mode="linear"; or choose the prior by held-out data, co.evidence.validate.',
        ModeWarning,
        stacklevel=stacklevel + 1,
    )
