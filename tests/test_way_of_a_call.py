"""How far everyday calls travel through the source: the files and functions of curvops that they enter.

CONTRIBUTING.md tells one of these calls as a story. If a change makes a call enter many more functions, see whether it
can be told more shortly before raising a number here.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import curvops as co

ROOT = str(Path(co.__file__).parent)


def entered(call: Callable[[], Any]) -> set[tuple[str, str, int]]:
    """Return (file, function) of everything in the package that a call enters."""
    places = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            places.add((frame.f_code.co_filename, frame.f_code.co_name, frame.f_code.co_firstlineno))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return places


def problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 3)
    return nn.Sequential(*layers).double(), torch.randn(200, 20).double(), torch.randint(0, 3, (200,))


def linearized() -> co.operators.Linearization:
    model, x, y = problem()
    return co.linearize(model, (x, y), "classification")


def product() -> Callable[[], Any]:
    G, v = co.GGN(linearized()), torch.randn(3753).double()
    return lambda: G @ v


def solve() -> Callable[[], Any]:
    P, b = co.GGN(linearized()).add_diagonal(1.0), torch.randn(3753).double()
    return lambda: P.solve(b)


def block_solve() -> Callable[[], Any]:
    P, B = co.GGN(linearized()).add_diagonal(1.0), torch.randn(3753, 2).double()
    return lambda: co.linalg.cg(P, B)


def trace() -> Callable[[], Any]:
    G = co.GGN(linearized())
    return lambda: co.linalg.trace(G, generator=torch.Generator().manual_seed(0))


def predict(curvature: Any) -> Callable[[], Any]:
    post, x = co.laplace(linearized(), curvature), problem()[1]
    return lambda: post.predict(x[:5]).variance


def sample() -> Callable[[], Any]:
    post = co.laplace(linearized(), co.KFAC)
    return lambda: post.sample(4, generator=torch.Generator().manual_seed(0))


def sgld() -> Callable[[], Any]:
    model, x, y = problem()
    density = co.sampling.log_posterior(model, "classification", prior_precision=1.0, data_size=len(x))
    sampler = co.sampling.sgld(density, step_size=1e-4)
    state = sampler.init(density.params, torch.Generator().manual_seed(0))
    return lambda: sampler.update(state, (x[:32], y[:32]))


def linearize() -> Callable[[], Any]:
    model, x, y = problem()
    return lambda: co.linearize(model, (x, y), "classification")


CALLS = {
    "linearize": (linearize, 27, 255),
    "G @ v": (product, 13, 50),
    "P.solve(b)": (solve, 25, 170),
    "co.linalg.cg(P, B)": (block_solve, 20, 136),
    "co.linalg.trace(G)": (trace, 32, 161),
    "post.predict(x).variance, GGN": (lambda: predict(co.GGN), 43, 288),
    "post.predict(x).variance, KFAC": (lambda: predict(co.KFAC), 38, 191),
    "post.sample(4), KFAC": (sample, 25, 92),
    "sgld.update": (sgld, 11, 40),
}
"""Each call with the files and functions that its third run enters."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_enters_few_files_and_functions(name: str) -> None:
    prepare, files, functions = CALLS[name]
    call = prepare()
    call()
    call()
    places = entered(call)
    assert len({file for file, *_ in places}) <= 1.2 * files
    assert len(places) <= 1.2 * functions
