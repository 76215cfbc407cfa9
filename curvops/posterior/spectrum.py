"""The spectrum of a posterior's curvature: what determinants and counts need, once for every prior precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg import (
    Damped,
    Estimate,
    SpectralQuadrature,
    effective_dimension,
    lanczos,
    spectral_quadrature,
    trace,
)
from curvops.linalg.core.cache import recorded
from curvops.linalg.core.results import NotPositiveSemidefinite, Reason, added
from curvops.linalg.core.vectors import describe_square, product
from curvops.linalg.estimators.brackets import single
from curvops.linalg.estimators.carried_gradients import carried
from curvops.linalg.estimators.dense_spectrum import DenseSpectrum, definite_logdet, dense_spectrum
from curvops.linalg.estimators.sampler import ROUNDING_UNITS
from curvops.linalg.operators.algebra import is_psd
from curvops.linalg.operators.closed_form import ClosedForm
from curvops.network.likelihoods import Gaussian
from curvops.operators import GGN
from curvops.operators.curvatures.formed import Formed
from curvops.posterior.formed_kernel import MOST_GRADIENTS, FormedKernel, fits
from curvops.posterior.likelihood_terms import LikelihoodTerms
from curvops.posterior.priors import Prior
from curvops.records import from_record

# An evidence is worth no more products: past them the error bar is what it is, and the estimate's reason says so.
MOST_MATVECS = 4000
# Up to so many weights the curvature is formed and decomposed: a log-determinant by probes takes 300 to 500 products
# for one prior precision, the whole spectrum D for all of them, and is exact.
WHOLE = 1024
# Solves that the effective dimension under a large prior operator may take, one for each probe.
MOST_SOLVES = 200
SHARE_ROUNDINGS = 4
"""Units of rounding that an entry of A P⁻¹ by a closed form is off by, relative to itself."""
# Products spent on looking for a negative eigenvalue of a curvature that does not vouch for having none.
LOOKED_AT = 20
USE_THE_GGN = "use the GGN (co.GGN), which has no negative eigenvalue."


@dataclass(eq=False)
class Findings:
    """What a `Spectrum` has computed so far, in this era of the likelihood."""

    era: object
    whole: DenseSpectrum | None = None
    range: tuple[float, float, SpectralQuadrature] | None = None
    lowest: tuple[float, Tensor] | None = None
    formed: Formed | None = None
    kernel: FormedKernel | None = None


class Spectrum:
    """What is known of the spectrum of a curvature, each when first asked for.

    log det(I + A^-½ G A^-½) and tr G(G + A)⁻¹ come, in this order, from

    - the closed form of G + A, where there is one (as `(G + A).logdet()` does);
    - all eigenvalues and eigenvectors of G, up to `WHOLE` weights (for a scalar A up to `MOST_MATVECS` where probes did
      not reach the tolerance with half as many products as there are weights), kept for every further A;
    - for a scalar A those that are not zero, in function space, where outputs are few in all (`FormedKernel`);
    - a quadrature that serves every λ from the smallest on, where a whole range was prepared for;
    - probes at this A alone, preconditioned: the cheapest for one.

    Under an operator A the determinants of G + A and of A are found one by one: by their closed forms, exactly up to
    `WHOLE` weights, else by probes.
    """

    def __init__(self, terms: LikelihoodTerms) -> None:
        self.terms = terms
        self._lin, self._curvature = terms.lin, terms.curvature
        self._kept = Findings(terms.era())

    @property
    def _found(self) -> Findings:
        """What was computed, forgotten where the likelihood's hyperparameters have changed since (in place)."""
        with self.terms.lock:
            era = self.terms.era()
            if self._kept.era is not era:
                kernel = self._kept.kernel
                self._kept = Findings(era, kernel=None if kernel is None else kernel.under_another_likelihood())
            return self._kept

    def require_usable(self, prior: Prior) -> None:
        """Raise ValueError where G and A do not add up, NotPositiveSemidefinite where G + A is seen to be indefinite.

        A G known to be psd costs nothing.
        Any other costs `LOOKED_AT` products, once for all priors: a Ritz value θ of G with its vector v proves G + A
        indefinite where θ + vᵀAv ≤ 0. Passing proves nothing; what then solves with an indefinite G + A raises.
        """
        prior.plus(self._curvature)
        if is_psd(self._curvature):
            return
        lowest, vector = self._least_ritz()
        with torch.no_grad():
            if lowest + float(vector @ prior.product(vector)) > 0:
                return
        size = "" if prior.diagonal is None else f", the prior precision is {float(prior.diagonal.detach().min()):.3g}"
        raise NotPositiveSemidefinite(
            f"{type(self._curvature).__name__} + prior is indefinite, so there is no Gaussian with that precision: "
            f"the curvature has an eigenvalue of {lowest:.3g} or less{size}. Give a prior_precision of "
            f"{-1.01 * lowest:.3g} or more, or {USE_THE_GGN}"
        )

    @contextmanager
    def _naming_the_ggn(self) -> Iterator[None]:
        """linalg knows no networks: to its error about an indefinite curvature, add the one that is not indefinite."""
        try:
            yield
        except NotPositiveSemidefinite as error:
            if is_psd(self._curvature):
                raise
            name = type(self._curvature).__name__
            raise NotPositiveSemidefinite(f"{name}: {error} For a network, {USE_THE_GGN}") from error

    def _least_ritz(self) -> tuple[float, Float[Tensor, " D"]]:
        """The least Ritz value of G from a short Lanczos run, and its vector."""
        with self.terms.lock:
            kept = self._found
            if kept.lowest is None:
                generator = torch.Generator(device=self._lin.theta.device).manual_seed(0)  # the user's stays as it is
                with torch.no_grad():
                    found = lanczos(self._curvature, LOOKED_AT, generator=generator)
                if found.reason in (Reason.NON_FINITE, Reason.NOT_SYMMETRIC):
                    raise ValueError(f"{type(self._curvature).__name__}: {found.reason.value}")
                values, vectors = torch.linalg.eigh(found.T)
                kept.lowest = float(values[0]), found.Q @ vectors[:, 0].to(found.Q)
            return kept.lowest

    def formed_kernel(self, prior: Tensor | None, most_gradients: float = MOST_GRADIENTS) -> FormedKernel | None:
        """That of the training points, where the prior is scalar and it costs no more than so many gradients.

        It does not depend on what was asked before, so that equal seeds go on to make equal draws. A run with a
        checkpoint keeps J Jᵀ.
        """
        if prior is None or prior.ndim or not fits(self._curvature, self._lin, most_gradients):
            return None
        with self.terms.lock:
            found = self._found
            found.kernel = found.kernel or FormedKernel(self._lin)
            found.kernel.keep()
            return found.kernel

    def formed(self, base: LinearOperator) -> Formed | None:
        """G, or its undamped part, as the matrix that a first solve forms; None where memory has no room for it."""
        with self.terms.lock:
            found = self._found
            if found.formed is None or found.formed.base is not base:
                if Formed.bytes_for(len(self._lin.theta)) > self._lin.memory.room():
                    return None
                found.formed = Formed(base)
            return found.formed

    def logdet(self, prior: Prior, rtol: float, generator: torch.Generator | None = None) -> Estimate:
        """log det(G + A) − log det A in nats, with its gradients in A and in the tensors inside G."""
        with self._naming_the_ggn():
            if prior.diagonal is None:
                return self._logdet_beside(prior, rtol, generator)
            return self._logdet_above(prior.plus(self._curvature), prior.diagonal, rtol, generator)

    def log_determinant(self, prior: Prior, rtol: float, generator: torch.Generator | None = None) -> Estimate:
        """log det(G + A) in nats, likewise."""
        if prior.diagonal is not None:
            return self.logdet(prior, rtol, generator) + self._log_diagonal(prior.diagonal)
        with self._naming_the_ggn():
            return self._logdet_of(prior.plus(self._curvature), rtol, generator)

    def _log_diagonal(self, prior: Tensor) -> Tensor:
        return prior.double().log().expand(len(self._lin.theta)).sum()

    def _logdet_above(self, precision: Any, prior: Tensor, rtol: float, generator: torch.Generator | None) -> Estimate:
        reference = self._log_diagonal(prior)
        if precision._closed_form() is None:  # what is kept for other priors comes first
            spectrum = self._whole_spectrum(prior)
            if spectrum is not None and prior.ndim:
                return self._beside_whole(spectrum, prior, precision, rtol)
            if spectrum is not None:
                return self._from_whole(spectrum, prior, precision, rtol) + (-reference)
            if not recorded(precision.representation()):
                if (kernel := self.formed_kernel(prior)) is not None:
                    return kernel.log_ratio(float(prior), rtol)
                if (known := self._prepared(prior, rtol)) is not None:
                    return known.logdet(float(prior))
        found = precision._logdet_estimate(rtol=rtol, max_matvecs=self._budget(prior), generator=generator)
        if self._may_be_whole(found, prior):
            return self._from_whole(self._decomposed(), prior, precision, rtol) + (-reference)
        return found + (-reference)

    def _logdet_beside(self, prior: Prior, rtol: float, generator: torch.Generator | None) -> Estimate:
        """The same under an operator A; rtol is that of each determinant."""
        try:
            reference = self._logdet_of(prior.precision, rtol, generator)
        except NotPositiveSemidefinite as error:
            raise ValueError(
                "the prior operator is singular, so that the prior is improper and there is no evidence: add a number "
                "to its diagonal, prior.add_diagonal(1e-3)."
            ) from error
        return added(self._logdet_of(prior.plus(self._curvature), rtol, generator), reference * -1.0)

    def _logdet_of(self, operator: Any, rtol: float, generator: torch.Generator | None) -> Estimate:
        size = len(self._lin.theta)
        options: dict[str, Any] = {"max_matvecs": size if size <= WHOLE else MOST_MATVECS, "generator": generator}
        if size > WHOLE and not (isinstance(operator, Damped) and operator.shifted_form()):
            options["lower_bound"] = "estimate"
        found: Estimate = operator._logdet_estimate(rtol=rtol, **options)
        return found

    def effective_dimension(self, prior: Prior, rtol: float, generator: torch.Generator | None = None) -> Estimate:
        """tr(G (G + A)⁻¹) = D − Σ_d A_dd (P⁻¹)_dd; it has gradients where G + A has a closed form."""
        precision = prior.plus(self._curvature)
        form = precision._closed_form()
        if form is not None and prior.diagonal is not None:
            shares, error = _shares(form, prior.diagonal)
            return Estimate.rounded(shares.sum(), error.sum(), rtol)
        if recorded(precision.representation()):
            raise ValueError(
                "the effective number of parameters has no gradient for a curvature without a closed form: detach the "
                "prior precision and the likelihood's hyperparameters, or call it under torch.no_grad()."
            )
        with self._naming_the_ggn(), torch.no_grad():
            if prior.diagonal is None:
                return self._dimension_beside(prior, rtol, generator)
            return self._dimension_above(prior.diagonal, rtol, generator)

    def normal_mode(self, prior: Prior) -> Float[Tensor, " D"] | None:
        """The linear model's mode from the normal equations; None unless the curvature is known whole and is its own.

        That is the GGN of a Gaussian likelihood, which is the linear model's Hessian everywhere.
        """
        curvature, A = self._curvature, prior.diagonal
        if not isinstance(curvature, GGN) or curvature.asked != {} or A is None or isinstance(self.terms.data, str):
            return None
        if not all(isinstance(lin.likelihood, Gaussian) for lin in self.terms.data):
            return None
        with torch.no_grad():
            theta, spectrum = self._lin.theta, self._whole_spectrum(A.expand_as(self._lin.theta))
            if spectrum is None:
                return None
            _, inverse = spectrum.beside(A.expand_as(theta), 1.0)
            gradient = self.terms.gradient()
            assert gradient is not None
            return theta - (inverse @ (gradient + prior.gradient(theta)).double()).to(theta)

    def shares(self, prior: Prior, rtol: float, generator: torch.Generator | None = None) -> Estimate | None:
        """1 − A_dd (P⁻¹)_dd, which adds up to tr(P⁻¹G): of each weight (D,), or under a scalar A their sum.

        None where probes would be needed for this A alone, or A is an operator.
        """
        A = prior.diagonal
        if A is None:
            return None
        precision = prior.plus(self._curvature)
        form = precision._closed_form()
        with self._naming_the_ggn(), torch.no_grad():
            if form is not None:
                return Estimate.rounded(*_shares(form, A), rtol)
            if A.ndim == 0:
                self.prepare(float(A), rtol, generator)
                return self._dimension_above(A, rtol, generator)
            spectrum = self._whole_spectrum(A)
            if spectrum is None:
                return None
            found, inverse = spectrum.beside(A, rtol)
            # P⁻¹ − (P + E)⁻¹ = P⁻¹E(P + E)⁻¹ with ‖E‖ ≤ δ and P + E ≥ A; `found` has δ tr P⁻¹.
            delta, A = found.bias_bound / inverse.trace(), A.double()
            error = (delta * (A / A.min()).sqrt() * inverse.square().sum(0).sqrt()).clamp_max(1)
            return Estimate.rounded(1 - A * inverse.diagonal(), error, rtol, found.matvecs)

    def _dimension_above(self, prior: Tensor, rtol: float, generator: torch.Generator | None) -> Estimate:
        spectrum = self._whole_spectrum(prior)
        if spectrum is not None and prior.ndim:
            found, inverse = spectrum.beside(prior.detach(), rtol)
            shares = 1 - prior.detach().double() * inverse.diagonal()
            # δ tr P⁻¹ bounds the change of γ as well, since tr P⁻¹AP⁻¹ is no more than tr P⁻¹.
            return Estimate.rounded(shares.sum(), found.bias_bound, rtol, found.matvecs)
        if spectrum is not None:
            return spectrum.effective_dimension(float(prior.detach()), rtol)
        if (kernel := self.formed_kernel(prior)) is not None:
            return kernel.spectrum.effective_dimension(float(prior.detach()), rtol)
        if (known := self._prepared(prior, rtol)) is not None:
            return known.effective_dimension(float(prior.detach()))
        found = effective_dimension(
            self._curvature, prior, rtol=rtol, max_matvecs=self._budget(prior), generator=generator
        )
        if self._may_be_whole(found, prior):
            return self._decomposed().effective_dimension(float(prior.detach()), rtol)
        return found

    def _dimension_beside(self, prior: Prior, rtol: float, generator: torch.Generator | None) -> Estimate:
        """The same under an operator A: dense up to `WHOLE` weights, else by a solve for each probe."""
        if len(self._lin.theta) <= WHOLE:
            known = self._decomposed()
            G = known.semidefinite()
            if prior.error_of_sum(self._curvature) is None:
                P = G + prior.precision.to_dense().double()
            else:  # the sum kept is another
                P = prior.plus(self._curvature).to_dense().double()
            definite_logdet(P)  # refuses an indefinite one by name
            factor = torch.linalg.cholesky(P)
            error = ROUNDING_UNITS * known.eps * known.values.abs().amax() * torch.cholesky_inverse(factor).trace()
            return Estimate.rounded(torch.cholesky_solve(G, factor).trace(), error, rtol, 2 * len(G))
        shares = prior.plus(self._curvature).inverse() @ self._curvature
        return trace(shares, method="hutchinson", rtol=rtol, max_matvecs=MOST_SOLVES, generator=generator)

    def prepare(self, smallest: float, rtol: float, generator: torch.Generator | None = None) -> None:
        """Spend the products that serve every scalar prior precision from `smallest` on; none for a closed form."""
        prior = self._lin.theta.new_tensor(smallest)
        if self.formed_kernel(prior) is not None:
            return
        if self._curvature.add_diagonal(prior)._closed_form() is not None or self._whole_spectrum(prior) is not None:
            return
        with self.terms.lock, self._naming_the_ggn():
            known = self._found.range
            if known is None or smallest < known[0] or rtol < known[1]:
                found = spectral_quadrature(
                    self._curvature, shift=smallest, rtol=rtol, max_matvecs=self._budget(prior), generator=generator
                )
                if self._may_be_whole(found.logdet(smallest), prior):
                    self._decomposed()
                else:
                    self._found.range = smallest, rtol, found

    def _prepared(self, prior: Tensor, rtol: float) -> SpectralQuadrature | None:
        """The quadrature that was prepared, where it reaches this prior precision and tolerance."""
        with self.terms.lock:
            known = self._found.range
            if known is None or prior.ndim or float(prior.detach()) < known[0] or rtol < known[1]:
                return None
            return known[2]

    def _budget(self, prior: Tensor) -> int:
        """Products that probes may take: fewer than D where all eigenvalues come next."""
        size = len(self._lin.theta)
        return MOST_MATVECS if size > MOST_MATVECS else max(4, size // 2)

    def _may_be_whole(self, found: Estimate, prior: Tensor) -> bool:
        """Whether probes failed where D products give the exact value."""
        failed = found.reason in (Reason.MATVEC_LIMIT, Reason.RANK_CAPPED)
        return failed and prior.ndim == 0 and self._fits(MOST_MATVECS)

    def _whole_spectrum(self, prior: Tensor) -> DenseSpectrum | None:
        """All eigenvalues of G where they serve this prior and are known, or are the cheapest to find."""
        with self.terms.lock:
            return self._decomposed() if self._fits(WHOLE) else None if prior.ndim else self._found.whole

    def _fits(self, most: int) -> bool:
        size = len(self._lin.theta)
        return size <= most and 16 * size**2 <= self._lin.memory_budget

    def _decomposed(self) -> DenseSpectrum:
        with self.terms.lock:
            found = self._found
            if found.whole is None:
                with torch.no_grad():
                    A, formed = self._curvature, found.formed
                    known = formed.formed() if formed is not None and formed.base is A else None
                    multiply = product(A) if known is None else lambda _: known
                    found.whole = dense_spectrum(multiply, describe_square(A), 0.0)
            return found.whole

    def _from_whole(self, spectrum: DenseSpectrum, prior: Tensor, precision: Damped, rtol: float) -> Estimate:
        """log det(G + λ) with its gradient; P's own shift is more than λ where G is damped itself."""
        shift = float(prior.detach())
        found = single(spectrum.logdet([shift], rtol))
        unit, dtype = torch.eye(len(spectrum.values), dtype=precision.dtype, device=precision.device), precision.dtype
        return carried(found, precision, lambda _: [(spectrum.inverse(shift, dtype), unit)])

    def _beside_whole(self, spectrum: DenseSpectrum, prior: Tensor, precision: Damped, rtol: float) -> Estimate:
        """log det(G + A) − log det A for a vector A, with its gradient."""
        found, inverse = spectrum.beside(prior.detach(), rtol)
        reference = prior.double().log().sum()
        unit = torch.eye(len(prior), dtype=precision.dtype, device=precision.device)
        carried_too = carried(found + reference.detach(), precision, lambda _: [(inverse.to(unit), unit)])
        return carried_too + (-reference)

    def state(self) -> list[Any] | None:
        """The quadrature that was prepared, as plain values and tensors."""
        known = self._found.range
        return None if known is None else list(known)

    def recall(self, state: list[Any] | None) -> None:
        """Take the quadrature that was prepared for the same curvature."""
        if state is not None:
            smallest, rtol, record = state
            self._found.range = smallest, rtol, from_record(SpectralQuadrature, record)


def _shares(form: ClosedForm, prior: Tensor) -> tuple[Float[Tensor, " D"], Float[Tensor, " D"]]:
    """1 − A_dd (P⁻¹)_dd, each a difference from 1 in P's dtype, and the most by which rounding can have changed it."""
    left = (prior * form.inverse_diagonal()).double()
    own = SHARE_ROUNDINGS * (torch.finfo(prior.dtype).eps * left.detach() + torch.finfo(left.dtype).eps)
    return 1 - left, (prior.detach() * form.inverse_diagonal_error() + own).clamp_max(1)
