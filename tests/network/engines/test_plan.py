"""The cost rule: which engine it takes, what it says of bytes and gradients, and how it prints."""

import pytest
import torch
from torch import nn

import curvops as co
from curvops.network import Model, Passes, Plan
from tests.network.products import PLENTY, columns, push, walk
from tests.zoo import reference


def plan_of(model: nn.Module, inputs: torch.Tensor, engine: str = "auto") -> Plan:
    return Passes(Model(model.eval()), [(inputs, None)], engine, PLENTY).plan  # type: ignore[arg-type]


def wide(num_outputs: int) -> Plan:
    hidden = nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU()
    return plan_of(nn.Sequential(*hidden, nn.Linear(300, num_outputs)), torch.randn(2, 200))


@pytest.mark.parametrize("kind", ["recorded", "layerwise"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet_groupnorm", "own_slopes"])
def test_the_bytes_announced_are_those_kept(name: str, kind: str) -> None:
    """The budget is decided on the announcement: what is kept must not exceed it by more than a rounding of points."""
    passes = walk(name, kind, sizes=(5,))
    for _ in range(4):
        push(passes, columns(reference(name).shape[1], 3))
    (engine,) = passes.kept_engines
    assert engine.kind == kind
    assert engine.nbytes <= 1.25 * 5 * passes.plan.bytes_needed(engine.kind)


def test_a_single_product_streams_and_many_do_not() -> None:
    """A block builds what it pays for itself; outputs alone are no product."""
    plan, many_outputs = wide(10), wide(1000)
    for points, plenty in ((100, PLENTY), (10**6, 10**12)):
        assert plan.choose(points, plenty, single=0) == plan.choose(points, plenty, single=1) == "streamed"
        assert plan.choose(points, plenty, single=1000) == plan.choose(points, plenty) == "layerwise"
    # δ costs C backward passes and C numbers per unit
    assert many_outputs.per_vector("layerwise") > many_outputs.per_vector("recorded")
    for points in (100, 10**6):
        assert many_outputs.choose(points, 10**12) == "recorded"
    # a block shares the reading
    assert plan.per_vector("layerwise", 16) < plan.per_vector("layerwise", 1)
    assert plan.per_vector("streamed", 16) == plan.per_vector("streamed", 1)


@pytest.mark.parametrize("products", [1, 24])
@pytest.mark.parametrize("num_outputs", [2, 100, 1000])
def test_the_choice_costs_little_more_than_the_best_engine_from_the_start(num_outputs: int, products: int) -> None:
    """By the plan's own count, on a batch so large that overheads do not count."""
    plan, points, plenty = wide(num_outputs), 10**6, 10**15
    first, kept = plan.choose(points, plenty, single=1), plan.choose(points, plenty)
    total = plan.build(first) + plan.per_vector(first)
    if products > 1:
        total += (0.0 if kept == first else plan.build(kept)) + (products - 1) * plan.per_vector(kept)
    best = min(plan.build(kind) + products * plan.per_vector(kind) for kind in plan.candidates())
    assert total <= 1.3 * best


def test_keeping_a_pass_is_tried_once_it_is_needed() -> None:
    """One product of a fresh walk runs the model no more often than the engine that keeps nothing."""
    counts = {}
    for engine in ("streamed", "auto"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)).eval()
        calls: list[int] = []
        model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        passes = Passes(Model(model), [(torch.randn(6, 3), None)], engine, PLENTY)  # type: ignore[arg-type]
        push(passes, columns(passes.model.theta.numel(), 1, torch.float32))
        counts[engine] = len(calls)
        assert passes.engines.plan.routes.tried is False
    assert counts["auto"] <= counts["streamed"]
    assert passes.plan.routes.tried
    assert passes.plan.routes.recorded_bytes > passes.plan.routes.saved_bytes


def test_an_algorithm_builds_the_engine_at_its_first_product() -> None:
    """So its results do not depend on whether a product was made before."""
    model, data = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (torch.randn(6, 3), torch.arange(6) % 2)
    fresh, used = (co.linearize(model, data, "classification") for _ in range(2))
    co.GGN(used) @ used.theta
    assert used.plan.in_use == {}
    for lin in (fresh, used):
        co.linalg.cg(co.GGN(lin).add_diagonal(1.0), lin.theta, maxiter=1)
        assert lin.plan.in_use == {"layerwise": 1}


def test_the_table_names_layers_parameters_and_engines() -> None:
    passes = walk("attention_of_two", "layerwise")
    push(passes, columns(reference("attention_of_two").shape[1], 1))
    text = str(passes.plan)
    for expected in ("attention.out_proj", "head", "a and δ", "attention.in_proj_weight"):
        assert expected in text
    assert "autodiff: its layer does not run as a layer" in text
    assert "autodiff: no layer rule" in str(walk("own_slopes", "layerwise").plan)
    assert "Jacobian rows" in str(walk("cnn", "layerwise").plan)
    assert "2 batches layerwise" in text
    assert "engine='layerwise'" in text
    assert str(walk("mlp", "auto").plan).endswith("now: nothing")
