"""What is particular to Kronecker products: their eigenbasis, the heuristic damping, what their factors must be."""

import pytest
import torch

from curvops.errors import NotPositiveSemidefiniteError
from curvops.linalg import Kronecker
from curvops.linalg.operators import Details
from curvops.operators.curvatures import nearest_kronecker
from tests.linalg.operands import close, full, kron, positive, random, uniform


@pytest.mark.parametrize(
    "left, right",
    [(positive(3, 4), positive(3, 5)), (uniform(2, 4), positive(2, 3)), (positive(2, 1), uniform(2, 3))],
)
def test_heuristic_damping_is_the_damped_factors_with_balanced_traces(left, right):
    damping = 0.3
    K = Kronecker(left, right).heuristic_damping(damping)
    pi = (full(right).diagonal(dim1=1, dim2=2).mean(1) / full(left).diagonal(dim1=1, dim2=2).mean(1)).sqrt()
    eyes = [torch.eye(f.shape[1], dtype=torch.float64).expand(len(f), -1, -1) for f in (left, right)]
    left_shift = damping**0.5 / pi[:, None, None] * eyes[0]
    right_shift = damping**0.5 * pi[:, None, None] * eyes[1]
    close(K.to_dense(), kron(full(left) + left_shift, full(right) + right_shift))
    cross = [kron(full(left), right_shift), kron(left_shift, full(right))]
    close(cross[0].trace(), cross[1].trace())
    close(kron(left_shift, right_shift), damping * torch.eye(len(cross[0]), dtype=torch.float64))


def test_heuristic_damping_of_a_zero_factor_and_of_bad_shifts():
    K = Kronecker(torch.zeros(1, 2, 2, dtype=torch.float64), positive(1, 3))
    close(K.heuristic_damping(0.25).left, 0.5 * torch.eye(2, dtype=torch.float64).expand(1, 2, 2))
    for shift in (0.0, -1.0, torch.ones(6, dtype=torch.float64)):
        with pytest.raises(ValueError, match="one positive number"):
            K.heuristic_damping(shift)


@pytest.mark.parametrize("rows", [3, 9])
def test_eigenvalues_of_a_root_are_zero_where_it_has_no_rows(rows):
    """With a root of fewer and of more rows than columns, a diagonal factor, and groups."""
    root = random(2, rows, 5)
    details = (Details(root=root), Details())
    factors = root.mT @ root, uniform(2, 3)
    found = Kronecker(*factors, details=details).eigenvalues()
    assert (found == 0).sum() == 2 * 3 * max(0, 5 - rows)
    indefinite = Kronecker(-positive(1, 4), positive(1, 2))
    for question in (indefinite.eigenvalues, indefinite.eigen, indefinite.add_diagonal(1e-3).logdet):
        with pytest.raises(NotPositiveSemidefiniteError, match="left factor"):
            question()


def test_float32_solutions_keep_the_small_eigenvalues():
    """Condition 1e8 and a shift of 1e-6: eigendecompositions in float32 would be off by 1 % here."""
    values = torch.logspace(0, -8, 100, dtype=torch.float64)
    factors = []
    for seed in (0, 1):
        Q = torch.linalg.qr(random(100, 100, seed=seed)).Q
        single = ((Q * values) @ Q.mT).float()
        factors.append(((single + single.mT) / 2).unsqueeze(0))
    left, right = factors
    b = random(10_000, 2).float()
    solution = Kronecker(left, right).add_diagonal(1e-6).solve(b)
    exact = Kronecker(left.double(), right.double()).add_diagonal(1e-6).solve(b.double())
    assert (solution - exact).norm() < 5e-6 * exact.norm()


# The product nearest to a sum of them, against the singular pair of the rearranged dense matrix.


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
