"""Each way of a product proves itself: on the first points, on the batch that it serves, and after every switch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import curvops as co
from curvops.network import Model, Passes
from tests.memory import peak_of
from tests.network.products import (
    PLENTY,
    WAYS,
    agree,
    columns,
    linear_layers_off_by,
    pull,
    push,
    require_products,
    walk,
)
from tests.zoo import ZOO, batches, dense_jacobian
from tests.zoo_functions import NoGradTanh, with_derivatives
from tests.zoo_modules import Wired


def test_what_rows_serve_says_why_and_names_the_module() -> None:
    """Layers serve what has first derivatives alone from the first product."""
    passes = walk("numpy_below_own_parameters", "auto")
    assert "NumpyTanh" in passes.plan.routes.why
    assert "by rows of J" in str(passes.plan)
    passes = walk("numpy_backward", "auto")
    push(passes, columns(len(passes.model.theta), 1))
    assert passes.plan.in_use == {"layerwise": 2}
    assert "the layerwise engine, from first derivatives only" in str(passes.plan)


def test_what_is_kept_is_proven_on_the_batch_that_it_serves() -> None:
    """A backward pass leaves autograd where a batch holds large values: the first points hold none."""

    def wiring(m: Any, x: Tensor) -> Tensor:
        h = m.fc1(x)
        return m.head(NoGradTanh.apply(h) if bool((x.detach().abs() > 50).any()) else h.tanh())

    model, x = Wired(wiring).double(), torch.randn(6, 4).double()
    x[4:] += 100
    J = dense_jacobian(model, x)
    passes = Passes(Model(model), [(x, None)], "autodiff", PLENTY)
    assert passes.plan.routes.replayed
    V = columns(J.shape[1], 9)
    for _ in range(2):
        found = push(passes, V)
    assert agree(found, J @ V)
    assert not passes.plan.routes.recordable and passes.plan.routes.pushes == "rows"


ByNumpy = with_derivatives("ByNumpy", torch.clone, torch.clone, lambda t: torch.from_numpy(1.0 * t.detach().numpy()))
"""x, whose tangent torch does not see on its way: a replay takes it for a constant."""


def test_a_replay_that_is_wrong_gives_way_to_double_backward() -> None:
    model, x = (
        Wired(lambda m, x: m.head(m.fc1(x) + ByNumpy.apply(m.fc2(m.fc1(x))))).double(),
        torch.randn(5, 4).double(),
    )
    passes = Passes(Model(model), batches(x), **WAYS["recorded"])
    require_products(passes, dense_jacobian(model, x))
    assert passes.plan.in_use == {"recorded": 2} and not passes.plan.routes.replayed
    assert passes.plan.routes.pushes == "forward mode"


class OffAtOneBlock(torch.autograd.Function):
    """w, whose forward derivative is off by a factor, or lost."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return w.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return ctx.factor * tangent


@pytest.mark.parametrize(("factor", "dtype"), [(0.0, torch.float32), (1.01, torch.float64)])
@pytest.mark.parametrize("lost", range(6))
def test_a_route_that_is_off_in_one_small_block_is_found_out(lost: int, factor: float, dtype: torch.dtype) -> None:
    """Also where that block is a thousandth of J v; in float32 where it is lost."""
    model, inputs = ZOO["mlp"].build(dtype)
    with torch.no_grad():
        model[4].weight.mul_(100)
    values = {name: value.detach() for name, value in model.named_parameters()}
    name = [*values][lost]

    def function(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, {**values, name: OffAtOneBlock.apply(values[name], off)}, (x,))

    for off, pushes in ((1.0, "forward mode"), (factor, "double backward")):
        routes = Passes(Model((function, values)), [(inputs, None)], **WAYS["recorded"]).plan.routes
        assert routes.pushes == pushes and routes.replayed is (off == 1.0)


def test_probing_takes_no_more_memory_than_a_product() -> None:
    """A streamed product of all of J has four vectors at a time: the vector, its parts, the gradient and the result."""
    model = nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 3)).eval()
    data = torch.randn(4, 400), torch.arange(4) % 3
    options: Any = {"likelihood": "classification", "memory_budget": 0, "engine": "autodiff"}
    probing, lin = peak_of(lambda: co.linearize(model, data, **options))
    vector = lin.theta.nbytes
    planning, _ = peak_of(lambda: lin.plan)
    product, _ = peak_of(lambda: co.GGN(lin) @ torch.ones_like(lin.theta))
    assert 2 * vector < product < 4.5 * vector
    assert probing <= vector + 1.05 * product  # with the copy of the weights, which stays, and a few numbers
    assert planning <= product


class ByNeed(torch.autograd.Function):
    """Returns another gradient of the scale if the input needs none: as a branch without layers computes it alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor]:
        x, scale = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, 0.5 * (g * x).sum(0)
        return g * scale, (g * x).sum(0)


class ScaledByNeed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.head = nn.Linear(4, 5), nn.Parameter(torch.linspace(0.5, 1.5, 5)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(ByNeed.apply(torch.tanh(self.first(x)), self.scale))
        return found


@pytest.mark.parametrize("points", [1, 5])
def test_layers_beside_a_wrong_gradient_of_another_parameter_are_left_to_autodiff(points: int) -> None:
    """None of the layers is wrong, so that the check would never end if it rejected only what is."""
    model, x = ScaledByNeed().double(), torch.randn(points, 4, dtype=torch.float64)
    data = x, torch.arange(points) % 3
    expected = co.GGN(co.linearize(model, data, "classification", engine="streamed")).to_dense()
    lin = co.linearize(model, data, "classification", engine="layerwise")
    torch.testing.assert_close(co.GGN(lin).to_dense(), expected, rtol=0, atol=1e-10)
    assert len(lin.plan.others) == 5


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


def test_a_half_precision_base_hides_no_wrong_rule_and_refuses_no_right_one() -> None:
    """For some seed the difference is more than single precision would explain, which is what the check is about."""
    differences = []
    for seed in range(6):
        torch.manual_seed(seed)
        model, x = UnderHalf().eval(), torch.randn(5, 4)
        walks = [Passes(Model(model), [(x, None)], **WAYS[way]) for way in ("layerwise", "streamed")]
        U = columns(15, 1, torch.float32)
        ours, expected = (pull(passes, U) for passes in walks)
        assert walks[0].plan.others == {} and walks[1].plan.routes.pushes == "forward mode"
        differences.append(float((ours - expected).norm() / expected.norm()))
        with linear_layers_off_by(1.2, out_features=16):
            passes = Passes(Model(model), [(x, None)], **WAYS["layerwise"])
            push(passes, passes.model.theta.detach()[:, None])
            assert passes.plan.others.keys() == {"adapter.weight", "adapter.bias"}
    assert max(differences) > 1e-3


def test_a_layer_whose_points_are_squeezed_away_is_left_to_autodiff() -> None:
    class Squeezed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, None, :].squeeze()).view(-1, 2)

    model = Squeezed(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    G, apart = (
        co.DiagonalGGN(co.linearize(model, data, co.likelihoods.Gaussian(1.0)))
        for data in ((x, y), [(x[:4], y[:4]), (x[4:], y[4:])])
    )
    assert torch.allclose(G.diagonal(), apart.diagonal())
    post = co.laplace(co.linearize(model, (x, y), co.likelihoods.Gaussian(1.0)), co.KFAC, 1.0, check_mode=False)
    assert torch.allclose(post.predict(x[:1]).variance, post.predict(x).variance[:1])
