"""Dense float64 definitions of every curvature, from row-by-row autograd and likelihoods' own log-densities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvops as co
from curvops.network.likelihoods import Likelihood
from tests.network.definitions import autograd_gradient, autograd_hessians
from tests.zoo import ZOO, call, parameters_of, points, reference


@dataclass(frozen=True, eq=False)
class Definition:
    """J (n, C, D) and H (n, C, C) of some points, their residuals r (n, C) times the root of sample weights."""

    J: Tensor
    H: Tensor
    r: Tensor

    @property
    def ggn(self) -> Tensor:
        return torch.einsum("ncd,nce,nef->df", self.J, self.H, self.J)

    @property
    def empirical(self) -> Tensor:
        g = torch.einsum("ncd,nc->nd", self.J, self.r)
        return g.mT @ g

    def of(self, kept: Tensor) -> Definition:
        return Definition(self.J[:, :, kept], self.H, self.r)


def output_fisher(likelihood: Likelihood, f: Tensor, y: Tensor, w: Tensor | None) -> Tensor:
    """H (n, C, C): the Hessian of −log p by autograd, or the definition where the Fisher differs from it."""
    if isinstance(likelihood, co.likelihoods.HeteroscedasticGaussian):
        means, log_variances = f.chunk(2, 1)
        diagonal = torch.cat([(-log_variances).exp().expand_as(means), torch.full_like(means, 0.5)], 1)
        return torch.diag_embed(diagonal if w is None else diagonal * w.unsqueeze(1))
    return autograd_hessians(likelihood, f, y, w)


def define(name: str, likelihood: Likelihood, y: Tensor, w: Tensor | None) -> Definition:
    """The definition for a network of the zoo, all parameters selected."""
    model, inputs = ZOO[name].build()
    f = call(model, inputs).detach()
    J = reference(name).unflatten(0, f.shape)
    r = autograd_gradient(likelihood, f, y, None)  # a weight says how often a point counts: once in a product of two
    r = r if w is None else r * w.sqrt().unsqueeze(1)
    return Definition(J, output_fisher(likelihood, f, y, w), r)


def hessian_products(name: str, likelihood: Likelihood, y: Tensor, w: Tensor | None, V: Tensor) -> Tensor:
    """∇² of the negative log-likelihood times V (D, K), differentiating the gradient of all data at once."""
    model, inputs = ZOO[name].build()
    if isinstance(model, tuple):
        model = model[0], {key: value.detach().requires_grad_() for key, value in model[1].items()}
    leaves = list(parameters_of(model).values())
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        loss = -likelihood.log_prob(call(model, inputs), y, w).sum()
    gradients = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    flat = torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(gradients, leaves)])
    columns = []
    for v in V.unbind(1):
        found = torch.autograd.grad(flat @ v, leaves, retain_graph=True, allow_unused=True)
        columns.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(found, leaves)]))
    return torch.stack(columns, 1).detach()


def linearized(
    name: str,
    likelihood: Likelihood,
    y: Tensor,
    w: Tensor | None,
    sizes: tuple[int, ...],
    parameters: Any,
) -> co.operators.Linearization:
    """The network on the same data in batches of these sizes."""
    model, inputs = ZOO[name].build()
    batches, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        labels = (y[part],) if w is None else (y[part], w[part])
        batches.append((points(inputs, part), *labels))
        start += size
    return co.linearize(model, batches, likelihood, parameters=parameters, weights=w is not None)
