"""The log evidence of a posterior with its parts, for every prior precision, and the records of its tuning.

log det(I + A^-½ G A^-½) and tr G(G + A)⁻¹ are computed by one of the routes of `solve_routes.determinants`: the closed
form of G + A (as in `(G + A).logdet()`), all eigenvalues of G, those of function space, a quadrature prepared for a
range of priors, or probes at this A alone. If A is an operator, the determinants of G + A and of A are computed
separately: by their closed forms, exactly if G may be decomposed, otherwise by probes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checkpoint import current
from curvops.checks import carries_graph, check_options
from curvops.errors import MaxStepsWarning, NotPositiveSemidefiniteError, warn
from curvops.linalg import Damped, Estimate, effective_dimension, logdet, spectral_quadrature, trace
from curvops.linalg.core import solve_routes as routes
from curvops.linalg.core.algorithm import keep
from curvops.linalg.core.results import Reason, add_estimates
from curvops.linalg.core.vectors import describe_square, product
from curvops.linalg.estimators.dense_spectrum import DenseSpectrum, decomposed, definite_logdet, dense_spectrum
from curvops.linalg.estimators.trace import attach_gradient
from curvops.linalg.operators.closed_form import ClosedForm
from curvops.network.likelihoods import Gaussian
from curvops.operators import GGN
from curvops.operators.curvatures.subnetwork import principal_block, sums_rows
from curvops.posterior.linear_mode import find_mode, linear_log_likelihood
from curvops.posterior.precision import kernel_of, naming_the_ggn, posterior_system
from curvops.posterior.terms import CurvatureCache, PrecisionTerms, Prior
from curvops.summary import Summarised, Table, Tabular, by_columns_of, summary


@dataclass(frozen=True, eq=False, repr=False)
class Evidence(Estimate, Tabular):
    """The log evidence log p(data) = log_likelihood − ½ (scatter + log_determinant_ratio) in nats, with its parts.

    `post.log_evidence()` returns it. Under a tempered likelihood it is log ∫ p(data | θ)^power p(θ) dθ.

    It is an `Estimate` with the error bar of the log-determinants; the other parts are exact. Sums with a constant and
    multiples have no such parts, and are plain Estimates.

    Examples:
        >>> evidence = post.log_evidence()
        >>> parts = evidence.log_likelihood - 0.5 * (evidence.scatter + evidence.log_determinant_ratio.value)
        >>> torch.allclose(evidence.value, parts)
        True
    """

    log_likelihood: Float[Tensor, ""] = field(kw_only=True)
    """The sum Σ_n log p(y_n | x_n, θ) in nats at the weights θ, times `power`."""
    scatter: Float[Tensor, ""] = field(kw_only=True)
    """The form (θ − m)ᵀA(θ − m) around the prior's mean m: twice the cost of θ under the prior, in nats."""
    log_determinant_ratio: Estimate = field(kw_only=True)
    """The difference log det P − log det A: twice the information about the weights in the data, in nats."""
    count: Callable[[], Estimate] = field(kw_only=True)
    theta: Float[Tensor, " D"] = field(kw_only=True)
    """The weights θ at which likelihood and scatter are evaluated."""
    mode: str = field(kw_only=True)
    """The kind of these weights: "map" for the network's own θ*, "linear" for the mode of its linear model."""
    power: float = field(kw_only=True)
    """The power 1/T of a tempered likelihood, the factor in `log_likelihood`."""

    @cached_property
    def effective_parameters(self) -> Estimate:
        """The number γ = tr(P⁻¹G), computed on first access: `post.effective_parameters` with the same tolerance."""
        return self.count()

    @property
    def estimate(self) -> Estimate:
        """The number with its error bar, without the parts."""
        return Estimate(**{field.name: getattr(self, field.name) for field in fields(Estimate)})

    def __add__(self, constant: float | Tensor) -> Estimate:
        return self.estimate + constant

    def __mul__(self, factor: float) -> Estimate:
        return self.estimate * factor

    __radd__ = __add__
    __rmul__ = __mul__

    def _tables(self) -> list[Table]:
        ratio = self.log_determinant_ratio
        parts = [
            ("log evidence", self.number),
            ("log likelihood", f"{float(self.log_likelihood):.6g}"),
            ("scatter", f"{float(self.scatter):.6g}"),
            ("log determinant ratio", ratio.number),
        ]
        return [Table(("", "nats"), parts, [f"At the weights of mode={self.mode!r}; {self.reason.name}."])]

    def __repr__(self) -> str:
        whole = super().__repr__().removeprefix("Estimate(").removesuffix(")")
        parts = (
            f"log_likelihood={float(self.log_likelihood):.6g}, scatter={float(self.scatter):.6g}, "
            f"log_determinant_ratio={float(self.log_determinant_ratio.value):.6g}, mode={self.mode!r}"
        ) + ("" if self.power == 1 else f", power={self.power:.6g}")
        return f"Evidence({whole}, {parts})"


def find_evidence(
    terms: PrecisionTerms,
    start: Float[Tensor, " D"] | None,
    rtol: float,
    generator: torch.Generator | None,
    mode: str,
    many: bool = False,
) -> Evidence:
    """Compute the log evidence with its parts; the search for the linear model's mode starts at `start`.

    `many` evidences of one curvature, under different priors, are worth a spectrum that serves them all.
    """
    cache, theta = terms.cache, terms.lin.theta
    cache.require_gradients()
    if cache.scaled_with_graph and torch.is_grad_enabled():  # the power of the likelihood is a number
        raise ValueError("the log evidence has no gradient for the factor of the curvature: detach it.")
    if mode == "map":  # rejects unknown data before products are spent
        log_likelihood, reason = cache.log_likelihood(), None
    else:
        linear_mode = find_mode(terms, start)
        theta, log_likelihood = linear_mode.theta, linear_log_likelihood(cache, linear_mode.theta)
        reason = None if linear_mode.converged else linear_mode.reason
    ratio = log_ratio(terms, rtol, generator, many)
    ratio = ratio if reason is None else replace(ratio, reason=reason)
    count = partial(count_parameters, terms, rtol, generator)
    return add_up(log_likelihood, terms.prior.quadratic(theta), ratio, count, theta, mode, cache.power)


def add_up(
    log_likelihood: Tensor,
    scatter: Tensor,
    ratio: Estimate,
    count: Callable[[], Estimate],
    theta: Float[Tensor, " D"],
    mode: str,
    power: float = 1.0,
) -> Evidence:
    """Return the evidence as the sum of its parts."""
    return Evidence(
        **vars(ratio * -0.5 + (log_likelihood - 0.5 * scatter)),
        log_likelihood=log_likelihood,
        scatter=scatter,
        log_determinant_ratio=ratio,
        count=count,
        theta=theta,
        mode=mode,
        power=power,
    )


def log_ratio(
    terms: PrecisionTerms, rtol: float, generator: torch.Generator | None = None, many: bool = False
) -> Estimate:
    """Compute log det(G + A) − log det A in nats, with its gradients in A and in the tensors inside G."""
    with naming_the_ggn(terms.curvature):
        if terms.A is not None:
            return _ratio_above(terms, terms.A, rtol, generator, many)
        try:  # rtol applies to each determinant
            reference = _logdet_of(terms.prior.precision, rtol, generator)
        except NotPositiveSemidefiniteError as error:
            raise ValueError("the prior operator is singular: use prior.add_diagonal(1e-3).") from error
        return add_estimates(_logdet_of(terms.precision, rtol, generator), reference * -1.0)


def log_determinant(terms: PrecisionTerms, rtol: float, generator: torch.Generator | None = None) -> Estimate:
    """Compute log det(G + A) in nats, with its gradients in A and in the tensors inside G."""
    if terms.A is not None:
        return log_ratio(terms, rtol, generator) + _log_diagonal(terms, terms.A)
    with naming_the_ggn(terms.curvature):
        return _logdet_of(terms.precision, rtol, generator)


def _ratio_above(
    terms: PrecisionTerms, A: Tensor, rtol: float, generator: torch.Generator | None, many: bool
) -> Estimate:
    cache, P, reference = terms.cache, terms.precision, _log_diagonal(terms, A)
    if (form := terms.closed_form) is not None:
        return form.logdet_estimate(rtol) + (-reference)
    system, route = _route(terms, rtol)
    if route == "formed kernel":
        return kernel_of(terms).log_ratio(float(A), rtol, many)
    if route == "quadrature":
        return cache.peek("quadrature")[2].logdet(float(A))
    if route == "probes":
        most = routes.products_of_probes(system.rows)
        estimate = logdet(P, rtol=rtol, max_matvecs=most, generator=generator)
        if not (_failed(estimate) and routes.decomposes(system)):
            return estimate + (-reference)
    return _ratio_from(decompose(cache), A, P, rtol)


def _route(terms: PrecisionTerms, rtol: float) -> tuple[routes.System, str]:
    """Return the facts under a prior that is a number or a vector, and the route that follows from them."""
    A = terms.A
    assert A is not None
    system, quadrature = posterior_system(terms, whole=False), terms.cache.peek("quadrature")
    assert system.posterior is not None
    prepared = quadrature is not None and not A.ndim and float(A.detach()) >= quadrature[0] and rtol >= quadrature[1]
    system = replace(system, posterior=replace(system.posterior, prepared=prepared))
    first = routes.chosen(routes.determinants(system))
    assert first is not None  # probes work for every matrix
    return system, first.name


def _failed(estimate: Estimate) -> bool:
    """Return whether probes ended before the tolerance although as many products as rows give the exact value."""
    return estimate.reason in (Reason.MATVEC_LIMIT, Reason.RANK_CAPPED)


def _log_diagonal(terms: PrecisionTerms, A: Tensor) -> Tensor:
    return A.double().log().expand(len(terms.lin.theta)).sum()


def _ratio_from(spectrum: DenseSpectrum, A: Tensor, precision: Damped, rtol: float) -> Estimate:
    """Compute log det(G + A) − log det A with its gradient; P's own shift exceeds A if G itself is damped."""
    unit = torch.eye(len(spectrum.values), dtype=precision.dtype, device=precision.device)
    reference = A.double().log().expand(len(unit)).sum()
    if A.ndim:
        estimate, inverse = spectrum.plus_diagonal(A.detach(), rtol)
        pairs = [(inverse.to(unit), unit)]
        return attach_gradient(estimate + reference.detach(), precision, lambda _: pairs) + (-reference)
    shift = float(A.detach())
    estimate = spectrum.logdet(shift, rtol)
    return attach_gradient(estimate, precision, lambda _: [(spectrum.inverse(shift, unit.dtype), unit)]) + (-reference)


def _logdet_of(operator: Any, rtol: float, generator: torch.Generator | None) -> Estimate:
    size = operator.shape[-1]
    exact = size <= routes.MOST_DECOMPOSED
    options: dict[str, Any] = {"max_matvecs": size if exact else routes.MOST_MATVECS, "generator": generator}
    if not exact and not (isinstance(operator, Damped) and operator.shifted_form()):
        options["lower_bound"] = "estimate"
    return logdet(operator, rtol=rtol, **options)


def count_parameters(terms: PrecisionTerms, rtol: float, generator: torch.Generator | None = None) -> Estimate:
    """Compute tr(G (G + A)⁻¹) = D − Σ_d A_dd (P⁻¹)_dd, with gradients if G + A has a closed form."""
    terms.cache.require_gradients()
    form, A = terms.closed_form, terms.A
    if form is not None and A is not None:
        shares, error = _shares(form, A)
        return Estimate.rounded(shares.sum(), error.sum(), rtol)
    if carries_graph(terms.precision.representation()):
        raise ValueError("the effective number of parameters has no gradient here: call it under torch.no_grad().")
    with naming_the_ggn(terms.curvature), torch.no_grad():
        if A is None:
            return _count_beside(terms, rtol, generator)
        return _count_above(terms, A, rtol, generator)


def _count_above(terms: PrecisionTerms, A: Tensor, rtol: float, generator: torch.Generator | None) -> Estimate:
    cache = terms.cache
    system, route = _route(terms, rtol)
    if route == "formed kernel":
        return kernel_of(terms).spectrum.effective_dimension(float(A.detach()), rtol)
    if route == "quadrature":
        return cache.peek("quadrature")[2].effective_dimension(float(A.detach()))
    if route == "probes":
        most = routes.products_of_probes(system.rows)
        estimate = effective_dimension(cache.curvature, A, rtol=rtol, max_matvecs=most, generator=generator)
        if not (_failed(estimate) and routes.decomposes(system)):
            return estimate
    if A.ndim == 0:
        return decompose(cache).effective_dimension(float(A.detach()), rtol)
    estimate, inverse = decompose(cache).plus_diagonal(A.detach(), rtol)
    shares = 1 - A.detach().double() * inverse.diagonal()
    # δ tr P⁻¹ also bounds the change of γ, since tr P⁻¹AP⁻¹ is no more than tr P⁻¹.
    return Estimate.rounded(shares.sum(), estimate.bias_bound, rtol, estimate.matvecs)


def _count_beside(terms: PrecisionTerms, rtol: float, generator: torch.Generator | None) -> Estimate:
    """Compute tr(G (G + A)⁻¹) under an operator A: densely if G may be decomposed, otherwise by probes."""
    if len(terms.lin.theta) <= routes.MOST_DECOMPOSED:
        spectrum = decompose(terms.cache)
        G = spectrum.semidefinite_part()
        if terms.sum.error is None:
            P = G + terms.prior.precision.to_dense().double()
        else:  # the stored sum is a different matrix
            P = terms.precision.to_dense().double()
        definite_logdet(P)  # rejects an indefinite one by name
        factor = torch.linalg.cholesky(P)
        count = torch.cholesky_solve(G, factor).trace()
        error = spectrum.trace_error(torch.cholesky_inverse(factor), count)
        return Estimate.rounded(count, error, rtol, 2 * len(G))
    shares = terms.precision.inverse() @ terms.curvature
    return trace(shares, method="hutchinson", rtol=rtol, max_matvecs=routes.MOST_SOLVES, generator=generator)


def shares_of_weights(terms: PrecisionTerms, rtol: float, generator: torch.Generator | None = None) -> Estimate | None:
    """Compute 1 − A_dd (P⁻¹)_dd of each weight (D,), or their sum under a scalar A; together they are tr(P⁻¹G).

    Returns None if probes would be needed for this A alone, or A is an operator.
    """
    cache, A = terms.cache, terms.A
    if A is None:
        return None
    with naming_the_ggn(terms.curvature), torch.no_grad():
        if terms.closed_form is not None:
            return Estimate.rounded(*_shares(terms.closed_form, A), rtol)
        if A.ndim == 0:
            prepare(cache, float(A), rtol, generator)
            return _count_above(terms, A, rtol, generator)
        if _route(terms, rtol)[1] != "spectrum":
            return None
        estimate, inverse = decompose(cache).plus_diagonal(A, rtol)
        # P⁻¹ − (P + E)⁻¹ = P⁻¹E(P + E)⁻¹ with ‖E‖ ≤ δ and P + E ≥ A; `found` has δ tr P⁻¹.
        delta, A = estimate.bias_bound / inverse.trace(), A.double()
        error = (delta * (A / A.min()).sqrt() * inverse.square().sum(0).sqrt()).clamp_max(1)
        return Estimate.rounded(1 - A * inverse.diagonal(), error, rtol, estimate.matvecs)


def normal_mode(terms: PrecisionTerms) -> Float[Tensor, " D"] | None:
    """Find the linear model's mode by the normal equations; return None unless the curvature is its whole Hessian.

    This is the case for the GGN of a Gaussian likelihood, which is the linear model's Hessian everywhere.
    """
    cache, curvature, A = terms.cache, terms.curvature, terms.A
    if not isinstance(curvature, GGN) or curvature.arguments != {} or A is None or isinstance(cache.data, str):
        return None
    if not all(isinstance(lin.likelihood, Gaussian) for lin in cache.data):
        return None
    with torch.no_grad():
        theta = cache.lin.theta
        by_weight = PrecisionTerms(cache, replace(terms.prior, precision=A.expand_as(theta)))
        if _route(by_weight, 1.0)[1] != "spectrum":
            return None
        _, inverse = decompose(cache).plus_diagonal(A.expand_as(theta), 1.0)
        gradient = cache.gradient()
        assert gradient is not None
        return theta - (inverse @ (gradient + terms.prior.gradient(theta)).double()).to(theta)


def prepare(cache: CurvatureCache, smallest: float, rtol: float, generator: torch.Generator | None = None) -> None:
    """Spend the products that every scalar prior precision from `smallest` upwards needs; none for a closed form."""
    theta = cache.lin.theta
    terms = PrecisionTerms(cache, Prior(theta.new_tensor(smallest), theta.new_zeros(())))
    with cache.lock, naming_the_ggn(cache.curvature):
        with torch.no_grad():
            system, route = _route(terms, rtol)
        if route != "probes":
            return
        most = routes.products_of_probes(system.rows)
        quadrature = spectral_quadrature(
            cache.curvature, shift=smallest, rtol=rtol, max_matvecs=most, generator=generator
        )
        if _failed(quadrature.logdet(smallest)) and routes.decomposes(system):
            decompose(cache)
        else:
            cache.put("quadrature", (smallest, rtol, quadrature))


@torch.no_grad()
def decompose(cache: CurvatureCache) -> DenseSpectrum:
    """Compute all eigenvalues and eigenvectors of G, from the matrix that was formed for solves if there is one.

    A sum of squares of rows is added up in float64: with products in single precision, eigenvalues below 1e-7 of the
    largest would be rounding.
    """
    A, formed = cache.curvature, cache.peek("formed")

    def compute() -> DenseSpectrum:
        saved = current().whole.step("spectrum", A.device)
        if saved.done:
            return saved.result(DenseSpectrum)
        at_hand = formed is not None and formed.base is A
        if sums_rows(A):
            dense = formed.formed() if at_hand else principal_block(A, torch.arange(A.shape[-1], device=A.device))
            spectrum = decomposed(dense, 0.0, torch.finfo(dense.dtype).eps, torch.finfo(A.dtype).eps)
        else:
            multiply = (lambda _: formed.formed()) if at_hand else product(A)
            spectrum = dense_spectrum(multiply, describe_square(A), 0.0)
        saved.finish(spectrum)
        keep(A, spectrum, spectrum.vectors.nbytes)
        return spectrum

    return cache.get("spectrum", compute)


def _shares(form: ClosedForm, prior: Tensor) -> tuple[Float[Tensor, " D"], Float[Tensor, " D"]]:
    """Return 1 − A_dd (P⁻¹)_dd, each a difference from 1 in P's dtype, and a bound on the effect of rounding."""
    left = (prior * form.inverse_diagonal()).double()
    # An entry of A P⁻¹ by a closed form has an error of at most four units of rounding.
    rounding = 4 * (torch.finfo(prior.dtype).eps * left.detach() + torch.finfo(left.dtype).eps)
    return 1 - left, (prior.detach() * form.inverse_diagonal_error() + rounding).clamp_max(1)


class Ending(Enum):
    """The reason why a tuning stopped; the value is the remedy, in plain sentences."""

    CONVERGED = "Converged: a further step would change less than the tolerance. Nothing needs to be done."
    WITHIN_ERROR = (
        "Converged: further steps would change less than the error bar of these samples. For a smaller error bar use "
        "more samples."
    )
    STEPS_SPENT = (
        "The steps were spent before the hyperparameters stopped changing. Continue from the returned posterior, or "
        "raise steps."
    )


@dataclass(frozen=True, eq=False, repr=False)
class TuningStep(Summarised):
    """One step of a tuning: the hyperparameters before it, the effective parameters at them, and its cost.

    Tensors have an entry for each group of weights with its own precision. If every single weight is a group, they
    have one entry: the geometric mean of the precisions and the sum of the counts.

    Examples:
        >>> tuning = co.evidence.maximize(post, "layers", steps=50).tuning
        >>> tuning.steps[0].prior_precision
        tensor([1., 1.], dtype=torch.float64)
    """

    prior_precision: Float[Tensor, " G"]
    effective_parameters: Float[Tensor, " G"]
    stderr: Float[Tensor, " G"]
    """Standard errors of the effective parameters, from the samples or probes; 0 if these are exact."""
    noise: float | Float[Tensor, " K"] | None
    """The variance of a Gaussian likelihood, if it is tuned; a tensor if there are several."""
    matvecs: int
    """The number of products with P that the step took."""


@dataclass(frozen=True, eq=False, repr=False)
class Tuning(Tabular):
    """The steps of `co.evidence.mackay` or `maximize`, as `post.tuning` of the posterior that they return.

    Examples:
        >>> tuning = co.evidence.maximize(post, "layers", steps=50).tuning
        >>> tuning.groups, tuning.converged
        (('0', '2'), True)
    """

    method: str
    groups: tuple[str, ...]
    """The groups of weights with their own precision: layers, or "all"; "weights" if each weight has its own."""
    mode: str
    """Whether the weights stayed ("map") or moved to the linear model's mode with each step ("linear")."""
    steps: tuple[TuningStep, ...]
    ending: Ending
    oscillated: bool = False
    """Whether MacKay's update oscillated, so that its steps were halved."""
    targets: float | None = None
    """How many values a single noise was estimated from (for weighted points the sum of weights), if it was tuned."""

    @property
    def converged(self) -> bool:
        """Whether further steps would change less than the tolerance or the error bar."""
        return self.ending in (Ending.CONVERGED, Ending.WITHIN_ERROR)

    @property
    def matvecs(self) -> int:
        """The total number of products with P."""
        return sum(step.matvecs for step in self.steps)

    def prior_interval(self, level: float = 0.95) -> tuple[Float[Tensor, " G"], Float[Tensor, " G"]]:
        """Return the interval of each precision: γ directions determine it as γ draws determine a variance (χ²).

        It belongs to the last step and does not include the sampling error of γ. It warns with `MaxStepsWarning` if the
        tuning has not converged: the interval is then not around the optimum.

        Args:
            level: the probability of the interval.

        Returns:
            The lower and the upper ends, one for each precision.

        Raises:
            ValueError: the level is outside (0, 1).
        """
        self._warn_of_intervals()
        last = self.steps[-1]
        low, high = _chi_squared(last.effective_parameters, level)
        return last.prior_precision * low, last.prior_precision * high

    def noise_interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return the interval of the noise, from the M − γ degrees of freedom that the weights leave in M targets.

        It warns as `prior_interval` does.

        Args:
            level: the probability of the interval.

        Returns:
            The lower and the upper end.

        Raises:
            ValueError: the level is outside (0, 1), or no single noise was tuned.
        """
        self._warn_of_intervals()
        last = self.steps[-1]
        if last.noise is None or isinstance(last.noise, Tensor) or self.targets is None:
            raise ValueError("no single noise was tuned: see mackay(post, tune_noise=True), maximize(post, 'noise').")
        low, high = _chi_squared(self.targets - last.effective_parameters.sum(), level)
        return last.noise / float(high), last.noise / float(low)

    __repr__ = Tabular.as_text

    def _tables(self) -> list[Table]:
        of_steps = {
            "prior precision": [summary(step.prior_precision) for step in self.steps],
            "effective parameters": [summary(step.effective_parameters) for step in self.steps],
            "noise": ["" if step.noise is None else summary(step.noise) for step in self.steps],
            "products": [f"{step.matvecs:,}" for step in self.steps],
        }
        return [by_columns_of(of_steps, [f"{self.method}, {self.ending.name}: {self.ending.value}"])]

    def warn_of_ending(self, what: str) -> None:
        """Warn with `MaxStepsWarning` unless the tuning converged; `what` begins the message."""
        if self.converged:
            return
        faster = " update='mackay' needs fewer than update='em'." if self.method == "em" else ""
        warn(f"{what}{self.ending.value}{faster}", MaxStepsWarning)

    def _warn_of_intervals(self) -> None:
        self.warn_of_ending("the interval is around values at which the tuning has not converged. ")


@dataclass(frozen=True, eq=False, repr=False)
class Validation(Tabular):
    """The values that `co.evidence.validate` tried, in order, as `post.tuning` of the posterior that it returns.

    Examples:
        >>> validation = co.evidence.validate(post, x + 0.1, y, prior_precisions=[0.5, 1.0, 2.0]).tuning
        >>> validation.prior_precisions, len(validation.scores)
        ((0.5, 1.0, 2.0), 3)
    """

    prior_precisions: tuple[float, ...]
    """The prior precisions: the geometric mean of a vector's entries, NaN for an operator."""
    noises: tuple[float, ...] | None
    """The variance of a Gaussian likelihood, the mean of several; None for other likelihoods."""
    scores: tuple[float, ...]
    """Mean held-out log-likelihood per point (or pair), in nats."""
    stderrs: tuple[float, ...]
    """Standard errors of the scores from the posterior's draws alone; those from the held-out sample are larger."""

    __repr__ = Tabular.as_text

    def _tables(self) -> list[Table]:
        noises = {} if self.noises is None else {"noise": list(map(summary, self.noises))}
        precisions, scores = ([*map(summary, numbers)] for numbers in (self.prior_precisions, self.scores))
        return [by_columns_of({"prior precision": precisions, **noises, "held-out log-likelihood per point": scores})]


def _chi_squared(freedom: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Return the quantiles of χ² for its degrees of freedom that enclose the level."""
    from scipy.special import chdtri  # a slow import that few calls need

    check_options(level=level)
    tail, degrees = (1 - level) / 2, freedom.detach().double().cpu().clamp_min(1e-3)
    low, high = (degrees.new_tensor(chdtri(degrees.numpy(), q)) / degrees for q in (1 - tail, tail))
    return low.to(freedom.device), high.to(freedom.device)
