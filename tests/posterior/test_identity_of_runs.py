"""A checkpoint of a long run is refused, by name, for another network or another likelihood."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import curvops as co
from tests.randomness import seeded

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)).double(), torch.arange(12) % 3


class Net(nn.Module):
    """A network with an activation of its own."""

    def __init__(self, layer: nn.Module | None = None, function: Any = torch.sin, scale: float = 1.0) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(4, 5), nn.Tanh() if layer is None else layer, nn.Linear(5, 3)
        self.function, self.scale = function, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scale * self.function(self.layer(self.first(x))))


def one_loss(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f, y, reduction="none")


def another_loss(f: Tensor, y: Tensor) -> Tensor:
    return 2 * F.cross_entropy(f, y, reduction="none")


def lin(likelihood: Any = None, **given: Any) -> co.operators.Linearization:
    torch.manual_seed(0)
    likelihood = co.likelihoods.FromLoss(one_loss) if likelihood is None else likelihood
    return co.linearize(Net(**given).double(), (X, Y), likelihood)


D = lin().num_parameters
OTHERS: dict[str, tuple[str, Callable[[], co.operators.Linearization]]] = {
    "an activation": ("the network's modules", lambda: lin(layer=nn.Softsign())),
    "a function": ("the network's modules", lambda: lin(function=F.gelu)),
    "a number": ("the network's modules", lambda: lin(scale=1.5)),
    "a loss": ("the likelihood", lambda: lin(co.likelihoods.FromLoss(another_loss))),
    "class weights": (
        "the likelihood",
        lambda: lin(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]).double())),
    ),
    "smoothing": ("the likelihood", lambda: lin(nn.CrossEntropyLoss(label_smoothing=0.1))),
}


def laplace(at: co.operators.Linearization) -> co.posterior.Laplace:
    return co.laplace(at, co.linalg.Dense(torch.eye(D).double(), psd=True), 1.0, check_mode=False)


def exact(at: co.operators.Linearization) -> co.posterior.Laplace:
    return co.laplace(at, co.GGN, 1.0, check_mode=False)


RUNS: dict[str, Callable[[co.operators.Linearization, Path], Any]] = {
    "KFAC": lambda at, folder: co.KFAC(at, checkpoint=folder),
    "EKFAC": lambda at, folder: co.EKFAC(at, fisher="empirical", checkpoint=folder),
    "deviations": lambda at, folder: laplace(at).deviations(2, generator=seeded(), checkpoint=folder).draws,
    "linear mode": lambda at, folder: exact(at).linear_mode(checkpoint=folder).theta,
    "mackay": lambda at, folder: co.evidence.mackay(exact(at), 2, steps=1, generator=seeded(), checkpoint=folder).mean,
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_another_network_or_likelihood_is_refused_by_name(run: str, tmp_path: Path) -> None:
    """Each run compares its network and its likelihood; in one way, so that one run meets all the others."""
    RUNS[run](lin(), tmp_path)
    RUNS[run](lin(), tmp_path)
    for what, other in OTHERS.values() if run == "KFAC" else (OTHERS["a number"], OTHERS["a loss"]):
        with pytest.raises(ValueError, match=f"another problem. What differs: .*{what}"):
            RUNS[run](other(), tmp_path)
