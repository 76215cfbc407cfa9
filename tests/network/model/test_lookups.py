"""Plain lookups: the values and first derivatives of torch's kernels, and products where those have none."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvops.network import Model, Passes
from tests import zoo_modules as parts
from tests.network.products import WAYS, require_products, walk
from tests.zoo import Network, _tokens, batches, dense_jacobian

TOKENS = torch.tensor([[5, 0, 5], [1, 2, 6], [0, 0, 0], [3, 3, 1], [6, 0, 4]])
WEIGHTS = torch.rand(5, 3, generator=torch.Generator().manual_seed(0)).double()
# name: (layer, what it is called with)
LOOKUPS: dict[str, tuple[nn.Module, Callable[[Tensor, Tensor], tuple[Tensor | None, ...]]]] = {
    "short": (nn.EmbeddingBag(7, 4, mode="sum", max_norm=0.5, norm_type=1.0), lambda x, w: (x,)),
    "by offsets": (
        nn.EmbeddingBag(7, 4, mode="sum"),
        lambda x, w: (x.flatten(), torch.arange(len(x)) * x.shape[1], w.flatten()),
    ),
    "short vectors": (nn.Embedding(7, 4, padding_idx=0, max_norm=0.5), lambda x, w: (x,)),
}


class Lookup(nn.Module):
    """A lookup, and a layer that makes its outputs' derivatives depend on its values."""

    def __init__(self, layer: nn.Module, given: Callable[[Tensor, Tensor], tuple[Tensor | None, ...]]) -> None:
        super().__init__()
        self.layer, self.given, self.head = copy.deepcopy(layer), given, nn.Linear(4, 3)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        h = self.layer(*self.given(x, w))
        return self.head((h if h.ndim == 2 else h.sum(1)).tanh())


@pytest.mark.parametrize("way", ["streamed", "recorded", "layerwise"])
@pytest.mark.parametrize(("layer", "given"), LOOKUPS.values(), ids=LOOKUPS)
def test_a_lookup_is_that_of_torch_and_leaves_the_weight_alone(layer: nn.Module, given: Any, way: str) -> None:
    model = Lookup(layer, given).double()
    passes, before = Passes(Model(model), batches((TOKENS, WEIGHTS)), **WAYS[way]), model.layer.weight.detach().clone()
    found, theta = [J.outputs for _, J in passes.each(0)], passes.model.theta.clone()
    assert torch.equal(model.layer.weight, before)
    require_products(passes, dense_jacobian(copy.deepcopy(model), (TOKENS, WEIGHTS)))
    assert torch.equal(model.layer.weight, before) and torch.equal(passes.model.theta, theta)
    torch.testing.assert_close(torch.cat(found), model(TOKENS, WEIGHTS).detach(), rtol=1e-12, atol=1e-12)


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
