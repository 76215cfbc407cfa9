import math

import pytest
import torch
from linear_operator.operators import DenseLinearOperator

from curvops.linalg import Dense, Reason, dual_descent
from curvops.linalg.core import vectors
from tests.linalg.matrices import generator
from tests.linalg.systems import right_hand_sides, true_residuals


def kernel(n=400, length=1.0, seed=0):
    X = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.exp(-torch.cdist(X, X).square() / (2 * length**2))


K, NOISE = kernel(), 1.0
A = K + NOISE * torch.eye(400, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch_size", [20, 100, 1000])
def test_reaches_the_solution_with_true_residuals(batch_size, dtype):
    B = right_hand_sides(400, 3).to(dtype)
    s = dual_descent(K.to(dtype), B, noise=NOISE, batch_size=batch_size, rtol=1e-3, maxiter=600, generator=generator())
    assert s.reasons == (Reason.CONVERGED,) * 3 and (s.relative_residuals <= 1e-3).all()
    torch.testing.assert_close(s.relative_residuals, true_residuals(A, s.x, B), rtol=1e-3, atol=1e-6)
    exact = torch.linalg.solve(A, B.double())
    assert (s.x.double() - exact).norm() <= 2e-3 * exact.norm()
    assert s.history.shape[1] == 3 and s.iterations < 600


def test_operators_with_rows_and_the_generator():
    b = right_hand_sides(400, 1)[:, 0]
    tensor = dual_descent(K, b, noise=NOISE, batch_size=50, generator=generator(1))
    for operator in (Dense(K, psd=True), DenseLinearOperator(K)):
        s = dual_descent(operator, b, noise=NOISE, batch_size=50, generator=generator(1))
        torch.testing.assert_close(s.x, tensor.x, rtol=1e-10, atol=1e-12)
    assert not torch.equal(dual_descent(K, b, noise=NOISE, batch_size=50, generator=generator(2)).x, tensor.x)


def test_epochs_are_those_of_the_algorithm():
    """Written out densely: steps of n/b rows' gradients, the last batch shorter, Nesterov's momentum, the average."""
    n, batch, epochs, noise, momentum, beta = 30, 8, 60, 0.5, 0.8, 0.01
    small = K[:n, :n]
    b = right_hand_sides(n, 1)[:, 0]
    y, source = b / b.norm(), generator()
    alpha, average, velocity = (torch.zeros(n, dtype=torch.float64) for _ in range(3))
    share = 100 * batch / (n * epochs)
    for _ in range(epochs):
        for index in torch.randperm(n, generator=source).split(batch):
            ahead = alpha + momentum * velocity
            gradient = torch.zeros(n, dtype=torch.float64)
            gradient[index] = n / len(index) * (small[index] @ ahead + noise * ahead[index] - y[index])
            velocity = momentum * velocity - beta * gradient
            alpha = alpha + velocity
            average = average + share * (alpha - average)
    options = {"noise": noise, "batch_size": batch, "momentum": momentum, "step_size": beta, "rtol": 1e-12}
    found = dual_descent(small, b, **options, maxiter=epochs, generator=generator())
    residuals = [(y - small @ x - noise * x).norm() for x in (average, alpha)]
    expected = average if residuals[0] < residuals[1] else alpha  # the better of the two
    torch.testing.assert_close(found.x, expected * b.norm(), rtol=1e-10, atol=1e-14)


def test_the_default_step_is_one_over_the_smoothness_of_the_sampled_objective():
    """Of K = 3 I every norm and diagonal is known: L = c + n/b (n − b)/(n − 1) c with c = 3 + noise."""
    n, b, c = 30, 8, 3.5
    L = c + n / b * (n - b) / (n - 1) * c
    y, options = right_hand_sides(n, 2), {"noise": 0.5, "batch_size": b, "maxiter": 3, "rtol": 1e-12}
    source = generator()
    vectors.random_block(y, 1, generator=source)  # what the power iterations start from
    expected = dual_descent(3 * torch.eye(n).double(), y, step_size=1 / L, generator=source, **options)
    found = dual_descent(3 * torch.eye(n).double(), y, generator=generator(), **options)
    torch.testing.assert_close(found.x, expected.x, rtol=1e-10, atol=1e-14)
    assert found.matvecs - expected.matvecs == 13


def test_a_step_that_diverges_is_halved():
    b = right_hand_sides(400, 1)[:, 0]
    s = dual_descent(K, b, noise=NOISE, batch_size=50, step_size=10.0, rtol=1e-2, maxiter=300, generator=generator())
    assert s.converged.all() and true_residuals(A, s.x, b)[0] <= 1e-2


def test_limits_bad_columns_and_warm_start():
    B = right_hand_sides(400, 3)
    B[:, 1], B[0, 2] = 0, math.nan
    s = dual_descent(K, B, noise=1e-4, maxiter=2, rtol=1e-8, generator=generator())
    assert s.reasons == (Reason.ITERATION_LIMIT, Reason.ZERO_RIGHT_HAND_SIDE, Reason.NON_FINITE)
    b = B[:, 0]
    exact = torch.linalg.solve(A, b)
    assert dual_descent(K, b, noise=NOISE, x0=exact).iterations == 0
    broken = dual_descent(K * math.nan, b, noise=NOISE, generator=generator())
    assert broken.reasons == (Reason.NON_FINITE,) and not broken.converged.any()
