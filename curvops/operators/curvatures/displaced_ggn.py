"""The GGN of the linear model f* + J δ: curvature at its own outputs, where those of the network were."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.network import Exact
from curvops.operators.curvatures.curvature import Curvature
from curvops.operators.linearized.linearization import Linearization


class DisplacedGGN(Curvature):
    """Σ_n J_nᵀ H_n J_n with H at f_n + shift_n; `shift` is J δ, (N, C)."""

    @classmethod
    def at(cls, lin: Linearization, shift: Float[Tensor, "N C"]) -> DisplacedGGN:
        """Return the displaced GGN of a linearisation."""
        return cls(lin.theta, *lin.likelihood.hyperparameters, lin=lin, shift=shift)

    @property
    def output(self) -> Exact:
        return Exact(self.likelihood, self._kwargs["shift"])

    @torch.no_grad()
    def gradient(self) -> Float[Tensor, " D"]:
        """Jᵀr of the linear model: the gradient of its negative log-likelihood. One pull of J."""
        exact = self.output
        return self.lin.sum_over_batches(lambda batch, J: J.pull(exact.residual(J.outputs, batch)[None]), 1).squeeze(1)

    def log_likelihood(self, step: Float[Tensor, "N C"] | float = 0.0) -> Float[Tensor, ""]:
        """Σ_n log p(y_n | f_n + shift_n + step_n) in nats, in float64. No product with J."""
        exact = Exact(self.likelihood, self._kwargs["shift"] + step)
        return self.lin.sum_over_batches(lambda batch, J: exact.log_prob(J.outputs, batch).double().sum(), 0)


def pushed(lin: Linearization, delta: Float[Tensor, " D"]) -> Float[Tensor, "N C"]:
    """Jδ at the training inputs."""
    return lin.jacobian()._matmul(delta.unsqueeze(-1)).reshape(lin.num_data, -1)
