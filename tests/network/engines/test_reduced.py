"""Walks over Lᵀ J, few rows a point whatever the number of outputs, by every engine and within one budget."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvops.network import Batch, Empirical, Model, Passes, Sampled
from curvops.network.engines import Rates
from curvops.network.likelihoods import Gaussian
from tests.network.products import PLENTY, WAYS, agree, columns, linear_layers_off_by, push
from tests.zoo import ZOO, N, call, dense_jacobian, points, reference

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


def test_one_row_a_point_is_kept_from_the_first_product_whatever_the_number_of_outputs() -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 500))
    x, draws = torch.randn(40, 20), torch.randn(1, 40, 500)
    whole = Passes(Model(model), labelled(x, torch.zeros(40), (40,)), memory_budget=PLENTY)
    whole.engines.plan = dataclasses.replace(whole.plan, rates=Rates(read=12.0, visit=0.0))  # as of a large network
    walk, v = whole.with_root(Sampled(Gaussian(), draws)), torch.randn(whole.model.theta.numel(), 1)
    for passes in (whole, walk):
        push(passes, v)
    assert whole.plan.in_use == {} and walk.plan.in_use == {"layerwise": 1}
    assert walk.plan.layerwise_bytes == 4 * (20 + 30 + 30 + 30 + 30 + 500)
    assert walk.kept_engines[0].nbytes == 40 * walk.plan.layerwise_bytes


def test_a_convolution_keeps_its_rows_where_they_are_fewer_numbers_than_its_input_and_sensitivities() -> None:
    """296 weights, 200 outputs and 100 inputs: one row a point takes less than δ and a, three rows take more."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(200, 3)).double()
    x, draws = torch.randn(6, 4, 5, 5).double(), torch.randn(1, 6, 3).double()
    whole = Passes(Model(model), labelled(x, torch.zeros(6), (6,)), "layerwise", PLENTY)
    walk, V = whole.with_root(Sampled(Gaussian(), draws)), columns(whole.model.theta.numel(), 3)
    pushed = push(walk, V)
    assert agree(pushed, torch.einsum("nc,nck->nk", draws[0], push(whole, V).unflatten(0, (6, 3))))
    assert walk.plan.layerwise_bytes == 8 * (296 + 200 + 3)
    assert whole.plan.layerwise_bytes == 8 * (3 * 200 + 100 + 200)
    for passes in (whole, walk):
        assert passes.kept_engines[0].nbytes == 6 * passes.plan.layerwise_bytes


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


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda walk: pickle.loads(pickle.dumps(walk))])
def test_copies_leave_caches_behind_and_share_a_budget_again(copied: Any) -> None:
    _, walk, S = reduced("mlp", "layerwise")
    V = columns(S.shape[1], 2)
    push(walk, V)
    other = copied(walk)
    assert other.plan.in_use == {} and other.memory is other._whole.memory is not walk.memory
    assert agree(push(other, V), S @ V)


def test_gradients_flow_through_a_reduced_walk() -> None:
    _, walk, S = reduced("own_slopes", "layerwise")
    V = columns(S.shape[1], 1).requires_grad_()
    product = walk.total(lambda _, s: s.pull(s.push(V)), 1)
    (gradient,) = torch.autograd.grad(product.square().sum(), V)
    A = S.mT @ S
    assert agree(gradient, 2 * A @ (A @ V.detach()))


@pytest.mark.parametrize("positions", [1, 2])
def test_columns_of_the_empirical_fisher_are_products_with_units(positions: int) -> None:
    model, inputs = ZOO["mlp"].build()
    f = call(model, inputs).detach()[:, :2].repeat(1, 2)
    y = torch.randn(f.shape, dtype=f.dtype, generator=torch.Generator().manual_seed(0))
    fisher, batch = Empirical(Gaussian(), positions), Batch((), y)
    r = (f - y).unflatten(1, (positions, -1))
    expected = torch.stack([torch.cat([r[:, t] * (t == s) for t in range(positions)], 1) for s in range(positions)])
    assert torch.equal(fisher.columns(f, batch, 0, positions), expected)
    assert torch.equal(fisher.columns(f, batch, positions - 1, positions), expected[-1:])
    units = torch.eye(positions, dtype=f.dtype).unsqueeze(1).expand(-1, len(f), -1)
    assert torch.equal(fisher.root_product(f, units, batch), expected)
    u = torch.randn(3, *f.shape, dtype=f.dtype)
    assert agree(fisher.root_transpose_product(f, u, batch), torch.einsum("mnc,knc->knm", expected, u))
