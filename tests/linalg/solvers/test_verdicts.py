"""When a column is restarted, stopped, and by what reason: tables of what is known of it."""

import math

import pytest
import torch

from curvops.linalg.core.results import Reason
from curvops.linalg.solvers.systems import Goal, Records, Verdict

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
