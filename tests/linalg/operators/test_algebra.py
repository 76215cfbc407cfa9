"""Every spelling of a sum, scaling, product, slice or transpose stays ours, and equals the dense matrix.

Tests `base.py`, `damped.py`.
"""

import linear_operator
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import ConstantDiagLinearOperator, DiagLinearOperator, to_linear_operator
from torch.autograd import forward_ad

from curvops import linalg
from curvops.linalg import Dense, Operator
from tests.linalg.known import Rooted

N = 300  # above the size that is factorised densely


def spd(n=N, seed=0):
    root = torch.randn(n, n // 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.mT / n


A, B = spd(seed=0), spd(seed=1)
V = torch.linspace(0.5, 2, N, dtype=torch.float64)
EYE = torch.eye(N, dtype=torch.float64)

SPELLINGS = {
    "add_diagonal(number)": (lambda G, H: G.add_diagonal(0.5), A + 0.5 * EYE),
    "add_diagonal(vector)": (lambda G, H: G.add_diagonal(V), A + V.diag()),
    "add_jitter": (lambda G, H: G.add_jitter(0.5), A + 0.5 * EYE),
    "G + diag": (lambda G, H: G + DiagLinearOperator(V), A + V.diag()),
    "G + constant diag": (lambda G, H: G + ConstantDiagLinearOperator(V[:1], diag_shape=N), A + V[0] * EYE),
    "G + H": (lambda G, H: G + H, A + B),
    "G + H + G": (lambda G, H: G + H + G, 2 * A + B),
    "sum([G, H])": (lambda G, H: sum([G, H]), A + B),
    "G + tensor": (lambda G, H: G + B, A + B),
    "tensor + G": (lambda G, H: B + G, A + B),
    "G + foreign": (lambda G, H: G + to_linear_operator(B), A + B),
    "G - H": (lambda G, H: G - H, A - B),
    "tensor - G": (lambda G, H: B - G, B - A),
    "-G": (lambda G, H: -G, -A),
    "2 * G": (lambda G, H: 2 * G, 2 * A),
    "G * 2": (lambda G, H: G * 2, 2 * A),
    "G / 2": (lambda G, H: G / 2, A / 2),
    "tensor * G": (lambda G, H: torch.tensor(2.0) * G, 2 * A),
    "(G + H).add_diagonal": (lambda G, H: (G + H).add_diagonal(V), A + B + V.diag()),
    "G.add_diagonal + H": (lambda G, H: G.add_diagonal(V) + H, A + B + V.diag()),
    "G + H.add_diagonal": (lambda G, H: G + H.add_diagonal(V), A + B + V.diag()),
    "two damped": (lambda G, H: G.add_diagonal(V) + H.add_diagonal(1.0), A + B + V.diag() + EYE),
    "damped twice": (lambda G, H: G.add_diagonal(0.5).add_diagonal(V), A + 0.5 * EYE + V.diag()),
    "G @ H": (lambda G, H: G @ H, A @ B),
    "G @ H @ G": (lambda G, H: G @ H @ G, A @ B @ A),
    "G.mT": (lambda G, H: G.mT, A),
    "(G @ H).mT": (lambda G, H: (G @ H).mT, B @ A),
    "slice": (lambda G, H: G[2:9, 5:], A[2:9, 5:]),
    "index": (lambda G, H: G[torch.tensor([4, 1]), :], A[[4, 1]]),
    "mask": (lambda G, H: G[V > 1, :], A[V > 1]),
    "slice of damped": (lambda G, H: G.add_diagonal(V)[:7, :7], (A + V.diag())[:7, :7]),
    "inverse": (lambda G, H: G.add_diagonal(V).inverse(), torch.linalg.inv(A + V.diag())),
    "expand": (lambda G, H: G.expand(2, N, N)[1], A),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_stays_ours_and_is_right(name):
    build, expected = SPELLINGS[name]
    operator = build(Rooted(A), Rooted(B))
    assert isinstance(operator, Operator)
    X = torch.randn(expected.shape[1], 3, dtype=torch.float64)
    tolerance = 1e-7 if name == "inverse" else 1e-10
    torch.testing.assert_close(operator @ X, expected @ X, rtol=tolerance, atol=tolerance)
    Y = torch.randn(expected.shape[0], 2, dtype=torch.float64)
    torch.testing.assert_close(operator.mT @ Y, expected.mT @ Y, rtol=tolerance, atol=tolerance)


def test_psd_is_known_where_it_follows():
    G = Rooted(A)
    J = Dense(torch.randn(5, N, dtype=torch.float64))
    assert (G + G).psd and (2.0 * G).psd and G.add_diagonal(1.0).psd and (J @ G @ J.mT).psd and G[:3, :3].psd
    assert (J @ G.add_diagonal(1.0).inverse() @ J.mT).psd
    assert not (-G).psd and not (G - G).psd and not G.add_diagonal(-1.0).psd and not G[:3, 1:4].psd
    assert not (J @ G).symmetric
    for P in (G.add_diagonal(V) + G, G + G.add_diagonal(V)):  # what is known of the diagonal stays known
        assert isinstance(P, linalg.Damped) and torch.equal(P.shift, V)


@pytest.mark.parametrize("name", ["add_diagonal(vector)", "(G + H).add_diagonal"])
def test_no_solve_logdet_or_sample_reaches_linear_operators_solvers(name, no_foreign_solvers):
    build, expected = SPELLINGS[name]
    P, b = build(Rooted(A), Rooted(B)), torch.randn(N, 2, dtype=torch.float64)
    with linear_operator.settings.max_cholesky_size(0):
        torch.testing.assert_close(P.solve(b), torch.linalg.solve(expected, b), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(torch.linalg.solve(P, b), P.solve(b))
        inv_quad, logdet = P.inv_quad_logdet(b, logdet=True)
        torch.testing.assert_close(inv_quad, (b * torch.linalg.solve(expected, b)).sum(), rtol=1e-6, atol=0)
        assert abs(logdet - expected.logdet()) < 0.05 * (expected.logdet().abs() + 10)
        torch.testing.assert_close(P.sqrt_inv_matmul(P.sqrt_inv_matmul(b)), P.solve(b), rtol=1e-6, atol=1e-6)
        assert P.zero_mean_mvn_samples(3).shape == (3, N)
        normal = MultivariateNormal(torch.zeros(N, dtype=torch.float64), P)
        assert normal.rsample(torch.Size([2])).shape == (2, N)
        exact = torch.distributions.MultivariateNormal(torch.zeros(N).double(), expected).log_prob(b[:, 0])
        assert abs(normal.log_prob(b[:, 0]) - exact) < 0.05 * exact.abs()
        part = normal[:5]
        torch.testing.assert_close(part.covariance_matrix, expected[:5, :5], rtol=1e-10, atol=1e-10)
        noisy = part.add_jitter(0.1)
        assert noisy.log_prob(b[:5, 0]).isfinite()


def test_an_unknown_root_of_a_large_operator_is_an_error():
    with pytest.raises(ValueError, match="no root"):
        linalg.draw(Rooted(A) @ Rooted(B), 2)


def test_the_diagonal_and_single_entries_of_a_large_operator():
    P = Rooted(A).add_diagonal(V)
    torch.testing.assert_close(P.diagonal(), (A + V.diag()).diagonal(), rtol=1e-12, atol=1e-12)
    rows, columns = torch.tensor([1, 299, 5]), torch.tensor([1, 2, 5])
    torch.testing.assert_close(P[rows, columns], (A + V.diag())[rows, columns], rtol=1e-12, atol=1e-12)


LAST = [-1, (-1, -1), (0, -2), (-3, slice(2, 5)), (..., -1), ([0, -1], [-2, 1]), (torch.tensor([-1, 0]), slice(None))]
LAST += [(range(2), [-2, 1])]


@pytest.mark.parametrize("index", LAST, ids=str)
@pytest.mark.parametrize("damped", [False, True])
def test_entries_are_counted_from_the_end_as_in_a_tensor(index, damped):
    G, dense = (Rooted(A).add_diagonal(V), A + V.diag()) if damped else (Rooted(A), A)
    found = G[index]
    torch.testing.assert_close(found if isinstance(found, torch.Tensor) else found.to_dense(), dense[index])


def test_a_product_inside_a_transform_raises_and_drops_no_derivative():
    G, x = Rooted(A), V.clone()
    assert not (G @ x).requires_grad and torch.equal(G @ x, A @ x)
    for transform in (
        lambda product: torch.func.vmap(product)(torch.stack([x, x])),
        lambda product: torch.func.jvp(product, (x,), (x,)),
        lambda product: torch.func.grad(lambda v: product(v).sum())(x),
    ):
        with pytest.raises(RuntimeError, match="no rules for torch.func"):
            transform(lambda v: G @ v)
    with forward_ad.dual_level():
        assert torch.equal(G @ x, A @ x)
        with pytest.raises(RuntimeError, match="its tangent is A @ tangent"):
            G @ forward_ad.make_dual(x, x)
