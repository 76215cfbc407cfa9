"""What operators of a linearised network refuse."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import curvops as co
from curvops.linalg import Dense, Diagonal, DirectSum, Kronecker, LowRank
from tests.doors.door import Door


@cache
def lin() -> co.operators.Linearization:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    data = torch.randn(6, 3).double(), torch.arange(6) % 2
    return co.linearize(model, data, "classification")


@cache
def wide() -> co.operators.Linearization:
    """A layer whose block is larger than the budget."""
    data = torch.randn(4, 30).double(), torch.arange(4)
    return co.linearize(nn.Linear(30, 10).double(), data, "classification", memory_budget=100_000)


@cache
def five_points(kind: str) -> co.operators.Linearization:
    """In batches of two, with weights, or as sequences of three."""
    model = nn.Linear(3, 2).double()
    x = torch.ones(5, 3, 3).double() if kind == "sequences" else torch.ones(5, 3).double()
    tensors = (x, torch.zeros(x.shape[:-1]).long(), torch.ones(5).double())[: 3 if kind == "weighted points" else 2]
    data = list(zip(*(tensor.split(2) for tensor in tensors)))
    return co.linearize(model, data, "classification", weights=kind == "weighted points")


def with_activation(module: nn.Module) -> co.operators.Linearization:
    model = nn.Sequential(nn.Linear(3, 5), module, nn.Tanh(), nn.Linear(5, 2)).double()
    return co.linearize(model, (torch.ones(4, 3).double(), torch.arange(4) % 2), "classification")


@cache
def of_margins() -> co.operators.Linearization:
    return co.linearize(nn.Linear(3, 2).double(), (torch.ones(4, 3).double(), torch.arange(4) % 2), MARGINS)


MARGINS = nn.MultiMarginLoss()
SIZES = {
    "none": (0, ValueError, "between 1 and the 5"),
    "too many": (6, ValueError, "between 1 and the 5"),
    "a share": (0.5, TypeError, "whole number"),
    "a truth": (True, TypeError, "whole number"),
    "out of range": (torch.tensor([5]), ValueError, "out of range"),
    "twice": (torch.tensor([1, 1]), ValueError, "twice"),
}
NO_LINEARISATION = {
    "a tensor": torch.eye(26).double(),
    "an operator": Dense(torch.eye(26).double()),
    "a network": nn.Linear(2, 2),
    "nothing": None,
}
OPERATORS = (
    co.GGN,
    co.EmpiricalFisher,
    co.Hessian,
    co.DiagonalGGN,
    co.KFAC,
    co.EKFAC,
    co.BlockDiagonal,
    co.TangentKernel,
)

DOORS = [
    Door(
        "options of operators",
        rows={
            "fisher": (lambda: co.KFAC(lin(), fisher="type-2"), ValueError, "'exact', 'mc'"),
            "fisher of a diagonal": (lambda: co.DiagonalGGN(lin(), fisher="true"), ValueError, "'exact', 'mc'"),
            "sharing": (lambda: co.EKFAC(lin(), sharing="sum"), ValueError, "'expand' or 'reduce'"),
            "mc_samples": (lambda: co.GGN(lin(), mc_samples=0), ValueError, "at least 1"),
            "mc_samples of the exact Fisher": (lambda: co.KFAC(lin(), mc_samples=-1), ValueError, "at least 1"),
            "mc_samples of nothing drawn": (lambda: co.KFAC(lin(), mc_samples=5), ValueError, "fisher='mc'"),
            "mc_samples of EKFAC": (
                lambda: co.EKFAC(lin(), fisher="empirical", mc_samples=0),
                ValueError,
                "at least 1",
            ),
            "mc_samples of a diagonal": (lambda: co.DiagonalGGN(lin(), mc_samples=2), ValueError, "draws nothing"),
            "rank above D": (lambda: co.low_rank(co.GGN(lin()), rank=27), ValueError, "27"),
            "rank below 1": (lambda: co.low_rank(co.GGN(lin()), rank=0), ValueError, "rank"),
            "index out of range": (lambda: co.Subnetwork(co.GGN(lin()), [0, 26]), ValueError, "26 is out of range"),
            "index twice": (lambda: co.Subnetwork(co.GGN(lin()), [3, 3]), ValueError, "twice"),
            "no index": (lambda: co.Subnetwork(co.GGN(lin()), torch.empty(0, dtype=torch.long)), ValueError, "nothing"),
            "an empty list": (lambda: co.Subnetwork(co.GGN(lin()), []), ValueError, "nothing"),
            "mask of another size": (
                lambda: co.Subnetwork(co.GGN(lin()), torch.ones(5).bool()),
                ValueError,
                r"\(26,\)",
            ),
            "a word for indices": (lambda: co.Subnetwork(co.GGN(lin()), "x"), TypeError, "indices must be a vector"),
            "complex indices": (lambda: co.Subnetwork(co.GGN(lin()), torch.ones(2) * 1j), TypeError, "integers"),
            "indices that are real": (lambda: co.Subnetwork(co.GGN(lin()), [0.5]), TypeError, "integers"),
            "blocks": (lambda: co.BlockDiagonal(lin(), blocks="rows"), ValueError, "'layer'"),
            "blocks that overlap": (
                lambda: co.BlockDiagonal(lin(), blocks=[["0.*"], ["*.bias"]]),
                ValueError,
                "overlap",
            ),
            "blocks of nothing": (
                lambda: co.BlockDiagonal(lin(), blocks=[["1.*"]]),
                ValueError,
                "matches no parameter",
            ),
            "kernel with a zero prior": (lambda: co.TangentKernel(lin(), 0.0), ValueError, "positive"),
            "kernel with a short prior": (lambda: co.TangentKernel(lin(), torch.ones(3)), ValueError, "26"),
            "a matrix as KFAC's prior": (
                lambda: co.KFAC(lin()).add_diagonal(torch.eye(26).double()),
                ValueError,
                r"\(D,\)",
            ),
            "a matrix as EKFAC's prior": (
                lambda: co.EKFAC(lin()).add_diagonal(torch.eye(26).double()),
                ValueError,
                "EKFAC",
            ),
            "a number for a mesh": (lambda: co.GGN(lin()).sharded(2), TypeError, "device mesh.*int"),
            "a number": (lambda: co.KFAC(lin()) + 0.5, TypeError, r"add_diagonal\(0.5\)"),
            "a count that is a word": (lambda: co.GGN(lin(), "mc"), TypeError, "mc_samples.*'mc'"),
            "a count that is a flag": (lambda: co.GGN(lin(), True), TypeError, "mc_samples.*True"),
            "a seed for a generator": (lambda: co.GGN(lin(), 2, 0), TypeError, "torch.Generator.*manual_seed"),
            "a seed for KFAC": (lambda: co.KFAC(lin(), "mc", generator=0), TypeError, "torch.Generator"),
            "a number for a flag": (lambda: co.EmpiricalFisher(lin(), 5), TypeError, "per_token must be True or False"),
            "a count for a Fisher": (lambda: co.KFAC(lin(), 5), ValueError, "fisher=5.*'exact'"),
            "a Fisher for a sharing": (lambda: co.KFAC(lin(), "mc", "exact"), ValueError, "'expand' or 'reduce'"),
            "a block of a linearisation": (
                lambda: co.Subnetwork(lin(), [0, 1]),
                TypeError,
                r"co.Subnetwork\(co.GGN\(lin\)",
            ),
            "a block of a network": (lambda: co.Subnetwork(nn.Linear(2, 2), [0]), TypeError, "operator.*Linear"),
            "no indices": (lambda: co.Subnetwork(co.GGN(lin())), TypeError, "indices"),
            "a shift for an operator": (lambda: co.linalg.Damped(1.0, co.GGN(lin())), TypeError, "Damped.*float"),
            "a word for a shift": (lambda: co.linalg.Damped(co.GGN(lin()), "one"), TypeError, "shift.*'one'"),
            "a dict for a vector": (lambda: co.GGN(lin()) @ {"0.weight": torch.ones(4, 3)}, TypeError, "lin.flatten"),
            "a list for a vector": (lambda: co.GGN(lin()) @ [1.0] * 26, TypeError, "tensor.*list"),
            "an unknown keyword of Dense": (lambda: Dense(torch.eye(3), symmetric=True), TypeError, "symmetric"),
            "a vector for Dense": (lambda: Dense(torch.ones(3)), ValueError, r"\(3,\)"),
            "a matrix for Diagonal": (lambda: Diagonal(torch.eye(3)), ValueError, r"\(3, 3\)"),
            "values of another rank": (lambda: LowRank(torch.eye(3)[:, :2], torch.ones(3)), ValueError, r"\(3, 2\)"),
            "an unknown keyword of blocks": (
                lambda: DirectSum(Diagonal(torch.ones(2)), positions=[range(2)], symmetric=True),
                TypeError,
                "symmetric",
            ),
            "an unknown keyword of Kronecker": (
                lambda: Kronecker(torch.ones(1, 2), torch.ones(1, 2), psd=True),
                TypeError,
                "psd",
            ),
            "blocks beyond the memory budget": (lambda: co.BlockDiagonal(wide()), ValueError, "co.KFAC"),
            "biases apart": (lambda: co.KFAC(lin(), bias="apart"), ValueError, "expected 'joint'"),
            "no word for biases": (lambda: co.KFAC(lin(), bias=""), ValueError, "expected 'joint'"),
            "biases with a capital": (lambda: co.KFAC(lin(), bias="Separate"), ValueError, "expected 'joint'"),
            "sharing for biases": (lambda: co.KFAC(lin(), bias="expand"), ValueError, "expected 'joint'"),
        },
    ),
    Door(
        "signatures of operators",
        rows={
            **{
                f"{make.__name__} by too many positions": (
                    lambda make=make: make(lin(), *range(20)),
                    TypeError,
                    rf"co.{make.__name__}\(lin.*too many positional",
                )
                for make in OPERATORS
            },
            **{
                f"{make.__name__} by an unknown keyword": (
                    lambda make=make: make(lin(), fissher="mc"),
                    TypeError,
                    rf"co.{make.__name__}\(lin.*'fissher'",
                )
                for make in OPERATORS
            },
            **{
                f"{make.__name__} of no argument": (lambda make=make: make(), TypeError, "missing a required argument")
                for make in OPERATORS
            },
            **{
                f"{make.__name__} of {kind}": (
                    lambda make=make, wrong=wrong: make(wrong),
                    TypeError,
                    f"{make.__name__} is built from a linearised network.*got {type(wrong).__name__}",
                )
                for make in OPERATORS
                for kind, wrong in NO_LINEARISATION.items()
            },
        },
    ),
    Door(
        "subsample",
        rows={
            **{
                f"{wrong} of {kind}": (lambda kind=kind, size=size: co.subsample(five_points(kind), size), error, words)
                for kind in ("points", "weighted points", "sequences")
                for wrong, (size, error, words) in SIZES.items()
            },
            "an operator": (lambda: co.subsample(co.GGN(lin()), 2), TypeError, "takes a linearisation"),
            "a seed": (lambda: co.subsample(lin(), 2, 0), TypeError, "manual_seed"),
        },
    ),
    Door(
        "gradients",
        rows={
            **{
                f"{given} for a flag": (
                    lambda given=given: lin().gradients(given),
                    TypeError,
                    r"per_token must be True or False.*linearise with those",
                )
                for given in (torch.ones(2, 3), 1, "token", None)
            },
        },
    ),
    Door(
        "Hessian",
        rows={
            "an operation without second derivatives": (
                lambda: co.Hessian(with_activation(nn.Hardsigmoid())),
                RuntimeError,
                r"no second derivatives.*hardsigmoid.*Write it out.*use co.GGN\(lin\)",
            ),
            "a loss without second derivatives": (
                lambda: co.Hessian(of_margins()) @ of_margins().theta,
                RuntimeError,
                r"the loss has no second derivatives.*multi_margin",
            ),
            "an operation with wrong ones": (
                lambda: co.Hessian(with_activation(weight_norm(nn.Linear(5, 5)))),
                RuntimeError,
                r"(?i)write that operation out.*use co.GGN\(lin\)",
            ),
        },
    ),
    Door(
        "sums with a matrix",
        rows={
            "a number on the right": (
                lambda: co.GGN(lin()) + 0.5,
                TypeError,
                r"every entry of the matrix; for the diagonal use add_diagonal\(0.5\)",
            ),
            "a number on the left": (
                lambda: 0.5 + co.GGN(lin()),
                TypeError,
                r"every entry of the matrix; for the diagonal use add_diagonal\(0.5\)",
            ),
        },
    ),
]
