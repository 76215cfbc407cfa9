"""Layers that are called once for all points: the curvature of a dense Jacobian, and the factors of copies.

Tests `rows_of_points.py`.
"""

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from tests.network.products import agree, softmax_hessian
from tests.zoo import dense_jacobian

N, TOKENS, WIDTH, CLASSES = 6, 7, 4, 3
MIXED = {"the first row": lambda rows: rows[0], "sum": lambda rows: rows.sum(0), "mean": lambda rows: rows.mean(0)}
"""What makes one row of all copies, so that no copy is that of a point."""


class Network(nn.Module):
    """Embeddings of tokens plus those of their positions, which are looked up once for all points, in some form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(8, WIDTH)
        self.map, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device)
        if self.form == "copies":
            place = place.expand(len(x), -1)
        elif self.form in ("a row of their own", "squeezed", *MIXED):
            place = place.unsqueeze(0)
        positions = self.positions(place)
        positions = positions.squeeze(0) if self.form == "squeezed" else positions
        positions = MIXED[self.form](positions) if self.form in MIXED else positions
        positions = self.map(positions.tanh()) if self.form == "two layers" else positions
        tokens = self.tokens(x) if self.form == "two layers" else self.map(self.tokens(x))
        return self.out((tokens + positions).tanh().mean(1))


FORMS = ("no row of their own", "a row of their own", "two layers", "squeezed", *MIXED)


def linearized(form: str, batch_size: int = N) -> co.operators.Linearization:
    torch.manual_seed(0)
    x, y = torch.randint(TOKENS, (N, 5)), torch.randint(CLASSES, (N,))
    batches = list(zip(x.split(batch_size), y.split(batch_size)))
    return co.linearize(Network(form).double(), batches, "classification")


LENGTHS = [
    (form, length) for form in FORMS for length in (1, 2, 5, N) if form not in ("sum", "mean") or length in (2, N)
]


@pytest.mark.parametrize(("form", "length"), LENGTHS)
def test_products_and_rows_are_those_of_the_dense_jacobian(form: str, length: int) -> None:
    """As many positions as points, or as points that are probed, are no points."""
    model, x = Network(form).double(), torch.randint(TOKENS, (N, length))
    lin = co.linearize(model, (x, torch.zeros(N, dtype=torch.long)), "classification")
    J, H = dense_jacobian(model, x), softmax_hessian(model(x))
    V = torch.randn(J.shape[1], 2, dtype=J.dtype)
    assert agree(co.GGN(lin) @ V, J.mT @ (H @ (J @ V)))
    assert agree(co.DiagonalGGN(lin).diagonal(), (J.mT @ H @ J).diagonal())
    assert agree(lin.jacobian() @ V, J @ V)
    assert agree(lin.jacobian().to_dense(), J)


@pytest.mark.parametrize("curvature", [co.KFAC, co.EKFAC])
@pytest.mark.parametrize("form", FORMS[:2])
def test_factors_are_those_of_positions_that_are_copied_for_each_point(form: str, curvature: type) -> None:
    shared, copies = linearized(form), linearized("copies")
    assert not shared.plan.others
    assert agree(curvature(shared).to_dense(), curvature(copies).to_dense())


@pytest.mark.parametrize("form", FORMS[:3])
def test_every_layer_has_factors_whatever_the_size_of_the_batches(form: str) -> None:
    whole, batched = linearized(form), linearized(form, batch_size=1)
    assert agree(co.KFAC(whole).to_dense(), co.KFAC(batched).to_dense())
    assert not whole.plan.others and not batched.plan.others


@pytest.mark.parametrize("form", MIXED)
def test_a_layer_whose_copies_do_not_reach_their_points_is_left_to_autodiff(form: str) -> None:
    """The outputs may be the same with copies, but not the rows of the Jacobian."""
    assert linearized(form).plan.others == {"positions.weight": "its layer does not run as a layer"}
