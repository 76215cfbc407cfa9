"""The replay of a forward-mode pass: what it keeps, and where it must not be used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacfwd

from curvops.network import Model
from curvops.network.engines.autodiff import record_replay
from curvops.network.engines.replay import Recorder, Replay
from tests.network.products import agree
from tests.zoo import ZOO


def replayed(model: nn.Module, inputs: Tensor) -> tuple[Model, Replay | None]:
    network = Model(model)
    return network, record_replay(network, inputs, network.selection.names)


def test_it_keeps_the_inputs_of_products_and_of_activations_alone() -> None:
    """Input 4 numbers and the weights are there already: tanh keeps 6 outputs, the ReLU 5."""
    model, _ = ZOO["mlp"].build()
    x = torch.randn(7, 4, dtype=torch.float64)
    network, replay = replayed(model, x)
    assert replay is not None and replay.nbytes([*network.tensors(), x]) == 7 * 8 * (6 + 5)


class Doubling(nn.Module):
    """Overwrites a constant after it was multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.clone()
        y = h * self.first(x)
        with torch.no_grad():
            h.mul_(2)
        return self.second(y) + h.sum()


class Turned(nn.Module):
    """The positions come first, so that the tangent of the scaled input has other strides than the norm's output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x.transpose(0, 1))).mean(0)


@pytest.mark.parametrize(("make", "shape"), [(Doubling, (5, 4)), (Turned, (3, 5, 4))])
def test_constants_and_sums_with_zeros_are_kept_as_they_were(make: type[nn.Module], shape: tuple[int, ...]) -> None:
    model, x = make().double(), torch.randn(shape).double()
    network, replay = replayed(model, x)
    found = jacfwd(lambda values: functional_call(model, values, (x,)))(dict(model.named_parameters()))
    J = torch.cat([part.flatten(2) for part in found.values()], 2).flatten(0, 1).detach()
    assert replay is not None
    with torch.no_grad():
        for _ in range(2):
            v = torch.randn(J.shape[1], 1).double()
            tangents = {name: part[0] for name, part in network.selection.split(v).items()}
            assert agree(replay(tangents).flatten(), (J @ v).flatten())


def test_a_tangent_written_into_other_memory_is_not_replayed() -> None:
    """A second run would find what the first one added."""

    class Adding(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def jvp(ctx: object, tangent: Tensor) -> Tensor:
            return torch.zeros_like(tangent).expand_as(tangent).clone() + 0 if tangent is None else kept.add_(tangent)

    class Accumulating(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Adding.apply(super().forward(x))

    kept = torch.zeros(5, 3)
    _, replay = replayed(Accumulating(4, 3), torch.randn(5, 4))
    assert replay is None


def test_outputs_that_no_tangent_reaches_have_no_replay() -> None:
    _, replay = replayed(ZOO["mlp"].build()[0].apply(lambda m: None), torch.randn(2, 4).double())
    assert replay is not None
    network = Model((lambda params, x: x @ x.new_ones(4, 2), {"a": torch.ones(3)}))
    assert record_replay(network, torch.randn(2, 4), ("a",)) is None


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
    w, recorder = torch.randn(shape), Recorder()
    with recorder:
        recorder.follow("w", w)
        replay = recorder.replay(function(w))
    assert replay is not None
    other = torch.randn(shape)
    assert torch.equal(replay({"w": other}), function(other))
