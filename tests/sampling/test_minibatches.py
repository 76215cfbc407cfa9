"""Minibatches of one process; those of several ranks are in `tests/ranks/test_samplers.py`."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import curvops as co
from tests.sampling.gaussians import seeded

S = co.sampling
X, Y = torch.arange(22, dtype=torch.float64).view(11, 2) / 11, torch.arange(11) % 3


def density() -> S.LogPosterior:
    torch.manual_seed(0)
    return S.log_posterior(nn.Linear(2, 3).double(), "classification", data_size=11)


def test_a_pass_has_each_point_once_in_another_order() -> None:
    parts = S.minibatches(density(), (X, Y), 4, seeded(0))
    passes = [torch.cat([x for x, _ in parts]) for _ in range(2)]
    assert len(parts) == 3 and [len(y) for _, y in parts] == [4, 4, 3]
    assert not torch.equal(*passes)
    for each in passes:
        assert torch.equal(each.sort(0).values, X)


def test_a_dataset_gives_the_same_minibatches_as_its_tensors() -> None:
    given = [S.minibatches(density(), data, 4, seeded(0)) for data in ((X, Y), TensorDataset(X, Y))]
    for ours, theirs in zip(*given, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
