"""The last layer is the one in whose output the model's is linear, whatever the order of registration."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvops as co
from curvops.network.model.last_layer import last_layer
from curvops.network.model.model import Model
from tests.zoo import ZOO, points


class HeadFirst(nn.Module):
    """Its head is registered before its body."""

    def __init__(self, end: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.head, self.body, self.end = nn.Linear(5, 3), nn.Linear(4, 5), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self, self.body(x).tanh())


HEAD = ("head.weight", "head.bias")
ENDS = {
    "itself": lambda m, h: m.head(h),
    "reshaped": lambda m, h: m.head(h).unsqueeze(1).flatten(1),
    "cast": lambda m, h: m.head(h).float().clone(),
    "logits": lambda m, h: SimpleNamespace(logits=m.head(h)).logits,
    "of two positions the last": lambda m, h: m.head(torch.stack([h, h + 1], 1))[:, -1],
    "scaled": lambda m, h: (1 - 2 * m.head(h) * torch.arange(3)) / 3,
    "permuted": lambda m, h: m.head(h).flip(-1).roll(1, -1),
    "pooled": lambda m, h: F.adaptive_avg_pool1d(m.head(torch.stack([h, h + 1], 1)).mT, 1).flatten(1),
    "mixed": lambda m, h: F.linear(m.head(h), torch.ones(2, 3)),
    "centred": lambda m, h: m.head(h) - m.head(h).mean(-1, keepdim=True),
    "head twice": lambda m, h: torch.cat([m.head(h), m.head(h)], 1),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_heads_registered_first(end: Callable[[Any, Tensor], Tensor]) -> None:
    assert last_layer(Model(HeadFirst(end)), torch.randn(2, 4)) == HEAD


NONE = {
    "softmax": lambda m, h: m.head(h).softmax(-1),
    "in place": lambda m, h: m.head(h).relu_(),
    "residual": lambda m, h: m.head(h) + h[:, :3],
    "squared": lambda m, h: m.head(h) * m.head(h),
    "reciprocal": lambda m, h: 1 / m.head(h),
    "normalised": lambda m, h: m.head(h) / m.head(h).norm(dim=-1, keepdim=True),
    "a parameter of no layer": lambda m, h: m.body.bias.sum() * m.head(h),
}


@pytest.mark.parametrize("end", NONE.values(), ids=NONE)
def test_no_layer_is_an_error_that_names_the_way_out(end: Callable[[Any, Tensor], Tensor]) -> None:
    data = torch.randn(6, 4), torch.randn(6, 3)
    with pytest.raises(ValueError, match=r"not linear in the output of one layer .* parameters='head\.\*'"):
        co.linearize(HeadFirst(end), data, "regression", parameters="last_layer")


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("resnet_groupnorm", ("head.weight", "head.bias")),
        ("mlp", ("4.weight", "4.bias")),
        ("function_pair", ("c",)),
    ],
)
def test_networks_of_the_table(name: str, names: tuple[str, ...]) -> None:
    model, inputs = ZOO[name].build()
    assert last_layer(Model(model), points(inputs, slice(0, 2))) == names


def test_functions_with_a_bias_and_with_none() -> None:
    params = {"c": torch.randn(3), "b": torch.randn(5, 3), "a": torch.randn(4, 5)}
    x = torch.randn(2, 4)
    assert last_layer(Model((lambda p, x: (x @ p["a"]).tanh() @ p["b"] + p["c"], params)), x) == ("c", "b")
    assert last_layer(Model((lambda p, x: 2 * ((x @ p["a"]).tanh() @ p["b"] + p["c"]).flip(-1), params)), x) == (
        "c",
        "b",
    )
    with pytest.raises(ValueError, match="not linear in the output of one layer"):
        last_layer(Model((lambda p, x: ((x @ p["a"]) @ p["b"] + p["c"]).exp(), params)), x)


def test_a_head_that_is_tied_has_the_name_that_comes_first() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.tokens(tokens).mean(1))

    assert last_layer(Model(Tied()), torch.randint(0, 7, (2, 3))) == ("tokens.weight",)


def test_linearize_selects_it() -> None:
    lin = co.linearize(HeadFirst(ENDS["itself"]), (torch.randn(6, 4), torch.randn(6, 3)), "regression", "last_layer")
    assert lin.model.selection.names == HEAD
