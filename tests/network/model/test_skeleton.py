"""What is done to a module after it was linearised changes nothing, by any engine, and the module is left as it was."""

import copy
import itertools
import threading
from collections.abc import Callable
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from tests.network.products import require_curvature, softmax_hessian
from tests.threads import run_in_threads
from tests.zoo import dense_jacobian


class Settings(nn.Module):
    """Reads flags, numbers, lists, mappings, tensors, configurations and the order of its parts; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.Dropout(0.0)
        self.blocks, self.head = nn.ModuleList([nn.Tanh(), nn.Linear(20, 6)]), nn.Linear(6, 2)
        self.scale, self.order, self.factors, self.offset = 0.5, [0, 1], {"head": 2.0}, torch.ones(2).double()
        self.config, self.calls, self.activation = SimpleNamespace(power=2, widths=[1.0, 2.0]), 0, torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.drop(self.norm(self.conv(x)) * self.scale).flatten(1)
        for i in self.order:
            hidden = self.blocks[i](hidden)
        hidden = self.activation(hidden).pow(self.config.power) * self.config.widths[1]
        found: Tensor = self.head(hidden) * self.factors["head"] + self.offset
        return found


CHANGES: dict[str, Callable[[Any], Any]] = {
    "train mode": lambda m: m.train(),
    "a number": lambda m: setattr(m, "scale", 3.0),
    "a list": lambda m: m.order.reverse(),
    "a tensor": lambda m: m.offset.add_(1),
    "a configuration": lambda m: m.config.widths.__setitem__(1, 9.0),
    "a function": lambda m: setattr(m, "activation", torch.sin),
    "statistics": lambda m: m.norm.running_mean.add_(1),
    "a part of a list": lambda m: m.blocks.__setitem__(0, nn.Sigmoid()),
    "padding": lambda m: setattr(m.conv, "stride", (2,)),
    "a hook": lambda m: m.head.register_forward_hook(lambda module, args, output: output * 2),
    "its forward": lambda m: setattr(m, "forward", lambda x: m.head(x[:, 0])),
}
X, Y = torch.randn(6, 2, 6, generator=torch.Generator().manual_seed(0)).double(), torch.arange(6) % 2


def network() -> Settings:
    torch.manual_seed(0)
    return Settings().double().eval()


def answers(lin: Any) -> dict[str, Tensor]:
    """By products, by rows, at other points, and from a walk that keeps nothing of the first."""
    v = torch.linspace(-1, 1, lin.num_parameters).double()
    return {
        "outputs": lin.predict(X[:3]),
        "GGN": co.GGN(lin) @ v,
        "diagonal": co.DiagonalGGN(lin).entries,
        "J": lin.jacobian(X[:2]) @ v,
        "Hessian": co.Hessian(lin) @ v,
        "gradient": lin.gradient(),
    }


def test_no_later_change_reaches_a_linearisation() -> None:
    """`model.train()` took the normalisation from J, silently; the other settings were read at each call."""
    engines: tuple[Any, ...] = ("streamed", "layerwise")
    expected = {engine: answers(co.linearize(network(), (X, Y), "classification", engine=engine)) for engine in engines}
    for (change, do), engine in zip(CHANGES.items(), itertools.cycle(engines)):
        model = network()
        lin = co.linearize(model, (X, Y), "classification", engine=engine)
        do(model)
        for name, value in answers(lin).items():
            assert torch.allclose(value, expected[engine][name], rtol=1e-10, atol=1e-12), (change, name)


def test_the_users_module_is_not_touched() -> None:
    """Its calls are not counted, nor its flags, tensors or gradients changed, and two threads may use it meanwhile."""
    model = network()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = copy.deepcopy(model.state_dict())
    held = {name: id(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    lins = [co.linearize(model, (X, Y), "classification") for _ in range(2)]
    expected, seen = answers(lins[0]), []
    model.train()
    threads = [threading.Thread(target=lambda lin=lin: seen.append(answers(lin))) for lin in lins]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert all(part.training for part in model.modules())
        assert {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())} == held
    assert all(torch.allclose(found[name], expected[name], rtol=1e-10) for found in seen for name in expected)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad and bool((parameter.grad == 1).all()) for parameter in model.parameters())
    assert model.calls == 0 and len(seen) == 2


def test_linearisations_differentiate_in_threads_of_their_own() -> None:
    """How deep dual numbers are nested is known to the process alone: products of two linearisations met in it."""
    lins = [co.linearize(network(), (X, Y), "classification", engine="streamed") for _ in range(2)]
    v = torch.randn(lins[0].num_parameters).double()
    run_in_threads(*(lambda lin=lin: [co.GGN(lin) @ v for _ in range(20)] for lin in lins))  # type: ignore[misc]


def test_what_cannot_be_copied_is_shared_and_the_rest_is_as_it_was() -> None:
    """A lock cannot be copied; a number beside it can, and features that an earlier call left."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with self.attribute["lock"]:
                return super().forward(x) * self.attribute["factor"]

    model, x = Scaled(2, 2).double(), X[:, :, 0]
    model.attribute, model.features = {"lock": threading.Lock(), "factor": 2.0}, model.weight.exp()
    expected = model(x).detach()
    lin = co.linearize(model, (x, Y), "classification")
    model.attribute["factor"] = 3.0
    torch.testing.assert_close(lin.predict(x), expected, rtol=0, atol=0)


REFERRING: dict[str, Callable[[Any], object]] = {
    "bound": lambda m: setattr(m, "forward", MethodType(lambda self, x: 2 * self[2](self[1](self[0](x))), m)),
    "closed": lambda m: setattr(m, "forward", lambda x: 2 * m[2](m[1](m[0](x)))),
    "hook": lambda m: m[2].register_forward_hook(lambda module, args, output: output + m[0].weight.sum()),
}


@pytest.mark.parametrize("change", REFERRING.values(), ids=REFERRING)
def test_functions_that_refer_to_the_module_refer_to_its_snapshot(change: Callable[[Any], None]) -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    change(model)
    x = X[:, :, 0]
    lin = co.linearize(model, (x, Y), "classification")
    torch.testing.assert_close(lin.jacobian().to_dense(), dense_jacobian(model, x), rtol=1e-10, atol=1e-12)


class Held:
    """An object that is no module and holds a parameter."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


class Weight(nn.Module):
    """Holds a weight, which `keep` puts elsewhere as well and `read` finds there."""

    def __init__(self, keep: Callable[[Any], Any], read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.fc, self.weight = nn.Linear(2, 2), nn.Parameter(torch.randn(2, 2))
        self.kept, self.read = keep(self), read

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.tanh(self.fc(x)) @ self.read(self)
        return found


def _remember(module: Any) -> Tensor:
    if module.kept is None:
        module.kept = module.weight.exp()
    found: Tensor = module.kept
    return found


def _remember_inside(module: Any) -> Tensor:
    found: Tensor = module.kept.setdefault("of weights", {}).setdefault("exp", module.weight.exp())
    return found


def _append(module: Any) -> Tensor:
    module.kept.append(module.weight.exp())
    found: Tensor = module.kept[0]
    return found


KEPT: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Tensor]]] = {
    "a list": (lambda m: [m.fc.bias, m.weight], lambda m: m.kept[1]),
    "a mapping of lists": (lambda m: {"w": [{}, [m.weight]]}, lambda m: m.kept["w"][1][0]),
    "an attribute that is no parameter": (
        lambda m: object.__setattr__(m, "plain", m.weight),
        lambda m: vars(m)["plain"],
    ),
    "the parameter of a part": (lambda m: [m.fc.weight], lambda m: m.kept[0]),
    "a list of parts": (lambda m: [m.fc], lambda m: m.kept[0].weight),
    "a cache": (lambda m: None, _remember),
    "a cache in a mapping": (lambda m: {}, _remember_inside),
    "a list that grows": (lambda m: [], _append),
}


@pytest.mark.parametrize(
    ("kind", "engine"), [*((kind, "auto") for kind in KEPT), ("a list", "streamed"), ("a cache", "streamed")]
)
def test_parameters_and_what_is_computed_from_them_may_be_kept_in_the_module(kind: str, engine: str) -> None:
    """Libraries keep parameters in lists as well, which were refused, and cache in eval mode, which had no derivative.

    The first pass filled the cache from the snapshot, and all others found a constant there.
    """
    model, x = Weight(*KEPT[kind]).double(), X[:, :, 0]
    untouched = Weight(*KEPT[kind]).double()
    untouched.load_state_dict(model.state_dict())
    J = dense_jacobian(untouched, x)
    before = copy.copy(model.kept)
    lin = co.linearize(model, (x, Y), "classification", engine=engine)
    for each in (lin, copy.deepcopy(lin)):
        require_curvature(each, J, softmax_hessian(lin.predict(x)))
    assert not isinstance(before, list | dict) or len(model.kept) == len(before)


LAYER = nn.Linear(2, 2).double()


class Outside:
    @staticmethod
    def weight() -> Tensor:
        return LAYER.weight


PAST: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Tensor]]] = {
    "a global name": (lambda m: setattr(m, "fc", LAYER), lambda m: Outside.weight()),
    "a tuple": (lambda m: (m.fc.weight, 1), lambda m: m.kept[0]),
    "an object": (lambda m: Held(m.fc.weight), lambda m: m.kept.weight),
    "an argument of a partial function": (lambda m: partial(torch.mul, m.fc.weight), lambda m: m.kept(2.0)),
}


@pytest.mark.parametrize("kind", PAST)
def test_a_parameter_that_is_read_past_its_module_is_refused_by_name(kind: str) -> None:
    """J would lack what the outputs depend on by way of it."""
    with pytest.raises(ValueError, match=r"reads \['fc.weight'\] from elsewhere than .* self.layer.weight, .*cache"):
        co.linearize(Weight(*PAST[kind]).double(), (X[:, :, 0], Y), "classification")


@pytest.mark.parametrize("when", ["at first", "by a call"])
def test_what_was_computed_from_a_parameter_before_is_refused_where_it_is_read(when: str) -> None:
    """Such a parameter had a Jacobian of zero without a word. One that is left out is a constant anyway."""
    x = X[:, :, 0]
    if when == "at first":
        model = Weight(lambda m: None, lambda m: m.kept).double()
        model.kept = model.fc.weight.t()
    else:
        model = Weight(lambda m: None, _remember).double()
        model(x)
    with pytest.raises(ValueError, match=r"^the model's forward reads \['.*'\] from .*, a tensor computed"):
        co.linearize(model, (x, Y), "classification")
    bias = co.linearize(model, (x, Y), "classification", parameters=["fc.bias"])
    assert (co.GGN(bias).diagonal() > 0).all()
