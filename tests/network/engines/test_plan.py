"""The cost rule: which engine it takes, what it says of bytes and gradients, and how it prints."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import curvops as co
from benchmarks.gpu.counts import H100
from curvops.ambient import CACHE_BYTES
from curvops.network import Model, Passes, Plan
from curvops.network.engines import CPU, GPU, Rates
from tests.network.products import PLENTY, columns, push, walk
from tests.zoo import reference
from tests.zoo_modules import Wired


def plan_of(model: nn.Module, inputs: torch.Tensor, engine: str = "auto") -> Plan:
    return Passes(Model(model.eval()), [(inputs, None)], engine, PLENTY).plan  # type: ignore[arg-type]


def wide(num_outputs: int) -> Plan:
    hidden = nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU()
    return plan_of(nn.Sequential(*hidden, nn.Linear(300, num_outputs)), torch.randn(2, 200))


def test_bytes_by_hand() -> None:
    """Three linear layers in float32: a of each, δ of the first, slopes of the second; recorded, what is saved."""
    plan = wide(10)
    a, delta, slopes = 200 + 300 + 300, 10 * 300, 300
    assert plan.layerwise_bytes == 4 * (a + delta + slopes)
    assert plan.routes.saved_bytes == 4 * (200 + 300 + 300)
    assert plan.forward == 200 * 300 + 300 * 300 + 300 * 10
    assert plan.bytes_needed("streamed") == 0


def test_bytes_that_a_pass_makes_count_each_result_once_and_neither_views_nor_writes() -> None:
    """Whatever is selected: a convolution, its activation in place, a pooling with its indices, and two layers."""
    layers = nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 5)
    model, x = nn.Sequential(*layers, nn.Linear(5, 3)), torch.randn(2, 1, 4, 4)
    made = [Passes(Model(model, names), [(x, None)], "auto", PLENTY).plan.routes.made_bytes for names in (None, "5.*")]
    assert made == [4 * (3 * 16 + 12 + 5 + 3) + 8 * 12] * 2


def test_with_one_hidden_layer_a_product_costs_little_more_for_many_outputs() -> None:
    """Slopes take one backward pass and one number a unit, whatever C; both directions go through the last weight."""
    plan = plan_of(nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 1000)), torch.randn(2, 200))
    assert plan.layerwise_bytes == 4 * (200 + 300 + 300)
    assert plan.build("layerwise") == 1 / 3
    through = 2 * (200 * 300 + 2 * 300 * 1000 + CPU.read * 300)
    assert plan.per_vector("layerwise") == through / (3 * plan.forward) < plan.per_vector("recorded")
    assert plan.choose(10**6, 10**12) == "layerwise"
    assert "a and slopes" in str(plan)


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


def test_a_wide_block_of_a_small_network_is_multiplied_as_a_block() -> None:
    """By count a recorded pass is the cheaper here, but it goes through the layers once a vector."""
    hidden = [layer for _ in range(2) for layer in (nn.Linear(4, 4), nn.Tanh())]
    plan = plan_of(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), *hidden, nn.Linear(4, 8)), torch.randn(2, 3))
    assert plan.per_vector("layerwise", 20_000) > plan.per_vector("recorded", 20_000)
    assert plan.choose(64, PLENTY) == plan.choose(64, PLENTY, single=20_000) == "layerwise"
    assert plan.choose(64, PLENTY, single=1) == "streamed"


def test_each_output_of_images_visits_the_layers_anew_where_the_layerwise_engine_is_built() -> None:
    """Two thousand backward passes of a small network were counted as one visit: a product took two minutes for 60 ms.

    For ten outputs, and where δ of all columns fit a cache together, visits are shared as before.
    """
    narrow = [layer for _ in range(6) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.ReLU())]
    plan = plan_of(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *narrow, nn.Conv2d(4, 2, 1)), torch.randn(2, 1, 32, 32))
    assert plan.num_outputs == 2048
    points = 50
    assert points * plan.sensitivity_bytes > CACHE_BYTES
    visits = plan.cost_to_build("layerwise", points) - plan.build("layerwise")
    assert plan.overhead(1024, points) < visits < plan.overhead(1040, points)
    assert plan.cost_to_build("layerwise", points) > 1000
    assert plan.choose(points, 10**12) == "recorded"
    few = wide(10)
    visits = few.cost_to_build("layerwise", points) - few.build("layerwise")
    assert few.overhead(1, points) < visits < few.overhead(16, points)


def test_on_a_gpu_visits_of_layers_outweigh_arithmetic_up_to_far_larger_networks() -> None:
    """One rule for all devices: its rates are those of the device that holds the weights."""
    assert wide(100).rates is CPU
    on_gpu = dataclasses.replace(wide(100), rates=GPU)
    points, plenty = 3000, 10**15
    # Blocks take fewer multiply-adds by a recorded pass, but there each vector visits the layers.
    assert wide(100).choose(points, plenty) == "recorded"
    assert on_gpu.choose(points, plenty) == "layerwise"
    assert on_gpu.overhead(1.0, points) > 0.5 > 0.05 > wide(100).overhead(1.0, points)
    assert GPU.read == pytest.approx(4 * H100.multiply_adds / H100.bytes)  # a number of single precision
    assert GPU.visit == pytest.approx(10 * H100.launch * H100.multiply_adds, rel=0.02)
    assert on_gpu.per_vector("recorded") == wide(100).per_vector("recorded")
    assert on_gpu.cost_to_build("formed", points) > 50 * wide(100).cost_to_build("formed", points)


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


def test_on_a_half_precision_base_the_engine_that_rounds_once_serves_where_it_fits() -> None:
    model = Wired(lambda m, x: m.head(m.fc1(x).bfloat16()))
    model.head.bfloat16().requires_grad_(False)
    del model.fc2
    plan = plan_of(model, torch.randn(2, 4))
    assert plan.half_base
    assert plan.choose(100, PLENTY, single=1) == "layerwise"
    assert plan.choose(100, 0, single=1) == "streamed"
    assert dataclasses.replace(plan, engine="autodiff").choose(100, PLENTY, single=1) == "streamed"
    mixed = dataclasses.replace(plan, others={"table": "no layer rule"})
    assert mixed.choose(100, PLENTY, single=1) == "streamed"


@pytest.mark.usefixtures("annotations_unchecked")
def test_the_engine_that_is_built_stays_whatever_blocks_follow() -> None:
    """Also where a recorded pass is the cheaper with single vectors, and the layerwise engine with blocks."""
    hidden = nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU()
    model = nn.Sequential(*hidden, nn.Linear(300, 40)).double()
    passes = Passes(Model(model.eval()), [(torch.randn(2, 200).double(), None)], memory_budget=PLENTY)
    passes.engines.plan = dataclasses.replace(passes.engines.plan, rates=Rates(CPU.read, visit=0.0))
    assert passes.plan.per_vector("layerwise") > passes.plan.per_vector("recorded")
    assert passes.plan.per_vector("layerwise", 16) < passes.plan.per_vector("recorded", 16)
    push(passes, columns(passes.model.theta.numel(), 1))
    assert passes.plan.in_use == {}
    push(passes, columns(passes.model.theta.numel(), 1))
    (engine,) = passes.kept_engines
    for width in (16, 1, 64, 16):
        push(passes, columns(passes.model.theta.numel(), width))
        assert passes.kept_engines == [engine]


def test_an_algorithm_builds_the_engine_at_its_first_product() -> None:
    """So its results do not depend on whether a product was made before."""
    model, data = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (torch.randn(6, 3), torch.arange(6) % 2)
    fresh, used = (co.linearize(model, data, "classification") for _ in range(2))
    co.GGN(used) @ used.theta
    assert used.plan.in_use == {}
    for lin in (fresh, used):
        co.linalg.cg(co.GGN(lin).add_diagonal(1.0), lin.theta, maxiter=1)
        assert lin.plan.in_use == {"layerwise": 1}


def test_what_does_not_fit_is_not_taken() -> None:
    plan = wide(10)
    needed = 100 * min(plan.bytes_needed("recorded"), plan.bytes_needed("layerwise"))
    assert plan.choose(100, needed - 1) == "streamed"
    assert plan.choose(100, -1) == "streamed"  # vectors have taken bytes from engines


def test_an_engine_can_be_forced() -> None:
    plan = wide(10)
    autodiff, layerwise = (dataclasses.replace(plan, engine=engine) for engine in ("autodiff", "layerwise"))
    assert autodiff.candidates() == ("streamed", "recorded")
    assert layerwise.choose(100, PLENTY, single=1) == "layerwise"
    assert layerwise.choose(100, 0, single=1) == "streamed"
    assert walk("function_pair", "layerwise").plan.candidates() == ("streamed", "recorded")


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
