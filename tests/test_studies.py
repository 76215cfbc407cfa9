"""The pieces of the samplers' studies in `benchmarks/`: their data, their networks, what they compare and conclude."""

import dataclasses
import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from scipy import stats

from benchmarks import claims, defaults, defaults_settings, report, study_page
from benchmarks.report import filled


def test_intervals_and_verdicts_are_those_of_student():
    values = [0.3, 0.1, 0.4, 0.2]
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert claims.interval(values)[1:] == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert claims.verdict(values) == "held"
    assert claims.verdict([-v for v in values]) == "the reverse"
    assert claims.verdict([0.3, -0.3, 0.2, -0.1]) == "open"
    with pytest.raises(ValueError, match="two seeds"):
        claims.interval([0.1])


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
