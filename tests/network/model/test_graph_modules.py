"""Modules whose forward is not written in their class: graphs of torch.fx, exported programs and TorchScript."""

import copy
import functools
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import curvops as co
from tests.network.products import require_curvature, softmax_hessian
from tests.zoo import dense_jacobian

ENGINES = ["autodiff", "layerwise"]
"""The first product by "autodiff" streams, as all those by "streamed", which only TorchScript may run otherwise."""
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double()
IMAGES = torch.randn(6, 2, 6, 6, generator=torch.Generator().manual_seed(0)).double()
Y = torch.arange(6) % 3


class Own(nn.Module):
    """Has a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.fc = nn.Parameter(torch.randn(4, 3)), nn.Linear(4, 3)
        self.register_buffer("offset", torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.tanh(x @ self.weight + self.offset) + self.fc(x).sin()
        return found


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))


def cnn() -> nn.Module:
    convolution = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh())
    return nn.Sequential(convolution, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))


def features(model: nn.Module) -> fx.GraphModule:
    """The module up to its second-last operation, as libraries extract features."""
    graph = fx.Tracer().trace(model)
    *_, before, last, output = graph.nodes
    graph.erase_node(output)
    graph.erase_node(last)
    graph.output(before)
    return fx.GraphModule(model, graph)


def written_node_by_node(model: Any) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(torch.matmul, (x, graph.get_attr("weight")))
    inner = graph.call_function(operator.add, (product, graph.get_attr("offset")))
    outer = graph.call_method("sin", (graph.call_module("fc", (x,)),))
    graph.output(graph.call_function(operator.add, (graph.call_method("tanh", (inner,)), outer)))
    return fx.GraphModule(model, graph)


def exported(model: nn.Module, x: Tensor, size: Any = torch.export.Dim.AUTO) -> torch.export.ExportedProgram:
    return torch.export.export(model, (x,), dynamic_shapes=({0: size},), strict=False)


Make = Callable[[nn.Module, Tensor], nn.Module]
MAKES: dict[str, tuple[Callable[[], nn.Module], Make]] = {
    "traced": (mlp, lambda model, x: fx.symbolic_trace(model)),
    "traced with own parameters": (Own, lambda model, x: fx.symbolic_trace(model)),
    "written node by node": (Own, lambda model, x: written_node_by_node(model)),
    "features": (mlp, lambda model, x: features(model)),
    "inside a module": (mlp, lambda model, x: nn.Sequential(fx.symbolic_trace(model), nn.Tanh())),
    "inside a graph": (mlp, lambda model, x: fx.symbolic_trace(nn.Sequential(fx.symbolic_trace(model), nn.Tanh()))),
    "exported": (mlp, lambda model, x: exported(model, x).module()),
    "exported with a name": (mlp, lambda model, x: exported(model, x, torch.export.Dim("batch", min=1)).module()),
    "exported convolution": (cnn, lambda model, x: exported(model, x).module()),
    "exported with own parameters": (Own, lambda model, x: exported(model, x).module()),
    "exported and unflattened": (mlp, lambda model, x: torch.export.unflatten(exported(model, x))),
    "scripted": (Own, lambda model, x: torch.jit.script(model)),
    "traced by TorchScript": (mlp, lambda model, x: torch.jit.trace(model, x)),
    "a scripted part": (mlp, lambda model, x: nn.Sequential(torch.jit.script(model), nn.Linear(3, 3).double())),
}
CHANGED = {"features", "inside a module", "inside a graph", "a scripted part"}
"""Those that compute something else than the plain module."""


@functools.cache
def build(what: str) -> tuple[nn.Module, Tensor]:
    """The module, and its inputs. Do not write into it."""
    plain, make = MAKES[what]
    torch.manual_seed(0)
    x = IMAGES if plain is cnn else X
    return make(plain().double().eval(), x), x


def labels(num_outputs: int) -> Tensor:
    return torch.arange(6) % num_outputs


@pytest.mark.parametrize("what", MAKES)
def test_products_and_predictions_are_those_of_autograd(what: str) -> None:
    """Each failed. TorchScript may run otherwise from the third call on."""
    model, x = build(what)
    outputs, J = model(x).detach(), dense_jacobian(model, x)
    data = x, labels(outputs.shape[1])
    scripted = "script" in what.lower()
    for engine in ["streamed", *ENGINES] if scripted else ENGINES:
        lin = co.linearize(model, data, "classification", engine=engine)
        require_curvature(lin, J, softmax_hessian(outputs), times=4 if scripted else 2)
        torch.testing.assert_close(lin.predict(x), outputs, rtol=1e-10, atol=1e-10)
        assert dict(model.named_parameters()).keys() == lin.unflatten(lin.theta).keys()


@pytest.mark.parametrize("what", sorted(MAKES.keys() - CHANGED))
def test_hessians_and_kfac_are_those_of_the_plain_module(what: str) -> None:
    """KFAC is the plain module's where the layers are modules."""
    model, x = build(what)
    torch.manual_seed(0)
    plain = MAKES[what][0]().double().eval()
    products = []
    for each in (model, plain):
        lin = co.linearize(each, (x, Y), "classification")
        v = torch.cat([torch.linspace(-1, 1, b.numel()).double() for b in lin.unflatten(lin.theta).values()])
        products.append(lin.unflatten(co.Hessian(lin) @ v))
        if what == "traced":
            products[-1] |= {f"KFAC {name}": part for name, part in lin.unflatten(co.KFAC(lin) @ v).items()}
            post = co.laplace(lin, co.KFAC, prior_precision=1.0)
            products[-1]["variance"] = post.predict(x).variance
    assert products[0].keys() == products[1].keys()
    for name, found in products[0].items():
        torch.testing.assert_close(found, products[1][name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda lin: pickle.loads(pickle.dumps(lin))], ids=["copy", "pickle"])
@pytest.mark.parametrize("what", ["written node by node", "inside a graph"])
def test_copies_and_later_changes(what: str, copied: Callable[[Any], Any]) -> None:
    """A graph that is edited and compiled again changes its class, which only the user's module has."""
    model, x = build.__wrapped__(what)
    lin = co.linearize(model, (x, Y), "classification")
    v = torch.linspace(-1, 1, lin.num_parameters).double()
    expected = co.GGN(lin) @ v
    other = copied(lin)
    for part in model.modules():
        if isinstance(part, fx.GraphModule):
            node = next(iter(part.graph.nodes))
            with part.graph.inserting_after(node):
                node.replace_all_uses_with(doubled := part.graph.call_function(operator.mul, (node, 2.0)))
            doubled.args = node, 2.0
            part.recompile()
    assert not torch.allclose(model(x), lin.predict(x))
    for each in (lin, other):
        torch.testing.assert_close(co.GGN(each) @ v, expected, rtol=1e-10, atol=1e-10)


def test_torchscript_is_left_as_it_was() -> None:
    model, x = build.__wrapped__("scripted")
    held = {name: id(tensor) for name, tensor in model.named_parameters()}
    lin = co.linearize(model, (x, Y), "classification")
    v = torch.linspace(-1, 1, lin.num_parameters).double()
    expected, outputs = co.GGN(lin) @ v, model(x)
    assert {name: id(tensor) for name, tensor in model.named_parameters()} == held
    torch.testing.assert_close(model(x), outputs, rtol=0, atol=0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
    torch.testing.assert_close(co.GGN(lin) @ v, expected, rtol=1e-10, atol=1e-10)
