"""Warnings show the line of the user's own code, at whatever depth of the library and of torch they arise.

Tests `errors.py`.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from curvops import sampling as S
from tests.ranks.processes import alone
from tests.sampling.readouts import Halting

ROOT = Path(__file__).parents[1]
X, LABELS = torch.linspace(-1, 1, 24).reshape(8, 3), torch.arange(8) % 2
MODEL = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def linearization() -> co.operators.Linearization:
    return co.linearize(MODEL, (X, LABELS), "classification")


def posterior() -> co.posterior.Laplace:
    return co.laplace(linearization(), co.GGN, prior_precision=1.0, check_mode=False)


def chain() -> Any:
    f = S.log_posterior(Halting(), "classification", data_size=8)
    return S.run(S.chains(S.sgld(f, 0.1), 2), f.params, [(X, LABELS)], steps=2)


def inert() -> Tensor:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight[1], model[0].bias[1] = 0.0, -9.0
    return co.select(co.linearize(model, (X, LABELS), "classification"), 4, "variance")


def fit() -> Any:
    f = S.log_posterior(MODEL, "classification", data_size=8)
    method = S.vi(f)
    state = S.run(method, f.params, [(X, LABELS)], steps=2).state
    MODEL.load_state_dict(state.params)
    return method.posterior(state, linearization())


def ill_conditioned(digits: int = 5, rtol: float | None = None) -> Tensor:
    Q = torch.linalg.qr(torch.randn(60, 60)).Q
    A = (Q * torch.logspace(0, -digits, 60)) @ Q.mT
    return co.linalg.solve((A + A.mT) / 2, torch.ones(60), method="cg", rtol=rtol)


def far_noise() -> co.operators.Linearization:
    return co.linearize(nn.Linear(3, 1), (X, 100 * torch.ones(8, 1)), co.likelihoods.Gaussian(1e-3))


CASES: dict[str, tuple[str, Callable[[], Any]]] = {
    "a softmax at the end": (
        "NotLogitsWarning",
        lambda: co.linearize(nn.Sequential(*MODEL, nn.Softmax(-1)), (X, LABELS), "classification"),
    ),
    "a loss that is linear in the outputs": (
        "NoCurvatureWarning",
        lambda: co.linearize(nn.Linear(3, 1), (X, torch.ones(8, 1) * 9), nn.L1Loss()),
    ),
    "no mode": ("ModeWarning", lambda: co.laplace(linearization(), co.GGN, prior_precision=1.0).log_evidence()),
    "a noise far off": ("NoiseWarning", lambda: co.laplace(far_noise(), co.KFAC, prior_precision=1.0)),
    "a few steps of maximize": ("MaxStepsWarning", lambda: co.evidence.maximize(posterior(), "layers", steps=1)),
    "a few steps of mackay": ("MaxStepsWarning", lambda: co.evidence.mackay(posterior(), steps=1)),
    "a rank that is too low": ("RankWarning", lambda: co.low_rank(torch.eye(50), 5, rtol=1e-3)),
    "float32": ("PrecisionWarning", ill_conditioned),
    "weights without curvature": ("InertWeightsWarning", inert),
    "a model that torch.vmap cannot run": ("NotVectorizedWarning", chain),
    "a fit that has not settled": ("UnsettledWarning", fit),
}


def shown() -> dict[str, set[str]]:
    """The files at which the warnings of each case's category are shown."""
    found = {}
    for name, (category, call) in CASES.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        found[name] = {each.filename for each in caught if each.category is getattr(co.errors, category)}
    return found


def test_warnings_point_at_the_line_of_the_user() -> None:
    """In another process: here the frames of the shape checks stand between the user and the library."""
    assert alone(shown) == {name: {__file__} for name in CASES}


@pytest.mark.parametrize("asked", [(), (3, 1e-6)])
def test_a_limit_of_the_precision_comes_with_the_residual_that_was_reached(asked: tuple[Any, ...]) -> None:
    with pytest.warns(co.errors.PrecisionWarning, match=r"largest true relative residual is \d\.\de-0\d, where rtol="):
        ill_conditioned(*asked)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ill_conditioned(3)  # half of the digits, and no tolerance that was missed


def test_every_warning_goes_through_one_function() -> None:
    files = [path for path in (ROOT / "curvops").rglob("*.py") if "warnings.warn(" in path.read_text(encoding="utf-8")]
    assert [path.name for path in files] == ["errors.py"]
