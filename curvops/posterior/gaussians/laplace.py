"""The linearised Laplace posterior: a Gaussian over the weights, with the curvature as its precision.

Immer, Korzepa & Bauer 2021 for the predictive of the linearised network; MacKay 1992 for the evidence.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.ambient import Progress
from curvops.argument_types import CurvatureChoice, PriorMean, PriorPrecision
from curvops.checkpoint import Place, begin
from curvops.checks import check_choice, check_kind, check_options, checked_number, checked_whole
from curvops.linalg import Estimate
from curvops.linalg.core.algorithm import algorithm
from curvops.linalg.core.matrix_identity import problem_of
from curvops.linalg.core.solve_routes import SolvePlan
from curvops.linalg.operators.base import as_part
from curvops.network import record_of_network
from curvops.network.likelihoods import Gaussian, Multitask
from curvops.operators import Linearization
from curvops.operators.operator_record import record_of_operator, record_of_value
from curvops.posterior.deviations import Deviations, Noise, StochasticDescent, draw_deviations
from curvops.posterior.gaussians.gaussian_posterior import OF_LAPLACE, GaussianWeights
from curvops.posterior.gaussians.updating import (
    add_data,
    as_prior,
    checked_posterior,
    replace_noise,
    require_equal_on_ranks,
    warn_of_other_noise,
    with_left_out_noise,
)
from curvops.posterior.linear_mode import LinearMode, find_mode, problem_of_mode, warn_of_mode
from curvops.posterior.log_evidence import (
    Evidence,
    Tuning,
    Validation,
    count_parameters,
    find_evidence,
    log_determinant,
)
from curvops.posterior.precision import inverse_of_rows, plan, require_usable
from curvops.posterior.predictions.outputs import NormalOutputs
from curvops.posterior.terms import (
    CurvatureCache,
    PrecisionTerms,
    Prior,
    check_linearization,
    checked_curvature,
    checked_draws,
)
from curvops.storage import from_record

NORMALISATION = re.compile(r"Norm(\d+d)?$")
"""Names of classes that normalise activations or weights: BatchNorm2d, LayerNorm, GroupNorm, LlamaRMSNorm, …"""


@dataclass(frozen=True, eq=False, repr=False)
class Laplace(GaussianWeights):
    """A Laplace posterior N(θ*, T P⁻¹) with P = G + A, made by `co.laplace`; immutable: tuning returns a new one.

    Examples:
        >>> post = co.laplace(lin, co.KFAC, prior_precision=1.0, check_mode=False)
        >>> post.probabilities(x).shape, post.predict(x).variance.shape, post.sample(5).shape
        (torch.Size([8, 2]), torch.Size([8, 2]), torch.Size([5, 17]))
    """

    lin: Linearization
    curvature: LinearOperator
    prior: Prior
    cache: CurvatureCache
    temperature: float = 1.0
    prior_error: Estimate | None = None
    tuning: Tuning | Validation | None = None
    """The steps by which `co.evidence` tuned the hyperparameters; None if they were given."""

    def _facts(self) -> tuple[str, ...]:
        tempered = () if self.temperature == 1 else (f"temperature {self.temperature:.6g}",)
        likelihoods = [member.of_position for member in self.lin.likelihood.members]
        noise = [gaussian.printed_noise for gaussian in likelihoods if isinstance(gaussian, Gaussian)]
        return (as_part(self.curvature), f"prior precision {self.prior.printed}", *noise, *tempered)

    @property
    def compression(self) -> Estimate | None:
        """The error ‖C − Ĉ‖_F / ‖C‖_F of the form Ĉ that `update` kept; None if it kept everything unchanged.

        C is the earlier posterior's curvature, and for form="kronecker" its sum with the new one (computed exactly,
        to the square root of rounding). Errors of earlier updates are not included.
        """
        of_sum = self.terms.sum.error
        return self.prior_error if of_sum is None else of_sum

    @property
    def prior_precision(self) -> Tensor | LinearOperator:
        """The prior precision A: a tensor, 0-d or a diagonal (D,), or an operator (D, D)."""
        return self.prior.precision

    @property
    def prior_mean(self) -> Tensor:
        """The prior mean m, 0-d or (D,)."""
        return self.prior.mean

    @cached_property
    def terms(self) -> PrecisionTerms:
        """The terms of P, with the cache of the curvature."""
        return PrecisionTerms(self.cache, self.prior)

    @property
    def progress(self) -> Progress:
        """How long calls show their progress: as that of `lin`."""
        return self.lin.passes.progress

    @property
    def precision(self) -> Any:
        """The precision P = G + A, (D, D), whatever the temperature."""
        return self.terms.precision

    @property
    def mode_gap(self) -> float:
        """The ratio ‖log posterior's gradient‖ / ‖log prior's gradient‖ at θ*, 0 at a mode. Costs one gradient.

        NaN if the data of the curvature are unknown (see `log_evidence`).
        """
        of_prior, of_data = self.prior.gradient(self.mean), self.cache.gradient()
        if of_data is None:
            return math.nan
        gradient = (of_data + of_prior).norm()
        return 0.0 if gradient == 0 else float(gradient / of_prior.norm())

    def with_prior(self, prior_precision: PriorPrecision, prior_mean: PriorMean | None = None) -> Laplace:
        """Return the posterior under another prior; the two share everything that does not depend on the prior.

        Args:
            prior_precision: as in `co.laplace`.
            prior_mean: as in `co.laplace`; None keeps the current mean (an earlier posterior has its own mean).

        Returns:
            The posterior under that prior.
        """
        prior = as_prior(prior_precision, 0.0 if prior_mean is None else prior_mean, self.lin.model, self.lin)
        if prior_mean is None and not isinstance(prior_precision, GaussianWeights):
            prior = replace(prior, mean=self.prior_mean)
        new = replace(self, prior=prior, prior_error=None, tuning=None)
        require_equal_on_ranks(new)
        require_usable(new.terms)
        return new

    def with_noise(
        self, noise: float | Float[Tensor, "*C"] | Mapping[Any, Any], generator: torch.Generator | None = None
    ) -> Laplace:
        """Return the posterior under another observation noise (variance of a Gaussian likelihood) and the same prior.

        Args:
            noise: a positive number, or a tensor of them, one for each output (C,); for several outputs a mapping of
                such noises, under the names of those that change.
            generator: the source of the draws that the curvature makes, if any.

        Returns:
            The posterior under that noise.

        Raises:
            TypeError, ValueError: the likelihood is not Gaussian, the noise is not positive or has another size, or the
                curvature does not record how it was built from its linearisation.
        """
        return replace_noise(self, noise, generator)

    @property
    def observation_noise(self) -> float:
        """The observation noise, the variance of a Gaussian likelihood; ValueError unless it is a single number."""
        likelihood = self.lin.likelihood
        if likelihood.single_noise is not None:
            return float(likelihood.single_noise.detach())
        member = "likelihoods[name]." if isinstance(likelihood, Multitask) else ""
        raise ValueError(
            f"{likelihood!r} has no noise that is one number, as co.likelihoods.Gaussian(variance) has: read several "
            f"as post.lin.likelihood.{member}of_position.noise, set them by post.with_noise(tensor), those of several "
            "outputs by post.with_noise({'value': variance})."
        )

    @algorithm
    def deviations(
        self,
        k: int,
        noise: Noise | None = None,
        method: str | StochasticDescent | None = None,
        x0: Float[Tensor, "k D"] | None = None,
        rtol: float = 1e-3,
        generator: torch.Generator | None = None,
        *,
        checkpoint: Place | None = None,
    ) -> Deviations:
        """Draw k deviations from N(0, T P⁻¹), the posterior minus its mean, and return them with their noise.

        Each draw z solves P z = Aθ⁰ + Sε for θ⁰ ~ N(0, A⁻¹), white noise ε and the square root S of the curvature
        (Papandreou & Yuille 2010; Antorán et al. 2023). All methods give the same draws for the same noise, to within
        their tolerance.

        Args:
            k: the number of draws, at least 1.
            noise: the `noise` of earlier deviations, for the same draws under another prior precision, observation
                noise, method or tolerance; its first k draws are used. None draws new noise.
            method: "cg" solves for all draws in one block, preconditioned if that pays off. "dual" solves in function
                space, where vectors are shorter if there are fewer outputs in all than weights, with more products (GGN
                and Fishers, under a prior that is a number or a vector). "sgd" uses minibatches and reaches few digits;
                `co.posterior.StochasticDescent()` has its options. "closed form", for structured curvatures, gives
                draws that the other methods do not reproduce from the same noise. None uses the closed form if there is
                one. Otherwise it uses "cg", or "dual" if outputs are so few that J Jᵀ costs less than k solves, or if
                memory has room only for its far shorter vectors.
            x0: initial guess (k, D), such as the draws under a neighbouring prior precision.
            rtol: the relative residual of each solve; the default is far below the sampling error of k draws.
            generator: the source of the noise.
            checkpoint: a folder for intermediate results, written at most every half minute. After a crash the same
                call resumes from there, with the same noise, and gives bitwise the same draws. The folder keeps the
                result, and a later call returns it at once.

        Returns:
            A `Deviations`: the draws as rows, true residuals, products and history.

        Raises:
            ConvergenceError: rtol was not reached; the error holds the `deviations`.
            DivergenceError: stochastic descent diverges with the given step size.
            TypeError, ValueError: k, rtol or x0 is of another kind, size or sign, the noise belongs to another problem,
                the method does not exist or does not fit the curvature, or the checkpoint belongs to another problem.
            OSError: the checkpoint cannot be written.

        Cost: a pull of J and the products that the result reports. Memory: the draws, the right-hand sides, and the
        method's working vectors within `lin.memory_budget`.
        """
        check_options(k=k, rtol=rtol, generator=generator)
        self.cache.require_gradients()
        start = None if x0 is None else checked_draws(x0, self.mean, "x0", k).mT
        if noise is not None:
            check_kind("noise", noise, Noise, "the `noise` of earlier deviations")
            noise.require_of(self.lin, k)

        def problem() -> dict[str, Any]:
            of_network = self.lin.identified_by | self.lin.order
            return of_network | problem_of(self.precision) | {"the temperature": self.temperature}

        run = begin("deviations", checkpoint, problem, self.mean.device, True, self.lin.ranks)
        noise = Noise.draw(self.lin, k, generator) if noise is None else noise
        draw = partial(draw_deviations, self.terms, self.temperature, k, method=method, x0=start, rtol=float(rtol))
        if not run:
            return draw(noise)
        self.cache.keep_in(run)
        if run.done:
            return run.result(Deviations)
        saved = run.attach("noise", lambda: noise)
        run.save(dict, now=True)
        return run.finish(draw(noise if saved is None else from_record(Noise, saved)))

    @algorithm
    def linear_mode(
        self,
        x0: Float[Tensor, " D"] | None = None,
        rtol: float = 1e-6,
        maxiter: int = 50,
        *,
        checkpoint: Place | None = None,
    ) -> LinearMode:
        """Find θ̄, the mode of the linear model f(x, θ*) + J(x)(θ − θ*) under the likelihood and the prior.

        It equals the network's own weights if training reached a mode and nothing normalises activations. Otherwise the
        evidence of the linear model belongs to θ̄ (Antorán et al. 2022). Newton–CG finds it with the exact GGN at the
        linear model's outputs, whatever the posterior's curvature is; a Gaussian likelihood needs a single solve.

        Args:
            x0: the weights (D,) to start from, such as the mode under a neighbouring prior; None starts at θ*.
            rtol: the gradient's norm, relative to the norms of the likelihood's and the prior's gradients together.
            maxiter: the maximum number of Newton steps.
            checkpoint: a folder for intermediate results, as in `deviations`: Newton steps, and the solve within a
                step.

        Returns:
            A `LinearMode`; its `reason` says whether rtol was reached.

        Raises:
            ValueError: the data of the curvature are unknown or not counted once (see `log_evidence`), or the
                checkpoint belongs to another problem.
            OSError: the checkpoint cannot be written.
            ConvergenceError: the solve of a Newton step failed.

        Cost: the products that the result reports, and a pass over the data for each Newton step.
        """
        check_options(rtol=rtol, maxiter=maxiter)
        start = None if x0 is None else checked_draws(torch.atleast_2d(x0), self.mean, "x0", 1)[0]
        saved = begin(
            "linear_mode", checkpoint, partial(problem_of_mode, self.terms), self.mean.device, True, self.lin.ranks
        )
        self.cache.keep_in(saved)
        if saved.done:
            return saved.result(LinearMode)
        return saved.finish(find_mode(self.terms, start, float(rtol), maxiter))

    def plan(self, columns: int = 1) -> SolvePlan:
        """Return how draws, rows of J in predictions, and the evidence would be computed, and why.

        `print(post.plan(8))` shows a table for each, for 8 draws or rows: the possible routes, with the least number of
        products that they take (for a formed kernel J Jᵀ, gradients) and their bytes, the route that is taken, and why
        the rest are not possible. `deviations(method=...)` selects another route. Structured curvatures need no solve:
        their predictions come from the layers. Nothing is solved; whether a prior precision is below the rounding of
        J Jᵀ is known only once J Jᵀ is formed.

        Args:
            columns: the number of draws, or of rows of J.

        Returns:
            The SolvePlan, which prints as tables.

        Raises:
            TypeError, ValueError: columns is not a whole number, at least 1.
        """
        return plan(self.terms, checked_whole("columns", columns, 1))

    def _outputs(self) -> NormalOutputs:
        self.cache.require_gradients()
        return NormalOutputs(self.lin, partial(inverse_of_rows, self.terms), self.temperature)

    @property
    def _is_learned(self) -> bool:
        A = self.terms.A
        return (A is not None and A.requires_grad) or any(t.requires_grad for _, t in self.cache.hyperparameters)

    def _deviations(self, k: int, generator: torch.Generator | None, rtol: float) -> Float[Tensor, "k D"]:
        return self.deviations(k, rtol=rtol, generator=generator).draws

    def _logdet(self, rtol: float, generator: torch.Generator | None) -> Estimate:
        self.cache.require_gradients()
        return log_determinant(self.terms, rtol, generator)

    @torch.no_grad()
    def _record(self, inputs: Any) -> tuple[int, dict[str, Any]]:
        lin, prior, cache = self.lin, self.prior, self.cache
        likelihood = cache.peek("log likelihood")
        if likelihood is None and not isinstance(cache.data, str):
            # If the data can no longer be read, a file without it is better than none.
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                likelihood = cache.log_likelihood().detach()
        return OF_LAPLACE, {
            "linearization": record_of_network(lin, inputs),
            "curvature": record_of_operator(self.curvature, lin),
            "prior": {
                "class": type(prior).__name__,
                "precision": record_of_value(prior.precision, lin, "the prior precision"),
                "mean": prior.mean.detach(),
                "chosen_by": prior.chosen_by,
            },
            "prior_error": record_of_value(self.prior_error, lin),
            "temperature": self.temperature,
            "log_likelihood": likelihood,
            "gradient": cache.peek("gradient"),
        }

    def log_evidence(
        self, rtol: float = 0.01, generator: torch.Generator | None = None, mode: str = "auto"
    ) -> Evidence:
        """Compute log p(data) under Laplace's approximation, in nats, with its standard error and its parts.

        It is log-likelihood − ½ [(θ − m)ᵀA(θ − m) + log det P − log det A]. `temperature` does not enter: it widens the
        approximation N(θ*, T P⁻¹) and is not part of the model. A tempered *likelihood* is part of it: for a curvature
        times 1/T, such as (1 / T) * co.GGN(lin), the result is log ∫ p(y|θ)^(1/T) p(θ) dθ, the normaliser of the power
        posterior (Friel & Pettitt 2008), with the log-likelihood times 1/T.

        Likelihood and scatter are evaluated at θ*, or at the linear model's own mode θ̄ (`linear_mode`), with P at θ*
        in both cases; at θ̄ the result is the exact evidence of the linear model if the likelihood is Gaussian. If
        layers normalise activations or weights, the scale of θ* is arbitrary, and only θ̄ gives an evidence for the
        prior (Antorán et al. 2022).

        The log-determinants are exact if P has a closed form, and up to 1,024 weights, where they cost D products, once
        for all diagonal priors. Otherwise `co.linalg.logdet` estimates them for this prior (`co.evidence.grid` and
        `maximize` cover many priors at once). Under a prior operator that is neither a closed form nor a curvature plus
        a number, its smallest eigenvalue is estimated too, and the reason is UNVERIFIED.

        Under your own loss (`co.likelihoods.FromLoss`) the likelihood is exp(−loss) without its normalising constant:
        such evidences compare priors, and networks under one loss, but neither losses nor their options. The
        likelihood is that of the curvature's data: for co.GGN(lin_a) + co.GGN(lin_b), of both. A matrix of your own
        (co.linalg.Dense, a product of operators) does not record its data, which are assumed to be those of `lin`.

        The value carries gradients in the prior precision, and in the likelihood's hyperparameters if the curvature
        does (GGN, EmpiricalFisher; for the single noise of a Gaussian likelihood also KFAC, EKFAC, diagonals, blocks
        and the Hessian, built while gradients are on), with θ* held fixed. (θ̄ moves with them, but this changes
        nothing to first order, because θ̄ maximises likelihood and prior.)

        Args:
            rtol: the relative accuracy of an estimated log-determinant, for which at most 4,000 products are spent; the
                estimate's `reason` says whether it was reached.
            generator: the source of the probes.
            mode: "map" for θ*, "linear" for θ̄, at the cost of `linear_mode`; "auto" is "linear" for a module with
                normalisation layers (a module whose class is called …Norm), otherwise "map".

        Returns:
            An `Evidence`: an `Estimate` with `log_likelihood`, `scatter` ((θ − m)ᵀA(θ − m)), `log_determinant_ratio`
            (an Estimate), `effective_parameters` (an Estimate, computed on first access) and the `mode` at which they
            were evaluated. If the mode was not found, its `reason` is that of the mode.

        Raises:
            ValueError: a gradient in anything else is required; the curvature belongs to other data, to another
                likelihood, or to further data that it does not keep (KFAC(lin_a) + KFAC(lin_b)); data are not counted
                evenly (GGN(lin) + GGN(lin), 0.5 * GGN(lin_a) + GGN(lin_b)); or an operator in a sum does not record
                its data.
        """
        check_options(rtol=rtol, generator=generator)
        at = checked_mode(mode, self.lin)
        evidence = find_evidence(self.terms, None, rtol, generator, at)
        if at == "map":
            warn_of_mode(self)
        return evidence

    def effective_parameters(self, rtol: float = 0.01, generator: torch.Generator | None = None) -> Estimate:
        """Compute tr(P⁻¹G), the number of directions in weight space that the data determine.

        It is exact or estimated as `log_evidence` is, with as many products; under a prior operator with more than
        1,024 weights it takes a solve for each of at most 200 probes. The value carries gradients if P has a closed
        form and the prior is a number or a vector.

        Args:
            rtol: as in `log_evidence`.
            generator: the source of the probes.

        Returns:
            An Estimate of tr(P⁻¹G).

        Raises:
            ValueError: a gradient is required, and P has no closed form.
        """
        check_options(rtol=rtol, generator=generator)
        return count_parameters(self.terms, rtol, generator)

    def update(
        self,
        lin: Linearization,
        curvature: CurvatureChoice | None = None,
        rank: int | None = None,
        generator: torch.Generator | None = None,
        check_mode: bool = True,
        *,
        form: str | None = None,
    ) -> Laplace:
        """Return the posterior after further data, with this one as its prior: online Laplace (Ritter et al. 2018).

        Each curvature stays where it was linearised: the new prior has the precision and the mean of this posterior.
        For a model that is linear in its weights the result is the posterior of all data at once.

        Args:
            lin: the network, linearised at its new weights on the new data, with the same parameters selected. A noise
                that it estimates is that of the new data alone: for few, pass Gaussian(noise=post.observation_noise).
            curvature: a name, an operator class or an operator, as in `co.laplace`; None builds it as this
                posterior's was built, with the same options.
            rank: the rank of a low-rank form; None lets it grow to an error of 1 %. A rank alone implies
                form="low_rank".
            generator: the source of the sketch, and of the draws of a curvature that is built as this one was.
            check_mode: as in `co.laplace`.
            form: the form in which this posterior is kept. None keeps it unchanged; a GGN then keeps its data, too, and
                each product walks over the data of all tasks. "low_rank" keeps its curvature as U diag(s) Uᵀ, plus the
                prior's diagonal; "low_rank_diagonal" adds the exact diagonal of the remainder. "kronecker", for KFACs,
                keeps their *sum* in each layer as the nearest Kronecker product (Van Loan & Pitsianis 1993), plus the
                prior's diagonal: the new posterior then has a closed form, as KFAC with a number has.

        Returns:
            The new posterior, with temperature 1; its `compression` is the error of the form.

        Raises:
            ValueError: this posterior already contains the data, other parameters are selected, no curvature is given
                and this one does not record how it was built, or the form does not exist or does not fit.
        """
        after = add_data(self, lin, curvature, rank, generator, form)
        if check_mode:
            warn_of_other_noise(self, after.lin)
        return checked_posterior(after, check_mode)


def make_laplace(
    lin: Linearization, curvature: Any, prior_precision: Any, prior_mean: Any = 0.0, temperature: float = 1.0
) -> Laplace:
    """Make a posterior from arguments as those of `co.laplace`, all given, before `checked_posterior`."""
    check_linearization(lin)
    if not isinstance(curvature, LinearOperator):
        lin = with_left_out_noise(lin)
    prior = as_prior(prior_precision, prior_mean, lin.model, lin)
    temperature = checked_number("temperature", temperature)
    operator = checked_curvature(curvature, lin)
    return Laplace(lin, operator, prior, CurvatureCache(lin, operator), temperature)


def checked_mode(mode: Any, lin: Linearization) -> str:
    """Return "map" or "linear", as given or, for "auto", "linear" if a layer normalises activations or weights."""
    check_choice("mode", mode, ("auto", "map", "linear"))
    if mode != "auto":
        return str(mode)
    kinds = {kind.__name__ for module in lin.model.paths for kind in type(module).__mro__}
    return "linear" if any(map(NORMALISATION.search, kinds)) else "map"


def check_posterior(post: Any, function: str) -> None:
    """Raise TypeError unless it is a posterior of `co.laplace`."""
    check_kind(f"the first argument of {function}", post, Laplace, "a posterior, co.laplace(lin)")
