"""The Hessian of the negative log-likelihood."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.network.data import Batch
from curvops.network.model import Model
from curvops.operators.linearization import Linearization
from curvops.operators.network_operator import NetworkOperator


class Hessian(NetworkOperator):
    """∇² of −Σ_n log p(y_n | f(x_n, θ)) (D, D) at θ*, = GGN + Σ_n Σ_c r_nc ∇²f_c; symmetric, in general indefinite.

    `co.Hessian(lin)`; solve shifted systems with `minres`, not CG. Cost: one forward and one backward pass with its
    graph, and a further backward pass a vector (Pearlmutter 1994): about 4 gradients for one vector, 2 more for each
    further one; nothing is kept between products. It has no gradient for the likelihood's hyperparameters. Raises
    RuntimeError where the model has no second derivatives.
    """

    def __init__(self, source: Linearization | Tensor, lin: Any = None) -> None:
        if isinstance(source, Linearization):
            lin, source = source, source.theta
        super().__init__(source, lin=lin)

    @property
    def lin(self) -> Linearization:
        """The linearisation."""
        return self._kwargs["lin"]

    @property
    def symmetric(self) -> bool:
        return True

    def _size(self) -> torch.Size:
        return torch.Size((self.theta.shape[-1], self.theta.shape[-1]))

    def _product(self, block: Float[Tensor, "D K"]) -> Float[Tensor, "D K"]:
        block = block.detach()
        parts = [self._of_batch(batch, inputs, block) for inputs, batch in self.lin.passes.batches()]
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]

    def _of_batch(self, batch: Batch, inputs: Any, block: Tensor) -> Tensor:
        lin, selection = self.lin, self.lin.model.selection
        model: Model = lin.model
        tangents = selection.split(block)

        leaves = model.leaves()

        def products() -> dict[str, Tensor]:
            loss = -lin.likelihood.log_prob(model(leaves, inputs), batch.targets, batch.weights).sum()
            gradients = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, allow_unused=True)
            used = {name: g for name, g in zip(leaves, gradients) if g is not None and g.requires_grad}
            found = [
                torch.autograd.grad(
                    list(used.values()),
                    list(leaves.values()),
                    [tangents[name][k].clone() for name in used],
                    retain_graph=True,
                    allow_unused=True,
                )
                if used
                else [None] * len(leaves)
                for k in range(block.shape[1])
            ]
            return {
                name: torch.stack([torch.zeros_like(leaf) if row[i] is None else row[i] for row in found]).detach()
                for i, (name, leaf) in enumerate(leaves.items())
            }

        with model.lock, model.differentiating():
            return selection.join(model.holding(leaves, products))
