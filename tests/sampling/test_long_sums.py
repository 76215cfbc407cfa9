"""Inner products over many weights against float64, and their derivatives.

Tests `structure.py`.
"""

import pytest
import torch

from curvops.sampling.core.structure import ROW, long_dot


@pytest.mark.parametrize("size", [1, ROW - 1, ROW, 3 * ROW, 3 * ROW + 5])
def test_sums_are_those_of_float64(size):
    a, b = torch.randn(2, 4, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(long_dot(a, b), (a * b).sum(-1), rtol=1e-12, atol=1e-12)
    one = torch.vmap(long_dot)(a, b)
    torch.testing.assert_close(one, long_dot(a, b), rtol=0, atol=0)


def test_squares_of_a_million_numbers_in_single_precision_are_known_to_a_thousandth():
    x = torch.randn(10**6, generator=torch.Generator().manual_seed(0))
    assert abs(float(long_dot(x, x) - x.double().square().sum())) < 1e-3
    assert long_dot(x, x).dtype == torch.float64


def test_derivatives_of_both_orders():
    x = torch.randn(ROW + 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v = torch.linspace(-1, 1, len(x), dtype=torch.float64)

    def half_square(x):
        return 0.5 * long_dot(x, x)

    gradient, product = torch.func.jvp(torch.func.grad(half_square), (x,), (v,))
    torch.testing.assert_close(gradient, x, rtol=1e-14, atol=0)
    torch.testing.assert_close(product, v, rtol=1e-14, atol=1e-14)
