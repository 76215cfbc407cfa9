"""The log evidence over hyperparameters at fixed weights: on a grid of prior precisions, and its maximum.

The values on the grid come from one set of Lanczos runs. The maximum is that of type-II maximum likelihood (MacKay
1992).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checks import check_kind, check_options, drawn_seed
from curvops.errors import UndeterminedWarning, warn
from curvops.evidence.hyperparameters import (
    FURTHEST,
    OVER,
    WINDOW,
    Hyperparameters,
    Misfit,
    as_recorded,
    check_noise_scales,
    misfit,
    noises_of,
    precision_groups,
)
from curvops.linalg import cg
from curvops.linalg.core.vectors import describe, random_block
from curvops.posterior.gaussians.laplace import Laplace, check_posterior, checked_mode
from curvops.posterior.gaussians.updating import tell_choice
from curvops.posterior.linear_mode import warn_of_mode
from curvops.posterior.log_evidence import Ending, Evidence, Tuning, TuningStep, find_evidence, prepare
from curvops.posterior.precision import REMEDIES, preconditioner
from curvops.summary import Table, Tabular, by_columns_of, summary


class Grid(list[Evidence], Tabular):
    """The log evidences at several prior precisions: a list that prints as a table.

    Args:
        evidences: the log evidences.
        prior_precisions: the prior precision of each.

    Examples:
        >>> grid = co.evidence.grid(post, [0.1, 1.0, 10.0])
        >>> grid.prior_precisions, [evidence.reason.name for evidence in grid]
        ((0.1, 1.0, 10.0), ['CONVERGED', 'CONVERGED', 'CONVERGED'])
    """

    def __init__(self, evidences: Iterable[Evidence], prior_precisions: Sequence[float | Tensor]) -> None:
        super().__init__(evidences)
        self.prior_precisions = tuple(prior_precisions)
        """The prior precisions, in the order of the evidences."""

    __repr__ = Tabular.as_text

    def _tables(self) -> list[Table]:
        columns = {
            "prior precision": [summary(value) for value in self.prior_precisions],
            "log evidence": [one.number for one in self],
            "log likelihood": [f"{float(one.log_likelihood):.6g}" for one in self],
            "scatter": [f"{float(one.scatter):.6g}" for one in self],
            "log determinant ratio": [f"{float(one.log_determinant_ratio.value):.6g}" for one in self],
            "reason": [one.reason.name for one in self],
        }
        return [by_columns_of(columns)]


def grid(
    post: Laplace,
    prior_precisions: Sequence[float] | Tensor,
    rtol: float = 0.01,
    generator: torch.Generator | None = None,
    mode: str = "auto",
) -> Grid:
    """Compute the log evidence in nats at each scalar prior precision, with the curvature held fixed.

    The products are spent once, for the smallest precision; further values cost none. The exception is the linear
    model's mode, which takes solves, each started from the previous mode.

    Args:
        post: a posterior from `co.laplace`.
        prior_precisions: positive numbers, at least one. Tensors keep their gradients.
        rtol: as in `Laplace.log_evidence`.
        generator: the source of the probes.
        mode: as in `Laplace.log_evidence`.

    Returns:
        An `Evidence` for each prior precision, in a list that prints as a table.

    Raises:
        TypeError: `post` is not a posterior, or prior_precisions is not a sequence of numbers.
        ValueError: a precision is not positive and finite, or the sequence is empty.

    Examples:
        >>> grid = co.evidence.grid(post, [0.1, 1.0, 10.0])
        >>> best = max(range(3), key=lambda i: float(grid[i]))
        >>> best
        0
    """
    check_posterior(post, "grid")
    check_options(rtol=rtol, generator=generator)
    at = checked_mode(mode, post.lin)
    values = checked_precisions(prior_precisions)
    if at == "map":
        warn_of_mode(post)
    prepare(post.cache, min(map(_number, values)), rtol, generator)
    evidences: list[Evidence] = []
    for value in values:
        start = evidences[-1].theta if evidences else None
        evidences.append(find_evidence(post.with_prior(value).terms, start, rtol, generator, at, many=True))
    return Grid(evidences, values)


def checked_precisions(prior_precisions: Any) -> list[float | Tensor]:
    """Return positive numbers, at least one; raise TypeError or ValueError for anything else."""
    check_kind("prior_precisions", prior_precisions, Iterable, "a sequence of positive numbers")
    values = list(prior_precisions)  # tensors keep their gradients
    if not values or not all(0 < _number(value) < math.inf for value in values):
        raise ValueError(f"prior_precisions must be positive finite numbers, at least one; got {values}.")
    return values


def _number(value: float | Tensor) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


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

    They are found by the gradient of the log evidence in the logarithms of the precisions α_g and the noise σ²,
    ½ (γ_g − α_g s_g) and ½ (Σw(y − f)²/σ² + γ − M). Here γ_g are the effective parameters of group g, s_g is ‖θ − m‖²
    in it, and M is the number of targets. Scaled by γ_g + α_g s_g, a step about halves the distance to the maximum; for
    a single precision the secant method finds it in some six steps. γ is exact if P has a closed form, up to 1,024
    weights, and for a single precision, where one set of Lanczos runs covers a whole window of precisions. Otherwise it
    comes from solves for `probes` random vectors, which are kept from step to step and start at the last solutions.

    Args:
        post: a posterior from `co.laplace` whose prior precision is a number or a vector.
        over: "scalar" for one precision of all weights; "layers" for one per layer (a module's parameters together);
            "tensors" for one per parameter tensor (a layer's weight and bias apart); "weights" for one each; "noise"
            for the variance of a Gaussian likelihood under a fixed prior; or "noise" with one of the others,
            ("layers", "noise"). A search over groups starts at the geometric mean of the present precisions in each.
            "noise" tunes each one of several: those of Gaussian("per_output"), and of several outputs by name.
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
        A new posterior; its `tuning` has the steps.

    Raises:
        TypeError: `post` is not a posterior, or an argument is of another kind.
        ValueError: the evidence has no maximum between 1e-10 and 1e10 times the current value (the layers are named);
            the present precision is an operator, or for "scalar" a vector; or, for "noise", no likelihood is Gaussian,
            the curvature is not proportional to 1 / noise (an empirical Fisher) or cannot be built again (a sum, a
            matrix of your own), or there are several noises and log det P is an estimate (the full GGN of many
            weights).

    Warns with `UndeterminedWarning` if a group's precision grew until its weights were practically fixed (a layer whose
    features the others replace), or that of single weights ends at 1e-6 or 1e6 times its start, for example of those
    that no output depends on; with `MaxStepsWarning` if the steps ran out before the hyperparameters stopped
    changing.

    Cost with several noises: two curvatures for each, and one more, in every step.

    Source: MacKay 1992. With "linear" the maximum is the fixed point of `mackay`; with "map" it is a different point.

    Examples:
        >>> tuned = co.evidence.maximize(post, "layers")
        >>> float(tuned.log_evidence()) > float(post.log_evidence())
        True
    """
    check_posterior(post, "maximize")
    check_options(probes=probes, steps=steps, rtol=rtol, xtol=xtol, generator=generator)
    groups, noise = _read(over)
    at = checked_mode(mode, post.lin)
    present = post.prior.diagonal
    if present is None or (present.ndim and groups == "scalar"):
        raise ValueError("maximize tunes a number or a vector, by groups='scalar' a number: use post.with_prior(1.0).")
    if at == "map":
        warn_of_mode(post)
    if noise:
        check_noise_scales(post)
    post.cache.log_likelihood()  # raises an error for unknown data
    with torch.no_grad():
        base = present.detach() if present.ndim and groups is None else None  # all entries are held fixed
        chosen = precision_groups(post.lin, groups or "scalar", base)
        single = not noise or post.lin.likelihood.single_noise is not None
        seed = 0 if single or generator is None else drawn_seed(generator)
        first = noises_of(post.lin.likelihood) if noise else None
        start = Hyperparameters(post, chosen, chosen.start(present), first, seed)
        return Ascent(start, groups, rtol, xtol, generator, int(probes), at).run(int(steps))


def _read(over: Any) -> tuple[str | None, bool]:
    """Return which precisions are tuned (None: none of them), and whether the noise is."""
    parts = (over,) if isinstance(over, str) else tuple(over)
    precision = next((name for name in parts if name in OVER), None)
    if not parts or sorted(parts) != sorted({precision or "noise", *(("noise",) if "noise" in parts else ())}):
        raise ValueError(f"over must be one of {OVER}, 'noise', or a pair such as ('layers', 'noise'); got {over!r}.")
    return precision, "noise" in parts


def secant_step(
    before: tuple[float, float] | None, now: tuple[float, float], first: float, slopes: tuple[float, float], most: float
) -> float:
    """Return the step from a point (x, f) to the zero of a falling function, by the secant through the point before.

    Args:
        before: the point before, or None.
        now: the point.
        first: the slope where there is no secant.
        slopes: the steepest and the flattest slope of the function, for secants that rounding bends.
        most: the longest step along a secant.
    """
    if before is None or now[0] == before[0]:
        return -now[1] / first
    slope = min(max((now[1] - before[1]) / (now[0] - before[0]), slopes[0]), slopes[1])
    return min(max(-now[1] / slope, -most), most)


@dataclass(eq=False)
class Ascent:
    """Steps along the gradient of the log evidence in the logarithms of the hyperparameters.

    The gradient in log α_g is ½ (γ_g − α_g s_g). At the maximum for fixed weights its derivative over (γ_g + α_g s_g)/2
    has eigenvalues between −½ and −3/2, for any groups (Gershgorin: A^½P⁻¹A^½ has none outside [0, 1]). So a step of
    (γ_g − α_g s_g) / (γ_g + α_g s_g) leaves at most half of a small error, and no step is longer than one nat.
    """

    now: Hyperparameters
    over: str | None
    rtol: float
    xtol: float
    generator: torch.Generator | None
    probes: int
    mode: str
    records: list[TuningStep] = field(default_factory=list)
    vectors: Tensor | None = None
    solutions: Tensor | None = None
    average: Tensor | None = None
    before: tuple[float, float] | None = None
    """The last log α, if there is but one, and log γ/αs there."""

    @property
    def furthest(self) -> float:
        """The largest factor between a precision and its start; beyond 1e6, a weight is practically fixed, or free."""
        return 1e6 if self.over == "weights" else FURTHEST

    def run(self, steps: int) -> Laplace:
        """Take at most the given number of steps; return the posterior at the maximum."""
        start, post = self.now, self.now.origin
        theta = post.mean
        scatter, data = self._at(theta)
        ending, finest, largest = Ending.STEPS_SPENT, 0.1 * self.xtol, math.inf
        # Where the evidence last rose with α (a γ of zero does not show it), and where nothing is left to gain by that.
        rises = fixed = torch.zeros_like(start.alpha, dtype=torch.bool)
        for _ in range(steps):
            alpha, noise = self.now.alpha, self.now.noise
            spent, of_mode = 0, finest
            if self.mode == "linear":  # far from the maximum it needs few digits
                of_mode = max(finest, 0.01 * min(largest, 1.0))
                theta, spent = self.now.linear_mode(theta, of_mode)
                scatter, data = self._at(theta)
            gamma = self._count(spent)
            change = torch.zeros_like(alpha)
            if self.over:
                if self.over != "weights" and len(alpha) > 1:
                    rises = torch.where(gamma > 0, gamma > alpha * scatter, rises)
                    least = self.now.rounding(self.now.groups.counts).clamp_min(0.1)
                    fixed = rises & (gamma + alpha * scatter < least)  # what is left to gain is half of that at most
                change = self._change(gamma, scatter).masked_fill(fixed, 0.0)
                moved = (alpha * change.exp()).clamp(start.alpha / self.furthest, start.alpha * self.furthest)
                change, alpha = (moved / alpha).log(), moved
            largest = float(change.abs().max())
            if noise is not None and start.noise is not None and data is not None:
                ratio, count = data.squares / noise, self.now.counts_of_noises(gamma, self.rtol)
                left = data.targets - count
                # This is how fast γ can fall with the noise: at most Σ g(1 − g) over eigenvalues g of P⁻¹G.
                falling = count * (1 - count / len(post.mean)).clamp_min(0.0)
                of_noise = (ratio - left) / (ratio + left.abs() + falling)
                noise, largest = noise * of_noise.exp(), max(largest, float(of_noise.abs().max()))
                if not bool(((start.noise / FURTHEST < noise) & (noise < start.noise * FURTHEST)).all()):
                    raise ValueError(
                        f"the log evidence has no maximum in the noise within a factor {FURTHEST:.0g} of "
                        f"{summary(start.noise)}, too far from it: try post.with_noise(value), or keep the noise fixed."
                    )
            self.now = self.now.with_values(alpha, noise)
            if largest <= self.xtol and of_mode <= finest:
                ending = Ending.CONVERGED
                break
        self._check_limits(start, fixed)
        targets = None if data is None or data.targets.ndim else float(data.targets)
        tuning = Tuning("gradient", start.groups.names, self.mode, tuple(self.records), ending, targets=targets)
        tuning.warn_of_ending(f"after {len(self.records)} steps of maximize: ")
        by = "the evidence" if self.over else start.origin.prior.chosen_by
        return tell_choice(self.now.posterior_with(tuning, self.generator), by)

    def _change(self, gamma: Float[Tensor, " G"], scatter: Float[Tensor, " G"]) -> Float[Tensor, " G"]:
        """Return the change of each log α. For one alone it is a secant step to γ = αs, in the direction of ascent."""
        alpha = self.now.alpha
        up, down = gamma - alpha * scatter, gamma + alpha * scatter
        share = torch.where(down > 0, up / down, 0.0)
        if len(alpha) > 1 or self.now.noise is not None:
            return share
        now = float(alpha.log()), 2 * math.atanh(float(share.clamp(-0.99, 0.99)))
        step = secant_step(self.before, now, first=-1.0, slopes=(-2.0, -0.25), most=math.log(WINDOW))
        self.before = now
        return torch.full_like(share, step)

    def _at(self, theta: Float[Tensor, " D"]) -> tuple[Float[Tensor, " G"], Misfit | None]:
        """Return the scatter of each group at these weights, and the misfit to the targets."""
        data = None if self.now.noise is None else misfit(self.now.origin, theta)
        return self.now.scatter(theta), data

    def _count(self, spent: int) -> Float[Tensor, " G"]:
        """Compute γ of each group, and record the step."""
        exact = self.now.exact_counts(self.rtol, self.generator)
        gamma, spread, matvecs = self._estimate_count() if exact is None else (*exact, 0)
        alpha, count = self.now.alpha, gamma
        if self.over == "weights":
            alpha, count, spread = alpha.log().mean(0, True).exp(), gamma.sum(0, True), spread.norm().reshape(1)
        self.records.append(TuningStep(alpha, count, spread, as_recorded(self.now.noise), matvecs + spent))
        return gamma

    def _estimate_count(self) -> tuple[Tensor, Tensor, int]:
        """Estimate γ of each group by solves with random signs; return it, its standard error and the products."""
        groups, post = self.now.groups, self.now.posterior
        P = post.precision
        anew = self.over == "weights" or self.vectors is None
        if anew:
            self.vectors = random_block(describe(P), self.probes, generator=self.generator)
        assert self.vectors is not None
        guess = None if self.over == "weights" else self.solutions
        sketch, spent = preconditioner(post.terms, self.probes, generator=self.generator)
        solved = cg(P, self.vectors, preconditioner=sketch, rtol=1e-4, x0=guess)
        solved.raise_if_failed(1e-4, REMEDIES)
        self.solutions = solved.x
        # vᵀGP⁻¹v, since v² − vᵀAP⁻¹v, which equals it, has the error of the solve for all weights, determined or not.
        products = self.vectors * post.curvature._matmul(solved.x)
        gammas = torch.stack([groups.totals(column) for column in products.mT])
        gamma = gammas.mean(0)
        spread = gammas.std(0) / len(gammas) ** 0.5 if len(gammas) > 1 else torch.full_like(gamma, math.inf)
        if self.over == "weights":
            count = len(self.records)
            weight = min(1.0, 4 / (count + 1))  # early precisions are far off, late ones similar
            self.average = gamma if self.average is None else self.average + weight * (gamma - self.average)
            gamma = self.average
        return gamma, spread, solved.matvecs + self.probes + spent

    def _check_limits(self, start: Hyperparameters, fixed: Tensor) -> None:
        if self.over != "weights":
            self.now.require_near(start)
            if names := [name for name, holds in zip(self.now.groups.names, fixed.tolist()) if holds]:
                warn(
                    f"the evidence rises, the larger the prior precision of {', '.join(map(repr, names))} is: these "
                    "weights are now practically fixed.",
                    UndeterminedWarning,
                )
            return
        stuck = (self.now.alpha / start.alpha).log().abs() > math.log(self.furthest) * (1 - 1e-6)
        if bool(stuck.any()):
            warn(
                f"the evidence has no maximum in the precision of {int(stuck.sum()):,} of {len(stuck):,} weights "
                f"within a factor {self.furthest:.0g} of the start; these precisions now have the limiting value.",
                UndeterminedWarning,
            )
