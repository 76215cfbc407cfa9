"""A linearised network as an exact Gaussian process of gpytorch, on its own training data."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.constraints import Positive
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import Mean
from gpytorch.models import ExactGP
from jaxtyping import Float
from torch import Tensor

from curvops.argument_types import LikelihoodChoice
from curvops.gp.kernel import LinearizedKernel, LinearizedMean
from curvops.gp.operator_kernel import as_points
from curvops.network.likelihoods import Gaussian
from curvops.operators import Linearization
from curvops.posterior.core.arguments import check_linearization
from curvops.posterior.predictions.normals import MultitaskNormal, Normal


class LinearizedGP(ExactGP):
    """A linearised network as gpytorch's `ExactGP`, trained on the inputs and targets of its linearisation.

    The mean is a `LinearizedMean` and the kernel a `LinearizedKernel` of the same linearisation, so that predictions
    are those of `co.laplace` at the linear model's mode, and `ExactMarginalLogLikelihood` times N is
    `log_evidence(mode="linear")`. Its distributions are gpytorch's without the floor under variances; densities of
    targets of another shape are rejected.

    Cost: that of the kernel's matrix, and its solves.

    Args:
        lin: the linearised network, with a Gaussian likelihood.
        likelihood: a Gaussian likelihood of gpytorch; None makes one with the noise of `lin`, for several outputs a
            `MultitaskGaussianLikelihood` with one noise.
        kernel: the kernel, which may be composed of others; None is `LinearizedKernel(lin, **options)`.
        mean: the mean; None is `LinearizedMean(lin)`.
        options: options of `LinearizedKernel`.

    Raises:
        TypeError: an argument is of another kind, or the inputs are not a single tensor per point.
        ValueError: the likelihood of `lin` is not Gaussian with one noise (`co.gp.laplace_gp` takes any), gpytorch's
            is for another number of outputs, points have weights, or the kernel or mean belongs to a network linearised
            at other weights.

    Examples:
        >>> lin = co.linearize(nn.Linear(2, 1), (x, torch.zeros(8, 1)), "regression")
        >>> process = co.gp.LinearizedGP(lin).eval()
        >>> process(x).mean.shape
        torch.Size([8])
    """

    def __init__(
        self,
        lin: Linearization,
        likelihood: LikelihoodChoice | None = None,
        kernel: Kernel | None = None,
        mean: Mean | None = None,
        **options: Any,
    ) -> None:
        check_linearization(lin)
        if kernel is not None and options:
            raise ValueError(f"the given kernel has its own {', '.join(options)}: leave these out.")
        x, y = _training_data(lin)
        super().__init__(x, y, _likelihood_of(lin) if likelihood is None else likelihood)
        C = lin.num_outputs
        if getattr(self.likelihood, "num_tasks", None) != (C if C > 1 else None):
            fits = f"MultitaskGaussianLikelihood({C})" if C > 1 else "GaussianLikelihood()"
            raise ValueError(f"a network of {C} outputs needs likelihood={fits}, or None.")
        self.mean_module = LinearizedMean(lin) if mean is None else mean
        self.covar_module = LinearizedKernel(lin, **options) if kernel is None else kernel
        for name, module in self.named_modules():
            other = getattr(module, "lin", None)
            if isinstance(other, Linearization) and lin.tangent_space.difference(other.tangent_space) is not None:
                raise ValueError(f"{name} belongs to another linearisation: make both from one.")

    def forward(self, x: Float[Tensor, "*b n d"]) -> Normal:
        """Return the prior distribution of the outputs at x."""
        mean, kernel = self.mean_module(x), self.covar_module(x)
        several = mean.ndim == x.ndim
        return MultitaskNormal(mean, kernel) if several else Normal(mean, kernel)


def _training_data(lin: Linearization) -> tuple[Float[Tensor, "N d"], Tensor]:
    """Return the inputs, one row per point, and the targets, (N,) for one output; raise for those that do not fit."""
    if not isinstance(lin.likelihood, Gaussian):
        raise ValueError("an exact Gaussian process needs a Gaussian likelihood: see co.gp.laplace_gp.")
    batches = list(lin.gathered().data)
    if any(batch.weights is not None for batch in batches):
        raise ValueError("gpytorch's likelihoods take no weights of points: linearise without them, or use co.laplace.")
    inputs = [batch.inputs for batch in batches if isinstance(batch.inputs, Tensor)]
    if len(inputs) < len(batches):
        as_points(lin, torch.empty(0))  # raises an error that says what to do
    y = torch.cat([batch.targets for batch in batches])
    return torch.cat(inputs).flatten(1), y.squeeze(1) if y.shape[1] == 1 else y


def _likelihood_of(lin: Linearization) -> GaussianLikelihood | MultitaskGaussianLikelihood:
    """Return gpytorch's likelihood with the noise of the linearisation's likelihood."""
    noise, C = lin.likelihood.single_noise, lin.num_outputs
    if noise is None:
        raise ValueError(f"{lin.likelihood!r} has several noises: pass likelihood=MultitaskGaussianLikelihood({C}).")
    options: dict[str, Any] = {"noise_constraint": Positive()}  # gpytorch's own constraint is at least 1e-4
    made: Any = GaussianLikelihood(**options)
    if C > 1:
        made = MultitaskGaussianLikelihood(C, has_task_noise=False, **options)
    made = made.to(lin.theta)
    made.noise = noise.detach().clone()
    return made
