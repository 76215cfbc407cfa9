"""Projections of `nn.MultiheadAttention` as layers: whatever else it is asked to do, and only where they are layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvops.network import Model, Passes
from tests.network.products import PLENTY, agree, columns, push, require_products
from tests.zoo import batches, dense_jacobian

MASK = torch.tensor([[0.0, -1.0, 0.5]] * 3, dtype=torch.float64)
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "plain": ({}, {}, set()),
    "positions first": ({"batch_first": False}, {}, set()),
    "no bias": ({"bias": False}, {}, set()),
    "masks": ({}, {"attn_mask": MASK, "need_weights": False}, set()),
    "causal": ({}, {"attn_mask": MASK > 0, "is_causal": True, "average_attn_weights": False}, set()),
    "further keys": ({"add_bias_kv": True, "add_zero_attn": True}, {}, {"bias_k", "bias_v"}),
    "other widths": (
        {"kdim": 4, "vdim": 3},
        {"value": lambda x: x[..., :3]},
        {"q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"},
    ),
    "other keys": ({}, {"key": lambda x: x.sin(), "value": lambda x: x}, {"in_proj_weight", "in_proj_bias"}),
}


class Attending(nn.Module):
    """Attention, and the sum over positions."""

    def __init__(self, options: dict[str, Any], call: dict[str, Any]) -> None:
        super().__init__()
        self.attention, self.call = nn.MultiheadAttention(4, 2, **{"batch_first": True, **options}), call

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.attention.batch_first else x.transpose(0, 1)
        call = {name: value(x) if callable(value) else value for name, value in self.call.items()}
        attended = self.attention(**{"query": x, "key": x, "value": x, **call})[0]
        return attended.sum(1 if self.attention.batch_first else 0)


@pytest.mark.parametrize("name", CALLS)
def test_products_are_those_of_the_module(name: str) -> None:
    options, call, others = CALLS[name]
    model, x = Attending(options, call).double().eval(), torch.randn(5, 3, 4, dtype=torch.float64)
    nn.init.normal_(model.attention.out_proj.weight)
    passes = Passes(Model(model), batches(x), "layerwise", PLENTY)
    require_products(passes, dense_jacobian(model, x))
    assert set(passes.plan.others) == {f"attention.{local}" for local in others}


def test_a_single_query_shared_by_all_points_is_no_layer() -> None:
    """Its projection has no row per point."""

    class Pooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.query = nn.MultiheadAttention(4, 2), nn.Parameter(torch.randn(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            seed = self.attention(self.query, self.query, self.query)[0].mean(0)
            return x @ seed.unsqueeze(1)

    model, x = Pooling().double().eval(), torch.randn(5, 4, dtype=torch.float64)
    J, passes = dense_jacobian(model, x), Passes(Model(model), batches(x), "layerwise", PLENTY)
    V = columns(J.shape[1], 2)
    assert agree(push(passes, V), J @ V)
    assert passes.plan.layers == ()
