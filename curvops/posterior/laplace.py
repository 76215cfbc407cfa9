"""The linearised Laplace posterior: a Gaussian over the weights, with the curvature as its precision.

Immer, Korzepa & Bauer 2021 for the predictive of the linearised network; MacKay 1992 for the evidence.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg import Damped, Dense, Estimate, LowRank, draw
from curvops.linalg.core.limits import check_flag, check_generator
from curvops.network.likelihoods import Categorical, Sequences
from curvops.network.walks.passes import accumulate
from curvops.operators import GGN, Linearization
from curvops.posterior import links
from curvops.posterior.arguments import (
    check_accuracy,
    check_linearization,
    checked_count,
    checked_curvature,
    checked_draws,
    checked_prior,
)
from curvops.posterior.covariance import Blocks, PointCovariance
from curvops.posterior.spectrum import Spectrum

# Draws of the logits where link="mc" is given no samples.
LINK_DRAWS = 1000
# A gradient of the log posterior above this share of the prior's own is not a mode's.
MODE_TOLERANCE = 0.1


class NotAMode(UserWarning):
    """The weights are not a mode of the posterior."""


@dataclass(frozen=True, eq=False)
class Laplace:
    """N(θ*, P⁻¹) with P = G + A, made by `co.laplace`. Immutable: tuning returns a new posterior."""

    lin: Linearization
    curvature: LinearOperator
    prior_precision: Tensor
    spectrum: Spectrum = field(repr=False)

    @cached_property
    def precision(self) -> Damped:
        """P = G + A, (D, D)."""
        return self.curvature.add_diagonal(self.prior_precision)

    @property
    def mean(self) -> Float[Tensor, " D"]:
        """θ*, the weights of the linearisation."""
        return self.lin.theta

    @cached_property
    def mode_gap(self) -> float:
        """‖gradient of the log posterior‖ / ‖gradient of the log prior‖ at θ*: 0 at a mode. One gradient.

        NaN where it is not known which data the curvature is of (see `log_evidence`).
        """
        prior, data = self.prior_precision.detach() * self.mean, self.spectrum.gradient()
        if data is None:
            return math.nan
        gradient = (data + prior).norm()
        return 0.0 if gradient == 0 else float(gradient / prior.norm())

    def with_prior(self, prior_precision: float | Tensor) -> Laplace:
        """The posterior under another prior precision, sharing everything that does not depend on it."""
        prior = checked_prior(prior_precision, self.lin)
        self.spectrum.require_usable(prior)
        return dataclasses.replace(self, prior_precision=prior)

    def sample(self, k: int, generator: torch.Generator | None = None, rtol: float = 1e-3) -> Float[Tensor, "k D"]:
        """Draw k weight vectors from the posterior, θ* + P⁻¹ε with ε ~ N(0, P), by one block solve of k columns.

        Args:
            k: the number of draws, at least 1.
            generator: source of the draws. Where `lin.memory_budget` has no room for the working vectors of k columns
                they are solved for in groups, so that equal seeds give equal draws under equal budgets only.
            rtol: relative residual of each solve, far below the sampling error of k draws.

        Returns:
            The draws as rows, mean included. `lin.unflatten_weights(draw)` gives the tensors of one by name; weights
            outside a subnetwork keep their values.

        Raises:
            NotConverged: rtol was not reached.
            TypeError: k is not a whole number.
            ValueError: k is less than 1, or rtol not a positive number.
        """
        k = checked_count(k)
        check_accuracy(rtol, generator)
        self.spectrum.require_gradients()
        memories = frozenset((self.lin.memory,))
        return accumulate(draw(self.precision.inverse(rtol), k, generator, memories).mT, self.mean)

    def predict(
        self, x: Any, joint: bool = False, samples: Float[Tensor, "k D"] | None = None, rtol: float | None = None
    ) -> MultivariateNormal:
        """Distribution of the linearised network's outputs at x, without observation noise.

        Args:
            x: inputs as the model takes them. A sequence counts as T points.
            joint: False gives a `MultivariateNormal` of batch shape (N,) and event shape (C,), the points independent;
                True a `MultitaskMultivariateNormal` over (N, C) with covariance J P⁻¹ Jᵀ.
            samples: draws (k, D) as `sample` returns them. The covariance is then mean_k (J z_k)(J z_k)ᵀ, at k
                products with J, and each variance has a relative standard error of √(2/k).
            rtol: relative residual of the exact solves; None is 1e-6, in float64 1.5e-8.

        Covariances are lazy: exact ones solve for N·C rows of J when they are first used. Under KFAC and EKFAC those of
        independent points come from rotated factors instead, thousands of times faster.
        """
        check_flag("joint", joint)
        if rtol is not None:
            check_accuracy(rtol)
        samples = None if samples is None else checked_draws(samples, self.mean)
        self.spectrum.require_gradients()
        mean, J = self._mean(x), self.lin.jacobian(x)
        if samples is not None:
            return self._predict_from_draws(mean, self._pushed(J, samples), joint)
        inverse = self.precision.inverse(rtol)
        if joint:
            return MultitaskMultivariateNormal(mean, J @ inverse @ J.mT)
        return MultivariateNormal(mean, PointCovariance(J, inverse, outputs=mean.shape[1], blocks=Blocks()))

    def _mean(self, x: Any) -> Float[Tensor, "N C"]:
        return self.lin.predict(x).reshape(-1, self.lin.output_shape[-1])

    def _pushed(self, J: LinearOperator, samples: Float[Tensor, "k D"]) -> Float[Tensor, "N C k"]:
        pushed = J._matmul((samples - self.mean).mT)
        return pushed.unflatten(0, (-1, self.lin.output_shape[-1]))

    def _predict_from_draws(self, mean: Tensor, pushed: Tensor, joint: bool) -> MultivariateNormal:
        k = pushed.shape[-1]
        if joint:
            root = pushed.flatten(0, 1)
            return MultitaskMultivariateNormal(mean, LowRank(root, root.new_full((k,), 1 / k)))
        return MultivariateNormal(mean, Dense(pushed @ pushed.mT / k))

    def probabilities(
        self,
        x: Any,
        link: str = "probit",
        samples: Float[Tensor, "k D"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "N C"]:
        """Class probabilities E[softmax(f)] at x, at the cost of `predict`.

        Args:
            x: inputs as the model takes them. A sequence counts as T points.
            link: "probit" scales the logits by their variances; "mc" averages over draws of the logits (from `samples`
                of the weights, else 1000 from each point's covariance); "bridge" is the Laplace bridge.
            samples: draws (k, D) of the weights, as `sample` returns them.
            generator: source of the draws of "mc".

        Raises:
            ValueError: another link, or a likelihood without classes.
        """
        if link not in ("probit", "mc", "bridge"):
            raise ValueError(f"link={link!r}; expected 'probit', 'mc' or 'bridge'.")
        likelihood = self.lin.likelihood
        if not isinstance(likelihood.likelihood if isinstance(likelihood, Sequences) else likelihood, Categorical):
            raise ValueError(f"{likelihood!r} has no class probabilities; use predict.")
        check_generator(generator)
        samples = None if samples is None else checked_draws(samples, self.mean)
        if link == "mc" and samples is not None:
            self.spectrum.require_gradients()
            pushed = self._pushed(self.lin.jacobian(x), samples)
            return links.monte_carlo(self._mean(x) + pushed.movedim(-1, 0))
        predicted = self.predict(x, samples=samples)
        if link == "mc":
            covariance = predicted.lazy_covariance_matrix.to_dense()
            return links.monte_carlo(links.gaussian_draws(predicted.mean, covariance, LINK_DRAWS, generator))
        approximate = links.probit if link == "probit" else links.bridge
        return approximate(predicted.mean, predicted.lazy_covariance_matrix.diagonal(dim1=-2, dim2=-1))

    def log_evidence(self, rtol: float = 0.01, generator: torch.Generator | None = None) -> Estimate:
        """log p(data) under Laplace's approximation, in nats, with its standard error.

        It is log-likelihood − ½ [θ*ᵀAθ* + log det P − log det A]. The log-determinants are exact where P has a closed
        form, and up to 1,024 weights, where they cost D products, once for all scalar priors. Otherwise they are
        estimated for this prior by `co.linalg.logdet` (`co.evidence.grid` and `maximize` serve many priors at once).

        The likelihood is that of the data of the curvature: for co.GGN(lin_a) + co.GGN(lin_b), of both. A matrix of
        the user's own (co.linalg.Dense, a product of operators) does not record its data, which are taken to be those
        of `lin`. The value carries gradients for the prior precision, and for the likelihood's hyperparameters where
        the curvature does (GGN, EmpiricalFisher), with θ* held fixed.

        Args:
            rtol: relative accuracy of an estimated log-determinant, which at most 4,000 products are spent on; the
                estimate's `reason` says whether it was reached.
            generator: source of the probes.

        Raises:
            ValueError: a gradient for anything else is asked for; the curvature is of other data or another likelihood,
                or of further data that it does not keep (KFAC(lin_a) + KFAC(lin_b)); data are not counted exactly once
                (0.5 * KFAC(lin), GGN(lin) + GGN(lin)); or one operator in a sum does not record its data.
        """
        check_accuracy(rtol, generator)
        self.spectrum.require_gradients()
        quadratic = (self.prior_precision.double() * self.mean.double().square()).sum()  # may be 1e6 nats
        log_ratio = self.spectrum.logdet(self.prior_precision, rtol, generator)
        return log_ratio * -0.5 + (self.spectrum.log_likelihood() - 0.5 * quadratic)

    def effective_parameters(self, rtol: float = 0.01, generator: torch.Generator | None = None) -> Estimate:
        """tr(P⁻¹G), the number of directions in weight space that the data determine.

        Exact or estimated as `log_evidence` is, with as many products. The value carries gradients where P has a closed
        form.

        Args:
            rtol: as in `log_evidence`.
            generator: source of the probes.

        Raises:
            ValueError: a gradient is asked for where P has no closed form.
        """
        check_accuracy(rtol, generator)
        self.spectrum.require_gradients()
        return self.spectrum.effective_dimension(self.prior_precision, rtol, generator)


def laplace(
    lin: Linearization, curvature: Any = GGN, prior_precision: float | Tensor = 1.0, check_mode: bool = True
) -> Laplace:
    """The Laplace posterior N(θ*, (G + A)⁻¹) of a linearised network under the prior N(0, A⁻¹).

    Args:
        lin: the linearisation, by `co.linearize`.
        curvature: G, an operator class that is built from `lin`, or an operator (D, D).
        prior_precision: A, a positive number or a vector (D,): weight decay × N where training minimised a *mean* loss
            + ½ · weight decay · ‖θ‖².
        check_mode: compare the gradient of the log posterior with that of the prior, at the cost of one gradient, and
            warn with `NotAMode` where it is not small.

    Returns:
        A `Laplace`. Nothing is formed.

    Raises:
        ValueError: a prior precision that is not positive and finite or that varies within a block of KFAC or EKFAC
            (bias="separate" gives biases blocks of their own), a curvature of another size, at other weights or not
            known to be symmetric, G + A found to be indefinite, or (with check_mode) a gradient that is not finite.
        TypeError: parameters in half precision.

    A curvature that may be indefinite (co.Hessian, differences) is tested with 20 products, about 80 gradients for a
    Hessian; where they show that G + A is indefinite, the error names the prior precision that is needed. Other
    curvatures cost nothing here.
    """
    check_linearization(lin)
    check_flag("check_mode", check_mode)
    operator = checked_curvature(curvature, lin)
    posterior = Laplace(lin, operator, checked_prior(prior_precision, lin), Spectrum(lin, operator))
    posterior.spectrum.require_usable(posterior.prior_precision)
    gradient = posterior.spectrum.gradient() if check_mode else None
    if gradient is not None and not bool(gradient.isfinite().all()):
        raise ValueError(
            "the gradient of the log-likelihood holds NaN or Inf: the model's outputs or their derivatives at some "
            "training points do (see lin.outputs()); repair the model, or leave these points out."
        )
    if check_mode and posterior.mode_gap > MODE_TOLERANCE:
        warnings.warn(
            "these weights are not a mode of the posterior: the gradient of the log posterior is "
            f"{posterior.mode_gap:.2g} times the prior's own (0 at a mode). Train further, with weight decay = prior "
            "precision / N on a mean loss, or choose the prior precision that training used (check_mode=False skips "
            "this).",
            NotAMode,
            stacklevel=2,
        )
    return posterior


def check_posterior(post: Any, function: str) -> None:
    """TypeError unless it is a posterior of `laplace`."""
    if not isinstance(post, Laplace):
        raise TypeError(
            f"{function} takes a posterior, co.laplace(lin), as its first argument, got {type(post).__name__}."
        )
