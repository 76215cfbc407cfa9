"""Compiled and parallel modules: their products are those of the plain module, and nothing is compiled for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from curvops.network import Model, Passes
from tests import zoo_modules as parts
from tests.network.products import WAYS, agree, columns, push, require_products
from tests.zoo import batches, dense_jacobian


def refuse(graph: Any, inputs: Any) -> Any:
    raise AssertionError("nothing is to be compiled")


def compiled(module: Any) -> Any:
    return torch.compile(module, backend=refuse)


def plain() -> nn.Module:
    return parts.Wired(lambda m, x: m.head(torch.tanh(m.fc2(torch.tanh(m.fc1(x)))))).double().eval()


def compiled_part() -> nn.Module:
    net = plain()
    net.fc2 = compiled(net.fc2)
    return net


def compiled_in_place() -> nn.Module:
    net = plain()
    net.compile(backend=refuse)
    net.fc1.compile(backend=refuse)
    return net


MAKES: dict[str, Callable[[], nn.Module]] = {
    "compiled": lambda: compiled(plain()),
    "compiled part": compiled_part,
    "compiled in place": compiled_in_place,
    "parallel": lambda: nn.DataParallel(plain()),
    "both": lambda: compiled(nn.DataParallel(plain())),
}


@pytest.mark.parametrize("way", ["recorded", "layerwise"])
@pytest.mark.parametrize("what", MAKES)
def test_products_are_those_of_the_plain_module(what: str, way: str) -> None:
    wrapped, net, x = MAKES[what](), plain(), torch.randn(5, 4, dtype=torch.float64)
    for mine, theirs in zip(net.parameters(), wrapped.parameters()):
        mine.data.copy_(theirs)
    J, passes = dense_jacobian(net, x), Passes(Model(wrapped), batches(x), **WAYS[way])
    require_products(passes, J)
    if way == "layerwise":
        assert not passes.plan.others
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(net.parameters(), wrapped.parameters()))


@pytest.mark.parametrize("what", ["compiled", "parallel", "both"])
def test_names_are_those_of_the_module_inside(what: str) -> None:
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    lin = co.linearize(MAKES[what](), (x, y), "classification", parameters="fc1.*")
    assert set(lin.unflatten(lin.theta)) == {"fc1.weight", "fc1.bias"}
    v = columns(lin.num_parameters, 1)
    assert (co.GGN(lin) @ v).shape == v.shape
    prefixed = next(name for name, _ in MAKES[what]().named_parameters())
    with pytest.raises(ValueError, match=r"names no parameter; the model has .*fc1\.weight"):
        co.linearize(MAKES[what](), (x, y), "classification", parameters=prefixed)


def test_a_compiled_function_runs_as_it_was_written() -> None:
    def function(params: Any, x: Tensor) -> Tensor:
        return torch.tanh(x @ params["a"])

    params, x = {"a": torch.randn(4, 3, dtype=torch.float64)}, torch.randn(5, 4, dtype=torch.float64)
    J = dense_jacobian((function, params), x)
    passes = Passes(Model((compiled(function), params)), batches(x))
    V = columns(12, 2)
    assert agree(push(passes, V), J @ V)


def test_a_wrapper_with_a_hook_is_not_taken_off() -> None:
    wrapped, x = nn.DataParallel(plain()), torch.randn(5, 4, dtype=torch.float64)
    wrapped.register_forward_hook(lambda module, args, output: output**2)
    J, passes = dense_jacobian(wrapped, x), Passes(Model(wrapped, "module.fc*"), batches(x))
    V = columns(passes.model.theta.numel(), 2)
    assert agree(push(passes, V), J[:, : len(V)] @ V)


def test_the_compilers_stance_is_restored() -> None:
    calls = []
    torch._dynamo.reset()  # of what other tests compiled, of which torch counts how much there may be

    def note(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        return graph.forward

    net, x = plain(), torch.randn(5, 4, dtype=torch.float64)
    net.fc1 = torch.compile(net.fc1, backend=note)
    passes = Passes(Model(net), batches(x))
    push(passes, columns(passes.model.theta.numel(), 1))
    assert calls == []
    net(x)
    assert len(calls) == 1
