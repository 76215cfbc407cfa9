"""The mode of the linear model in function space, by Newton's method for as many numbers u as there are outputs.

Under the prior N(m, A⁻¹) the outputs at the training points are a Gaussian process with the mean f₀ = f* + J(m − θ*)
and the covariance K = J A⁻¹ Jᵀ. Their mode is f = f₀ + K u, and the weights' m + A⁻¹Jᵀu, where u is the gradient of
log p(y | f). A Newton step is −(I + HK)⁻¹(u + r), r = −∇ log p, with H = L Lᵀ the output Fisher: by Woodbury's identity
−(u + r) + L (I + LᵀKL)⁻¹ LᵀK (u + r), which takes no inverse of K or of H, and no jitter (Rasmussen & Williams 2006,
algorithms 3.1 and 3.3, for any likelihood with a root of its output Fisher).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg import Reason
from curvops.linalg.core.memory import PRODUCT_VECTORS, holding, vector_bytes
from curvops.linalg.core.vectors import describe
from curvops.network import Batch, Exact
from curvops.operators import Linearization
from curvops.posterior.solves.newton import Point, minimise

BESIDE = PRODUCT_VECTORS + 2
"""The number of vectors of the size of the weights that finding a mode takes: a product's, θ and θ − θ*."""


@dataclass(eq=False)
class TrainingOutputs:
    """The outputs of the training points, and the terms of the likelihood at these or other outputs, in float64."""

    lin: Linearization

    @cached_property
    def batches(self) -> list[tuple[Batch, Tensor]]:
        """The labels and the outputs f* of each batch. One pass over the data."""
        return [(batch, J.outputs.detach().double()) for batch, J in self.lin.gathered().passes.each(0)]

    @property
    def outputs(self) -> Float[Tensor, "N C"]:
        """The outputs f* of all points."""
        return torch.cat([own for _, own in self.batches])

    def outputs_at(self, theta: Float[Tensor, " D"]) -> Float[Tensor, "N C"]:
        """Return the linear model's outputs f* + J(θ − θ*). A product with J."""
        return self.outputs + self.lin.push(theta - self.lin.theta).double()

    def root(self, f: Float[Tensor, "N C"]) -> Float[Tensor, "N C R"]:
        """Return L of each point at these outputs."""
        fisher = Exact(self.lin.likelihood)
        columns = fisher.num_columns(self.lin.num_outputs)
        parts = self._by_batch(lambda batch, at: fisher.columns(at, batch, 0, columns), f)
        return torch.cat(parts, 1).permute(1, 2, 0)

    def fisher_product(self, f: Float[Tensor, "N C"], v: Float[Tensor, " NC"]) -> Float[Tensor, " NC"]:
        """Return H v."""
        return self._multiplied(Exact.product, f, v)

    def root_product(self, f: Float[Tensor, "N C"], z: Float[Tensor, " NR"]) -> Float[Tensor, " NC"]:
        """Return L z."""
        return self._multiplied(Exact.root_product, f, z)

    def root_transpose_product(self, f: Float[Tensor, "N C"], v: Float[Tensor, " NC"]) -> Float[Tensor, " NR"]:
        """Return Lᵀ v."""
        return self._multiplied(Exact.root_transpose_product, f, v)

    def _multiplied(self, multiply: Callable[..., Tensor], f: Tensor, v: Tensor) -> Tensor:
        """Return a product of H, or of its root, at these outputs with a vector over all points."""
        fisher = Exact(self.lin.likelihood)
        parts = self._by_batch(lambda batch, at, u: multiply(fisher, at, u[None], batch)[0], f, v.view(len(f), -1))
        return torch.cat(parts).flatten()

    def loss(self, f: Float[Tensor, "N C"]) -> tuple[Tensor, Float[Tensor, " NC"]]:
        """Return −log p(y | f) and its gradient."""
        likelihood = self.lin.likelihood
        logs = self._by_batch(lambda b, at: likelihood.log_prob(at, b.targets, b.weights).sum(), f)
        gradients = self._by_batch(lambda b, at: likelihood.residual(at, b.targets, b.weights), f)
        return -torch.stack(logs).sum(), torch.cat(gradients).flatten()

    def _by_batch(self, function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
        sizes = [len(own) for _, own in self.batches]
        parts = zip(*(tensor.split(sizes) for tensor in tensors))
        return [function(batch, *each) for (batch, _), each in zip(self.batches, parts)]


class FunctionSpace(ABC):
    """The prior's covariance K of the training outputs, in the operations that Newton's method needs."""

    points: TrainingOutputs
    precision: Tensor
    """The prior precision A, 0-d or (D,)."""
    is_formed: bool
    """Whether K is formed, so that it has other rounding errors than J's own products."""
    matvecs: int = 0
    """The number of products with J A⁻¹ Jᵀ, or with a curvature, so far."""

    @abstractmethod
    def product(self, v: Float[Tensor, " NC"]) -> Float[Tensor, " NC"]:
        """Return K v."""

    @abstractmethod
    def step(self, f: Float[Tensor, "N C"], gap: Float[Tensor, " NC"], rtol: float) -> Float[Tensor, " NC"]:
        """Return Newton's step −(I + HK)⁻¹ gap, to a relative residual if it is iterative."""

    def step_of_weights(self, u: Float[Tensor, " NC"]) -> Float[Tensor, " D"]:
        """Return A⁻¹Jᵀu."""
        J = self.points.lin.jacobian()
        return J._t_matmul(u.to(J.theta).unsqueeze(1)).squeeze(1) / self.precision

    def by_passes(self, v: Float[Tensor, " NC"]) -> Float[Tensor, " NC"]:
        """Return K v by products with J."""
        self.matvecs += 1
        return self.points.lin.push(self.step_of_weights(v)).double().flatten()


@dataclass(frozen=True, eq=False)
class DualMode:
    """The mode in function space: u, the corresponding weights and outputs, and how the search ended."""

    u: Float[Tensor, " NC"]
    theta: Float[Tensor, " D"]
    outputs: Float[Tensor, "N C"]
    log_likelihood: Tensor
    gradient: float
    reason: Reason
    steps: int


@torch.no_grad()
def find_dual_mode(space: FunctionSpace, mean: Tensor, rtol: float, most_steps: int) -> DualMode:
    """Find the mode by Newton's method with a line search, from u = 0.

    The gradient at the weights m + A⁻¹Jᵀu is Jᵀ(u + r). If K is formed, its outputs are used first and then those of
    J itself, so that the mode does not have K's rounding.
    """
    lin = space.points.lin
    mean, J = mean.expand_as(lin.theta), lin.jacobian()
    start, steps = space.points.outputs_at(mean), 0
    u = start.new_zeros(start.numel())

    def step_at(point: DualPoint, steps: int) -> Tensor:
        goal = min(0.1, max(0.1 * rtol / point.relative, math.sqrt(point.relative)))
        return space.step(point.outputs, point.gap, goal)

    with holding(J, BESIDE * vector_bytes(describe(J))):
        for product in (space.product, space.by_passes) if space.is_formed else (space.product,):
            point = DualPoint(space, product, start, u)
            point, reason, steps = minimise(point, step_at, rtol, most_steps, steps)
            u = point.u
        theta = mean + space.step_of_weights(u)
    return DualMode(u, theta, point.outputs, -point.misfit, point.relative, reason, steps)


class DualPoint(Point):
    """−log p(y | f₀ + K u) + ½ uᵀK u at one u, with its gradient u + r in the metric of K."""

    def __init__(
        self,
        space: FunctionSpace,
        product: Callable[[Tensor], Tensor],
        start: Float[Tensor, "N C"],
        u: Float[Tensor, " NC"],
        image: Float[Tensor, " NC"] | None = None,
    ) -> None:
        self._given, self.u = (space, product, start), u
        self._image = product(u) if image is None else image
        self.outputs = start + self._image.view_as(start)
        self.misfit, residual = space.points.loss(self.outputs)
        self.gap, self.eps = u + residual, torch.finfo(space.points.lin.theta.dtype).eps
        self._value = float(self.misfit + 0.5 * u @ self._image)
        self._tried: dict[float, DualPoint] = {}
        self._moved: tuple[Tensor, Tensor] | None = None
        scale = float(residual.norm())
        self.relative = float(self.gap.norm()) / scale if scale else math.inf if bool(self.gap.any()) else 0.0

    @property
    def loss(self) -> float:
        return self._value

    def slope(self, step: Tensor) -> float:
        return float(self.gap @ self._image_of(step))

    def losses(self, step: Tensor) -> Callable[[float], float]:
        moved = self._image_of(step)

        def after(share: float) -> float:
            self._tried = {share: DualPoint(*self._given, self.u + share * step, self._image + share * moved)}
            return self._tried[share].loss

        return after

    def _image_of(self, step: Tensor) -> Tensor:
        """Return K times a step, once for the slope and the losses along it."""
        if self._moved is None or self._moved[0] is not step:
            self._moved = step, self._given[1](step)
        return self._moved[1]

    def move(self, step: Tensor, share: float) -> DualPoint:
        return self._tried[share]
