"""The pieces of the samplers' studies in `benchmarks/`: their data, their networks, what they compare and conclude."""

import dataclasses
import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from scipy import stats

from benchmarks import (
    bayesian_optimisation,
    claims,
    defaults,
    defaults_settings,
    report,
    study_page,
)
from benchmarks.report import filled
from benchmarks.tasks import study as tasks
from benchmarks.tasks.task import statements


def test_intervals_and_verdicts_are_those_of_student():
    values = [0.3, 0.1, 0.4, 0.2]
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert claims.interval(values)[1:] == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert claims.verdict(values) == "held"
    assert claims.verdict([-v for v in values]) == "the reverse"
    assert claims.verdict([0.3, -0.3, 0.2, -0.1]) == "open"
    with pytest.raises(ValueError, match="two seeds"):
        claims.interval([0.1])


def test_raw_results_come_back_and_make_the_page_again(tmp_path, monkeypatch):
    monkeypatch.setattr(study_page, "MEASURED", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("<!-- sums -->\n<!-- end sums -->\n")
    made = []

    def measure(seeds):
        made.append(seeds)
        return {"values": torch.arange(float(seeds)), "rows": [{"ending": "CONVERGED", "path": [1, 2.5]}], "none": None}

    def text(found):
        assert found["rows"][0]["ending"] == "CONVERGED" and found["none"] is None
        return f"{float(found['values'].sum()):g}, {found['rows'][0]['path'].tolist()}"

    study = study_page.Study("sums", None, measure, {"sums": text}, str(page), options={"seeds": (5, "numbers")})
    for options in (["--seeds", "3"], ["--report"]):
        monkeypatch.setattr("sys.argv", ["sums", *options])
        study.run()
        assert "3, [1.0, 2.5]\n\nMeasured " in page.read_text()
    assert made == [3]
    assert study_page.measured("sums")["options"] == {"seeds": 3}


def test_what_was_measured_before_an_interruption_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(study_page, "MEASURED", tmp_path)
    monkeypatch.setattr("sys.argv", ["halves"])
    (tmp_path / "page.md").write_text("<!-- halves -->\n<!-- end halves -->\n")
    made = []

    def half(i):
        if made == [0]:
            made.append("killed")
            raise KeyboardInterrupt
        made.append(i)
        return {"values": torch.full((2,), float(i))}

    def measure():
        return [study_page.part("halves", f"cell {i}", lambda i=i: half(i)) for i in range(2)]

    def text(found):
        return str([each["values"].tolist() for each in found])

    study = study_page.Study("halves", None, measure, {"halves": text}, str(tmp_path / "page.md"))
    with pytest.raises(KeyboardInterrupt):
        study.run()
    study.run()
    assert made == [0, "killed", 1] and not (tmp_path / "halves.parts").exists()
    assert "[[0.0, 0.0], [1.0, 1.0]]" in (tmp_path / "page.md").read_text()


def test_surrogates_run_a_round(monkeypatch):
    search, little = bayesian_optimisation.optimize_acqf, {"raw_samples": 4, "options": {"maxiter": 2}}
    monkeypatch.setattr(bayesian_optimisation, "optimize_acqf", lambda *given, **more: search(*given, **more | little))
    problem = dataclasses.replace(bayesian_optimisation.PROBLEMS["Branin"], rounds=1, width=4)
    monkeypatch.setattr(bayesian_optimisation, "STEPS", 3)
    for method in bayesian_optimisation.METHODS:
        regret, x, y, _ = bayesian_optimisation.run(problem, method, 0)
        assert len(regret) == 2 and regret[1] <= regret[0] and x.shape == (8, 2) and y.shape == (8,)


def test_defaults_are_measured_beside_the_network_itself(monkeypatch):
    """Tests `defaults.py` and `defaults_settings.py`."""
    for points in ("HELD_OUT", "TEST", "UNSEEN"):
        monkeypatch.setattr(defaults_settings, points, 40)
    moons = defaults_settings.SETTINGS["two moons, 100, AdamW"]
    short = dataclasses.replace(moons, network=defaults_settings.mlp(2, 6, 6, 2), epochs=4, stopped=True)
    found = study_page.tensors({"moons": defaults.of_setting(short, 2, ("last layer, KFAC", "KFAC"))})
    rows = [f"{structure} | {rule}" for structure in ("last layer, KFAC", "KFAC") for rule in defaults.RULES]
    assert sorted(found["moons"]["rows"]) == sorted(rows)
    assert all("nan" not in section(found) for section in defaults.SECTIONS.values())


@pytest.mark.parametrize("name", sorted(path.stem for path in study_page.MEASURED.glob("*.json")))
def test_a_page_shows_what_the_raw_results_say(name):
    module = import_module(f"benchmarks.{name}")
    if name == "wide_networks":  # a file that grows cell by cell
        pages = {module.PAGE: module.texts(module.read(module.KEPT))}
    elif name in ("operators", "memory", "working_memory"):  # whose parts are measured one at a time
        pages = report.pages(json.loads((study_page.MEASURED / f"{name}.json").read_text(encoding="utf-8")))
    else:
        pages = module.STUDY.pages(study_page.measured(name))
    for page, texts in pages.items():
        shown = (Path(__file__).parents[1] / page).read_text(encoding="utf-8")
        for section, text in texts.items():
            assert filled(shown, section, text) == shown


def test_no_figure_of_speed_in_readme_is_written_by_hand():
    """They stand in the chart, which is drawn from the raw results."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    speed = readme.partition("\n## Speed\n")[2].partition("\n## ")[0]
    assert "figures/tasks.png" in speed and re.findall(r"\d+\.\d+|\d+ times", speed) == []


def test_the_chart_of_tasks_has_a_bar_for_each():
    found = study_page.measured("tasks")["found"]
    (axes,) = tasks.speed_chart(found).axes
    lengths = sorted(bar.get_width() for bar in axes.patches)
    assert lengths == pytest.approx(sorted(1 / row["ratio"]["median"] for row in found["1"]["rows"]))
    assert set(tasks.SHORT) == set(tasks.TASKS) and len(lengths) == 12


def test_a_table_of_tasks_says_at_least_where_a_program_was_stopped():
    machine = {"machine": study_page.facts(1)}
    ratio = {"median": 0.1, "low": 0.1, "high": 0.125}
    both = {"ours": 2 * 2**20, "theirs": 3 * 2**20}
    row = {
        "name": "toy", "peer": "curvlinops-for-pytorch", "version": "1", "ended": False, "pairs": 2, "ratio": ratio,
        "seconds": {"median": 12.0}, "unit_seconds": {"median": 120.0}, "first": {"ours": 13.0}, "compared": "fewer",
        "quality": {"ours": {"nats": 0.5}, "theirs": {"nats": 0.6}}, "peaks": both, "lines": {"ours": 2, "theirs": 9},
    }  # fmt: skip
    found = {"1": {**machine, "rows": [row, row | {"ended": True}], "failed": ["toy, theirs: the process ended."]}}
    first, second = tasks.summary(found).splitlines()[2:4]
    assert [cell.strip() for cell in first.split("|")][2:6] == ["curvlinops", "≥ 10.0", "2 / 3", "2 / 9"]
    assert "≥" not in second
    full = tasks.full_tables(found)
    assert "8.00–10.00" in full and "> 120" in full and "Not measured: toy, theirs" in full
    assert "nats, of a smaller problem" in full


def test_statements_of_a_program_are_counted_with_those_of_its_functions():
    def program(problem):
        """Not a statement."""

        def inner(x):
            return x + 1

        return inner(problem)

    assert statements(program) == 3
    assert {task.prepare is not None and statements(task.ours) <= 6 for task in tasks.TASKS.values()} == {True}
