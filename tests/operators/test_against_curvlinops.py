"""curvlinops beside us: the same curvatures in float32, and where its KFAC and EKFAC are wrong without a word.

Both sum over the data (`reduction="sum"`), order parameters alike and, told so, put weight and bias in one block.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import curvlinops
import pytest
import torch
from torch import Tensor, nn

import curvops as co
from tests.zoo import dense_jacobian

N = 24
FISHER = {"exact": "type-2", "mc": "mc", "empirical": "empirical"}
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0])


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


class Shared(nn.Module):
    """Two layers in a row with one weight, or one layer called twice."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(4, 4) for _ in range(1 + tied))
        self.body[-1].weight = self.body[0].weight
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body[-1](torch.tanh(self.body[0](x)))))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(4, 5, 2, (2, 1), (1, 0), dilation=(1, 2)),
        nn.ReLU(), nn.Flatten(), nn.Linear(30, 3),
    )  # fmt: skip


def _convolution(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, **options), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (_mlp, (4,)),
    "cnn": (_cnn, (2, 8, 8)),
    "groupnorm": (Residual, (2, 6, 6)),
    "attention": (Attention, (3, 4)),
}
LABELS = torch.arange(N) % 3
SOME_IGNORED = torch.where(torch.arange(N) % 4 < 2, -100, LABELS)
EVENTS = (torch.arange(3 * N).reshape(N, 3) % 2).float()
LOSSES: dict[str, tuple[nn.Module, Tensor]] = {
    "cross-entropy": (nn.CrossEntropyLoss(reduction="sum"), LABELS),
    "squares": (nn.MSELoss(reduction="sum"), torch.linspace(-1, 1, 3 * N).reshape(N, 3)),
    "events": (nn.BCEWithLogitsLoss(reduction="sum"), EVENTS),
    "class weights": (nn.CrossEntropyLoss(CLASS_WEIGHTS, reduction="sum", label_smoothing=0.1), LABELS),
    "ignored labels": (nn.CrossEntropyLoss(reduction="sum"), SOME_IGNORED),
    "event weights": (nn.BCEWithLogitsLoss(CLASS_WEIGHTS, pos_weight=CLASS_WEIGHTS.flip(0), reduction="sum"), EVENTS),
}
PLAIN = [*((name, "cross-entropy") for name in NETWORKS), ("cnn", "squares"), ("cnn", "events")]
ODD = ["class weights", "ignored labels", "event weights"]


class Problem:
    """A network with its loss and data, as both libraries take them; `factored` leaves out what their KFAC refuses."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        shape: tuple[int, ...],
        loss: str,
        dtype: torch.dtype = torch.float32,
        batch: int = N,
        factored: bool = False,
        points: int = N,
    ) -> None:
        module, targets = LOSSES[loss]
        self.loss = copy.deepcopy(module).to(dtype)
        self.model = make().to(dtype)
        self.x = torch.randn(points, *shape).to(dtype)
        y = targets.repeat(points // N, *[1] * (targets.ndim - 1))
        self.y = y.to(dtype) if y.is_floating_point() else y
        self.data = list(zip(self.x.split(batch), self.y.split(batch)))
        named = {k: p for k, p in self.model.named_parameters() if not (factored and "norm" in k)}
        self.parameters = list(named.values())
        self.lin = co.linearize(self.model, self.data, self.loss, parameters=list(named))

    def theirs(self, operator: Any, **options: Any) -> Any:
        """The operator of curvlinops, with all its checks and no warning."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return operator(self.model, self.loss, self.parameters, self.data, **options)

    def factors(self, operator: Any, fisher: str, sharing: str = "expand") -> Any:
        """Its KFAC or EKFAC, with our words for the options and one block for weight and bias."""
        kinds = {"fisher_type": FISHER[fisher], "kfac_approx": sharing}
        return self.theirs(operator, **kinds, separate_weight_and_bias=False)

    def unit(self) -> Tensor:
        return torch.eye(self.lin.num_parameters, dtype=self.lin.theta.dtype)

    def drawn_labels(self, samples: int) -> Tensor:
        """The classes (M, N) that ours draws: of a residual p − e, only the drawn class's entry is negative."""
        G = co.GGN(self.lin, mc_samples=samples, generator=seeded())
        return G._kwargs["draws"].argmin(-1)


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative, in Frobenius norm."""
    return float((found.detach() - expected.detach()).norm() / expected.norm())


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def let_it_draw(monkeypatch: pytest.MonkeyPatch, labels: Tensor) -> None:
    """curvlinops draws labels by `Tensor.multinomial`: from now on that gives these, (M, N)."""
    monkeypatch.setattr(Tensor, "multinomial", lambda *args, **options: labels.mT)


@pytest.mark.parametrize(("name", "loss"), [*PLAIN, *(("cnn", loss) for loss in ODD)])
def test_products_agree(name: str, loss: str) -> None:
    problem = Problem(*NETWORKS[name], loss, batch=16 if name == "cnn" else N)
    J = problem.lin.jacobian()
    V, U = torch.randn(J.shape[1], 4), torch.randn(J.shape[0], 4)
    theirs = curvlinops.JacobianLinearOperator(problem.model, problem.parameters, problem.data)
    assert distance(J @ V, theirs @ V) < 1e-5
    assert distance(J.mT @ U, theirs.adjoint() @ U) < 1e-5
    assert distance(co.GGN(problem.lin) @ V, problem.theirs(curvlinops.GGNLinearOperator) @ V) < 1e-5
    assert distance(co.EmpiricalFisher(problem.lin) @ V, problem.theirs(curvlinops.EFLinearOperator) @ V) < 1e-5
    if name != "groupnorm":  # its backward pass has no forward mode, which their Hessian needs
        assert distance(co.Hessian(problem.lin) @ V, problem.theirs(curvlinops.HessianLinearOperator) @ V) < 1e-5


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_sampled_fishers_agree_on_the_same_labels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(*NETWORKS[name], "cross-entropy")
    G, V = co.GGN(problem.lin, mc_samples=3, generator=seeded()), torch.randn(problem.lin.num_parameters, 4)
    let_it_draw(monkeypatch, problem.drawn_labels(3))
    assert distance(G @ V, problem.theirs(curvlinops.FisherMCLinearOperator, mc_samples=3) @ V) < 1e-5


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize(("name", "loss"), PLAIN)
def test_factored_curvatures_agree(name: str, loss: str, fisher: str) -> None:
    problem = Problem(*NETWORKS[name], loss, batch=16, factored=True)
    for sharing in ("expand", "reduce"):
        theirs = problem.factors(curvlinops.KFACLinearOperator, fisher, sharing) @ problem.unit()
        assert distance(co.KFAC(problem.lin, fisher=fisher, sharing=sharing).to_dense(), theirs) < 1e-5
    theirs = problem.factors(curvlinops.EKFACLinearOperator, fisher) @ problem.unit()
    assert distance(co.EKFAC(problem.lin, fisher=fisher).to_dense(), theirs) < 1e-5


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("name", ["cnn", "groupnorm"])
def test_eigenvalue_corrections_of_reduced_factors_agree(name: str, fisher: str) -> None:
    """In float64: second moments of whole rows depend on a reduced basis, which float32 fixes to eps / gap alone.

    Attention has no such basis: its keys' sensitivities add up to zero, and a null space has any.
    """
    problem = Problem(*NETWORKS[name], "cross-entropy", torch.float64, factored=True, points=2 * N)
    theirs = problem.factors(curvlinops.EKFACLinearOperator, fisher, "reduce") @ problem.unit()
    assert distance(co.EKFAC(problem.lin, fisher=fisher, sharing="reduce").to_dense(), theirs) < 1e-10


@pytest.mark.parametrize("name", NETWORKS)
def test_sampled_factors_agree_on_the_same_labels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(*NETWORKS[name], "cross-entropy", factored=True)
    ours = [kind(problem.lin, fisher="mc", generator=seeded()).to_dense() for kind in (co.KFAC, co.EKFAC)]
    let_it_draw(monkeypatch, problem.drawn_labels(1))
    for dense, theirs in zip(ours, (curvlinops.KFACLinearOperator, curvlinops.EKFACLinearOperator)):
        assert distance(dense, problem.factors(theirs, "mc") @ problem.unit()) < 1e-5


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_inverses_agree(name: str) -> None:
    problem = Problem(*NETWORKS[name], "cross-entropy")
    V = torch.randn(problem.lin.num_parameters, 4)
    kfac, ekfac = co.KFAC(problem.lin), co.EKFAC(problem.lin)
    theirs = problem.factors(curvlinops.KFACLinearOperator, "exact")
    corrected = problem.factors(curvlinops.EKFACLinearOperator, "exact")
    corrected @ V  # its inverse does not build what it inverts
    invert = curvlinops.KFACInverseLinearOperator
    exact, heuristic = {"use_exact_damping": True}, {"use_heuristic_damping": True}
    assert distance(kfac.add_diagonal(0.5).solve(V), invert(theirs, damping=0.5, **exact) @ V) < 1e-5
    assert distance(ekfac.add_diagonal(0.5).solve(V), invert(corrected, damping=0.5, **exact) @ V) < 1e-5
    assert distance(kfac.heuristic_damping(0.5).solve(V), invert(theirs, damping=0.5, **heuristic) @ V) < 1e-5


# Cases that their KFAC accepts, with all its checks on, and gets wrong. An assertion that fails here says: repaired.
WRONG: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "class weights": (_mlp, (4,), "class weights"),
    "ignored labels": (_mlp, (4,), "ignored labels"),
    "event weights": (_mlp, (4,), "event weights"),
    "tied weights": (lambda: Shared(tied=True), (4,), "cross-entropy"),
    "a layer called twice": (lambda: Shared(tied=False), (4,), "cross-entropy"),
    "groups": (lambda: _convolution(groups=2), (2, 4, 4), "cross-entropy"),
    "circular padding": (lambda: _convolution(padding_mode="circular"), (2, 4, 4), "cross-entropy"),
}
RIGHT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "mlp": (_mlp, (4,), "cross-entropy"),
    "cnn": (_cnn, (2, 8, 8), "events"),
}
CASES = WRONG | RIGHT


class Reference:
    """Plain autograd, in float64: the dense GGN, and KFAC by its definition where a layer acts on vectors."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        x, y, loss = problem.x, problem.y, problem.loss
        f = problem.model(x).detach()
        full = torch.autograd.functional.hessian(lambda g: loss(g, y), f)
        H = torch.stack([full[i, :, i] for i in range(len(f))])
        values, vectors = torch.linalg.eigh(H)
        leaf = f.clone().requires_grad_()
        (r,) = torch.autograd.grad(loss(leaf, y), leaf)
        self.roots = {"exact": vectors * values.clamp(min=0).sqrt().unsqueeze(1), "empirical": r.unsqueeze(2)}
        self.J = dense_jacobian(problem.model, x).unflatten(0, f.shape)

    def matrix(self, fisher: str) -> Tensor:
        """Σ_n Σ_r (Jᵀ s)(Jᵀ s)ᵀ."""
        rows = torch.einsum("ncd,ncr->nrd", self.J, self.roots[fisher]).flatten(0, 1)
        return rows.mT @ rows

    def factors(self, fisher: str) -> list[tuple[Tensor, Tensor]]:
        """B = Σ δ δᵀ and A = mean [a, 1][a, 1]ᵀ of each linear layer, over its calls and the points that count."""
        model, y = self.problem.model, self.problem.y
        counted = y != -100 if y.ndim == 1 else torch.ones(len(y), dtype=torch.bool)
        layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        calls: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
        hooks = [
            layer.register_forward_hook(lambda _, given, output, kept=kept: kept.append((given[0].detach(), output)))
            for layer, kept in zip(layers, calls)
        ]
        f = model(self.problem.x)
        for hook in hooks:
            hook.remove()
        columns = self.roots[fisher].unbind(2)
        found = []
        for kept in calls:
            a = torch.cat([torch.cat([a, torch.ones_like(a[:, :1])], 1)[counted] for a, _ in kept])
            outputs = [output for _, output in kept]
            delta = torch.cat([d for s in columns for d in torch.autograd.grad(f, outputs, s, retain_graph=True)])
            found.append((delta.mT @ delta, a.mT @ a / len(a)))
        return found

    def kfac(self, fisher: str) -> Tensor:
        """B ⊗ A, layer by layer."""
        blocks = []
        for B, A in self.factors(fisher):
            order = _flat_order(len(B), len(A))
            blocks.append(torch.kron(B, A)[order][:, order])
        return torch.block_diag(*blocks)

    def ekfac(self, fisher: str) -> Tensor:
        """U diag(Uᵀ G U) Uᵀ, layer by layer, in the eigenbasis U of B ⊗ A."""
        G, blocks, start = self.matrix(fisher), [], 0
        for B, A in self.factors(fisher):
            U = torch.kron(torch.linalg.eigh(B).eigenvectors, torch.linalg.eigh(A).eigenvectors)
            U = U[_flat_order(len(B), len(A))]
            part = slice(start, start := start + len(U))
            blocks.append((U * (U.mT @ G[part, part] @ U).diagonal()) @ U.mT)
        return torch.block_diag(*blocks)


def _flat_order(rows: int, columns: int) -> Tensor:
    """Entries of the matrix [W, b] as the flat vector has them: all of W, then b."""
    index = torch.arange(rows * columns).reshape(rows, columns)
    return torch.cat([index[:, :-1].flatten(), index[:, -1]])


@pytest.mark.parametrize("case", CASES)
def test_ekfac_has_the_trace_of_the_ggn(case: str) -> None:
    """Whatever the eigenbasis is, it keeps the second moments of whole gradients."""
    problem = Problem(*CASES[case], torch.float64)
    expected = Reference(problem).matrix("exact").trace()
    theirs = problem.factors(curvlinops.EKFACLinearOperator, "exact").trace
    torch.testing.assert_close(co.EKFAC(problem.lin).diagonal().sum(), expected, rtol=1e-10, atol=0.0)
    if case in RIGHT:
        torch.testing.assert_close(theirs, expected, rtol=1e-10, atol=0.0)
    else:
        assert abs(theirs / expected - 1) > 0.005


@pytest.mark.parametrize(
    ("case", "fisher"),
    [
        ("mlp", "exact"),
        ("mlp", "empirical"),
        ("class weights", "exact"),
        ("event weights", "exact"),
        ("ignored labels", "exact"),
        ("ignored labels", "empirical"),
        ("a layer called twice", "exact"),
        ("a layer called twice", "empirical"),
    ],
)
def test_factored_curvatures_equal_their_definition(case: str, fisher: str) -> None:
    problem = Problem(*CASES[case], torch.float64)
    reference = Reference(problem)
    pairs = [
        (co.KFAC, curvlinops.KFACLinearOperator, reference.kfac(fisher)),
        (co.EKFAC, curvlinops.EKFACLinearOperator, reference.ekfac(fisher)),
    ]
    for ours, theirs, expected in pairs:
        assert distance(ours(problem.lin, fisher=fisher).to_dense(), expected) < 1e-10
        other = distance(problem.factors(theirs, fisher) @ problem.unit(), expected)
        assert other < 1e-10 if case in RIGHT else other > 0.05


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_tied_weights_have_one_exact_block(fisher: str) -> None:
    """Theirs is not even symmetric: what one layer's factors give the weight, the other's overwrite."""
    problem = Problem(*CASES["tied weights"], torch.float64)
    expected = Reference(problem).matrix(fisher)
    tied = slice(problem.lin.num_parameters - 15)  # all but the head
    for ours in (co.KFAC, co.EKFAC):
        assert distance(ours(problem.lin, fisher=fisher).to_dense()[tied, tied], expected[tied, tied]) < 1e-10
    for operator in (curvlinops.KFACLinearOperator, curvlinops.EKFACLinearOperator):
        theirs = problem.factors(operator, fisher) @ problem.unit()
        assert distance(theirs[tied, tied], expected[tied, tied]) > 0.1
        assert distance(theirs, theirs.mT) > 0.01


@pytest.mark.parametrize("case", ["class weights", "ignored labels"])
def test_sampled_fisher_knows_which_points_count(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Residuals at drawn labels, weighted as the exact curvature is. Theirs takes every point once."""
    problem = Problem(*CASES[case], torch.float64)
    G = co.GGN(problem.lin, mc_samples=2, generator=seeded()) @ problem.unit()
    labels, reference = problem.drawn_labels(2), Reference(problem)
    p = problem.model(problem.x).detach().softmax(1)
    weights = reference.roots["exact"].square().sum((1, 2)) / (1 - p.square().sum(1))  # trace of H over that of plain H
    residuals = p - nn.functional.one_hot(labels, 3)
    rows = torch.einsum("ncd,mnc->mnd", reference.J, residuals)
    let_it_draw(monkeypatch, labels)
    theirs = problem.theirs(curvlinops.FisherMCLinearOperator, mc_samples=2) @ problem.unit()
    expected = torch.einsum("mnd,n,mne->de", rows, weights / 2, rows)
    assert distance(G, expected) < 1e-10
    assert distance(theirs, expected) > 0.1
    torch.testing.assert_close(theirs, torch.einsum("mnd,mne->de", rows, rows) / 2, rtol=1e-10, atol=1e-10)
