"""Predictions of any posterior over the weights: outputs, probabilities, uncertainty, scores of test data.

A posterior gives its outputs (`outputs.py`), from which each method goes forward to the file that answers it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from jaxtyping import Float
from torch import Tensor

from curvops.checks import check_flag, check_generator, checked_whole
from curvops.linalg import Estimate
from curvops.network.likelihoods import Gaussian, Likelihood
from curvops.operators import Linearization
from curvops.posterior.core.arguments import check_accuracy, checked_count, checked_draws
from curvops.posterior.predictions import held_out, links
from curvops.posterior.predictions.normals import MultitaskNormal, Normal, SampledNormal
from curvops.posterior.predictions.outputs import DrawnOutputs, NormalOutputs, OutputDistribution, network_outputs
from curvops.posterior.predictions.uncertainty import (
    LABELS,
    NUMBERS,
    Uncertainty,
    decompose_labels,
    join_uncertainties,
)

WEIGHT_DRAWS = 100
"""Draws of the weights where averages over them are asked for and none are given: each costs a solve, or a pass."""


class Predictive(ABC):
    """A distribution of the weights of a linearised network, with its predictions at new inputs."""

    lin: Linearization

    @property
    @abstractmethod
    def mean(self) -> Float[Tensor, " D"]:
        """The mean of the weights."""

    @abstractmethod
    def sample(self, k: int, generator: torch.Generator | None = None, rtol: float = 1e-3) -> Float[Tensor, "k D"]:
        """Draw k weight vectors, as rows."""

    @abstractmethod
    def _outputs(self) -> OutputDistribution:
        """Return the outputs under this distribution of the weights."""

    @abstractmethod
    def _outputs_at(self, weights: Float[Tensor, "k D"]) -> DrawnOutputs:
        """Return the outputs at draws of the weights."""

    def predict(
        self,
        x: Any,
        joint: bool = False,
        samples: Float[Tensor, "k D"] | None = None,
        rtol: float | None = None,
        noise: bool = False,
        groups: int | None = None,
    ) -> MultivariateNormal:
        """Return the distribution of the linearised network's outputs at x.

        Args:
            x: inputs as the model takes them. A sequence counts as T points.
            joint: False gives a `MultivariateNormal` of batch shape (N,) and event shape (C,), the points independent;
                True a `MultitaskMultivariateNormal` over (N, C). They are subclasses of gpytorch's, without its floor
                under small variances.
            samples: draws (k, D) as `sample` returns them. The covariance is then mean_k (J z_k)(J z_k)ᵀ, at k
                products with J. Of independent points the result has the `variance_stderr` and the
                `variance_interval(level)` of each variance.
            rtol: relative residual of the exact solves; None is 1e-6, in float64 1.5e-8.
            noise: add the observation noise of a Gaussian likelihood: the distribution of targets.
            groups: q, points that follow one another and are joint, while groups are independent: a
                `MultitaskMultivariateNormal` of batch shape (N / q,) over (q, C), for BoTorch's batches. No entry of
                a covariance between groups is formed.

        Covariances are lazy: exact ones solve for N·C rows of J when they are first used; of up to 2,048 weights, the
        matrix is formed and factorised instead once D / 8 rows have been asked for. Those under a structured curvature
        (KFAC, EKFAC, diagonal, low rank, dense blocks of layers or of all selected weights) come from each layer's
        inputs and sensitivities instead, at C backward passes and a few matrix products (joint ones where memory has
        room for all rows); of a last layer from its inputs, without a further pass. Variances need no C × C block.

        Where x requires a gradient, the mean and the covariance have it (first derivatives, never in θ), for 2 to 3
        times the cost of the covariance; exact solves are not repeated for it.

        Raises:
            ValueError: noise=True with another likelihood, groups that do not divide N, draws of another size, unfit
                inputs (see `jacobian`), x and the prior precision or the noise with a gradient at once; and, when they
                are used, covariances that exceed the memory budget.
        """
        check_flag("joint", joint)
        check_flag("noise", noise)
        if rtol is not None:
            check_accuracy(rtol)
        likelihood = self._target()
        if noise and not isinstance(likelihood, Gaussian):
            raise ValueError(
                f"noise=True adds the observation noise of a Gaussian likelihood; this is {likelihood!r}. "
                "uncertainty(x) has the variance, or the entropy, of its targets."
            )
        if groups is not None and joint:
            raise ValueError("joint=True makes one group of all points; pass groups or joint=True, not both.")
        together = None if joint else 1 if groups is None else checked_whole("groups", groups)
        mean, covariance = self._outputs_of(samples).moments(x, together, rtol)
        if noise and isinstance(likelihood, Gaussian):
            each = likelihood.noise.to(mean).expand(mean.shape[-1])
            covariance = covariance.add_diagonal(each.repeat(len(mean) if joint else together or 1))
        if groups is not None and not len(mean):
            raise ValueError("x has no points: groups need some; leave groups out where there may be none.")
        if joint or groups is not None:
            return MultitaskNormal(mean if joint else mean.unflatten(0, (-1, groups)), covariance)
        if samples is None or noise:
            return Normal(mean, covariance)
        return SampledNormal(mean, covariance, draws=len(samples))

    def functions(
        self,
        x: Any,
        k: int,
        generator: torch.Generator | None = None,
        samples: Float[Tensor, "k D"] | None = None,
        rtol: float = 1e-3,
    ) -> Float[Tensor, "k N C"]:
        """Draw k functions of the linearised network, f(x, θ*) + J(x)(θ_k − θ*), each jointly at all points.

        Args:
            x: inputs as the model takes them. A sequence counts as T points.
            k: the number of draws; that of `samples` where these are given.
            generator: source of the draws.
            samples: draws (k, D) of the weights, as `sample` returns them: the same functions at other inputs.
            rtol: as in `sample`.

        Cost: that of `sample(k)`, and k products with J(x).
        """
        k = checked_count(k)
        samples = self.sample(k, generator, rtol) if samples is None else checked_draws(samples, self.mean)
        if len(samples) != k:
            raise ValueError(f"k is {k}, but there are {len(samples)} samples; pass k=len(samples).")
        return self._outputs_at(samples).functions(x)

    def probabilities(
        self,
        x: Any,
        link: str = "probit",
        samples: Float[Tensor, "k D"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "N C"]:
        """Return class probabilities E[softmax(f)] at x, or those of each label of a Bernoulli likelihood, E[σ(f)].

        Args:
            x: inputs as the model takes them. A sequence counts as T points.
            link: "probit" scales the logits by their variances (of the two rewards of `BradleyTerry` the difference by
                its own); "mc" averages over draws of the logits (from `samples` of the weights, else 1000 from each
                point's covariance); "bridge" is the Laplace bridge, "bridge_norm" the same with variances normalised,
                better where they are large (classes only); "network" averages the network itself over the samples (100
                where none are given), for comparison: the posterior is that of the linearised network, and the network
                at its draws predicts worse.
            samples: draws (k, D) of the weights, as `sample` returns them.
            generator: source of the draws.

        Cost: that of `predict`; "network" takes a forward pass for each sample.

        Raises:
            ValueError: another link, one that does not fit the likelihood, or a likelihood without probabilities.
        """
        likelihood = self._target()
        links.check_link(link, likelihood)
        check_generator(generator)
        outputs = self._outputs_of(samples)
        if link == "network":
            weights = outputs.weights if isinstance(outputs, DrawnOutputs) else self.sample(WEIGHT_DRAWS, generator)
            return links.average(likelihood.mean, network_outputs(self.lin, x, weights))
        if link == "mc":
            return torch.cat([links.average(likelihood.mean, draws) for draws in outputs.draws(x, generator)])
        return links.normal_probabilities(link, likelihood, *outputs.moments(x))

    def uncertainty(
        self, x: Any, samples: Float[Tensor, "k D"] | None = None, generator: torch.Generator | None = None
    ) -> Uncertainty:
        """Return the total uncertainty of the target at each x, and its aleatoric and epistemic parts.

        Args:
            x: inputs as the model takes them. A sequence counts as T points.
            samples: draws (k, D) of the weights, as `sample` returns them; by default each point's own covariance is
                used, and for entropies 1000 draws from it.
            generator: source of these draws.

        Returns:
            For classes entropies in nats (N,): of the mean prediction, the mean entropy, and the mutual information
            between target and weights; for the labels of a Bernoulli likelihood the same of each (N, C). For Gaussian,
            heteroscedastic and Poisson targets variances (N, C). `mean` is the target's: probabilities, or (Poisson)
            rates.

        Raises:
            ValueError: another likelihood.
        """
        likelihood = self._target()
        if not isinstance(likelihood, LABELS + NUMBERS):
            raise ValueError(f"{likelihood!r} has no decomposition here; use predict, or functions(x, k) and your own.")
        check_generator(generator)
        outputs = self._outputs_of(samples)
        if not isinstance(likelihood, LABELS):
            return outputs.uncertainty_of_numbers(x, likelihood)
        drawn = outputs.draws(x, generator)
        return join_uncertainties([decompose_labels(likelihood, draws, outputs.error) for draws in drawn])

    def log_likelihood(
        self,
        x: Any,
        y: Any,
        joint: bool = False,
        samples: Float[Tensor, "k D"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Estimate:
        """Return log p(y | x, data) of test points in nats, each with its standard error.

        Args:
            x: inputs as the model takes them.
            y: targets as the likelihood takes them. A sequence counts as T points.
            joint: False scores each point, (N,); True random pairs of points together (⌊N/2⌋,), ten copies of the two
                in all (the dyadic score of Osband et al. 2022), which sees whether predictions vary together as they
                should.
            samples: draws (k, D) of the weights; by default each point's own covariance is used (exactly for a Gaussian
                likelihood, else by 1000 draws), and 100 draws of the weights where joint.
            generator: source of the draws, and of the pairs.

        Raises:
            TypeError, ValueError: targets that the likelihood cannot score, or not one for each point.
        """
        check_flag("joint", joint)
        check_generator(generator)
        outputs, likelihood = self._outputs_of(samples), self._target()
        targets = held_out.targets_by_position(self.lin, x, y)
        if joint and len(targets) == 1:
            raise ValueError("joint=True scores pairs of points, and there is only one; pass more, or joint=False.")
        if isinstance(outputs, NormalOutputs) and isinstance(likelihood, Gaussian) and not joint:
            predicted = self.predict(x, noise=True)
            return Estimate.exact(held_out.gaussian_log_density(predicted.mean, predicted.covariance_matrix, targets))
        if isinstance(outputs, NormalOutputs) and joint:
            outputs = self._outputs_at(self.sample(WEIGHT_DRAWS, generator))
        log_p = held_out.log_likelihoods(likelihood, outputs.draws(x, generator), targets)
        if joint:
            return held_out.dyadic_score(log_p, generator, outputs.error)
        return held_out.log_mean_exp(log_p, outputs.error)

    def _target(self) -> Likelihood:
        """Return the likelihood of one position's target."""
        return self.lin.likelihood.of_position

    def _outputs_of(self, samples: Any) -> OutputDistribution:
        """Return the outputs at draws that a user gives, or under this distribution where there are none."""
        return self._outputs() if samples is None else self._outputs_at(checked_draws(samples, self.mean))
