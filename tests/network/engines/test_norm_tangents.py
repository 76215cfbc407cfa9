"""Tangents of norms by their kernels: those of forward mode, in fewer steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from curvops.network.engines import norm_tangents
from curvops.network.engines.autodiff import record_replay
from curvops.network.engines.norm_tangents import NormTangents
from curvops.network.model.model import Model
from tests.network.products import agree

NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "group": (lambda: nn.GroupNorm(2, 4), (3, 4, 5, 6)),
    "group_1d": (lambda: nn.GroupNorm(4, 4), (3, 4, 5)),
    "group_of_vectors": (lambda: nn.GroupNorm(2, 4), (3, 4)),
    "group_without_parameters": (lambda: nn.GroupNorm(2, 4, affine=False), (3, 4, 5)),
    "layer": (lambda: nn.LayerNorm(6), (3, 6)),
    "layer_positions": (lambda: nn.LayerNorm(6), (3, 5, 6)),
    "layer_two": (lambda: nn.LayerNorm((5, 6)), (3, 2, 5, 6)),
    "layer_without_bias": (lambda: nn.LayerNorm(6, bias=False), (3, 6)),
    "layer_without_parameters": (lambda: nn.LayerNorm(6, elementwise_affine=False), (3, 5, 6)),
}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the kernels served, call by call."""
    found, run = list[bool](), norm_tangents._dual

    def noted(*args: object) -> Tensor | None:
        dual = run(*args)  # type: ignore[arg-type]
        found.append(dual is not None)
        return dual

    monkeypatch.setattr(norm_tangents, "_dual", noted)
    return found


def build(name: str) -> tuple[nn.Module, Tensor]:
    make, shape = NORMS[name]
    layer = make().double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer, torch.randn(shape, dtype=torch.float64) + 0.5


def along(layer: nn.Module, x: Tensor | None, tangents: dict[str, Tensor], inside: bool) -> tuple[Tensor, Tensor]:
    """The output and its tangent; x has one if it is named among the tangents."""
    assert x is not None
    with torch.no_grad(), forward_ad.dual_level():
        values = {name: value.detach() for name, value in layer.named_parameters()}
        duals = {
            name: forward_ad.make_dual(value, tangents[name]) for name, value in values.items() if name in tangents
        }
        given = forward_ad.make_dual(x, tangents["input"]) if "input" in tangents else x
        call = lambda: torch.func.functional_call(layer, {**values, **duals}, (given,))  # noqa: E731
        if inside:
            with NormTangents():
                return forward_ad.unpack_dual(call())
        return forward_ad.unpack_dual(call())


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("moving", [("input", "weight", "bias"), ("input",), ("input", "weight"), ("input", "bias")])
def test_tangents_are_those_of_forward_mode(name: str, moving: tuple[str, ...], taken: list[bool]) -> None:
    layer, x = build(name)
    shapes = {"input": x.shape, **{key: value.shape for key, value in layer.named_parameters()}}
    tangents = {key: torch.randn(shape).double() for key, shape in shapes.items() if key in moving}
    expected, found = along(layer, x, tangents, False), along(layer, x, tangents, True)
    assert taken == [True]
    assert agree(found[0], expected[0], 1e-13) and agree(found[1], expected[1], 1e-12)


@pytest.mark.parametrize("name", ["group", "layer_positions"])
def test_what_the_kernels_do_not_serve_is_left_to_torch(name: str, taken: list[bool]) -> None:
    layer, x = build(name)
    tangents = {key: torch.randn_like(value) for key, value in layer.named_parameters()}
    strided = x.transpose(0, -1).contiguous().transpose(0, -1)
    for given, further in ((x, {}), (strided, {"input": torch.randn_like(strided)})):
        moving = tangents | further
        expected, found = along(layer, given, moving, False), along(layer, given, moving, True)
        assert agree(found[0], expected[0], 1e-13) and agree(found[1], expected[1], 1e-12)
    assert taken == [False, False]


@pytest.mark.parametrize(("norm", "steps"), [(nn.GroupNorm(2, 4), 6), (nn.LayerNorm(4), 4)])
def test_a_replay_takes_few_steps_for_a_norm(norm: nn.Module, steps: int) -> None:
    """A copy of the tangent, two norms and a sum; a group norm copies the tangents of its parameters, too."""
    model = nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3).double()
    network = Model(model)
    replay = record_replay(network, x, network.selection.names)
    without = Model(nn.Sequential(model[0], model[2], model[3]))
    other = record_replay(without, x, without.selection.names)
    assert replay is not None and other is not None
    further = [str(step.run) for step in replay._steps]
    for step in other._steps:
        further.remove(str(step.run))
    assert len([run for run in further if "view" not in run]) == steps
