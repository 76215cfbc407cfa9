"""Every network of the zoo, by every engine, against a dense Jacobian that shares no code with the library.

Tests `fused_kernels.py`.
"""

import pytest
import torch
from torch import Tensor, nn

from curvops.network import Model, Passes
from tests.network.products import PLENTY, WAYS, agree, columns, pull, push, require_products, walk
from tests.zoo import ZOO, N, Network, batches, parameters_of, reference

# Two routes to a product in float32 differ by rounding in sums of some hundred terms.
SINGLE = 1e-4


def served_whole(name: str) -> bool:
    """Whether every parameter has a layer rule."""
    return not ZOO[name].autodiff


CASES = [(name, way) for name in ZOO for way in WAYS if way != "auto" or not served_whole(name)]
CASES += [("mlp", "auto"), ("cnn", "auto")]  # of 51 networks for all of which it takes "layerwise"


@pytest.mark.parametrize(("name", "way"), CASES)
def test_products_are_those_of_the_dense_jacobian(name: str, way: str) -> None:
    """At K = 1 and 3; the first products stream, later ones come from what was kept, of which "auto" has the choice.

    The layerwise engine serves what has a rule, and nothing else; "auto" chooses it where it serves all.
    """
    count = 2 if way == "auto" or (way == "layerwise" and served_whole(name)) else 1
    J, passes = reference(name), walk(name, way, sizes=(3, 2) if count == 2 else (N,))
    if way == "auto":
        push(passes, columns(J.shape[1], 1))
    for k in (1, 3) if way in ("streamed", "auto") else (3, 1, 3):
        V, U = columns(J.shape[1], k), columns(J.shape[0], k)
        assert agree(push(passes, V), J @ V)
        assert agree(pull(passes, U), J.mT @ U)
    kinds, plan = passes.plan.in_use, passes.plan
    if way == "streamed":
        assert kinds == {}
    elif (way == "layerwise" and plan.layers) or (way == "auto" and served_whole(name)):
        assert kinds == {"layerwise": count}
    elif way != "auto":
        assert kinds == ({} if ZOO[name].pushes == "rows" else {"recorded": 1})
    if way == "layerwise":
        names = list(parameters_of(ZOO[name].build()[0]))
        served = {key for layer in plan.layers for key in layer.names.values()}
        assert set(plan.others) == ZOO[name].served_by_autodiff(names)
        assert served == set(names) - set(plan.others)


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
    require_products(walk(name, way, torch.float32, sizes=(N,)), J, tolerance=SINGLE)


@pytest.mark.parametrize("way", ["streamed", "recorded", "layerwise"])
@pytest.mark.parametrize("name", ["resnet_groupnorm", "own_slopes", "lstm"])
def test_batches_may_be_of_any_size(name: str, way: str) -> None:
    """Also of a single point, first and last."""
    require_products(walk(name, way, sizes=(1, 3, 1)), reference(name))


@pytest.mark.parametrize("way", ["streamed", "recorded", "layerwise"])
@pytest.mark.parametrize("name", ["inplace_relu", "lstm"])
def test_a_subnetwork_is_some_columns_in_the_given_order(name: str, way: str) -> None:
    J = reference(name)
    index = torch.randperm(J.shape[1])[: J.shape[1] // 3]
    require_products(walk(name, way, parameters=index), J[:, index])


def test_a_budget_that_holds_one_batch_of_two() -> None:
    model, inputs = ZOO["mlp"].build()
    plenty, J = Passes(Model(model), batches(inputs), "autodiff", PLENTY), reference("mlp")
    push(plenty, columns(J.shape[1], 9))
    assert plenty.plan.in_use == {"recorded": 2}  # only now is it known what a replay keeps
    passes = Passes(Model(model), batches(inputs), "autodiff", int(3.5 * plenty.plan.routes.recorded_bytes))
    require_products(passes, J)
    assert passes.plan.in_use == {"recorded": 1}
