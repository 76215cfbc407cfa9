"""The generalised Gauss–Newton matrix."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.network.data import Batch
from curvops.network.likelihood import Likelihood
from curvops.network.passes import BatchMap
from curvops.operators.linearization import Linearization
from curvops.operators.network_operator import NetworkOperator


class GGN(NetworkOperator):
    """G = Σ_n J_nᵀ H_n J_n (D, D), H_n the output Fisher (Schraudolph 2002); symmetric positive semi-definite.

    `co.GGN(lin)`; products G @ v and G @ V carry gradients through the vectors and the likelihood's hyperparameters.
    Cost: a product is one push and one pull of J (`lin.plan` says how many gradients), plus O(N·C) for H.
    """

    def __init__(self, source: Linearization | Tensor, *hyperparameters: Tensor, lin: Any = None) -> None:
        if isinstance(source, Linearization):
            lin, hyperparameters, source = source, source.likelihood.hyperparameters, source.theta
        super().__init__(source, *hyperparameters, lin=lin)

    @property
    def lin(self) -> Linearization:
        """The linearisation."""
        return self._kwargs["lin"]

    @property
    def psd(self) -> bool:
        return True

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, at this operator's hyperparameters."""
        return self.lin.likelihood.with_hyperparameters(self._args[1:])

    def _size(self) -> torch.Size:
        return torch.Size((self.theta.shape[-1], self.theta.shape[-1]))

    def _product(self, block: Float[Tensor, "D K"]) -> Float[Tensor, "D K"]:
        likelihood = self.likelihood

        def term(batch: Batch, J: BatchMap) -> Tensor:
            pushed = J.push(block)  # first: a streamed push finds the outputs on its way
            return J.pull(likelihood.hessian_product(J.outputs, pushed, batch.targets, batch.weights))

        return self.lin.sum_over_batches(term, block.shape[1])

    def _draw(self, k: int, generator: torch.Generator | None) -> Float[Tensor, "D k"]:
        """k exact draws of N(0, G): Jᵀ L z with H = L Lᵀ. One pull of J a draw."""
        likelihood = self.likelihood

        def term(batch: Batch, J: BatchMap) -> Tensor:
            f = J.outputs
            shape = (k, f.shape[0], likelihood.root_columns(f.shape[1]))
            z = torch.randn(shape, dtype=f.dtype, device=f.device, generator=generator)
            return J.pull(likelihood.root_product(f, z, batch.targets, batch.weights))

        return self.lin.sum_over_batches(term, k)
