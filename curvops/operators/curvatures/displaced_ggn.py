"""The GGN of the linear model f* + J δ: curvature at its own outputs, where those of the network were."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.network.data.batches import Batch
from curvops.network.likelihoods.output_fisher import Exact
from curvops.network.walks.passes import BatchMap
from curvops.operators.curvatures.curvature import Curvature
from curvops.operators.linearized.linearization import Linearization


@dataclass(frozen=True, eq=False)
class Displaced(Exact):
    """The likelihood's output Fisher at f + shift, (N, C) for all points."""

    shift: Tensor

    def product(self, f: Tensor, u: Tensor, batch: Batch) -> Tensor:
        return super().product(self.moved(f, batch), u, batch)

    def root_product(self, f: Tensor, z: Tensor, batch: Batch) -> Tensor:
        return super().root_product(self.moved(f, batch), z, batch)

    def root_transpose_product(self, f: Tensor, u: Tensor, batch: Batch) -> Tensor:
        return super().root_transpose_product(self.moved(f, batch), u, batch)

    def moved(self, f: Float[Tensor, "n C"], batch: Batch) -> Float[Tensor, "n C"]:
        """The linear model's outputs."""
        return f + self.shift[batch.start : batch.start + len(f)]


class DisplacedGGN(Curvature):
    """Σ_n J_nᵀ H_n J_n with H at f_n + shift_n; `shift` is J δ, (N, C)."""

    @classmethod
    def at(cls, lin: Linearization, shift: Float[Tensor, "N C"]) -> DisplacedGGN:
        """Return the displaced GGN of a linearisation."""
        return cls(lin.theta, *lin.likelihood.hyperparameters, lin=lin, shift=shift)

    @property
    def output(self) -> Displaced:
        return Displaced(self.likelihood, self._kwargs["shift"])

    def gradient(self) -> Float[Tensor, " D"]:
        """Jᵀr of the linear model: the gradient of its negative log-likelihood. One pull of J."""
        output = self.output

        def term(batch: Batch, J: BatchMap) -> Tensor:
            f = output.moved(J.outputs, batch)
            return J.pull(output.likelihood.residual(f, batch.targets, batch.weights).unsqueeze(0))

        with torch.no_grad():
            return self.lin.sum_over_batches(term, 1).squeeze(1)

    def log_likelihood(self, step: Float[Tensor, "N C"] | float = 0.0) -> Float[Tensor, ""]:
        """Σ_n log p(y_n | f_n + shift_n + step_n) in nats, in float64. No product with J."""
        output = Displaced(self.likelihood, self._kwargs["shift"] + step)

        def term(batch: Batch, J: BatchMap) -> Tensor:
            f = output.moved(J.outputs, batch)
            return output.likelihood.log_prob(f, batch.targets, batch.weights).double().sum()

        return self.lin.sum_over_batches(term, 0)


def pushed(lin: Linearization, delta: Float[Tensor, " D"]) -> Float[Tensor, "N C"]:
    """Jδ at the training inputs."""
    return lin.jacobian()._matmul(delta.unsqueeze(-1)).reshape(lin.num_data, -1)
