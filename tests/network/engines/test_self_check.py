"""The self-check where rounding is more than the parameters' dtype explains: adapters under a half-precision base."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvops.network.engines.autodiff import Streamed
from curvops.network.engines.layerwise import Layerwise, owners_of, record
from curvops.network.engines.routes import allowance, find_routes, rounding
from curvops.network.engines.self_check import mismatches
from curvops.network.model.model import Model
from tests.network.products import PLENTY, columns, linear_layers_off_by


class UnderHalf(nn.Module):
    """A float32 adapter whose derivatives pass through frozen layers in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter, self.head = nn.Linear(4, 16), nn.Linear(16, 3).bfloat16().requires_grad_(False)
        self.base = nn.ModuleList(nn.Linear(16, 16).bfloat16().requires_grad_(False) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.adapter(x).bfloat16()
        for layer in self.base:
            h = h + F.gelu(layer(h))
        return self.head(h)


def engines(seed: int) -> tuple[Layerwise, Streamed]:
    torch.manual_seed(seed)
    network, x = Model(UnderHalf().eval()), torch.randn(5, 4)
    reference = Streamed(network, x, network.selection.names)
    return Layerwise(network, record(network, x, owners_of(network)), None, PLENTY), reference


SEEDS = range(10)


def test_a_right_rule_is_believed_under_a_half_precision_base() -> None:
    """For some seed the difference is more than single precision would explain, which is what the check is about."""
    differences = []
    for seed in SEEDS:
        layerwise, reference = engines(seed)
        assert mismatches(layerwise, reference).wrong == set()
        u = torch.randn(1, 5, 3)
        ours, expected = layerwise.pull(u), reference.pull(u)
        differences += [(ours[n] - e).norm() > allowance(e) for n, e in expected.items()]
    assert any(differences)


def test_a_wrong_rule_is_found_out_under_a_half_precision_base() -> None:
    with linear_layers_off_by(1.2, out_features=16):
        for seed in SEEDS:
            assert mismatches(*engines(seed)).wrong == {"adapter.weight", "adapter.bias"}


def test_forward_mode_is_used_under_a_half_precision_base() -> None:
    for seed in SEEDS:
        _, streamed = engines(seed)
        assert find_routes(streamed.model, streamed.inputs[:2], streamed.names).pushes == "forward mode"


def test_rounding_of_a_product_is_that_of_its_dtype() -> None:
    A, x = columns(30, 20), {"x": columns(20, 1)}
    exact = rounding(lambda b: {"y": A @ b["x"]}, x, {"y": A @ x["x"]}, torch.Generator())["y"]
    half = A.bfloat16()

    def rounded(b: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": (half @ b["x"].bfloat16()).double()}

    coarse = rounding(rounded, x, rounded(x), torch.Generator())["y"]
    size = (A @ x["x"]).norm()
    assert exact <= 1e-14 * size
    assert 1e-3 * size <= coarse <= 2e-2 * size


def test_what_is_far_from_linear_is_not_taken_for_rounding() -> None:
    value = torch.ones(4).double()
    assert allowance(value) == 10 * 2**-26 * 2
    assert torch.isclose(allowance(value, torch.tensor(0.01)), torch.tensor(0.08).double())
    assert torch.isclose(allowance(value, torch.tensor(9.0)), torch.tensor(0.2).double())
    assert not torch.tensor(0.01) <= allowance(value, torch.tensor(torch.nan))
