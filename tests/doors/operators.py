"""What operators of a linearised network refuse."""

from functools import cache

import torch
from torch import nn

import curvops as co
from curvops.linalg import Dense, Diagonal, LowRank
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
def of_margins() -> co.operators.Linearization:
    return co.linearize(nn.Linear(3, 2).double(), (torch.ones(4, 3).double(), torch.arange(4) % 2), MARGINS)


MARGINS = nn.MultiMarginLoss()

DOORS = [
    Door(
        "options of operators",
        rows={
            "fisher": (lambda: co.KFAC(lin(), fisher="type-2"), "'exact', 'mc'"),
            "mc_samples of a diagonal": (lambda: co.DiagonalGGN(lin(), mc_samples=2), "draws nothing"),
            "index out of range": (lambda: co.Subnetwork(co.GGN(lin()), [0, 26]), "at least 0 and less than 26"),
            "no index": (lambda: co.Subnetwork(co.GGN(lin()), torch.empty(0, dtype=torch.long)), "nothing"),
            "mask of another size": (lambda: co.Subnetwork(co.GGN(lin()), torch.ones(5).bool()), r"\(26,\)"),
            "indices that are real": (lambda: co.Subnetwork(co.GGN(lin()), [0.5]), TypeError, "integers"),
            "blocks that overlap": (lambda: co.BlockDiagonal(lin(), blocks=[["0.*"], ["*.bias"]]), "overlap"),
            "blocks of nothing": (lambda: co.BlockDiagonal(lin(), blocks=[["1.*"]]), "matches no parameter"),
            "a matrix as KFAC's prior": (lambda: co.KFAC(lin()).add_diagonal(torch.eye(26).double()), r"\(D,\)"),
            "a number": (lambda: co.KFAC(lin()) + 0.5, TypeError, r"add_diagonal\(0.5\)"),
            "a Jacobian by its class": (lambda: co.Jacobian(lin()), TypeError, r"lin.jacobian\(x\) makes the Jacobian"),
            "gradients by their class": (lambda: co.Gradients(lin()), TypeError, r"lin.gradients\(\) makes"),
            "a curvature as preconditioner": (
                lambda: co.linalg.cg(co.GGN(lin()), lin().theta, preconditioner=co.KFAC(lin()).add_diagonal(1.0)),
                TypeError,
                r"a Damped of a network approximates A, not A⁻¹: pass as_preconditioner",
            ),
            "no indices": (lambda: co.Subnetwork(co.GGN(lin())), TypeError, "indices"),
            "a vector for Dense": (lambda: Dense(torch.ones(3)), r"\(3,\)"),
            "a matrix for Diagonal": (lambda: Diagonal(torch.eye(3)), r"\(3, 3\)"),
            "values of another rank": (lambda: LowRank(torch.eye(3)[:, :2], torch.ones(3)), r"\(3, 2\)"),
            "blocks beyond the memory budget": (lambda: co.BlockDiagonal(wide()), "co.KFAC"),
        },
    ),
    Door(
        "Hessian",
        rows={
            "a loss without second derivatives": (
                lambda: co.Hessian(of_margins()) @ of_margins().theta,
                RuntimeError,
                r"the loss has no second derivatives.*multi_margin",
            ),
        },
    ),
]
