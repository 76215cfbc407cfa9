"""The prior precision that maximises the evidence (type-II maximum likelihood, MacKay 1992)."""

from __future__ import annotations

import math

import torch

from curvops.posterior.arguments import check_accuracy
from curvops.posterior.laplace import Laplace, check_posterior

# The search window reaches this factor below and above, and moves on while the maximum lies at its edge.
WINDOW = 100.0
FURTHEST = 1e10


def maximize(
    post: Laplace, rtol: float = 0.01, xtol: float = 1e-3, generator: torch.Generator | None = None
) -> Laplace:
    """A posterior like `post` at the scalar prior precision of largest log evidence; the weights are held fixed.

    The search starts around the present precision. One set of Lanczos runs serves a whole window of precisions, so that
    the curve searched is smooth.

    Args:
        post: a posterior by `co.laplace`, with a scalar prior precision.
        rtol: as in `Laplace.log_evidence`.
        xtol: relative accuracy of the maximum for these probes.
        generator: source of the probes.

    Returns:
        A new posterior.

    Raises:
        TypeError: not a posterior.
        ValueError: the evidence has no maximum between 1e-10 and 1e10 times the present precision, or the present
            precision is a vector or an operator.
    """
    from scipy.optimize import minimize_scalar  # a slow import, for those who tune

    check_posterior(post, "maximize")
    check_accuracy(rtol, generator)
    check_accuracy(xtol, name="xtol")
    present = post.prior.diagonal
    if present is None or present.ndim:
        raise ValueError("maximize tunes a scalar prior precision; start from post.with_prior(1.0).")

    def loss(log_precision: float) -> float:
        with torch.no_grad():
            return -float(post.with_prior(math.exp(log_precision)).log_evidence(rtol, generator).value)

    start = float(present.detach())
    low, high = start / WINDOW, start * WINDOW
    while start / FURTHEST < low and high < start * FURTHEST:
        post.spectrum.prepare(low, rtol, generator)
        span = math.log(low), math.log(high)
        found = float(minimize_scalar(loss, bounds=span, method="bounded", options={"xatol": xtol}).x)
        if found - span[0] < 2 * xtol:
            low, high = low / WINDOW, low * 2
        elif span[1] - found < 2 * xtol:
            low, high = high / 2, high * WINDOW
        else:
            return post.with_prior(math.exp(found))
    raise ValueError(
        f"the log evidence has no maximum between prior precisions {start / FURTHEST:.1g} and {start * FURTHEST:.1g}: "
        "these data do not determine it at these weights."
    )
