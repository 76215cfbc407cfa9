"""Every network of the zoo, by every engine, against a dense Jacobian that shares no code with the library.

Tests `fused_kernels.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvops.network.model.model import Model
from curvops.network.walks.passes import Passes
from tests.network.products import PLENTY, WAYS, agree, columns, pull, push, walk
from tests.zoo import ZOO, N, Network, batches, parameters_of, reference

# Two routes to a product in float32 differ by rounding in sums of some hundred terms.
SINGLE = 1e-4


@pytest.mark.parametrize("way", ["streamed", "recorded", "layerwise"])
@pytest.mark.parametrize("name", ZOO)
def test_products_are_those_of_the_dense_jacobian(name: str, way: str) -> None:
    """At K = 1 and 3; the first products stream, later ones come from what was kept.

    The layerwise engine serves what has a rule, and nothing else; `test_formed.py` has them of the engine "auto".
    """
    J, passes = reference(name), walk(name, way, sizes=(N,))
    for k in (1, 3, 1, 3):
        V, U = columns(J.shape[1], k), columns(J.shape[0], k)
        assert agree(push(passes, V), J @ V)
        assert agree(pull(passes, U), J.mT @ U)
    kinds = passes.plan.in_use
    if way == "streamed":
        assert kinds == {}
    elif way == "layerwise" and passes.plan.layers:
        assert kinds == {"layerwise": 1}
    else:
        assert kinds == ({} if ZOO[name].pushes == "rows" else {"recorded": 1})
    if way == "layerwise":
        names = list(parameters_of(ZOO[name].build()[0]))
        assert set(passes.plan.others) == ZOO[name].served_by_autodiff(names)


FLOAT32 = ["lstm", "gru", "transformer_encoder", "fused_attention", "attention", "cnn", "bfloat16_base",
           "float16_base"]  # fmt: skip


class Wide(nn.Module):
    """A layer of a million weights that runs twice, a parameter without a rule, and one that no output reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.unused, self.head = nn.Linear(1030, 1030), nn.Linear(3, 3), nn.Linear(1030, 3)
        self.scale = nn.Parameter(torch.randn(1030))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.wide(self.wide(x).tanh()).tanh() * self.scale)
        return out


@pytest.mark.parametrize("way", ["streamed", "recorded", "layerwise"])
def test_large_blocks_are_filled_as_gradients_are_found(way: str) -> None:
    """Four vectors take 34 MB, which are not copied; one takes less, and another way."""
    network = Network("wide", Wide, lambda: torch.randn(N, 1030))
    passes = walk(network, way, sizes=(N,))
    V, U = columns(passes.model.theta.numel(), 4), columns(3 * N, 4)
    pulled = pull(passes, U)
    with torch.no_grad():
        (_, batch), *_ = passes.each(4)
        product = batch.pull(batch.push(V))
    for k in (0, 3):
        assert agree(pulled[:, k], pull(passes, U[:, k : k + 1])[:, 0], 1e-12)
        with torch.no_grad():
            (_, batch), *_ = passes.each(1)
            assert agree(product[:, k], batch.pull(batch.push(V[:, k : k + 1]))[:, 0], 1e-12)


@pytest.mark.parametrize("way", ["streamed", "recorded", "layerwise"])
@pytest.mark.parametrize("name", FLOAT32)
def test_float32_takes_no_kernel_without_derivatives(name: str, way: str) -> None:
    """Fused kernels are chosen by dtype: float64 alone would never meet oneDNN's recurrent layers."""
    # A base in 16 bits rounds its inputs: those of float32 are not those of float64.
    J = reference(name, torch.float32).double() if "base" in name else reference(name)
    passes = walk(name, way, torch.float32, sizes=(N,))
    V, U = columns(J.shape[1], 3), columns(J.shape[0], 3)
    for _ in range(2):
        assert agree(push(passes, V.float()).double(), J @ V, SINGLE)
        assert agree(pull(passes, U.float()).double(), J.mT @ U, SINGLE)


@pytest.mark.parametrize("sizes", [(3, 2), (1, 4), (2, 2, 1)])
@pytest.mark.parametrize("way", ["streamed", "recorded", "layerwise"])
@pytest.mark.parametrize("name", ["resnet_groupnorm", "prelu", "lstm"])
def test_batches_may_be_of_any_size(name: str, way: str, sizes: tuple[int, ...]) -> None:
    J, passes = reference(name), walk(name, way, sizes=sizes)
    V, U = columns(J.shape[1], 3), columns(J.shape[0], 3)
    for _ in range(2):
        assert agree(push(passes, V), J @ V)
        assert agree(pull(passes, U), J.mT @ U)


SELECTIONS = {"weights": "*.weight", "biases": ["*.bias"], "last": "head*", "large": lambda _, p: p.numel() > 9}


@pytest.mark.parametrize("way", ["streamed", "layerwise"])
@pytest.mark.parametrize("parameters", SELECTIONS.values(), ids=SELECTIONS)
@pytest.mark.parametrize("name", ["sequence_layernorm", "resnet_groupnorm", "shared_parameter"])
def test_partial_selections(name: str, parameters: Any, way: str) -> None:
    """Columns of the whole Jacobian: weights only, biases only, one layer."""
    passes = walk(name, way, parameters=parameters)
    chosen, start, J = [], 0, reference(name)
    for key, tensor in parameters_of(ZOO[name].build()[0]).items():
        chosen += range(start, start + tensor.numel()) if key in passes.model.selection.names else []
        start += tensor.numel()
    assert 0 < len(chosen) < start
    V, U = columns(len(chosen), 3), columns(len(J), 3)
    for _ in range(2):
        assert agree(push(passes, V), J[:, chosen] @ V)
        assert agree(pull(passes, U), J[:, chosen].mT @ U)


@pytest.mark.parametrize("way", ["streamed", "recorded", "layerwise"])
@pytest.mark.parametrize("name", ["inplace_relu", "lstm"])
def test_a_subnetwork_is_some_columns_in_the_given_order(name: str, way: str) -> None:
    J = reference(name)
    index = torch.randperm(J.shape[1])[: J.shape[1] // 3]
    passes = walk(name, way, parameters=index)
    V, U = columns(len(index), 3), columns(len(J), 3)
    for _ in range(2):
        assert agree(push(passes, V), J[:, index] @ V)
        assert agree(pull(passes, U), J[:, index].mT @ U)


def test_engines_agree_with_each_other() -> None:
    walks = [walk("resnet_batchnorm", way) for way in WAYS]
    V = columns(reference("resnet_batchnorm").shape[1], 2)
    results = [push(passes, V) for _ in range(3) for passes in walks]
    assert all(agree(result, results[0], 1e-13) for result in results)


def test_a_budget_that_holds_one_batch_of_two() -> None:
    model, inputs = ZOO["mlp"].build()
    plenty = Passes(Model(model), batches(inputs), "autodiff", PLENTY)
    push(plenty, columns(reference("mlp").shape[1], 9))
    assert plenty.plan.in_use == {"recorded": 2}  # only now is it known what a replay keeps
    needed = plenty.plan.routes.recorded_bytes
    passes = Passes(Model(model), batches(inputs), "autodiff", int(3.5 * needed))
    J = reference("mlp")
    V = columns(J.shape[1], 3)
    for _ in range(3):
        assert agree(push(passes, V), J @ V)
    assert passes.plan.in_use == {"recorded": 1}


def test_the_table_is_in_eval_mode_and_seeded() -> None:
    for name, network in ZOO.items():
        (first, x), (second, z) = network.build(), network.build()
        for key, tensor in parameters_of(first).items():
            assert torch.equal(tensor, parameters_of(second)[key]), name
        assert all(torch.equal(a[0], b[0]) for a, b in zip(_flat(x), _flat(z)))
        assert all(len(tensor) == N for tensor in _flat(x))
        assert isinstance(first, tuple) or not first.training


def _flat(inputs: object) -> list[torch.Tensor]:
    if isinstance(inputs, dict):
        return list(inputs.values())
    return list(inputs) if isinstance(inputs, tuple) else [inputs]  # type: ignore[list-item]
