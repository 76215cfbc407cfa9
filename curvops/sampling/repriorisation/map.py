"""Repriorisation of the readout: its white weights become those of a linear regression on the last features.

With these weights integrated out, the density of the targets has a closed-form gradient by an inverse, which takes a
fraction of the time of the derivative of a Cholesky factor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from curvops.checks import in_forward_mode
from curvops.network import Blocks
from curvops.sampling.repriorisation.conjugate import (
    Conjugate,
    DataSpace,
    FeatureSpace,
    ReadoutFeatures,
    Targets,
    log_root,
)
from curvops.sampling.repriorisation.readout import Readout
from curvops.sampling.repriorisation.reprior_problem import RepriorProblem, log_normal


class MappedWeights(NamedTuple):
    """The image T(φ) of white weights, log|det ∂T/∂φ|, and the outputs for all data at T(φ)."""

    white: Blocks
    logdet: Float[Tensor, ""]
    outputs: Float[Tensor, "N C"]

    def log_density(self, problem: RepriorProblem) -> Float[Tensor, ""]:
        """Return log p̃(φ) = log p(y | T(φ)) + log p(T(φ)) + log|det ∂T/∂φ| in nats, with all constants, in float64."""
        return problem.log_likelihood(self.outputs) + log_normal(self.white) + self.logdet


@dataclass(frozen=True, eq=False)
class Change(ABC):
    """A change of variables φ -> v of white weights, by a Gaussian model of `targets`.

    `root` are the square roots of the points' weights, None if all are 1.
    """

    problem: RepriorProblem
    targets: Float[Tensor, "N C"]
    root: Float[Tensor, "N 1"] | None

    @abstractmethod
    def forward(self, phi: Mapping[str, Tensor]) -> MappedWeights:
        """Return T(φ), its log-determinant and the network's outputs there."""

    @abstractmethod
    def inverse(self, white: Mapping[str, Tensor]) -> Blocks:
        """Return the φ with T(φ) = v."""

    def map(self, phi: Mapping[str, Tensor]) -> Blocks:
        """Return v = T(φ)."""
        return self.forward(phi).white

    def log_density(self, phi: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """Return log p̃(φ), at the cost of `forward`."""
        return self.forward(phi).log_density(self.problem)

    def weigh(self, rows: Float[Tensor, "N k"]) -> Float[Tensor, "N k"]:
        """Multiply the row of each point by the square root of its weight."""
        return rows if self.root is None else self.root * rows


@dataclass(frozen=True, eq=False)
class ReadoutMap(Change):
    """A change of variables of the readout's blocks by `conjugate`; all other blocks are unchanged.

    It is block-triangular, so its determinant is that of the readout's block (Hron et al. 2022, section 3). Each
    method costs one forward pass.
    """

    readout: Readout
    conjugate: Conjugate

    def features(self, white: Mapping[str, Tensor]) -> Float[Tensor, "N p"]:
        """Return Ψ for all data, which does not depend on the readout's blocks. One forward pass."""
        problem = self.problem
        values = problem.theta(white)
        each = (self.readout.features(problem.model, values, inputs, problem.scale) for inputs in problem.inputs)
        return torch.cat(list(each))

    def forward(self, phi: Mapping[str, Tensor]) -> MappedWeights:
        """Return T(φ), its log-determinant and the outputs."""
        features = self.features(phi)
        omega, logdet = self.conjugate.forward(*self._regression(features), self.readout.matrix(phi))
        return MappedWeights({**phi, **self.readout.blocks(omega)}, logdet, features @ omega)

    def inverse(self, white: Mapping[str, Tensor]) -> Blocks:
        """Return φ; the blocks of the readout have a closed form."""
        omega = self.conjugate.inverse(*self._regression(self.features(white)), self.readout.matrix(white))
        return {**white, **self.readout.blocks(omega)}

    def _regression(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features and targets of the regression."""
        return self.weigh(features), self.weigh(self.targets)


@dataclass(frozen=True, eq=False)
class ExactReadoutMap(ReadoutMap):
    """The change of variables at λ = σ² of real targets, where the readout's φ are N(0, I) and T need not be applied.

    The density is N(φ; 0, I) times that of the targets with the readout integrated out, which is e^h in Hron et al.
    2022, section 3.
    """

    conjugate: FeatureSpace | DataSpace

    def log_density(self, phi: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """Return log p̃(φ). One forward pass."""
        if in_forward_mode():  # PyTorch's own operations have all derivatives
            return super().log_density(phi)
        noise = self.problem.log_likelihood(self.targets)  # the log-likelihood for outputs equal to the targets
        return log_normal(phi) + noise + log_marginal(self.conjugate, *self._regression(self.features(phi)))


def log_marginal(space: FeatureSpace | DataSpace, features: ReadoutFeatures, targets: Targets) -> Float[Tensor, ""]:
    """Return log N(Y; 0, S) − log N(0; 0, λI) over all columns, S = λI + ΨΨᵀ, in float64.

    It is differentiable in Ψ any number of times, but by reverse mode only: PyTorch's forward derivatives (2.13) are
    wrong for `cholesky_inverse`, and for any `Function` if forward modes are nested.
    """
    value: Tensor = _LogMarginal.apply(space, features, targets, space.factor(features))  # type: ignore[no-untyped-call]
    return value


class _LogMarginal(Function):
    """The function log √det(λS⁻¹)ᵏ − ½ tr YᵀS⁻¹Y of Ψ, Y and Ψ's factor L.

    Its gradient is αμᵀ − k S⁻¹Ψ with α = S⁻¹Y.

    The gradient in Ψ includes the dependence through L. L is an argument so that the gradient, computed from Ψ and L by
    differentiable operations, can be differentiated again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(space: FeatureSpace | DataSpace, features: Tensor, targets: Tensor, L: Tensor) -> Tensor:
        alpha, mean = space.posterior(L, features, targets)
        squares = space.level * _squares(alpha) + _squares(mean)  # tr YᵀS⁻¹Y as a sum, without a difference
        return log_root(L, space.level, targets.shape[-1]) - 0.5 * squares

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.space, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        features, targets, L = ctx.saved_tensors
        alpha, mean = ctx.space.posterior(L, features, targets)
        slope = alpha @ mean.mT - targets.shape[-1] * ctx.space.decorrelate(L, features)
        return None, grads[0].to(slope.dtype) * slope, None, None


def _squares(block: Tensor) -> Tensor:
    return block.square().sum(dtype=torch.float64)
