"""The user's model as a snapshot: what is refused, and that nothing later changes it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvops.network import Model
from tests.zoo import ZOO, call, parameters_of


def outputs(network: Model, inputs: Any) -> Tensor:
    with torch.no_grad():
        return network(network.values, inputs)


@pytest.mark.parametrize("name", ZOO)
def test_the_snapshot_computes_what_the_model_computes(name: str) -> None:
    model, inputs = ZOO[name].build()
    network = Model(model)
    assert torch.allclose(outputs(network, inputs), call(model, inputs), rtol=1e-13, atol=1e-13)
    assert torch.equal(network.theta, torch.cat([p.detach().flatten() for p in parameters_of(model).values()]))


@pytest.mark.parametrize("name", ["mlp", "resnet_batchnorm", "function_pair", "tied_embedding", "bfloat16_base"])
def test_a_model_trained_further_changes_nothing(name: str) -> None:
    """Parameters, selected or not, and buffers, also where version counters do not see the change."""
    model, inputs = ZOO[name].build()
    network = Model(model)
    before, theta = outputs(network, inputs), network.theta.clone()
    if isinstance(model, nn.Module):
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data.add_(1)
    else:
        for tensor in model[1].values():
            tensor.data.add_(1)
    assert torch.equal(outputs(network, inputs), before)
    assert torch.equal(network.theta, theta)


def test_frozen_parameters_are_left_out_unless_named() -> None:
    model, _ = ZOO["bfloat16_base"].build()
    assert "base.weight" not in Model(model).selection.names
    assert Model(model, "base.*").selection.names == ("base.weight", "base.bias")


def test_dropout_that_drops_nothing_may_be_in_train_mode() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)).train()
    assert Model(model).theta.numel() == 6


def test_a_module_under_two_names_is_left_as_it_was() -> None:
    """`functional_call`, left to tie weights itself, restores the second name to what it put under the first."""
    layer, norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
    model = nn.Sequential(layer, nn.Tanh(), layer, norm, norm, nn.Linear(4, 4)).double().eval()
    model[5].weight = layer.weight
    held = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    x = torch.randn(5, 4, dtype=torch.float64)
    assert torch.allclose(outputs(Model(model), x), model(x), rtol=1e-13, atol=1e-13)
    after = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    assert [(name, id(tensor)) for name, tensor in after] == [(name, id(tensor)) for name, tensor in held]
