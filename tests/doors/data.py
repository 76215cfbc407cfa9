"""What is refused as data: inputs, targets, sample weights and the order in which they come."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

import curvops as co
from curvops.network.data.batches import Batches
from curvops.network.data.inputs import as_inputs
from curvops.network.likelihoods import Categorical
from tests.doors.door import Door
from tests.network.definitions import as_batches, normal

N = 10
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 3
W = torch.linspace(0, 1, N)
INDEX = torch.arange(N)
NAMED = {"inputs": X, "targets": Y, "weights": W}
NAN = X.clone()
NAN[7, 1] = torch.nan
A, B = torch.randn(5, 3), torch.arange(5)


class Loader(DataLoader):
    """What a subclass does between dataset and batches cannot be known."""


def in_fours(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(tensor.split(4) for tensor in tensors), strict=True))


def read(data: object) -> Batches:
    return as_batches(data, 4, check=Categorical().check_targets)


POINTS, CLASSES = normal(7, 4, dtype=torch.float32), torch.tensor([0, 1, 2, 0, 1, 2, 0])


def classified(data: object) -> co.operators.Linearization:
    return co.linearize(nn.Linear(4, 3), data, "classification")


def regressed(targets: Tensor) -> co.operators.Linearization:
    return co.linearize(nn.Linear(4, 3), (POINTS, targets), co.likelihoods.Gaussian(noise=1.0))


def broken(value: float) -> Tensor:
    x = POINTS.clone()
    x[6, 1] = value
    return x


LABELS = torch.tensor([[0, 1, 2], [2, 2, 1], [0, 0, 1], [1, 2, 0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]], dtype=torch.bool)


def of_sequences(y: Tensor, likelihood: str) -> co.operators.Linearization:
    """Of four sequences of three positions."""
    return co.linearize(nn.Linear(2, 3).double(), (normal(4, 3, 2), y), likelihood)


DOORS = [
    Door(
        "inputs",
        rows={
            "a list of numbers": (
                lambda: as_inputs(A.tolist()),
                TypeError,
                "given a list.*convert lists with torch.tensor",
            ),
            "an array of text": (
                lambda: as_inputs(np.array(["a", "b"])),
                TypeError,
                "array of <U1 cannot become a tensor",
            ),
            "a list of text": (lambda: as_inputs({"a": A, "text": ["b"]}), TypeError, "'text': list"),
            "no tensors": (lambda: as_inputs(()), TypeError, "non-empty"),
            "None": (lambda: as_inputs(None), TypeError, "NoneType"),
            "two lengths": (lambda: as_inputs((A, B[:4])), ValueError, r"same leading dimension.*\(5, 3\).*\(4,\)"),
            "a number": (lambda: as_inputs(torch.tensor(1.0)), ValueError, "leading dimension"),
            "an infinite second input": (
                lambda: as_inputs((B, A / 0)),
                ValueError,
                r"inputs\[1\] of shape \(5, 3\) holds NaN or inf",
            ),
            "NaN": (lambda: as_inputs(A * torch.nan), ValueError, "NaN"),
        },
    ),
    Door(
        "sample weights",
        rows={
            "indices": (
                lambda: as_batches((X, Y, INDEX), 4, weights=False),
                TypeError,
                r"a third item \(torch.int64 of shape \(10,\)\).*Declare sample weights",
            ),
            "floats": (
                lambda: as_batches((X, Y, W), 4, weights=False),
                TypeError,
                "float32.*weights=True, or by a mapping .'inputs'.*Leave out an index",
            ),
            "dataset": (
                lambda: as_batches(TensorDataset(X, Y, INDEX), 4, weights=False),
                TypeError,
                "Batch 0: There is a third item.*for x, y, _ in loader",
            ),
            "batches": (
                lambda: as_batches(in_fours(X, Y, INDEX), 4, weights=False),
                TypeError,
                "Batch 0: There is a third item",
            ),
            "names": (
                lambda: as_batches([(X, Y, ["a"] * N)], 4, weights=False),
                TypeError,
                "Batch 0: There is a third item .list",
            ),
            "negative counts": (
                lambda: as_batches((X, Y, -INDEX), 4, weights=True),
                ValueError,
                "negative sample weights",
            ),
            "declared, not given": (
                lambda: as_batches((X, Y), 4, weights=True),
                TypeError,
                "weights=True, but there are only inputs and targets",
            ),
            "declared, not named": (
                lambda: as_batches({"inputs": X, "targets": Y}, 4, weights=True),
                TypeError,
                "weights=True, but",
            ),
            "other names": (
                lambda: as_batches(NAMED | {"index": INDEX}, 4, weights=False),
                TypeError,
                "dict cannot be read",
            ),
            "negative": (lambda: as_batches((X, Y, -W), 4, weights=True), ValueError, "negative sample weights"),
            "named negative": (
                lambda: as_batches(NAMED | {"weights": -W}, 4, weights=False),
                ValueError,
                "negative sample weights",
            ),
            "infinite": (
                lambda: as_batches((X, Y, W / 0), 4, weights=True),
                ValueError,
                "Batch 0: weights .* NaN or inf",
            ),
            "NaN": (
                lambda: as_batches((X, Y, W * torch.nan), 4, weights=True),
                ValueError,
                "Batch 0: weights .* NaN or inf",
            ),
            "shape": (
                lambda: as_batches((X, Y, W[:, None]), 4, weights=True),
                ValueError,
                r"Batch 0: .* must have shape \(4,\); given \(4, 1\)",
            ),
            "length": (
                lambda: as_batches((X, Y, W[:5]), 4, weights=True),
                ValueError,
                r"10 points, but the sample weights have shape \(5,\)",
            ),
            "a number": (
                lambda: as_batches((X, Y, W.sum()), 4, weights=True),
                ValueError,
                r"10 points, but the sample weights have shape \(\)",
            ),
            "no tensors": (
                lambda: as_batches([(X, Y, W.tolist())], 4, weights=True),
                TypeError,
                "Batch 0: Targets .* must be tensors; given Tensor, list",
            ),
        },
    ),
    Door(
        "batches",
        rows={
            "no points": (lambda: read((X[:0], Y[:0])), ValueError, "empty"),
            "no batches": (lambda: read([]), ValueError, "empty"),
            "empty dataset": (lambda: read(TensorDataset(X[:0], Y[:0])), ValueError, "empty"),
            "empty batch": (lambda: read([(X, Y), (X[:0], Y[:0])]), ValueError, "Batch 1 is empty"),
            "generator": (
                lambda: read(pair for pair in in_fours(X, Y)),
                TypeError,
                "generator can be read only once.*list.*DataLoader",
            ),
            "zip": (lambda: read(zip(X.split(4), Y.split(4), strict=True)), TypeError, "only once"),
            "number": (lambda: read(3), TypeError, "int cannot be read"),
            "mapping": (lambda: read({"x": X, "y": Y}), TypeError, "dict cannot be read"),
            **{
                f"{given} for targets": (
                    lambda y=y: read((X, y)),
                    TypeError,
                    f"^Targets .and weights, if any. must be tensors; given {given}. Pass one of several targets, or",
                )
                for given, y in {
                    "dict": {"cls": Y},
                    "tuple": (Y, Y),
                    "list": Y.tolist(),
                    "NoneType": None,
                    "str": "labels",
                    "int": 3,
                }.items()
            },
            "a mapping of targets in a batch": (
                lambda: read([(X, {"cls": Y})]),
                TypeError,
                "^Batch 0: Targets .* must be tensors; given dict. Pass one of",
            ),
            "no weights": (
                lambda: as_batches((X, Y, None), 4, weights=True),
                TypeError,
                "must be tensors; given Tensor, NoneType",
            ),
            "inputs alone": (lambda: read(X), TypeError, "Batch 0: A batch is .inputs, targets.; this is a Tensor"),
            "batches of inputs": (lambda: read([X, X, X, X]), TypeError, "Batch 0: .* this is a Tensor"),
            "arrays of objects": (
                lambda: read((X.numpy().astype(object), Y)),
                TypeError,
                "array of object cannot become a tensor",
            ),
            "mapping batches": (
                lambda: read([{"ids": Y, "y": Y}]),
                TypeError,
                "Name the targets of a mapping 'labels'",
            ),
            "two labels": (lambda: read([{"ids": Y, "label": Y, "labels": Y}]), TypeError, "both 'labels' and 'label'"),
            "shifted inside": (
                lambda: read(
                    [
                        {
                            "input_ids": INDEX.view(5, 2),
                            "labels": INDEX.view(5, 2).masked_fill(INDEX.view(5, 2) == 3, -100),
                        }
                    ]
                ),
                ValueError,
                "causal language model shifts",
            ),
            "four parts": (lambda: read([(X, Y, W, W)]), TypeError, "Batch 0: .* this is a tuple"),
            "labels as a list": (lambda: read([(X, [0] * N)]), TypeError, "Batch 0: Targets.*given list"),
            "single points": (lambda: read(list(zip(X, Y, strict=True))), ValueError, r"targets have shape \(\)"),
            "lists of numbers": (lambda: read([(X.tolist(), Y)]), TypeError, "convert lists with torch.tensor"),
            "with replacement": (
                lambda: read(DataLoader(TensorDataset(X, Y), 4, sampler=WeightedRandomSampler([1.0] * N, N))),
                ValueError,
                r"anew in each pass, with a WeightedRandomSampler.*DataLoader\(loader.dataset, .*shuffle=False",
            ),
            "more than all": (
                lambda: read(DataLoader(TensorDataset(X, Y), 4, sampler=RandomSampler(X, num_samples=2 * N))),
                ValueError,
                "with a RandomSampler",
            ),
            "a loader of one's own": (
                lambda: read(Loader(TensorDataset(X, Y), 4, shuffle=True)),
                ValueError,
                "this Loader draws",
            ),
            "NaN": (lambda: read((NAN, Y)), ValueError, r"Batch 1: inputs of shape \(4, 3\) holds NaN"),
            "NaN in targets": (lambda: read((X, NAN.flip(0))), ValueError, "Batch 0: targets .* NaN"),
            "lengths": (lambda: read((X, Y[:-1])), ValueError, r"10 inputs, but the targets have shape \(9,\)"),
            "more targets": (lambda: read((X[:8], Y)), ValueError, r"8 inputs, but the targets have shape \(10,\)"),
            "lengths in a batch": (lambda: read([(X, Y), (X, Y[1:])]), ValueError, "In batch 1 there are 10 inputs"),
            "labels": (lambda: read((X, Y - 1)), ValueError, "Batch 0: Categorical targets must lie in 0"),
            "dtype of labels": (lambda: read((X, W)), TypeError, "Batch 0: Categorical targets"),
        },
    ),
    Door(
        "data of linearize",
        rows={
            "empty": (lambda: classified((POINTS[:0], CLASSES[:0])), ValueError, "The data are empty.*Pass a pair"),
            "no batches": (lambda: classified([]), ValueError, "The data are empty"),
            "one-shot": (
                lambda: classified(pair for pair in [(POINTS, CLASSES)]),
                TypeError,
                "generator can be read only once. Pass a list",
            ),
            "NaN": (
                lambda: classified((broken(torch.nan), CLASSES)),
                ValueError,
                r"inputs of shape \(7, 4\) holds NaN.*Remove or impute",
            ),
            "Inf": (lambda: classified((broken(torch.inf), CLASSES)), ValueError, "holds NaN or infinite"),
            "range": (
                lambda: classified((POINTS, CLASSES + 1)),
                ValueError,
                "must lie in 0 .. 2 .*given values from 1 to 3. Renumber",
            ),
            "negative": (lambda: classified((POINTS, CLASSES - 9)), ValueError, "given values from -9 to -7"),
            "dtype": (
                lambda: classified((POINTS, CLASSES.float())),
                TypeError,
                "class indices of an integer dtype.*given torch.float32.*y.long",
            ),
            "shape": (
                lambda: classified((POINTS, CLASSES[:, None])),
                ValueError,
                r"shape \(n,\); given \(7, 1\). Use y.squeeze",
            ),
            "length": (
                lambda: classified((POINTS, CLASSES[:5])),
                ValueError,
                r"7 inputs, but the targets have shape \(5,\)",
            ),
            "mapping": (
                lambda: classified([{"x": POINTS, "y": CLASSES}]),
                TypeError,
                "A batch is .inputs, targets.; this is a dict. Name the targets",
            ),
            "index": (
                lambda: classified((POINTS, CLASSES, torch.arange(7))),
                TypeError,
                "There is a third item .torch.int64.*Declare sample weights",
            ),
            "NaN in targets": (
                lambda: regressed(torch.full((7, 3), torch.nan)),
                ValueError,
                "targets of shape .* holds NaN",
            ),
            "whole numbers": (
                lambda: regressed(CLASSES[:, None].expand(7, 3)),
                TypeError,
                "must have a floating-point dtype; given torch.int64",
            ),
            "a number a point": (
                lambda: regressed(torch.zeros(7)),
                ValueError,
                r"outputs' shape \(n, C\); given \(7,\)",
            ),
        },
    ),
    Door(
        "sequences",
        rows={
            "labels of points": (
                lambda: of_sequences(LABELS[:, 0], "classification"),
                ValueError,
                r"shape \(n, 3\) or .n, 3, ....; given \(4,\)",
            ),
            "length": (
                lambda: of_sequences(LABELS[:, :2], "classification"),
                ValueError,
                r"given \(4, 2\). Pad sequences to one length",
            ),
            "range": (
                lambda: of_sequences(LABELS + 1, "classification"),
                ValueError,
                "each of the 3 positions as a point.*must lie in 0 .. 2",
            ),
            "dtype": (
                lambda: of_sequences(LABELS[..., None], "regression"),
                TypeError,
                "each of the 3 positions as a point.*floating-point dtype",
            ),
            "weights of other positions": (
                lambda: co.linearize(
                    nn.Linear(2, 3).double(), (normal(4, 3, 2), LABELS, MASK[:, :2]), "classification", weights=True
                ),
                ValueError,
                r"shape \(4,\) or, one per position, \(4, 3\); given \(4, 2\)",
            ),
            "weights of positions that are none": (
                lambda: co.linearize(
                    nn.Sequential(nn.Flatten(), nn.Linear(6, 3)).double(),
                    (normal(4, 3, 2), normal(4, 3), MASK),
                    co.likelihoods.Gaussian(noise=1.0),
                    weights=True,
                ),
                ValueError,
                r"Batch 0: the sample weights must have shape \(4,\); given \(4, 3\)",
            ),
        },
    ),
]
