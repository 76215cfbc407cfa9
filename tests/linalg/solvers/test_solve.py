"""`solve` against dense solutions, whichever method it takes.

Tests `systems.py`.
"""

import math

import pytest
import torch
from linear_operator import to_linear_operator

from curvops.errors import ConvergenceError, NotPositiveDefiniteError
from curvops.linalg import Dense, Diagonal, LowRank, Operator, Reason, method_for, solve
from tests.linalg.known import Known
from tests.linalg.matrices import SPECTRA, rotation, symmetric
from tests.linalg.systems import right_hand_sides

N = 300  # more than is solved for densely


POSITIVE = symmetric(torch.linspace(1, 3, N).double())
INDEFINITE = symmetric(torch.cat([-torch.linspace(1, 2, N // 2), torch.linspace(1, 3, N // 2)]).double())
SKEWED = 2 * torch.eye(N, dtype=torch.float64) + rotation(N, seed=3) / 2
WIDE = POSITIVE[:200]

# The matrix, what is known of it, and the method that follows.
TABLE = {
    "rectangular tensor": (WIDE, "lsmr"),
    "rectangular operator": (Known(WIDE, is_symmetric=False), "lsmr"),
    "closed form": (Diagonal(torch.linspace(1, 2, N).double()), "closed form"),
    "closed form with a prior": (
        LowRank(right_hand_sides(N, 3), torch.ones(3).double()).add_diagonal(0.5),
        "closed form",
    ),
    "inverse": (Known(POSITIVE, is_psd=True).inverse(), "closed form"),
    "small": (Known(POSITIVE[:100, :100], is_symmetric=False), "dense"),
    "tensor": (SKEWED, "dense"),
    "tensor as an operator": (Dense(SKEWED), "dense"),
    "tensor that is semidefinite": (Dense(POSITIVE, psd=True), "dense"),
    "semidefinite": (Known(POSITIVE, is_psd=True), "cg"),
    "curvature and prior": (Known(INDEFINITE).add_diagonal(4.0), "cg"),
    "symmetric": (Known(INDEFINITE), "minres"),
    "negated": (-Known(POSITIVE, is_psd=True), "minres"),
    "unknown but symmetric": (Known(INDEFINITE, is_symmetric=False), "minres"),
    "foreign symmetric": (to_linear_operator(INDEFINITE), "minres"),
    "foreign": (to_linear_operator(SKEWED), "lsmr"),
    "unknown": (Known(SKEWED, is_symmetric=False), "lsmr"),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_method_follows_from_what_is_known_and_solves(name):
    A, method = TABLE[name]
    assert method_for(A) == method
    dense = A if isinstance(A, torch.Tensor) else A.to_dense()
    B = right_hand_sides(len(dense), 2)
    x = solve(A, B, rtol=1e-10)
    torch.testing.assert_close(x, torch.linalg.pinv(dense) @ B, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(solve(A, B[:, 0], rtol=1e-10), x[:, 0], rtol=1e-7, atol=1e-7)
    if isinstance(A, Operator) and A.is_square:
        torch.testing.assert_close(A.solve(B), x, rtol=1e-6, atol=1e-6)


METHODS = ("dense", "cg", "minres", "lsmr")


@pytest.mark.parametrize(("n", "method"), [(1, "dense"), (1, "cg"), *((3, name) for name in METHODS)])
def test_batches_of_matrices_and_of_right_hand_sides_broadcast(n, method):
    matrices = torch.stack([symmetric(torch.linspace(1, last, n).double()) + torch.eye(n) for last in range(2, 14)])
    shapes = ((n,), (3, n, 1)), ((n,), (1, n, 2), (3, 3, n, 2)), ((n, 1), (3, n, 2))
    for A, broadcast in zip((matrices[0], matrices[:3], matrices.view(4, 3, n, n)), shapes):
        for shape in broadcast:
            leaves = (A.clone().requires_grad_(), right_hand_sides(math.prod(shape), 1).view(shape).requires_grad_())
            found, exact = solve(*leaves, method=method, rtol=1e-10), torch.linalg.inv(leaves[0]) @ leaves[1]
            torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-8)
            torch.testing.assert_close(solve(*map(torch.detach, leaves), method=method, rtol=1e-10), found)
            pairs = zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (found, exact)))
            for mine, theirs in pairs:
                torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-7)


class Counted(Known):
    """A matrix that counts its products."""

    products = 0

    def _product(self, block):
        Counted.products += block.shape[-1]
        return super()._product(block)


def test_failures_raise_and_carry_the_solution():
    b = right_hand_sides(N, 1)[:, 0]
    with pytest.raises(NotPositiveDefiniteError) as failure:
        solve(Known(INDEFINITE, is_psd=True), b)
    assert failure.value.solution.reasons == (Reason.NOT_POSITIVE_DEFINITE,)
    with pytest.raises(NotPositiveDefiniteError):
        Known(INDEFINITE).add_diagonal(0.1).solve(b)
    with pytest.raises(NotPositiveDefiniteError):
        solve(Dense(INDEFINITE, psd=True), b)
    for singular in (Known(POSITIVE[:, :1] @ POSITIVE[:1]), POSITIVE[:, :1] @ POSITIVE[:1], torch.zeros(3, 3).double()):
        with pytest.raises(ConvergenceError) as failure:
            solve(singular, b[: singular.shape[0]])
        assert failure.value.solution.reasons == (Reason.SINGULAR,)
    with pytest.raises(ConvergenceError, match="ITERATION_LIMIT"):
        solve(Known(INDEFINITE), b, maxiter=2)


# Gradients, against dense ones


def checked(function, *tensors):
    return torch.autograd.gradcheck(function, [t.clone().requires_grad_() for t in tensors], atol=1e-6)


def small_positive(t):
    return t @ t.mT + 3 * torch.eye(len(t), dtype=t.dtype)


MADE = {
    "cg": lambda t: Known(small_positive(t), is_psd=True),
    "minres": lambda t: Known(small_positive(t) - 6 * torch.eye(len(t), dtype=t.dtype)),
    "lsmr": lambda t: Known(small_positive(t) + t, is_symmetric=False),
    "closed form": lambda t: Dense(small_positive(t)).add_diagonal(t[0, 0].square()),
    "dense": lambda t: Known(small_positive(t)),
}


@pytest.mark.parametrize("method", MADE)
def test_gradients_inside_the_operator_and_in_the_right_hand_side(method):
    t, B = right_hand_sides(3, 3), right_hand_sides(3, 2, seed=4)
    assert checked(lambda t, B: solve(MADE[method](t), B, method=method, rtol=1e-13), t, B)
    tensor = "minres" if method == "closed form" else method
    assert checked(lambda t, b: solve(MADE[method](t).to_dense(), b, method=tensor, rtol=1e-13), t, B[:, 0])


@pytest.mark.parametrize("shape", [(4, 2), (2, 4)])
def test_gradients_of_least_squares(shape):
    A, B = right_hand_sides(*shape), right_hand_sides(shape[0], 2, seed=4)
    assert checked(lambda A, B: solve(A, B, rtol=1e-13), A, B)
    assert checked(lambda A, b: solve(Known(A, is_symmetric=False), b, rtol=1e-13), A, B[:, 0])
    x = solve(A, B, rtol=1e-12)
    torch.testing.assert_close(x, torch.linalg.pinv(A) @ B, rtol=1e-9, atol=1e-9)


def test_one_solve_forward_and_one_backward(monkeypatch):
    monkeypatch.setattr(Counted, "products", 0)
    B = right_hand_sides(N, 2).requires_grad_()
    matrix = INDEFINITE.clone().requires_grad_()
    loss = solve(Counted(matrix), B).square().sum()
    once = Counted.products
    loss.backward()
    assert 1.5 * once < Counted.products < 2.5 * once
    x = torch.linalg.solve(INDEFINITE, B.detach())
    torch.testing.assert_close(B.grad, torch.linalg.solve(INDEFINITE, 2 * x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(matrix.grad, -torch.linalg.solve(INDEFINITE, 2 * x) @ x.mT, rtol=1e-5, atol=1e-5)


def test_memory_budget_and_preconditioner_reach_the_solver():
    A, B = Known(symmetric(SPECTRA["flat"].repeat(3)), is_psd=True), right_hand_sides(360, 4)
    exact = torch.linalg.solve(A.to_dense(), B)
    x = solve(A, B, memory_budget=1, preconditioner=torch.linalg.inv(A.to_dense()), rtol=1e-10)
    torch.testing.assert_close(x, exact, rtol=1e-8, atol=1e-8)


def test_a_matrix_may_be_named_where_tensors_may_be_sharded():
    import torch.distributed.tensor

    A, b = 2 * torch.eye(3), torch.ones(3)
    assert torch.equal(solve(A=A, B=b), solve(A, B=b))
    with pytest.raises(TypeError, match="missing .* argument: 'A'"):
        solve(B=b)
