"""Class probabilities as targets: torch's cross-entropy, whatever the options, and what follows from it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from curvops.network.likelihoods import Categorical
from tests.network.definitions import (
    TIGHT,
    autograd_hessians,
    class_outcomes,
    dense_fisher,
    enumerated_moment,
    normal,
    require_consistent_products,
    require_sampled_moment,
)

N, C = 7, 4
Y = normal(N, C, seed=1).softmax(-1)
LABELS = torch.tensor([0, 3, 1, 1, 2, 2, 0])
ONE_HOT = one_hot(LABELS, C).double()
WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.3], dtype=torch.float64)
W = torch.tensor([1.0, 0.0, 2.5, 1.0, 0.3, 4.0, 1.0], dtype=torch.float64)
OPTIONS = [
    {"weight": weight, "label_smoothing": smoothing}
    for weight, smoothing in itertools.product([None, WEIGHT], [0.0, 0.3])
]
EVERY = pytest.mark.parametrize("options", OPTIONS, ids=["plain", "smoothing", "weight", "weight, smoothing"])
WEIGHTS = pytest.mark.parametrize("w", [None, W], ids=["unweighted", "weighted"])


@EVERY
@pytest.mark.parametrize("y", [Y, ONE_HOT], ids=["soft", "one-hot"])
def test_value_and_gradient_are_torchs(options: dict, y: Tensor) -> None:
    f, likelihood = normal(N, C, scale=2.0), Categorical(**options)

    def loss(g: Tensor) -> Tensor:
        return cross_entropy(g, y, reduction="sum", **options)

    torch.testing.assert_close(-likelihood.log_prob(f, y).sum(), loss(f), **TIGHT)
    torch.testing.assert_close(likelihood.residual(f, y), torch.autograd.functional.jacobian(loss, f), **TIGHT)
    each = cross_entropy(f, y, reduction="none", **options)
    torch.testing.assert_close(-likelihood.log_prob(f, y, W), W * each, **TIGHT)


@WEIGHTS
@EVERY
def test_products_match_the_hessian(options: dict, w: Tensor | None) -> None:
    f, likelihood = normal(N, C, scale=2.0), Categorical(**options)
    require_consistent_products(likelihood, f, Y, w, autograd_hessians(likelihood, f, Y, w))


@WEIGHTS
@EVERY
def test_monte_carlo_residuals_average_to_the_hessian(options: dict, w: Tensor | None) -> None:
    f, likelihood = normal(N, C), Categorical(**options)
    moment = enumerated_moment(likelihood, f, Y, w, class_outcomes(f))
    torch.testing.assert_close(moment, autograd_hessians(likelihood, f, Y, w), **TIGHT)


def test_monte_carlo_residuals_are_drawn_from_the_model() -> None:
    f, likelihood = normal(N, C), Categorical(**OPTIONS[3])
    require_sampled_moment(likelihood, f, Y, W, dense_fisher(likelihood, f, Y, W))


@WEIGHTS
@EVERY
def test_one_hot_rows_are_their_labels(options: dict, w: Tensor | None) -> None:
    f, u, likelihood = normal(N, C), normal(N, C, seed=2), Categorical(**options)
    for product in (likelihood.hessian_product, likelihood.root_product, likelihood.root_transpose_product):
        torch.testing.assert_close(product(f, u, ONE_HOT, w), product(f, u, LABELS, w), **TIGHT)
    torch.testing.assert_close(likelihood.residual(f, ONE_HOT, w), likelihood.residual(f, LABELS, w), **TIGHT)
    torch.testing.assert_close(likelihood.log_prob(f, ONE_HOT, w), likelihood.log_prob(f, LABELS, w), **TIGHT)


@EVERY
def test_points_count_where_their_curvature_is_not_zero(options: dict) -> None:
    expected = torch.ones(N, dtype=torch.bool)
    if options == OPTIONS[2]:
        expected[LABELS == 2] = False
    for y in (ONE_HOT, LABELS):
        assert torch.equal(Categorical(**options).counted(y), expected)
        assert torch.equal(Categorical(**options).counted(y, W), expected & (W != 0))


def test_gradients_through_outputs_and_vectors() -> None:
    f, u, likelihood = normal(N, C).requires_grad_(), normal(N, C, seed=2).requires_grad_(), Categorical(**OPTIONS[3])

    def products(f: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        return likelihood.residual(f, Y, W), likelihood.hessian_product(f, u, Y, W), likelihood.root_product(f, u, Y, W)

    assert torch.autograd.gradcheck(products, (f, u), fast_mode=True)


@pytest.mark.parametrize("y", [Y[:C], torch.eye(C).double(), torch.eye(C).double().roll(1, 0)], ids=range(3))
def test_extreme_logits_in_float32(y: Tensor) -> None:
    """Probabilities near 1 keep the digits of their distance to 1."""
    likelihood = Categorical(label_smoothing=0.0)
    f32, y32, u32 = 100 * torch.eye(C), y.float(), normal(C, C, seed=2, dtype=torch.float32)
    f, y, u = f32.double(), y32.double(), u32.double()
    for single, double in [
        (likelihood.log_prob(f32, y32), likelihood.log_prob(f, y)),
        (likelihood.residual(f32, y32), likelihood.residual(f, y)),
        (likelihood.hessian_product(f32, u32, y32), likelihood.hessian_product(f, u, y)),
        (likelihood.root_product(f32, u32, y32), likelihood.root_product(f, u, y)),
    ]:
        assert single.isfinite().all()
        torch.testing.assert_close(single.double(), double, rtol=5e-6, atol=1e-40)


def test_targets_are_checked_as_far_as_possible() -> None:
    Categorical().check_targets(Y, C)
    Categorical(WEIGHT).check_targets(Y.bfloat16())
    with pytest.raises(ValueError, match="4 class weights"):
        Categorical(WEIGHT).check_targets(Y[:, :3].softmax(-1), 3)
    with pytest.raises(ValueError, match=r"y / y.sum\(-1, keepdim=True\), with the sums as sample weights"):
        Categorical().check_targets(3 * ONE_HOT, C)
