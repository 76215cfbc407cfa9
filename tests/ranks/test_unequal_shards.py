"""Ranks whose shards lead to other engines: the answers are equal on all of them, and right.

Tests `process_group.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import curvops as co
from tests.ranks.processes import alone, run_on_ranks
from tests.ranks.questions import DOUBLE, data, seeded

SIZE, LARGE = 2, 100.0


class OddLayer(nn.Module):
    """A network whose first layer does not run as a layer where an input is large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = F.linear(x, self.first.weight, self.first.bias) if bool((x > LARGE / 2).any()) else self.first(x)
        return self.last(torch.tanh(first / LARGE))


def odd(shard: slice, group: Any = None) -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    model = OddLayer().double()
    x, y = data("labels")
    x[1, 0] = LARGE  # the first point of rank 1
    lin = co.linearize(model, (x[shard], y[shard]), "classification", process_group=group)
    kfac = co.KFAC(lin)
    return {
        "KFAC": kfac.to_dense().numpy(),
        "EKFAC": co.EKFAC(lin).to_dense().numpy(),
        "diagonal": co.DiagonalGGN(lin).diagonal().numpy(),
        "product": (co.GGN(lin) @ torch.eye(lin.num_parameters, dtype=DOUBLE)).numpy(),
    }


def odd_on_rank(group: dist.ProcessGroup) -> dict[str, np.ndarray]:
    return odd(slice(dist.get_rank(group), None, SIZE), group)


def test_a_layer_that_fails_on_one_rank_is_left_to_autodiff_on_all() -> None:
    expected, found = alone(odd, slice(None)), run_on_ranks(SIZE, odd_on_rank)
    for answers in found.values():
        assert not isinstance(answers, str), answers
        for name, value in answers.items():
            np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-12, err_msg=name)
            assert np.array_equal(value, found[0][name])


def tight(shard: slice, budget: int, group: Any = None) -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 60), nn.Tanh(), nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 3)).double()
    x = torch.randn(400, 4, dtype=DOUBLE, generator=seeded())
    y = torch.randint(3, (400,), generator=seeded())
    batches = [(a, b) for a, b in zip(x[shard].split(20), y[shard].split(20))]
    lin = co.linearize(model, batches, "classification", memory_budget=budget, process_group=group)
    G = co.GGN(lin)
    for _ in range(3):  # engines are kept
        _ = G @ torch.ones(lin.num_parameters, 8, dtype=DOUBLE)
    post = co.laplace(lin, co.GGN, prior_precision=3.0, check_mode=False)
    new = torch.randn(8, 4, dtype=DOUBLE, generator=seeded(7))
    J, B = lin.jacobian(new), torch.randn(lin.num_parameters, 8, dtype=DOUBLE, generator=seeded(5))
    for _ in range(3):
        pulled = J.mT @ (J @ B)
    return {
        "products at new points": pulled.numpy(),
        "their solutions": post.precision.solve(pulled).numpy(),
        "prediction": post.predict(new).covariance_matrix.numpy(),
        "functions": post.functions(new, 3, generator=seeded()).numpy(),
    }


def tight_on_rank(group: dist.ProcessGroup, budget: int) -> dict[str, np.ndarray]:
    return tight([slice(0, 360), slice(360, 400)][dist.get_rank(group)], budget, group)


@pytest.fixture(scope="module")
def whole() -> dict[str, np.ndarray]:
    return alone(tight, slice(None), 2**30)


def test_predictions_do_not_depend_on_what_a_rank_keeps_of_its_shard(whole) -> None:
    found = run_on_ranks(SIZE, tight_on_rank, 2**19)
    for answers in found.values():
        assert not isinstance(answers, str), answers
        for name, value in answers.items():
            error = np.abs(value - whole[name]).max() / np.abs(whole[name]).max()
            assert error < 1e-6, (name, error)
            assert np.array_equal(value, found[0][name]), name
