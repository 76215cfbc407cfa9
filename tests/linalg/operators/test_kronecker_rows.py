"""Rows times a root of the inverse of a Kronecker product plus a multiple of I, against dense inverses."""

import pytest
import torch

from curvops.linalg import Kronecker
from curvops.linalg.operators.kronecker_factors import Details
from curvops.linalg.operators.kronecker_rows import half_solved
from tests.linalg.operands import kron, positive, random

ROOT = Details(by_root=True)


def thin(g, rows, size, seed=1):
    return random(g, rows, size, seed=seed), ROOT


def whole(g, size):
    return positive(g, size), Details()


FACTORS = {
    "dense": (whole(1, 2), whole(1, 9)),
    "dense, in groups": (whole(3, 2), whole(3, 9)),
    "a root": (whole(1, 2), thin(1, 5, 9)),
    "a root, in groups": (whole(3, 2), thin(3, 5, 9)),
    "a root of many rows": (whole(1, 2), thin(1, 11, 9)),
    "the left one is wide": (thin(2, 5, 9), whole(2, 3)),
    "two roots": (thin(1, 1, 3), thin(1, 5, 9, seed=2)),
    "a small factor of zeros": ((torch.zeros(1, 2, 2).double(), Details()), thin(1, 5, 9)),
    "a wide factor of zeros": (whole(1, 2), (torch.zeros(1, 9, 9).double(), Details())),
}


def product(factors, dtype=torch.float64):
    (left, of_left), (right, of_right) = factors
    return Kronecker(left.to(dtype), right.to(dtype), details=(of_left, of_right))


def gram(form, rows):
    return sum(Z @ Z.mT for Z in half_solved(form, rows))


@pytest.mark.parametrize("shift", [1e-3, 0.3, 1e3])
@pytest.mark.parametrize("name", FACTORS)
def test_products_of_rows_are_those_with_the_dense_inverse(name, shift):
    K = product(FACTORS[name])
    rows = random(4, *K.sizes, seed=3)
    found = gram(K.add_diagonal(shift)._closed_form(), rows)
    dense = kron(K.left, K.right) + shift * torch.eye(K.shape[-1], dtype=torch.float64)
    flat = rows.flatten(1)
    expected = flat @ torch.linalg.solve(dense, flat.mT)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10 * float(expected.abs().max()))


def test_each_group_may_have_its_own_shift():
    K = product(FACTORS["a root, in groups"])
    shift = torch.tensor([0.1, 2.0, 30.0]).double().repeat_interleave(18)
    flat = random(4, K.shape[-1], seed=3)
    found = gram(K.add_diagonal(shift)._closed_form(), flat.view(4, *K.sizes))
    expected = flat @ torch.linalg.solve(kron(K.left, K.right) + shift.diag(), flat.mT)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_rows_in_single_precision_keep_the_small_eigenvalues():
    """A condition number of 1e9: the results are those in the eigenbasis, in double precision."""
    scales = torch.logspace(4, -2, 30)
    root = (torch.linalg.qr(torch.randn(300, 30, generator=torch.Generator().manual_seed(0))).Q * scales).mT[None]
    left, rows = torch.tensor([[[2.0, 1.0], [1.0, 2.0]]]), random(3, 1, 2, 300).float()
    rows[0] = root[0, 0]  # the row with the largest eigenvalue
    factors = (left, Details()), (root, ROOT)
    found = gram(product(factors, torch.float32).add_diagonal(0.1)._closed_form(), rows)
    form = product(factors).add_diagonal(0.1)._closed_form()
    rotated = form.rotate_back(rows.double().flatten(1).mT)
    expected = (rotated.square() / form.spectrum.unsqueeze(1)).sum(0)
    torch.testing.assert_close(found.double().diagonal(), expected, rtol=1e-5, atol=0.0)


def test_a_matrix_without_a_cholesky_factor_is_decomposed(monkeypatch):
    K = product(FACTORS["a root, in groups"])
    rows = random(4, *K.sizes, seed=3)
    form = K.add_diagonal(0.3)._closed_form()
    expected = gram(form, rows)
    failed = torch.ones(3, dtype=torch.int32)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda matrix: (matrix, failed))
    torch.testing.assert_close(gram(form, rows), expected, rtol=1e-10, atol=1e-10)
    assert K.known_eigen is not None
