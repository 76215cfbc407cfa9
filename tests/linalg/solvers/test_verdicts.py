"""When a column is restarted, stopped, and by what reason: tables of what is known of it."""

import math

import pytest
import torch

from curvops.linalg import Reason
from curvops.linalg.solvers.systems import CHECK_EVERY, Goal, Records, Verdict, raise_norm

RTOL, LEVEL = 1e-6, 1e-14


def records(maxiter: int = 4000) -> Records:
    B = torch.ones(5, 1, dtype=torch.float64)
    found = Records(B, None, B, Goal(RTOL, maxiter))
    found.start([1.0])
    found.level = LEVEL
    return found


# reason of the recurrence, true residual, backward error, ‖Aᵀr‖/(‖A‖‖r‖), the reason given
STOPS = {
    "solved though it stagnated": (Reason.STAGNATION, 1e-6, 1e-3, math.nan, Reason.CONVERGED),
    "solved though it failed": (Reason.NOT_POSITIVE_DEFINITE, 1e-7, 1e-3, math.nan, Reason.CONVERGED),
    "the dtype's best": (Reason.STAGNATION, 1e-3, 1e-15, math.nan, Reason.PRECISION_LIMIT),
    "the dtype's best at the last iteration": (Reason.ITERATION_LIMIT, 1e-3, 1e-15, math.nan, Reason.PRECISION_LIMIT),
    "an indefinite matrix, however exact": (
        Reason.NOT_POSITIVE_DEFINITE,
        1e-3,
        1e-15,
        math.nan,
        Reason.NOT_POSITIVE_DEFINITE,
    ),
    "no answer, by a huge x": (Reason.STAGNATION, 0.5, 1e-15, math.nan, Reason.SINGULAR),
    "no answer, by a null residual": (Reason.STAGNATION, 0.5, 1e-3, 1e-9, Reason.SINGULAR),
    "no answer in time": (Reason.ITERATION_LIMIT, 0.5, 1e-15, 1e-9, Reason.ITERATION_LIMIT),
    "stuck": (Reason.STAGNATION, 1e-3, 1e-3, 1e-3, Reason.STAGNATION),
}


@pytest.mark.parametrize("case", STOPS)
def test_a_stop_is_named_by_the_best_answer(case: str) -> None:
    reason, best, backward, normal, expected = STOPS[case]
    found = records()
    found.best, found.backward, found.normal = [best], [backward], [normal]
    found.stop(0, reason)
    assert found.reasons == {0: expected}
    assert found.current == [best]


def test_a_recurrence_at_its_end_begins_anew_while_that_halves_the_residual() -> None:
    found = records()
    assert found.judge(0, 0.4, ended=True, null=False) is Verdict.RESTART
    assert found.judge(0, 0.3, ended=True, null=False) is Verdict.STOP  # three quarters of the last start
    assert found.judge(0, 0.19, ended=True, null=False) is Verdict.RESTART
    assert found.judge(0, 0.01, ended=False, null=False) is Verdict.CONTINUE
    assert found.judge(0, math.nan, ended=False, null=False) is Verdict.STOP


@pytest.mark.parametrize(("null", "maxiter", "most"), [(False, 100, 500), (False, 4000, 2000), (True, 4000, 150)])
def test_a_column_without_a_gain_is_given_up_after_its_patience(null: bool, maxiter: int, most: int) -> None:
    """Half of the iterations and at least 500; three looks where the residual is a null vector."""
    found = records(maxiter)
    assert CHECK_EVERY == 50
    found.measure(0, 1.0)
    for found.iteration in range(1, most + 1):
        found.measure(0, 0.995)
    assert found.judge(0, 0.995, ended=False, null=null) is Verdict.CONTINUE
    found.iteration += 1
    assert found.judge(0, 0.995, ended=False, null=null) is Verdict.STOP
    found.measure(0, 0.98)
    assert found.judge(0, 0.98, ended=False, null=null) is Verdict.CONTINUE


def test_slow_progress_adds_up_to_a_gain() -> None:
    found, size = records(), 1.0
    for found.iteration in range(1, 1000):
        size *= 0.999
        found.measure(0, size)
        assert found.idle(0) <= 11


def test_the_norm_ignores_zero_vectors_and_what_overflowed() -> None:
    assert raise_norm(2.0, [0.0, math.inf, math.nan, 6.0, 1.0], [0.0, 1.0, 1.0, 2.0, 1.0]) == 3.0
    assert raise_norm(5.0, [6.0], [2.0]) == 5.0
