"""Prior precisions and noise by fixed-point steps from draws of the posterior (MacKay 1992; Antorán et al. 2023)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checkpoint import Checkpoint, Place, begin, derive_generator, digest
from curvops.checks import check_choice, check_options, refuse
from curvops.errors import OscillationWarning, warn
from curvops.evidence.hyperparameters import (
    Hyperparameters,
    Misfit,
    as_recorded,
    check_noise_scales,
    misfit,
    noises_of,
    precision_groups,
)
from curvops.linalg.core.algorithm import algorithm
from curvops.linalg.core.matrix_identity import problem_of
from curvops.operators import DiagonalGGN
from curvops.posterior.deviations import Deviations, Noise, StochasticDescent
from curvops.posterior.gaussians.laplace import Laplace, check_posterior
from curvops.posterior.gaussians.updating import tell_choice
from curvops.posterior.log_evidence import Ending, Tuning, TuningStep
from curvops.posterior.terms import CurvatureCache
from curvops.storage import restore, state_of
from curvops.summary import summary

PRIORS = {"iso": "scalar", "g": "scalar", "layer": "layers", "tensor": "tensors"}
STATE = ("noise", "records", "theta", "draws", "changes", "targets", "halved", "ending")


@algorithm
def mackay(
    post: Laplace,
    samples: int | None = 8,
    steps: int = 10,
    prior: str = "iso",
    update: str = "mackay",
    noise: Noise | None = None,
    *,
    tune_noise: bool = False,
    method: str | StochasticDescent | None = None,
    rtol: float = 1e-3,
    xtol: float = 1e-4,
    generator: torch.Generator | None = None,
    checkpoint: Place | None = None,
) -> Laplace:
    """Find the prior precisions of largest evidence at the linear model's mode, from draws of the posterior.

    Each step finds the mode θ̄ of the linear model, draws z from N(0, P⁻¹), estimates γ_g, the effective parameters of
    each group, and sets α_g ← γ_g / s_g with s_g = (θ̄ − m)ᵀA₀(θ̄ − m) in the group (MacKay 1992), or α_g ← d_g /
    (s_g + (d_g − γ_g)/α_g) with its number of weights d_g (EM). Nothing of size D × D is formed. The draws of all
    steps use one noise, so that they change as little as the precisions do, and draws and mode start from those of the
    last step.

    γ_g is the mean of zᵀ(Gz) over the group's entries, with variance 2Σp²/K for eigenvalues p of P⁻¹G, or d_g − α_g
    times the mean of zᵀA₀z, with variance 2Σ(1 − p)²/K: the former if at most half of the group's weights are
    determined, otherwise the latter.

    Args:
        post: a posterior from `co.laplace` whose prior precision is a number or a vector. It is the starting point;
            groups start at its geometric mean over their weights.
        samples: K, the number of draws; None computes γ exactly, if P has a closed form, up to 1,024 weights, or for
            "iso".
        steps: the maximum number of steps.
        prior: A = α A₀ with A₀ = I ("iso"); with A₀ = max(diag(GGN), 1e-6) at the noise of `post` ("g"), which does not
            depend on the scale of the weights; or A₀ = I with one α for each layer ("layer") or parameter tensor
            ("tensor").
        update: "mackay", fast but not monotone, or "em", which never lowers the evidence of a Gaussian likelihood.
        noise: the noise of earlier deviations, to use again; its count must be at least K.
        tune_noise: also tune the variance of a Gaussian likelihood, σ² ← Σw(y − f)² / (M − γ) for M targets, or by "em"
            (Σw(y − f)² + σ²γ) / M. Several, those of Gaussian("per_output") and of several outputs by name, have each
            its own targets and γ, −∂ log det P / ∂ log σ²: from log det P if P has a closed form or γ is exact, or else
            from the draws.
        method: the method of the draws, as in `Laplace.deviations`.
        rtol: the relative residual of the draws.
        xtol: the relative accuracy if γ is exact.
        generator: the source of the noise.
        checkpoint: a folder for intermediate results, written at most every half minute. A run that was killed resumes
            within its last step, with the same noise, and gives bitwise the same result; the folder keeps the result.

    Returns:
        A new posterior; its `tuning` has the steps, with γ, its standard error and the products of each, the reason why
        it ended, and intervals of the precisions and the noise. Steps end once the remaining change, extrapolated from
        the last two steps, is less than a quarter of the error bar.

    Raises:
        TypeError, ValueError: `post` is not a posterior or has a prior operator, prior or update is unknown, the noise
            belongs to another problem, γ is not exact and samples is None, the curvature is zero, the evidence has no
            maximum, the checkpoint belongs to another problem, or (with tune_noise) anything that `maximize` rejects
            for "noise".
        OSError: the checkpoint cannot be written.
        ConvergenceError: the draws or the mode were not solved to the tolerance.

    Warns with `OscillationWarning` if MacKay's update oscillates, and halves its steps from then on; with
    `MaxStepsWarning` if the steps ran out before the hyperparameters stopped changing.

    Cost: the products that `tuning` reports for each step: K solves and those of `linear_mode`, fewer with each step.
    With several noises each step builds two curvatures for each, and one more.

    Examples:
        >>> noisy = co.linearize(nn.Linear(2, 1), (x, x.sum(1, keepdim=True) + 0.3 * y[:, None]), "regression")
        >>> prior = co.laplace(noisy, co.GGN, prior_precision=1.0, check_mode=False)
        >>> co.evidence.mackay(prior, samples=None, steps=100).tuning.ending.name
        'CONVERGED'
    """
    check_posterior(post, "mackay")
    check_options(samples=samples, steps=steps, rtol=rtol, xtol=xtol, generator=generator)
    refuse(samples == 1, "samples=1 gives no standard error: use two or more.")
    check_choice("prior", prior, PRIORS)
    check_choice("update", update, ("mackay", "em"))
    present = post.prior.diagonal
    if present is None:
        raise ValueError("mackay scales a prior precision that is a number or a vector: use post.with_prior(1.0).")
    if samples is None and (noise is not None or method is not None):
        raise ValueError("samples=None computes γ exactly, without draws: leave noise and method out.")
    if tune_noise:
        check_noise_scales(post)
    post.cache.known_data("the log evidence")

    def problem() -> dict[str, Any]:
        data = post.lin.order | {"the points": str(post.lin.source), "the prior's mean": digest([post.prior_mean])}
        return post.lin.identified_by | problem_of(post.precision) | data

    with torch.no_grad():
        saved = begin("mackay", checkpoint, problem, post.mean.device, True, post.lin.ranks)
        source = saved.source("generator", generator, post.mean.device)
        if saved:  # independent of earlier uses of this posterior
            sketches = derive_generator(generator, post.mean.device)  # None: each source has its own seed
            post = replace(post, cache=CurvatureCache(post.lin, post.curvature, sketches, post.cache.checks_mode))
            saved.held["cache"] = post.cache
        base = DiagonalGGN(post.lin).entries.clamp_min(1e-6) if prior == "g" else None
        groups = precision_groups(post.lin, PRIORS[prior], base)
        first = noises_of(post.lin.likelihood) if tune_noise else None
        start = Hyperparameters(post, groups, groups.start(present), first)
        run = _FixedPoint(start, samples, update, noise, method, float(rtol), float(xtol), source, saved)
        return run.result() if saved.done else run.run(int(steps))


@dataclass(eq=False)
class _FixedPoint:
    now: Hyperparameters
    samples: int | None
    update: str
    noise: Noise | None
    method: str | StochasticDescent | None
    rtol: float
    xtol: float
    generator: torch.Generator | None
    saved: Checkpoint
    records: list[TuningStep] = field(default_factory=list)
    theta: Float[Tensor, " D"] | None = None
    """The mode and the draws of the last step, from which the next ones start."""
    draws: Float[Tensor, "k D"] | None = None
    changes: list[Float[Tensor, " H"]] = field(default_factory=list)
    targets: float | None = None
    halved: bool = False
    ending: Ending = Ending.STEPS_SPENT

    def __post_init__(self) -> None:
        self.start = self.now
        state = self.saved.outcome if self.saved.done else self.saved.state
        if state is None:
            return
        restore(self, STATE, state)
        self.now = self.now.with_values(state["alpha"], state["observation noise"])
        self.now.origin.cache.recall(state["known"])

    def state(self) -> dict[str, Any]:
        """Return the state that the next step depends on."""
        at = {"alpha": self.now.alpha, "observation noise": self.now.noise}
        return state_of(self, STATE) | at | {"known": self.now.origin.cache.state()}

    def result(self) -> Laplace:
        """Return the posterior where the steps ended."""
        names, steps = self.now.groups.names, tuple(self.records)
        tuning = Tuning(self.update, names, "linear", steps, self.ending, self.halved, self.targets)
        tuning.warn_of_ending(f"after {len(steps)} steps of mackay: ")
        return tell_choice(self.now.posterior_with(tuning, self.generator), "the evidence")

    def run(self, steps: int) -> Laplace:
        """Take the remaining steps; return the posterior at the fixed point."""
        start, changes = self.start, self.changes
        if self.saved.state is None:
            self.saved.save(self.state, now=True)  # the sources of random numbers
        for _ in range(len(self.records), steps):
            wanted = 0.1 * self.xtol if self.samples is None else 1e-4  # γ of draws is less accurate
            theta, spent = self.now.linear_mode(start.origin.mean if self.theta is None else self.theta, wanted)
            data = None if self.now.noise is None else misfit(self.now.origin, theta)
            self.targets = None if data is None or data.targets.ndim else float(data.targets)
            gamma, stderr, drawn = self._count()
            of_noises = self._count_of_noises(gamma, stderr, drawn)
            self.theta = theta
            if drawn is not None:
                self.draws, spent = drawn.draws, spent + drawn.matvecs
            self.records.append(TuningStep(self.now.alpha, gamma, stderr, as_recorded(self.now.noise), spent))
            new = self._next_hyperparameters(gamma, self.now.scatter(theta), of_noises[0], data)
            new.require_near(start)
            changes.append(new.logs - self.now.logs)
            bar = self._error_bar(gamma, stderr, of_noises, data)
            if not self.halved and _oscillates(changes, bar):
                self.halved = True
                warn(
                    "MacKay's update oscillates around the maximum of the evidence; from here on its steps are "
                    "halved in the logarithms. update='em' does not oscillate.",
                    OscillationWarning,
                )
            if self.halved:
                new = _geometric_mean(self.now, new)
                changes[-1] = changes[-1] / 2
            self.now = new
            if bool((_remaining(changes) <= bar).all()):
                self.ending = Ending.CONVERGED if self.samples is None else Ending.WITHIN_ERROR
                break
            self.saved.save(self.state)
        self.theta = self.draws = None  # large, and no longer needed
        if self.saved:
            self.saved.finish(self.state())
        return self.result()

    def _count(self) -> tuple[Float[Tensor, " G"], Float[Tensor, " G"], Deviations | None]:
        """Estimate γ of each group; return it, its standard error, and the draws with all products spent."""
        if self.samples is None:
            exact = self.now.exact_counts(self.xtol, self.generator)
            if exact is None:
                raise ValueError("samples=None needs a closed form of P, or few weights and prior='iso'.")
            return *exact, None
        groups, post = self.now.groups, self.now.posterior
        start = None if post.precision._closed_form() is not None else self.draws
        drawn = post.deviations(self.samples, self.noise, self.method, start, self.rtol, self.generator)
        self.noise = drawn.noise
        A, z = post.prior.diagonal, drawn.draws
        assert A is not None
        shares_of_draws = groups.counts - torch.stack([groups.totals(share) for share in (A * z.square()).double()])
        few = shares_of_draws.mean(0) <= groups.counts / 2
        if bool(few.any()):
            pushed = post.curvature._matmul(z.mT).mT
            of_data = torch.stack([groups.totals(share) for share in (z * pushed).double()])
            shares_of_draws = torch.where(few, of_data, shares_of_draws)
            drawn = replace(drawn, matvecs=drawn.matvecs + len(z))
        stderr = shares_of_draws.std(0) / math.sqrt(len(shares_of_draws))
        least = torch.finfo(z.dtype).eps * groups.counts
        gamma = shares_of_draws.mean(0).clamp(least, groups.counts - least)
        return gamma, stderr, drawn

    def _count_of_noises(
        self, gamma: Float[Tensor, " G"], stderr: Float[Tensor, " G"], drawn: Deviations | None
    ) -> tuple[Float[Tensor, "*K"], Float[Tensor, "*K"]]:
        """Count the parameters that the targets of each noise determine; return the counts and their standard errors.

        A single noise is that of all of them.
        """
        noise = self.now.noise
        if noise is None or not noise.ndim:
            return gamma.sum(), stderr.norm()
        if drawn is None or self.now.posterior.precision._closed_form() is not None:
            return self.now.counts_of_noises(gamma, self.xtol), torch.zeros_like(noise)
        counts = self.now.drawn_counts_of_noises(drawn.draws)
        return counts.mean(0), counts.std(0) / math.sqrt(len(counts))

    def _next_hyperparameters(
        self, gamma: Float[Tensor, " G"], scatter: Float[Tensor, " G"], count: Float[Tensor, "*K"], data: Misfit | None
    ) -> Hyperparameters:
        alpha, noise = self.now.alpha, self.now.noise
        if self.update == "em":
            total = self.now.groups.counts
            alpha = total / (scatter + (total - gamma) / alpha)
        else:
            alpha = gamma / scatter
        if data is not None and noise is not None:
            if self.update == "em":
                noise = (data.squares + noise * count) / data.targets
            elif bool((data.targets <= count).any()):
                raise ValueError(
                    f"{summary(data.targets)} targets and {summary(count)} effective parameters do not determine the "
                    "noise: start from a larger noise or prior precision, or use update='em'."
                )
            else:
                noise = data.squares / (data.targets - count)
        return self.now.with_values(alpha, noise)

    def _error_bar(
        self,
        gamma: Float[Tensor, " G"],
        stderr: Float[Tensor, " G"],
        of_noises: tuple[Float[Tensor, "*K"], Float[Tensor, "*K"]],
        data: Misfit | None,
    ) -> Float[Tensor, " H"]:
        """Return a quarter of the relative error that γ's error gives each hyperparameter (at most 0.2 of γ counts)."""
        bars = (stderr / gamma).clamp_max(0.2)
        if data is not None:
            count, spread = of_noises
            bars = torch.cat([bars, (spread / (data.targets - count).clamp_min(1.0)).reshape(-1)])
        return (bars / 4).clamp_min(self.xtol)


def _geometric_mean(one: Hyperparameters, other: Hyperparameters) -> Hyperparameters:
    """Return the geometric mean of two values of the hyperparameters."""
    noise = None if one.noise is None or other.noise is None else (one.noise * other.noise).sqrt()
    return other.with_values((one.alpha * other.alpha).sqrt(), noise)


def _remaining(changes: list[Float[Tensor, " H"]]) -> Float[Tensor, " H"]:
    """Return the remaining change, if changes continue to shrink as the last two did."""
    last = changes[-1].abs()
    if len(changes) < 2:
        return torch.full_like(last, math.inf)
    ratio = last / changes[-2].abs().clamp_min(torch.finfo(last.dtype).tiny)
    return torch.where(ratio < 1, last * ratio / (1 - ratio), torch.where(last > 0, math.inf, 0.0))


def _oscillates(changes: list[Float[Tensor, " H"]], bar: Float[Tensor, " H"]) -> bool:
    """Return whether the last three changes of a hyperparameter alternate, above its error bar, and do not shrink."""
    if len(changes) < 3:
        return False
    first, second, third = changes[-3:]
    alternates = (first * second < 0) & (second * third < 0)
    return bool((alternates & (third.abs() > first.abs() / 2) & (third.abs() > bar)).any())
