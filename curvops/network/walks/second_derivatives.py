"""Products with the Hessian of the negative log-likelihood, by differentiating its gradient."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.network.data.batches import Batch
from curvops.network.data.inputs import num_points
from curvops.network.engines.self_check import tolerance
from curvops.network.likelihoods.gaussian import Gaussian
from curvops.network.likelihoods.likelihood import Likelihood
from curvops.network.model.model import Model
from curvops.network.model.parameters import Blocks


def hessian_product(
    model: Model, likelihood: Likelihood, block: Float[Tensor, "D K"], inputs: Any, batch: Batch
) -> Float[Tensor, "D K"]:
    """Return the Hessian of one batch's negative log-likelihood times a block of vectors."""
    tangents, leaves = model.selection.split(block), model.leaves()
    with model.differentiating(), model.holding(leaves):
        loss = -likelihood.log_prob(model(leaves, inputs), batch.targets, batch.weights).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, allow_unused=True)
        used = {name: g for name, g in zip(leaves, gradients) if g is not None and g.requires_grad}
        rows = [_derivative(used, leaves, {name: tangents[name][k] for name in used}) for k in range(block.shape[1])]
        return model.selection.join({name: torch.stack([row[name] for row in rows]) for name in leaves})


def _derivative(outputs: Blocks, leaves: Blocks, along: Blocks) -> Blocks:
    """Return the gradient of Σ ⟨outputs, along⟩, by the leaves' names."""
    if not outputs:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    cotangents = [along[name].clone() for name in outputs]
    try:
        gradients = torch.autograd.grad(
            list(outputs.values()), list(leaves.values()), cotangents, retain_graph=True, materialize_grads=True
        )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f"an operation of the model or the loss has no second derivatives: {error}. Write it out (torch's "
            "hardsigmoid as (x + 3).clamp(0, 6) / 6), or use co.GGN(lin), which needs only the model's first ones."
        ) from error
    return {name: gradient.detach() for name, gradient in zip(leaves, gradients)}


def require_symmetric(model: Model, inputs: Any) -> None:
    """Raise RuntimeError unless uᵀHv equals vᵀHu for two random vectors, with H of squared distances to random targets.

    Those at the likelihood's own targets may be rounding errors: a good fit has no residuals.
    """
    theta, layout = model.theta, model.layout
    assert layout is not None
    generator = torch.Generator(device=theta.device).manual_seed(0)
    vectors = torch.randn(2, len(theta), dtype=theta.dtype, device=theta.device, generator=generator).mT
    shape = num_points(inputs), layout.output_shape.numel()
    targets = torch.randn(shape, dtype=theta.dtype, device=theta.device, generator=generator)
    products = hessian_product(model, Gaussian(), vectors, inputs, Batch((), targets))
    form = vectors.mT @ products
    scale = vectors.norm() * products.norm()
    if not bool((form[0, 1] - form[1, 0]).abs() <= tolerance(theta.dtype) * scale):
        raise RuntimeError(
            "the model's second derivatives are not symmetric: write that operation out, or use co.GGN(lin)."
        )
