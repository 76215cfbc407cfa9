"""The demo in a tiny setting: what it prints, what it writes, how it ends.

Tests `demo_checks.py`, `digits.py`, `figures.py`, `network.py`, `report.py`, `run.py`.
"""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

import pytest
from typer.testing import CliRunner

from curvops.cli import app
from curvops.cli.demo import figures, network, report
from curvops.cli.demo import run as demo
from curvops.errors import ModeWarning, NoProcessGroupWarning
from tests import shape_checks
from tests.ranks.processes import run_programs
from tests.threads import using_threads

TINY = demo.DemoSize(
    train=100,
    seeds=1,
    width=8,
    test=60,
    pretraining=5,
    epochs=5,
    prior_precision=5.0,
    samples=16,
    checked=3,
    grid=3,
    columns=2,
)
REGRESSION_STEPS, POLISH = 100, 20
FIGURES = ("reliability", "rotation", "evidence", "convergence", "regression", "covariance", "spectral_density")


@pytest.fixture
def tiny(monkeypatch):
    make_tiny(monkeypatch)


def make_tiny(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(demo, "QUICK", TINY)
    patch.setattr(figures, "REGRESSION_STEPS", REGRESSION_STEPS)
    patch.setattr(network, "POLISH", POLISH)


def printed(output: str) -> tuple[int, str, str]:
    """The exit code of the tiny demo, and what it prints and reports."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error", NoProcessGroupWarning)
        warnings.simplefilter("ignore", ModeWarning)
        make_tiny(patch)
        patch.setattr(shape_checks, "CALLS", 0)  # as for a user
        result = CliRunner().invoke(app, ["demo", "--quick", "--output", output])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of the tiny demo in this process, and what it printed and reported.

    It has one thread, as each of the processes that it is compared with.
    """
    folder = tmp_path_factory.mktemp("demo")
    with using_threads(1):
        code, *said = printed(str(folder))
    assert code == int("FAIL" in said[0]), said
    return folder, *said


def test_table_numbers_and_figures(alone):
    folder, text, reported = alone
    began = [line[10:].strip() for line in reported.splitlines() if line[:7].strip().replace(".", "").isdigit()]
    assert began[:2] == ["network 1 of 1", "train, save, load"] and "figure: evidence and validation" in began
    assert text.rstrip().endswith(f"{demo.MAP}'s entropy.")
    for name in (
        demo.MAP,
        demo.SCALED,
        demo.LAPLACE,
        demo.SUBNETWORK,
        "epistemic, turned",
        "As a dense float64 matrix",
        "6 and 9",
        "log evidence",
    ):
        assert name in text
    numbers = json.loads((folder / "results.json").read_text())
    found = {check["name"]: check for check in numbers["checks"]}
    assert found["exact variances"]["numbers"]["worst_relative_error"] <= 1e-3
    assert numbers["summary"][demo.MAP]["auroc_epistemic"] is None
    assert set(numbers["seeds"][0]["rows"][demo.LAPLACE]["by_angle"]) == {"0", "15", "30", "45", "60", "75", "90"}
    row = numbers["seeds"][0]["rows"][demo.SUBNETWORK]["by_angle"]["45"]
    assert row["aleatoric"] > 0 and row["epistemic"] >= 0
    for figure in FIGURES:
        assert (folder / f"{figure}.png").stat().st_size > 5000
    assert (folder / "network-0.safetensors").exists()


def of_nll(upright: float, rotated: float = 2.0, auroc: float = 0.75, posterior: bool = True) -> report.Row:
    """Scores of one method whose other numbers do not matter here."""
    parts = {"aleatoric": 0.1, "epistemic": 0.02} if posterior else {}
    scores = dict.fromkeys(report.SCORES, 0.5) | parts
    return report.Row(
        {0: scores | {"nll": upright}, 45: scores | {"nll": rotated, "epistemic": 0.08}},
        0.7,
        auroc if posterior else None,
    )


NETWORK = of_nll(0.1, posterior=False)


@pytest.mark.parametrize(
    ("posteriors", "words"),
    [
        ([of_nll(0.13)], ["is 0.0300 above that of A;", "that of 1 of the 1 posteriors is higher"]),
        ([of_nll(0.05)], ["is 0.0500 below that of A;", "that of 0 of the 1 posteriors is higher"]),
        ([of_nll(0.10001)], ["is equal to that of A;", "that of 0 of the 1 posteriors is higher"]),
        ([of_nll(float("inf"))], ["is not comparable with that of A;"]),
        ([of_nll(0.13, 1.5)], ["Rotated, it is 0.5000 below that of A; the lowest of all is that of B, 1.5000."]),
        ([of_nll(0.13, 2.5)], ["Rotated, it is 0.5000 above that of A; the lowest of all is that of A, 2.0000."]),
        ([of_nll(0.13, auroc=0.65)], ["its AUROC, 0.6500, is 0.0500 below the 0.7000 of A's entropy."]),
        ([of_nll(0.13)], ["of B is 0.0200 nats upright and 0.0800 rotated"]),
        ([of_nll(0.12), of_nll(0.14)], ["is 0.0300 ± 0.0100 above that of A;"]),
        ([of_nll(0.09), of_nll(0.13)], ["is 0.0100 ± 0.0200 above (within two standard errors) that of A;"]),
    ],
)
def test_the_last_sentences_say_what_the_numbers_show(posteriors: list[report.Row], words: list[str]) -> None:
    rows = [{"A": NETWORK, "B": posterior} for posterior in posteriors]
    text = report.conclude(rows, "A", "B")
    assert max(map(len, text.splitlines())) <= report.WIDTH
    joined = " ".join(text.split())
    assert joined.count(". ") == 2 and joined.endswith(".")
    for phrase in words:
        assert phrase in joined


def test_interruption_is_one_line(tiny, monkeypatch, tmp_path):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    result = CliRunner().invoke(app, ["demo", "--quick", "--output", str(tmp_path)])
    assert result.exit_code == 130
    assert len(result.output.strip().splitlines()) == 1


def test_two_processes_give_the_numbers_of_one_and_write_once(alone, tmp_path):
    """The data of the posteriors in shards; the networks are trained by each process."""

    (folder, text, _), (found, silent) = alone, run_programs(2, printed, str(tmp_path))
    assert found[0] == silent[0] == int("FAIL" in text), found
    (few, table), (many, other) = (
        (lines, lines[: _end_of_tables(lines)]) for lines in (text.splitlines(), found[1].splitlines())
    )
    assert not silent[1]
    assert len(few) == len(many) and any(demo.LAPLACE in line for line in table)
    differing = [pair for pair in zip(table, other, strict=True) if not _same_but_for_the_last_digit(*pair)]
    assert not differing
    one, two = (json.loads((each / "results.json").read_text()) for each in (folder, tmp_path))
    for name in ("settings", "summary", "seeds", "evidence_curve"):
        assert not _apart(one[name], two[name]), name
    # In single precision a solve of other rounding may take a step more or less.
    for first, second in zip(one["stages"], two["stages"], strict=True):
        assert abs(first["products"] - second["products"]) <= 0.05 * first["products"], first
    assert sorted(each.name for each in folder.iterdir()) == sorted(each.name for each in tmp_path.iterdir())


def _same_but_for_the_last_digit(one: str, other: str) -> bool:
    """Whether the words of two lines are equal, numbers up to a unit of their last digit, which rounding decides."""
    words = one.split(), other.split()
    if len(words[0]) != len(words[1]):
        return False
    for first, second in zip(*words):
        decimals = re.fullmatch(r"[-+]?\d+\.(\d+)", first)
        if decimals is None or re.fullmatch(r"[-+]?\d+\.\d+", second) is None:
            if first != second:
                return False
        elif abs(float(first) - float(second)) > 1.01 * 10.0 ** -len(decimals[1]):
            return False
    return True


def _end_of_tables(lines: list[str]) -> int:
    """Return where the times begin."""
    return next(i for i, line in enumerate(lines) if line.startswith("seed 0"))


def _apart(one: Any, two: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Return by name the numbers that differ by more than the rounding of single precision, and all else that does."""
    if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        return [found for name in one for found in _apart(one[name], two[name], f"{path}/{name}")]
    if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        return [found for i, pair in enumerate(zip(one, two)) for found in _apart(*pair, f"{path}/{i}")]
    # A score of ranks changes by a pair of points at a time if rounding turns two that are all but equal.
    most = 2e-4 if "auroc" in path else 1e-5
    if one == two or (isinstance(one, float) and abs(one - two) <= most * max(1e-2, abs(one))):
        return []
    return [(path, one, two)]
