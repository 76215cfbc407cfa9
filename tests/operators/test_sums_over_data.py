"""Every sum over data ends in `Passes.add_up`, once: where that gives twice the sum, operators are twice as large.

Tests `curvature.py`, `output_fisher.py`, `row_squares.py`, `second_derivatives.py`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from curvops.network.likelihoods.output_fisher import Exact
from curvops.network.walks.passes import Passes
from curvops.network.walks.row_squares import squared_columns
from curvops.operators.curvatures.curvature import CurvatureRoot
from curvops.operators.curvatures.ggn import DisplacedGGN
from curvops.operators.kfac.kfac_factors import kfac_blocks

N, C = 30, 2


class Scaled(nn.Module):
    """A layer without a rule: its block of KFAC is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def dense(seed: int = 0) -> co.operators.Linearization:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, C), Scaled()).double()
    x, y = torch.randn(N, 3).double(), torch.randn(N, C).double()
    parts = [(a, b) for a, b in zip(x.split(7), y.split(7))]
    return co.linearize(model, parts, co.likelihoods.Gaussian(0.5))


def tokens(seed: int = 0) -> co.operators.Linearization:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, C)).double()
    x, y = torch.randint(5, (N, 2)), torch.randint(C, (N,))
    return co.linearize(model, [(a, b) for a, b in zip(x.split(7), y.split(7))], "classification")


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def factors(lin: co.operators.Linearization) -> Tensor:
    """B ⊗ A / count: each of the three is a sum over data."""
    blocks = kfac_blocks(lin, Exact(lin.likelihood), "expand", "joint")
    return torch.cat([block.operator.to_dense().flatten() for block in blocks])


SUMS: dict[str, Callable[[co.operators.Linearization], Any]] = {
    "GGN": lambda lin: co.GGN(lin).to_dense(),
    "GGN diagonal": lambda lin: co.GGN(lin).diagonal(),
    "Monte-Carlo Fisher": lambda lin: co.GGN(lin, mc_samples=2, generator=generator()).to_dense(),
    "empirical Fisher": lambda lin: co.EmpiricalFisher(lin).to_dense(),
    "diagonal GGN": lambda lin: co.DiagonalGGN(lin).diagonal(),
    "Hessian": lambda lin: co.Hessian(lin).to_dense(),
    "KFAC": factors,
    "EKFAC": lambda lin: co.EKFAC(lin).diagonal(),
    "subnetwork by pushes": lambda lin: co.Subnetwork(co.GGN(lin), [0, 3]).to_dense(),
    "subnetwork by rows": lambda lin: co.Subnetwork(co.GGN(lin), torch.arange(9)).to_dense(),
    "block diagonal": lambda lin: co.BlockDiagonal(lin).to_dense(),
    "Jᵀ": lambda lin: lin.jacobian().mT @ torch.ones(N * C, 2).double(),
    "diagonal of JᵀJ": lambda lin: squared_columns(lin.jacobian().passes),
    "gradient": lambda lin: lin.gradient(),
    "gradients, transposed": lambda lin: lin.gradients().mT @ torch.ones(N, 2).double(),
    "root": lambda lin: CurvatureRoot.of(co.GGN(lin))._matmul(torch.ones(N * C, 2).double()),
    "root of rows": lambda lin: CurvatureRoot.of(co.EmpiricalFisher(lin))._matmul(torch.ones(N, 2).double()),
    "log-likelihood": lambda lin: lin.log_likelihood(),
    "displaced GGN": lambda lin: DisplacedGGN.at(lin, torch.ones(N, C).double()).to_dense(),
    "displaced gradient": lambda lin: DisplacedGGN.at(lin, torch.ones(N, C).double()).gradient(),
    "displaced log-likelihood": lambda lin: DisplacedGGN.at(lin, torch.ones(N, C).double()).log_likelihood(),
    "draw": lambda lin: co.linalg.draw(co.GGN(lin), 3, generator()),
}
ROWS: dict[str, Callable[[co.operators.Linearization], Any]] = {
    "J": lambda lin: lin.jacobian() @ torch.ones(lin.num_parameters, 2).double(),
    "gradients": lambda lin: lin.gradients() @ torch.ones(lin.num_parameters, 2).double(),
    "rootᵀ": lambda lin: CurvatureRoot.of(co.GGN(lin))._t_matmul(torch.ones(lin.num_parameters, 2).double()),
    "J formed": lambda lin: lin.jacobian().formed().mT,
    "outputs": lambda lin: lin.outputs(),
}


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    add_up = Passes.add_up
    return lambda: monkeypatch.setattr(Passes, "add_up", lambda self, parts, *rest: 2 * add_up(self, parts, *rest))


@pytest.mark.parametrize("problem", [dense, tokens])
@pytest.mark.parametrize("name", SUMS)
def test_each_sum_over_data_ends_at_one_place(name: str, problem: Any, doubled: Callable[[], None]) -> None:
    before = SUMS[name](problem())
    doubled()
    torch.testing.assert_close(SUMS[name](problem()), 2 * before, rtol=1e-12, atol=1e-12)
    assert bool((before != 0).any())


@pytest.mark.parametrize("name", ["GGN diagonal", "KFAC"])
def test_the_log_likelihood_of_a_walk_over_rows_ends_there_too(name: str, doubled: Callable[[], None]) -> None:
    before = dense().log_likelihood()
    doubled()
    lin = dense()
    SUMS[name](lin)
    with torch.no_grad():
        torch.testing.assert_close(lin.log_likelihood(), 2 * before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ROWS)
def test_each_row_over_data_ends_at_one_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, line_up = ROWS[name](dense()), Passes.line_up
    monkeypatch.setattr(Passes, "line_up", lambda self, parts, *rest: line_up(self, [*parts, *parts], *rest))
    torch.testing.assert_close(ROWS[name](dense()), torch.cat([before, before]), rtol=1e-12, atol=1e-12)
    assert bool((before != 0).any())


def test_rows_that_a_kronecker_factor_keeps_are_those_of_all_data(
    monkeypatch: pytest.MonkeyPatch, doubled: Callable[[], None]
) -> None:
    """Two equal shards: few points, whose rows are kept in place of their sum."""
    torch.manual_seed(0)
    model = nn.Linear(9, 8).double()
    lin = co.linearize(
        model, (torch.randn(3, 9).double(), torch.randn(3, 8).double()), co.likelihoods.Gaussian(noise=1.0)
    )
    before, line_up = factors(lin), Passes.line_up
    doubled()
    monkeypatch.setattr(Passes, "line_up", lambda self, parts, *rest: line_up(self, [*parts, *parts], *rest))
    torch.testing.assert_close(factors(lin), 2 * before, rtol=1e-12, atol=1e-12)
