"""Layers whose rows belong to points unevenly: the same curvature as by a dense Jacobian, from the layer rules.

Tests `ragged_rows.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import curvops as co
from tests.zoo import dense_jacobian

N, T, D = 10, 4, 3
LENGTHS = {
    "uneven": [2, 4, 1, 3, 2, 0, 3, 1, 4, 2],
    "as many as points by chance": [1, 1, 0, 2, 1, 1, 3, 0, 0, 1],
    "even": [3] * N,
}


class Network(nn.Module):
    """Layers of the names used below, and `run`, which calls them on padded inputs and the length of each."""

    def __init__(self, run: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        return self.run(self, x, length)


def inside(x: Tensor, length: Tensor) -> Tensor:
    return torch.arange(x.shape[1]) < length.unsqueeze(1)


def summed(rows: Tensor, mask: Tensor) -> Tensor:
    return rows.new_zeros(len(mask), *rows.shape[1:]).index_add(0, mask.nonzero()[:, 0], rows)


def masked(m: Any, x: Tensor, length: Tensor) -> Tensor:
    mask = inside(x, length)
    return m.head(summed(torch.tanh(m.norm(m.first(x[mask]))), mask))


def packed(m: Any, x: Tensor, length: Tensor) -> Tensor:
    rows = pack_padded_sequence(x, length.clamp_min(1), batch_first=True, enforce_sorted=False)
    h, _ = pad_packed_sequence(rows._replace(data=torch.tanh(m.first(rows.data))), batch_first=True)
    return m.head(h.sum(1))


def graph(m: Any, x: Tensor, length: Tensor) -> Tensor:
    """Messages along all edges of each graph, twice; the last layer is on atoms."""
    mask = inside(x, length)
    h, owner = torch.tanh(m.first(x[mask])), mask.nonzero()[:, 0]
    source, target = ((owner.unsqueeze(1) == owner) & ~torch.eye(len(owner), dtype=torch.bool)).nonzero().unbind(1)
    for _ in range(2):
        messages = F.softplus(m.edge(torch.cat([h[source], h[target]], 1)))
        h = m.norm(h + torch.zeros_like(h).index_add(0, target, messages))
    return summed(torch.relu(m.head(h)), mask)


def bags(m: Any, tokens: Tensor, length: Tensor) -> Tensor:
    mask = inside(tokens, length)
    flat, offsets = tokens[mask], length.cumsum(0) - length
    weights = torch.cos(flat.double()) if m.bag.mode == "sum" else None
    h = m.bag(flat, offsets, per_sample_weights=weights) + summed(m.table(flat).square(), mask)
    return m.head(torch.tanh(h))


def frames(m: Any, x: Tensor, length: Tensor) -> Tensor:
    """Images of a video in one batch."""
    mask = inside(x, length)
    h = m.norm(m.second(torch.tanh(m.first(x[mask]))))
    return m.head(summed(torch.tanh(h).mean((2, 3)), mask))


def sizes(m: Any, x: Tensor, length: Tensor) -> Tensor:
    """Images one by one, since their sizes differ."""
    images = [image[:, : 3 + i, : 4 + i] for image, i in zip(x[:, 0], length.tolist())]
    pooled = [F.adaptive_avg_pool2d(m.norm(m.second(torch.tanh(m.first(image[None])))), 1) for image in images]
    return m.head(torch.cat(pooled).flatten(1))


def positions_first(m: Any, x: Tensor, length: Tensor) -> Tensor:
    return m.head(m.encoder(m.first(x.mT.permute(2, 0, 1))).mean(0))


def experts(m: Any, x: Tensor, length: Tensor) -> Tensor:
    """One expert for each point, by the sign of its first number; the first two points call both."""
    h = x.new_zeros(len(x), 4)
    for expert, chosen in ((m.first, x[:, 0, 0] > 0), (m.second, x[:, 0, 0] <= 0)):
        points = chosen.nonzero()[:, 0]
        h = h.index_add(0, points, torch.tanh(expert(x[points, 0]))) if len(points) else h
    return m.head(h)


def _vectors() -> Tensor:
    x = torch.randn(N, T, D)
    x[:2, 0, 0] = torch.tensor([1.0, -1.0])
    return x


def _tokens() -> Tensor:
    return torch.randint(0, 6, (N, T))


def _images() -> Tensor:
    return torch.randn(N, T, 2, 7, 8)


def _linear(run: Callable[..., Tensor], norm: Callable[[int], nn.Module] = lambda _: nn.Identity()) -> nn.Module:
    return Network(run, first=nn.Linear(D, 4), norm=norm(4), head=nn.Linear(4, 2))


def _graph() -> nn.Module:
    layers = {"first": nn.Linear(D, 4), "edge": nn.Linear(8, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 2)}
    return Network(graph, **layers)


def _bags(mode: str) -> nn.Module:
    bag = nn.EmbeddingBag(6, 3, mode=mode, padding_idx=0)
    return Network(bags, bag=bag, table=nn.Embedding(6, 3), head=nn.Linear(3, 2))


def _convolutions(run: Callable[..., Tensor]) -> nn.Module:
    first, second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 2, groups=2, bias=False)
    return Network(run, first=first, second=second, norm=nn.BatchNorm2d(4), head=nn.Linear(4, 2))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0)
    return Network(positions_first, first=nn.Linear(D, 4), encoder=layer, head=nn.Linear(4, 2))


def _experts() -> nn.Module:
    return Network(experts, first=nn.Linear(D, 4), second=nn.Linear(D, 4), head=nn.Linear(4, 2))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "masked": (lambda: _linear(masked), _vectors),
    "layer norm": (lambda: _linear(masked, nn.LayerNorm), _vectors),
    "batch norm": (lambda: _linear(masked, nn.BatchNorm1d), _vectors),
    "packed": (lambda: _linear(packed), _vectors),
    "graph": (_graph, _vectors),
    "bag, mean": (lambda: _bags("mean"), _tokens),
    "bag, weighted sum": (lambda: _bags("sum"), _tokens),
    "frames": (lambda: _convolutions(frames), _images),
    "images of other sizes": (lambda: _convolutions(sizes), _images),
    "positions first": (_encoder, _vectors),
    "experts": (_experts, _vectors),
}


def problem(name: str, lengths: str) -> tuple[nn.Module, tuple[Tensor, Tensor], Tensor]:
    torch.manual_seed(0)
    make, data = MODELS[name]
    inputs = data()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    return make().double().eval(), (inputs, torch.tensor(LENGTHS[lengths])), torch.arange(N) % 2


def in_batches(inputs: tuple[Tensor, Tensor], y: Tensor, size: int) -> list[Any]:
    return [(tuple(t[i : i + size] for t in inputs), y[i : i + size]) for i in range(0, N, size)]


def same(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).abs().max() <= 1e-10 * expected.abs().max())


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", MODELS)
def test_curvatures_are_those_of_the_dense_jacobian(name: str, lengths: str) -> None:
    model, inputs, y = problem(name, lengths)
    J = dense_jacobian(model, inputs)
    p = model(*inputs).detach().softmax(1)
    H = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    rows = J.unflatten(0, (N, 2))
    G = torch.einsum("ncd,nce,nef->df", rows, H, rows)
    for size in (N, 3):
        lin = co.linearize(model, in_batches(inputs, y, size), "classification", engine="layerwise")
        assert not lin.plan.others
        assert same(co.GGN(lin).to_dense(), G)
        assert same(co.DiagonalGGN(lin).diagonal(), G.diagonal())
        assert same(co.TangentKernel(lin).to_dense(), J @ J.mT)
        assert same(lin.jacobian(tuple(t[3:8] for t in inputs)).to_dense(), J[6:16])
        kfac, ekfac = co.KFAC(lin), co.EKFAC(lin)
        K, E = kfac.to_dense(), ekfac.to_dense()
        blocks = (K != 0).any(0).double().diag()  # parameters that the data reach
        for power in (0, 1, 2):  # the eigenbasis of KFAC diagonalises EKFAC, whose eigenvalues are the GGN's there
            of_K = torch.linalg.matrix_power(K, power) if power else blocks
            assert same((of_K @ E).trace(), (of_K @ G).trace())
