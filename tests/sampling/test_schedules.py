"""Schedules, and what becomes of a state whose log posterior, schedule or data size is wrong."""

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
    ("value", "kind", "message"),
    [
        (lambda p, b: (p["x"].sum(), None), TypeError, "one number"),
        (lambda p, b: p["x"], TypeError, "mean over the batch"),
        (lambda p, b: 3.0, TypeError, "got 3.0"),
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


def test_what_a_sampler_has_not_cannot_be_replaced() -> None:
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
        assert not S.run(S.hmc(F, 0.1, data_size=1), leaf, steps=2).theta.is_inference()
    state, info = S.sgld(F, 0.1, data_size=1).update(state)
    assert not state.theta.requires_grad and not info.log_posterior.requires_grad and not state.theta.is_inference()
    tied: Tensor = ZERO.clone()
    shared = S.sgld(lambda p, b: F(p["a"], b) + F(p["b"], b), 0.1, data_size=1).init({"a": tied, "b": tied}, seeded(0))
    assert shared.theta.shape == (8,)
