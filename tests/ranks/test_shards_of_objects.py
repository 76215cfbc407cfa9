"""Shards of points that are objects: the answers of one process, and refusals of what cannot be shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import curvops as co
from tests.ranks.processes import alone, run_on_ranks

SHARES = (4, 0, 3)


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, points: list[dict[str, Tensor]]) -> Tensor:
        return self.net(torch.stack([point["rows"].sum(0) for point in points]))


def answers(group: Any) -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    points = [{"rows": torch.randn(size, 3).double()} for size in (2, 3, 1, 4, 2, 5, 1)]
    y, model = torch.randn(7, 2).double(), Summed().double()
    rank = 0 if group is None else dist.get_rank(group)
    own = slice(None) if group is None else slice(sum(SHARES[:rank]), sum(SHARES[: rank + 1]))
    likelihood = co.likelihoods.Gaussian(noise=0.3)
    lin = co.linearize(model, (points[own], y[own]), likelihood, process_group=group, collate=list)
    post = co.laplace(lin, "kfac", 1.0, check_mode=False)
    mine, gathered = points[own], {} if group is None else {"gather": True}
    found = {
        "GGN": co.GGN(lin).to_dense(),
        "prediction": post.predict(points[:3]).variance,
        "shared prediction": post.predict(mine, **gathered).variance,
        "kernel": co.TangentKernel(lin).to_dense(),
        "full": co.laplace(lin, "ggn", 1.0, check_mode=False).predict(points[1:4]).variance,
        "full, each its own": co.laplace(lin, "ggn", 1.0, check_mode=False).predict(mine, **gathered).variance,
        "some points": co.GGN(lin.restrict(torch.tensor([1, 5]), 2.0)).to_dense(),
        "one rank": co.GGN(lin.gathered()).to_dense(),
    }
    return {name: value.detach().numpy() for name, value in found.items()}


def test_shared_points() -> None:
    expected = alone(answers, None)
    for found in run_on_ranks(3, answers).values():
        assert not isinstance(found, str), found
        for name, value in found.items():
            np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-12, err_msg=name)
