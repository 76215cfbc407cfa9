"""Shards without labels: the answers of one process with labels, with shared data and with shared parameters, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import curvops as co
from tests.ranks.processes import alone, run_on_ranks
from tests.ranks.questions import DOUBLE, SHARDS, data, seeded
from tests.ranks.sharded_models import data as sequences
from tests.ranks.sharded_models import network, sharded

CHOSEN = torch.tensor([1, 8, 12])


def answers(group: Any, size: int) -> dict[str, np.ndarray]:
    rank, shards = (0, SHARDS[1]) if group is None else (dist.get_rank(group), SHARDS[size])
    own = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    x, y = data("labels")
    points = (x[own], y[own]) if group is None else x[own]
    lin = co.linearize(model, points, "classification", process_group=group)
    post = co.laplace(lin, "kfac", 1.0)
    found = {
        "GGN": co.GGN(lin).to_dense(),
        "Monte Carlo": co.GGN(lin, mc_samples=2, generator=seeded()).to_dense(),
        "KFAC": co.KFAC(lin).to_dense(),
        "prediction": post.predict(x[:3]).variance,
        "some points": co.GGN(lin.restrict(CHOSEN, 2.0)).to_dense(),
        "one rank": co.GGN(lin.gathered()).to_dense(),
    }
    return {name: value.detach().numpy() for name, value in found.items()}


def of_sharded_model(group: Any, size: int) -> np.ndarray:
    x, y = sequences("tied")
    model = network("tied")
    v = torch.randn(sum(p.numel() for p in model.parameters()), 2, generator=seeded(), dtype=DOUBLE)
    if group is None:
        lin = co.linearize(model, (x, y), "classification")
        return (co.GGN(lin) @ v).detach().numpy()
    mesh = init_device_mesh("cpu", (size,))
    own = x[:5] if mesh.get_rank() == 0 else x[5:]
    lin = co.linearize(sharded(model, mesh), own, "classification", process_group=mesh.get_group())
    V = torch.distributed.tensor.distribute_tensor(v, mesh, [torch.distributed.tensor.Shard(0)])
    return (co.GGN(lin) @ V).full_tensor().detach().numpy()


def test_shared_data() -> None:
    expected = alone(answers, None, 1)
    for found in run_on_ranks(3, answers, 3).values():
        assert not isinstance(found, str), found
        for name, value in found.items():
            np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-12, err_msg=name)


def test_shared_parameters() -> None:
    expected = alone(of_sharded_model, None, 1)
    for found in run_on_ranks(2, of_sharded_model, 2).values():
        assert not isinstance(found, str), found
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)
