"""A linearised network in gpytorch: its tangent kernel, its prior mean, and both with its data as an `ExactGP`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from gpytorch.constraints import Interval, Positive
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import Mean
from gpytorch.models import ExactGP
from gpytorch.priors import Prior
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.argument_types import LikelihoodChoice, PriorMean, PriorPrecision
from curvops.checks import check_choice, checked_number, refuse
from curvops.gp.operator_kernel import (
    OUTPUTS,
    OperatorKernel,
    as_points,
    own_outputs,
    same_points,
)
from curvops.linalg import Dense, LowRank
from curvops.linalg.core.cache import Cache
from curvops.network.likelihoods import Gaussian
from curvops.network.model.parameters import layer_of, matching, read_mean, read_precision
from curvops.operators import Linearization, TangentKernel
from curvops.operators.function_space.gram_matrix import gram_terms, gram_with_graph
from curvops.posterior.predictions.normals import MultitaskNormal, Normal
from curvops.posterior.terms import check_linearization, require_linearized

OVER = ("scalar", "layers", "tensors")


class LinearizedKernel(OperatorKernel):
    """The tangent kernel k(x, x') = s J(x) A⁻¹ J(x')ᵀ, the prior covariance of a linearised network's outputs.

    The prior of the weights is N(m, A⁻¹). The kernel's parameters are the prior precision, one number for all weights,
    for each layer or for each tensor, and optionally the output scale s (redundant with a single prior precision).
    They are trained by gpytorch's marginal likelihoods with any optimiser. Rows are ordered point by point, as
    `MultitaskMultivariateNormal` interleaves them.

    The matrix for one set of points is J itself if it has fewer columns than rows (weight space), otherwise the Gram
    matrix, which is kept for the last inputs without a gradient. If the memory budget has no room for the Gram matrix,
    the kernel is known by products with J; plus noise it is then solved by JᵀJ (D × D), streamed over the data once, if
    there are fewer weights than rows. Sums with a noise variance remain operators of curvops, with its solves and
    determinants, and so do `kernel + other` and `kernel * other`. Kernels that gpytorch makes from this one belong in a
    `ComposedKernel`, for instance `ComposedKernel(ScaleKernel(kernel))`; otherwise gpytorch solves with its conjugate
    gradients.

    Args:
        lin: the linearised network. It is not a submodule: it is not trained, not moved, and not in the state dict.
        prior_precision: the initial A, a positive number, or {glob over parameter names: number}, one parameter each.
        over: which weights share a number: "scalar" (all), "layers" (a module's own parameters) or "tensors".
        outputs: "joint" is the multi-output kernel; "independent" is a batch of C kernels (C, n, m), one for each
            output separately, as gpytorch's `IndependentMultitaskVariationalStrategy` takes it. Batches of inputs then
            have a last dimension of 1 or C. It costs as much as the joint kernel.
        outputscale: the initial s; None leaves it out.
        prior_precision_prior: a gpytorch prior of A.
        prior_precision_constraint: a gpytorch constraint of A; None is `Positive()`.
        outputscale_prior: a gpytorch prior of s.
        outputscale_constraint: a gpytorch constraint of s; None is `Positive()`.

    Raises:
        TypeError, ValueError: an argument is of another kind; inputs do not fit the network; batches have other
            lengths.

    Source: Jacot et al. 2018; Khan et al. 2019 for networks as Gaussian processes.

    Examples:
        >>> kernel = co.gp.LinearizedKernel(lin, prior_precision=2.0)
        >>> kernel(x).shape
        torch.Size([16, 16])
    """

    parameters_by_batch = False

    def __init__(
        self,
        lin: Linearization,
        prior_precision: PriorPrecision = 1.0,
        *,
        over: str = "scalar",
        outputs: str = "joint",
        outputscale: float | None = None,
        prior_precision_prior: Prior | None = None,
        prior_precision_constraint: Interval | None = None,
        outputscale_prior: Prior | None = None,
        outputscale_constraint: Interval | None = None,
    ) -> None:
        super().__init__()
        require_linearized(lin)
        check_choice("outputs", outputs, OUTPUTS)
        self.lin, self._matrices = lin, Cache()
        if outputs == "independent":
            self.batch_shape = torch.Size((lin.num_outputs,))
        self._group_of, start = _groups(lin, prior_precision, over)
        self._add_parameter("prior_precision", start, prior_precision_prior, prior_precision_constraint)
        self.has_outputscale = outputscale is not None
        if outputscale is not None:
            scale = torch.tensor(checked_number("outputscale", outputscale), dtype=lin.theta.dtype)
            self._add_parameter("outputscale", scale.to(lin.theta.device), outputscale_prior, outputscale_constraint)
        without = outputscale is None and (outputscale_prior or outputscale_constraint)
        refuse(without, "a prior or constraint on the output scale needs an initial value: pass outputscale=1.0.")

    @property
    def prior_precision(self) -> Float[Tensor, " G"]:
        """The prior precision A, one number for each group of weights."""
        return self._value("prior_precision")

    @prior_precision.setter
    def prior_precision(self, value: Any) -> None:
        self._set_value("prior_precision", value)

    @property
    def outputscale(self) -> Float[Tensor, ""]:
        """The output scale s, 1 if the kernel has none."""
        return self._value("outputscale") if self.has_outputscale else torch.ones_like(self.lin.theta[0])

    @outputscale.setter
    def outputscale(self, value: Any) -> None:
        self._set_value("outputscale", value)

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        """Return C, the number of the network's outputs; 1 if they are independent."""
        return 1 if self.batch_shape else self.lin.num_outputs

    def extra_repr(self) -> str:
        """Return the linearisation, which torch prints among a module's parts."""
        return repr(self.lin)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> LinearOperator | Tensor:
        """Return the matrix (..., n·C, m·C), or its diagonal (..., n·C); for independent outputs (..., C, n, m).

        Raises ValueError for inputs of another size, and for batches that are not those of the outputs.
        """
        C, same = self.lin.num_outputs, same_points(x1, x2)
        matrix = self._joint(x1, x1 if same else x2, diag)
        if not self.batch_shape:
            return matrix
        if isinstance(matrix, Tensor):
            return own_outputs(matrix.unflatten(-1, (-1, C)).mT, 1)
        blocks = matrix.to_dense().unflatten(-1, (-1, C)).unflatten(-3, (-1, C)).diagonal(dim1=-3, dim2=-1)
        return Dense(own_outputs(blocks.movedim(-1, -3), 2), psd=same)

    def _joint(self, x1: Tensor, x2: Tensor, diag: bool) -> LinearOperator | Tensor:
        """Return the matrix of all outputs, or its diagonal."""
        if diag and x2 is not x1:
            return self._blocks(x1.unsqueeze(-2), x2.unsqueeze(-2)).diagonal(dim1=-2, dim2=-1).flatten(-2)
        if diag:
            return self._tangent_kernel(x1, x1).diagonal().reshape(*x1.shape[:-2], x1.shape[-2] * self.lin.num_outputs)
        if x1.ndim > 2 or x2.ndim > 2:
            return Dense(self._blocks(x1, x2), psd=x2 is x1)
        return self._matrix(x1, x2)

    def __getitem__(self, index: Any) -> LinearizedKernel:
        """Return the kernel itself; raise ValueError if gpytorch asks for that of some independent outputs."""
        if self.batch_shape:
            raise ValueError("a kernel of independent outputs cannot be indexed by output: index its evaluated matrix.")
        return self

    def _scales(self) -> Float[Tensor, " G"]:
        """Return s / A in the network's dtype, even if `.float()` or `.double()` has cast the parameters."""
        return (self.outputscale / self.prior_precision).to(self.lin.theta)

    def _entries(self) -> Float[Tensor, " D"]:
        """Return s A⁻¹, one number per weight."""
        selection, scales = self.lin.model.selection, self._scales()
        scale_of = {
            name: scales[self._group_of[name]].expand(shape) for name, shape in zip(selection.names, selection.shapes)
        }
        return selection.flatten(scale_of)

    def _tangent_kernel(self, x1: Tensor, x2: Tensor) -> TangentKernel:
        second = None if x2 is x1 else as_points(self.lin, x2)
        return TangentKernel(self.lin, self._precision(), as_points(self.lin, x1), second)

    def _precision(self) -> Tensor:
        """Return a / s in the form of `TangentKernel`'s prior."""
        scales = self._scales()
        return scales.reciprocal().squeeze(0) if len(scales) == 1 else self._entries().reciprocal()

    def _blocks(self, x1: Tensor, x2: Tensor) -> Float[Tensor, "*b nC mC"]:
        """Return a matrix for each batch; a batch holds both sets of points if there are two."""
        batch, rows = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2]), x1.shape[-2] * self.lin.num_outputs
        sets = [x1] if x2 is x1 else [x1, x2]
        together = torch.cat([x.expand(*batch, -1, -1) for x in sets], -2)
        blocks = self._tangent_kernel(together, together).blocks(together.shape[-2])
        matrices = blocks.reshape(*batch, *blocks.shape[-2:])
        return matrices if x2 is x1 else matrices[..., :rows, rows:]

    def _matrix(self, x1: Tensor, x2: Tensor) -> LinearOperator:
        kernel = self._tangent_kernel(x1, x2)
        left, right, _ = kernel._args
        (rows, columns), weights = kernel.shape, self.lin.num_parameters
        room = left.passes.memory.room() // self.lin.theta.element_size()
        copies = 1 if self.lin.theta.dtype == torch.float64 else 3  # plus noise, J is solved with in float64, too
        if x2 is x1 and weights < rows and copies * rows * weights <= room:
            J = left.formed().mT if left.is_recorded else self._kept("J", x1, x2, lambda: left.formed().mT)
            return LowRank(J, self._entries())
        if rows * columns * (len(self.raw_prior_precision) + 1) > room:
            return kernel.keeping_in(self._kept("store", x1, x2, dict))
        if left.is_recorded or right.is_recorded:
            scales = self._scales()
            scale_of = {name: scales[group] for name, group in self._group_of.items()}
            return Dense(gram_with_graph(left, right, scale_of), psd=x2 is x1)
        one = torch.ones_like(self.lin.theta[0])  # J_g(x) J_g(x')ᵀ for each group of weights
        units = self._kept("grams", x1, x2, lambda: gram_terms(left, right, one, self._group_of))
        return Dense(torch.tensordot(self._scales(), units, 1), psd=x2 is x1)

    def _kept(self, kind: str, x1: Tensor, x2: Tensor, compute: Callable[[], Any]) -> Any:
        """Return `compute()`, or its last result of this kind if that is for the same points."""
        return self._matrices.get_or_compute(kind, (), compute, (x1.detach(), x2.detach()))

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearizedKernel:
        """Return a copy with its own parameters that shares the linearisation."""
        memo[id(self.lin)] = self.lin
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        new.__dict__.update({name: deepcopy(value, memo) for name, value in self.__dict__.items()})
        return new


def _groups(lin: Linearization, start: Any, over: str) -> tuple[dict[str, int], Float[Tensor, " G"]]:
    """Return the group of each parameter tensor, and the initial prior precision of each group."""
    check_choice("over", over, OVER)
    names = lin.model.selection.names
    if isinstance(start, Mapping):
        refuse(over != "scalar", f"prior_precision={{glob: number}} defines the groups itself: leave out over={over}.")
        read_precision("prior_precision", start, lin.model.selection, lin.theta)
        group_of = {name: i for i, glob in enumerate(start) for name in matching(names, glob)}
        values = [checked_number(f"prior_precision[{glob!r}]", value) for glob, value in start.items()]
    else:
        owner = {name: {"scalar": "", "layers": layer_of(name), "tensors": name}[over] for name in names}
        owners = list(dict.fromkeys(owner.values()))
        group_of = {name: owners.index(owner[name]) for name in names}
        values = [checked_number("prior_precision", start, kind="a number or {glob: number}")] * len(owners)
    return group_of, torch.tensor(values, dtype=lin.theta.dtype, device=lin.theta.device)


class LinearizedMean(Mean):
    """The mean f(x, θ*) + J(x)(m − θ*) of the linear model under its prior N(m, A⁻¹), as a gpytorch mean.

    Together with `LinearizedKernel`, it makes a gpytorch `ExactGP` the linearised network as a Gaussian process: for a
    Gaussian likelihood its predictions are those of `co.laplace` at the linear model's mode.

    Inputs are (..., n, d); the result is (..., n) for a network with one output, otherwise (..., n, C). It costs a
    forward pass and one product with J, and has a gradient in the inputs, but none in the network's weights.

    Args:
        lin: the linearised network. It is not a submodule: it is not trained, not moved, and not in the state dict.
        prior_mean: m, a number, a vector (D,) or a mapping {glob over parameter names: number}.
        outputs: "joint", or "independent" for a kernel of independent outputs: the result is then (..., C, n).

    Raises:
        TypeError, ValueError: `lin` is not a linearisation; the prior mean is of another kind or size; inputs do not
            fit the network.

    Examples:
        >>> co.gp.LinearizedMean(lin)(x).shape
        torch.Size([8, 2])
    """

    def __init__(self, lin: Linearization, prior_mean: PriorMean = 0.0, *, outputs: str = "joint") -> None:
        super().__init__()
        require_linearized(lin)
        check_choice("outputs", outputs, OUTPUTS)
        self._outputs = outputs
        self.lin, self._prior_mean = lin, read_mean(prior_mean, lin.model.selection, lin.theta).detach()

    def extra_repr(self) -> str:
        """Return the linearisation, which torch prints among a module's parts."""
        return repr(self.lin)

    def forward(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n"] | Float[Tensor, "..."]:
        """Return the mean at x: (*b, n) for one output, else (*b, n, C); for independent outputs (..., C, n)."""
        jacobian = self.lin.jacobian(as_points(self.lin, x), differentiable=True)
        step = self._prior_mean.expand_as(self.lin.theta) - self.lin.theta
        values = jacobian.outputs().flatten() + jacobian._matmul(step)
        mean = values.reshape(*x.shape[:-1], self.lin.num_outputs)
        if self._outputs == "independent":
            return own_outputs(mean.mT, 1)
        return mean.squeeze(-1) if mean.shape[-1] == 1 else mean

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearizedMean:
        """Return a copy that shares the linearisation."""
        return LinearizedMean(self.lin, self._prior_mean, outputs=self._outputs)


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
        refuse(kernel is not None and options, f"the given kernel has its own {', '.join(options)}: leave these out.")
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
    inputs = [batch.inputs for batch in batches if isinstance(batch.inputs, Tensor)]
    if len(inputs) < len(batches):
        as_points(lin, torch.empty(0))  # raises an error that says what to do
    y = torch.cat([batch.targets for batch in batches])
    if any(batch.weights is not None for batch in batches) or bool(y.isnan().any()):
        raise ValueError("gpytorch's likelihoods take no weights of points and no missing targets: use co.laplace.")
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
