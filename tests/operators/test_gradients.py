"""Per-example gradients, against a backward pass for each point; gradients of products.

Tests `network_operator.py`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

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


def test_all_rows_take_fewer_operations_than_products_with_unit_vectors() -> None:
    lin = co.linearize(network(), (normal(80, 3), torch.arange(80) % C), "classification")
    with FlopCounterMode(display=False) as counter:
        lin.gradients().to_dense()
    assert counter.get_total_flops() < 80 * 80 * lin.num_parameters  # 2 N² D by products with unit vectors


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
    torch.testing.assert_close(co.EmpiricalFisher(lin, per_token).to_dense(), expected.mT @ expected, **TIGHT)
    u = normal(len(expected), 2)
    torch.testing.assert_close(G.mT @ u, expected.mT @ u, **TIGHT)


def test_gradients_in_the_noise_and_in_the_vectors() -> None:
    model, x, y = network(), normal(N, 3), normal(N, C, seed=2)
    noise = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(noise))
    G, rows = lin.gradients(), by_points(model, 0.5 * (model(x) - y).square().sum(1))
    F = co.EmpiricalFisher(lin), rows.mT @ rows / noise**2
    for op, dense in ((G, rows / noise), (G.mT, rows.mT / noise), F):
        v = normal(dense.shape[1], seed=3).requires_grad_()
        w = normal(len(dense), seed=4)
        ours = torch.autograd.grad((op @ v) @ w, (noise, v))
        for a, b in zip(ours, torch.autograd.grad((dense @ v) @ w, (noise, v), retain_graph=True)):
            torch.testing.assert_close(a, b, **TIGHT)
