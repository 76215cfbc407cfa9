"""The Kronecker product nearest to a sum of them, against the singular pair of the rearranged dense matrix."""

import pytest
import torch

from curvops.linalg import Kronecker
from curvops.operators.kfac.kfac_sum import nearest_kronecker
from tests.linalg.operands import full, kron, positive, uniform


def close(actual, expected, atol=1e-10):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=atol)


SUMS = {
    "two": [(positive(1, 3), positive(1, 4)), (positive(1, 3) + 1, positive(1, 4).square())],
    "three groups": [(positive(3, 2), positive(3, 3)), (uniform(3, 2).diag_embed(), positive(3, 3) + 2)],
    "diagonal factors": [(positive(2, 3), uniform(2, 4)), (positive(2, 3) * 2 + 1, uniform(2, 4).square())],
    "four": [(positive(1, 2) + i, positive(1, 3) * (i + 1) + i) for i in range(4)],
    "a zero": [(positive(1, 3), positive(1, 2)), (torch.zeros(1, 3, 3, dtype=torch.float64), positive(1, 2))],
}


@pytest.mark.parametrize("case", SUMS)
def test_it_is_the_first_singular_pair_of_the_rearranged_matrix(case):
    terms = SUMS[case]
    found = nearest_kronecker([Kronecker(*factors) for factors in terms])
    groups = range(len(terms[0][0]))
    dense, expected, left_out, size = (torch.zeros((), dtype=torch.float64) for _ in range(4))
    parts = []
    for g in groups:
        pairs = [(full(left)[g], full(right)[g]) for left, right in terms]
        p, q = len(pairs[0][0]), len(pairs[0][1])
        rearranged = sum(left.reshape(-1, 1) * right.reshape(1, -1) for left, right in pairs)
        U, s, V = torch.linalg.svd(rearranged)
        parts.append(torch.kron(s[0] * U[:, 0].view(p, p), V[0].view(q, q)))
        left_out, size = left_out + s[1:].square().sum(), size + s.square().sum()
    expected = torch.block_diag(*parts)
    close(found.operator.to_dense(), expected)
    close(found.size, size)
    close(found.error, left_out, 1e-10 * float(size))
    dense = sum(kron(full(left), full(right)) for left, right in terms)
    close((dense - expected).square().sum(), left_out, 1e-10 * float(size))
    for factor in (full(found.operator.left), full(found.operator.right)):  # positive semidefinite, as the terms are
        assert float(torch.linalg.eigvalsh(factor).min()) > -1e-12 * float(factor.abs().max())


def test_one_product_is_itself_and_what_single_precision_does_not_hold_is_kept():
    left, right = positive(2, 3), positive(2, 4)
    one = nearest_kronecker([Kronecker(left, right)])
    close(one.operator.to_dense(), kron(left, right))
    assert float(one.error) == 0.0
    again = nearest_kronecker([Kronecker(left, right), Kronecker(3 * left, right)])  # still of one product
    close(again.operator.to_dense(), 4 * kron(left, right))
    assert float(again.error) <= 1e-14 * float(again.size)
    single = nearest_kronecker([Kronecker(left.float(), right.float())] * 2).operator
    rough = 2 * kron(left.float().double(), right.float().double())
    close(single.to(torch.float64).to_dense(), rough, 1e-11 * float(rough.abs().max()))
