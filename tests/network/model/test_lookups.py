"""Plain lookups: the values and first derivatives of torch's kernels, and products where those have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvops.network.model.fused_kernels import PlainLookups
from tests import zoo_modules as parts
from tests.network.products import WAYS, agree, columns, dense, push, walk
from tests.zoo import Network, _tokens, dense_jacobian

OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"mode": "sum", "padding_idx": -2},
    "max": {"mode": "max", "padding_idx": 0},
    "mean without padding": {"padding_idx": 0},
    "short": {"mode": "sum", "max_norm": 0.5, "norm_type": 1.0},
}


def value_and_gradient(layer: nn.Module, tokens: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    layer.zero_grad()
    output = layer(tokens, *args)
    (output * torch.arange(output.numel()).view_as(output)).sum().backward()
    return output.detach(), layer.weight.grad.to_dense()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_bag_is_that_of_torch(options: dict[str, Any]) -> None:
    layer, tokens = nn.EmbeddingBag(7, 4, **options).double(), torch.tensor([[0, 0, 0], [5, 0, 5], [1, 2, 6]])
    with PlainLookups():
        ours = value_and_gradient(layer, tokens)
    for mine, theirs in zip(ours, value_and_gradient(layer, tokens)):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_weighted_bags_and_bags_by_offsets_are_those_of_torch() -> None:
    layer, weights = nn.EmbeddingBag(7, 4, mode="sum").double(), torch.rand(2, 3).double()
    tokens = torch.tensor([[5, 0, 5], [1, 2, 6]])
    for args in ((tokens, None, weights), (tokens.flatten(), torch.tensor([0, 2]), weights.flatten())):
        with PlainLookups():
            ours = value_and_gradient(layer, *args)
        for mine, theirs in zip(ours, value_and_gradient(layer, *args)):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_lookup_with_a_largest_norm_leaves_the_weight_alone() -> None:
    layer, tokens = nn.Embedding(7, 4, padding_idx=0, max_norm=0.5).double(), torch.tensor([[5, 0, 5], [1, 2, 6]])
    before = layer.weight.detach().clone()
    with PlainLookups():
        ours = value_and_gradient(layer, tokens)
    assert torch.equal(layer.weight, before)
    for mine, theirs in zip(ours, value_and_gradient(layer, tokens)):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


WITHOUT_OPTIONS: dict[str, tuple[nn.Module, nn.Module]] = {
    "sparse": (nn.Embedding(7, 4, sparse=True), nn.Embedding(7, 4)),
    "sparse_bag": (nn.EmbeddingBag(7, 4, sparse=True), nn.EmbeddingBag(7, 4)),
    "by_frequency": (nn.Embedding(7, 4, scale_grad_by_freq=True), nn.Embedding(7, 4)),
    "bag_by_frequency": (nn.EmbeddingBag(7, 4, scale_grad_by_freq=True), nn.EmbeddingBag(7, 4)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WITHOUT_OPTIONS)
def test_how_gradients_are_stored_or_scaled_is_no_part_of_the_jacobian(name: str, way: str) -> None:
    with_option, without = WITHOUT_OPTIONS[name]
    model, inputs = Network(name, lambda: parts.Tokens(without, 4), _tokens).build()
    with_option.load_state_dict(without.state_dict())
    J = dense_jacobian(model, inputs)
    passes = walk(Network(name, lambda: parts.Tokens(with_option, 4), _tokens), way)
    for _ in range(2):
        forward, backward = dense(passes, len(J))
        assert agree(forward, J)
        assert agree(backward, J)


@pytest.mark.parametrize("way", WAYS)
def test_no_product_writes_into_the_snapshot(way: str) -> None:
    passes = walk(Network("short", lambda: parts.Tokens(nn.Embedding(7, 4, max_norm=0.5), 4), _tokens), way)
    before = passes.model.theta.clone()
    for _ in range(3):
        push(passes, columns(len(before), 2))
    assert torch.equal(passes.model.theta, before)
