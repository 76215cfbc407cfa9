"""Layers whose rows belong to points unevenly: the same curvature as by a dense Jacobian, from the layer rules.

Tests `rows_of_points.py`.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import curvops as co
from tests.network.products import agree, require_curvature, softmax_hessian
from tests.zoo import dense_jacobian

N, T, D = 8, 4, 3
LENGTHS = {"uneven": [2, 4, 1, 3, 0, 3, 1, 2], "as many as points by chance": [1, 1, 0, 2, 1, 3, 0, 0], "even": [3] * N}


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


CASES = [(name, "uneven") for name in MODELS if name != "masked"]  # "layer norm" is the same, and a norm
CASES += [(name, "as many as points by chance") for name in ("masked", "graph", "bag, mean", "frames")]
CASES += [(name, "even") for name in ("layer norm", "packed", "frames")]


@pytest.mark.parametrize(("name", "lengths"), CASES)
def test_curvatures_are_those_of_the_dense_jacobian(name: str, lengths: str) -> None:
    model, inputs, y = problem(name, lengths)
    J = dense_jacobian(model, inputs)
    H = softmax_hessian(model(*inputs))
    G = J.mT @ H @ J
    size = N if lengths == "even" else 3
    lin = co.linearize(model, in_batches(inputs, y, size), "classification", engine="layerwise")
    require_curvature(lin, J, H, times=1)
    assert agree(co.TangentKernel(lin).to_dense(), J @ J.mT)
    assert agree(lin.jacobian(tuple(t[3:] for t in inputs)).to_dense(), J[6:])
    K, E = co.KFAC(lin).to_dense(), co.EKFAC(lin).to_dense()
    reached = (K != 0).any(0).double().diag()  # parameters on which outputs depend
    for power in (reached, K, K @ K):  # KFAC's eigenbasis is EKFAC's, whose eigenvalues are the GGN's entries there
        assert agree((power @ E).trace(), (power @ G).trace())
    assert not lin.plan.others  # after the checks, which leave a wrong rule to autodiff


def test_one_point_with_most_of_the_rows() -> None:
    """Its batch is taken in parts, whose tables differ in width."""
    model, n = _linear(masked, nn.LayerNorm).double().eval(), 18
    inputs = torch.randn(n, 60, D).double(), torch.ones(n, dtype=torch.long).index_fill(0, torch.tensor(4), 60)
    J = dense_jacobian(model, inputs)
    lin = co.linearize(model, (inputs, torch.arange(n) % 2), "classification", engine="layerwise")
    assert agree(lin.jacobian().to_dense(), J)
    assert agree(co.TangentKernel(lin).to_dense(), J @ J.mT)
    covariance = co.laplace(lin, co.DiagonalGGN, 1.0, check_mode=False).predict(inputs).covariance_matrix
    rows, variances = J.unflatten(0, (n, 2)), 1 / (co.DiagonalGGN(lin).diagonal() + 1)
    assert agree(covariance, torch.einsum("ncd,d,ned->nce", rows, variances, rows))


class Graphs:
    """A batch that only the model can read: the atoms of all graphs, and the graph of each."""

    def __init__(self, atoms: Tensor, owners: Tensor, count: int) -> None:
        self.atoms, self.owners, self.count = atoms, owners, count


class Atoms(nn.Module):
    """A sum over the atoms of each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(D, 4), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, batch: Graphs) -> Tensor:
        h = torch.tanh(self.norm(self.first(batch.atoms)))
        return self.head(h.new_zeros(batch.count, 4).index_add(0, batch.owners, h))


GRAPHS = {
    "uneven": ([2, 1, 3, 0, 2], [1] * 11 + [40]),
    "first even, then as many atoms as graphs by chance": ([1] * 4, [0, 2, 1, 1], [3, 1, 2]),
    "as many atoms as graphs by chance": ([1, 1, 0, 2], [1, 2, 3], [1] * 4),
}


@pytest.mark.parametrize("sizes", GRAPHS.values(), ids=GRAPHS)
def test_batches_of_graphs_that_cannot_be_taken_apart(sizes: tuple[list[int], ...]) -> None:
    model, counts = Atoms().double().eval(), [torch.tensor(each) for each in sizes]
    batches = [
        Graphs(torch.randn(int(c.sum()), D).double(), torch.arange(len(c)).repeat_interleave(c), len(c)) for c in counts
    ]
    J = torch.cat([dense_jacobian(model, batch) for batch in batches])
    targets = [torch.arange(len(c)) % 2 for c in counts]
    lin = co.linearize(model, [*zip(batches, targets)], "classification", engine="layerwise")
    G = co.GGN(lin).to_dense()
    assert agree(co.DiagonalGGN(lin).diagonal(), G.diagonal())
    assert agree(co.EKFAC(lin).to_dense().trace(), G.trace())
    assert agree(lin.jacobian().to_dense(), J)
    assert not lin.plan.others


def test_whole_batches_choose_a_prior() -> None:
    """The logits have a variance of a quarter at as many of them, by a fixed seed, as have 2,000 outputs."""
    owners = torch.arange(100)
    batches = [(Graphs(torch.randn(100, D).double(), owners, 100), owners % 2) for _ in range(12)]
    post = co.laplace(co.linearize(Atoms().double().eval(), batches, "classification"))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))[:10]
    variances = [post.predict(batches[i][0]).variance for i in order]
    assert float(torch.stack(variances).mean()) == pytest.approx(0.25, rel=3e-3)


def test_points_are_told_apart_in_half_precision() -> None:
    """Powers of two that tell many points apart stay in the range of float16."""
    model, n = _linear(masked).half().eval(), 300
    x, length, y = torch.randn(n, T, D).half(), torch.randint(0, T + 1, (n,)), torch.arange(n) % 2
    half, double = (
        co.linearize(net, ((part, length), y), "classification", engine="layerwise")
        for net, part in ((model, x), (copy.deepcopy(model).double(), x.double()))
    )
    found, expected = co.DiagonalGGN(half).diagonal().double(), co.DiagonalGGN(double).diagonal()
    assert (found - expected).norm() < 2e-3 * expected.norm()
    assert not half.plan.others


def cut(m: Any, x: Tensor, length: Tensor) -> Tensor:
    """The lengths are numbers of Python: with as many rows as points the pass looks like one with a row a point."""
    lengths = length.tolist()
    rows = torch.tanh(m.first(torch.cat([one[:i] for one, i in zip(x, lengths)])))
    return m.head(torch.stack([part.sum(0) for part in rows.split(lengths)]))


def sliced(m: Any, x: Tensor, length: Tensor) -> Tensor:
    rows = torch.tanh(m.first(x[inside(x, length)]))
    ends = length.cumsum(0).tolist()
    return m.head(torch.stack([rows[end - i : end].sum(0) for end, i in zip(ends, length.tolist())]))


def rolled(m: Any, x: Tensor, length: Tensor) -> Tensor:
    shift = int(length[0])
    return m.head(torch.tanh(m.first(x[:, 0].roll(shift, 0))).roll(-shift, 0))


def distinct(m: Any, x: Tensor, length: Tensor) -> Tensor:
    """Points of equal lengths share a row."""
    values, which = length.unique(return_inverse=True)
    return m.head(torch.tanh(m.first(torch.cos(values.double().unsqueeze(1) * torch.arange(1, D + 1))))[which])


def common(m: Any, x: Tensor, length: Tensor) -> Tensor:
    """All points share as many rows as there are points in the largest batch."""
    table = torch.tanh(m.first(torch.sin(torch.arange(N * D).double().view(N, D))))
    return m.head(torch.softmax(x[:, 0] @ x[0, 0].new_ones(D, N).cumsum(1), 1) @ table)


@pytest.mark.parametrize("run", [cut, sliced, rolled, distinct, common], ids=lambda run: run.__name__)
def test_rows_of_other_points_are_never_taken_for_those_of_a_point(run: Any) -> None:
    """The first batches have a row for each point, in order; a later one has as many rows, but of other points."""
    model, x = _linear(run).double().eval(), torch.randn(2 * N, T, D).double()
    length = torch.tensor([1] * N + [2, 0, 1, 1, 3, 0, 1, 0])
    length = torch.where(torch.arange(2 * N) < 2, torch.arange(2 * N), length) if run is distinct else length
    y, parts = torch.arange(2 * N) % 2, (slice(0, N), slice(N, None))
    J = torch.cat([dense_jacobian(model, (x[part], length[part])) for part in parts])
    data = [((x[part], length[part]), y[part]) for part in parts]
    lin = co.linearize(model, data, co.likelihoods.Categorical(), engine="layerwise")
    G = co.GGN(lin).to_dense()
    assert agree(co.DiagonalGGN(lin).diagonal(), G.diagonal())
    assert agree(lin.jacobian().to_dense(), J)
    assert agree(co.TangentKernel(lin).to_dense(), J @ J.mT)
    assert agree(co.EKFAC(lin).to_dense().trace(), G.trace())
