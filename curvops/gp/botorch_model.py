"""A linearised posterior as a BoTorch model, whose posteriors acquisition functions can differentiate."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from inspect import signature
from typing import Any, NamedTuple, SupportsIndex

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.models.deterministic import GenericDeterministicModel
from botorch.models.model import FantasizeMixin, Model
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.posteriors.posterior import Posterior
from gpytorch.distributions import MultivariateNormal
from jaxtyping import Float
from torch import Tensor

from curvops.checks import check_choice, check_kind, check_tensor, refuse
from curvops.gp.operator_kernel import as_points
from curvops.linalg import Dense
from curvops.network.likelihoods import Gaussian, Multitask
from curvops.posterior import Laplace
from curvops.posterior.predictions.normals import MultitaskNormal, Normal

MODES = ("map", "linear")


class Observed(NamedTuple):
    """The targets of some outputs at some points, and their noise, in the network's space."""

    X: Float[Tensor, "*b n d"]
    Y: Float[Tensor, "*c n m"]
    noise: Float[Tensor, "*e n m"]
    outputs: list[int]


class LaplaceModel(Model, FantasizeMixin):
    """A Laplace posterior of a network as a BoTorch `Model`, joint within each set of q points and with gradients in X.

    `posterior(X)` for X (b x q x d) never forms covariances between the sets; gradients in X are first derivatives.
    Conditioning on observations is exact for the linearised model: its mean and covariance change, but the
    linearisation does not. If observations move the function far from it, train the network again.

    Cost of a posterior: that of `post.predict(x, groups=q)`; conditioned on n points, that of q + n points per set,
    and the Cholesky factorisation of an n·C × n·C matrix.

    Args:
        post: a Laplace posterior, the result of `co.laplace`.
        mode: the mean of the weights: "map" for the network's own weights, so that the mean is the network's output;
            "linear" for the linear model's mode, for a network that was not trained to the end.
        input_transform: a BoTorch transform; the network was trained on its outputs.
        outcome_transform: a BoTorch transform of the targets; the network was trained on its outputs.

    Raises:
        TypeError: the posterior or a transform is of another kind, or X or the noise is not a tensor.
        ValueError: the network's outputs are sequences; X has another last dimension, or more points together than the
            memory budget has room for; targets have another shape; observation noise is requested for a likelihood that
            is not Gaussian; or the covariance of the observations is singular (repeated points without noise): no
            jitter is added.

    Examples:
        >>> lin = co.linearize(nn.Linear(2, 1).double(), (x.double(), torch.zeros(8, 1).double()), "regression")
        >>> surrogate = co.gp.LaplaceModel(co.laplace(lin, co.GGN, prior_precision=1.0, check_mode=False))
        >>> surrogate.posterior(x.double()).mean.shape
        torch.Size([8, 1])
    """

    def __init__(
        self,
        post: Laplace,
        mode: str = "map",
        input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | None = None,
    ) -> None:
        super().__init__()
        check_kind("post", post, Laplace, "a Laplace posterior from co.laplace")
        check_choice("mode", mode, MODES)
        several = isinstance(post.lin.likelihood, Multitask)
        refuse(several, "a BoTorch model has one output vector per point: linearise a network that returns one.")
        if len(post.lin.output_shape) > 1:
            raise ValueError("a BoTorch model has one vector of outputs per point: append nn.Flatten() to the network.")
        self.post, self.likelihood = post, post.lin.likelihood
        self._step = None if mode == "map" else post.linear_mode().theta - post.lin.theta
        self._observed: list[Observed] = []
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
        return torch.broadcast_shapes(*(values.shape[:-2] for seen in self._observed for values in seen[:3]))

    def extra_repr(self) -> str:
        """Return the posterior, which torch prints among a module's parts."""
        return repr(self.post)

    def forward(self, X: Float[Tensor, "*b q d"]) -> MultivariateNormal:
        """Return the distribution of the outputs at X before the outcome transform, as acquisition functions do."""
        return self._distribution(X)

    def posterior(  # type: ignore[override]
        self,
        X: Float[Tensor, "*b q d"],
        output_indices: Sequence[SupportsIndex] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
    ) -> Posterior:
        """Return the distribution of the outputs at X, joint within each set of q points; see BoTorch's `Model`."""
        self.eval()
        posterior: Posterior = GPyTorchPosterior(self._distribution(X, output_indices, observation_noise))
        if hasattr(self, "outcome_transform"):
            transform = self.outcome_transform
            transform = transform if output_indices is None else transform.subset_output(list(map(int, output_indices)))
            posterior = transform.untransform_posterior(posterior, X=X)
        if posterior_transform is None:
            return posterior
        takes_points = "X" in signature(posterior_transform.forward).parameters  # from BoTorch 0.15 on
        return posterior_transform(posterior, X=X) if takes_points else posterior_transform(posterior)

    def _distribution(
        self, X: Tensor, output_indices: Sequence[SupportsIndex] | None = None, observation_noise: bool | Tensor = False
    ) -> MultivariateNormal:
        mean, covariance = self._condition(self.transform_inputs(X))
        q, C = mean.shape[-2:]
        positions = range(self.num_outputs) if output_indices is None else output_indices
        chosen = [self._outputs[i] for i in positions]
        if chosen != list(range(C)):
            by_output = covariance.unflatten(-1, (q, C)).unflatten(-3, (q, C))
            covariance = by_output[..., chosen, :, :][..., chosen].flatten(-2).flatten(-3, -2)
            mean = mean[..., chosen]
        if observation_noise is not False:
            noise = self._noise("observation_noise", observation_noise, mean, q)[..., list(positions)]
            covariance = covariance + noise.expand(mean.shape).flatten(-2).diag_embed()
        if mean.shape[-1] == 1:
            return Normal(mean.squeeze(-1).to(X), Dense(covariance.to(X), psd=True))
        return MultitaskNormal(mean.to(X), Dense(covariance.to(X), psd=True))

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> LaplaceModel:
        """Return the model conditioned on targets Y (*b' x n x m) at X (*b x n x d), each with its batches.

        The linearisation does not change, which is exact for the linear model.

        Args:
            X: the points, *b x n x d.
            Y: the targets, *b' x n x m; those of a `subset_output` are targets of its outputs.
            noise: the variance of the targets, in a shape that expands to theirs; None uses the likelihood's. With an
                outcome transform it is that of the transformed targets, as in BoTorch's models.
            kwargs: options of BoTorch, which are not used.

        Returns:
            The conditioned model.

        Raises:
            TypeError, ValueError: the targets or the noise do not fit.
        """
        as_points(self.post.lin, X)
        if Y.ndim < 2 or X.shape[-2] != Y.shape[-2] or Y.shape[-1] != self.num_outputs:
            raise ValueError(f"Y must have shape (..., {X.shape[-2]}, {self.num_outputs}), got {tuple(Y.shape)}.")
        finite = X.isfinite().all() & Y.isfinite().all()
        refuse(not finite, "X or Y holds NaN or infinite values: leave out the points without targets.")
        if hasattr(self, "outcome_transform"):
            Y, _ = self.outcome_transform(Y, X=X)
        new = copy(self)
        variances = self._noise("noise", True if noise is None else noise, Y, Y.shape[-2])
        seen = Observed(self.transform_inputs(X), Y, variances, self._outputs)
        new._observed = [*self._observed, seen]
        return new

    def subset_output(self, idcs: Sequence[SupportsIndex]) -> LaplaceModel:
        """Return the model of a subset of the outputs, with that part of the outcome transform."""
        new = copy(self)
        new._outputs = [self._outputs[i] for i in idcs]
        if hasattr(self, "outcome_transform"):
            new._modules = dict(self._modules)  # a copy of a module shares this dict
            new.outcome_transform = self.outcome_transform.subset_output(list(map(int, idcs)))
        return new

    def draw_function(self, generator: torch.Generator | None = None) -> GenericDeterministicModel:
        """Return one draw of the linearised function as a deterministic model, for Thompson sampling.

        Args:
            generator: the source of the draw.

        Returns:
            The draw as a model.

        Raises:
            ValueError: the model is conditioned, so that its weights do not have the distribution of the posterior.
        """
        refuse(self._observed, "a conditioned model has no draws of the weights: draw before conditioning.")
        sample = self.post.sample(1, generator) + (0 if self._step is None else self._step)

        def function(X: Tensor) -> Tensor:
            outputs = self.post.functions(as_points(self.post.lin, self.transform_inputs(X)), 1, samples=sample)
            return outputs.reshape(*X.shape[:-1], -1)[..., self._outputs].to(X)

        return GenericDeterministicModel(function, self.num_outputs)

    def _set_transformed_inputs(self) -> None:
        """Do nothing: the training inputs are those of the linearisation, on which the network was trained."""

    def _noise(self, name: str, variances: Any, like: Tensor, points: int) -> Float[Tensor, "*b n m"]:
        """Return the variances of targets of this model's outputs; True means the likelihood's."""
        m = self.num_outputs
        if variances is True:
            if not isinstance(self.likelihood, Gaussian):
                raise ValueError("observation noise needs a Gaussian likelihood: use observation_noise=False.")
            of_all = self.likelihood.noise.to(like).expand(self.post.lin.num_outputs)
            return of_all[self._outputs].expand(points, m)
        check_tensor(name, variances)
        refuse(not (variances >= 0).all(), f"{name} holds variances: none may be negative or NaN.")
        noise: Tensor = variances.to(like).expand(*variances.shape[:-2], points, m)
        return noise

    def _moments(self, X: Float[Tensor, "*b q d"]) -> tuple[Float[Tensor, "*b q C"], Float[Tensor, "*b qC qC"]]:
        """Return the mean and the covariance under the posterior, before any observations."""
        lin = self.post.lin
        points = as_points(lin, X)
        batch, q = X.shape[:-2], X.shape[-2]
        predicted = self.post.predict(points, groups=q)
        mean, covariance = predicted.mean, predicted.covariance_matrix
        if self._step is not None:
            moved = lin.jacobian(points, differentiable=True)._matmul(self._step)
            mean = mean + moved.reshape(mean.shape)
        return mean.reshape(*batch, q, -1), covariance.reshape(*batch, *covariance.shape[-2:])

    def _condition(self, X: Float[Tensor, "*b q d"]) -> tuple[Float[Tensor, "*c q C"], Float[Tensor, "*c qC qC"]]:
        """Return the mean and the covariance given the observations, as the conditional of a joint normal."""
        if not self._observed:
            return self._moments(X)
        sets = [X, *(seen.X.to(X) for seen in self._observed)]
        shared = torch.broadcast_shapes(*(points.shape[:-2] for points in sets))
        mean, covariance = self._moments(torch.cat([points.expand(*shared, -1, -1) for points in sets], -2))
        batch = torch.broadcast_shapes(shared, self.batch_shape)
        q, C = X.shape[-2], mean.shape[-1]
        rows, start = [], q
        for seen in self._observed:
            by_point = torch.arange(start, start + seen.X.shape[-2], device=mean.device).unsqueeze(1) * C
            rows.append((by_point + torch.tensor(seen.outputs, device=mean.device)).flatten())
            start += seen.X.shape[-2]
        rows_observed, cut = torch.cat(rows), q * C
        Y, noise = (
            _joined(parts) for parts in zip(*((seen.Y.to(mean), seen.noise.to(mean)) for seen in self._observed))
        )
        observed = covariance[..., rows_observed, :][..., rows_observed] + noise.diag_embed()
        factor, info = torch.linalg.cholesky_ex(observed)
        left = factor.diagonal(dim1=-2, dim2=-1).square() / observed.diagonal(dim1=-2, dim2=-1)
        least = 10 * len(rows_observed) * torch.finfo(left.dtype).eps
        if bool((info > 0).any() | (left < least).any()):
            raise ValueError("the observations' covariance is singular: leave out repeated points, or pass noise.")
        half = torch.linalg.solve_triangular(factor, covariance[..., rows_observed, :cut], upper=False)
        residual = (Y - mean.flatten(-2)[..., rows_observed]).unsqueeze(-1)
        moved = half.mT @ torch.linalg.solve_triangular(factor, residual, upper=False)
        conditioned = mean[..., :q, :] + moved.squeeze(-1).unflatten(-1, (q, C))
        reduced = covariance[..., :cut, :cut] - half.mT @ half
        return conditioned.expand(*batch, -1, -1), reduced.expand(*batch, -1, -1)


def _joined(parts: Sequence[Tensor]) -> Float[Tensor, "*c nm"]:
    """Return the values of points and outputs, each with its batches, as one row for each batch."""
    batch = torch.broadcast_shapes(*(values.shape[:-2] for values in parts))
    return torch.cat([values.expand(*batch, -1, -1).flatten(-2) for values in parts], -1)
