"""Gradients of what a damped operand answers: through its shift, and the tensors inside it."""

import pytest
import torch

from curvops.linalg import Dense, Diagonal, DirectSum, Kronecker, LowRank, Scaled, draw
from tests.linalg.matrices import generator
from tests.linalg.operands import OPERANDS, positive, random, uniform


def checked(function, *tensors, **options):
    return torch.autograd.gradcheck(function, [t.clone().requires_grad_() for t in tensors], **options)


INSIDE = {
    "diagonal": (lambda t: Diagonal(t), uniform(6)),
    "dense": (lambda t: Dense((t + t.mT) / 2), positive(1, 5)[0]),
    "low rank": (lambda t: LowRank(t, uniform(2)), random(6, 2)),
    "low rank values": (lambda t: LowRank(random(6, 2), t), uniform(2)),
    "kronecker": (lambda t: Kronecker((t + t.mT) / 2, positive(1, 3, seed=2)), positive(1, 2)),
    "kronecker right": (lambda t: Kronecker(uniform(1, 2), (t + t.mT) / 2), positive(1, 3)),
    "blocks": (
        lambda t: DirectSum(Diagonal(t), Dense(positive(1, 3)[0]), positions=[range(3, 6), range(3)]),
        uniform(3),
    ),
    "scaled": (lambda t: Scaled(Kronecker(torch.ones(1, 2, 2).double(), positive(1, 3)), t), uniform(1)[0]),
}
"""Each operand as a function of one tensor inside it, and that tensor."""


def total(answer):
    """The sum of all numbers with weights of their own: one number, for one backward pass."""
    return (answer * torch.linspace(-1, 2, answer.numel(), dtype=torch.float64).view(answer.shape)).sum()


def beside(operator, rows):
    """This block, and next to it a diagonal with so many rows, which make a matrix too large to be formed."""
    if not rows:
        return operator
    n = operator.shape[-1]
    return DirectSum(operator, Diagonal(uniform(rows)), positions=[range(n), range(n, n + rows)])


@pytest.mark.parametrize("rows", [256, 0], ids=["closed form", "dense"])
@pytest.mark.parametrize("name", INSIDE)
def test_gradients_through_the_shift_and_the_tensors_inside(name, rows):
    made, inside = INSIDE[name]

    def build(t):
        return beside(made(t), rows)

    n = build(inside).shape[-1]
    b, d = random(n, 2), torch.tensor(0.8, dtype=torch.float64)
    for answer in (
        lambda P: P.solve(b),
        lambda P: P.logdet(),
        lambda P: P.inverse().diagonal(),
        lambda P: draw(P.inverse(), 2, generator()),
        lambda P: P.sqrt_inv_matmul(b),
    ):
        assert checked(lambda t, s, answer=answer: total(answer(build(t).add_diagonal(s))), inside, d)
    assert checked(lambda B: total(build(inside).add_diagonal(d).solve(torch.cat([B, b[2:]]))), b[:2].clone())


def test_the_logdet_gradient_of_a_vector_shift_is_the_inverses_diagonal():
    for name in OPERANDS:
        operator, dense, vector = OPERANDS[name]()
        shift = vector.clone().requires_grad_()
        P = beside(operator, 256).add_diagonal(torch.cat([shift, torch.ones(256, dtype=torch.float64)]))
        (gradient,) = torch.autograd.grad(P.logdet(), shift)
        expected = torch.linalg.inv(dense + vector.diag()).diagonal()
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)


def test_repeated_eigenvalues_have_gradients_in_solve_and_logdet():
    eye, b = torch.eye(3, dtype=torch.float64).unsqueeze(0), random(6 + 256, 2)

    def answers(t):
        P = beside(Kronecker((t + t.mT) / 2, positive(1, 2)), 256).add_diagonal(0.5)
        return P.solve(b).sum() + P.logdet()

    assert checked(answers, eye)
