"""curvlinops beside us: the same Kronecker factors, which have no dense definition, in float32.

Both sum over the data (`reduction="sum"`), order parameters alike and, told so, put weight and bias in one block.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import curvlinops
import pytest
import torch
from torch import Tensor, nn

import curvops as co
from tests.randomness import seeded
from tests.zoo import ZOO

N = 24
FISHER = {"exact": "type-2", "mc": "mc", "empirical": "empirical"}


class Residual(nn.Module):
    """Strided convolutions, GroupNorm and a skip. One group: its null space under *reduce* has one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.norm, self.shortcut, self.head = nn.GroupNorm(1, 4), nn.Conv2d(4, 4, 1, stride=2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        return self.head(torch.relu(self.norm(self.conv(x)) + self.shortcut(x)).mean((2, 3)))


class Attention(nn.Module):
    """Two heads without the fused kernel, which curvlinops cannot push vectors through."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.head = nn.Linear(4, 12), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        h = (q @ k.mT / 2**0.5).softmax(-1) @ v
        return self.head(torch.tanh(self.out(h.transpose(1, 2).flatten(2))).mean(1))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(4, 5, 2, (2, 1), (1, 0), dilation=(1, 2)),
        nn.ReLU(), nn.Flatten(), nn.Linear(30, 3),
    )  # fmt: skip


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (ZOO["mlp"].make, (4,)),
    "cnn": (_cnn, (2, 8, 8)),
    "groupnorm": (Residual, (2, 6, 6)),
    "attention": (Attention, (3, 4)),
}
LABELS = torch.arange(N) % 3
EVENTS = (torch.arange(3 * N).reshape(N, 3) % 2).float()
LOSSES: dict[str, tuple[nn.Module, Tensor]] = {
    "cross-entropy": (nn.CrossEntropyLoss(reduction="sum"), LABELS),
    "squares": (nn.MSELoss(reduction="sum"), torch.linspace(-1, 1, 3 * N).reshape(N, 3)),
    "events": (nn.BCEWithLogitsLoss(reduction="sum"), EVENTS),
}
PLAIN = [*((name, "cross-entropy") for name in NETWORKS), ("cnn", "squares"), ("cnn", "events")]


class Problem:
    """A network with its loss and data, as both libraries take them, without norms, which their KFAC refuses."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        shape: tuple[int, ...],
        loss: str = "cross-entropy",
        dtype: torch.dtype = torch.float32,
        batch: int = N,
        points: int = N,
    ) -> None:
        module, targets = LOSSES[loss]
        self.loss = copy.deepcopy(module).to(dtype)
        self.model = make().to(dtype)
        self.x = torch.randn(points, *shape).to(dtype)
        y = targets.repeat(points // N, *[1] * (targets.ndim - 1))
        self.y = y.to(dtype) if y.is_floating_point() else y
        self.data = list(zip(self.x.split(batch), self.y.split(batch)))
        named = {k: p for k, p in self.model.named_parameters() if "norm" not in k}
        self.parameters = list(named.values())
        self.lin = co.linearize(self.model, self.data, self.loss, parameters=list(named))

    def theirs(self, operator: Any, fisher: str, sharing: str = "expand") -> Tensor:
        """Its KFAC or EKFAC as a matrix, with our words for the options and one block for weight and bias."""
        kinds = {"fisher_type": FISHER[fisher], "kfac_approx": sharing, "separate_weight_and_bias": False}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = operator(self.model, self.loss, self.parameters, self.data, **kinds)
        return found @ torch.eye(self.lin.num_parameters, dtype=self.lin.theta.dtype)

    def drawn_labels(self) -> Tensor:
        """The classes (1, N) that ours draws: of a residual p − e, only the drawn class's entry is negative."""
        G = co.GGN(self.lin, mc_samples=1, generator=seeded(1))
        return G._kwargs["draws"].argmin(-1)


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative, in Frobenius norm."""
    return float((found.detach() - expected.detach()).norm() / expected.norm())


def let_it_draw(monkeypatch: pytest.MonkeyPatch, labels: Tensor) -> None:
    """curvlinops draws labels by `Tensor.multinomial`: from now on that gives these, (M, N)."""
    monkeypatch.setattr(Tensor, "multinomial", lambda *args, **options: labels.mT)


@pytest.mark.parametrize(
    ("name", "loss", "fisher"),
    [*((*row, "exact") for row in PLAIN), *((*row, "empirical") for row in PLAIN if {"cnn", "attention"} & {*row})],
)
def test_factored_curvatures_agree(name: str, loss: str, fisher: str) -> None:
    problem = Problem(*NETWORKS[name], loss, batch=16)
    for sharing in ("expand", "reduce"):
        theirs = problem.theirs(curvlinops.KFACLinearOperator, fisher, sharing)
        assert distance(co.KFAC(problem.lin, fisher=fisher, sharing=sharing).to_dense(), theirs) < 1e-5
    theirs = problem.theirs(curvlinops.EKFACLinearOperator, fisher)
    assert distance(co.EKFAC(problem.lin, fisher=fisher).to_dense(), theirs) < 1e-5


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("name", ["cnn", "groupnorm"])
def test_eigenvalue_corrections_of_reduced_factors_agree(name: str, fisher: str) -> None:
    """In float64: second moments of whole rows depend on a reduced basis, which float32 fixes to eps / gap alone.

    Attention has no such basis: its keys' sensitivities add up to zero, and a null space has any.
    """
    problem = Problem(*NETWORKS[name], dtype=torch.float64, points=2 * N)
    theirs = problem.theirs(curvlinops.EKFACLinearOperator, fisher, "reduce")
    assert distance(co.EKFAC(problem.lin, fisher=fisher, sharing="reduce").to_dense(), theirs) < 1e-10


@pytest.mark.parametrize("name", NETWORKS)
def test_sampled_factors_agree_on_the_same_labels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(*NETWORKS[name])
    ours = [kind(problem.lin, fisher="mc", generator=seeded(1)).to_dense() for kind in (co.KFAC, co.EKFAC)]
    let_it_draw(monkeypatch, problem.drawn_labels())
    for dense, theirs in zip(ours, (curvlinops.KFACLinearOperator, curvlinops.EKFACLinearOperator)):
        assert distance(dense, problem.theirs(theirs, "mc")) < 1e-5
