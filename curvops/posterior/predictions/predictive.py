"""Predictions of any posterior over the weights: outputs, probabilities, uncertainty, scores of test data.

A posterior says where its weights are, how to draw them and what covariance the linearised outputs have; links,
decompositions and scores are the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checks import check_choice, check_flag, check_generator
from curvops.linalg import Estimate, LowRank
from curvops.network.data.given import tensor_of
from curvops.network.data.inputs import as_inputs, num_points
from curvops.network.likelihoods import Bernoulli, BradleyTerry, Categorical, Gaussian, Sequences
from curvops.network.likelihoods.likelihood import Likelihood
from curvops.operators import Linearization
from curvops.operators.linearized.jacobian import Jacobian
from curvops.posterior.core.arguments import check_accuracy, checked_count, checked_draws
from curvops.posterior.predictions import held_out, links, uncertainty
from curvops.posterior.predictions.covariance import SampledCovariance
from curvops.posterior.predictions.held_out import ErrorOfMean, error_of_mean
from curvops.posterior.predictions.network_outputs import network_outputs
from curvops.posterior.predictions.normals import MultitaskNormal, Normal, SampledNormal
from curvops.posterior.predictions.uncertainty import LABELS, NUMBERS, Uncertainty

# Draws of the outputs of each point, where averages over them are asked for and no samples are given.
OUTPUT_DRAWS = 1000
# Numbers that these take at a time.
DRAWN_NUMBERS = 2**23
# Draws of the weights likewise: each costs a solve, or a forward pass.
WEIGHT_DRAWS = 100
LINKS = ("probit", "mc", "bridge", "bridge_norm", "network")


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
    def _covariance(self, jacobian: Jacobian, joint: bool, rtol: float | None) -> LinearOperator:
        """Return the covariance of the linearised outputs: (N·C, N·C) where joint, else (N, C, C)."""

    def _require_gradients(self) -> None:  # noqa: B027 - most carry none
        """Raise ValueError where a gradient is asked for that predictions do not have."""

    def predict(
        self,
        x: Any,
        joint: bool = False,
        samples: Float[Tensor, "k D"] | None = None,
        rtol: float | None = None,
        noise: bool = False,
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

        Covariances are lazy: exact ones solve for N·C rows of J when they are first used; of up to 2,048 weights, the
        matrix is formed and factorised instead once D / 8 rows have been asked for. Those of independent points
        under a structured curvature (KFAC, EKFAC, diagonal, low rank, dense blocks of layers or of all selected
        weights) come from each layer's inputs and sensitivities instead, at C backward passes and a few matrix
        products; of a last layer from its inputs, without a further pass. Variances need no C × C block.

        Where x requires a gradient, the mean and the covariance have it (first derivatives, never in θ), for 2 to 3
        times the cost of the covariance; exact solves are not repeated for it.

        Raises:
            ValueError: noise=True with another likelihood, draws of another size, unfit inputs (see `jacobian`), x and
                the prior precision or the noise with a gradient at once; and, when they are used, covariances that
                exceed the memory budget.
        """
        check_flag("joint", joint)
        check_flag("noise", noise)
        if rtol is not None:
            check_accuracy(rtol)
        samples, independent = self._taken(samples), samples is not None
        added = self._noise() if noise else None
        self._require_gradients()
        mean, covariance = self._moments(x, joint, samples, rtol)
        if added is not None:
            noise_of_each = added.to(mean).expand(mean.shape[-1])
            covariance = covariance.add_diagonal(noise_of_each.repeat(len(mean)) if joint else noise_of_each)
        if joint:
            return MultitaskNormal(mean, covariance)
        if independent and samples is not None and not noise:
            return SampledNormal(mean, covariance, draws=len(samples))
        return Normal(mean, covariance)

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
        self._require_gradients()
        return self._functions(x, samples)

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
        check_choice("link", link, LINKS)
        likelihood = self._target()
        if not isinstance(likelihood, LABELS):
            raise ValueError(
                f"{likelihood!r} has no class probabilities; use predict, or uncertainty(x).mean for the targets' mean."
            )
        if link.startswith("bridge") and not isinstance(likelihood, Categorical):
            raise ValueError(f"link={link!r} is for classes; {likelihood!r} takes 'probit', 'mc' or 'network'.")
        check_generator(generator)
        samples = self._taken(samples)
        if link in ("mc", "network"):
            drawn = self._drawn_outputs(x, samples, generator, network=link == "network")
            return torch.cat([links.average(likelihood.mean, draws) for draws in drawn])
        predicted = self.predict(x, samples=samples)
        covariance = predicted.lazy_covariance_matrix
        if link.startswith("bridge"):
            return links.bridge(predicted.mean, covariance.to_dense(), normalised=link == "bridge_norm")
        if isinstance(likelihood, BradleyTerry):
            return links.preference(predicted.mean, covariance.to_dense())
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        if isinstance(likelihood, Bernoulli):
            return links.scaled(predicted.mean, variance).sigmoid()
        return links.probit(predicted.mean, variance)

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
        given, samples = samples, self._taken(samples)
        if isinstance(likelihood, LABELS):
            drawn, error = self._drawn_outputs(x, samples, generator), self._error_of(given)
            return uncertainty.joined([uncertainty.of_labels(likelihood, draws, error) for draws in drawn])
        return self._uncertainty_of_numbers(x, likelihood, samples, self._error_of(given))

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
        error, samples = self._error_of(samples), self._taken(samples)
        likelihood, targets = self._target(), self._targets(x, y)
        if joint and len(targets) == 1:
            raise ValueError("joint=True scores pairs of points, and there is only one; pass more, or joint=False.")
        if isinstance(likelihood, Gaussian) and samples is None and not joint:
            predicted = self.predict(x, noise=True)
            return Estimate.exact(held_out.gaussian(predicted.mean, predicted.covariance_matrix, targets))
        if samples is None and joint:
            samples = self.sample(WEIGHT_DRAWS, generator)
        drawn, start, parts = self._drawn_outputs(x, samples, generator), 0, []
        for draws in drawn:
            some = targets[start : start + draws.shape[1]]
            together = some.repeat(len(draws), *[1] * (some.ndim - 1))  # all draws in one call
            parts.append(likelihood.log_prob(draws.flatten(0, 1), together).unflatten(0, draws.shape[:2]))
            start += len(some)
        log_p = torch.cat(parts, 1)
        return held_out.dyadic(log_p, generator, error) if joint else held_out.log_mean_exp(log_p, error)

    def _targets(self, x: Any, y: Any) -> Tensor:
        """Check targets and return them by position."""
        y = tensor_of(y)
        if not isinstance(y, Tensor):
            raise TypeError(f"y must be a tensor of targets as the likelihood takes them, got {type(y).__name__}.")
        y = y.to(device=self.mean.device, dtype=self.mean.dtype if y.is_floating_point() else None)
        points = num_points(as_inputs(x, self.mean.device, self.mean.dtype))
        if len(y) != points:
            raise ValueError(f"there are {points} inputs, but {len(y)} targets.")
        layout = self.lin.model.layout
        y = y if layout is None else layout.targets(y)
        self.lin.likelihood.check_targets(y, self.lin.num_outputs)
        return y.flatten(0, 1) if isinstance(self.lin.likelihood, Sequences) else y

    def _target(self) -> Likelihood:
        """The likelihood of one position's target."""
        return self.lin.likelihood.of_position

    def _noise(self) -> Float[Tensor, "*C"]:
        likelihood = self._target()
        if not isinstance(likelihood, Gaussian):
            raise ValueError(
                f"noise=True adds the observation noise of a Gaussian likelihood; this is {likelihood!r}. "
                "uncertainty(x) has the variance, or the entropy, of its targets."
            )
        return likelihood.noise

    def _by_position(self, outputs: Tensor) -> Float[Tensor, "N C"]:
        return outputs.reshape(-1, self.lin.output_shape[-1])

    def _taken(self, samples: Any) -> Float[Tensor, "k D"] | None:
        """Return the draws of the weights that predictions use; None where they use the covariance."""
        return None if samples is None else checked_draws(samples, self.mean)

    def _error_of(self, samples: Any) -> ErrorOfMean:
        """Return the function that gives the standard error of means over these draws."""
        return error_of_mean

    def _moments(
        self, x: Any, joint: bool, samples: Float[Tensor, "k D"] | None, rtol: float | None
    ) -> tuple[Float[Tensor, "N C"], LinearOperator]:
        """Return the mean and the covariance of the outputs."""
        jacobian = self.lin.jacobian(x, differentiable=True)
        mean = self._by_position(jacobian.outputs())
        if samples is None:
            return mean, self._covariance(jacobian, joint, rtol)
        return mean, self._covariance_of(self._pushed(jacobian, samples), joint)

    def _uncertainty_of_numbers(
        self, x: Any, likelihood: Likelihood, samples: Float[Tensor, "k D"] | None, error: ErrorOfMean
    ) -> Uncertainty:
        """Return the uncertainty of normal outputs, in closed form."""
        mean, covariance = self._moments(x, False, samples, None)
        return uncertainty.of_numbers(likelihood, mean, covariance.diagonal(dim1=-2, dim2=-1))

    def _covariance_of(self, deviations: Float[Tensor, "k N C"], joint: bool) -> LinearOperator:
        """Return the mean over draws of the outer products of the outputs' deviations."""
        last = deviations.movedim(0, -1)
        return _of_draws(last) if joint else SampledCovariance(last, self.lin.memory_budget)

    def _functions(self, x: Any, samples: Float[Tensor, "k D"]) -> Float[Tensor, "k N C"]:
        """Return f(x) + J(x)(θ_k − θ*)."""
        jacobian = self.lin.jacobian(x, differentiable=True)
        return self._by_position(jacobian.outputs()) + self._pushed(jacobian, samples)

    def _pushed(self, jacobian: Jacobian, samples: Float[Tensor, "k D"]) -> Float[Tensor, "k N C"]:
        """Return J(θ_k − θ*)."""
        C, rows = self.lin.output_shape[-1], jacobian.shape[-2]
        return jacobian._matmul((samples - self.lin.theta).mT).mT.unflatten(1, (rows // C, C))

    def _drawn_outputs(
        self,
        x: Any,
        samples: Float[Tensor, "k D"] | None,
        generator: torch.Generator | None,
        network: bool = False,
    ) -> Iterator[Float[Tensor, "k n C"]]:
        """Yield draws of the outputs, some points at a time.

        They come from the given weights, from the network itself, or from each point's own covariance.
        """
        if network:
            yield network_outputs(self.lin, x, self.sample(WEIGHT_DRAWS, generator) if samples is None else samples)
        elif samples is not None:
            self._require_gradients()
            yield self._functions(x, samples)
        else:
            predicted = self.predict(x)
            covariance = predicted.lazy_covariance_matrix.to_dense()
            step = max(1, DRAWN_NUMBERS // (OUTPUT_DRAWS * covariance.shape[-1]))
            for mean, own in zip(predicted.mean.split(step), covariance.split(step)):
                yield links.gaussian_draws(mean, own, OUTPUT_DRAWS, generator)


def _of_draws(pushed: Float[Tensor, "N C k"]) -> LowRank:
    """Return the mean over draws of the outer products of J z_k, over all outputs together."""
    root = pushed.flatten(0, 1)
    return LowRank(root, root.new_full((pushed.shape[-1],), 1 / pushed.shape[-1]))
