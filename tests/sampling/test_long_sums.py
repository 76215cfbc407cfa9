"""Inner products over many weights against float64, and their derivatives.

Tests `state.py`.
"""

import math

import pytest
import torch

from curvops.sampling.state import FOLD, long_dot


@pytest.mark.parametrize("size", [1, FOLD - 1, FOLD, 3 * FOLD, 3 * FOLD + 5])
def test_sums_are_those_of_float64(size):
    a, b = torch.randn(2, 4, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(long_dot(a, b), (a * b).sum(-1), rtol=1e-12, atol=1e-12)
    one = torch.vmap(long_dot)(a, b)
    torch.testing.assert_close(one, long_dot(a, b), rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(10))
def test_squares_of_a_million_numbers_in_single_precision_are_known_to_their_rounding(seed):
    """Five standard deviations of the rounding, whatever the order of the additions in a fold.

    A sum of j squares has mean square j² + 2j, and rounds by at most u = eps/2 of it, by u/√3 in root mean square: the
    sums of j = 1 .. 8 in sequence and the products make u (Σ (j² + 2j) / 3)^½ a fold, 0.0002 for a million squares.
    """
    x = torch.randn(10**6, generator=torch.Generator().manual_seed(seed))
    u, folds = torch.finfo(torch.float32).eps / 2, len(x) / FOLD
    spread = u * math.sqrt(folds * (sum(j**2 + 2 * j for j in range(2, FOLD + 1)) + 3 * FOLD) / 3)
    assert abs(float(long_dot(x, x) - x.double().square().sum())) < 5 * spread
    assert long_dot(x, x).dtype == torch.float64


def test_derivatives_of_both_orders():
    x = torch.randn(FOLD + 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v = torch.linspace(-1, 1, len(x), dtype=torch.float64)

    def half_square(x):
        return 0.5 * long_dot(x, x)

    gradient, product = torch.func.jvp(torch.func.grad(half_square), (x,), (v,))
    torch.testing.assert_close(gradient, x, rtol=1e-14, atol=0)
    torch.testing.assert_close(product, v, rtol=1e-14, atol=1e-14)
