"""Repetitions have the bits of the function itself, and are refused wherever more than shapes decides what runs."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvops.network.engines import repetitions
from curvops.network.engines.norm_tangents import NormTangents
from curvops.network.engines.repetitions import LAYERS, PLAIN_RUNS, Repetitions, is_plain
from curvops.network.engines.replay import Recorder
from curvops.network.model.model import Model
from tests.zoo import ZOO


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *given: Tensor) -> Any:
        self.calls += 1
        return self.function(*given)


RECORDING = 2
"""The calls of a function while its operations are recorded and compared."""


def gradient(w: Tensor, x: Tensor) -> Tensor:
    leaf = w.detach().requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad((x @ leaf).tanh().square().sum(), leaf)
    return found


TIMES = PLAIN_RUNS + 4


def several(function: Callable[..., Any], times: int = TIMES, allowed: bool = True) -> tuple[int, bool]:
    """Calls of the function while it runs so many times at new numbers, and whether each result was its own."""
    counted, held, right = Counted(function), Repetitions(), True
    generator = torch.Generator().manual_seed(0)
    for _ in range(times):
        given = [torch.randn(3, 2, generator=generator), torch.randn(5, 3, generator=generator)]
        found = held.run("key", counted, given, lambda: allowed)
        right &= bool(torch.equal(found, function(*given)))
    return counted.calls, right


def test_a_repetition_has_the_bits_of_the_function_and_does_not_call_it() -> None:
    assert several(gradient) == (PLAIN_RUNS + RECORDING, True)
    assert several(gradient, allowed=False) == (TIMES, True)


def through_views(w: Tensor, x: Tensor) -> Tensor:
    copy = w.clone()
    (one,) = copy.flatten().split([6])
    one.view(3, 2).t().t().unsqueeze(0).squeeze(0).mul_(2)
    return copy + x[:3].t().t()[:, :2].expand(3, 2)


def test_views_of_one_memory_are_one_tensor() -> None:
    """What is written through a view that has gone shows in the tensor behind it."""
    assert several(through_views) == (PLAIN_RUNS + RECORDING, True)
    recorder, given = Recorder(), [torch.randn(3, 2), torch.randn(5, 3)]
    with recorder:
        for name, tensor in zip("wx", given):
            recorder.follow(name, tensor)
        replay = recorder.replay(through_views(*given))
    assert replay is not None
    names = {operation.overloadpacket.__name__ for operation in replay.operations}
    assert names == {"clone", "mul_", "slice", "add"}


def reads(w: Tensor, x: Tensor) -> Tensor:
    return gradient(w, x) * (2.0 if bool(x.sum() > 0) else 1.0)


def reads_beside_torch(w: Tensor, x: Tensor) -> Tensor:
    return gradient(w, x) * float(x.numpy().max())


def writes(w: Tensor, x: Tensor) -> Tensor:
    return gradient(w, x.add_(0.0))


def overlaps(w: Tensor, x: Tensor) -> Tensor:
    return gradient(w, x) + w.as_strided((2,), (1,))


@pytest.mark.parametrize("function", [reads, reads_beside_torch, writes, overlaps])
def test_what_python_reads_and_what_writes_into_arguments_is_not_repeated(function: Callable[..., Any]) -> None:
    calls, right = several(function)
    assert right and calls >= TIMES


def test_other_shapes_strides_keys_and_settings_have_runs_of_their_own() -> None:
    held, counted = Repetitions(), Counted(gradient)

    def run(w: Tensor, x: Tensor, key: str = "key") -> int:
        before = counted.calls
        assert torch.equal(held.run(key, counted, [w, x], lambda: True), gradient(w, x))
        return counted.calls - before

    w, x = torch.randn(3, 2), torch.randn(5, 3)
    for _ in range(PLAIN_RUNS + 1):
        run(w, x)
    assert run(w, x) == 0
    assert run(w, x[:4]) == run(w.T.contiguous().T, x) == run(w.double(), x.double()) == run(w, x, "other") == 1
    assert run(w, x) == 0
    with NormTangents():
        assert run(w, x) == 1
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert run(w, x) == 1
    held = pickle.loads(pickle.dumps(held))
    assert run(w, x) == 1


def test_one_tensor_in_two_places_may_be_two_later() -> None:
    held = Repetitions()
    for _ in range(PLAIN_RUNS + 1):
        x = torch.randn(4)
        held.run("key", torch.mul, [x, x], lambda: True)
    a, b = torch.randn(2, 4)
    assert torch.equal(held.run("key", torch.mul, [a, b], lambda: True), a * b)


def test_large_arguments_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repetitions, "LARGEST", 14)
    assert several(gradient) == (TIMES, True)


def test_only_torchs_own_layers_are_plain() -> None:
    class Own(nn.Linear):
        pass

    def plain(*layers: nn.Module) -> bool:
        return is_plain(Model(nn.Sequential(*layers, nn.Linear(3, 2))))

    assert plain(nn.Linear(3, 3), nn.Tanh(), nn.Sequential(nn.LayerNorm(3), nn.GELU()))
    assert not plain(Own(3, 3)) and not plain(nn.Dropout().eval())
    hooked, replaced = nn.Linear(3, 3), nn.Linear(3, 3)
    hooked.register_forward_hook(lambda *_: None)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    assert not plain(hooked) and not plain(replaced)
    assert not plain(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    assert not is_plain(Model((lambda params, x: x @ params["w"], {"w": torch.ones(2, 1)})))
    assert not is_plain(Model(ZOO["lstm"].build()[0]))


def test_layers_are_torchs() -> None:
    assert all(kind.__module__.startswith("torch.nn.modules.") for kind in LAYERS)


def test_sparse_tensors_are_not_repeated() -> None:
    held, w, x = Repetitions(), torch.randn(3, 2), torch.eye(3).to_sparse_csr()
    for _ in range(PLAIN_RUNS + 3):
        assert torch.equal(held.run("key", lambda w, x: x @ w, [w, x], lambda: True), w)
    assert not held._known
