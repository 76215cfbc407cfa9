"""The prior precisions and the noise during tuning: which weights share one, and how the evidence changes.

For a curvature that is proportional to 1 / noise, G = G₀ σ₀²/σ², every posterior is that of the first noise under
another prior: P = (σ₀²/σ²) (G₀ + A σ²/σ₀²). So one curvature is used for all of them, and a new one is built at the
end. With several noises, those of outputs, G is no multiple of one matrix, and is built anew at each step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from curvops.network import Batch, BatchMap, gaussians_with_sums
from curvops.network.data.layouts import Name
from curvops.network.likelihoods import Gaussian, Likelihood, Multitask
from curvops.network.likelihoods.gaussian import sums_of_squares
from curvops.network.model.parameters import layer_of
from curvops.operators import EmpiricalFisher, Linearization
from curvops.operators.linearized.user_operator import UserOperator
from curvops.posterior.gaussians.laplace import Laplace
from curvops.posterior.log_evidence import Tuning, log_ratio, normal_mode, prepare, shares_of_weights
from curvops.posterior.precision import REMEDIES
from curvops.summary import summary

OVER = ("scalar", "layers", "tensors", "weights")
"""The sets of weights that may share a prior precision."""
FURTHEST = 1e10
"""A search extends by this factor below and above the start."""
WINDOW = 100.0
"""Products with one vector are used for all precisions down to the present one over this."""
STEP = 0.01
"""The step in log σ² of the differences by which the effective parameters of one of several noises are counted."""


@dataclass(frozen=True, eq=False)
class PrecisionGroups:
    """Groups of weights that share a prior precision α: A = α[index] · base."""

    names: tuple[str, ...]
    index: Int[Tensor, " D"]
    base: Float[Tensor, " D"]
    counts: Float[Tensor, " G"]

    def totals(self, values: Float[Tensor, " D"]) -> Float[Tensor, " G"]:
        """Return the sum over each group."""
        return torch.zeros_like(self.counts).index_add_(0, self.index, values.to(self.counts))

    def precision(self, alpha: Float[Tensor, " G"]) -> Tensor:
        """Return A in the form that a posterior takes: 0-d if it is a single number."""
        if len(alpha) == 1 and bool((self.base == 1).all()):
            return alpha[0].to(self.base.dtype)
        return (alpha.to(self.base.dtype)[self.index]) * self.base

    def start(self, precision: Tensor) -> Float[Tensor, " G"]:
        """Return the α of a diagonal precision: the geometric mean over the weights of each group."""
        logs = (precision.detach().expand_as(self.base) / self.base).double().log()
        return (self.totals(logs) / self.counts).exp()


def precision_groups(lin: Linearization, over: str, base: Float[Tensor, " D"] | None = None) -> PrecisionGroups:
    """Make one group of all weights ("scalar"), or one for each layer (a module's own parameters), tensor or weight."""
    selection, size = lin.model.selection, lin.num_parameters
    names: tuple[str, ...]
    if over == "scalar":
        names, index = ("all",), torch.zeros(size, dtype=torch.long)
    elif over == "weights":
        names, index = ("weights",), torch.arange(size)
    else:
        owners = [layer_of(name) if over == "layers" else name for name in selection.names]
        names = tuple(dict.fromkeys(owners))
        places = selection.positions()
        index = torch.empty(size, dtype=torch.long)
        for owner, name in zip(owners, selection.names):
            chosen = places[name].flatten()
            index[chosen[chosen >= 0].cpu()] = names.index(owner)
        used = index.unique()  # some layers may have no weight in a subnetwork
        names, index = tuple(names[i] for i in used.tolist()), torch.searchsorted(used, index)
    index = index.to(lin.theta.device)
    base = torch.ones_like(lin.theta) if base is None else base
    groups = int(index.max()) + 1
    return PrecisionGroups(names, index, base, index.bincount(minlength=groups).double())


@dataclass(frozen=True, eq=False)
class Misfit:
    """The sum Σ w (y − f)² over the M targets of each Gaussian noise; M is the sum of their weights."""

    targets: Float[Tensor, "*K"]
    squares: Float[Tensor, "*K"]


@dataclass(frozen=True, eq=False)
class Hyperparameters:
    """One precision for each group, and the noise if it is tuned (otherwise None), 0-d or one for each output."""

    origin: Laplace
    groups: PrecisionGroups
    alpha: Float[Tensor, " G"]
    noise: Float[Tensor, "*K"] | None = None
    seed: int = 0
    """The seed of the draws that a curvature makes at each of several noises."""

    @cached_property
    def posterior(self) -> Laplace:
        """A posterior with the same shares of the weights and the same mode: at the first noise, if there is one."""
        if self.noise is not None and self.noise.ndim:
            post = self._at_noises(self.noise).with_prior(self.groups.precision(self.alpha))
        else:
            factor = 1.0 if self.noise is None else self.noise / self.origin.observation_noise
            post = self.origin.with_prior(self.groups.precision(self.alpha * factor))
        # The evidence is that of the model.
        return post if post.temperature == 1 else dataclasses.replace(post, temperature=1.0)

    def _at_noises(self, noises: Float[Tensor, " K"]) -> Laplace:
        """Return the first posterior at other noises of its outputs."""
        source = torch.Generator(noises.device).manual_seed(self.seed)
        return self.origin.with_noise(named_noises(self.origin.lin.likelihood, noises), source)

    def scatter(self, theta: Float[Tensor, " D"]) -> Float[Tensor, " G"]:
        """Return (θ − m)ᵀ base (θ − m) for each group."""
        gap = theta.detach().double() - self.origin.prior_mean.double()
        return self.groups.totals(self.groups.base.double() * gap.square())

    def linear_mode(self, start: Float[Tensor, " D"], rtol: float = 1e-6) -> tuple[Float[Tensor, " D"], int]:
        """Return the linear model's mode and the products it took; raise ValueError if it is not found.

        Its relative error, and half that of the scatter, is at most about rtol.
        """
        at_once = normal_mode(self.posterior.terms)
        if at_once is not None:
            return at_once, 0
        mode = self.posterior.linear_mode(start, rtol)
        if not mode.converged:
            remedy = f"{REMEDIES.get(mode.reason, mode.reason.value)} Or use the network's own weights, mode='map'."
            raise ValueError(f"no mode of the linear model at prior precisions {summary(self.alpha)}: {remedy}")
        return mode.theta, mode.matvecs

    def exact_counts(
        self, rtol: float, generator: torch.Generator | None
    ) -> tuple[Float[Tensor, " G"], Float[Tensor, " G"]] | None:
        """Compute γ of each group and its standard error, which is 0 if neither probes nor rounding matter.

        Returns None if draws are needed. A γ within rounding of zero is set to zero.
        """
        groups, post = self.groups, self.posterior
        A = post.prior.diagonal
        assert A is not None
        if A.ndim == 0 and post.precision._closed_form() is None:  # these products are used for some further steps
            prepare(post.cache, float(A) / WINDOW, rtol, generator)
        exact = shares_of_weights(post.terms, rtol, generator)
        if exact is None:
            return None
        counts, parts = groups.counts, (exact.value, exact.stderr, torch.as_tensor(exact.bias_bound))
        if exact.value.ndim:
            gamma, spread, error = map(groups.totals, parts)
        else:  # a sum over at most as many directions as there are outputs
            gamma, spread, error = (number.reshape(1).to(counts) for number in parts)
            lins = post.cache.known_data("the log evidence")
            counts = counts.clamp_max(sum(lin.num_data * lin.num_outputs for lin in lins))
        # A millionth counts as zero, too, if the error exceeds it.
        rounding = torch.maximum(self.rounding(counts), torch.minimum(error, 1e-6 * counts))
        return torch.where(gamma > rounding, gamma, 0.0), spread

    def rounding(self, counts: Float[Tensor, " G"]) -> Float[Tensor, " G"]:
        """Return the γ that may be rounding alone: fifty units for each of these numbers of weights."""
        return 50 * torch.finfo(self.origin.mean.dtype).eps * counts

    def counts_of_noises(self, gamma: Float[Tensor, " G"], rtol: float) -> Float[Tensor, "*K"]:
        """Return the effective parameters that the targets of each noise determine, −∂ log det P / ∂ log σ².

        For a single noise these are all, Σ γ_g. Raises ValueError if the log-determinants of several are estimates.
        """
        assert self.noise is not None
        if not self.noise.ndim:
            return gamma.sum()
        counts = []
        for around in self._around_each_noise():
            below, above = (log_ratio(post.terms, rtol) for post in around)
            if float(below.stderr + above.stderr):
                raise ValueError(
                    "several noises are tuned where log det P is exact: by co.KFAC and other closed forms, or up to "
                    "1,024 weights. Here use co.evidence.mackay(post, tune_noise=True), or post.with_noise."
                )
            counts.append((below.value - above.value) / (2 * STEP))
        return torch.stack(counts)

    def drawn_counts_of_noises(self, draws: Float[Tensor, "k D"]) -> Float[Tensor, "k K"]:
        """Estimate `counts_of_noises` from each draw z of N(0, P⁻¹), as −zᵀ(∂G / ∂ log σ²)z."""
        counts = []
        for around in self._around_each_noise():
            below, above = ((draws * post.curvature._matmul(draws.mT).mT).double().sum(1) for post in around)
            counts.append((below - above) / (2 * STEP))
        return torch.stack(counts, 1)

    def _around_each_noise(self) -> Iterator[tuple[Laplace, Laplace]]:
        """Yield the posteriors with a little less, and a little more, of each of several noises."""
        assert self.noise is not None
        prior = self.groups.precision(self.alpha)
        for change in STEP * torch.eye(len(self.noise), dtype=self.noise.dtype, device=self.noise.device):
            below, above = (self._at_noises(self.noise * (sign * change).exp()).with_prior(prior) for sign in (-1, 1))
            yield below, above

    @property
    def logs(self) -> Float[Tensor, " H"]:
        """The logarithms of the precisions, and of the noise if it is tuned."""
        logs = self.alpha.log()
        return logs if self.noise is None else torch.cat([logs, self.noise.log().reshape(-1)])

    def require_near(self, start: Hyperparameters) -> None:
        """Raise ValueError, naming those that are not, unless all are within the search's range of the start."""
        noises = 0 if self.noise is None else self.noise.numel()
        names = [f"the prior precision of {name!r}" for name in self.groups.names] + ["the noise"] * noises
        edge = math.log(FURTHEST) * (1 - 1e-6)
        lost = [(name, by) for name, by in zip(names, (self.logs - start.logs).tolist()) if not abs(by) < edge]
        if not lost:
            return
        listed = "; ".join(f"it still rises as {name} {'grows' if by > 0 else 'falls'}" for name, by in lost)
        raise ValueError(
            f"the log evidence has no maximum within a factor {FURTHEST:.0g} of the start: {listed}; or the start is "
            "too far from it: search from another, post.with_prior(value) or post.with_noise(value)."
        )

    def with_values(self, alpha: Float[Tensor, " G"], noise: Float[Tensor, "*K"] | None) -> Hyperparameters:
        """Return the same hyperparameters with other values."""
        return dataclasses.replace(self, alpha=alpha, noise=noise)

    def posterior_with(self, tuning: Tuning, generator: torch.Generator | None) -> Laplace:
        """Return the posterior under these hyperparameters, with its curvature at their noise."""
        post = self.origin
        if self.noise is not None:
            post = post.with_noise(named_noises(post.lin.likelihood, self.noise), generator)
        return dataclasses.replace(post.with_prior(self.groups.precision(self.alpha)), tuning=tuning)


def noises_of(likelihood: Likelihood) -> Float[Tensor, "*K"]:
    """Return the variances of a Gaussian likelihood, or of those among several: 0-d if it is a single number."""
    if likelihood.single_noise is not None:
        return likelihood.single_noise.detach().double().reshape(())
    noises = [member.noise.flatten() for member in gaussians(likelihood).values()]
    return torch.cat(noises).detach().double()


def as_recorded(noise: Float[Tensor, "*K"] | None) -> float | Float[Tensor, " K"] | None:
    """Return a single noise as a float, several as they are."""
    return noise if noise is None or noise.ndim else float(noise)


def named_noises(likelihood: Likelihood, noises: Float[Tensor, "*K"]) -> Any:
    """Return the noises in the form that `with_noise` takes, for several outputs by their names."""
    if not isinstance(likelihood, Multitask):
        return noises
    members = gaussians(likelihood)
    parts = noises.split([member.noise.numel() for member in members.values()])
    return {name: part.view_as(member.noise) for (name, member), part in zip(members.items(), parts)}


def gaussians(likelihood: Likelihood) -> dict[Name, Gaussian]:
    """Return the Gaussian likelihoods of single positions, by the name of their output."""
    named = likelihood.likelihoods if isinstance(likelihood, Multitask) else {0: likelihood}
    members = {name: member.of_position for name, member in named.items()}
    return {name: member for name, member in members.items() if isinstance(member, Gaussian)}


@torch.no_grad()
def misfit(post: Laplace, theta: Float[Tensor, " D"]) -> Misfit:
    """Return the misfit of the linearised network, by one pass, and away from θ* by a product with J."""
    lin = post.lin
    step = None if torch.equal(theta, lin.theta) else (theta - lin.theta).unsqueeze(1)

    def term(batch: Batch, J: BatchMap) -> Tensor:
        f = J.outputs if step is None else J.outputs + J.push(step)[0]
        return sums_of_squares(lin.likelihood, f, batch.targets, batch.weights)

    sums = lin.passes.total(term, 0 if step is None else 1)
    of_noises = []
    for member, of_outputs in gaussians_with_sums(lin.likelihood, sums):
        if of_outputs is not None:
            of_noises.append(of_outputs if member.single_noise is None else of_outputs.sum(1, keepdim=True))
    squares, _, targets, _ = torch.cat(of_noises, 1).view(4, *noises_of(lin.likelihood).shape)
    return Misfit(targets, squares)


def check_noise_scales(post: Laplace) -> None:
    """Raise ValueError unless the likelihood has a noise, and the curvature is proportional to its inverse."""
    if not gaussians(post.lin.likelihood):
        _ = post.observation_noise  # raises an error that names the likelihood
    if (why_not := why_it_does_not_scale(post)) is not None:
        raise ValueError(why_not)


def why_it_does_not_scale(post: Laplace) -> str | None:
    """Return why the curvature is not proportional to 1 / noise, or None if it is."""
    if post.cache.power != 1:
        return "the noise of a tempered likelihood cannot be tuned: pass the curvature itself."
    curvature = post.curvature
    if not isinstance(curvature, UserOperator) or curvature.arguments is None:
        return f"this {type(curvature).__name__} cannot be built at another noise: use co.GGN, co.KFAC, …"
    if isinstance(curvature, EmpiricalFisher) or curvature.arguments.get("fisher") == "empirical":
        return "an empirical Fisher is not proportional to 1 / noise: use co.GGN, or fisher='exact'."
    return None
