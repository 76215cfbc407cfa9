"""Repriorisation of the readout: its white weights become those of a linear regression on the last features.

The density of the targets with these weights integrated out has its slope in closed form: by an inverse, which takes a
fraction of the time of the derivative of a Cholesky factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function, forward_ad

from curvops.network.model.parameters import Blocks
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


class Moved(NamedTuple):
    """White weights T(φ), log|det ∂T/∂φ|, and the outputs of all data at T(φ)."""

    white: Blocks
    logdet: Float[Tensor, ""]
    outputs: Float[Tensor, "N C"]

    def log_density(self, problem: RepriorProblem) -> Float[Tensor, ""]:
        """log p̃(φ) = log p(y | T(φ)) + log p(T(φ)) + log|det ∂T/∂φ| in nats, with every constant, in float64."""
        return problem.log_likelihood(self.outputs) + log_normal(self.white) + self.logdet


@runtime_checkable
class Change(Protocol):
    """A change of variables φ -> v of white weights, one to one."""

    def map(self, phi: Mapping[str, Tensor]) -> Blocks:
        """v = T(φ)."""

    def forward(self, phi: Mapping[str, Tensor]) -> Moved:
        """T(φ), its determinant and what the network returns there."""

    def log_density(self, phi: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """log p̃(φ)."""

    def inverse(self, white: Mapping[str, Tensor]) -> Blocks:
        """φ."""


@dataclass(frozen=True, eq=False)
class ReadoutMap:
    """The readout's blocks change as `conjugate` says, all other blocks are left as they are.

    Block-triangular, so that the determinant is that of the readout's part alone (Hron et al. 2022, section 3).
    `targets` are those of the regression, `root` the square roots of the points' weights.
    """

    problem: RepriorProblem
    readout: Readout
    conjugate: Conjugate
    targets: Float[Tensor, "N C"]
    root: Float[Tensor, "N 1"] | None

    def features(self, white: Mapping[str, Tensor]) -> Float[Tensor, "N p"]:
        """Ψ of all data; the readout's own blocks do not enter. One forward pass."""
        problem = self.problem
        values = problem.theta(white)
        each = (self.readout.features(problem.model, values, inputs, problem.scale) for inputs in problem.inputs)
        return torch.cat(list(each))

    def map(self, phi: Mapping[str, Tensor]) -> Blocks:
        """T(φ). One forward pass."""
        return self.forward(phi).white

    def forward(self, phi: Mapping[str, Tensor]) -> Moved:
        """By one forward pass, whose features serve the outputs, too."""
        features = self.features(phi)
        omega, logdet = self.conjugate.forward(*self._weighted(features), self.readout.matrix(phi))
        return Moved({**phi, **self.readout.blocks(omega)}, logdet, features @ omega)

    def log_density(self, phi: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """log p̃(φ). One forward pass."""
        return self.forward(phi).log_density(self.problem)

    def inverse(self, white: Mapping[str, Tensor]) -> Blocks:
        """The readout's blocks of φ, in closed form."""
        features = self._weighted(self.features(white))
        return {**white, **self.readout.blocks(self.conjugate.inverse(*features, self.readout.matrix(white)))}

    def _weighted(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return (features, self.targets) if self.root is None else (self.root * features, self.root * self.targets)


@dataclass(frozen=True, eq=False)
class ExactReadoutMap(ReadoutMap):
    """At λ = σ² of real targets: whatever the features, the readout's φ are N(0, I), and T need not be applied.

    What is left is N(φ; 0, I) times the density of the targets with the readout integrated out: the e^h of Hron et al.
    2022, section 3.
    """

    conjugate: FeatureSpace | DataSpace

    def log_density(self, phi: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """log p̃(φ). One forward pass."""
        if in_forward_mode():  # where PyTorch's own operations have all derivatives
            return super().log_density(phi)
        noise = self.problem.log_likelihood(self.targets)  # of targets that are all met
        return log_normal(phi) + noise + log_marginal(self.conjugate, *self._weighted(self.features(phi)))


def log_marginal(space: FeatureSpace | DataSpace, features: ReadoutFeatures, targets: Targets) -> Float[Tensor, ""]:
    """log N(Y; 0, S) − log N(0; 0, λI) of all columns, S = λI + ΨΨᵀ, in float64.

    Differentiable in Ψ by reverse mode alone, any number of times: PyTorch (2.13) has a wrong forward derivative of
    `cholesky_inverse`, and one of any `Function` where forward modes are nested.
    """
    value: Tensor = _LogMarginal.apply(space, features, targets, space.factor(features))  # type: ignore[no-untyped-call]
    return value


def in_forward_mode() -> bool:
    """Whether the call is inside of `torch.func.jvp`, `jacfwd` or a level of dual numbers."""
    return bool(forward_ad._current_level >= 0)


class _LogMarginal(Function):
    """log √det(λS⁻¹)ᵏ − ½ tr YᵀS⁻¹Y of Ψ, Y and a factor L of Ψ's. Its slope in Ψ is αμᵀ − k S⁻¹Ψ, with α = S⁻¹Y.

    That holds what comes by way of L, too. L is handed over so that the slope, made of Ψ and L by differentiable
    operations, has derivatives of its own.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(space: FeatureSpace | DataSpace, features: Tensor, targets: Tensor, L: Tensor) -> Tensor:
        alpha, mean = space.posterior(L, features, targets)
        squares = space.level * _squares(alpha) + _squares(mean)  # of Y, by S⁻¹, without a difference
        return log_root(L, space.level, targets.shape[-1]) - 0.5 * squares

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.space, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        features, targets, L = ctx.saved_tensors
        alpha, mean = ctx.space.posterior(L, features, targets)
        slope = alpha @ mean.mT - targets.shape[-1] * ctx.space.decorrelated(L, features)
        return None, grads[0].to(slope.dtype) * slope, None, None


def _squares(block: Tensor) -> Tensor:
    return block.square().sum(dtype=torch.float64)
