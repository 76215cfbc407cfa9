"""Blocks on positions: how they divide a vector, and how blocks without a closed form answer.

Tests `partition.py`.
"""

import pytest
import torch

from curvops import linalg
from curvops.linalg import Dense, Diagonal, DirectSum, draw
from tests.linalg.known import Rooted
from tests.linalg.operands import blocks, close, dense, diagonal, kronecker, low_rank, positive, random, uniform


@pytest.mark.parametrize(
    "positions",
    [
        [range(3), range(3, 5), range(5, 9)],
        [range(3, 5), range(5, 9), range(3)],
        [torch.tensor([8, 0, 3]), torch.tensor([1, 2]), torch.tensor([4, 5, 6, 7])],
        [torch.tensor([2, 3, 0, 4, 5, 1]), torch.tensor([6, 7, 8])],  # a matrix with a column beside it, in front
        [torch.tensor([0, 1, 7, 2, 3, 8]), torch.tensor([4, 5, 6])],
        [torch.tensor([0, 1, 7, 2, 3, 6]), torch.tensor([8]), torch.tensor([4, 5])],  # not quite one
        [torch.tensor([0, 4, 1, 5, 2, 6]), torch.tensor([8, 3]), torch.tensor([7])],
        [torch.tensor([0, 8]), torch.tensor([1, 2, 3, 4, 5, 6, 7])],
    ],
)
def test_split_and_join_are_inverse(positions):
    parts = DirectSum(*(Diagonal(torch.ones(len(index))) for index in positions), positions=positions).partition
    rows = random(2, 9)
    pieces = parts.split(rows)
    assert [piece.shape[-1] for piece in pieces] == parts.sizes and parts.size == 9
    for piece, index in zip(pieces, positions):
        assert torch.equal(piece, rows[:, list(index)])
    assert torch.equal(parts.join(pieces), rows)
    assert isinstance(parts.parts[-1], range)


def test_blocks_that_are_not_symmetric_transpose():
    A = random(4, 4)
    B = DirectSum(Dense(A), Diagonal(uniform(2)), positions=[torch.tensor([5, 1, 2, 3]), torch.tensor([0, 4])])
    assert not B.symmetric
    close(B.mT.to_dense(), B.to_dense().mT)
    close(B._t_matmul(random(6, 2)), B.to_dense().mT @ random(6, 2))


def test_blocks_without_a_closed_form():
    A = positive(1, 300)[0]
    order = torch.randperm(312, generator=torch.Generator().manual_seed(0))
    kron, matrix, _ = kronecker(positive(1, 3), positive(1, 4))
    P = DirectSum(Rooted(A), kron, positions=order.split([300, 12])).add_diagonal(0.5)
    back = order.argsort()
    expected = torch.block_diag(A, matrix)[back][:, back] + 0.5 * torch.eye(312, dtype=torch.float64)
    b = random(312, 3)
    close(P.solve(b), torch.linalg.solve(expected, b), 1e-10)
    close(P.inverse().diagonal(), torch.linalg.inv(expected).diagonal(), 1e-10)
    close(P.inverse(1e-10) @ b, torch.linalg.solve(expected, b), 1e-9)
    logdet = expected.logdet()
    assert abs(P.logdet() - logdet) < 1e-8 and linalg.logdet(P, max_matvecs=200).samples == 0
    assert draw(P, 2).shape == draw(P.inverse(), 2).shape == (312, 2)
    close(P.sqrt_inv_matmul(P.sqrt_inv_matmul(b)), torch.linalg.solve(expected, b), 1e-10)


def test_a_block_too_large_to_form_is_solved_with_by_products():
    values = torch.linspace(1, 2, 2049, dtype=torch.float64)
    kron, matrix, _ = kronecker(positive(1, 3), positive(1, 4))
    P = DirectSum(Rooted(values.diag()), kron, positions=[range(2049), range(2049, 2061)]).add_diagonal(0.5)
    b, shifted = random(2061, 2), matrix + 0.5 * torch.eye(12, dtype=torch.float64)
    close(P.solve(b)[:2049], b[:2049] / (values + 0.5)[:, None], 1e-6)
    close(P.solve(b)[2049:], torch.linalg.solve(shifted, b[2049:]), 1e-6)
    estimate = linalg.logdet(P, max_matvecs=200)  # by probes: with their error
    assert estimate.samples > 0 and float(estimate.stderr) > 0


def test_nested_blocks_and_damped_blocks_keep_closed_forms():
    inner, matrix, _ = blocks([diagonal(3), low_rank(5, 2)], permuted=True)
    outer = DirectSum(inner.add_diagonal(0.3), dense(4)[0], positions=[range(4, 12), range(4)])
    expected = torch.block_diag(dense(4)[1], matrix + 0.3 * torch.eye(8, dtype=torch.float64))
    close(outer.to_dense(), expected)
    close(outer.solve(random(12, 2)), torch.linalg.solve(expected, random(12, 2)))
    close(outer.add_diagonal(uniform(12)).logdet(), (expected + uniform(12).diag()).logdet())
    close((3 * outer).logdet(), (3 * expected).logdet())


def test_other_dtypes_and_permuted_positions_survive_a_conversion():
    operator, matrix, _ = blocks([diagonal(3), dense(4)], permuted=True)
    single = operator.float()
    assert single.dtype is torch.float32 and single.partition.parts[0].dtype is torch.long
    torch.testing.assert_close(single.to_dense(), matrix.float())
