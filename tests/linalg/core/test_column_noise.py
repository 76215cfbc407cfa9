"""Noise by columns: draws do not depend on how many there are.

Tests `draws.py`.
"""

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from curvops.linalg import draw
from curvops.linalg.operators import ColumnNoise
from tests.linalg.known import Rooted
from tests.randomness import seeded

N = 12


def operators() -> dict[str, co.linalg.Operator]:
    torch.manual_seed(0)
    A, root = torch.randn(N, N, dtype=torch.float64), torch.randn(N, 3, dtype=torch.float64)
    x, y = torch.randn(6, 2, dtype=torch.float64), torch.arange(6) % 2
    lin = co.linearize(nn.Linear(2, 2).double(), (x, y), "classification")
    dense, low = co.linalg.Dense(A @ A.mT, psd=True), co.linalg.LowRank(root, torch.ones(3, dtype=torch.float64))
    kfac = co.KFAC(lin)
    return {
        "dense": dense,
        "a sum": dense + low,
        "a low rank and a diagonal": low.add_diagonal(torch.linspace(1, 2, N, dtype=torch.float64)),
        "its inverse": low.add_diagonal(torch.linspace(1, 2, N, dtype=torch.float64)).inverse(),
        "a product": dense @ low @ dense,
        "GGN": co.GGN(lin),
        "GGN and a diagonal": co.GGN(lin).add_diagonal(0.5),
        "empirical Fisher": co.EmpiricalFisher(lin),
        "KFAC": kfac,
        "KFAC and GGN": 0.3 * co.GGN(lin) + kfac,
        "inverse of KFAC": kfac.add_diagonal(0.5).inverse(),
        "tangent kernel": co.TangentKernel(lin, 2.0),
        "tangent kernel and noise": co.TangentKernel(lin, 2.0).add_diagonal(0.5),
        "blocks": co.linalg.DirectSum(dense, low, positions=(torch.arange(N), torch.arange(N, 2 * N))),
        "a part": dense[2:5, 2:5],
    }


@pytest.mark.parametrize("name", operators())
def test_draws_do_not_depend_on_how_many_there_are(name: str) -> None:
    whole = draw(operators()[name], 5, seeded(3))
    fewer = draw(operators()[name], 3, seeded(3))
    torch.testing.assert_close(fewer, whole[:, :3], rtol=1e-10, atol=1e-12)


def test_columns_are_independent_and_standard_normal() -> None:
    """Of 4,096 numbers the means of products are within 5 standard errors: false alarms in 1e-3 of seeds."""
    rows = torch.empty(64, 4096, dtype=torch.float64)
    source = ColumnNoise.of(seeded(3), 64, torch.device("cpu"))
    source.fill(rows)
    again = torch.empty_like(rows)
    source.fill(again)
    both = torch.cat([rows, again])
    gram = both @ both.mT / both.shape[1] - torch.eye(len(both), dtype=both.dtype)
    assert float(gram.abs().max()) < 5 * 2**0.5 / both.shape[1] ** 0.5
    assert float(both.mean(1).abs().max()) < 5 / both.shape[1] ** 0.5


def test_an_operator_of_yours_draws_from_it_as_from_a_generator() -> None:
    S = torch.randn(N, N, dtype=torch.float64, generator=seeded(3))
    A = Rooted(S @ S.mT)
    assert torch.equal(draw(A, 5, seeded(3)), draw(A, 5, seeded(3)))
    assert not torch.equal(draw(A, 5, seeded(3)), draw(A, 5, seeded(4)))
    assert len({tuple(column) for column in draw(A, 6, seeded(3)).mT.tolist()}) == 6


def test_without_a_generator_draws_follow_torchs_own_seed() -> None:
    A = operators()["dense"]

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return draw(A, 2)

    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(1), drawn(2))
