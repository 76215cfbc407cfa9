"""The demo in a tiny setting: what it prints, what it writes, how it ends.

Tests `demo_checks.py`, `digits.py`, `figures.py`, `network.py`, `report.py`, `run.py`.
"""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from curvops.cli import app
from curvops.cli.demo import figures, network
from curvops.cli.demo import run as demo

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
FIGURES = ("reliability", "rotation", "evidence", "convergence", "regression", "covariance", "spectral_density")


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(demo, "QUICK", TINY)
    monkeypatch.setattr(figures, "REGRESSION_STEPS", 100)
    monkeypatch.setattr(network, "POLISH", 20)


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.filterwarnings("ignore::curvops.NotAMode")
def test_table_numbers_and_figures(tiny, tmp_path):
    result = CliRunner().invoke(app, ["demo", "--quick", "--output", str(tmp_path)])
    assert result.exit_code == int("FAIL" in result.stdout), result.output
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
        assert name in result.stdout
    numbers = json.loads((tmp_path / "results.json").read_text())
    found = {check["name"]: check for check in numbers["checks"]}
    assert found["exact variances"]["numbers"]["worst_relative_error"] <= 1e-3
    assert numbers["summary"][demo.MAP]["auroc_epistemic"] is None
    assert set(numbers["seeds"][0]["rows"][demo.LAPLACE]["by_angle"]) == {"0", "15", "30", "45", "60", "75", "90"}
    row = numbers["seeds"][0]["rows"][demo.SUBNETWORK]["by_angle"]["45"]
    assert row["aleatoric"] > 0 and row["epistemic"] >= 0
    for figure in FIGURES:
        assert (tmp_path / f"{figure}.png").stat().st_size > 5000
    assert (tmp_path / "network-0.safetensors").exists()


def test_interruption_is_one_line(tiny, monkeypatch, tmp_path):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    result = CliRunner().invoke(app, ["demo", "--quick", "--output", str(tmp_path)])
    assert result.exit_code == 130
    assert len(result.output.strip().splitlines()) == 1
