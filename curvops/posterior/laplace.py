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
from curvops.network.passes import accumulate
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
    """The weights of a posterior are not where its density is highest."""


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
        """k draws of the weights, the mean included: P⁻¹ ε with ε ~ N(0, P), by one block solve of k columns.

        Where `lin.memory_budget` has no room for the working vectors of k, by solves of fewer columns one after the
        other; equal seeds then need equal budgets.
        Each draw is solved for to a relative residual `rtol`, far below what k draws can tell of the posterior.
        `lin.unflatten_weights(draw)` has a draw's tensors by name, of a subnetwork with the other weights as they were.
        Raises `NotConverged` where rtol was not reached; TypeError or ValueError unless k is a whole number from 1 on.
        """
        k = checked_count(k)
        check_accuracy(rtol, generator)
        self.spectrum.require_gradients()
        memories = frozenset((self.lin.memory,))
        return accumulate(draw(self.precision.inverse(rtol), k, generator, memories).mT, self.mean)

    def predict(
        self, x: Any, joint: bool = False, samples: Float[Tensor, "k D"] | None = None, rtol: float | None = None
    ) -> MultivariateNormal:
        """Distribution of the linearised network's outputs at x, noise not included. A sequence counts as T points.

        joint=False: a `MultivariateNormal` of batch shape (N,) and event (C,), the points independent. joint=True: a
        `MultitaskMultivariateNormal` over (N, C), covariance J P⁻¹ Jᵀ. Covariances are lazy: exact ones solve for N·C
        rows of J when first used; those of independent points under KFAC and EKFAC come from rotated factors instead,
        thousands of times faster. `samples`, draws (k, D) as `sample` returns them, give the covariance
        mean_k (J z_k)(J z_k)ᵀ, for k products with J: each variance has a relative standard error of √(2/k).
        `rtol` is the relative residual of the exact solves (None: 1e-6, in float64 1.5e-8).
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
        """Class probabilities E[softmax(f)] at x. A sequence counts as T points.

        link: "probit" scales the logits by their variances; "mc" averages over draws of the logits (from `samples` of
        the weights, else 1000 from each point's covariance); "bridge" is the Laplace bridge. Raises ValueError for
        another link or a likelihood without classes. Cost: as `predict`.
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

        log-likelihood − ½ [θ*ᵀAθ* + log det P − log det A]. The log-determinants are exact where P has a closed form,
        and up to 1,024 weights: those cost D products, once for all scalar priors. Else they are estimated by
        `co.linalg.logdet` to a relative accuracy `rtol`, or as near as 4,000 products come to it, for this prior
        alone (`co.evidence.grid` and `maximize` prepare for many); the estimate's reason says which.

        The likelihood is that of the data which the curvature is of: of co.GGN(lin_a) + co.GGN(lin_b), both. A matrix
        of the user's own (co.linalg.Dense, a product of operators) does not say, and is taken for that of `lin`.
        Gradients: in the prior precision, and in the likelihood's hyperparameters for curvatures that have them (GGN,
        EmpiricalFisher), θ* held fixed. Raises ValueError for another gradient; where the curvature is of other data
        or another likelihood, or of further data that it does not keep (KFAC(lin_a) + KFAC(lin_b)); where data are
        counted otherwise than once (0.5 * KFAC(lin), GGN(lin) + GGN(lin)); and where one operator in a sum does not
        say which data it is of.
        """
        check_accuracy(rtol, generator)
        self.spectrum.require_gradients()
        quadratic = (self.prior_precision.double() * self.mean.double().square()).sum()  # may be 1e6 nats
        log_ratio = self.spectrum.logdet(self.prior_precision, rtol, generator)
        return log_ratio * -0.5 + (self.spectrum.log_likelihood() - 0.5 * quadratic)

    def effective_parameters(self, rtol: float = 0.01, generator: torch.Generator | None = None) -> Estimate:
        """tr(P⁻¹G), the number of directions in weight space that the data determine.

        Exact or estimated, and for as many products, as `log_evidence`. It has gradients where P has a closed form;
        ValueError where another one is asked for.
        """
        check_accuracy(rtol, generator)
        self.spectrum.require_gradients()
        return self.spectrum.effective_dimension(self.prior_precision, rtol, generator)


def laplace(
    lin: Linearization, curvature: Any = GGN, prior_precision: float | Tensor = 1.0, check_mode: bool = True
) -> Laplace:
    """The Laplace posterior N(θ*, (G + A)⁻¹) of a linearised network under the prior N(0, A⁻¹).

    curvature: an operator class, built from `lin`, or an operator (D, D). prior_precision: a positive number or a
    vector (D,): weight decay × N where training minimised a *mean* loss + ½ · weight decay · ‖θ‖². check_mode: compare
    the gradient of the log posterior with the prior's, one gradient, and warn with `NotAMode` where it is not small.

    A curvature that may be indefinite (co.Hessian, differences) is looked at by 20 products, for a Hessian about 80
    gradients; where they show that G + A is indefinite, that is an error which names the prior precision that is
    needed. Others cost nothing here.

    Raises ValueError for a prior precision that is not positive and finite or, under KFAC and EKFAC, varies within a
    block (bias="separate" gives biases blocks of their own), a curvature of another size, at other
    weights or not known to be symmetric, G + A seen to be indefinite, or (with check_mode) a gradient that is not
    finite; TypeError for parameters in half precision.
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
