"""Per-example gradients, against a backward pass for each point; and the recipe for influence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from tests.network.definitions import TIGHT

N, C, T = 5, 3, 2


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.PReLU(), nn.Linear(4, C)).double()


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


LABELS = torch.tensor([0, 2, 1, 1, 0])
OF_TOKENS = torch.tensor([[0, 2], [1, 1], [-100, 0], [2, 2], [1, 0]])
WEIGHTS = torch.tensor([1.0, 0.5, 0.0, 2.0, 3.0], dtype=torch.float64)


def by_points(model: nn.Module, losses: Tensor) -> Tensor:
    """A backward pass for each entry."""
    found = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses.flatten()]
    return torch.stack([torch.cat([part.flatten() for part in gradients]) for gradients in found])


def weighted(engine: Any = "auto") -> tuple[co.operators.Linearization, Tensor]:
    model, x, w = network(), normal(N, 3), torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    loss = nn.CrossEntropyLoss(weight=w)
    data = [(x[:3], LABELS[:3], WEIGHTS[:3]), (x[3:], LABELS[3:], WEIGHTS[3:])]
    losses = WEIGHTS * nn.functional.cross_entropy(model(x), LABELS, w, reduction="none")
    return co.linearize(model, data, loss, engine=engine, weights=True), by_points(model, losses)


@pytest.mark.parametrize("engine", ["auto", "streamed", "autodiff", "layerwise"])
def test_rows_are_the_points_own_gradients_weights_included(engine: str) -> None:
    lin, expected = weighted(engine)
    G = lin.gradients()
    assert G.shape == (N, lin.num_parameters)
    torch.testing.assert_close(G.to_dense(), expected, **TIGHT)
    v, u = normal(lin.num_parameters), normal(N, 2)
    torch.testing.assert_close(G @ v, expected @ v, **TIGHT)
    torch.testing.assert_close(G.mT @ u, expected.mT @ u, **TIGHT)
    torch.testing.assert_close(G.mT @ torch.ones(N, dtype=torch.float64), lin.gradient(), **TIGHT)
    once = expected[WEIGHTS > 0] / WEIGHTS[WEIGHTS > 0, None].sqrt()  # a weight counts points: not squared
    torch.testing.assert_close(co.EmpiricalFisher(lin) @ v, once.mT @ (once @ v), **TIGHT)
    torch.testing.assert_close(G[1:3].to_dense(), expected[1:3], **TIGHT)


@pytest.mark.parametrize("per_token", [False, True])
def test_sequences_are_one_row_each_or_one_a_token(per_token: bool) -> None:
    model, x = network(), normal(N, T, 3)
    lin = co.linearize(model, [(x[:2], OF_TOKENS[:2]), (x[2:], OF_TOKENS[2:])], "classification")
    losses = nn.functional.cross_entropy(model(x).flatten(0, 1), OF_TOKENS.flatten(), reduction="none")
    expected = by_points(model, losses)
    if not per_token:
        expected = expected.unflatten(0, (N, T)).sum(1)
    G = lin.gradients(per_token=per_token)
    torch.testing.assert_close(G.to_dense(), expected, **TIGHT)
    u = normal(len(expected), 2)
    torch.testing.assert_close(G.mT @ u, expected.mT @ u, **TIGHT)


def test_gradients_in_the_noise_and_in_the_vectors() -> None:
    model, x, y = network(), normal(N, 3), normal(N, C, seed=2)
    noise = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    G = co.linearize(model, (x, y), co.likelihoods.Gaussian(noise)).gradients()
    rows = by_points(model, 0.5 * (model(x) - y).square().sum(1))
    for op, dense in ((G, rows / noise), (G.mT, rows.mT / noise)):
        v = normal(dense.shape[1], seed=3).requires_grad_()
        w = normal(len(dense), seed=4)
        ours = torch.autograd.grad((op @ v) @ w, (noise, v))
        for a, b in zip(ours, torch.autograd.grad((dense @ v) @ w, (noise, v), retain_graph=True)):
            torch.testing.assert_close(a, b, **TIGHT)


def test_influence_is_the_first_order_change_of_a_test_loss() -> None:
    """Of a linear model with normal noise: the derivative of the test loss in each training point's weight."""
    model = nn.Linear(3, 1).double()
    x, y, x_test, y_test = normal(N, 3), normal(N, 1, seed=2), normal(1, 3, seed=3), normal(1, 1, seed=4)
    likelihood, prior = co.likelihoods.Gaussian(0.5), 0.3
    inputs = torch.cat([x, torch.ones(N, 1, dtype=torch.float64)], 1)

    def fitted(weights: Tensor) -> Tensor:
        A = inputs.mT @ (weights[:, None] * inputs) / 0.5 + prior * torch.eye(4, dtype=torch.float64)
        return torch.linalg.solve(A, inputs.mT @ (weights[:, None] * y) / 0.5)

    def test_loss(weights: Tensor) -> Tensor:
        beta = fitted(weights)
        return (x_test @ beta[:3] + beta[3] - y_test).square().sum() / (2 * 0.5)

    ones = torch.ones(N, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(test_loss(ones), ones)
    with torch.no_grad():
        beta = fitted(ones)
        model.weight.copy_(beta[:3].mT)
        model.bias.copy_(beta[3])
    lin = co.linearize(model, (x, y), likelihood)
    P, g = co.GGN(lin).add_diagonal(prior), co.linearize(model, (x_test, y_test), likelihood).gradient()
    torch.testing.assert_close(lin.gradients() @ P.solve(g), -slope, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("outputs", [1, 2])
def test_with_its_leverage_influence_on_a_linear_model_is_leaving_a_point_out(outputs: int) -> None:
    """P₋ₙ⁻¹ gₙ = P⁻¹ Jₙᵀ (I − Hₙ Sₙ)⁻¹ rₙ by Woodbury: the outputs share weights, so that Sₙ is no multiple of I."""
    mixing = normal(3, outputs, seed=5)

    def function(values: Any, x: Tensor) -> Tensor:
        return (x * values["w"]) @ mixing + values["b"]

    x, y, noise, prior = normal(9, 3), normal(9, outputs, seed=2), torch.tensor([0.5, 0.8]).double()[:outputs], 0.3
    rows = torch.stack([torch.cat([point[:, None] * mixing, torch.eye(outputs)]) for point in x]).mT  # (N, C, D)

    def fitted(kept: Tensor) -> Tensor:
        J, t = rows[kept].flatten(0, 1), (y[kept] / noise).flatten()
        H = (1 / noise).repeat(len(kept))
        return torch.linalg.solve(
            J.mT @ (H[:, None] * J) + prior * torch.eye(J.shape[1], dtype=torch.float64), J.mT @ t
        )

    theta = fitted(torch.arange(9))
    model = function, {"w": theta[:3], "b": theta[3:]}
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(noise))
    x_new = normal(4, 3, seed=3)
    J_new, post = lin.jacobian(x_new), co.laplace(lin, co.GGN, prior_precision=prior)
    S, H, r = post.predict(x).covariance_matrix, torch.diag(1 / noise), (lin.outputs() - y) / noise
    r = torch.linalg.solve(torch.eye(outputs) - H @ S, r.unsqueeze(-1))
    moves = (J_new @ post.precision.inverse() @ lin.jacobian().mT).to_dense().unflatten(1, (9, outputs))
    for n in range(9):
        without = fitted(torch.tensor([k for k in range(9) if k != n]))
        torch.testing.assert_close(moves[:, n] @ r[n, :, 0], J_new @ (without - theta), rtol=1e-10, atol=1e-12)
    if outputs == 1:  # the influence over one minus the leverage
        influence = (lin.gradients() @ post.precision.inverse() @ J_new.mT).to_dense()
        leverage = post.predict(x).variance / noise
        expected = torch.stack([moves[:, n] @ r[n, :, 0] for n in range(9)])
        torch.testing.assert_close(influence / (1 - leverage), expected, rtol=1e-10, atol=1e-12)


def test_conversion_keeps_the_rows() -> None:
    lin, expected = weighted()
    torch.testing.assert_close(lin.gradients().to(torch.float32).to_dense(), expected.float(), rtol=1e-4, atol=1e-5)
