"""The rows of J, kept where outputs are few and parameters have no layer rule, for every curvature that has a root."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import curvops as co
from curvops.network import Sampled
from tests.network.engines.test_reduced import reduced
from tests.network.products import agree, columns, push, walk
from tests.randomness import seeded
from tests.zoo import N

RULELESS = ["function_pair", "lstm", "gru"]


@pytest.mark.parametrize("name", RULELESS)
def test_many_products_of_few_outputs_take_the_rows(name: str) -> None:
    passes = walk(name, "auto", sizes=(N,))
    for _ in range(2):
        push(passes, columns(len(passes.model.theta), 1))
    assert passes.plan.in_use == {"formed": 1}
    assert passes.kept_bytes == N * passes.plan.bytes_needed("formed")
    _, rows, S = reduced(name, "auto")
    V = columns(S.shape[1], 3)
    assert isinstance(rows._fisher, Sampled)
    for _ in range(2):
        assert agree(rows.total(lambda _, s: s.pull(s.push(V)), 3), S.mT @ (S @ V))
    assert rows.plan.in_use == {"formed": 2}


class Molecules(nn.Module):
    """Messages along the edges of small graphs, energies summed over atoms: no layer has a rule."""

    def __init__(self, width: int, outputs: int = 1) -> None:
        super().__init__()
        self.kinds = nn.Parameter(torch.randn(4, width))
        self.messages = nn.Parameter(torch.randn(4, width, 2 * width) / width**0.5)
        self.updates = nn.Parameter(torch.randn(4, width, width) / width**0.5)
        self.energy = nn.Parameter(torch.randn(outputs, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        n, atoms, _ = x.shape
        PASSES.append(n)
        place = x[..., 1:]
        distance = (place.unsqueeze(1) - place.unsqueeze(2)).square().sum(-1)
        molecule, i, j = ((distance < 4) & (distance > 0)).nonzero().unbind(1)
        source, target, near = molecule * atoms + i, molecule * atoms + j, (-distance[molecule, i, j]).exp()
        h = self.kinds[x[..., 0].long().flatten()]
        for message, update in zip(self.messages, self.updates):
            sent = F.silu(F.linear(torch.cat([h[source], h[target]], 1), message)) * near.unsqueeze(1)
            h = h + F.silu(F.linear(torch.zeros_like(h).index_add(0, target, sent), update))
        energies = F.linear(h, self.energy)
        return energies.new_zeros(n, energies.shape[1]).index_add(0, torch.arange(n).repeat_interleave(atoms), energies)


PASSES: list[int] = []
POINTS, ATOMS = 20, 6


def molecules(points: int) -> Tensor:
    return torch.cat([torch.randint(0, 4, (points, ATOMS, 1)), torch.randn(points, ATOMS, 3)], -1).double()


def linearized(width: int = 20) -> co.operators.Linearization:
    torch.manual_seed(0)
    model, x = Molecules(width).double(), molecules(POINTS)
    return co.linearize(model, (x, torch.randn(POINTS, 1).double()), co.likelihoods.Gaussian(noise=0.1))


CURVATURES: dict[str, Callable[[co.operators.Linearization], Any]] = {
    "GGN": co.GGN,
    "Monte-Carlo GGN": lambda lin: co.GGN(lin, mc_samples=1, generator=seeded()),
    "empirical Fisher": co.EmpiricalFisher,
    "KFAC": co.KFAC,
}
CALLS: dict[str, Callable[[Any], object]] = {
    "predict": lambda post: post.predict(molecules(8)).covariance_matrix,
    "draws": lambda post: post.sample(10, seeded()),
    "evidence": lambda post: post.log_evidence(generator=seeded()),
    "maximize": lambda post: co.evidence.maximize(post),
    "linear mode": lambda post: post.linear_mode(),
}


ASKED = [("GGN", call) for call in CALLS] + [
    ("Monte-Carlo GGN", "predict"),
    ("Monte-Carlo GGN", "evidence"),
    ("empirical Fisher", "draws"),
    ("KFAC", "predict"),
]
"""Each call by the GGN; each curvature with a call of its own, of which the linear mode, always the GGN's, is none."""


@pytest.mark.parametrize(("curvature", "call"), ASKED)
def test_twenty_outputs_take_some_passes_whatever_is_asked(
    curvature: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows take as many passes as there are outputs; a solver by products took hundreds to thousands."""
    lin = linearized()
    post = co.laplace(lin, CURVATURES[curvature](lin), 1.0, check_mode=False)
    backward, gradient = list[int](), torch.autograd.grad

    def grad(outputs: Tensor, *given: Any, **options: Any) -> Any:
        backward.append(len(outputs) if outputs.ndim else 0)
        return gradient(outputs, *given, **options)

    PASSES.clear()
    monkeypatch.setattr(torch.autograd, "grad", grad)
    CALLS[call](post)
    gradients = (sum(PASSES) + 2 * sum(backward)) / (3 * POINTS)
    assert gradients <= 60 and len(PASSES) <= 100


@pytest.mark.parametrize("curvature", CURVATURES)
def test_answers_are_those_of_dense_matrices(curvature: str) -> None:
    lin = linearized(width=6)
    J, G = lin.jacobian().formed().mT, CURVATURES[curvature](lin)
    if curvature == "GGN":
        torch.testing.assert_close(G.to_dense(), J.mT @ J / 0.1, rtol=1e-10, atol=1e-10)
    D, x, dense = J.shape[1], molecules(3), G.to_dense()
    P = dense + 2 * torch.eye(D).double()
    rows = lin.jacobian(x).formed().mT
    post = co.laplace(lin, G, 2.0, check_mode=False)
    expected = (rows @ torch.linalg.solve(P, rows.mT)).diagonal()
    assert agree(post.predict(x, rtol=1e-13).variance.flatten(), expected, 1e-9)
    found = post.log_evidence(generator=seeded()).log_determinant_ratio
    assert abs(found.value - (torch.linalg.slogdet(P)[1] - D * math.log(2))) < 1e-8
    mode = torch.linalg.solve(J.mT @ J / 0.1 + 2 * torch.eye(D).double(), lin.gradient() + 2 * lin.theta)
    assert agree(post.linear_mode(rtol=1e-12).theta, lin.theta - mode, 1e-9)
