"""The replay of a forward-mode pass: what it keeps, and where it must not be used."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacfwd

from curvops.network import Model, Passes
from tests.network.products import WAYS, require_products
from tests.zoo_modules import Applied


def recorded(model: Any, inputs: Tensor) -> Passes:
    return Passes(Model(model), [(inputs, None)], **WAYS["recorded"])


def test_sums_with_zeros_are_kept_as_they_were() -> None:
    """The positions come first, so that the tangent of the scaled input has other strides than the norm's output."""
    turned, means = Applied(lambda x: x.transpose(0, 1)), Applied(lambda f: f.mean(0))
    model, x = nn.Sequential(turned, nn.LayerNorm(4), nn.Linear(4, 3), means).double(), torch.randn(3, 5, 4).double()
    found = jacfwd(lambda values: functional_call(model, values, (x,)))(dict(model.named_parameters()))
    J = torch.cat([part.flatten(2) for part in found.values()], 2).flatten(0, 1).detach()
    passes = recorded(model, x)
    require_products(passes, J)
    assert passes.plan.routes.replayed


def shared_with_parts(w: Tensor) -> Tensor:
    """A view of a tensor with the shape and strides of the result, after a split of it."""
    doubled = w * 2.0
    first, second = doubled.split(1, 1)
    return doubled.squeeze(-1) * (first + second).sum((1, 2)).unsqueeze(-1)


def widened_by_zeros(w: Tensor) -> Tensor:
    """A sum with zeros that has the shape and strides of the tensor of which it adds a part."""
    doubled = w * 2.0
    return (doubled[:, :1] + torch.zeros_like(w)) * 3.0


@pytest.mark.parametrize(("function", "shape"), [(shared_with_parts, (6, 2, 1)), (widened_by_zeros, (6, 5, 4))])
def test_parts_and_widened_sums_are_replayed(function: Any, shape: tuple[int, ...]) -> None:
    weights = {"w": torch.randn(shape).double()}
    model, x = (lambda values, x: x @ function(values["w"]).flatten()[None], weights), torch.randn(3, 1).double()
    passes = recorded(model, x)
    J = torch.autograd.functional.jacobian(lambda w: model[0]({"w": w}, x), weights["w"])
    require_products(passes, J.flatten(2).flatten(0, 1))
    assert passes.plan.routes.replayed
