"""linear_operator's own spectral entries of our operators: exact where small, `eigsh` or an error where large."""

import pytest
import torch
from linear_operator import settings

from curvops.linalg import LowRank
from tests.linalg.known import Known
from tests.linalg.matrices import rotation, symmetric


def test_small_operators_are_decomposed_densely_and_signs_are_kept():
    A = symmetric(torch.linspace(-1, 2, 30, dtype=torch.float64))
    op = Known(A)
    for values, vectors in (op.diagonalization(), op.eigh()):
        torch.testing.assert_close(vectors.to_dense() * values @ vectors.to_dense().mT, A, rtol=0, atol=1e-12)
        torch.testing.assert_close(values, torch.linspace(-1, 2, 30, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(op.eigvalsh(), torch.linspace(-1, 2, 30, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (20, 20)])
def test_small_svd_of_any_shape(shape):
    A = rotation(30)[: shape[0], : shape[1]]
    U, values, V = Known(A, is_symmetric=False).svd()
    torch.testing.assert_close(U.to_dense() * values @ V.to_dense().mT, A, rtol=0, atol=1e-12)
    torch.testing.assert_close(values, torch.linalg.svdvals(A))


def test_large_diagonalization_is_certified_and_of_largest_absolute_value():
    values = torch.cat([torch.full((12,), -5.0), torch.linspace(3, 4, 8), torch.linspace(-0.5, 0.5, 280)]).double()
    A = symmetric(values)
    with settings.max_root_decomposition_size(20):
        found, vectors = Known(A).diagonalization()
    torch.testing.assert_close(found.sort().values, values[:20].sort().values, rtol=1e-10, atol=0)
    V = vectors.to_dense()
    assert (A @ V - V * found).norm(dim=0).max() < 1e-6
    torch.testing.assert_close(V.mT @ V, torch.eye(20, dtype=torch.float64), rtol=0, atol=1e-12)


def test_large_operator_of_low_rank():
    U = rotation(300)[:, :5]
    s = torch.tensor([5.0, 5.0, 3.0, 2.0, 1.0]).double()
    values, _ = LowRank(U, s).diagonalization()
    torch.testing.assert_close(values[:5], s, rtol=1e-10, atol=0)
    assert values[5:].abs().max() < 1e-12
