"""Several outputs, missing targets and weights of targets, on shards of which one is empty.

The answers are those of one process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import curvops as co
from tests.ranks.processes import alone, run_on_ranks
from tests.ranks.questions import SHARDS, data, seeded

CHOSEN = torch.tensor([1, 8, 12])
GAUSSIAN = co.likelihoods.Gaussian


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.value = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x).tanh()
        return {"kind": self.kind(h), "value": self.value(h)}


def answers(group: Any, size: int) -> dict[str, np.ndarray]:
    rank, shards = (0, SHARDS[1]) if group is None else (dist.get_rank(group), SHARDS[size])
    own = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
    torch.manual_seed(0)
    model = Heads().double()
    x, kind = data("labels")
    _, value = data("numbers")
    w = value.abs()
    value[::3, 0] = torch.nan
    targets = {"kind": kind[own], "value": value[own]}
    choice = {"kind": "classification", "value": GAUSSIAN("per_output", missing="ignore")}
    several = co.linearize(model, (x[own], targets), choice, process_group=group)
    plain = nn.Sequential(model.body, nn.Tanh(), model.value)
    batch = {"inputs": x[own], "targets": value[own], "weights": w[own]}
    weighted = co.linearize(plain, batch, GAUSSIAN(missing="ignore"), weights=True, process_group=group)
    found = {}
    for name, lin in {"several": several, "weighted": weighted}.items():
        post = co.laplace(lin, "ggn", 1.0, check_mode=False)
        here = lambda answer: answer["value"] if name == "several" else answer  # noqa: B023, E731
        found |= {
            f"{name}: log-likelihood": lin.log_likelihood(),
            f"{name}: noises": torch.cat([noise.reshape(-1) for noise in lin.likelihood.hyperparameters]),
            f"{name}: GGN": co.GGN(lin).to_dense(),
            f"{name}: Monte Carlo": co.GGN(lin, mc_samples=2, generator=seeded()).to_dense(),
            f"{name}: empirical": co.EmpiricalFisher(lin).to_dense(),
            f"{name}: KFAC": co.KFAC(lin).to_dense(),
            f"{name}: some points": co.GGN(lin.restrict(CHOSEN, 2.0)).to_dense(),
            f"{name}: one rank": co.GGN(lin.gathered()).to_dense(),
            f"{name}: evidence": post.log_evidence().value,
            f"{name}: prediction": here(post.predict(x[:3])).variance,
            f"{name}: gathered": here(post.predict(x[own], gather=True) if group else post.predict(x)).variance,
        }
    return {name: value.detach().numpy() for name, value in found.items()}


def test_shared_data() -> None:
    expected = alone(answers, None, 1)
    for found in run_on_ranks(3, answers, 3).values():
        assert not isinstance(found, str), found
        for name, value in found.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-9, err_msg=name)
