"""Results: their intervals, their printed form, and what is raised where they failed.

Tests `summary.py`.
"""

import inspect
import math
import re
from pathlib import Path

import pytest
import torch
from linear_operator.utils.errors import NotPSDError

from curvops import linalg
from curvops.errors import ConvergenceError, NotPositiveDefiniteError
from curvops.linalg import Estimate, Reason, Solution, cg, eigsh, lanczos, nystrom, spectral_density, sqrt, svds, trace


def solution(*reasons):
    k = len(reasons)
    converged = torch.tensor([r in (Reason.CONVERGED, Reason.ZERO_RIGHT_HAND_SIDE) for r in reasons])
    residuals = torch.where(converged, 1e-8, 0.25)
    return Solution(torch.zeros(3, k), reasons, residuals, residuals, 7, 9, torch.ones(8, k))


def estimate(samples, bias_bound=0.0):
    return Estimate(torch.tensor(10.0), torch.tensor(1.0), samples, 5, bias_bound)


def test_every_reason_carries_its_own_remedy():
    assert len({reason.value for reason in Reason}) == len(Reason.__members__)
    assert all(reason.value.endswith(".") and 1 <= reason.value.count(". ") <= 2 for reason in Reason)


SOLVERS = ("cg", "minres", "lsmr", "dual_descent", "solve")
FUNCTIONS = ("apply_function", "sqrt", "inverse_sqrt")
ESTIMATORS = ("trace", "diagonal", "frobenius_norm", "logdet", "effective_dimension", "spectral_quadrature")
BASES = ("lanczos", "nystrom", "cholesky", "spectral_density", *FUNCTIONS, "eigsh", "svds")
SHOWN_BY = {
    Reason.PRECISION_LIMIT: (*SOLVERS, *FUNCTIONS, "eigsh", "svds", "logdet", "trace"),
    Reason.ITERATION_LIMIT: (*SOLVERS, *FUNCTIONS, "eigsh", "svds", "spectral_density"),
    Reason.STAGNATION: (*SOLVERS, "eigsh", "svds"),
    Reason.NOT_POSITIVE_DEFINITE: SOLVERS,
    Reason.NOT_SYMMETRIC: (*SOLVERS, *FUNCTIONS, *BASES, *ESTIMATORS),
    Reason.SINGULAR: (*SOLVERS, *FUNCTIONS),
    Reason.NON_FINITE: (*SOLVERS, *FUNCTIONS, *BASES),
    Reason.BREAKDOWN: ("lanczos",),
    Reason.RANK_CAPPED: (*BASES, *ESTIMATORS),
    Reason.UNVERIFIED: ("eigsh", "svds", *FUNCTIONS, "logdet"),
    Reason.MATVEC_LIMIT: ESTIMATORS,
    Reason.BUDGET_SPENT: ESTIMATORS,
}


def options(name):
    return set(inspect.signature(getattr(linalg, name)).parameters)


@pytest.mark.parametrize("reason", SHOWN_BY, ids=lambda reason: reason.name)
def test_remedies_name_only_options_that_the_function_has(reason):
    # An option is one of every function that gives the reason, or is followed by those that have it: rank (nystrom).
    known = set().union(*(options(name) for name in linalg.__all__ if inspect.isfunction(getattr(linalg, name))))
    known -= {"A", "B", "P", "f", "k", "op", "operator", "rank", "shift", "diagonal", "prior", "level", "which"}
    told = set()
    for option, names in re.findall(r"(\w+)(?:=\w+)? \(([a-z_]+(?:, [a-z_]+)*)\)", reason.value):
        for name in names.split(", "):
            if option in known:
                assert option in options(name), (option, name)
                told.add(name)
    plain = re.sub(r"\w+(?:=\w+)? \([a-z_, ]+\)", "", reason.value)
    for option in known & set(re.findall(r"\w+", plain)):
        missing = [name for name in SHOWN_BY[reason] if option not in options(name) and name not in told]
        assert not missing, (option, missing)


def test_the_page_on_linear_algebra_lists_every_reason():
    page = (Path(__file__).parents[3] / "docs" / "linalg.md").read_text(encoding="utf-8")
    listed = [line for line in page.splitlines() if line.startswith("| `") and line.split("`")[1] in Reason.__members__]
    assert listed == [f"| `{reason.name}` | {reason.value} |" for reason in Reason]


def test_accepted_solutions_pass_through():
    s = solution(Reason.CONVERGED, Reason.PRECISION_LIMIT, Reason.ZERO_RIGHT_HAND_SIDE)
    assert s.raise_if_failed(1e-6) is s


def test_message_says_how_many_how_far_and_what_to_do():
    with pytest.raises(ConvergenceError) as info:
        solution(Reason.CONVERGED, Reason.ITERATION_LIMIT).raise_if_failed(1e-6)
    message = str(info.value)
    for part in ("1 of 2", "2.50e-01", "1.00e-06", "ITERATION_LIMIT", "iteration 7", Reason.ITERATION_LIMIT.value):
        assert part in message
    assert not isinstance(info.value, NotPSDError)
    assert info.value.solution.iterations == 7


def test_indefinite_is_the_error_that_botorch_retries():
    with pytest.raises(NotPSDError) as info:
        solution(Reason.NOT_POSITIVE_DEFINITE).raise_if_failed(1e-6)
    assert isinstance(info.value, NotPositiveDefiniteError) and "minres" in str(info.value)


def test_interval_is_students_t_widened_by_the_bias():
    low, high = estimate(2, bias_bound=0.5).interval()
    assert float(high - 10) == pytest.approx(12.706 + 0.5, abs=1e-3)
    assert float(10 - low) == pytest.approx(12.706 + 0.5, abs=1e-3)


def test_exact_and_single_sample_intervals():
    assert estimate(0).interval() == (10.0, 10.0)
    low, high = estimate(1).interval()
    assert low == -math.inf and high == math.inf


def test_affine_maps_of_an_estimate():
    e = 3.0 + (-2.0) * estimate(4, bias_bound=0.25)
    assert float(e.value) == -17 and float(e.stderr) == 2 and e.bias_bound == 0.5


@pytest.mark.parametrize("samples", [3, 6, 10, 30])
def test_widened_intervals_cover_the_mean_of_the_most_skewed_samples(samples):
    # χ² with one degree of freedom: zᵀAz of A with one dominant direction. 4,000 runs: ± 1 % at two standard errors.
    draws = torch.randn(4000, samples, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).square()
    stderr = draws.std(1) / math.sqrt(samples)
    given = trace(torch.eye(40), method="hutchinson", max_matvecs=samples).widening
    low, high = Estimate(draws.mean(1), stderr, samples, samples, widening=given).interval()
    assert ((low <= 1) & (high >= 1)).double().mean() > 0.92
    low, high = Estimate(draws.mean(1), stderr, samples, samples).interval()
    assert samples > 10 or ((low <= 1) & (high >= 1)).double().mean() < 0.88


def test_a_result_prints_on_one_line_and_says_what_counts():
    A = torch.diag(torch.linspace(1, 2, 300, dtype=torch.float64))
    pairs = eigsh(A, 3, generator=torch.Generator().manual_seed(0))
    assert re.fullmatch(r"Eigenpairs\(values=\[2, 1.99\d*, 1.99\d*\], vectors=float64 \(300, 3\), .*", repr(pairs))
    assert "reasons=3 CONVERGED" in repr(pairs) and f"matvecs={pairs.matvecs}" in repr(pairs)
    for result in (
        pairs,
        cg(A, torch.ones(300, 20, dtype=torch.float64)),
        spectral_density(A, generator=torch.Generator().manual_seed(0)),
        lanczos(A, 20),
        nystrom(A, 20),
        sqrt(A, torch.ones(300, dtype=torch.float64)),
        svds(A, 2, generator=torch.Generator().manual_seed(0)),
    ):
        assert "\n" not in repr(result) and len(repr(result)) < 600


def test_an_estimate_is_a_number_with_its_error_bar():
    value = Estimate(torch.tensor(10.0), torch.tensor(1.0), 3, 40)
    low, high = value.interval()
    assert float(value) == 10.0 and f"{value!r}".startswith("Estimate(10 ± 1, 95 % in [")
    assert f"[{float(low):.6g}, {float(high):.6g}], samples=3, matvecs=40, CONVERGED)" in repr(value)
    assert "value=[1, 1]" in repr(Estimate(torch.ones(2), torch.ones(2), 3, 40))
