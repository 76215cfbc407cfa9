"""The Gram matrix of J's rows: by pairs of positions and by rows, in pieces and panels, against J Jᵀ."""

import math
from unittest.mock import patch

import pytest
import torch
from torch import nn

import curvops as co
import curvops.operators.function_space.gram_matrix as gram_matrix
from curvops.network.walks.budget import Budget
from curvops.network.walks.passes import Passes

DOUBLE = torch.float64


class Tokens(nn.Module):
    """Two tokens of sixteen numbers through one wide layer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.out = nn.Linear(16, 24), nn.Linear(48, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.wide(x.unflatten(1, (2, 16))).tanh().flatten(1))


NETWORKS = {
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (8, 2, 2)), nn.Conv2d(8, 16, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)
    ),
    "grouped": lambda: nn.Sequential(
        nn.Unflatten(1, (16, 2)), nn.Conv1d(16, 48, 3, padding=1, groups=2, bias=False), nn.Tanh(), nn.Flatten(),
        nn.Linear(96, 3),
    ),
    "sequence": Tokens,
}  # fmt: skip


@pytest.fixture(params=sorted(NETWORKS))
def lin(request):
    torch.manual_seed(0)
    x = torch.randn(7, 32, dtype=DOUBLE)
    batches = [(x[:4], torch.arange(4) % 3), (x[4:], torch.arange(3))]
    return co.linearize(NETWORKS[request.param]().double(), batches, "classification")


@pytest.mark.parametrize("in_pieces", [False, True])
def test_by_positions(lin, in_pieces, monkeypatch):
    """Each layer has few positions and many weights, and is served so: whole, or a point and a panel at a time."""
    J, x = lin.jacobian().to_dense(), torch.randn(5, 32, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    if in_pieces:
        monkeypatch.setattr(Passes, "chunk_bytes", property(lambda self: 1))
        monkeypatch.setattr(Budget, "room", lambda self: 3 * 2**13)
        monkeypatch.setattr(gram_matrix, "BLOCK_BYTES", 1)
    with patch.object(gram_matrix, "add_row_products", side_effect=AssertionError("by rows")):
        torch.testing.assert_close(co.TangentKernel(lin).to_dense(), J @ J.mT, rtol=1e-10, atol=1e-10)
        other = lin.jacobian(x).to_dense()
        cross = co.TangentKernel(lin, 2.0, x2=x).to_dense()
    torch.testing.assert_close(cross, J @ other.mT / 2, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("room", [None, 3 * 2**13, 0])
def test_by_rows_is_the_same(lin, monkeypatch, room):
    """All channels at once, some of them and some points' inputs, and one channel and the inputs of one point."""
    expected, vector = co.TangentKernel(lin).to_dense(), torch.rand(lin.num_parameters, dtype=DOUBLE) + 0.5
    J = lin.jacobian().to_dense()
    x = torch.randn(5, 32, dtype=DOUBLE)
    monkeypatch.setattr(gram_matrix, "pays_by_positions", lambda *_: False)
    if room is not None:
        monkeypatch.setattr(Budget, "room", lambda self: room)
    torch.testing.assert_close(co.TangentKernel(lin).to_dense(), expected, rtol=1e-10, atol=1e-10)
    cross, other = co.TangentKernel(lin, vector, x2=x).to_dense(), lin.jacobian(x).to_dense()
    torch.testing.assert_close(cross, (J / vector) @ other.mT, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(co.TangentKernel(lin, vector).to_dense(), (J / vector) @ J.mT, rtol=1e-10, atol=1e-10)


def test_terms_add_up_to_the_matrix(lin):
    """One of all weights, one of all biases; the weights of one layer, and all else."""
    J, selection = lin.jacobian(), lin.model.selection
    for term_of in (
        {name: int(name.endswith("bias")) for name in selection.names},
        {name: int(name == selection.names[0]) for name in selection.names},
    ):
        found = gram_matrix.gram_terms(J, J, torch.tensor(2.0, dtype=DOUBLE), term_of)
        for term, matrix in enumerate(found):
            masks = {
                name: torch.full(shape, float(term_of[name] == term))
                for name, shape in zip(selection.names, selection.shapes)
            }
            own = J.to_dense() * selection.flatten(masks).to(DOUBLE)
            torch.testing.assert_close(matrix, own @ own.mT / 2, rtol=1e-10, atol=1e-10)


def test_a_panel_is_walked_over_once(lin, monkeypatch):
    """One walk where all rows fit; two panels walk over the rest once more."""
    walks = []
    whole = Passes.jacobian_rows

    def counted(self, least=0):
        walks.append(least)
        return whole(self, least)

    monkeypatch.setattr(Passes, "jacobian_rows", counted)
    co.TangentKernel(lin).to_dense()
    assert walks == [0, 21]
    walks.clear()
    monkeypatch.setattr(Budget, "room", lambda self: 0)
    co.TangentKernel(lin).to_dense()
    assert walks == [0, 12, 21]


def test_the_cost():
    """t²(q + C²(p + 8)) multiply-adds a pair of points for a layer of t positions, p × q weights and C columns."""
    lin = co.linearize(Tokens(), (torch.randn(7, 32), torch.arange(7) % 3), "classification")
    pairs = 2**2 * (17 + 9 * (24 + 8)) + (49 + 9 * (3 + 8))
    forward = 2 * 16 * 24 + 48 * 3
    assert gram_matrix.gram_cost(lin.plan, 7) == pytest.approx((1 + 2 * 3) / 3 + 7 * pairs / (6 * forward))


def test_the_cost_is_unknown_without_a_rule():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.scale

    lin = co.linearize(Scaled(), (torch.randn(4, 3), torch.arange(4) % 3), "classification")
    assert gram_matrix.gram_cost(lin.plan, 4) == math.inf


def test_a_prior_by_layers_is_that_vector():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 1)).double()
    lin = co.linearize(model, (torch.randn(4, 3).double(), torch.randn(4, 1).double()), "regression")
    vector = torch.cat([torch.full((8,), 2.0), torch.tensor([3.0, 4.0]), torch.full((1,), 5.0)]).double()
    given = {"0.*": 2.0, "2.weight": torch.tensor([[3.0, 4.0]]), "2.bias": 5}
    torch.testing.assert_close(
        co.TangentKernel(lin, given).to_dense(), co.TangentKernel(lin, vector).to_dense(), rtol=1e-12, atol=0
    )
    with pytest.raises(ValueError, match="no glob matches"):
        co.TangentKernel(lin, {"0.*": 2.0})


def test_a_kernel_in_another_dtype_stays_symmetric():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    lin = co.linearize(model, (torch.randn(6, 3), torch.arange(6) % 2), "classification")
    for kernel in (co.TangentKernel(lin), co.TangentKernel(lin, 2.0, x=torch.randn(3, 3), x2=torch.randn(2, 3))):
        single = kernel.to(torch.float32)
        assert single.psd == kernel.psd and single.symmetric == kernel.symmetric and single.dtype == torch.float32
        torch.testing.assert_close(single.to_dense().double(), kernel.to_dense(), rtol=1e-4, atol=1e-4)
    P = co.TangentKernel(lin).to(torch.float32).add_diagonal(1.0)
    b = torch.ones(P.shape[-1])
    torch.testing.assert_close(P @ P.solve(b), b, rtol=1e-4, atol=1e-4)
