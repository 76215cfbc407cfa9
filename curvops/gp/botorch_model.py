"""A linearised posterior as a BoTorch model, whose posteriors acquisition functions differentiate."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.models.deterministic import GenericDeterministicModel
from botorch.models.model import FantasizeMixin, Model
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.posteriors.posterior import Posterior
from jaxtyping import Float
from torch import Tensor

from curvops.checks import check_choice
from curvops.gp.points import as_points
from curvops.linalg import Dense
from curvops.network.likelihoods import Gaussian
from curvops.posterior import Laplace
from curvops.posterior.predictions.normals import MultitaskNormal, Normal

MODES = ("map", "linear")


class LaplaceModel(Model, FantasizeMixin):
    """A Laplace posterior of a network as a BoTorch `Model`, joint within each set of q points and with gradients in X.

    `posterior(X)` for X (b x q x d) never forms covariances between the sets; gradients in X are first derivatives.
    Conditioning on observations is exact for the linearised model: its mean and covariance change, the linearisation
    does not. Far from the weights at which it was made, train the network again.

    Cost of a posterior: that of `post.predict(x, groups=q)`; conditioned on n points, that of q + n points per set,
    and the Cholesky factorisation of an n·C × n·C matrix.

    Args:
        post: a Laplace posterior, the result of `co.laplace`.
        mode: the mean of the weights: "map" for the network's own weights, so that the mean is the network's output;
            "linear" for the linear model's mode, for a network that was not trained to the end.
        input_transform: a BoTorch transform; the network was trained on its outputs.
        outcome_transform: a BoTorch transform of the targets, likewise.

    Raises:
        TypeError: a posterior of another kind.
        ValueError: X with another last dimension; observation noise for a likelihood that is not Gaussian;
            observations with a singular covariance (repeated points without noise): no jitter is added.
    """

    def __init__(
        self,
        post: Laplace,
        mode: str = "map",
        input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(post, Laplace):
            raise TypeError(f"post must be a Laplace posterior from co.laplace, got {type(post).__name__}.")
        check_choice("mode", mode, MODES)
        self.post, self.likelihood = post, post.lin.likelihood
        self._step = None if mode == "map" else post.linear_mode().theta - post.lin.theta
        self._observed: list[tuple[Tensor, Tensor, Tensor]] = []  # X, Y and noise, in the network's space
        self._outputs = list(range(post.lin.num_outputs))
        if input_transform is not None:
            self.input_transform = input_transform
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform
        self.eval()

    @property
    def num_outputs(self) -> int:
        """The number of outputs of the network, or of those selected by `subset_output`."""
        return len(self._outputs)

    @property
    def batch_shape(self) -> torch.Size:
        """The batch shape of the observations that the model was conditioned on."""
        return torch.broadcast_shapes(*(part.shape[:-2] for X, Y, _ in self._observed for part in (X, Y)))

    def posterior(  # type: ignore[override]
        self,
        X: Float[Tensor, "*b q d"],
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
    ) -> Posterior:
        """Return the distribution of the outputs at X, joint within each set of q points; see BoTorch's `Model`."""
        self.eval()
        mean, covariance = self._condition(self._transformed(X))
        chosen = self._outputs if output_indices is None else [self._outputs[i] for i in output_indices]
        q, C = mean.shape[-2:]
        if observation_noise is not False:
            noise = self._noise() if observation_noise is True else observation_noise
            covariance = covariance + noise.to(mean).expand_as(mean).flatten(-2).diag_embed()
        if chosen != list(range(C)):
            by_output = covariance.unflatten(-1, (q, C)).unflatten(-3, (q, C))
            covariance = by_output[..., chosen, :, :][..., chosen].flatten(-2).flatten(-3, -2)
            mean = mean[..., chosen]
        if mean.shape[-1] == 1:
            distribution = Normal(mean.squeeze(-1).to(X), Dense(covariance.to(X), psd=True))
        else:
            distribution = MultitaskNormal(mean.to(X), Dense(covariance.to(X), psd=True))
        found: Posterior = GPyTorchPosterior(distribution)
        if hasattr(self, "outcome_transform"):
            found = self.outcome_transform.untransform_posterior(found, X=X)
        return found if posterior_transform is None else posterior_transform(found)

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> LaplaceModel:
        """Return the model conditioned on targets Y (*b' x n x m) at X (*b x n x d), each with its batches.

        The linearisation does not change, which is exact for the linear model. `noise` is the variance of the
        targets; None uses the likelihood's.
        """
        C = self.post.lin.num_outputs
        if X.shape[-2] != Y.shape[-2] or Y.shape[-1] != C or self.num_outputs != C:
            raise ValueError(
                f"Y must be of shape (..., {X.shape[-2]}, {C}) for X of shape {tuple(X.shape)}, with all outputs of "
                f"the network, got {tuple(Y.shape)}."
            )
        if hasattr(self, "outcome_transform"):
            Y, _ = self.outcome_transform(Y)
        noise = (self._noise() if noise is None else noise).to(Y)
        noise = noise.expand(torch.broadcast_shapes(noise.shape, Y.shape[-2:]))
        new = copy(self)
        new._observed = [*self._observed, (self._transformed(X), Y, noise)]
        return new

    def subset_output(self, idcs: Sequence[int]) -> LaplaceModel:
        """Return the model of a subset of the outputs."""
        new = copy(self)
        new._outputs = [self._outputs[i] for i in idcs]
        return new

    def draw_function(self, generator: torch.Generator | None = None) -> GenericDeterministicModel:
        """Return one draw of the linearised function as a deterministic model, for Thompson sampling.

        Raises ValueError for a conditioned model, whose weights have another distribution than the posterior's.
        """
        if self._observed:
            raise ValueError(
                "a conditioned model has no draws of the weights: draw from the model before, or update it."
            )
        sample = self.post.sample(1, generator) + (0 if self._step is None else self._step)

        def function(X: Tensor) -> Tensor:
            found = self.post.functions(as_points(self.post.lin, self._transformed(X)), 1, samples=sample)
            return found.reshape(*X.shape[:-1], -1)[..., self._outputs].to(X)

        return GenericDeterministicModel(function, self.num_outputs)

    def _transformed(self, X: Tensor) -> Tensor:
        transformed: Tensor = self.transform_inputs(X)
        return transformed

    def _set_transformed_inputs(self) -> None:
        """Do nothing: the training inputs are those of the linearisation, on which the network was trained."""

    def _noise(self) -> Tensor:
        if not isinstance(self.likelihood, Gaussian):
            raise ValueError(
                f"observation noise needs a Gaussian likelihood, and this is {self.likelihood!r}: use the outputs' "
                "own distribution, observation_noise=False, with an objective such as GenericMCObjective."
            )
        return self.likelihood.noise

    def _moments(self, X: Float[Tensor, "*b q d"]) -> tuple[Float[Tensor, "*b q C"], Float[Tensor, "*b qC qC"]]:
        """Return the mean and the covariance under the posterior, before any observations."""
        lin, batch, q = self.post.lin, X.shape[:-2], X.shape[-2]
        points = as_points(lin, X)
        predicted = self.post.predict(points, groups=q)
        mean, covariance = predicted.mean, predicted.covariance_matrix
        if self._step is not None:
            moved = lin.jacobian(points, differentiable=True)._matmul(self._step)
            mean = mean + moved.reshape(mean.shape)
        return mean.reshape(*batch, q, -1), covariance.reshape(*batch, *covariance.shape[-2:])

    def _condition(self, X: Float[Tensor, "*b q d"]) -> tuple[Float[Tensor, "*c q C"], Float[Tensor, "*c qC qC"]]:
        """Return the mean and the covariance given the observations, by the conditional of a joint normal."""
        if not self._observed:
            return self._moments(X)
        sets = [X, *(points.to(X) for points, _, _ in self._observed)]
        shared = torch.broadcast_shapes(*(part.shape[:-2] for part in sets))
        mean, covariance = self._moments(torch.cat([part.expand(*shared, -1, -1) for part in sets], -2))
        q, C = X.shape[-2], mean.shape[-1]
        batch = torch.broadcast_shapes(shared, self.batch_shape)
        Y = torch.cat([Y.to(mean).expand(*batch, -1, -1) for _, Y, _ in self._observed], -2)
        noises = [noise.to(mean) for _, _, noise in self._observed]
        each = torch.broadcast_shapes(*(noise.shape[:-2] for noise in noises))
        noise = torch.cat([noise.expand(*each, -1, -1) for noise in noises], -2).flatten(-2)
        cut = q * C
        given = covariance[..., cut:, cut:] + noise.diag_embed()
        factor, info = torch.linalg.cholesky_ex(given)
        left = factor.diagonal(dim1=-2, dim2=-1).square() / given.diagonal(dim1=-2, dim2=-1)
        if bool(((info > 0) | (left.amin(-1) < 10 * noise.shape[-1] * torch.finfo(left.dtype).eps)).any()):
            raise ValueError(
                "the observations' covariance is singular: points that are repeated, or too close to each other for "
                "their noise. Leave some out, or pass noise; no jitter is added."
            )
        half = torch.linalg.solve_triangular(factor, covariance[..., cut:, :cut], upper=False)
        residual = (Y - mean[..., q:, :]).flatten(-2).unsqueeze(-1)
        moved = half.mT @ torch.linalg.solve_triangular(factor.expand(*batch, -1, -1), residual, upper=False)
        conditioned = mean[..., :q, :] + moved.squeeze(-1).unflatten(-1, (q, C))
        reduced = covariance[..., :cut, :cut] - half.mT @ half
        return conditioned, reduced.expand(*batch, -1, -1)
