"""Passes leave the user's random state and tensors as they are, whatever the model does."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import curvops as co
from curvops.network import own_randomness
from tests.network.definitions import TIGHT, normal
from tests.zoo_modules import Wired

X, Y = normal(7, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0])
CPU = torch.device("cpu")
WRITES = ["data", "view", "setitem", "function"]


def walk(lin: co.operators.Linearization, x: Tensor) -> Tensor:
    """One of each kind of pass."""
    v = normal(lin.num_parameters).to(lin.theta.device)
    lin.predict(x)
    lin.log_likelihood()
    lin.gradient()
    _ = lin.jacobian(x) @ v
    co.KFAC(lin).to_dense()
    co.DiagonalGGN(lin).diagonal()
    _ = co.Hessian(lin) @ v
    return co.GGN(lin) @ v


@pytest.mark.parametrize(
    ("source", "engine"), [("memory", "streamed"), ("memory", "autodiff"), ("memory", "layerwise"), ("loader", "auto")]
)
def test_a_model_that_draws_leaves_the_state_alone(source: str, engine: Any) -> None:
    model = Wired(lambda m, x: m.head(x) + 0 * torch.rand(3).to(x)).double().eval()
    data = (X, Y) if source == "memory" else DataLoader(TensorDataset(X, Y), batch_size=4)
    state = torch.get_rng_state()
    walk(co.linearize(model, data, "classification", "head.*", engine=engine), X)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("write", "engine"),
    [*(("mul_", engine) for engine in ("streamed", "autodiff", "layerwise")), *((way, "auto") for way in WRITES)],
)
def test_a_model_that_writes_into_its_inputs(write: str, engine: Any) -> None:
    def wiring(m: Any, x: Tensor) -> Tensor:
        if write == "mul_":
            x.mul_(2)
        elif write == "data":
            x.data.mul_(2)
        elif write == "view":
            x.view(-1)[:] *= 2
        else:
            x[:] = 2 * x
        return m.head(x)

    x, clean = X.clone(), Wired(lambda m, x: m.head(2 * x)).double()
    model: Any = Wired(wiring).double()
    model.load_state_dict(clean.state_dict())
    if write == "function":
        head = {name: p.detach() for name, p in model.head.named_parameters()}
        model = (lambda p, x: x.mul_(2) @ p["weight"].mT + p["bias"], head)
    product = walk(
        co.linearize(model, (x, Y), "classification", None if write == "function" else "head.*", engine=engine), x
    )
    assert torch.equal(x, X)
    torch.testing.assert_close(product, walk(co.linearize(clean, (X, Y), "classification", "head.*"), X), **TIGHT)


def test_the_state_comes_back_after_an_error_and_after_threads() -> None:
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), own_randomness(CPU):
        torch.rand(1)
        _ = 1 / 0
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with own_randomness(CPU):
            inside.set()
            leave.wait(10)
            torch.rand(1)

    thread = threading.Thread(target=other)
    with own_randomness(CPU):
        thread.start()
        inside.wait(10)
    leave.set()
    thread.join()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.gpu
def test_on_a_device() -> None:
    model = Wired(lambda m, x: m.head(x) + 0 * torch.rand(3, device=x.device).to(x)).double().cuda().eval()
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    walk(co.linearize(model, (X.cuda(), Y.cuda()), "classification", "head.*"), X.cuda())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(), states[1])
