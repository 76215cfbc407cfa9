"""The linearised Laplace posterior: a Gaussian over the weights, with the curvature as its precision.

Immer, Korzepa & Bauer 2021 for the predictive of the linearised network; MacKay 1992 for the evidence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checkpoint import Place, begin, resumable
from curvops.checks import check_choice, checked_number, checked_whole
from curvops.linalg import Estimate
from curvops.linalg.core.matrix_identity import problem_of
from curvops.linalg.core.solve_routes import SolvePlan
from curvops.operators import GGN, Linearization
from curvops.posterior.core.arguments import (
    check_accuracy,
    check_linearization,
    checked_count,
    checked_curvature,
    checked_draws,
)
from curvops.posterior.core.curvature_cache import CurvatureCache
from curvops.posterior.core.priors import PrecisionTerms, Prior
from curvops.posterior.draws.deviations import Deviations, draw_deviations
from curvops.posterior.draws.noise import Noise
from curvops.posterior.draws.stochastic_descent import StochasticDescent
from curvops.posterior.gaussians.gaussian_posterior import GaussianWeights
from curvops.posterior.gaussians.posterior_record import OF_LAPLACE, record_of_posterior
from curvops.posterior.gaussians.updating import (
    add_data,
    as_prior,
    checked_posterior,
    mode_gap,
    replace_noise,
    replace_prior,
)
from curvops.posterior.log_evidence.determinants import count_parameters, log_determinant
from curvops.posterior.log_evidence.evidence_parts import Evidence, find_evidence
from curvops.posterior.log_evidence.tuning import Tuning, Validation
from curvops.posterior.predictions.outputs import DrawnOutputs, NormalOutputs
from curvops.posterior.solves.linear_mode import LinearMode, find_mode, problem_of_mode
from curvops.posterior.solves.precision import inverse_for_rows, plan
from curvops.records import from_record


@dataclass(frozen=True, eq=False)
class Laplace(GaussianWeights):
    """The Laplace posterior N(θ*, T P⁻¹), P = G + A, made by `co.laplace`. Immutable: tuning returns a new one."""

    lin: Linearization
    curvature: LinearOperator
    prior: Prior
    cache: CurvatureCache = field(repr=False)
    temperature: float = 1.0
    prior_error: Estimate | None = field(default=None, repr=False)
    tuning: Tuning | Validation | None = field(default=None, repr=False)
    """The steps by which `co.evidence` found the hyperparameters; None where they were given."""

    @property
    def compression(self) -> Estimate | None:
        """The error ‖C − Ĉ‖_F / ‖C‖_F of the form Ĉ that `update` kept; None where everything was kept as it is.

        C is the earlier posterior's curvature, for form="kronecker" the sum of that with the new one (exact, to the
        square root of rounding). Errors of earlier updates are not in it.
        """
        of_sum = self.terms.sum.error
        return self.prior_error if of_sum is None else of_sum

    @property
    def prior_precision(self) -> Tensor | LinearOperator:
        """A: a tensor, 0-d or a diagonal (D,), or an operator (D, D)."""
        return self.prior.precision

    @property
    def prior_mean(self) -> Tensor:
        """m, 0-d or (D,)."""
        return self.prior.mean

    @cached_property
    def terms(self) -> PrecisionTerms:
        """The terms of P, with what is known of the curvature."""
        return PrecisionTerms(self.cache, self.prior)

    @property
    def precision(self) -> Any:
        """P = G + A, (D, D), whatever the temperature."""
        return self.terms.precision

    @property
    def mode_gap(self) -> float:
        """‖gradient of the log posterior‖ / ‖gradient of the log prior‖ at θ*: 0 at a mode. One gradient.

        NaN where it is not known which data the curvature is of (see `log_evidence`).
        """
        return mode_gap(self.terms)

    def with_prior(self, prior_precision: Any, prior_mean: Any = None) -> Laplace:
        """Return the posterior under another prior; the two share everything that does not depend on the prior.

        Args:
            prior_precision: as `co.laplace` takes it.
            prior_mean: likewise; None keeps the present mean (an earlier posterior brings its own).
        """
        return replace_prior(self, prior_precision, prior_mean)

    def with_noise(self, noise: float, generator: torch.Generator | None = None) -> Laplace:
        """Return the posterior under another observation noise (variance of a Gaussian likelihood); the prior stays.

        Args:
            noise: a positive number.
            generator: source of what the curvature draws.

        Raises:
            TypeError, ValueError: another likelihood, a noise that is not a positive number, or a curvature that does
                not say how it was made of its linearisation.
        """
        _ = self.observation_noise
        return replace_noise(self, noise, generator)

    @property
    def observation_noise(self) -> float:
        """The observation noise, the variance of a Gaussian likelihood; ValueError where there is not one number."""
        noise = self.lin.likelihood.single_noise
        if noise is None:
            raise ValueError(
                f"{self.lin.likelihood!r} has no noise that is one number; co.likelihoods.Gaussian(noise=variance) "
                "has. Several variances are learned by the gradient of log_evidence in a tensor that requires one."
            )
        return float(noise.detach())

    @resumable
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
        """Draw from N(0, T P⁻¹), the posterior less its mean; the noise of the draws is returned with them.

        Each draw z solves P z = Aθ⁰ + Sε for θ⁰ ~ N(0, A⁻¹), white noise ε and the square root S of the curvature
        (Papandreou & Yuille 2010; Antorán et al. 2023). For one noise the methods give one answer, to their tolerance.

        Args:
            k: the number of draws, at least 1.
            noise: the `noise` of earlier deviations, for the same draws under another prior precision, observation
                noise, method or tolerance; of more draws the first k are taken. None draws new noise.
            method: "cg" solves for all draws in one block, preconditioned where that pays; "dual" in function space,
                whose vectors are shorter where there are fewer outputs in all than weights, for more products (GGN
                and Fishers, a prior that is a number or a vector); "sgd" by minibatches, `co.StochasticDescent()` with
                options, to few digits; "closed form", for structured curvatures, has draws of its own, which the others
                do not find for the same noise. None takes the closed form where there is one, else "cg", or "dual"
                where outputs are so few that J Jᵀ is formed for less than k solves, or where it has far shorter
                vectors and memory has no room for those of "cg".
            x0: initial guess (k, D), such as the draws of a neighbouring prior precision.
            rtol: relative residual of each solve, far below the sampling error of k draws.
            generator: source of the noise.
            checkpoint: a folder for what is reached, every half minute at most. After a crash the same call goes on
                from there, the noise included, and ends with the same bits; the folder keeps the result, which a later
                call returns at once.

        Returns:
            A `Deviations`: the draws as rows, true residuals, products, history.

        Raises:
            NotConverged: rtol was not reached; the error carries the `deviations`.
            Diverged: stochastic descent with a step size of one's own diverges.
            TypeError, ValueError: k, rtol or x0 of another kind, size or sign, noise of another problem, or a method
                that does not exist or does not fit the curvature; a checkpoint of another problem.
            OSError: the checkpoint cannot be written.

        Cost: a pull of J and the products that are reported. Memory: the draws, the right-hand sides, and what the
        method's working vectors have of `lin.memory_budget`.
        """
        k = checked_count(k)
        check_accuracy(rtol, generator)
        self.cache.require_gradients()
        start = None if x0 is None else checked_draws(x0, self.mean, "x0", k).mT
        if isinstance(noise, Noise):
            noise.require_of(self.lin, k)
        elif noise is not None:
            raise TypeError(f"noise must be the `noise` of earlier deviations, got {type(noise).__name__}.")

        def problem() -> dict[str, Any]:
            return problem_of(self.precision) | {"the temperature": self.temperature}

        kept = begin("deviations", checkpoint, problem, self.mean.device, parts=True)
        noise = Noise.draw(self.lin, k, generator) if noise is None else noise
        self.cache.keep_in(kept)
        if kept.done:
            return kept.result(Deviations)
        known = kept.attach("noise", lambda: noise)
        noise = noise if known is None else from_record(Noise, known)
        kept.save(dict, now=True)
        return kept.finish(draw_deviations(self.terms, self.temperature, k, noise, method, start, float(rtol)))

    @resumable
    def linear_mode(
        self,
        x0: Float[Tensor, " D"] | None = None,
        rtol: float = 1e-6,
        maxiter: int = 50,
        *,
        checkpoint: Place | None = None,
    ) -> LinearMode:
        """Find θ̄, the mode of the linear model f(x, θ*) + J(x)(θ − θ*) under the likelihood and the prior.

        The network's own weights are one where training reached a mode and nothing normalises activations; elsewhere
        the evidence of the linear model belongs to θ̄ (Antorán et al. 2022). It is found by Newton–CG with the exact
        GGN at the linear model's outputs, whatever the posterior's curvature; for a Gaussian likelihood one solve.

        Args:
            x0: the weights (D,) to start from, such as the mode under a neighbouring prior; None is θ*.
            rtol: the gradient's norm relative to those of the likelihood and the prior together.
            maxiter: most Newton steps.
            checkpoint: a folder for what is reached, as in `deviations`: Newton steps, and the solve inside one.

        Returns:
            A `LinearMode`; its `reason` says whether rtol was reached.

        Raises:
            ValueError: the data of the curvature are not known or not counted once (see `log_evidence`), or the
                checkpoint is of another problem.
            OSError: the checkpoint cannot be written.
            NotConverged: a Newton step was not solved for.

        Cost: the products that are reported, and a pass over the data for each Newton step.
        """
        check_accuracy(rtol)
        start = None if x0 is None else checked_draws(torch.atleast_2d(x0), self.mean, "x0", 1)[0]
        most = checked_count(maxiter)
        kept = begin("linear_mode", checkpoint, partial(problem_of_mode, self.terms), self.mean.device, parts=True)
        self.cache.keep_in(kept)
        if kept.done:
            return kept.result(LinearMode)
        return kept.finish(find_mode(self.terms, start, float(rtol), most))

    def plan(self, columns: int = 1) -> SolvePlan:
        """Return how draws, rows of J in predictions, and the evidence would be computed, and why.

        `print(post.plan(8))` shows a table for each, for 8 draws or rows: the routes with the products that they take
        at least (for a formed kernel J Jᵀ, gradients), their bytes, and which one is taken, which others are possible
        and why the rest are not. `deviations(method=...)` takes another route. Structured curvatures need no solve:
        their predictions come from the layers. Raises TypeError or ValueError unless columns is a whole number, at
        least 1. Nothing is solved; whether a prior precision lies within the rounding of J Jᵀ is known once that is
        formed.
        """
        return plan(self.terms, checked_whole("columns", columns, 1))

    def _outputs(self) -> NormalOutputs:
        self.cache.require_gradients()
        return NormalOutputs(self.lin, partial(inverse_for_rows, self.terms), self.temperature)

    def _outputs_at(self, weights: Float[Tensor, "k D"]) -> DrawnOutputs:
        self.cache.require_gradients()
        return DrawnOutputs(self.lin, weights)

    def _deviations(self, k: int, generator: torch.Generator | None, rtol: float) -> Float[Tensor, "k D"]:
        return self.deviations(k, rtol=rtol, generator=generator).draws

    def _logdet(self, rtol: float, generator: torch.Generator | None) -> Estimate:
        self.cache.require_gradients()
        return log_determinant(self.terms, rtol, generator)

    def _record(self, inputs: Any) -> tuple[int, dict[str, Any]]:
        return OF_LAPLACE, record_of_posterior(self, inputs)

    def log_evidence(
        self, rtol: float = 0.01, generator: torch.Generator | None = None, mode: str = "auto"
    ) -> Evidence:
        """Compute log p(data) under Laplace's approximation, in nats, with its standard error and its parts.

        It is log-likelihood − ½ [(θ − m)ᵀA(θ − m) + log det P − log det A], whatever `temperature`, which widens the
        approximation N(θ*, T P⁻¹) and is not of the model. A tempered *likelihood* is: of a curvature times 1/T, as
        (1 / T) * co.GGN(lin), it is log ∫ p(y|θ)^(1/T) p(θ) dθ, the normaliser of the power posterior (Friel & Pettitt
        2008), with the log-likelihood times 1/T. Likelihood and scatter are taken at θ*, or at the linear model's own
        mode θ̄ (`linear_mode`), with P at θ* in both cases: at θ̄ it is the exact evidence of the linear model of a
        Gaussian likelihood. Where layers normalise activations or weights, the scale of θ* is arbitrary, and θ̄ alone
        gives an evidence of the prior (Antorán et al. 2022). The log-determinants are exact where P has a closed form,
        and up to 1,024 weights, where they cost D products, once for all diagonal priors. Otherwise they are estimated
        for this prior by `co.linalg.logdet` (`co.evidence.grid` and `maximize` serve many priors at once).
        Under a prior operator that is neither a closed form nor a curvature plus a number, its smallest eigenvalue is
        estimated too, and the reason is UNVERIFIED.

        Under a loss of one's own (`co.likelihoods.FromLoss`) the likelihood is exp(−loss), without its normalising
        constant: such evidences compare priors, and networks under one loss, but neither losses nor their options.
        The likelihood is that of the data of the curvature: for co.GGN(lin_a) + co.GGN(lin_b), of both. A matrix of
        the user's own (co.linalg.Dense, a product of operators) does not record its data, which are taken to be those
        of `lin`. The value carries gradients for the prior precision, and for the likelihood's hyperparameters where
        the curvature does (GGN, EmpiricalFisher; for the one noise of a Gaussian likelihood also KFAC, EKFAC,
        diagonals, blocks and the Hessian, made while gradients are on), with θ* held fixed. (θ̄ moves with them, which
        to first order changes nothing: it maximises likelihood and prior.)

        Args:
            rtol: relative accuracy of an estimated log-determinant, which at most 4,000 products are spent on; the
                estimate's `reason` says whether it was reached.
            generator: source of the probes.
            mode: "map" at θ*, "linear" at θ̄, for the products of `linear_mode`; "auto" is "linear" for a module with
                normalisation layers (a module whose class is called …Norm), else "map".

        Returns:
            An `Evidence`: an `Estimate` with `log_likelihood`, `scatter` ((θ − m)ᵀA(θ − m)), `log_determinant_ratio`
            (an Estimate), `effective_parameters` (an Estimate, counted when it is first asked for) and `mode`, where
            they were taken. Its `reason` is that of the mode where this was not found.

        Raises:
            ValueError: a gradient for anything else is asked for; the curvature is of other data or another likelihood,
                or of further data that it does not keep (KFAC(lin_a) + KFAC(lin_b)); data are not counted evenly
                (GGN(lin) + GGN(lin), 0.5 * GGN(lin_a) + GGN(lin_b)); or one operator in a sum does not record its data.
        """
        check_accuracy(rtol, generator)
        return find_evidence(self.terms, None, rtol, generator, checked_mode(mode, self.lin))

    def effective_parameters(self, rtol: float = 0.01, generator: torch.Generator | None = None) -> Estimate:
        """Compute tr(P⁻¹G), the number of directions in weight space that the data determine.

        Exact or estimated as `log_evidence` is, with as many products; under a prior operator and beyond 1,024 weights
        by a solve for each of at most 200 probes. The value carries gradients where P has a closed form and the prior
        is a number or a vector.

        Args:
            rtol: as in `log_evidence`.
            generator: source of the probes.

        Raises:
            ValueError: a gradient is asked for where P has no closed form.
        """
        check_accuracy(rtol, generator)
        return count_parameters(self.terms, rtol, generator)

    def update(
        self,
        lin: Linearization,
        curvature: Any = None,
        rank: int | None = None,
        generator: torch.Generator | None = None,
        check_mode: bool = True,
        *,
        form: str | None = None,
    ) -> Laplace:
        """Return the posterior after further data, with this one as its prior: online Laplace (Ritter et al. 2018).

        Each curvature stays where it was linearised: this precision is the prior's, and this mean its mean. For a
        model that is linear in its weights it is the posterior of all data at once.

        Args:
            lin: the network linearised at its new weights on the new data, the same parameters selected.
            curvature: an operator class or operator, as `co.laplace` takes it; None makes it as this one was, with the
                same options.
            rank: of a low-rank form; None lets it grow to an error of 1 %. A rank alone means form="low_rank".
            generator: source of the sketch, and of what a curvature made as this one was draws.
            check_mode: as in `co.laplace`.
            form: in which this posterior is kept. None keeps it as it is: a GGN then keeps its data, too, and each
                product walks over the data of all tasks. "low_rank" keeps its curvature as U diag(s) Uᵀ, plus the
                prior's diagonal; "low_rank_diagonal" adds the exact diagonal of what that leaves out. "kronecker", of
                KFACs, keeps their *sum* in each layer as the Kronecker product nearest to it (Van Loan & Pitsianis
                1993), plus the prior's diagonal: the new posterior then has a closed form, as KFAC under a number has.

        Returns:
            The new posterior, of temperature 1; its `compression` is the error of the form.

        Raises:
            ValueError: data that this posterior has seen, other parameters selected, a curvature that does not say how
                it was made and none given, another form, or one that this posterior does not have.
        """
        return checked_posterior(add_data(self, lin, curvature, rank, generator, form), check_mode)


def laplace(
    lin: Linearization,
    curvature: Any = GGN,
    prior_precision: Any = 1.0,
    prior_mean: Any = 0.0,
    temperature: float = 1.0,
    check_mode: bool = True,
) -> Laplace:
    """Make the Laplace posterior N(θ*, T (G + A)⁻¹) of a linearised network under the prior N(m, A⁻¹).

    Args:
        lin: the linearisation, by `co.linearize`.
        curvature: G, an operator class that is built from `lin`, or an operator (D, D).
        prior_precision: A. A positive number: weight decay × N where training minimised a *mean* loss
            + ½ · weight decay · ‖θ − m‖². A vector (D,) of them, or a mapping {glob over parameter names: number} that
            matches each selected parameter once, such as {"0.*": 1.0, "2.*": 10.0}. A positive semidefinite operator
            (D, D), one made of a linearisation at other weights by `op.detached_from_weights()`. Or an earlier
            posterior: yesterday's posterior is today's prior, with its mean and its temperature.
        prior_mean: m, a number, a vector (D,), or a mapping {glob: number, or tensor of the parameter's shape}. Tensors
            of the prior are copied, so that a later change in place changes nothing, unless they require a gradient:
            then the posterior is always that of their present values (an operator is held, too: leave it as it is).
        temperature: T, of the posterior to the power 1/T: its covariance is T·P⁻¹. A tempered *likelihood* is the
            curvature `(1 / T) * co.GGN(lin)` instead.
        check_mode: compare the gradient of the log posterior with that of the prior, at the cost of one gradient, and
            warn with `NotAMode` where it is not small.

    Returns:
        A `Laplace`. Nothing is formed.

    Raises:
        ValueError: a prior precision that is not positive and finite, that does not name each parameter once, that is
            or that is an operator not known to be positive semidefinite; a temperature that is not positive; a
            curvature of another size, at other weights or not known to be symmetric; G + A found to be indefinite; or
            (with check_mode) a gradient that is not finite.
        TypeError: an argument of another kind, or parameters in half precision.

    A curvature that may be indefinite (co.Hessian, differences) is tested with 20 products, about 80 gradients for a
    Hessian; where they show that G + A is indefinite, the error names the prior precision that is needed. Other
    curvatures cost nothing here.
    """
    check_linearization(lin)
    prior = as_prior(prior_precision, prior_mean, lin.model, lin)
    temperature = checked_number("temperature", temperature)
    operator = checked_curvature(curvature, lin)
    return checked_posterior(Laplace(lin, operator, prior, CurvatureCache(lin, operator), temperature), check_mode)


def checked_mode(mode: Any, lin: Linearization) -> str:
    """Return "map" or "linear", as asked for or as the network's layers ask for; raise ValueError for anything else."""
    check_choice("mode", mode, ("auto", "map", "linear"))
    if mode == "auto":
        return "linear" if lin.model.normalises else "map"
    return str(mode)


def check_posterior(post: Any, function: str) -> None:
    """Raise TypeError unless it is a posterior of `laplace`."""
    if not isinstance(post, Laplace):
        raise TypeError(
            f"{function} takes a posterior, co.laplace(lin), as its first argument, got {type(post).__name__}."
        )
