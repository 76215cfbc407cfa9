"""What is refused as data: inputs, targets, sample weights and the order in which they come."""

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import curvops as co
from curvops.network.data import Batches, as_inputs
from curvops.network.likelihoods import Categorical
from tests.doors.door import Door
from tests.network.data.test_batches import N, W, X, Y
from tests.network.definitions import as_batches, normal

A, B = torch.randn(5, 3), torch.arange(5)


def read(data: object) -> Batches:
    return as_batches(data, 4, check=Categorical().check_targets)


POINTS, CLASSES = normal(7, 4, dtype=torch.float32), torch.tensor([0, 1, 2, 0, 1, 2, 0])


def classified(data: object) -> co.operators.Linearization:
    return co.linearize(nn.Linear(4, 3), data, "classification")


DOORS = [
    Door(
        "inputs",
        rows={
            "a number": (lambda: as_inputs(torch.tensor(1.0)), "leading dimension"),
            "NaN": (lambda: as_inputs(A * torch.nan), "NaN"),
        },
    ),
    Door(
        "sample weights",
        rows={
            "names": (
                lambda: as_batches([(X, Y, ["a"] * N)], 4, weights=False),
                TypeError,
                "Batch 0: There is a third item .list",
            ),
            "declared, not given": (
                lambda: as_batches((X, Y), 4, weights=True),
                TypeError,
                "weights=True, but there are only inputs and targets",
            ),
            "negative": (lambda: as_batches((X, Y, -W), 4, weights=True), "negative sample weights"),
            "length": (
                lambda: as_batches((X, Y, W[:5]), 4, weights=True),
                r"10 inputs, but the sample weights have shape \(5,\)",
            ),
        },
    ),
    Door(
        "batches",
        rows={
            "empty batch": (lambda: read([(X, Y), (X[:0], Y[:0])]), "Batch 1 is empty"),
            "zip": (lambda: read(zip(X.split(4), Y.split(4), strict=True)), TypeError, "only once"),
            "number": (lambda: read(3), TypeError, "int cannot be read"),
            "no weights": (
                lambda: as_batches((X, Y, None), 4, weights=True),
                TypeError,
                "must be tensors; given Tensor, NoneType",
            ),
            "more than all": (
                lambda: read(DataLoader(TensorDataset(X, Y), 4, sampler=RandomSampler(X, num_samples=2 * N))),
                "draws its points anew in each pass",
            ),
        },
    ),
    Door(
        "data of linearize",
        rows={
            "empty": (lambda: classified((POINTS[:0], CLASSES[:0])), "The data are empty.*Pass a pair"),
            "length": (lambda: classified((POINTS, CLASSES[:5])), r"7 inputs, but the targets have shape \(5,\)"),
            "index": (
                lambda: classified((POINTS, CLASSES, torch.arange(7))),
                TypeError,
                "There is a third item .torch.int64.*Declare sample weights",
            ),
        },
    ),
]
