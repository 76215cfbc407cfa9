"""Every curvature against its dense definition: networks x selections, with likelihoods and batchings in turn.

Every network stands in the table with all its weights, half of them and some by name. J knows no likelihood, and H no
network.

Tests `ggn.py`, `subnetwork.py`, `output_fisher.py`, `row_squares.py`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from curvops.linalg import EigenKronecker
from tests.operators.definitions import define, hessian_products, linearized
from tests.zoo import ZOO, N, call, parameters_of, reference

TIGHT = {"rtol": 1e-10, "atol": 1e-10}


def _labels(c: int) -> Tensor:
    return torch.arange(N) % c


def _classes(c: int) -> tuple[Any, Tensor, Tensor | None]:
    return co.likelihoods.Categorical(), _labels(c), None


def _weighted_classes(c: int) -> tuple[Any, Tensor, Tensor | None]:
    weight = torch.linspace(0.5, 2.0, c, dtype=torch.float64)
    y = _labels(c)
    y[1] = -100
    return co.likelihoods.Categorical(weight=weight, label_smoothing=0.1), y, torch.linspace(0.3, 1.4, N).double()


def _soft_classes(c: int) -> tuple[Any, Tensor, Tensor | None]:
    return co.likelihoods.Categorical(), torch.linspace(0, 3, N * c).double().reshape(N, c).softmax(1), None


def _gaussian(c: int) -> tuple[Any, Tensor, Tensor | None]:
    return co.likelihoods.Gaussian(0.3), torch.linspace(-1, 1, N * c).double().reshape(N, c), None


def _events(c: int) -> tuple[Any, Tensor, Tensor | None]:
    return (
        co.likelihoods.Bernoulli(),
        (torch.arange(N * c).reshape(N, c) % 2).double(),
        torch.linspace(0, 1, N).double(),
    )


def _counts(c: int) -> tuple[Any, Tensor, Tensor | None]:
    return co.likelihoods.Poisson(), (torch.arange(N * c).reshape(N, c) % 3).double(), None


def _heteroscedastic(c: int) -> tuple[Any, Tensor, Tensor | None]:
    return co.likelihoods.HeteroscedasticGaussian(), torch.linspace(-1, 1, N * c // 2).double().reshape(N, -1), None


NETWORKS = [
    "mlp",
    "cnn",
    "resnet_groupnorm",
    "transformer_encoder",
    "bag_mean",
    "embedding_padding",
    "lstm",
    "tied_embedding",
    "own_parameters",
    "mapping_inputs",
    "linear_twice",
    "transposed_linear",
]
UNDIFFERENTIABLE = {"bag_mean"}  # torch has no second derivative of an EmbeddingBag to compare with; ours has
LIKELIHOODS: list[Callable[[int], tuple[Any, Tensor, Tensor | None]]] = [
    _classes,
    _weighted_classes,
    _soft_classes,
    _gaussian,
    _events,
    _counts,
]
SELECTIONS = ["all", "last_registered", "biases", "half"]
BATCHINGS = [(5,), (3, 2), (1, 1, 1, 1, 1)]


TABLE = [
    (name, LIKELIHOODS[(i + j) % 6], selection, BATCHINGS[(i + j + i // 3) % 3])
    for i, name in enumerate(NETWORKS)
    for j, selection in enumerate(SELECTIONS)
    if selection != ("last_registered", "biases")[i % 2]
]
TABLE += [("lstm", _heteroscedastic, "all", (3, 2)), ("lstm", _heteroscedastic, "half", (5,))]  # of two outputs


def selected(name: str, selection: str) -> tuple[Any, Tensor]:
    """The `parameters=` argument, and the positions that it selects of all."""
    model, _ = ZOO[name].build()
    sizes = {key: p.numel() for key, p in parameters_of(model).items()}
    total = sum(sizes.values())
    if selection == "all":
        return None, torch.arange(total)
    if selection == "half":
        index = torch.randperm(total, generator=torch.Generator().manual_seed(0))[: total // 2]
        return index, index
    last = list(sizes)[-1].rpartition(".")[0]
    registered = selection == "last_registered"
    chosen = [name for name in sizes if (name.rpartition(".")[0] == last if registered else name.endswith("bias"))]
    chosen = chosen or [list(sizes)[-1]]
    mask = torch.cat([torch.full((size,), key in chosen) for key, size in sizes.items()])
    return chosen, mask.nonzero().squeeze(1)


@pytest.mark.parametrize(
    ("name", "make", "selection", "sizes"),
    TABLE,
    ids=[f"{n}-{m.__name__[1:]}-{s}-{len(b)}" for n, m, s, b in TABLE],
)
def test_equals_its_dense_definition(
    name: str, make: Callable[[int], tuple[Any, Tensor, Tensor | None]], selection: str, sizes: tuple[int, ...]
) -> None:
    model, inputs = ZOO[name].build()
    likelihood, y, w = make(call(model, inputs).shape[1])
    parameters, kept = selected(name, selection)
    lin = linearized(name, likelihood, y, w, sizes, parameters)
    expected = define(name, likelihood, y, w).of(kept)
    G, F = expected.ggn, expected.empirical
    D = len(kept)
    unit = torch.eye(D, dtype=torch.float64)

    r = expected.r if w is None else expected.r * w.sqrt().unsqueeze(1)
    torch.testing.assert_close(lin.gradient(), torch.einsum("ncd,nc->d", expected.J, r), **TIGHT)
    torch.testing.assert_close(lin.outputs(), call(model, inputs).detach(), **TIGHT)
    torch.testing.assert_close(co.GGN(lin) @ unit, G, **TIGHT)
    torch.testing.assert_close(co.EmpiricalFisher(lin) @ unit, F, **TIGHT)
    if name not in UNDIFFERENTIABLE:
        V = torch.randn(len(reference(name).mT), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        inside = torch.zeros_like(V)
        inside[kept] = V[kept]
        hessian = hessian_products(name, likelihood, y, w, inside)[kept]
        torch.testing.assert_close(co.Hessian(lin) @ V[kept], hessian, **TIGHT)

    sampled = co.GGN(lin, mc_samples=2, generator=torch.Generator().manual_seed(1))
    rows = torch.einsum("ncd,mnc->mnd", expected.J, sampled._kwargs["draws"]).flatten(0, 1)
    torch.testing.assert_close(sampled @ unit, rows.mT @ rows, **TIGHT)
    torch.testing.assert_close(sampled.diagonal(), rows.square().sum(0), **TIGHT)

    torch.testing.assert_close(co.GGN(lin).diagonal(), G.diagonal(), **TIGHT)
    torch.testing.assert_close(co.DiagonalGGN(lin).diagonal(), G.diagonal(), **TIGHT)
    torch.testing.assert_close(co.DiagonalGGN(lin, fisher="empirical").diagonal(), F.diagonal(), **TIGHT)
    drawn = co.DiagonalGGN(lin, fisher="mc", mc_samples=2, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(drawn.diagonal(), rows.square().sum(0), **TIGHT)

    blocks = co.BlockDiagonal(lin)
    torch.testing.assert_close(blocks.to_dense(), torch.where(_within(blocks), G, 0.0), **TIGHT)
    prior = torch.linspace(0.5, 2.0, D, dtype=torch.float64)
    damped = co.GGN(lin).add_diagonal(prior), G + prior.diag()
    operators = [(co.GGN(lin), G), (co.EmpiricalFisher(lin), F), (sampled, rows.mT @ rows), damped]
    for index in (torch.arange(D - 1, -1, -2), torch.tensor([D - 1, 0])):  # by rows for many weights, by pushes for few
        for A, dense in operators:
            torch.testing.assert_close(co.Subnetwork(A, index).to_dense(), dense[index][:, index], **TIGHT)

    J = expected.J.flatten(0, 1)
    torch.testing.assert_close(co.TangentKernel(lin, 2.0).to_dense(), J @ J.mT / 2, **TIGHT)
    kernel = co.TangentKernel(lin, prior)
    torch.testing.assert_close(kernel.to_dense(), (J / prior) @ J.mT, **TIGHT)
    torch.testing.assert_close(kernel @ torch.eye(len(J), dtype=torch.float64), (J / prior) @ J.mT, **TIGHT)


FISHERS = ["exact", "mc", "empirical"]


@pytest.mark.parametrize(
    ("name", "sharing", "fisher"),
    [(n, s, FISHERS[(i + j) % 3]) for i, n in enumerate(NETWORKS) for j, s in enumerate(["expand", "reduce"])],
)
def test_kronecker_identities(name: str, sharing: str, fisher: str) -> None:
    """EKFAC has the exact second moments of the rows in its basis; neither depends on the batching."""
    likelihood, y, w = _weighted_classes(call(*ZOO[name].build()).shape[1])
    expected = define(name, likelihood, y, w)

    def build(kind: Any, sizes: tuple[int, ...]) -> Any:
        lin = linearized(name, likelihood, y, w, sizes, None)
        return kind(lin, fisher=fisher, sharing=sharing, generator=torch.Generator().manual_seed(1))

    kfac, ekfac = build(co.KFAC, (5,)), build(co.EKFAC, (5,))
    if fisher == "mc":
        lin = linearized(name, likelihood, y, w, (5,), None)
        draws = co.GGN(lin, mc_samples=1, generator=torch.Generator().manual_seed(1))._kwargs["draws"][0]
        g = torch.einsum("ncd,nc->nd", expected.J, draws)
        exact = g.mT @ g
    else:
        exact = expected.ggn if fisher == "exact" else expected.empirical
    for block, positions in zip(ekfac.blocks, ekfac.partition.parts):
        positions = torch.tensor(list(positions)) if isinstance(positions, range) else positions
        part = exact[positions][:, positions]
        if isinstance(block, EigenKronecker):
            basis = EigenKronecker(block.left_vectors, block.right_vectors, torch.ones_like(block.values))
            U = _basis(basis)
            torch.testing.assert_close((U.mT @ part @ U).diagonal(), block.values.flatten(), **TIGHT)
        else:
            torch.testing.assert_close(
                block.to_dense(), part if block.to_dense().count_nonzero() else part * 0, **TIGHT
            )
    blockwise = torch.where(_within(ekfac), exact, 0.0)
    distance_k, distance_e = (blockwise - kfac.to_dense()).norm(), (blockwise - ekfac.to_dense()).norm()
    assert distance_e <= distance_k * (1 + 1e-10) + 1e-12
    if fisher != "mc":  # draws come batch by batch, so another batching draws other targets
        torch.testing.assert_close(build(co.KFAC, (3, 2)).to_dense(), kfac.to_dense(), **TIGHT)
        if sharing == "expand":  # reduced factors leave a null space that rows reach, and whose basis is arbitrary
            torch.testing.assert_close(build(co.EKFAC, (3, 2)).to_dense(), ekfac.to_dense(), **TIGHT)
    eigenvalues = torch.linalg.eigvalsh(kfac.to_dense())
    assert eigenvalues.min() >= -1e-10 * eigenvalues.max()


def _basis(operator: EigenKronecker) -> Tensor:
    """U = U_l ⊗ U_r of each group, block-diagonal, (n, n)."""
    sides = [v if v.ndim == 3 else torch.diag_embed(v) for v in (operator.left_vectors, operator.right_vectors)]
    return torch.block_diag(*[torch.kron(left.contiguous(), right.contiguous()) for left, right in zip(*sides)])


def _within(blocks: Any) -> Tensor:
    """Which entries of the matrix lie in a block."""
    D = blocks.shape[0]
    mask = torch.zeros(D, D, dtype=torch.bool)
    for positions in blocks.partition.parts:
        positions = torch.tensor(list(positions)) if isinstance(positions, range) else positions
        mask[positions.unsqueeze(1), positions] = True
    return mask


def test_wrong_second_derivatives_are_refused() -> None:
    """torch's fused weight_norm is not symmetric under double backward, here by one per cent."""
    norm = nn.utils.parametrizations.weight_norm
    model = nn.Sequential(norm(nn.Linear(2, 50)), nn.Tanh(), norm(nn.Linear(50, 1)))
    lin = co.linearize(model, (torch.randn(30, 2), torch.zeros(30, 1)), co.likelihoods.Gaussian(noise=1.0))
    with pytest.raises(RuntimeError, match="not symmetric"):
        co.Hessian(lin)


CURVATURES: dict[str, Callable[[co.operators.Linearization], Any]] = {
    "GGN": co.GGN,
    "Monte-Carlo Fisher": lambda lin: co.GGN(lin, mc_samples=2, generator=torch.Generator().manual_seed(0)),
    "empirical Fisher": co.EmpiricalFisher,
}


def _overparametrised(**options: Any) -> co.operators.Linearization:
    """Twelve points in two batches, three outputs, and 403 weights in double precision."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3)).double()
    x, y = torch.randn(12, 4).double(), torch.arange(12) % 3
    return co.linearize(model, [(x[:7], y[:7]), (x[7:], y[7:])], "classification", **options)


@pytest.mark.parametrize(("name", "engine"), list(zip(CURVATURES, ("layerwise", "autodiff", "streamed"))))
def test_the_spectrum_of_a_curvature_with_few_outputs_comes_from_its_root(name: str, engine: Any) -> None:
    A = CURVATURES[name](_overparametrised(engine=engine))
    root, dense = A.narrow_root, A.to_dense()
    assert root is not None and 4 * root.shape[1] <= len(dense)
    S = root @ torch.eye(root.shape[1], dtype=torch.float64)
    torch.testing.assert_close(S @ S.mT, dense, **TIGHT)
    pairs = A.eigsh(5, rtol=1e-11, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(pairs.values, torch.linalg.eigvalsh(dense).flip(0)[:5], **TIGHT)
    torch.testing.assert_close(dense @ pairs.vectors, pairs.vectors * pairs.values, **TIGHT)
