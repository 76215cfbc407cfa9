"""The hyperparameters that maximise the evidence at fixed weights (type-II maximum likelihood, MacKay 1992)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from curvops.checks import check_accuracy, checked_whole
from curvops.evidence.ascent import Ascent
from curvops.evidence.hyperparameters import (
    FURTHEST,
    OVER,
    WINDOW,
    Hyperparameters,
    check_noise_scales,
    precision_groups,
)
from curvops.posterior.gaussians.laplace import Laplace, check_posterior, checked_mode
from curvops.posterior.gaussians.updating import tell_choice
from curvops.posterior.log_evidence import find_evidence, prepare
from curvops.posterior.solves.linear_mode import warn_of_mode


def maximize(
    post: Laplace,
    over: str | Sequence[str] = "scalar",
    rtol: float = 0.01,
    xtol: float = 1e-3,
    generator: torch.Generator | None = None,
    probes: int = 8,
    steps: int = 200,
    mode: str = "auto",
) -> Laplace:
    """Find the hyperparameters of largest log evidence, with the weights and the curvature held fixed.

    A single scalar precision is found by a search around the present one: one set of Lanczos runs covers a whole window
    of precisions, so that the searched curve is smooth. All other hyperparameters are found by the gradient of the log
    evidence in the logarithms of the precisions α_g and the noise σ², ½ (γ_g − α_g s_g) and ½ (Σw(y − f)²/σ² + γ − M).
    Here γ_g are the effective parameters of group g, s_g is ‖θ − m‖² in it, and M is the number of targets. Scaled by
    γ_g + α_g s_g, a step about halves the distance to the maximum. γ is exact if P has a closed form, up to 1,024
    weights, and for a single precision. Otherwise it comes from solves for `probes` random vectors, which are kept from
    step to step and start at the last solutions.

    Args:
        post: a posterior from `co.laplace` whose prior precision is a number or a vector.
        over: "scalar" for one precision of all weights; "layers" for one per layer (a module's parameters together);
            "tensors" for one per parameter tensor (a layer's weight and bias apart); "weights" for one each; "noise"
            for the variance of a Gaussian likelihood under a fixed prior; or "noise" with one of the others,
            ("layers", "noise"). A search over groups starts at the geometric mean of the present precisions in each.
        rtol: as in `Laplace.log_evidence`.
        xtol: the relative accuracy of the maximum for these probes.
        generator: the source of the probes.
        probes: the number of probes if γ is not exact. Over "weights" each step draws new ones and averages: the
            share of each weight has an error of about (probes · steps / 4)^-½.
        steps: the maximum number of steps.
        mode: the weights at which the evidence is evaluated, as in `Laplace.log_evidence`: "map" for the network's
            weights, "linear" for the linear model's mode at the hyperparameters of each step, found from the previous
            mode.

    Returns:
        A new posterior; its `tuning` has the steps, except for "scalar" alone.

    Raises:
        TypeError: `post` is not a posterior, or an argument is of another kind.
        ValueError: the evidence has no maximum between 1e-10 and 1e10 times the current value (the layers are named);
            the present precision is an operator, or for "scalar" a vector; or, for "noise", the likelihood is not
            Gaussian, has several noises, or the curvature is not proportional to 1 / noise (an empirical Fisher) or
            cannot be built again (a sum, a matrix of your own).

    Warns with `UndeterminedWarning` if the precision of single weights ends at 1e-6 or 1e6 times its start, for example
    those that no output depends on; with `MaxStepsWarning` if the steps ran out before the hyperparameters stopped
    changing.

    Source: MacKay 1992. With "linear" the maximum is the fixed point of `mackay`; with "map" it is a different point.

    Examples:
        >>> tuned = co.evidence.maximize(post, "layers")
        >>> float(tuned.log_evidence()) > float(post.log_evidence())
        True
    """
    check_posterior(post, "maximize")
    check_accuracy(rtol, generator)
    check_accuracy(xtol, name="xtol")
    for name, number in (("probes", probes), ("steps", steps)):
        checked_whole(name, number, 1)
    groups, noise = _read(over)
    at = checked_mode(mode, post.lin)
    present = post.prior.diagonal
    if present is None or (present.ndim and groups == "scalar"):
        raise ValueError("maximize tunes a number or a vector, by groups='scalar' a number: use post.with_prior(1.0).")
    if at == "map":
        warn_of_mode(post)
    if groups == "scalar" and not noise:
        return _search(post, float(present.detach()), rtol, xtol, generator, at)
    if noise:
        check_noise_scales(post)
    post.cache.log_likelihood()  # raises an error for unknown data
    with torch.no_grad():
        base = present.detach() if present.ndim and groups is None else None  # all entries are held fixed
        chosen = precision_groups(post.lin, groups or "scalar", base)
        start = Hyperparameters(post, chosen, chosen.start(present), post.observation_noise if noise else None)
        return Ascent(start, groups, rtol, xtol, generator, int(probes), at).run(int(steps))


def _read(over: Any) -> tuple[str | None, bool]:
    """Return which precisions are tuned (None: none of them), and whether the noise is."""
    accepted = f"one of {', '.join(map(repr, OVER))}, 'noise', or a pair such as ('layers', 'noise')"
    parts = [over] if isinstance(over, str) else over
    precisions = [part for part in parts if part in OVER]
    if len(set(parts)) < len(parts) or len(precisions) > 1 or not parts or not set(parts) <= {*OVER, "noise"}:
        raise ValueError(f"over must be {accepted}; got {over!r}.")
    return (precisions[0] if precisions else None), "noise" in parts


def _search(
    post: Laplace, start: float, rtol: float, xtol: float, generator: torch.Generator | None, mode: str
) -> Laplace:
    """Find the scalar precision of largest evidence by bounded search in windows."""
    from scipy.optimize import minimize_scalar  # a slow import, needed for tuning only

    theta = None

    def loss(log_precision: float) -> float:
        nonlocal theta
        with torch.no_grad():
            found = find_evidence(post.with_prior(math.exp(log_precision)).terms, theta, rtol, generator, mode)
        theta = found.theta
        return -float(found.value)

    low, high = start / WINDOW, start * WINDOW
    while start / FURTHEST < low and high < start * FURTHEST:
        prepare(post.cache, low, rtol, generator)
        span = math.log(low), math.log(high)
        found = float(minimize_scalar(loss, bounds=span, method="bounded", options={"xatol": xtol}).x)
        if found - span[0] < 2 * xtol:
            low, high = low / WINDOW, low * 2
        elif span[1] - found < 2 * xtol:
            low, high = high / 2, high * WINDOW
        else:
            return tell_choice(post.with_prior(math.exp(found)), "the evidence")
    raise ValueError(
        f"the log evidence has no maximum between prior precisions {start / FURTHEST:.1g} and {start * FURTHEST:.1g}: "
        "these data do not determine it at these weights."
    )
