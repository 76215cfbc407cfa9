"""Likelihoods by definition: dense Hessians, roots and second moments that products are compared with."""

import itertools
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from curvops.network import Model
from curvops.network.data import Batches, Reading, as_source
from curvops.network.likelihoods import Likelihood

TIGHT = {"rtol": 1e-10, "atol": 1e-10}
PARAMETERS: dict[str, Tensor] = {
    "scale": torch.randn(()),
    "empty": torch.randn(0, 3),
    "body.weight": torch.randn(3, 2),
    "body.bias": torch.randn(3),
    "head.weight": torch.randn(2, 3, 1),
    "head.bias": torch.randn(2),
}


def chosen(spec: Any) -> Any:
    """The selection of some of `PARAMETERS`, of which one needs no gradient."""
    model = nn.ModuleDict({"body": nn.Module(), "head": nn.Module()})
    for name, tensor in PARAMETERS.items():
        module, _, last = name.rpartition(".")
        model.get_submodule(module).register_parameter(last, nn.Parameter(tensor, name != "body.bias"))
    return Model(model, spec).selection


def normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Items(Dataset[Any]):
    """A dataset of these items."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def as_batches(data: object, batch_size: int, *reading: Any, weights: bool = False, **options: Any) -> Batches:
    """The batches of data in any form, after their first pass; further arguments are those of `Reading`."""
    return Batches(as_source(data, batch_size, weights), Reading(*reading, weights=weights, **options))


def autograd_gradient(likelihood: Likelihood, f: Tensor, y: Tensor, w: Tensor | None) -> Tensor:
    f = f.clone().requires_grad_()
    return torch.autograd.grad(-likelihood.log_prob(f, y, w).sum(), f)[0]


def autograd_hessians(likelihood: Likelihood, f: Tensor, y: Tensor, w: Tensor | None) -> Tensor:
    """(n, C, C) Hessians of the negative log-likelihood, point by point, from autograd."""
    full = torch.autograd.functional.hessian(lambda g: -likelihood.log_prob(g, y, w).sum(), f)
    return torch.stack([full[i, :, i] for i in range(len(f))])


def dense_fisher(likelihood: Likelihood, f: Tensor, y: Tensor, w: Tensor | None) -> Tensor:
    """(n, C, C), from products with unit vectors."""
    c = f.shape[-1]
    unit = torch.eye(c, dtype=f.dtype).unsqueeze(1).expand(c, len(f), c)
    return likelihood.hessian_product(f, unit, y, w).permute(1, 2, 0)


def dense_root(likelihood: Likelihood, f: Tensor, y: Tensor, w: Tensor | None) -> Tensor:
    """(n, C, R) square roots, from products with unit vectors."""
    columns = likelihood.root_columns(f.shape[-1])
    unit = torch.eye(columns, dtype=f.dtype).unsqueeze(1).expand(columns, len(f), columns)
    return likelihood.root_product(f, unit, y, w).permute(1, 2, 0)


def require_consistent_products(likelihood: Likelihood, f: Tensor, y: Tensor, w: Tensor | None, H: Tensor) -> None:
    """H u, L Lᵀ = H and Lᵀ u, for blocks and single vectors."""
    block = torch.stack([normal(*f.shape, seed=seed) for seed in range(3, 6)])
    expected = torch.einsum("ncd,knd->knc", H, block)
    torch.testing.assert_close(likelihood.hessian_product(f, block, y, w), expected, **TIGHT)
    torch.testing.assert_close(likelihood.hessian_product(f, block[0], y, w), expected[0], **TIGHT)
    root = dense_root(likelihood, f, y, w)
    torch.testing.assert_close(root @ root.mT, H, **TIGHT)
    transposed = likelihood.root_transpose_product(f, block, y, w)
    torch.testing.assert_close(transposed, torch.einsum("ncr,knc->knr", root, block), **TIGHT)


def enumerated_moment(
    likelihood: Likelihood, f: Tensor, y: Tensor, w: Tensor | None, outcomes: Iterator[tuple[Tensor, Tensor]]
) -> Tensor:
    """E[r rᵀ] of `mc_residual`, each outcome (targets of all points, their probabilities (n,)) drawn once."""
    moment = torch.zeros(*f.shape, f.shape[-1], dtype=f.dtype)
    total = torch.zeros(len(f), dtype=f.dtype)
    for drawn, probability in outcomes:
        with patch.object(type(likelihood), "sample", lambda *_, drawn=drawn, **__: drawn):
            r = likelihood.mc_residual(f, y, w)
        moment += probability[:, None, None] * r.unsqueeze(2) * r.unsqueeze(1)
        total += probability
    torch.testing.assert_close(total, torch.ones_like(total), **TIGHT)
    return moment


def binary_outcomes(f: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """All of {0, 1}^C with their probabilities under independent events with logits f."""
    for bits in itertools.product([0.0, 1.0], repeat=f.shape[1]):
        y = torch.tensor(bits, dtype=f.dtype).expand_as(f)
        yield y, torch.distributions.Bernoulli(logits=f).log_prob(y).sum(-1).exp()


def class_outcomes(f: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """All classes with their probabilities under logits f."""
    for c, probability in enumerate(f.softmax(-1).unbind(1)):
        yield torch.full((len(f),), c), probability


def require_sampled_moment(
    likelihood: Likelihood, f: Tensor, y: Tensor, w: Tensor | None, H: Tensor, draws: int = 10_000
) -> None:
    """Every entry of the mean of r rᵀ over the draws of `mc_residual` lies within 4 standard errors of H."""

    def repeat(t: Tensor) -> Tensor:
        return t.repeat_interleave(draws, 0)

    generator = torch.Generator().manual_seed(0)
    r = likelihood.mc_residual(repeat(f), repeat(y), None if w is None else repeat(w), generator)
    squares = torch.einsum("nc,nd->ncd", r, r).unflatten(0, (len(f), draws))
    error = (squares.mean(1) - H).abs()
    assert (error <= 4 * squares.std(1) / math.sqrt(draws) + 1e-12).all()
