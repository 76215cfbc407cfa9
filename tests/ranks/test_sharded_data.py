"""Data shared among processes: every answer is that of one process.

Tests `process_group.py`, `shard.py`.
"""

import contextlib
import io
import runpy
from pathlib import Path
from typing import Any

import pytest

import curvops as co
from tests.randomness import perceptron
from tests.ranks.processes import LONGEST, alone, assert_those_of_one_process, run_on_ranks, run_programs
from tests.ranks.questions import data, of_labels, of_numbers, own_slice, place_of


def whole() -> dict[str, Any]:
    """The answers of one process."""
    return {"numbers": of_numbers(), "labels": of_labels()}


@pytest.mark.parametrize("size", LONGEST)
def test_answers_about_numbers_are_those_of_one_process(expected: Any, size: int) -> None:
    assert_those_of_one_process(run_on_ranks(size, of_numbers), expected["numbers"])


def test_answers_about_labels_are_those_of_one_process(expected: Any) -> None:
    """On three ranks, one of them without data."""
    assert_those_of_one_process(run_on_ranks(3, of_labels), expected["labels"])


def test_batches_change_nothing(expected: Any) -> None:
    assert_those_of_one_process({0: alone(of_labels, None, 3)}, expected["labels"])


def noises(group: Any) -> list[float]:
    """The noises that a regression has, and that its posterior has, of a network that almost fits its targets."""
    own = own_slice(*place_of(group))
    model = perceptron(4, 20, 2)
    x, y = data("numbers")
    y = model(x).detach() + 0.01 * y
    found: list[float] = []
    for noise in (None, "per_output"):
        lin = co.linearize(model, (x[own], y[own]), co.likelihoods.Gaussian(noise=noise), process_group=group)
        post = co.laplace(lin, co.KFAC, 1.0, check_mode=False)
        for each in (lin, post.lin):
            found += each.likelihood.hyperparameters[0].flatten().tolist()
    return found


def test_the_noise_of_a_regression_is_that_of_one_process() -> None:
    one = alone(noises, None)
    assert len(one) == 6 and one[1] > 10 * one[0]
    assert list(run_on_ranks(3, noises).values()) == [one] * 3


PROGRAM = Path(__file__).resolve().parents[2] / "docs" / "many_machines.py"


def printed() -> str:
    """What the program of the page prints."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    return text.getvalue()


def test_the_program_of_the_page_gives_the_same_numbers_for_any_number_of_ranks() -> None:
    one, (two, other) = (
        run_programs(1, printed)[0].splitlines(),
        (text.splitlines() for text in run_programs(2, printed)),
    )
    assert one[0] == "1 processes, 301 points, this one has 301"
    assert two[0] == "2 processes, 301 points, this one has 151"
    assert one[1:] == two[1:] and len(two) == 3 and not other
