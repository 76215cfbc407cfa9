"""Defects that once were, each with the input that showed it."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import curvops as co
from curvops.linalg import Diagonal, LowRank, draw
from tests.zoo_modules import Applied


def summed(bag):
    """Embedded tokens, added up: padding changes nothing."""
    rows = nn.Embedding(7, 4, padding_idx=0), Applied(lambda found: found.sum(1))
    table = [nn.EmbeddingBag(7, 4, mode="sum", padding_idx=0)] if bag else rows
    return nn.Sequential(*table, nn.Tanh(), nn.Linear(4, 3)).double()


@pytest.mark.parametrize("bag", [False, True])
@pytest.mark.parametrize("kind", [co.KFAC, co.EKFAC])
def test_padding_tokens_count_for_nothing(kind, bag):
    """They were counted among the inputs: KFAC gave a padding row curvature, and all others less the more there was."""
    model, y = summed(bag), torch.arange(6) % 3
    tokens = torch.randint(1, 7, (6, 5))
    padded = torch.cat([tokens, torch.zeros(6, 4, dtype=torch.long)], 1)
    expected, found = (kind(co.linearize(model, (x, y), "classification")).to_dense() for x in (tokens, padded))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert not found[:4].any()


@pytest.mark.parametrize("bag", [False, True])
def test_tokens_of_either_integer_type_that_embeddings_take(bag):
    """KFAC and EKFAC of 32-bit tokens beside a padding row raised IndexError."""
    model, tokens, y = summed(bag), torch.randint(0, 7, (6, 5)), torch.arange(6) % 3
    for kind in (co.KFAC, co.EKFAC, co.DiagonalGGN, co.GGN, co.TangentKernel):
        long, int32 = (kind(co.linearize(model, (x, y), "classification")) for x in (tokens, tokens.int()))
        torch.testing.assert_close(int32.to_dense(), long.to_dense(), rtol=1e-10, atol=1e-12)
    lin = co.linearize(model, (tokens.int(), y), "classification")
    post = co.laplace(lin, co.KFAC, 0.5, check_mode=False)
    covariances = [post.predict(x).covariance_matrix for x in (tokens, tokens.int())]
    torch.testing.assert_close(*covariances, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("length", [1.0, 30.0])
@pytest.mark.parametrize(("s", "shift"), [(1e4, 1.0), (1e4, 1e-2), (1e5, 1e-2), (1e4, 1e-4)])
def test_low_rank_solves_within_its_span_in_single_precision(s, shift, length):
    U = torch.linalg.qr(torch.randn(500, 10)).Q
    P = LowRank(length * U, torch.full((10,), s / length**2)).add_diagonal(shift)
    b = U @ torch.randn(10, 2)
    assert (P @ P.solve(b) - b).norm() <= 2e-6 * b.norm()
    rest = (torch.eye(500) - U @ U.mT) @ torch.randn(500, 2)
    torch.testing.assert_close(P.solve(rest), rest / shift, rtol=1e-4, atol=1e-4 / shift)


def test_rounding_of_the_largest_eigenvalues_makes_no_precision_indefinite():
    """Preconditioned residuals of single weights avoid them, so that their size was not known."""
    torch.manual_seed(1)
    x, layers = 4 * torch.rand(150, 4) - 2, (nn.Linear(4, 25), nn.ReLU(), nn.Linear(25, 15), nn.ReLU())
    model = nn.Sequential(*layers, nn.Linear(15, 1))
    for p in model.parameters():
        p.data *= 2
    lin = co.linearize(model, (x, x[:, :1]), co.likelihoods.Gaussian(1e-3))
    P, units = co.GGN(lin).add_diagonal(1.0), torch.eye(531)[:, :10]
    assert (P @ P.solve(units) - units).norm() < 0.1 * units.norm()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Diagonal(torch.tensor([-1.0, 1.0])),
        lambda: LowRank(torch.eye(3)[:, :1], torch.tensor([-1.0])),
        lambda: co.GGN(small()).add_diagonal(-0.5),
    ],
)
def test_nothing_is_drawn_for_an_indefinite_matrix(make):
    with pytest.raises(ValueError, match="negative"):
        draw(make(), 2)


def small(engine="auto"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return co.linearize(model, (torch.randn(5, 3).double(), torch.arange(5) % 2), "classification", engine=engine)


@pytest.mark.parametrize("kind", [co.GGN, co.Hessian, co.KFAC, co.EKFAC, co.DiagonalGGN, co.BlockDiagonal])
def test_products_have_second_derivatives_in_the_vectors(kind):
    """Those of the Hessian counted as zero, and inside inference mode it had no products at all."""
    with torch.inference_mode():
        dense = kind(small()).to_dense()
    A, V = kind(small()), torch.randn(26, 2).double().requires_grad_()
    (gradient,) = torch.autograd.grad((A @ V).square().sum(), V, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), V)
    square = 2 * dense @ dense
    torch.testing.assert_close(second, 2 * square @ (square @ V.detach()), rtol=1e-10, atol=1e-10)


def dual(function, x):
    with forward_ad.dual_level():
        function(forward_ad.make_dual(x, torch.ones_like(x)))


TRANSFORMS = {
    "dual numbers": dual,
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (x,)),
    "grad": lambda function, x: torch.func.grad(lambda v: function(v).sum())(x),
    "vmap": lambda function, x: torch.func.vmap(function)(x[None]),
}


CURVATURES = {"GGN": co.GGN, "KFAC": co.KFAC, "low rank": lambda lin: co.low_rank(co.GGN(lin), 3)}


@pytest.mark.parametrize("kind", CURVATURES)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused_and_leave_nothing_behind(name, kind):
    """Tangents counted as zero, and what was kept inside a transform broke later calls."""
    lin, b, level = small(), torch.ones(26).double(), torch.tensor(0.7).double()
    A = CURVATURES[kind](lin)
    P = A.add_diagonal(level)
    of_vectors = [lambda v: P.cg(v).x, lambda v: co.linalg.minres(P, v).x, lambda v: P.inverse() @ v]
    of_levels = [
        lambda s: co.linalg.logdet(A.add_diagonal(s)).value,
        lambda s: co.laplace(lin, A, s, check_mode=False).log_evidence().value,
    ]
    if kind != "GGN":  # a small one is a dense matrix, for which torch has the rules
        of_vectors, of_levels = [*of_vectors, P.solve], [*of_levels, lambda s: A.add_diagonal(s).solve(b)]
    for functions, x in ((of_vectors, b), (of_levels, level)):
        for function in functions:
            with pytest.raises(RuntimeError, match="no rules for torch.func"):
                TRANSFORMS[name](function, x)
    expected = torch.linalg.solve(A.to_dense() + level * torch.eye(26).double(), b)
    torch.testing.assert_close(P.solve(b.clone().requires_grad_()).detach(), expected, rtol=1e-6, atol=1e-6)
