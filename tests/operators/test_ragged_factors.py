"""Kronecker factors of layers whose rows belong to points unevenly: their formula, and those of an even network."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from tests.network.products import agree
from tests.randomness import seeded

N, T, D = 6, 3, 4


class Tokens(nn.Module):
    """Layers at T positions of each point: in one call for all rows, or with the points as first dimension."""

    order: Tensor | None = None  # of the rows of all points

    def __init__(self, ragged: bool, pooled: bool) -> None:
        super().__init__()
        self.first, self.table, self.head = nn.Linear(D, 5), nn.Embedding(6, D), nn.Linear(4, 3)
        self.conv, self.norm = nn.Conv1d(1, 4, 2), nn.LayerNorm(4)
        self.ragged, self.pooled = ragged, pooled

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        n, t = tokens.shape
        if not self.ragged:
            h = torch.tanh(self.first(x + self.table(tokens)))
            h = torch.stack([torch.tanh(self.conv(h[:, i, None])).mean(2) for i in range(t)], 1)
            h = self.norm(h)
        else:
            order = torch.arange(n * t).flip(0) if self.pooled else torch.arange(n * t).view(n, t).mT.flatten()
            order = self.order[self.order < n * t] if self.order is not None else order
            h = torch.tanh(self.first(x.flatten(0, 1)[order] + self.table(tokens.flatten()[order])))
            h = self.norm(torch.tanh(self.conv(h.unsqueeze(1))).mean(2))
            h = torch.zeros_like(h).index_copy(0, order, h).view(n, t, -1)
        return self.head(torch.relu(h).sum(1) if self.pooled else torch.relu(h))


def networks(pooled: bool) -> list[Tokens]:
    torch.manual_seed(0)
    even, ragged = (Tokens(ragged, pooled).double() for ragged in (False, True))
    ragged.load_state_dict(even.state_dict())
    return [even, ragged]


def data(pooled: bool, what: str) -> Any:
    torch.manual_seed(1)
    inputs = torch.randn(N, T, D).double(), torch.randint(6, (N, T))
    y = torch.randint(3, (N,) if pooled else (N, T))
    if what == "missing":
        y.flatten()[torch.tensor([2] if pooled else [1, 9, 10, 11, 15])] = -100
    if what == "weights":
        return {"inputs": inputs, "targets": y, "weights": torch.rand(N).double() + 0.5}
    return inputs, y


@pytest.mark.parametrize(
    ("pooled", "what"), [(True, "all"), (True, "missing"), (True, "weights"), (False, "all"), (False, "missing")]
)
def test_even_rows_have_the_factors_of_positions(pooled: bool, what: str) -> None:
    """Whatever the order of the rows; they are the positions of the outputs in their order if outputs have some."""
    even, ragged = (co.linearize(model, data(pooled, what), "classification") for model in networks(pooled))
    parameters = [*networks(pooled)[0].named_parameters()]
    assert not ragged.plan.others
    assert sum(layer.is_ragged for layer in ragged.plan.layers) == 4
    kept = torch.cat([p.new_full((p.numel(),), "conv" not in name) for name, p in parameters]).bool()
    if what != "missing" or pooled:  # otherwise the even call of a convolution does not show its position
        kept[:] = True
    for kind in (co.KFAC, co.EKFAC):
        for fisher, sharing in (("exact", "expand"), ("empirical", "reduce"), ("mc", "expand"), ("exact", "reduce")):
            found, expected = (
                kind(lin, fisher, sharing, generator=seeded(2)).to_dense()[kept][:, kept] for lin in (ragged, even)
            )
            assert agree(found, expected)


@pytest.mark.parametrize("what", ["missing", "weights"])
def test_rows_in_any_order_count_as_the_positions_that_depend_on_them(what: str) -> None:
    """As if each position were a point of its own."""
    (even, ragged), (inputs, y) = networks(False), data(False, "missing" if what == "missing" else "all")
    ragged.order = torch.randperm(N * T, generator=torch.Generator().manual_seed(3))
    w = torch.rand(N, T, generator=torch.Generator().manual_seed(4)).double() + 0.5
    singles = tuple(t.flatten(0, 1).unsqueeze(1) for t in inputs)
    weights = {"weights": w} if what == "weights" else {}
    of_rows = co.linearize(ragged, {"inputs": inputs, "targets": y, **weights}, "classification")
    weights = {name: value.view(-1, 1) for name, value in weights.items()}
    of_points = co.linearize(even, {"inputs": singles, "targets": y.view(-1, 1), **weights}, "classification")
    for kind in (co.KFAC, co.EKFAC):
        assert agree(kind(of_rows).to_dense(), kind(of_points).to_dense())


class Atoms(nn.Module):
    """A sum over as many rows as each point has, and an offset of these rows, in which they have derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(D, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, counts: Tensor, offset: Tensor | float = 0.0) -> Tensor:
        mask = torch.arange(x.shape[1]) < counts.unsqueeze(1)
        h = torch.tanh(self.first(x[mask]) + offset)
        return self.head(torch.zeros(len(x), 4).to(x).index_add(0, mask.nonzero()[:, 0], h))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_uneven_rows_have_the_factors_of_their_formula(sharing: str) -> None:
    model, x, counts = Atoms().double(), torch.randn(N, T, D).double(), torch.tensor([1, 3, 0, 2, 3, 2])
    owner = torch.arange(N).repeat_interleave(counts)
    a = torch.cat([x[torch.arange(T) < counts.unsqueeze(1)], torch.ones(len(owner), 1).double()], 1)
    offset = torch.zeros(len(owner), 4).double()
    delta: Any = torch.autograd.functional.jacobian(lambda z: model(x, counts, z), offset)  # (N, 2, rows, 4)
    p = model(x, counts).detach().softmax(1)
    H = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    if sharing == "reduce":  # points with rows: their mean input and the sum of δ over their rows
        share = nn.functional.one_hot(owner, N).double() / counts[owner].double().unsqueeze(1)
        a = (share.mT @ a)[counts > 0]
        delta = delta.sum(2, keepdim=True)
    A = a.mT @ a / len(a)
    B = torch.einsum("ncd,nctp,ndtq->pq", H, delta, delta)
    lin = co.linearize(model, ((x, counts), torch.arange(N) % 2), "classification")
    block = co.KFAC(lin, sharing=sharing).to_dense()[:20, :20]  # weight (4, 4), then bias
    expected = torch.einsum("pq,ij->piqj", B, A)
    weight = expected[:, :D, :, :D].reshape(16, 16)
    assert agree(block[:16, :16], weight)
    assert agree(block[16:, 16:], expected[:, D, :, D])
    assert agree(block[:16, 16:], expected[:, :D, :, D].reshape(16, 4))
