import math

import pytest
import torch
from linear_operator.operators import DenseLinearOperator
from linear_operator.utils.errors import NotPSDError

from curvops.errors import NotPositiveSemidefiniteError
from curvops.linalg import Dense, Reason, diagonal_preconditioner, logdet
from tests.linalg.known import Rooted
from tests.linalg.matrices import SPECTRA, generator, log_spaced, symmetric
from tests.linalg.systems import Counted

# Exact for small matrices and for budgets of n products.


@pytest.mark.parametrize("name", ["decaying", "kappa 1e8"])
def test_small_matrices_are_exact_to_rounding(name):
    A = symmetric(SPECTRA[name])
    e = logdet(DenseLinearOperator(A))
    torch.testing.assert_close(e.value, SPECTRA[name].log().sum(), rtol=1e-8, atol=0)
    assert e.samples == 0 and e.stderr == 0 and e.matvecs == 120 and e.reason is Reason.CONVERGED
    low, high = e.interval()
    assert low <= SPECTRA[name].log().sum() <= high and high - low <= 1e-5


@pytest.mark.parametrize(
    "values",
    [SPECTRA["decaying"], torch.cat([torch.zeros(30), torch.ones(10)]).double(), torch.linspace(-0.05, 1, 20).double()],
    ids=["definite", "singular", "indefinite"],
)
def test_exact_with_a_shift_and_with_the_lower_bound_that_it_gives(values):
    exact = (values + 0.1).log().sum()
    torch.testing.assert_close(logdet(symmetric(values), shift=0.1).value, exact, rtol=1e-10, atol=0)
    torch.testing.assert_close(logdet(symmetric(values + 0.1), lower_bound=0.04).value, exact, rtol=1e-10, atol=0)


# Never a number where there is none.


@pytest.mark.parametrize("values", [[0.0, 1.0, 2.0], [-0.243, 1.0, 2.0], [0.0, 0.0, 0.0], [-1.0, -1.0, 1.0]])
def test_singular_or_indefinite_without_a_shift(values):
    with pytest.raises(ValueError, match="shift"):
        logdet(symmetric(torch.tensor(values).double()))


def test_indefinite_beyond_the_shift():
    values = torch.linspace(-1, 1, 300, dtype=torch.float64)
    with pytest.raises(NotPSDError):
        logdet(symmetric(values), shift=0.1, max_matvecs=300)
    for preconditioner in ("auto", None):
        with pytest.raises(NotPSDError):
            logdet(symmetric(values), shift=0.1, max_matvecs=200, preconditioner=preconditioner, generator=generator())


def test_lower_bound_that_is_too_high_is_noticed():
    with pytest.raises(NotPSDError, match="lower_bound"):
        logdet(symmetric(torch.linspace(0.1, 1, 300).double()), lower_bound=0.5, preconditioner=None)


def test_non_finite():
    for n in (10, 300):
        with pytest.raises(ValueError, match="NaN"):
            logdet(torch.full((n, n), math.nan), shift=1.0)


# Estimates.


def test_the_preconditioner_pays_where_the_spectrum_decays():
    A = symmetric(1000 * torch.arange(1, 501, dtype=torch.float64) ** -2.0)
    options = {"shift": 0.01, "max_matvecs": 300, "rtol": 1e-4}
    plain = logdet(A, preconditioner=None, generator=generator(), **options)
    auto = logdet(A, generator=generator(), **options)
    assert auto.stderr + auto.bias_bound < (plain.stderr + plain.bias_bound) / 3


# Budgets and reasons.


@pytest.mark.usefixtures("annotations_unchecked")
def test_the_tolerance_is_reached_at_whatever_budget_it_takes():
    """An interval of 99.9 %: a false alarm in 1,000, if the seed was drawn anew."""
    values = log_spaced(300, 1e6)
    for options in ({"rtol": 0.01}, {"rtol": 3e-3, "preconditioner": None}):
        e = logdet(symmetric(values), lower_bound=1e-6, generator=generator(), **options)
        low, high = e.interval(0.999)
        assert e.reason is Reason.CONVERGED and low <= values.log().sum() <= high
        assert e.stderr + e.bias_bound <= 2 * options["rtol"] * torch.log1p(values / 1e-6).sum()
    assert e.matvecs < 1000 and e.samples == 0  # exact: probes would take 44,118


def test_a_budget_that_is_too_small_says_so():
    A = symmetric(log_spaced(400, 1e6))
    for budget in (20, 60):
        e = logdet(A, lower_bound=1e-6, rtol=1e-4, max_matvecs=budget, generator=generator())
        assert e.reason in (Reason.MATVEC_LIMIT, Reason.RANK_CAPPED) and e.matvecs <= budget


def test_probes_that_spend_the_budget_leave_no_sketch():
    """At κ = 1e12 the first probes take all of the 800 products: a sketch beyond them had a negative size."""
    values = 20 * log_spaced(1000, 1e12)
    e = logdet(symmetric(values), shift=1e-6, max_matvecs=800, generator=generator())
    low, high = e.interval()
    assert e.matvecs <= 800 and e.reason is Reason.RANK_CAPPED and low <= (values + 1e-6).log().sum() <= high


@pytest.mark.parametrize("n", [200, 270])
def test_a_shift_below_float32_rounding_is_a_precision_limit_with_an_interval_that_holds(n):
    values = torch.cat([torch.zeros(n // 2), torch.logspace(0, -2, n // 2)]).double()
    A, mu = symmetric(values).float(), 1e-9
    for e in (logdet(A, shift=mu, generator=generator()), logdet(Rooted(A).add_diagonal(mu), generator=generator())):
        low, high = e.interval()
        assert low <= (values + mu).log().sum() <= high
        assert e.reason is Reason.PRECISION_LIMIT and "float64" in e.reason.value


# A whole grid of shifts from one run.


@pytest.mark.parametrize("n", [100, 270])
def test_a_grid_of_shifts(n):
    values, mus = 10 * torch.arange(1, n + 1, dtype=torch.float64) ** -1.5, torch.logspace(-2, 1, 4).double()
    e = logdet(symmetric(values), shift=mus, generator=generator())
    exact = torch.stack([(values + mu).log().sum() for mu in mus])
    low, high = e.interval(0.999)
    assert e.value.shape == (4,) and ((low <= exact) & (exact <= high)).all() and e.reason is Reason.CONVERGED
    goal = 0.01 * torch.stack([torch.log1p(values / mu).sum() for mu in mus])
    assert (e.stderr <= goal).all() and (torch.as_tensor(e.bias_bound) <= goal).all()
    if n == 100:
        torch.testing.assert_close(e.value, exact, rtol=1e-10, atol=0)


# Adversarial.


def test_zero_operator():
    A = torch.zeros(300, 300, dtype=torch.float64)
    e = logdet(A, shift=0.1, generator=generator())
    torch.testing.assert_close(e.value, torch.tensor(300 * math.log(0.1), dtype=torch.float64), rtol=1e-12, atol=0)
    assert e.stderr == 0 and e.bias_bound == 0
    P = diagonal_preconditioner(torch.full((300,), 1e-3))
    e = logdet(A.float(), shift=1e-3, preconditioner=P, max_matvecs=99, generator=generator())
    assert abs(e.value - 300 * math.log(1e-3)) <= e.bias_bound
    for options in ({}, {"max_matvecs": 300}):
        with pytest.raises(ValueError, match="shift"):
            logdet(A, **options)


@pytest.mark.parametrize(("size", "dtype"), [(1e-30, torch.float32), (1e30, torch.float64)])
def test_tiny_and_huge_operators(size, dtype):
    for n in (50, 300):
        values = torch.linspace(1, 100, n, dtype=torch.float64)
        A = (symmetric(values) * size).to(dtype)
        e = logdet(A, shift=size, generator=generator())
        low, high = e.interval(0.999)
        assert low <= ((values + 1).log() + math.log(size)).sum() <= high and high - low < 0.1 * e.value.abs()


@pytest.mark.parametrize("preconditioner", ["auto", None])
def test_nan_on_the_seventh_product(preconditioner):
    A = Counted(symmetric(log_spaced(300, 1e4)), spoil=7)
    with pytest.raises(ValueError, match="NaN"):
        logdet(A, lower_bound=1e-4, preconditioner=preconditioner, generator=generator())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_small_singular_operator_is_an_error_with_its_remedy(dtype):
    values = torch.cat([torch.linspace(1, 3, 20), torch.zeros(20)]).double()
    for seed in range(5):
        with pytest.raises(NotPositiveSemidefiniteError, match="Add a prior"):
            Dense(symmetric(values, seed).to(dtype)).logdet()


@pytest.mark.parametrize("prior", ["number", "vector"])
def test_a_curvature_plus_a_prior_knows_its_own_bound(prior):
    G = symmetric(torch.arange(1, 301).double() ** -2.0)
    d = torch.tensor(0.05).double() if prior == "number" else torch.linspace(0.02, 0.4, 300).double()
    P = Rooted(G).add_diagonal(d)
    exact = torch.logdet(G + d.expand(300).diag())
    e = logdet(P, rtol=0.03, generator=generator(3))
    low, high = e.interval(0.999)
    assert low <= exact <= high and e.reason is Reason.CONVERGED and e.samples > 0
    # A preconditioner of one's own is one of P.
    own = logdet(P, rtol=0.03, preconditioner=diagonal_preconditioner(P), generator=generator(3))
    low, high = own.interval(0.999)
    assert low <= exact <= high
    by_shift = logdet(P.detach(), max_matvecs=60, generator=generator(1))
    assert by_shift.matvecs <= 60


def test_an_estimated_bound_is_right_and_says_that_it_is_no_more():
    values = torch.linspace(0.1, 2, 300).double()
    A, exact = symmetric(values), values.log().sum()
    e = logdet(A, lower_bound="estimate", generator=generator())
    low, high = e.interval(0.999)
    assert low <= exact <= high and e.reason is Reason.UNVERIFIED
    assert logdet(A, lower_bound="estimate", max_matvecs=60, generator=generator()).matvecs <= 60
    grid = logdet(A, shift=torch.tensor([0.1, 1.0]), lower_bound="estimate", generator=generator())
    low, high = grid.interval(0.999)
    several = torch.stack([(values + mu).log().sum() for mu in (0.1, 1.0)])
    assert ((low <= several) & (several <= high)).all() and grid.reason is Reason.UNVERIFIED
    small = logdet(symmetric(values[:50]), lower_bound="estimate")
    assert small.reason is Reason.CONVERGED and small.samples == 0


@pytest.mark.usefixtures("annotations_unchecked")
def test_without_a_bound_the_error_says_what_to_do():
    values = torch.linspace(0.1, 2, 300).double()
    with pytest.raises(ValueError, match='lower_bound="estimate"'):
        logdet(symmetric(values))
    with pytest.raises(ValueError, match="no positive lower bound"):
        logdet(symmetric(torch.cat([torch.zeros(50).double(), values[50:]])), lower_bound="estimate")
    with pytest.raises(NotPSDError, match="positive semidefinite approximation"):
        logdet(symmetric(values - 0.5), lower_bound="estimate")
    with pytest.raises(ValueError, match="'lanczos'"):
        logdet(symmetric(values), lower_bound="lanczos")


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("preconditioner", ["auto", None])
def test_interval_covers(preconditioner):
    # 30 runs at 95 %: fewer than 24 hits has a false-alarm rate below 0.1 %.
    values, g, hits = 10 * torch.arange(1, 101, dtype=torch.float64) ** -1.0, generator(), 0
    A, exact = symmetric(values), (values + 0.1).log().sum()
    for _ in range(30):
        e = logdet(A, shift=0.1, max_matvecs=80, rtol=1e-3, preconditioner=preconditioner, generator=g)
        low, high = e.interval()
        hits += bool(low <= exact <= high)
    assert hits >= 24
