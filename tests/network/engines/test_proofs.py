"""What was proven of one network serves another of the same structure, and no other."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from curvops.network.engines import engine as engines
from curvops.network.engines import proofs


class Net(nn.Module):
    """Two layers with a branch on a weight's sign, and attributes that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self._modules.update(self.of_width(4))
        self.gate = nn.Parameter(torch.ones(1))
        self.scale, self.options, self.act = 1.0, {"depth": 1}, torch.tanh

    @staticmethod
    def of_width(width: int) -> dict[str, nn.Module]:
        return {"first": nn.Linear(3, width).double(), "head": nn.Linear(width, 2).double()}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.first(x)) * self.scale
        if float(self.gate.detach()) < 0:  # a weight used behind its layer's back
            hidden = hidden + x @ self.first.weight.mT
        return self.head(hidden) * self.gate


class Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sigmoid()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y * (1 - y)


def other_forward(self: Net, x: Tensor) -> Tensor:
    return self.head(self.first(x).sin()) * self.gate


class Other(Net):
    forward = other_forward


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often routes were looked for."""
    found, count = engines.find_routes, [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return found(*args, **kwargs)

    monkeypatch.setattr(engines, "find_routes", counted)
    return count


def data(columns: int = 3, points: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(points, columns).double(), torch.randn(points, 2).double()


def linearize(model: nn.Module, given: Any = None, **options: Any) -> co.operators.Linearization:
    return co.linearize(model, given or data(), co.likelihoods.Gaussian(noise=1.0), **options)


def patched(model: Any) -> None:
    model.forward = lambda x: model.head(model.first(x).sin()) * model.gate


def set_to(path: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model, path, value)


def negative(model: Any) -> None:
    with torch.no_grad():
        model.gate.neg_()


# Each way in which a model may change between two calls
CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda m: m.first.register_forward_hook(lambda *_: None),
    "a hook before": lambda m: m.head.register_forward_pre_hook(lambda *_: None),
    "a backward hook": lambda m: m.head.register_full_backward_hook(lambda *_: None),
    "its forward": patched,
    "its class": set_to("__class__", Other),
    "an attribute": set_to("scale", 2.0),
    "a mapping in place": lambda m: m.options.update(depth=2),
    "a function": set_to("act", torch.sin),
    "a function of one's own": set_to("act", Sigmoid.apply),
    "a mode": lambda m: m.train(),
    "a layer": lambda m: setattr(m, "first", nn.Sequential(nn.Linear(3, 4).double())),
    "a layer's width": lambda m: m.__dict__["_modules"].update(Net.of_width(5)),
    "a layer's bias": lambda m: setattr(m, "first", nn.Linear(3, 4, bias=False).double()),
    "a parametrisation": lambda m: nn.utils.parametrizations.orthogonal(m.first),
    "a frozen tensor": lambda m: m.first.weight.requires_grad_(False),
    "a branch on values": negative,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed_is_proven_anew(change: str, proven: list[int]) -> None:
    model = Net().double().eval()
    linearize(model)
    linearize(model)
    assert proven[0] == 1
    CHANGES[change](model)
    given = data()
    lin = linearize(model, given)
    assert proven[0] > 1
    proofs._proofs.clear()
    anew, v = linearize(model, given), torch.randn(lin.num_parameters).double()
    torch.testing.assert_close(co.GGN(lin) @ v, co.GGN(anew) @ v, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(co.DiagonalGGN(lin).entries, co.GGN(anew).to_dense().diagonal(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("engine", ["autodiff", "layerwise", "streamed"])
def test_other_options_and_inputs_are_proven_anew(engine: Any, proven: list[int]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    linearize(model)
    for options in ({"engine": engine}, {"parameters": "2.*"}, {"given": data(points=1)}):
        before = proven[0]
        linearize(model, **options)  # type: ignore[arg-type]
        assert proven[0] == before + 1
    linearize(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))  # in single precision
    assert proven[0] == before + 2


def test_networks_of_one_structure_share_a_proof_and_are_not_kept(proven: list[int]) -> None:
    """Of other weights, of other data, and another object."""
    model = Net().double().eval()
    linearize(model)
    with torch.no_grad():
        model.first.weight.mul_(2)
    linearize(model, data(points=9))
    fresh = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    linearize(fresh)
    linearize(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double())
    linearize(copy.deepcopy(model))
    assert proven[0] == 2
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_what_failed_is_not_shared(monkeypatch: pytest.MonkeyPatch, proven: list[int]) -> None:
    """A layer rejected on a batch: the next linearisation begins as the first did."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    lin = linearize(model)
    lin.passes.engines._reject(["0.weight"], "tried")
    assert lin.plan.others == {"0.weight": "tried"}
    assert linearize(model).plan.others == {} and proven[0] == 2


def test_a_hook_put_on_a_layer_later_changes_no_result() -> None:
    """It is put on the user's module, and rows of the layer used to be left out."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    for engine in ("auto", "layerwise"):
        lin, v = linearize(model, engine=engine), torch.randn(26).double()
        dense = co.GGN(lin).to_dense()
        handle = model[0].register_forward_hook(lambda *_: None)
        fresh = lin.jacobian(torch.randn(4, 3).double()).formed()
        assert fresh.abs().sum(1).all()
        torch.testing.assert_close(co.DiagonalGGN(lin).entries, dense.diagonal(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(co.GGN(lin) @ v, dense @ v, rtol=1e-10, atol=1e-10)
        handle.remove()
