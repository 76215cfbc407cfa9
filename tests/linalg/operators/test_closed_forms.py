"""Every structured operand, alone and damped, against its dense matrix.

Tests `closed_form.py`, `given_matrix.py`.
"""

from unittest.mock import patch

import pytest
import torch

from curvops import linalg
from curvops.errors import NotPositiveSemidefiniteError
from curvops.linalg import Damped, Dense, Diagonal, DirectSum, Kronecker, LowRank, draw
from tests.linalg.operands import OPERANDS, SINGULAR, close, kron, positive, random, uniform
from tests.linalg.samples import assert_covariance

SHIFTS = ["scalar", "vector"]


def damped(name, shift):
    operator, dense, vector = OPERANDS[name]()
    d = torch.tensor(0.7, dtype=torch.float64) if shift == "scalar" else vector
    return operator.add_diagonal(d), dense + d.expand(len(dense)).diag()


@pytest.mark.parametrize("name", OPERANDS)
def test_products_entries_and_trace_equal_the_dense_matrix(name):
    operator, dense, _ = OPERANDS[name]()
    n = len(dense)
    B = random(n, 5)
    close(operator @ B, dense @ B)
    close(operator @ B[:, 0], dense @ B[:, 0])
    close(operator._t_matmul(B), dense.mT @ B)
    close(operator.to_dense(), dense)
    close(operator.diagonal(), dense.diagonal())
    close(operator.mT.to_dense(), dense.mT)
    close(operator[2:4, 1:].to_dense(), dense[2:4, 1:])
    close(operator @ random(2, n, 3), dense @ random(2, n, 3))
    assert (operator @ B).mT.is_contiguous() or not isinstance(operator, Kronecker | DirectSum)
    assert operator.symmetric


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("name", OPERANDS)
def test_every_answer_of_a_closed_form_equals_the_dense_one_without_a_product(name, shift, no_foreign_solvers):
    P, dense = damped(name, shift)
    form, inverse, B = P._closed_form(), torch.linalg.inv(dense), random(len(dense), 4)
    assert form is not None and form is P._closed_form()
    close(form.solve(B), inverse @ B)
    close(form.logdet(), dense.logdet())
    close(form.inverse_diagonal(), inverse.diagonal())
    close(P.solve(B), inverse @ B)
    close(P.solve(B[:, 0]), inverse @ B[:, 0])
    close(P.logdet(), dense.logdet())
    close(P.inverse().diagonal(), inverse.diagonal())
    close(P.inverse().logdet(), -dense.logdet())
    close(torch.stack(P.inv_quad_logdet(B, logdet=True)), torch.stack([(B * (inverse @ B)).sum(), dense.logdet()]))
    products = []
    count = {"progress": lambda what, done, total: products.append(done)}
    close(linalg.solve(P, B, **count), inverse @ B)
    close(linalg.logdet(P, **count).value, dense.logdet())
    close(linalg.diagonal(P.inverse(), **count).value, inverse.diagonal())
    assert P.zero_mean_mvn_samples(3).shape == (3, len(dense)) == P.inverse().zero_mean_mvn_samples(3).shape
    assert not products


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("name", OPERANDS)
def test_the_symmetric_inverse_root(name, shift):
    P, dense = damped(name, shift)
    form, eye = P._closed_form(), torch.eye(len(dense), dtype=torch.float64)
    root = form.inverse_root(eye)
    close(root, root.mT)
    close(root @ dense @ root, eye)
    L = random(3, len(dense))
    close(P.sqrt_inv_matmul(eye, L)[0], L @ root)
    close(P.sqrt_inv_matmul(eye, L)[1], (L @ torch.linalg.inv(dense) * L).sum(1))
    close(P.sqrt_inv_matmul(eye), root)


@pytest.mark.parametrize("name", sorted(set(OPERANDS) - SINGULAR))
def test_undamped_solves_and_logdet(name):
    operator, dense, _ = OPERANDS[name]()
    B = random(len(dense), 3)
    close(operator.solve(B), torch.linalg.solve(dense, B))
    close(operator.logdet(), dense.logdet())
    close(operator.inverse() @ B, torch.linalg.solve(dense, B))


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("name", sorted(set(OPERANDS) - {"kronecker large", "blocks large"}))
def test_samples_have_the_covariance_they_promise(name, shift):
    P, dense = damped(name, shift)
    assert_covariance(lambda k, g: draw(P, k, g), dense)
    assert_covariance(lambda k, g: draw(P.inverse(), k, g), torch.linalg.inv(dense))
    operator, undamped, _ = OPERANDS[name]()
    assert_covariance(lambda k, g: draw(operator, k, g), undamped)


def test_factorised_once_and_again_after_a_change_in_place():
    shift = torch.tensor(0.5, dtype=torch.float64)
    K = Kronecker(positive(2, 9), positive(2, 17))
    P, b = K.add_diagonal(shift), random(306, 2)
    with patch.object(torch.linalg, "eigh", wraps=torch.linalg.eigh) as eigh:
        P.solve(b), P.logdet(), draw(P, 2), P.inverse().diagonal(), K.add_diagonal(2.0).logdet()
        assert eigh.call_count == 2  # one a factor, shared by every damping
        shift.data.fill_(3.0)
        close(P.solve(b), torch.linalg.solve(kron(K.left, K.right) + 3 * torch.eye(306), b))
        K.left.mul_(2)
        close(P.solve(b), torch.linalg.solve(kron(K.left, K.right) + 3 * torch.eye(306), b))
        assert eigh.call_count == 4
    single = P.float()
    assert single.solve(b.float()).dtype is torch.float32 and single.base.eigen().dtype is torch.float32
    close(P.solve(b), torch.linalg.solve(kron(K.left, K.right) + 3 * torch.eye(306), b))


def test_a_cached_closed_form_serves_inside_and_outside_of_inference_mode():
    P, dense = damped("blocks large", "vector")
    b = random(len(dense), 2).requires_grad_()
    with torch.inference_mode():
        close(P.solve(b), torch.linalg.solve(dense, b))
    P.solve(b).sum().backward()
    close(b.grad, torch.linalg.solve(dense, torch.ones_like(b)))


@pytest.mark.parametrize("n", [2, 20])
def test_a_singular_matrix_is_an_error_that_says_so(n):
    root = random(1, n, n - 1)
    for dtype in (torch.float64, torch.float32):
        singular = (root @ root.mT).to(dtype)
        other = positive(1, n).to(dtype)
        for operator in (
            Kronecker(singular, other),
            Kronecker(singular, other).eigen(),
            DirectSum(Kronecker(singular, other), positions=[range(n * n)]),
            Diagonal(torch.zeros(n, dtype=dtype)),
        ):
            for ask in (
                lambda A: A.solve(torch.ones(A.shape[-1], dtype=A.dtype)),
                lambda A: A.logdet(),
                lambda A: A.inverse().diagonal(),
            ):
                with pytest.raises(NotPositiveSemidefiniteError, match="singular"):
                    ask(operator)
                with pytest.raises(NotPositiveSemidefiniteError, match="singular"):
                    ask(operator.clone().requires_grad_(True))
            assert operator.add_diagonal(0.1).logdet().isfinite()


def test_a_shift_that_varies_within_a_group_has_no_closed_form_and_right_answers():
    for K in (Kronecker(positive(2, 3), positive(2, 4)), Kronecker(positive(2, 3), positive(2, 4)).eigen()):
        P, dense = K.add_diagonal(uniform(24)), K.to_dense() + uniform(24).diag()
        assert P._closed_form() is None
        close(P @ random(24, 2), dense @ random(24, 2))
        close(P.solve(random(24, 2)), torch.linalg.solve(dense, random(24, 2)))
        close(P.logdet(), dense.logdet())


def test_an_indefinite_operand_falls_back_or_raises():
    with pytest.raises(NotPositiveSemidefiniteError, match="indefinite"):
        Dense(-positive(1, 300)[0]).add_diagonal(0.01).logdet()
    down = LowRank(random(40, 2), -0.001 * uniform(2)).add_diagonal(1.0)
    assert down._closed_form() is None
    close(down.solve(random(40, 2)), torch.linalg.solve(down.to_dense(), random(40, 2)))


# The algebra stays closed

_low_rank, _dense_low_rank, _shift = OPERANDS["low rank"]()
_diagonal = Diagonal(_shift)


@pytest.mark.parametrize(
    "build, expected",
    [
        (lambda: 2 * _low_rank + _diagonal, 2 * _dense_low_rank + _shift.diag()),
        (lambda: _diagonal + _low_rank, _dense_low_rank + _shift.diag()),
        (lambda: _low_rank.add_diagonal(0.5) + _diagonal, _dense_low_rank + (0.5 + _shift).diag()),
        (lambda: _diagonal + _low_rank.add_diagonal(0.5), _dense_low_rank + (0.5 + _shift).diag()),
        (lambda: 3 * (_low_rank + _diagonal), 3 * _dense_low_rank + 3 * _shift.diag()),
        (lambda: (_low_rank + 2 * _diagonal) / 2, _dense_low_rank / 2 + _shift.diag()),
        (lambda: _diagonal + _diagonal + _low_rank, _dense_low_rank + 2 * _shift.diag()),
    ],
)
def test_sums_and_multiples_still_solve_by_woodbury(build, expected):
    P = build()
    assert isinstance(P, Damped) and P.plan().chosen["solve"] == "closed form"
    close(P.to_dense(), expected)
    close(P.solve(random(40, 2)), torch.linalg.solve(expected, random(40, 2)))


@pytest.mark.parametrize("name", OPERANDS)
def test_multiples_stay_in_their_class(name):
    operator, dense, _ = OPERANDS[name]()
    if name != "dense":
        assert type(2.5 * operator) is type(operator)
    close((2.5 * operator).to_dense(), 2.5 * dense)
    close((-operator).to_dense(), -dense)
    assert not (-operator).psd
    close((2.5 * operator.add_diagonal(1.0)).logdet(), (2.5 * (dense + torch.eye(len(dense)))).logdet())
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    ((scale * operator) @ random(len(dense), 1)).sum().backward()
    close(scale.grad, (dense @ random(len(dense), 1)).sum())


def test_sums_of_diagonals_are_diagonals():
    close((_diagonal + _diagonal).to_dense(), 2 * _shift.diag())
    assert isinstance(_diagonal - _diagonal, Diagonal)


@pytest.mark.parametrize("name", OPERANDS)
def test_a_trace_and_a_diagonal_are_exact_where_they_are_known(name):
    operator, dense, shift = OPERANDS[name]()
    for A, expected in (
        (operator, dense),
        (operator.add_diagonal(shift), dense + shift.diag()),
        (2 * operator + operator, 3 * dense),
        (operator.add_diagonal(shift + 1).inverse(), torch.linalg.inv(dense + (shift + 1).diag())),
    ):
        for estimate in (A.trace(), linalg.trace(A, rtol=1e-3)):
            assert (float(estimate.stderr), estimate.samples, estimate.matvecs) == (0.0, 0, 0)
            torch.testing.assert_close(estimate.value, expected.trace(), rtol=1e-10, atol=0)
        diagonal = linalg.diagonal(A)
        assert torch.equal(diagonal.value, A.diagonal()) and diagonal.samples == diagonal.matvecs == 0


@pytest.mark.parametrize(
    "matrix",
    [
        Dense(torch.full((2, 2), torch.inf), psd=True),
        Kronecker(torch.full((2, 2), torch.inf), torch.eye(2)),
        Kronecker(torch.eye(2), torch.full((2, 2), torch.inf)),
    ],
    ids=["dense", "left", "right"],
)
def test_a_matrix_that_is_not_finite_is_refused_by_name(matrix):
    words = r"Dense \(2, 2\)" if isinstance(matrix, Dense) else "factor of a Kronecker product"
    with pytest.raises(ValueError, match=f"{words} holds NaN or Inf.*range of float32. Scale them"):
        matrix.add_diagonal(1.0).logdet()
    with pytest.raises(ValueError, match="holds NaN or Inf"):
        draw(matrix, 1)
