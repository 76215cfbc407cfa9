"""What estimates of traces, diagonals and norms share, for each of their methods."""

import math
import re

import pytest
import torch
from linear_operator.operators import DenseLinearOperator

from curvops.linalg import Dense, Reason, diagonal, frobenius_norm, trace
from tests.linalg.matrices import SPECTRA, generator, symmetric
from tests.linalg.systems import Counted

EXACT = {trace: torch.trace, diagonal: torch.diagonal, frobenius_norm: torch.linalg.norm}
NAMES = {
    trace: ["xtrace", "xnystrace", "hutch++", "hutchinson", "exact"],
    diagonal: ["xdiag", "xnysdiag", "bekas", "exact"],
    frobenius_norm: ["xtrace", "hutchinson", "exact"],
}
METHODS = [(estimate, method) for estimate, names in NAMES.items() for method in names]
STOCHASTIC = [(estimate, method) for estimate, method in METHODS if method != "exact"]
SYMMETRIC = ("xnystrace", "xnysdiag")
of_all = pytest.mark.parametrize(("estimate", "method"), METHODS)
of_stochastic = pytest.mark.parametrize(("estimate", "method"), STOCHASTIC)


@pytest.mark.parametrize("estimate", EXACT)
def test_each_method_is_here(estimate):
    with pytest.raises(ValueError, match="must be one of") as caught:
        estimate(torch.eye(2), method="?")
    assert re.findall(r"'([\w+]+)'", str(caught.value)) == NAMES[estimate]


@pytest.mark.parametrize("estimate", EXACT)
@pytest.mark.parametrize("options", [{"method": "exact"}, {"max_matvecs": 120}, {"max_matvecs": 5000}])
def test_exact_with_n_products(estimate, options):
    A = symmetric(SPECTRA["decaying"])
    A = A if estimate is trace else A @ torch.randn(120, 120, dtype=torch.float64, generator=generator())
    e, exact = estimate(DenseLinearOperator(A), **options), EXACT[estimate](A)
    torch.testing.assert_close(e.value, exact, rtol=1e-12, atol=1e-12)
    low, high = e.interval()
    assert e.samples == 0 and e.matvecs == 120 and not e.stderr.any() and e.reason is Reason.CONVERGED
    assert ((low <= exact) & (exact <= high)).all() and (high - low).norm() < 1e-12 * exact.norm()


@of_stochastic
def test_as_many_products_as_columns_are_exact_whatever_the_method(estimate, method):
    A = symmetric(SPECTRA["decaying"])
    e = estimate(A, method=method, max_matvecs=120)
    torch.testing.assert_close(e.value, EXACT[estimate](A), rtol=1e-12, atol=1e-12)
    assert e.samples == 0


EXACT_UP_TO = {"xtrace": 9, "xnystrace": 19, "hutch++": 6, "xdiag": 9, "xnysdiag": 15}
"""The rank up to which 20 products are enough: of 10 columns and their images, of 20, of a third of them."""


@pytest.mark.parametrize(("estimate", "method"), [row for row in STOCHASTIC if row[1] in EXACT_UP_TO])
@pytest.mark.parametrize("n", [100, 300])
def test_exact_for_low_rank(estimate, method, n):
    most, tight = EXACT_UP_TO[method], (0.0, 1e-10) if estimate is diagonal else (1e-10, 0.0)
    for rank in (1, 2, most // 2, most - 1, most):
        A = symmetric(torch.cat([torch.linspace(1, 5, rank), torch.zeros(n - rank)]).double())
        e, exact = estimate(A, method=method, max_matvecs=20), EXACT[estimate](A)
        torch.testing.assert_close(e.value, exact, rtol=tight[0], atol=tight[1])
        low, high = e.interval()
        # At the last ranks a square sketch's condition number amplifies rounding.
        assert estimate is not trace or rank > 0.7 * most or (low <= exact <= high and high - low < 1e-9)


@of_stochastic
def test_any_tolerance_is_reached_unless_the_budget_is_spent(estimate, method):
    A = symmetric(torch.arange(1, 401, dtype=torch.float64) ** -2.0)
    exact = EXACT[estimate](A)
    for rtol in (1e-1, 1e-3, 1e-9):
        e = estimate(A, method=method, rtol=rtol, generator=generator())
        assert e.reason is Reason.CONVERGED and (e.value - exact).norm() <= 2 * rtol * exact.norm()
        assert e.within(rtol) and e.matvecs <= 800
    e = estimate(A, method=method, rtol=1e-8, max_matvecs=50, generator=generator())
    assert e.reason is Reason.MATVEC_LIMIT and e.matvecs <= 50


@of_all
def test_zero_and_one_by_one(estimate, method):
    zero = torch.zeros(200, 200)
    for options in ({"max_matvecs": 40}, {"rtol": 0.1}):
        e = estimate(zero, method=method, generator=generator(), **options)
        assert not e.value.any() and not e.stderr.any()
    assert e.reason is Reason.CONVERGED
    assert float(estimate(torch.tensor([[3.0]]), method=method).value) == 3.0
    if estimate is diagonal:
        assert diagonal(torch.eye(6), method=method, max_matvecs=5, generator=generator()).value.isfinite().all()


@of_stochastic
@pytest.mark.parametrize(("size", "dtype"), [(1e-30, torch.float32), (1e30, torch.float64)])
def test_tiny_and_huge_operators(estimate, method, size, dtype):
    A = symmetric(SPECTRA["kappa 1e4"])
    plain = estimate(A.to(dtype), method=method, max_matvecs=30, generator=generator())
    scaled = estimate((A * size).to(dtype), method=method, max_matvecs=30, generator=generator())
    tolerance = 1e-4 if dtype is torch.float32 else 1e-10
    assert (scaled.value / size - plain.value).norm() <= tolerance * plain.value.norm()
    assert (scaled.stderr / size - plain.stderr).norm() <= 100 * tolerance * plain.stderr.norm()


@of_all
def test_nan_on_the_seventh_product(estimate, method):
    A = Counted(symmetric(torch.linspace(1, 3, 500).double()), spoil=7)
    with pytest.raises(ValueError, match="NaN"):
        estimate(A, method=method, rtol=1e-9, generator=generator())


@pytest.mark.parametrize(("estimate", "method"), [row for row in STOCHASTIC if row[1] not in SYMMETRIC])
def test_matrices_that_are_not_symmetric(estimate, method):
    """At 99.9 %: a false alarm in 1,000 seeds."""
    A = torch.randn(60, 60, dtype=torch.float64, generator=generator())
    low, high = estimate(A, method=method, max_matvecs=40, generator=generator(1)).interval(0.999)
    exact = EXACT[estimate](A)
    assert ((low <= exact) & (exact <= high)).double().mean() > 0.98 and math.isfinite(float(high.sum()))


N = 301
"""Too large for dense routes, and no multiple of 16, the numbers that torch makes normal together."""


@pytest.mark.parametrize(("estimate", "method"), [(f, m) for f, m in STOCHASTIC if m in ("hutchinson", "bekas")])
def test_a_seed_gives_the_same_probes_under_every_budget(estimate, method):
    """Probes are streamed: the memory changes how many run at once, and nothing else."""
    A, values = Dense(symmetric(torch.logspace(1, -4, N, dtype=torch.float64)), psd=True), []
    for vectors in (None, 400, 60, 30):
        options = {"generator": generator(), "memory_budget": None if vectors is None else vectors * 8 * N}
        values.append(estimate(A, method=method, max_matvecs=40, **options).value)
    for value in values[1:]:
        torch.testing.assert_close(value, values[0], rtol=1e-12, atol=0)


@pytest.mark.usefixtures("annotations_unchecked")
@of_stochastic
def test_intervals_cover(estimate, method):
    """At 95 %, fewer than 87 of 100 runs have a false-alarm rate of 0.05 %; entries of a diagonal move together."""
    A, g = symmetric(SPECTRA["kappa 1e4"]), generator()
    if estimate is frobenius_norm:
        A = A @ torch.randn(120, 120, dtype=torch.float64, generator=generator(7))
    exact, runs = EXACT[estimate](A), 30 if estimate is diagonal else 100
    hits = 0.0
    for _ in range(runs):
        low, high = estimate(A, method=method, max_matvecs=24 if estimate is trace else 30, generator=g).interval()
        hits += float(((low <= exact) & (exact <= high)).double().mean())
    assert hits >= (0.9 if estimate is diagonal else 0.87) * runs
