"""The outputs of a network under a distribution of its weights: their moments and their draws.

| weights                      | linearised outputs                                              | class            |
|------------------------------|-----------------------------------------------------------------|------------------|
| N(θ*, T P⁻¹)                 | normal, with the covariance T J P⁻¹ Jᵀ                          | `NormalOutputs`  |
| draws θ_k of it              | normal, with the mean of J z_k (J z_k)ᵀ over z_k = θ_k − θ*      | `DrawnOutputs`   |

If the mean of the Gaussian is a `step` away from θ*, the mean of the outputs moves by J times it, and z_k start there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.ambient import SMALL_BYTES
from curvops.checks import carries_graph
from curvops.linalg import Dense, LowRank, Operator
from curvops.linalg.core.cache import Cache
from curvops.linalg.operators.algebra import Product
from curvops.network import PointNormals
from curvops.network.likelihoods import Bernoulli, Gaussian, Likelihood
from curvops.operators import Linearization
from curvops.operators.function_space.point_covariance import row_covariances
from curvops.operators.linearized.network_operator import Jacobian
from curvops.posterior.predictions.answers import (
    NODES,
    NUMBERS,
    ErrorOfMean,
    Uncertainty,
    decompose_normal_labels,
    error_of_mean,
    gaussian_log_density,
    join_uncertainties,
    log_likelihoods,
    moments_of_draws,
    normal_log_likelihoods,
)

OUTPUT_DRAWS = 1000
"""The number of draws of the outputs at each point for averages over them, if no samples are given."""
DRAWN_NUMBERS = 2**23
"""How many numbers these draws take at a time."""

SomeOutputs = TypeVar("SomeOutputs", bound="OutputDistribution")
OutputMoments = tuple[Float[Tensor, "N C"], LinearOperator]
"""The mean of the outputs and their covariance, (N·C, N·C) if joint, otherwise (N, C, C)."""


@dataclass(frozen=True, eq=False)
class OutputDistribution(ABC):
    """The outputs of a linearised network under a distribution of the weights, at the inputs x.

    What its methods compute in common (the Jacobian, means, covariances and products) is kept as long as it lives.
    """

    lin: Linearization
    error: ErrorOfMean = field(default=error_of_mean, kw_only=True)
    """The standard error of means over the draws of the outputs."""
    step: Float[Tensor, " D"] | None = field(default=None, kw_only=True)
    x: Any = field(default=None, kw_only=True)
    rtol: float | None = field(default=None, kw_only=True)
    """The relative residual of exact solves."""
    correction: ClassVar[int] = 1
    """What the variance of a mean of targets lacks in draws, as in `torch.var`: their own mean is a fitted one."""
    is_normal: ClassVar[bool] = True
    """Whether the outputs are normal, so that answers may have a closed form."""

    @cached_property
    def jacobian(self) -> Jacobian:
        """The Jacobian at x."""
        return self.lin.jacobian(self.x, differentiable=True)

    @cached_property
    def linear_mean(self) -> Float[Tensor, "N C"]:
        """The outputs f* + J step, with a row for each position of a sequence."""
        outputs = self.jacobian.outputs()
        if self.step is not None:
            outputs = outputs + self.jacobian._matmul(self.step).view_as(outputs)
        return outputs.reshape(-1, self.lin.output_shape[-1])

    @property
    def mean(self) -> Float[Tensor, "N C"]:
        """The mean of the outputs."""
        return self.linear_mean

    def at_draws(self, weights: Float[Tensor, "k D"]) -> DrawnOutputs:
        """Return the outputs at given draws of the weights, which count as independent."""
        return DrawnOutputs(self.lin, weights, step=self.step)

    @abstractmethod
    def covariance(self, together: int | None = 1) -> LinearOperator:
        """Return the covariance of the outputs, joint within `together` points (None: all)."""

    @abstractmethod
    def draws(self, normals: PointNormals | None, start: int = 0) -> Iterator[Float[Tensor, "k n C"]]:
        """Yield draws of the outputs, some points at a time; x begins with point number `start` of all ranks."""

    @abstractmethod
    def log_likelihoods_of_draws(
        self, likelihood: Likelihood, targets: Tensor, normals: PointNormals | None, start: int
    ) -> Float[Tensor, "k N"]:
        """Return what averages, as exp, to the likelihood of each target over draws of the outputs."""

    def has_moments_of(self, likelihood: Likelihood | None) -> bool:
        """Return whether the targets' moments have a closed form."""
        return self.is_normal and isinstance(likelihood, NUMBERS)

    @abstractmethod
    def drawn_moments(
        self, likelihood: Likelihood, together: int | None, normals: PointNormals | None, start: int
    ) -> OutputMoments:
        """Return the moments of real targets over draws of the outputs: Cov[E[y | f]] + E[Var[y | f]] is theirs."""

    def require_whole_groups(self, points: int, together: int) -> None:
        """Raise ValueError if the size of a group does not divide the number of points, or would cut sequences."""
        positions = self.lin.num_outputs // self.lin.output_shape[-1]
        if points % together or (together % positions and positions % together):
            cut = "" if positions == 1 else f", and sequences of {positions} positions count as that many"
            raise ValueError(f"groups={together} must divide the {points} points of x{cut}: pad x, or leave some out.")


@dataclass(frozen=True, eq=False)
class NormalOutputs(OutputDistribution):
    """The normal outputs f* + J(θ − θ*) under θ ~ N(θ* + step, T P⁻¹)."""

    inverse_of_rows: Callable[[int, float | None, bool], LinearOperator]
    """A function that returns P⁻¹ for some rows of J, at a relative residual, and whether they have a gradient in x."""
    temperature: float
    _covariances: dict[int | None, LinearOperator] = field(init=False, default_factory=dict)

    def covariance(self, together: int | None = 1) -> LinearOperator:
        """Return T J P⁻¹ Jᵀ, which is computed on first use."""
        if together in self._covariances:
            return self._covariances[together]
        jacobian = self.jacobian
        rows, C = jacobian.shape[-2], self.lin.output_shape[-1]
        inverse = self.inverse_of_rows(rows, self.rtol, jacobian.is_recorded)
        if jacobian.is_recorded and carries_graph(inverse.representation()):
            raise ValueError("covariances have a gradient in x, or in the prior precision and the noise: detach one.")
        covariance: LinearOperator
        if not rows:
            shape = (0, 0) if together is None else (0, together * C, together * C)
            covariance = Dense(self.lin.theta.new_zeros(shape), psd=True)
        elif together is None:
            weighted = inverse if self.temperature == 1 else inverse * self.temperature
            covariance = JointCovariance(jacobian, weighted, jacobian.mT)
        else:
            budget = jacobian.passes.memory_budget
            options = {"outputs": together * C, "temperature": self.temperature}
            covariance = PointCovariance(jacobian, inverse, **options, memory_budget=budget, cache=Cache())
        self._covariances[together] = covariance
        return covariance

    def draws(self, normals: PointNormals | None, start: int = 0) -> Iterator[Float[Tensor, "k n C"]]:
        """Yield draws from each point's own covariance."""
        assert normals is not None
        for mean, root, noise in self._standardised(normals, start):
            yield mean + root_times(root, noise)

    def log_likelihoods_of_draws(
        self, likelihood: Likelihood, targets: Tensor, normals: PointNormals | None, start: int
    ) -> Float[Tensor, "k N"]:
        """Return log p(y | f_k) + log w_k, from draws around the outputs that make each target likely.

        The weight w_k is the density of f_k over that of its draw. Draws around the mean would miss a target that is
        likely only in the tails, and their standard error would not show it.
        """
        assert normals is not None
        first, parts = 0, []
        for mean, root, noise in self._standardised(normals, start):
            some = targets[first : first + len(mean)]
            centre = likely_noise(likelihood, mean.detach(), root.detach(), some)
            of_draws = log_likelihoods(likelihood, [mean + root_times(root, centre + noise)], some)
            parts.append(of_draws - (noise * centre).sum(-1) - centre.square().sum(-1) / 2)
            first += len(mean)
        return torch.cat(parts, 1)

    def _standardised(
        self, normals: PointNormals, start: int
    ) -> Iterator[tuple[Float[Tensor, "n C"], Float[Tensor, "n C C"], Float[Tensor, "k n C"]]]:
        """Yield the mean, a root of the covariance, and standard normal numbers, at some points at a time."""
        covariances, means = self.covariance().to_dense(), self.linear_mean
        step = max(1, DRAWN_NUMBERS // (OUTPUT_DRAWS * covariances.shape[-1]))
        first = start * self.lin.num_outputs // self.lin.output_shape[-1]
        for mean, covariance in zip(means.split(step), covariances.split(step)):
            yield mean, covariance_root(covariance), gaussian_noise(mean, OUTPUT_DRAWS, normals, first)
            first += len(mean)

    def uncertainty_of_labels(self, likelihood: Bernoulli) -> Uncertainty:
        """Return the uncertainty of labels, by an integral over the normal logit of each."""
        mean, variance = self.mean, self.covariance().diagonal(dim1=-2, dim2=-1)
        step = max(1, DRAWN_NUMBERS // (NODES * mean.shape[-1]))
        parts = zip(mean.split(step), variance.split(step))
        return join_uncertainties([decompose_normal_labels(likelihood, *some) for some in parts])

    def log_likelihoods_of(self, likelihood: Likelihood, targets: Tensor) -> Float[Tensor, " N"]:
        """Return log p(y) of Gaussian targets, and by an integral of others with a single normal output each."""
        mean = self.mean
        if isinstance(likelihood, Gaussian):
            noisy = self.covariance().add_diagonal(likelihood.noise.to(mean).expand(mean.shape[-1]))
            return gaussian_log_density(mean, noisy.to_dense(), targets)
        variance = self.covariance().diagonal(dim1=-2, dim2=-1)
        step = DRAWN_NUMBERS // NODES
        parts = zip(mean.split(step), variance.split(step), targets.split(step))
        return torch.cat([normal_log_likelihoods(likelihood, *some) for some in parts])

    def drawn_moments(
        self, likelihood: Likelihood, together: int | None, normals: PointNormals | None, start: int
    ) -> OutputMoments:
        """Return the moments over draws from each point's own covariance; raise ValueError for joint ones."""
        if together != 1:
            raise ValueError(f"joint targets of {likelihood!r} need draws of the weights: pass samples=post.sample(k).")
        means, blocks = [], []
        for draws in self.draws(normals, start):
            mean, deviations, noise = moments_of_draws(likelihood, draws, self.correction)
            last = deviations.movedim(0, -1)
            means.append(mean)
            blocks.append(last @ last.mT / len(draws) + torch.diag_embed(noise))
        return torch.cat(means), Dense(torch.cat(blocks), psd=True)


@dataclass(frozen=True, eq=False)
class DrawnOutputs(OutputDistribution):
    """The outputs f* + J(θ_k − θ*) at draws θ_k of a Gaussian around θ* + step."""

    weights: Float[Tensor, "k D"]

    def covariance(self, together: int | None = 1) -> LinearOperator:
        """Return the mean over draws of the outer products of J z_k."""
        return self.covariance_of(self.pushed, together)

    def functions(self) -> Float[Tensor, "k N C"]:
        """Return f* + J(θ_k − θ*), jointly at all points."""
        return self.linear_mean + self.pushed

    def draws(self, normals: PointNormals | None, start: int = 0) -> Iterator[Float[Tensor, "k n C"]]:
        """Yield the functions at all points together."""
        yield self.functions()

    def covariance_of(self, deviations: Float[Tensor, "k N C"], together: int | None) -> LinearOperator:
        """Return the mean over draws of the outer products of the outputs' deviations."""
        last = deviations.movedim(0, -1)
        if together is not None:
            blocks = last.unflatten(0, (-1, together)).flatten(1, 2)
            return SampledCovariance(blocks, memory_budget=self.lin.memory_budget, cache=Cache())
        root = last.flatten(0, 1)
        return LowRank(root, root.new_full(root.shape[1:], 1 / root.shape[1]))

    def log_likelihoods_of_draws(
        self, likelihood: Likelihood, targets: Tensor, normals: PointNormals | None, start: int
    ) -> Float[Tensor, "k N"]:
        """Return log p(y | f_k) at the functions."""
        return log_likelihoods(likelihood, self.draws(normals, start), targets)

    def drawn_moments(
        self, likelihood: Likelihood, together: int | None, normals: PointNormals | None, start: int
    ) -> OutputMoments:
        """Return the moments over the functions, which are joint at all points."""
        mean, deviations, noise = moments_of_draws(likelihood, self.functions(), self.correction)
        covariance = self.covariance_of(deviations, together)
        return mean, covariance.add_diagonal(noise.reshape(covariance.shape[:-1]))

    @cached_property
    def of_network(self) -> Float[Tensor, "k N C"]:
        """The outputs f(x, θ_k) of the network itself."""
        return torch.stack([self.lin.output_rows(self.x, weights) for weights in self.weights])

    @cached_property
    def pushed(self) -> Float[Tensor, "k N C"]:
        """The pushed deviations J z_k."""
        C, rows = self.lin.output_shape[-1], self.jacobian.shape[-2]
        mean = self.lin.theta if self.step is None else self.lin.theta + self.step
        return self.jacobian._matmul((self.weights - mean).mT).mT.unflatten(1, (rows // C, C))


def normals_for(outputs: OutputDistribution, generator: torch.Generator | None) -> PointNormals | None:
    """Return the numbers for draws of normal outputs; None if the outputs are draws already."""
    return PointNormals.drawn(generator) if isinstance(outputs, NormalOutputs) else None


def covariance_root(covariance: Float[Tensor, "n C C"]) -> Float[Tensor, "n C C"]:
    """Return a root R of C × C covariances R Rᵀ, which may be singular, from their eigenvectors."""
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp_min(0).sqrt().unsqueeze(-2)


def root_times(root: Float[Tensor, "n C C"], z: Float[Tensor, "k n C"]) -> Float[Tensor, "k n C"]:
    """Return R z_k at each point."""
    return torch.einsum("nij,knj->kni", root, z)


def gaussian_noise(mean: Float[Tensor, "n C"], k: int, normals: PointNormals, start: int) -> Float[Tensor, "k n C"]:
    """Draw k standard normal numbers for each output.

    A point's numbers depend on its position, counted from `start`, whatever the ranks and the points at a time.
    """
    n, C = mean.shape
    return normals.block(range(1), slice(start, start + n), k * C, mean).view(n, k, C).transpose(0, 1)


@torch.no_grad()
def likely_noise(
    likelihood: Likelihood, mean: Float[Tensor, "n C"], root: Float[Tensor, "n C C"], targets: Tensor
) -> Float[Tensor, "n C"]:
    """Return the z that maximises p(y | mean + R z) N(z; 0, I), by the longest steps of Fisher scoring that go up."""
    z, identity = torch.zeros_like(mean), torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
    shares = mean.new_tensor([1, 0.5, 0.25, 0.125, 0]).view(-1, 1, 1)
    for _ in range(10):
        outputs = mean + root_times(root, z.unsqueeze(0)).squeeze(0)
        slope = z.unsqueeze(-1) + root.mT @ likelihood.residual(outputs, targets).unsqueeze(-1)
        curved = _curved(likelihood, outputs, root, targets)
        factor = torch.linalg.cholesky_ex(identity + root.mT @ curved).L
        tried = z - shares * torch.cholesky_solve(slope, factor).squeeze(-1).nan_to_num(0, 0, 0)
        values = log_likelihoods(likelihood, [mean + root_times(root, tried)], targets) - tried.square().sum(-1) / 2
        first = (values >= values[-1] - 1e-6).byte().argmax(0)  # within rounding counts as not going down
        z = tried[first, torch.arange(len(mean), device=mean.device)]
    return z


def _curved(
    likelihood: Likelihood, outputs: Float[Tensor, "n C"], root: Float[Tensor, "n C C"], targets: Tensor
) -> Float[Tensor, "n C C"]:
    """Return H R, for a likelihood without a Fisher in closed form with |H| of the Hessian at the targets instead."""
    try:
        return likelihood.hessian_product(outputs, root.movedim(-1, 0), targets).movedim(0, -1)
    except ValueError:
        hessian = torch.func.jacrev(lambda f: likelihood.residual(f, targets).sum(0), chunk_size=1)(outputs)
        values, vectors = torch.linalg.eigh(hessian.movedim(1, 0))
        return (vectors * values.abs().unsqueeze(-2)) @ vectors.mT @ root


WHOLE_BLOCKS = 64
"""Up to this many outputs per point, variances are read from the blocks, which cost little more."""


def require_room(covariance: Operator, budget: int, what: str) -> None:
    """Raise ValueError, with what needs it, if the dense covariance takes more than the memory budget."""
    needed = covariance.shape.numel() * covariance.dtype.itemsize
    if needed > max(budget, SMALL_BYTES):
        raise ValueError(
            f"{what} {needed:,} bytes, and the memory budget is {budget:,}. Variances do not need them (.variance, "
            "link='probit'), nor draws, samples=post.sample(k) and post.functions(x, k). Or pass fewer points, "
            "joint=False, or co.linearize a larger memory_budget."
        )


class PointBlocks(Operator):
    """A C × C covariance for each of N points, (N, C, C), without covariances between points.

    Blocks are computed once, when they are used; variances of many outputs do not need them. `memory_budget` limits the
    bytes of the blocks.
    """

    psd = True

    @abstractmethod
    def _compute(self, diagonals: bool) -> Tensor:
        """Compute all blocks, or their diagonals alone."""

    def to_dense(self) -> Tensor:
        """Return all blocks; raise ValueError if they take more than the memory budget."""
        n, c = self.shape[:2]
        require_room(self, self._kwargs["memory_budget"], f"the {c:,} × {c:,} covariances of {n:,} points need")
        cache: Cache = self._kwargs["cache"]
        return cache.get_or_compute("blocks", self.representation(), partial(self._compute, False))

    def _diagonal(self) -> Tensor:
        cache, tensors = self._kwargs["cache"], self.representation()
        if self.shape[-1] <= WHOLE_BLOCKS or cache.get("blocks", tensors) is not None:
            return self.to_dense().diagonal(dim1=-2, dim2=-1)
        variances: Tensor = cache.get_or_compute("variances", tensors, partial(self._compute, True))
        return variances

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.to_dense() @ rhs

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self._matmul(rhs)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        return Dense(self.to_dense())._getitem(row_index, col_index, *batch_indices)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        return self.to_dense()[(*batch_indices, row_index, col_index)]

    def _expand_batch(self, batch_shape: Any) -> LinearOperator:
        return Dense(self.to_dense())._expand_batch(batch_shape)

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return Dense(self.to_dense())._unsqueeze_batch(dim)

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return Dense(self.to_dense())._permute_batch(*dims)


class SampledCovariance(PointBlocks):
    """The mean over k draws of (J z_k)(J z_k)ᵀ within each point, from the deviations J z_k (N, C, k)."""

    def _size(self) -> torch.Size:
        n, c, _ = self._args[0].shape
        return torch.Size((n, c, c))

    def _compute(self, diagonals: bool) -> Tensor:
        pushed = self._args[0]
        return pushed.square().mean(-1) if diagonals else pushed @ pushed.mT / pushed.shape[-1]

    def _matmul(self, rhs: Tensor) -> Tensor:
        pushed = self._args[0]
        return pushed @ (pushed.mT @ rhs) / pushed.shape[-1]


class PointCovariance(PointBlocks):
    """The C × C diagonal blocks of T J P⁻¹ Jᵀ, one per point: (N, C, C), from J and P⁻¹; points are independent.

    With more rows per block (`outputs`), a block is the joint covariance of several points. The first use solves N·C
    systems with P, in blocks (none for a structured P, see `operators.point_covariance`). The result takes N·C²
    numbers, or N·C for variances alone, and is kept unless a gradient in the prior precision or the likelihood's
    hyperparameters is required.
    """

    def _size(self) -> torch.Size:
        c: int = self._kwargs["outputs"]
        return torch.Size((self._args[0].shape[-2] // c, c, c))

    def _compute(self, diagonals: bool) -> Tensor:
        jacobian, inverse = self._args
        return row_covariances(jacobian, inverse, self._kwargs["outputs"], diagonals) * self._kwargs["temperature"]


class CovarianceOverRanks(PointBlocks):
    """Covariances that are gathered from the ranks by `split`, or cut from those of all, when they are first used.

    `size` is their number; or their rows, if they are joint. All ranks must use them in the same order.
    """

    def _size(self) -> torch.Size:
        base, size = self._args[0], self._kwargs["size"]
        return torch.Size((size, size) if base.ndim == 2 else (size, *base.shape[1:]))

    def _compute(self, diagonals: bool) -> Tensor:
        base, split = self._args[0], self._kwargs["split"]
        rows = split.rows_asked_for(base.diagonal(dim1=-2, dim2=-1) if diagonals else base.to_dense())
        return split.rows_asked_for(rows, 1) if base.ndim == 2 and not diagonals else rows


class CovarianceByPosition(PointBlocks):
    """Covariances of positions (N·T, C, C) as those of points, (N, *positions, C, C), when they are first used."""

    def _size(self) -> torch.Size:
        return torch.Size((*self._kwargs["places"], *self._args[0].shape[1:]))

    def _compute(self, diagonals: bool) -> Tensor:
        base, places = self._args[0], self._kwargs["places"]
        return (base.diagonal(dim1=-2, dim2=-1) if diagonals else base.to_dense()).unflatten(0, places)


class JointCovariance(Product):
    """The covariance J W Jᵀ over all outputs of all points together, (N·C, N·C), formed on demand."""

    def to_dense(self) -> Tensor:
        """Form the matrix; raise ValueError if it exceeds the memory budget."""
        jacobian = self.factors[0]
        require_room(self, jacobian.passes.memory_budget, f"the joint covariance of {self.shape[-1]:,} outputs needs")
        return row_covariances(jacobian, self.factors[1], self.shape[-1])[0]

    def _diagonal(self) -> Tensor:
        return self.to_dense().diagonal() if self.factors[0].is_recorded else super()._diagonal()
