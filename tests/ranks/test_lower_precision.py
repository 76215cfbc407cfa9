"""Products in a lower precision over shared data: one matrix and one error, whatever the ranks."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import curvops as co
from tests.ranks.processes import run_on_ranks
from tests.ranks.questions import DOUBLE, SHARDS, N, data


def linearise(lower: Any, shards: tuple[int, ...] = (N,), group: Any = None, rank: int = 0) -> co.Linearization:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 3)).double()
    own, (x, y) = slice(sum(shards[:rank]), sum(shards[: rank + 1])), data("labels")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", co.errors.LowerPrecisionWarning)
        return co.linearize(model, (x[own], y[own]), "classification", compute_dtype=lower, process_group=group)


def products(lin: co.Linearization) -> dict[str, np.ndarray]:
    B = torch.linspace(-1, 1, 2 * lin.num_parameters, dtype=DOUBLE).view(-1, 2)
    curvatures = {"GGN": co.GGN(lin), "empirical Fisher": co.EmpiricalFisher(lin)}
    found = {name: A @ B for name, A in curvatures.items()}
    found["solution"] = co.linalg.cg(co.GGN(lin).add_diagonal(1.0), B, rtol=0.05).x
    return {name: value.numpy() for name, value in found.items()}


def asked_of_rank(group: Any, size: int) -> dict[str, Any]:
    rank = dist.get_rank(group)
    lin = linearise(torch.bfloat16, SHARDS[size], group, rank)
    answers: dict[str, Any] = dict(products(lin))
    answers["error"] = lin.plan.product_error
    try:
        co.GGN(lin).add_diagonal(1.0).solve(torch.ones(lin.num_parameters, dtype=DOUBLE))
    except ValueError as error:
        answers["refused"] = str(error)
    try:
        linearise(torch.bfloat16 if rank else None, SHARDS[size], group, rank)
    except co.errors.RanksDifferError as error:
        answers["differ"] = str(error)
    return answers


@pytest.mark.parametrize("size", [2, 3])
def test_one_matrix_and_one_error_on_all_ranks(size) -> None:
    truth, found = products(linearise(torch.bfloat16)), run_on_ranks(size, asked_of_rank, size)
    for rank, own in found.items():
        assert not isinstance(own, str), f"rank {rank}: {own}"
        for name, value in truth.items():
            np.testing.assert_allclose(own[name], value, rtol=1e-10, atol=1e-10)
        assert 1e-3 < own["error"] == found[0]["error"]
        assert "without compute_dtype" in own["refused"]
        assert "compute_dtype" in own["differ"]
