"""The layerwise engine: what it proves of itself, what it leaves behind on the user's model, what it must refuse.

Tests `layerwise.py` and `layer_calls.py`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvops.network import Model, Passes, squared_columns
from tests import zoo_modules as parts
from tests.network.products import PLENTY, agree, columns, linear_layers_off_by, pull, push, require_products, walk
from tests.zoo import ZOO, batches, dense_jacobian, reference
from tests.zoo_functions import NothingForZeros


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_self_check_rejects_a_rule_that_is_wrong_by_one_percent(dtype: torch.dtype) -> None:
    """The layer goes to autodiff, the plan names it, the results stay right, and other layers stay."""
    with linear_layers_off_by(1.01, out_features=5):
        J = dense_jacobian(*ZOO["mlp"].build()).to(dtype)
        passes = walk("mlp", "layerwise", dtype)
        V, U = columns(J.shape[1], 2, dtype), columns(J.shape[0], 2, dtype)
        tolerance = 1e-10 if dtype == torch.float64 else 1e-4
        assert agree(push(passes, V), J @ V, tolerance)
        assert agree(pull(passes, U), J.mT @ U, tolerance)
    assert set(passes.plan.others) == {"2.weight", "2.bias"}
    assert "self-check" in passes.plan.others["2.weight"]
    assert "self-check" in str(passes.plan)
    assert [layer.path for layer in passes.plan.layers] == ["0", "4"]
    assert passes.plan.in_use == {"layerwise": 2}


@pytest.mark.parametrize(("scale", "factor"), [(1e-6, 1.01), (1e6, 1.01), (1.0, 0.99)])
def test_what_the_self_check_finds_depends_on_no_unit_of_the_outputs(scale: float, factor: float) -> None:
    model, inputs = ZOO["mlp"].build()
    with torch.no_grad():
        for parameter in list(model.modules())[-1].parameters():
            parameter.mul_(scale)
    J = dense_jacobian(model, inputs)
    passes, V = Passes(Model(model), batches(inputs), "layerwise"), columns(J.shape[1], 2)
    assert agree(push(passes, V), J @ V)
    assert passes.plan.others == {}
    with linear_layers_off_by(factor, out_features=5):
        passes = Passes(Model(model), batches(inputs), "layerwise")
        push(passes, V)
    assert set(passes.plan.others) == {"2.weight", "2.bias"}


def test_the_self_check_may_reject_every_layer() -> None:
    with linear_layers_off_by(0.5):
        J, passes = dense_jacobian(*ZOO["inplace_relu"].build()), walk("inplace_relu", "layerwise")
        V = columns(J.shape[1], 2)
        for _ in range(3):
            assert agree(push(passes, V), J @ V)
    assert passes.plan.layers == ()


def test_the_check_behind_rows_rejects_a_rule_that_is_wrong_by_one_percent() -> None:
    """It looks at one cotangent: rows are then taken from autodiff for this layer alone."""
    with linear_layers_off_by(1.01, out_features=5):
        J, passes = dense_jacobian(*ZOO["mlp"].build()), walk("mlp", "auto")
        norms = torch.zeros(J.shape[0], dtype=J.dtype)
        for first, _, groups in passes.jacobian_rows():
            for group in groups:
                for row in group.rows().values():
                    norms[first : first + group.num_rows] += row.flatten(2).square().sum(2).flatten()
    assert set(passes.plan.others) == {"2.weight", "2.bias"}
    assert "self-check" in passes.plan.others["2.weight"]
    assert agree(norms, J.square().sum(1))


def hooks(model: nn.Module) -> list[int]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    return [len(getattr(part, kind)) for part in model.modules() for kind in kinds]


@pytest.mark.parametrize("name", ["cnn", "user_hook", "user_backward_hook", "attention"])
def test_hooks_never_stay_nor_after_an_exception(name: str) -> None:
    model, inputs = ZOO[name].build()
    network, J = Model(model), reference(name)
    before, fails = hooks(network.module), [False]
    passes = Passes(network, batches(inputs), "layerwise", PLENTY)
    last, V = list(network.module.modules())[-1], columns(J.shape[1], 1)
    plain = last.forward

    def forward(*given: Any, **named: Any) -> Any:
        if fails[0]:
            raise RuntimeError("no more")
        return plain(*given, **named)

    last.forward, _ = forward, passes.plan
    fails[0] = True
    with pytest.raises(RuntimeError, match="no more"):
        push(passes, V)
    fails[0] = False
    assert hooks(network.module) == before
    assert agree(push(passes, V), J @ V)
    assert hooks(network.module) == before == hooks(model)


def test_autocast_layers_go_to_autodiff() -> None:
    """Their sensitivities would be of another dtype. bfloat16 keeps eight bits: 1e-2."""

    def wiring(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = m.fc1(x)
        return m.head(torch.tanh(m.fc2(h.to(x.dtype))))

    model, x = parts.Wired(wiring).eval(), torch.randn(5, 4)
    passes = Passes(Model(model), batches(x), "layerwise", PLENTY)
    J = dense_jacobian(model, x)
    V = columns(J.shape[1], 2, torch.float32)
    assert agree(push(passes, V), J @ V, 1e-2)
    assert set(passes.plan.others) == {"fc1.weight", "fc1.bias"}


@pytest.mark.parametrize("way", ["streamed", "recorded", "layerwise"])
def test_a_selection_that_does_not_reach_the_outputs_has_jacobian_zero(way: str) -> None:
    passes = walk("dead_branch", way, parameters="fc2.*")
    for _ in range(2):
        assert not push(passes, columns(20, 3)).any()
        assert not pull(passes, columns(15, 3)).any()


@pytest.mark.parametrize(("dead", "points"), [([0, 5], 4), ([0, 1, 2, 3, 4], 3)], ids=["first point", "first batch"])
def test_a_check_at_a_point_without_a_gradient_proves_nothing(points: int, dead: list[int]) -> None:
    """The first layer's parameters are also used without it: its rule is wrong at each point."""

    def wiring(m: Any, x: Tensor) -> Tensor:
        z = m.fc2(m.fc1(nn.functional.linear(x, m.fc1.weight, m.fc1.bias).relu()))
        return m.head(z.squeeze(1) * (x[:, 0, :1] > 0))

    model, inputs = parts.Wired(wiring).double(), torch.randn(9, 1, 4).double().abs()
    inputs[dead] *= -1  # the outputs there depend on one bias only
    passes = Passes(Model(model), batches(inputs, (points, 9 - points)), engine="layerwise", memory_budget=PLENTY)
    J = dense_jacobian(model, inputs)
    assert agree(squared_columns(passes), J.square().sum(0))
    assert agree(torch.cat(list(passes.selected_rows())), J)
    assert {"fc1.weight", "fc1.bias"} <= passes.plan.others.keys()


@pytest.mark.parametrize("points", [3, 3000])
def test_outputs_that_a_layer_does_not_reach_have_zeros_where_a_function_returns_nothing(points: int) -> None:
    """Of many points three outputs take a backward pass of their own."""

    def wiring(m: Any, x: Tensor) -> Tensor:
        beside = m.fc2(x)
        return torch.cat([beside, m.head(NothingForZeros.apply(m.fc1(x))), beside[:, :1]], 1)

    model, inputs = parts.Wired(wiring), torch.randn(points, 4).double()
    model.fc1, model.fc2, model.head = nn.Linear(4, 50), nn.Linear(4, 6), nn.Linear(50, 3)
    passes = Passes(Model(model.double()), [(inputs, None)], "layerwise", PLENTY)
    J, V = dense_jacobian(model, inputs[:3]), columns(len(passes.model.theta), 3)
    for _ in range(2):
        assert agree(push(passes, V)[: len(J)], J @ V)
    assert passes.plan.in_use == {"layerwise": 1}


def test_wide_blocks_are_multiplied_some_vectors_at_a_time() -> None:
    """A vector's change of each of the outputs takes 2 MB: 20 vectors take more than is multiplied at once."""
    layers = nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 64), nn.Softmax(1)
    passes = kept(nn.Sequential(*layers).double(), torch.randn(4000, 3).double())
    V, U = columns(len(passes.model.theta), 20), columns(4000 * 64, 20)
    pushed, pulled = push(passes, V), pull(passes, U)
    for k in (0, 19):
        assert agree(pushed[:, k], push(passes, V[:, k : k + 1])[:, 0], 1e-13)
        assert agree(pulled[:, k], pull(passes, U[:, k : k + 1])[:, 0], 1e-13)


def kept(model: nn.Module, inputs: Tensor, parameters: Any = None) -> Passes:
    """A walk over one batch whose layerwise engine is kept."""
    passes = Passes(Model(model.eval(), parameters), [(inputs, None)], "layerwise", PLENTY)
    push(passes, passes.model.theta.detach()[:, None])
    assert passes.plan.in_use == {"layerwise": 1}
    return passes


def kinds(passes: Passes) -> list[str]:
    """What is kept of each layer."""
    return [layer.what for layer in passes.plan.kept_layers]


KINDS = [nn.ReLU, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Tanh, nn.Sigmoid]
KINDS += [nn.LogSigmoid, nn.Hardtanh, nn.ReLU6, nn.Hardswish, nn.Hardsigmoid, nn.Identity, nn.Dropout]
FUNCTIONS = [(kind(), True) for kind in KINDS]
FUNCTIONS += [(nn.ReLU(inplace=True), True), (nn.Threshold(0.1, 0.2), True), (nn.Tanh(), False)]
FUNCTIONS += [(nn.Sequential(nn.Tanh(), nn.SiLU()), False)]


@pytest.mark.parametrize(("function", "bias"), FUNCTIONS, ids=str)
def test_a_layer_that_an_elementwise_function_separates_from_the_last_keeps_slopes(
    function: nn.Module, bias: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 5, bias), function, nn.Linear(5, 7, bias)).double()
    inputs = torch.randn(6, 4).double()
    passes = kept(model, inputs)
    assert kinds(passes) == ["a and slopes", "a"]
    require_products(passes, dense_jacobian(model, inputs))
    assert passes.kept_bytes == 8 * 6 * (4 + 5 + 5)


def of_a_sum(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.fc1(x))
    return m.head(torch.tanh(m.fc2(h)) + h)


def used_twice(m: Any, x: Tensor) -> Tensor:
    z = m.fc2(torch.tanh(m.fc1(x)))
    return m.head(torch.tanh(z) * z)


def over_a_softmax(m: Any, x: Tensor) -> Tensor:
    return m.head(m.fc2(torch.tanh(m.fc1(x))).softmax(-1))


def beside_the_last(m: Any, x: Tensor) -> Tensor:
    z = m.fc2(torch.tanh(m.fc1(x)))
    return m.head(torch.tanh(z)) + z[:, :3]


def at_positions(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.fc2(torch.tanh(m.fc1(x.unflatten(1, (1, -1))))))).flatten(1)


def of_an_exponential(m: Any, x: Tensor) -> Tensor:
    z = m.fc2(torch.tanh(m.fc1(x)))
    return m.head(torch.tanh(z).exp())


@pytest.mark.parametrize(
    "wiring", [of_a_sum, used_twice, over_a_softmax, beside_the_last, at_positions, of_an_exponential]
)
def test_other_layers_before_the_last_keep_their_sensitivities(wiring: Any) -> None:
    model, inputs = parts.Wired(wiring).double(), torch.randn(6, 4).double()
    passes = kept(model, inputs)
    assert "a and slopes" not in kinds(passes)
    require_products(passes, dense_jacobian(model, inputs))


def test_slopes_need_the_weight_of_the_last_layer_as_a_parameter() -> None:
    model, inputs = ZOO["inplace_relu"].build()
    for parameters, slopes in ((["0.*"], False), (["0.*", "2.bias"], False), (["0.weight", "2.weight"], True)):
        passes = kept(model, inputs, parameters)
        names = passes.model.selection.names
        J = dense_jacobian(model, inputs).split([p.numel() for p in model.parameters()], 1)
        J = torch.cat([part for (name, _), part in zip(model.named_parameters(), J) if name in names], 1)
        assert ("a and slopes" in kinds(passes)) == slopes
        require_products(passes, J)


def large_network(far: float = torch.inf) -> tuple[nn.Module, list[int]]:
    """A network whose pass makes 1 MB a point, and the numbers of points of its passes; it doubles `far` outputs."""
    seen: list[int] = []

    def wiring(m: Any, x: Tensor) -> Tensor:
        seen.append(len(x))
        h = nn.functional.adaptive_avg_pool1d(torch.tanh(m.fc1(x)), 8)
        f, beyond = m.head(h), x[:, :1] > far
        return torch.where(beyond, 2 * f, f) if bool(beyond.any()) else f

    model = parts.Wired(wiring).eval()
    model.fc1, model.head = nn.Linear(4, 2**16), nn.Linear(8, 3)
    return model.double(), seen


def test_a_last_layer_is_built_from_passes_over_some_points() -> None:
    (model, seen), x = large_network(), torch.randn(70, 4).double()
    first = Passes(Model(model, "head.*"), [(x, None)], "auto", PLENTY)
    outputs, V, U = first.model(first.model.values, x).detach(), columns(27, 3), columns(210, 3)
    h = nn.functional.adaptive_avg_pool1d(torch.tanh(model.fc1(x)), 8).detach()
    eye = torch.eye(3).double()
    J = torch.cat([torch.einsum("nq,co->ncoq", h, eye).flatten(2), eye.expand(70, 3, 3)], 2).flatten(0, 1)
    assert agree(push(first, V), J @ V)
    passes = Passes(first.model, [(x, None)], "auto", PLENTY, first.engines)  # whose layers have been checked
    seen.clear()
    assert agree(push(passes, V), J @ V) and seen == [24, 24, 22]
    assert agree(pull(passes, U), J.mT @ U) and seen == [24, 24, 22]
    (built,) = passes.kept_engines
    assert built.kind == "layerwise" and built.nbytes == 8 * 70 * 8
    assert agree(built.outputs, outputs, 1e-13)


def test_a_layer_that_is_not_the_last_for_all_points_is_in_one_pass() -> None:
    (model, seen), x = large_network(far=5.0), torch.randn(70, 4).double().clamp(-4, 4)
    x[60] = 6.0
    passes = Passes(Model(model, "head.*"), [(x, None)], "auto", PLENTY)
    far = torch.where(x[:, :1] > 5, 2.0, 1.0).double()
    biases = torch.tensor([0.0] * 24 + [1.0] * 3).double().unsqueeze(1)
    assert agree(push(passes, biases), far.repeat_interleave(3, 0))
    assert seen[-1] == 70


def test_a_norm_whose_result_is_a_view_keeps_its_rule_under_an_activation_in_place() -> None:
    """As in U-Nets: autograd writes into the view, and the layer's own output leaves the graph."""
    layers = [nn.Conv2d(1, 3, 3), nn.InstanceNorm2d(3, affine=True), nn.LeakyReLU(0.1, inplace=True), nn.Flatten()]
    model, x = nn.Sequential(*layers, nn.Linear(48, 2)).double(), torch.randn(4, 1, 6, 6, dtype=torch.float64)
    assert model[:2](x)._is_view()
    passes = Passes(Model(model), batches(x, (4,)), engine="layerwise", memory_budget=PLENTY)
    J = dense_jacobian(model, x)
    assert agree(squared_columns(passes), J.square().sum(0))
    require_products(passes, J)
    assert not passes.plan.others
