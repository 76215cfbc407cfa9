"""Laplace's approximation in function space: a linearised network as a Gaussian process under any likelihood."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.argument_types import PriorMean, PriorPrecision
from curvops.checks import carries_graph, check_options, refuse
from curvops.errors import ModeNotFoundError
from curvops.linalg import Estimate, Reason
from curvops.linalg.core.algorithm import keep
from curvops.linalg.core.results import ACCEPTED, default_rtol
from curvops.linalg.core.solve_routes import KERNEL_COPIES
from curvops.operators import GGN, Linearization
from curvops.operators.curvatures.ggn import DisplacedGGN
from curvops.operators.function_space.function_space import DualInverse, FunctionSpace
from curvops.operators.linearized.user_operator import require_no_gradient
from curvops.posterior.deviations import Noise, Systems, draw_deviations
from curvops.posterior.gaussians.updating import with_left_out_noise
from curvops.posterior.linear_mode import DualMode, dual_mode, find_mode
from curvops.posterior.log_evidence import Evidence, add_up, count_parameters, log_ratio
from curvops.posterior.precision import inverse_of_rows
from curvops.posterior.predictions.outputs import NormalOutputs
from curvops.posterior.predictions.predictive import Predictive
from curvops.posterior.terms import CurvatureCache, PrecisionTerms, Prior, check_linearization, read_prior
from curvops.summary import Summarised

SPENT = "Newton's method spent its steps: raise maxiter, or use a larger prior precision."
NO_DESCENT = (
    "No step along Newton's direction lowers the loss, which is far above its rounding: use a larger prior precision, "
    "or float64; for a likelihood that is not log-concave, another prior_mean."
)
NOT_FINITE = (
    "At the linear model's outputs for the prior mean, where the search starts, the likelihood is NaN or Inf: use a "
    "prior_mean nearer to the trained weights, or co.laplace, which starts at these."
)
REMEDIES = {Reason.ITERATION_LIMIT: SPENT, Reason.STAGNATION: NO_DESCENT, Reason.NON_FINITE: NOT_FINITE}


@dataclass(frozen=True, eq=False, repr=False)
class LaplaceProcess(Summarised, Predictive):
    """The Gaussian approximation of a linearised network's outputs under its likelihood; `co.gp.laplace_gp` makes it.

    It predicts as the posterior N(θ̄, (JᵀHJ + A)⁻¹) of the weights does, where θ̄ is the linear model's own mode, and H
    the likelihood's Fisher at the linear model's outputs there. Immutable.

    Examples:
        >>> process = co.gp.laplace_gp(lin, prior_precision=1.0)
        >>> process.predict(x).mean.shape, process.reason.name
        (torch.Size([8, 2]), 'CONVERGED')
    """

    lin: Linearization
    theta: Float[Tensor, " D"]
    """The weights θ̄ = m + A⁻¹Jᵀu of the mode."""
    outputs: Float[Tensor, "N *shape"]
    """The mode f + J(θ̄ − θ*) of the outputs at the training points, in the shape of the model's outputs."""
    residual_weights: Float[Tensor, "N *shape"]
    """The gradient u of the log-likelihood at the mode; the data add K u to the prior mean."""
    training_log_likelihood: Float[Tensor, ""]
    """The log-likelihood log p(y | f) at the mode, in nats."""
    gradient: float
    """The relative gradient at the end: ‖u + r‖ / ‖r‖ with r the residuals, or that of `post.linear_mode`."""
    reason: Reason
    """The reason: CONVERGED, or PRECISION_LIMIT if it is as near as the dtype allows."""
    steps: int
    """The number of Newton steps."""
    matvecs: int
    """The number of products with J A⁻¹ Jᵀ or a curvature."""
    is_formed: bool
    """Whether the Gram matrix of the training points was formed."""
    _terms: PrecisionTerms = field(repr=False)
    _dual: tuple[Tensor, Tensor] | None = field(repr=False)
    """The factor of I + LᵀKL and L, if the Gram matrix was formed."""

    @property
    def mean(self) -> Float[Tensor, " D"]:
        """The mean θ̄ of the weights."""
        return self.theta

    @property
    def precision(self) -> Any:
        """The precision P = JᵀHJ + A, (D, D), with H at the mode."""
        return self._terms.precision

    def sample(self, k: int, generator: torch.Generator | None = None, rtol: float = 1e-3) -> Float[Tensor, "k D"]:
        """Draw k weight vectors from N(θ̄, P⁻¹), as rows.

        Args:
            k: the number of draws, at least 1.
            generator: the source of the draws.
            rtol: the relative residual of each solve; the default is far below the sampling error of k draws.

        Returns:
            The draws, (k, D).

        Raises:
            ConvergenceError: rtol was not reached.
            TypeError, ValueError: k is not a whole number of draws, or rtol is not a positive number.
        """
        check_options(k=k, rtol=rtol, generator=generator)
        noise, terms = Noise.draw(self.lin, k, generator), self._terms
        if self._dual is None:
            return self.theta + draw_deviations(terms, 1.0, k, noise, None, None, float(rtol)).draws
        systems = Systems(terms, noise, range(k), "cg", terms.precision)
        return self.theta + self._inverse(k, float(rtol))._matmul(systems.right_sides()).mT

    def log_evidence(self, rtol: float = 0.01, generator: torch.Generator | None = None) -> Evidence:
        """Compute log p(data) under the approximation, in nats: log p(y | f) − ½ (uᵀKu + log det(I + LᵀKL)).

        It is exact for a Gaussian likelihood, for which it equals `post.log_evidence(mode="linear")`. For others, that
        function uses the curvature at the network's own outputs, and this one at the linear model's mode (Rasmussen &
        Williams 2006, eq. 3.32).

        Args:
            rtol: the relative accuracy of the log-determinant if it is estimated because the Gram matrix was not
                formed.
            generator: the source of the probes.

        Returns:
            The Evidence, in nats.

        Raises:
            TypeError, ValueError: rtol is not a positive number, or generator is not a torch.Generator.
        """
        check_options(rtol=rtol, generator=generator)
        if self._dual is None:
            arguments = self._terms, rtol, generator
            ratio, count = log_ratio(*arguments), partial(count_parameters, *arguments)
        else:
            factor = self._dual[0]
            ratio, count = Estimate.exact(2 * factor.diagonal().log().sum()), partial(_count, factor)
        scatter = self._terms.prior.quadratic(self.theta)
        return add_up(self.training_log_likelihood, scatter, ratio, count, self.theta, "linear")

    def _outputs(self) -> NormalOutputs:
        return NormalOutputs(self.lin, self._inverse, 1.0, step=self.theta - self.lin.theta)

    def _inverse(self, rows: int, rtol: float | None, moved: bool = False) -> LinearOperator:
        if self._dual is None:
            return inverse_of_rows(self._terms, rows, rtol, moved)
        return DualInverse(self.precision, *self._dual, rtol=rtol)


def laplace_gp(
    lin: Linearization,
    prior_precision: PriorPrecision = 1.0,
    prior_mean: PriorMean = 0.0,
    *,
    rtol: float | None = None,
    maxiter: int = 50,
) -> LaplaceProcess:
    """Approximate the linearised network's outputs under its likelihood by a Gaussian process at their mode.

    The outputs f* + J(θ − θ*) with θ ~ N(m, A⁻¹) are a Gaussian process with the mean f* + J(m − θ*) and the kernel
    J A⁻¹ J'ᵀ. Newton's method finds the mode of the N·C training outputs, for any likelihood of `co.linearize`; a
    singular output Fisher, such as a softmax's, needs no jitter. Predictions are those of the weights' posterior
    N(θ̄, (JᵀHJ + A)⁻¹) at the linear model's mode θ̄ with the curvature there, whereas `co.laplace` uses the network's
    weights: the two agree if the network's weights are that mode.

    Args:
        lin: the linearised network, with its data and its likelihood.
        prior_precision: A, a positive number, a vector (D,) or a mapping {glob over parameter names: number}.
        prior_mean: m, a number, a vector (D,) or a mapping {glob over parameter names: number}.
        rtol: the tolerance of the gradient u + r in the outputs, relative to the residuals r; None means 1e-6, and
            1.5e-8 in float64.
        maxiter: the maximum number of Newton steps. A dozen are enough if the likelihood's Fisher is its Hessian;
            otherwise (`HeteroscedasticGaussian`) they are Fisher scoring, which may take hundreds.

    Returns:
        A `LaplaceProcess`, which predicts as posteriors do, and has the log evidence.

    Raises:
        ModeNotFoundError: the tolerance was not reached within maxiter steps, or no step lowers the loss; `reason` says
            why.
        ConvergenceError: the solve of a step failed.
        TypeError, ValueError: an argument is of another kind or size; the prior precision is an operator or an earlier
            posterior; hyperparameters require a gradient, which is not available here.

    Cost: if half of the memory left has room for five matrices of (N·C)² numbers in float64, and there are at most as
    many outputs in total as weights: the Gram matrix, and a Cholesky factorisation per step; a prediction then takes
    the Gram matrix with the training points. Otherwise the mode is found in weight space, as by `post.linear_mode`, and
    predictions cost as much as those of `co.laplace`.

    Source: Rasmussen & Williams 2006, sections 3.4 and 3.5; Immer, Korzepa & Bauer 2021.

    Examples:
        >>> process = co.gp.laplace_gp(lin, prior_precision=1.0)
        >>> process.probabilities(x).shape
        torch.Size([8, 2])
    """
    check_linearization(lin)
    rtol = default_rtol(lin.theta.dtype) if rtol is None else rtol
    check_options(rtol=rtol, maxiter=maxiter)
    require_no_gradient(lin.likelihood, "laplace_gp")
    lin = with_left_out_noise(lin)
    prior = read_prior(prior_precision, prior_mean, lin.model)
    A = prior.diagonal
    if A is None:
        raise ValueError("laplace_gp needs a prior_precision that is a number, a vector or a mapping {glob: number}.")
    refuse(carries_graph((A, prior.mean)), "laplace_gp has no gradient for prior_precision or prior_mean: detach it.")
    mode, dual = _find_mode(lin, prior, A, float(rtol), maxiter)
    reason = mode.reason if math.isfinite(mode.gradient) else Reason.NON_FINITE
    if reason not in ACCEPTED:
        raise ModeNotFoundError(reason, mode.gradient, mode.steps, rtol, REMEDIES.get(reason, reason.value))
    curvature = DisplacedGGN.at(lin, lin.push(mode.theta - lin.theta))
    by_position = -1, lin.output_shape[-1]
    return LaplaceProcess(
        lin,
        mode.theta,
        lin.by_point(mode.outputs.reshape(by_position)),
        lin.by_point(mode.u.reshape(by_position)),
        mode.log_likelihood,
        mode.gradient,
        mode.reason,
        mode.steps,
        mode.matvecs,
        dual is not None,
        PrecisionTerms(CurvatureCache(lin, curvature), prior),
        dual,
    )


def _find_mode(
    lin: Linearization, prior: Prior, A: Tensor, rtol: float, most_steps: int
) -> tuple[DualMode, tuple[Tensor, Tensor] | None]:
    """Return the mode, and the factor of I + LᵀKL and L, or None if the mode was found in weight space.

    The Gram matrix is formed if memory has room for it and for its factor, and weights are not fewer than outputs.
    """
    space = FunctionSpace(lin, metric=A)
    outputs = lin.num_data * max(lin.num_outputs, lin.likelihood.root_columns(lin.num_outputs))
    if outputs <= lin.num_parameters and 2 * KERNEL_COPIES * 8 * outputs**2 <= lin.memory.room():
        dual = dual_mode(space, 1.0, prior.mean, rtol, most_steps)
        if dual.reason not in ACCEPTED or not math.isfinite(dual.gradient):
            return dual, None
        L = space.root(dual.outputs)
        factor = space.factor(L, 1.0)
        keep(lin.jacobian(), factor, factor.nbytes + L.nbytes)
        return dual, (factor, L)
    terms = PrecisionTerms(CurvatureCache(lin, GGN(lin)), prior)
    mode = find_mode(terms, prior.mean.expand_as(lin.theta), rtol, most_steps)
    with torch.no_grad():
        at = space.outputs_at(mode.theta)
        misfit, residual = space.loss(at)
    return DualMode(-residual, mode.theta, at, -misfit, mode.gradient, mode.reason, mode.steps, mode.matvecs), None


def _count(factor: Float[Tensor, "NR NR"]) -> Estimate:
    """Return tr(P⁻¹G) = N·R − tr (I + LᵀKL)⁻¹."""
    unit = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    inverse = torch.linalg.solve_triangular(factor, unit, upper=False)
    return Estimate.exact(len(factor) - inverse.square().sum())
