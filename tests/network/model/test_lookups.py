"""Plain lookups: the values and first derivatives of torch's kernels, and products where those have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvops.network.model.fused_kernels import PlainLookups
from tests import zoo_modules as parts
from tests.network.products import WAYS, columns, push, require_products, walk
from tests.zoo import Network, _tokens, dense_jacobian

TOKENS = torch.tensor([[5, 0, 5], [1, 2, 6]])
WEIGHTS = torch.tensor([[0.2, 0.9, 0.5], [0.7, 0.1, 0.4]]).double()
OFFSETS = torch.tensor([0, 2])
# name: (layer, what it is called with)
LOOKUPS: dict[str, tuple[nn.Module, tuple[Tensor | None, ...]]] = {
    "mean": (nn.EmbeddingBag(7, 4), (TOKENS,)),
    "sum": (nn.EmbeddingBag(7, 4, mode="sum", padding_idx=-2), (TOKENS,)),
    "max": (nn.EmbeddingBag(7, 4, mode="max", padding_idx=0), (TOKENS,)),
    "mean without padding": (nn.EmbeddingBag(7, 4, padding_idx=0), (torch.tensor([[0, 0, 0], [5, 0, 5]]),)),
    "short": (nn.EmbeddingBag(7, 4, mode="sum", max_norm=0.5, norm_type=1.0), (TOKENS,)),
    "weighted": (nn.EmbeddingBag(7, 4, mode="sum"), (TOKENS, None, WEIGHTS)),
    "by offsets": (nn.EmbeddingBag(7, 4, mode="sum"), (TOKENS.flatten(), OFFSETS, WEIGHTS.flatten())),
    "short vectors": (nn.Embedding(7, 4, padding_idx=0, max_norm=0.5), (TOKENS,)),
}


def value_and_gradient(layer: nn.Module, *given: Any) -> tuple[Tensor, Tensor]:
    layer.zero_grad()
    output = layer(*given)
    (output * torch.arange(output.numel()).view_as(output)).sum().backward()
    return output.detach(), layer.weight.grad.to_dense()


@pytest.mark.parametrize(("layer", "given"), LOOKUPS.values(), ids=LOOKUPS)
def test_a_lookup_is_that_of_torch_and_leaves_the_weight_alone(layer: nn.Module, given: tuple[Any, ...]) -> None:
    layer = layer.double()
    before = layer.weight.detach().clone()
    with PlainLookups():
        ours = value_and_gradient(layer, *given)
    assert torch.equal(layer.weight, before)
    for mine, theirs in zip(ours, value_and_gradient(layer, *given)):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


WITHOUT_OPTIONS: dict[str, tuple[nn.Module, nn.Module]] = {
    "sparse": (nn.Embedding(7, 4, sparse=True), nn.Embedding(7, 4)),
    "sparse_bag": (nn.EmbeddingBag(7, 4, sparse=True), nn.EmbeddingBag(7, 4)),
    "by_frequency": (nn.Embedding(7, 4, scale_grad_by_freq=True), nn.Embedding(7, 4)),
    "bag_by_frequency": (nn.EmbeddingBag(7, 4, scale_grad_by_freq=True), nn.EmbeddingBag(7, 4)),
}


@pytest.mark.parametrize("way", ["streamed", "layerwise"])
@pytest.mark.parametrize("name", WITHOUT_OPTIONS)
def test_how_gradients_are_stored_or_scaled_is_no_part_of_the_jacobian(name: str, way: str) -> None:
    with_option, without = WITHOUT_OPTIONS[name]
    model, inputs = Network(name, lambda: parts.Tokens(without, 4), _tokens).build()
    with_option.load_state_dict(without.state_dict())
    J = dense_jacobian(model, inputs)
    require_products(walk(Network(name, lambda: parts.Tokens(with_option, 4), _tokens), way), J)


@pytest.mark.parametrize("way", WAYS)
def test_no_product_writes_into_the_snapshot(way: str) -> None:
    passes = walk(Network("short", lambda: parts.Tokens(nn.Embedding(7, 4, max_norm=0.5), 4), _tokens), way)
    before = passes.model.theta.clone()
    for _ in range(3):
        push(passes, columns(len(before), 2))
    assert torch.equal(passes.model.theta, before)
