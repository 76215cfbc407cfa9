"""Walks over Lᵀ J, few rows a point whatever the number of outputs, by every engine and within one budget."""

import gc
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from curvops.network import Batch, Model, Passes, Sampled
from curvops.network.likelihoods import Gaussian
from tests.network.products import WAYS, agree, columns, linear_layers_off_by, push
from tests.zoo import ZOO, N, dense_jacobian, points, reference

# layers kept as rows and as factors, shared weights, parameters without a rule, none with one, padding, no replay
NAMES = ["mlp", "resnet_groupnorm", "own_slopes", "lstm", "function_pair", "embedding_padding"]


def labelled(inputs: Any, targets: Tensor, sizes: tuple[int, ...] = (3, 2)) -> list[tuple[Any, Batch]]:
    bounds = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    parts = [slice(low, high) for low, high in itertools.pairwise(bounds)]
    return [(points(inputs, part), Batch((), targets[part], None, part.start)) for part in parts]


def reduced(name: str, way: str, samples: int = 2) -> tuple[Passes, Passes, Tensor]:
    """The walk over J, one reduced from it by random residuals, and its rows (samples·N, D)."""
    model, inputs = ZOO[name].build()
    J = reference(name).unflatten(0, (N, -1))
    draws = torch.randn(samples, N, J.shape[1], dtype=J.dtype, generator=torch.Generator().manual_seed(0))
    whole = Passes(Model(model), labelled(inputs, torch.zeros(N)), **WAYS[way])
    S = torch.einsum("mnc,ncd->nmd", draws, J).flatten(0, 1)
    return whole, whole.with_root(Sampled(Gaussian(), draws)), S


@pytest.mark.parametrize("way", ["streamed", "recorded", "layerwise"])
@pytest.mark.parametrize("name", NAMES)
def test_a_reduced_walk_multiplies_with_its_rows(name: str, way: str) -> None:
    _, walk, S = reduced(name, way)
    V = columns(S.shape[1], 3)
    for _ in range(3):
        pushed = push(walk, V)
    assert agree(pushed, S @ V)
    assert agree(walk.total(lambda _, s: s.pull(s.push(V)), 3), S.mT @ (S @ V))
    expected = {} if way == "streamed" else {way: 2}
    assert walk.plan.in_use == (expected if walk.plan.layers or way != "layerwise" else {"recorded": 2})


def test_walks_share_one_budget_and_give_it_back() -> None:
    whole, walk, S = reduced("mlp", "layerwise", 1)
    V = columns(S.shape[1], 1)
    whole.memory.budget = N * whole.plan.layerwise_bytes
    assert walk.plan.layerwise_bytes < whole.plan.layerwise_bytes
    push(walk, V)
    push(whole, V)
    assert walk.plan.in_use == {"layerwise": 2}
    assert whole.plan.in_use.get("layerwise", 0) != 2  # the other has its share
    kept = sum(engine.nbytes for passes in (whole, walk) for engine in passes.kept_engines)
    assert kept <= whole.memory_budget
    del walk
    gc.collect()
    push(whole, V)
    assert whole.plan.in_use == {"layerwise": 2}


def test_a_wrong_rule_is_found_out_where_residuals_show_nothing() -> None:
    """Residuals of zero on the first points: whatever a rule did there, its rows would be right."""
    with linear_layers_off_by(1.1):
        whole, walk, _ = reduced("mlp", "layerwise")
        draws = walk._fisher.draws  # type: ignore[union-attr]
        draws[:, :3] = 0
        J = dense_jacobian(*ZOO["mlp"].build()).unflatten(0, (N, -1))
        S = torch.einsum("mnc,ncd->nmd", draws, J).flatten(0, 1)
        V = columns(S.shape[1], 2)
        assert agree(push(walk, V), S @ V)
    assert set(whole.plan.others.values()) == {"the self-check failed"}
