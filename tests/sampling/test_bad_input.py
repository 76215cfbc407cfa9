"""What a tired user would write: each is right, or refused by name.

Tests `schedules.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import curvops as co
from tests.sampling.gaussians import curvature, log_density, seeded

S = co.sampling
F = log_density(curvature(4))
ZERO = torch.zeros(4, dtype=torch.float64)
pytestmark = pytest.mark.usefixtures("annotations_unchecked")


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: S.sgld(F, 0.1), ValueError, "data_size is missing"),
        (lambda: S.sgld(F, 0.1, data_size=0), ValueError, "data_size must be"),
        (lambda: S.sgld(F, 0.1, data_size=2.5), TypeError, "data_size must be"),
        (lambda: S.sgld(0.1, F, data_size=1), TypeError, "log_posterior must be a function"),
        (lambda: S.sgld(F, 0.0, data_size=1), ValueError, "step_size must be positive"),
        (lambda: S.sgld(F, -0.1, data_size=1), ValueError, "step_size"),
        (lambda: S.sgld(F, float("nan"), data_size=1), ValueError, "step_size"),
        (lambda: S.sgld(F, "0.1", data_size=1), TypeError, "step_size"),
        (lambda: S.sgld(F, True, data_size=1), TypeError, "step_size"),
        (
            lambda: S.sgld(F, 0.1, data_size=1, temperature=-1.0),
            ValueError,
            "temperature must be finite",
        ),
        (lambda: S.sgld(F, 0.1, data_size=1, temperature=None), TypeError, "temperature"),
        (lambda: S.sgld(F, 0.1, data_size=1, beta=-1), ValueError, "beta"),
        (lambda: S.sgnht(F, 0.1, data_size=1, temperature=0), ValueError, "temperature=0.*sghmc"),
        (lambda: S.lmc(F, 0.1, data_size=1, temperature=0), ValueError, "must be positive.*optimiser"),
        (lambda: S.pcn(F, 0.1, covariance=1.0, data_size=1, temperature=0), ValueError, "must be positive"),
        (lambda: S.sghmc(F, 0.1, data_size=1, alpha=0), ValueError, "alpha"),
        (lambda: S.sghmc(F, 0.1, data_size=1, momentum_first=1), TypeError, "momentum_first"),
        (lambda: S.baoa(F, 0.1, data_size=1, sigma=-1), ValueError, "sigma"),
        (lambda: S.hmc(F, 0.1, data_size=1, leapfrog_steps=0), ValueError, "leapfrog_steps"),
        (lambda: S.lmc(F, 0.1, data_size=1, refreshment=1.5), ValueError, r"\(0, 1\]"),
        (lambda: S.pcn(F, 0.1, data_size=1), ValueError, "covariance is missing"),
        (lambda: S.pcn(F, 1.1, covariance=1.0, data_size=1), ValueError, r"\(0, 1\]"),
        (lambda: S.pcn(F, 0.1, covariance=-1.0, data_size=1), ValueError, "covariance"),
        (lambda: S.pcn(F, 0.1, covariance=1.0, mean=float("nan"), data_size=1), ValueError, "mean"),
        (lambda: S.RobbinsMonro(0.1, gamma=0.5), ValueError, "gamma must lie in"),
        (lambda: S.RobbinsMonro(0.1, gamma=1.1), ValueError, "gamma must lie in"),
        (lambda: S.RobbinsMonro(-1.0), ValueError, "a must be"),
        (lambda: S.Cosine(0.1, 0), ValueError, "period"),
        (lambda: S.sgld(F, 0.1, data_size=1, preconditioner=torch.eye(4)), TypeError, "co.linalg.Dense"),
        (lambda: S.sgld(F, 0.1, data_size=1, preconditioner=-torch.ones(4)), ValueError, "positive semidefinite"),
        (
            lambda: S.sgld(F, 0.1, data_size=1, preconditioner=co.linalg.Dense(-torch.eye(4))),
            ValueError,
            "positive semi",
        ),
        (lambda: S.sgld(F, 0.1, data_size=1, preconditioner=co.KFAC), TypeError, "preconditioner"),
        (lambda: S.chains(F, 3), TypeError, "sampler of co.sampling"),
        (lambda: S.chains(S.sgld(F, 0.1, data_size=1), 0), ValueError, "k must be at least 1"),
        (lambda: S.chains(S.sgld(F, 0.1, data_size=1), 2.0), TypeError, "k must be a whole"),
        (lambda: S.chains(S.chains(S.sgld(F, 0.1, data_size=1), 2), 2), ValueError, "already"),
        (lambda: S.chains(S.sgld(F, 0.1, data_size=1), 2, vectorized=1), TypeError, "vectorized"),
        (lambda: S.optimizer(torch.optim.LBFGS, F), ValueError, "LBFGS"),
        (lambda: S.optimizer(torch.optim.SGD([torch.ones(1)], lr=1.0), F), TypeError, "class"),
        (lambda: S.optimizer(torch.optim.SGD, F, learning_rate=1.0), TypeError, "learning_rate"),
        (lambda: S.optimizer(F, torch.optim.SGD, lr=1.0), TypeError, "lr"),
        (lambda: S.optimizer(list, F), TypeError, "no torch.optim.Optimizer"),
    ],
)
def test_arguments_of_samplers(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize(
    ("params", "kind", "message"),
    [
        ({"x": torch.ones(2, dtype=torch.int64)}, TypeError, r"params\['x'\] is of torch.int64"),
        ({"x": torch.ones(2, dtype=torch.bool)}, TypeError, "torch.bool"),
        ({"x": torch.ones(2, dtype=torch.complex64)}, TypeError, "torch.complex64"),
        ({"x": [1.0, 2.0]}, TypeError, "is float"),
        ({}, ValueError, "no tensor"),
        ({"x": torch.tensor([1.0, float("nan")])}, ValueError, "NaN or Inf"),
        ({"x": torch.ones(2), "y": torch.ones(2, dtype=torch.float64)}, ValueError, "convert"),
        (torch.nn.Linear(2, 2), TypeError, r"dict\(model.named_parameters\(\)\)"),
    ],
)
def test_parameters(params: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        S.sgld(F, 0.1, data_size=1).init(params)


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (lambda p, b: (p["x"].sum(), None), TypeError, "returned a tuple"),
        (lambda p, b: p["x"], ValueError, "mean over the batch"),
        (lambda p, b: 3.0, TypeError, "real floating tensor"),
        (lambda p, b: p["x"].detach().sum(), ValueError, "no gradient in params"),
        (lambda p, b: p["x"].sum(), ValueError, r"does not depend on params\['y'\]"),
        (lambda p, b: (p["x"].sum() + p["y"].sum()) * float("nan"), ValueError, "at the initial params"),
        (lambda p, b: (p["x"].sum() + p["y"].sum()) / 0.0, ValueError, "at the initial params"),
    ],
)
@pytest.mark.parametrize("k", [None, 2])
def test_log_posteriors(value: Any, kind: type[Exception], message: str, k: int | None) -> None:
    for make in (S.sgld, S.lmc):
        sampler = make(value, 0.1, data_size=1)
        sampler = sampler if k is None else S.chains(sampler, k)
        state = sampler.init({"x": torch.ones(2), "y": torch.ones(3)}, seeded(0))
        before = state.clone()
        for inplace in (False, True):
            with pytest.raises(kind, match=message):
                sampler.update(state, inplace=inplace)
        assert torch.equal(before.theta, state.theta) and int(state.step) == 0


def test_states_and_flags_of_another_kind() -> None:
    sgld, baoa = S.sgld(F, 0.1, data_size=1), S.baoa(F, 0.1, data_size=1)
    state = sgld.init(ZERO, seeded(0))
    for wrong in (ZERO, {"x": ZERO}, baoa.init(ZERO), None):
        with pytest.raises(TypeError, match="state must come from this sampler's init"):
            sgld.update(wrong)
    with pytest.raises(ValueError, match="holds chains"):
        S.chains(sgld, 2).update(state)
    with pytest.raises(ValueError, match="holds chains"):
        sgld.update(S.chains(sgld, 2).init(ZERO))
    with pytest.raises(TypeError, match="inplace"):
        sgld.update(state, None, 1)
    with pytest.raises(TypeError, match="generator"):
        sgld.init(ZERO, 0)


def test_preconditioners_of_other_parameters() -> None:
    D = co.linalg.Dense(torch.eye(3, dtype=torch.float64), psd=True)
    with pytest.raises(ValueError, match=r"\(3, 3\); these params have 4 entries"):
        S.sgld(F, 0.1, data_size=1, preconditioner=D).init(ZERO)
    with pytest.raises(ValueError, match=r"convert it with \.to"):
        S.sgld(F, 0.1, data_size=1, preconditioner=torch.ones(4)).init(ZERO)
    model = torch.nn.Linear(2, 2)
    lin = co.linearize(model, (torch.randn(5, 2), torch.zeros(5, 2)), "regression")
    sampler = S.sgld(
        lambda p, b: -p["weight"].sum(), 0.1, data_size=1, preconditioner=co.KFAC(lin).add_diagonal(1.0).inverse()
    )
    with pytest.raises(ValueError, match="one order"):
        sampler.init({"bias": torch.zeros(2), "weight": torch.zeros(2, 2)})


def test_what_a_sampler_has_not_cannot_be_replaced() -> None:
    with pytest.raises(TypeError, match="covariance"):
        S.pcn(F, 0.1, covariance=1.0, data_size=1).with_preconditioner(torch.ones(4))
    adam = S.optimizer(torch.optim.SGD, F, lr=0.1)
    with pytest.raises(TypeError, match="temperature 0"):
        adam.with_preconditioner(torch.ones(4))
    state = adam.init(ZERO + 1)
    moved, _ = adam.with_step_size(0.2).update(state)
    direct, _ = S.optimizer(torch.optim.SGD, F, lr=0.2).update(state)
    assert torch.equal(moved.theta, direct.theta)


def test_schedules_that_leave_their_range() -> None:
    def negative(step: int) -> float:
        return 0.1 - step

    sampler = S.sgld(F, negative, data_size=1)
    state, _ = sampler.update(sampler.init(ZERO, seeded(0)))
    with pytest.raises(ValueError, match="step_size at step 1"):
        sampler.update(state)
    warm = S.sgld(F, 0.1, data_size=1, temperature=negative)
    with pytest.raises(ValueError, match="temperature at step 1"):
        warm.update(warm.update(warm.init(ZERO, seeded(0)))[0])
    with pytest.raises(ValueError, match="beta=1e"):
        hot = S.sgld(F, 0.1, data_size=1, beta=1e6)
        hot.update(hot.init(ZERO, seeded(0)))


def test_data_size_given_twice_must_agree() -> None:
    model = torch.nn.Linear(2, 1)
    f = S.log_posterior(model, "regression", data_size=10)
    assert S.sgld(f, 0.1).data_size == 10 and S.sgld(f, 0.1, data_size=10).data_size == 10
    with pytest.raises(ValueError, match="built for 10 points"):
        S.sgld(f, 0.1, data_size=11)


def test_schedules() -> None:
    decay = S.RobbinsMonro(2.0, b=3.0, gamma=0.6)
    assert decay(7) == pytest.approx(2 * 10**-0.6)
    cosine = S.Cosine(1.0, 4, last=0.2)
    assert [cosine(i) for i in (0, 2, 4)] == pytest.approx([1.0, 0.6, 1.0])
    assert cosine(3) > 0.2


def test_parameters_that_require_a_gradient_and_gradient_modes() -> None:
    leaf = ZERO.clone().requires_grad_()
    with torch.inference_mode():
        state = S.sgld(F, 0.1, data_size=1).init(leaf, seeded(0))
        state, _ = S.sgld(F, 0.1, data_size=1).update(state)
    state, info = S.sgld(F, 0.1, data_size=1).update(state)
    assert not state.theta.requires_grad and not info.log_posterior.requires_grad and not state.theta.is_inference()
    tied: Tensor = ZERO.clone()
    shared = S.sgld(lambda p, b: F(p["a"], b) + F(p["b"], b), 0.1, data_size=1).init({"a": tied, "b": tied}, seeded(0))
    assert shared.theta.shape == (8,)
