"""Low-rank approximations say how far off they are, and stay closed under a diagonal."""

import warnings

import pytest
import torch

import curvops as co
from curvops.errors import NotPositiveSemidefiniteError, RankWarning
from curvops.linalg import Damped, Dense, LowRank, draw
from tests.linalg.known import Known
from tests.linalg.matrices import SPECTRA, generator, rotation, symmetric
from tests.linalg.operands import close, positive, random, uniform
from tests.linalg.samples import assert_covariance


def relative(A, approximation):
    return float((A - approximation.to_dense()).norm() / A.norm())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["decaying", "kappa 1e4"])
def test_the_error_is_that_of_the_approximation(name, dtype):
    A = symmetric(SPECTRA[name]).to(dtype)
    found = co.low_rank(A, 20, generator=generator())
    assert found.vectors.shape == (120, 20) and found.dtype is dtype
    close(found.vectors.mT @ found.vectors, torch.eye(20, dtype=dtype), 200 * torch.finfo(dtype).eps)
    assert (found.values.diff() <= 0).all() and (found.values > 0).all()
    error, true = found.error, relative(A, found)
    assert error.samples == 16 and error.matvecs == 36
    assert abs(float(error.value) - true) < 4 * float(error.stderr) + 1e-6


def test_the_standard_error_covers():
    """100 approximations of one matrix: |error − truth| ≤ 3 standard errors in all but 1 % (t, 15 degrees).

    Binomial(100, 0.02), the rate doubled for the ratio's skewness: more than 9 outside has probability 3e-5.
    """
    A = symmetric(SPECTRA["decaying"])
    outside = 0
    for seed in range(100):
        found = co.low_rank(A, 15, generator=generator(seed))
        outside += abs(float(found.error.value) - relative(A, found)) > 3 * float(found.error.stderr)
    assert outside <= 9


def test_the_rank_doubles_until_the_error_is_small():
    A = symmetric(SPECTRA["decaying"])
    for rtol in (0.1, 1e-3):
        found = co.low_rank(Dense(A), rtol=rtol, generator=generator())
        assert float(found.error.value + 2 * found.error.stderr) <= rtol
        assert relative(A, found) < 1.3 * rtol
        assert len(found.values) in (8, 16, 32, 64, 120)
    default = co.low_rank(A, generator=generator())
    assert float(default.error.value) < 0.01 and default.error.matvecs == len(default.values) + 16


def test_an_end_before_the_accuracy_is_never_silent():
    A = symmetric(SPECTRA["flat"])
    with pytest.warns(RankWarning, match=r"rank 30 .* \(rtol=0.001\).*raise rank or memory_budget"):
        found = co.low_rank(A, 30, rtol=1e-3, generator=generator())
    assert len(found.values) == 30 and float(found.error.value) > 0.5
    with pytest.warns(RankWarning, match="limited to 10"):
        found = co.low_rank(A, rtol=1e-3, memory_budget=3 * 120 * 8 * 10, generator=generator())
    assert len(found.values) == 10
    with pytest.warns(RankWarning, match="limited to 10"):
        co.low_rank(A, 20, memory_budget=3 * 120 * 8 * 10, generator=generator())


def test_repeated_eigenvalues_and_none_need_no_warning():
    A = rotation(60)[:, :5] @ rotation(60)[:, :5].mT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exact = co.low_rank(A, 20, generator=generator())
        assert len(exact.values) == 5 and relative(A, exact) < 1e-10
        assert len(co.low_rank(A * 0, rtol=0.1, generator=generator()).values) == 0


def test_a_small_matrix_has_its_error_measured_exactly():
    A = positive(1, 9)[0]
    found = co.low_rank(A, 4, generator=generator())
    assert found.error.samples == 0 and float(found.error.stderr) == 0
    assert float(found.error.value) == pytest.approx(relative(A, found), rel=1e-10)
    assert relative(A, co.low_rank(A, 9, generator=generator())) < 1e-12


def test_the_error_survives_products_scalings_and_conversions():
    found = co.low_rank(positive(1, 30)[0], 5, generator=generator())
    for kept in (found.double(), 2 * found, found.clone(), found.representation_tree()(*found.representation())):
        assert isinstance(kept, LowRank) and kept.error is found.error
    assert (found @ random(30, 2)).shape == (30, 2)


def test_with_diagonal_has_the_exact_diagonal_and_stays_closed():
    A = symmetric(SPECTRA["decaying"]) + uniform(120).diag()
    found = co.low_rank(A, 10, generator=generator())
    corrected = found.with_diagonal(A.diagonal())
    assert isinstance(corrected, Damped) and corrected.base is found and corrected.psd
    close(corrected.diagonal(), A.diagonal(), 1e-14)
    dense = found.to_dense() + (A.diagonal() - found.to_dense().diagonal()).diag()
    close(corrected.to_dense(), dense)
    P, shift = corrected.add_diagonal(uniform(120)), dense + uniform(120).diag()
    close(P.solve(random(120, 2)), torch.linalg.solve(shift, random(120, 2)))
    close(P.logdet(), shift.logdet())
    assert_covariance(lambda k, g: draw(corrected, k, g), dense)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_diagonal_below_its_low_rank_part_by_the_rounding_of_a_long_sum_is_none(dtype):
    """Both are sums over points: thousands of roundings apart, where the low-rank part is the whole matrix."""
    found = co.low_rank(positive(1, 4)[0].to(dtype), 4, generator=generator())
    below = found.diagonal() * (1 - 1e3 * torch.finfo(dtype).eps)
    assert not found.with_diagonal(below).shift.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_diagonal_that_is_too_small_is_an_error_but_rounding_is_not(dtype):
    U = rotation(50)[:, :4]
    A = ((U * uniform(4)) @ U.mT).to(dtype)
    found = co.low_rank(A, 8, generator=generator())  # exact: the difference is rounding alone
    corrected = found.with_diagonal(A.diagonal())
    assert (corrected.shift >= 0).all() and (corrected.shift < 1e-3 * A.diagonal().max()).all()
    close(corrected.add_diagonal(0.1).to_dense().double(), A.double() + 0.1 * torch.eye(50), 1e-5)
    with pytest.raises(ValueError, match="entry .* less than .* exact diagonal"):
        found.with_diagonal(0.9 * A.diagonal())
    with pytest.raises(ValueError, match="shape"):
        found.with_diagonal(A.diagonal()[:4])


def test_a_low_rank_part_above_its_matrix_is_told_from_an_inexact_diagonal():
    A = torch.logspace(0, -6, 30, dtype=torch.float64).diag()
    above = LowRank(torch.eye(30, dtype=torch.float64)[:, :3], 1.1 * A.diagonal()[:3])
    with pytest.raises(ValueError, match="beside co.low_rank"):
        above.with_diagonal(A.diagonal())


def test_a_negative_eigenvalue_that_is_rounding_of_a_promise_kept():
    """Products round by the size of their factors; what an operator promised is believed down to √eps of its size."""
    values = torch.cat([torch.logspace(0, -6, 20), torch.full((20,), -1e-11)]).double()
    Q = rotation(40)
    A = Q * values @ Q.mT
    found = co.low_rank(Known(A, is_psd=True), 30, generator=generator())
    assert relative(A, found) < 1e-9 and (found.values > 0).all()
    for matrix, promised in ((A, False), (A - 1e-3 * torch.eye(40), True)):
        with pytest.raises(NotPositiveSemidefiniteError, match="-1.*e-"):
            co.low_rank(Known(matrix, is_psd=promised), 30, generator=generator())
