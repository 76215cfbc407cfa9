"""The Hessian of the negative log-likelihood."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.network.data.batches import Batch
from curvops.network.data.inputs import take
from curvops.network.engines.routes import tolerance
from curvops.network.model.parameters import Blocks
from curvops.operators.linearized.linearization import Linearization
from curvops.operators.linearized.network_operator import NetworkOperator
from curvops.operators.linearized.reading import OfLinearization


class Hessian(OfLinearization, NetworkOperator):
    """The Hessian (D, D) of −Σ_n log p(y_n | f(x_n, θ)) at θ*, GGN + Σ_n Σ_c r_nc ∇²f_c.

    Symmetric, in general indefinite. Choose it for sharpness and saddle points, the GGN for posteriors, and solve
    shifted systems with `minres`, not CG. Cost to build: one product on two points. A product is a forward and a
    backward pass with its graph, and a further backward pass a vector (Pearlmutter 1994): about 4 gradients for one
    vector, 2 more for each further one. Memory: that graph for one batch; nothing is kept between products. Among the
    likelihood's hyperparameters only the single noise of a Gaussian has a gradient.

    Args:
        lin: the linearised network.

    Raises:
        RuntimeError: the model has no second derivatives, or wrong ones (torch's fused weight_norm is not symmetric).
    """

    STORED = "lin"

    def __init__(self, lin: Linearization) -> None:
        _require_symmetric(lin)
        super().__init__(lin.theta, lin=lin)

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
        passes = self.lin.passes
        return passes.add_up(hessian_product(self.lin, batch, inputs, block) for inputs, batch in passes.batches())


def hessian_product(lin: Linearization, batch: Batch, inputs: Any, block: Float[Tensor, "D K"]) -> Float[Tensor, "D K"]:
    """The Hessian of one batch's negative log-likelihood times a block of vectors."""
    model, selection = lin.model, lin.model.selection
    tangents, leaves = selection.split(block), lin.model.leaves()

    def products() -> Blocks:
        loss = -lin.likelihood.log_prob(model(leaves, inputs), batch.targets, batch.weights).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, allow_unused=True)
        used = {name: g for name, g in zip(leaves, gradients) if g is not None and g.requires_grad}
        rows = [_derivative(used, leaves, {name: tangents[name][k] for name in used}) for k in range(block.shape[1])]
        return {name: torch.stack([row[name] for row in rows]) for name in leaves}

    with model.lock, model.differentiating():
        return selection.join(model.holding(leaves, products))


def _derivative(of: Blocks, leaves: Blocks, along: Blocks) -> Blocks:
    """The gradient of Σ ⟨of, along⟩, by the leaves' names."""
    found: Any = [None] * len(leaves)
    if of:
        cotangents = [along[name].clone() for name in of]
        found = torch.autograd.grad(
            list(of.values()), list(leaves.values()), cotangents, retain_graph=True, allow_unused=True
        )
    return {n: torch.zeros_like(leaf) if g is None else g.detach() for (n, leaf), g in zip(leaves.items(), found)}


def _require_symmetric(lin: Linearization) -> None:
    """Compare uᵀHv with vᵀHu on the first points."""
    inputs, batch = next(lin.passes.batches())
    few = slice(0, 2)
    weights = None if batch.weights is None else batch.weights[few]
    generator = torch.Generator(device=lin.theta.device).manual_seed(0)
    vectors = torch.randn(2, len(lin.theta), dtype=lin.theta.dtype, device=lin.theta.device, generator=generator).mT
    products = hessian_product(lin, Batch((), batch.targets[few], weights), take(inputs, few), vectors)
    form = vectors.mT @ products
    scale = vectors.norm() * products.norm()
    if not bool((form[0, 1] - form[1, 0]).abs() <= tolerance(lin.theta.dtype) * scale):
        raise RuntimeError(
            "the model's second derivatives are not symmetric, so some operation's are wrong (torch's fused "
            "weight_norm is one); write that operation out, or use co.GGN(lin), which needs first derivatives alone."
        )
