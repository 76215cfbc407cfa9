"""The pieces of the samplers' studies in `benchmarks/`: their data, their networks, what they compare and conclude."""

import dataclasses
import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import nn

import curvops as co
from benchmarks import (
    active_learning,
    bayesian_optimisation,
    chains_out_of_distribution,
    claims,
    cold_posterior,
    defaults,
    defaults_settings,
    infinite_width,
    many_points,
    online_lora,
    report,
    study_page,
    subnetworks,
)
from benchmarks.networks import build
from benchmarks.parts import diagonal
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


def test_known_and_unknown_digits_are_apart():
    data = chains_out_of_distribution.task(3, points=100)
    everything = torch.cat([data.train[0], data.test[0], data.unknown["other digits"]])
    assert len(everything.unique(dim=0)) == 300
    assert set(data.train[1].tolist()) == set(data.test[1].tolist()) == set(range(5))
    turned = data.unknown["turned digits"].view(-1, 8, 8)
    torch.testing.assert_close(turned, data.test[0].view(-1, 8, 8).rot90(1, (1, 2)), atol=1e-5, rtol=0)


def test_every_method_gives_its_draws():
    module, data = chains_out_of_distribution, chains_out_of_distribution.task(0, points=60)
    found = module.drawn(data, 0, steps=3, spacings=(1, 2))
    sizes = {name: [len(draws) for draws in sets] for name, sets in found.items()}
    assert sizes.pop("SGD") == [1] * 10
    assert sizes.pop("serial, every 1") == sizes.pop("serial, every 2") == [10] * 10
    assert list(sizes.values()) == [[10]] * 3
    assert torch.equal(torch.cat(found["SGD"]), found["10 × SGD"][0])
    assert all(0 <= value <= 1 for name, value in module.scored(found["10 × SGD"][0], data).items() if name != "loss")


def test_the_lstm_of_linear_layers_is_that_of_torch():
    torch.manual_seed(0)
    reader = cold_posterior.network(0)
    theirs = nn.LSTM(cold_posterior.CHANNELS, cold_posterior.HIDDEN, batch_first=True).double()
    order = [0, 1, 3, 2]  # ours: input, forget, output, cell; torch's: input, forget, cell, output
    pick = torch.cat([torch.arange(cold_posterior.HIDDEN) + i * cold_posterior.HIDDEN for i in order])
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(reader.into.weight[pick])
        theirs.weight_hh_l0.copy_(reader.again.weight[pick])
        theirs.bias_ih_l0.copy_(reader.into.bias[pick])
        theirs.bias_hh_l0.zero_()
        tokens, _ = cold_posterior.sequences(7, torch.Generator().manual_seed(0))
        features = reader.convolution(reader.embedding(tokens).mT).tanh()
        hidden = theirs(nn.functional.avg_pool1d(features, 2).mT)[0][:, -1]
        torch.testing.assert_close(reader(tokens), reader.head(hidden), rtol=1e-12, atol=1e-12)


def test_a_tenth_of_the_labels_is_flipped():
    """Of 1,000: a deviation of four standard errors, wrong once in 16,000 seeds; the seed is fixed."""
    tokens, labels = cold_posterior.sequences(1000, torch.Generator().manual_seed(0))
    values = torch.randn(cold_posterior.WORDS, generator=torch.Generator().manual_seed(0)).tolist()
    truth = []
    for words in tokens.tolist():
        worth = [values[w] * (-1 if i and words[i - 1] < cold_posterior.NEGATIONS else 1) for i, w in enumerate(words)]
        truth.append(sum(v for v, w in zip(worth, words) if w >= cold_posterior.NEGATIONS) > 0)
    share = (labels.bool() != torch.tensor(truth)).double().mean()
    assert abs(share - cold_posterior.FLIPPED) < 4 * (0.09 / 1000) ** 0.5


def test_both_ways_to_predict_meet_the_mode_where_it_is_cold():
    generator = torch.Generator().manual_seed(0)
    data, test = (cold_posterior.sequences(n, generator) for n in (40, 20))
    (mode,) = cold_posterior.trained(data, 1.0, 1, steps=2)
    lin = cold_posterior.at(mode, data)
    parts = [test, data]
    at_mode = cold_posterior.loss(lambda tokens: lin.predict(tokens).softmax(-1), parts)
    for value in cold_posterior.laplace(lin, parts, 1e-16, 0).values():
        torch.testing.assert_close(value, at_mode, atol=1e-6, rtol=0)


def test_serial_and_parallel_draws_have_a_loss_each_seed(monkeypatch):
    monkeypatch.setattr(cold_posterior, "SPACING", 1)
    generator = torch.Generator().manual_seed(0)
    data, test = (cold_posterior.sequences(n, generator) for n in (40, 20))
    found = cold_posterior.hamiltonian(
        data, cold_posterior.at(cold_posterior.starts(1)[0], data), [test, test, data], 1.0, 2, steps=1
    )
    assert [losses.shape for losses in found.values()] == [(3, 2)] * 2
    assert all(torch.equal(losses[0], losses[1]) for losses in found.values())
    vi = cold_posterior.variational(data, cold_posterior.starts(1)[0], [test], 1.0, 0, steps=2)
    assert list(vi) == cold_posterior.VI


def test_the_best_temperature_is_chosen_by_validation_alone():
    losses = torch.tensor([[[3.0, 1.0], [1.0, 2.0], [2.0, 3.0]], [[0.0, 5.0], [9.0, 4.0], [0.0, 0.0]]])
    assert cold_posterior.best(losses, range(3)).tolist() == [9.0, 5.0]
    assert cold_posterior.best(losses, (0, 2)).tolist() == [0.0, 5.0]


def test_errors_over_overlapping_splits_count_what_they_share():
    values = torch.tensor([1.0, 2.0, 4.0, 5.0])
    alone, shared = (subnetworks.standard_error(name, values) for name in ("one dimension", "diabetes"))
    assert alone == pytest.approx(float(stats.sem(values)))
    assert shared == pytest.approx(float(values.std()) * (1 / 4 + 1 / 2) ** 0.5)
    split = next(subnetworks.diabetes(1))
    assert subnetworks.OVERLAP["diabetes"] == pytest.approx(len(split.x_gap) / len(split.x), rel=0.01)


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


def test_random_functions_have_their_largest_value_and_one_deviation():
    function, best = bayesian_optimisation.network_draw(0)
    x = torch.rand(2000, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = function(x)
    assert float(values.max()) < best
    assert float(values.std()) == pytest.approx(1, rel=0.1)


def test_an_ensemble_is_its_members():
    torch.manual_seed(0)
    model, x = bayesian_optimisation.Ensemble((4, 3, 1), 2), torch.rand(5, 2, dtype=torch.float64)
    h = bayesian_optimisation.HalfCircles()(x)
    torch.testing.assert_close(h.norm(dim=1), torch.full((5,), 2**0.5, dtype=torch.float64))
    for i, found in enumerate(model.posterior(x).values):
        (w1, b1, w2, b2) = (p[i] for p in model.layers)
        torch.testing.assert_close(found, (h @ w1.mT + b1).tanh() @ w2.mT + b2)


def test_surrogates_run_a_round(monkeypatch):
    problem = dataclasses.replace(bayesian_optimisation.PROBLEMS["Branin"], rounds=1, width=4)
    for method in bayesian_optimisation.METHODS:
        regret, x, y, _ = bayesian_optimisation.run(problem, method, 0)
        assert len(regret) == 2 and regret[1] <= regret[0] and x.shape == (8, 2) and y.shape == (8,)


def test_blends_have_either_label():
    images = active_learning.load_digits().train
    mixed = active_learning.blends(images, torch.Generator().manual_seed(0))
    first, second = (torch.randperm(1000, generator=g) for g in [torch.Generator().manual_seed(0)] for _ in range(2))
    apart = images.y[first] != images.y[second]
    a, b = images.y[first][apart], images.y[second][apart]
    assert bool(((mixed.y == a) | (mixed.y == b)).all())
    share = float((mixed.y == a).double().mean())
    assert abs(share - 0.5) < 4 * (0.25 / len(a)) ** 0.5  # four standard errors; the seed is fixed


def test_defaults_are_measured_beside_the_network_itself():
    """Tests `defaults.py` and `defaults_settings.py`."""
    moons = defaults_settings.SETTINGS["two moons, 100, AdamW"]
    short = dataclasses.replace(moons, network=defaults_settings.mlp(2, 6, 6, 2), epochs=4, stopped=True)
    found = study_page.tensors({"moons": defaults.of_setting(short, 2, ("last layer, KFAC", "KFAC"))})
    rows = [f"{structure} | {rule}" for structure in ("last layer, KFAC", "KFAC") for rule in defaults.RULES]
    assert sorted(found["moons"]["rows"]) == sorted(rows)
    assert all("nan" not in section(found) for section in defaults.SECTIONS.values())


def test_without_averaging_the_network_itself_predicts():
    (network,) = defaults_settings.train(
        dataclasses.replace(defaults_settings.SETTINGS["wine, 100, AdamW"], epochs=1), [0]
    )
    points = defaults_settings.wine(100, 0)
    post = co.laplace(co.linearize(network, (points.x, points.y), "classification"), co.KFAC, 1e9, check_mode=False)
    for link in ("probit", "mc"):
        p = defaults.probabilities(defaults.predicted(post, points.x_test), link)
        torch.testing.assert_close(p, network(points.x_test).softmax(-1), atol=1e-4, rtol=0)


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


def test_a_network_is_linearised_for_the_figures_of_operators():
    assert co.DiagonalGGN(diagonal.linearized(build("tiny"))).diagonal().isfinite().all()


def test_no_figure_of_speed_in_readme_is_written_by_hand():
    """They stand in the chart, which is drawn from the raw results."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    speed = readme.partition("\n## Speed\n")[2].partition("\n## ")[0]
    assert "figures/tasks.png" in speed and re.findall(r"\d+\.\d+|\d+ times", speed) == []


def test_the_chart_of_tasks_has_a_bar_for_each_but_those_that_overstate():
    found = study_page.measured("tasks")["found"]
    (axes,) = tasks.speed_chart(found).axes
    lengths = sorted(bar.get_width() for bar in axes.patches)
    rows = [row for row in found["1"]["rows"] if row["name"] not in tasks.OVERSTATED]
    assert lengths == pytest.approx(sorted(1 / row["ratio"]["median"] for row in rows))
    assert set(tasks.SHORT) == set(tasks.TASKS) and len(lengths) == 10


def test_an_additive_fisher_counts_every_episode_once():
    base, generator = online_lora.pretrained(0, steps=1), torch.Generator().manual_seed(0)
    model, post, total = online_lora.adapted(base, 0), None, 0.0
    for grammar in online_lora.grammars(0)[1:3]:
        lin = co.linearize(model, online_lora.sentences(grammar, 3, generator), "classification")
        post = online_lora.posterior(post, lin, additive=True)
        total = total + co.DiagonalGGN(lin, fisher="empirical").diagonal()
        alone = online_lora.posterior(post, lin, additive=False)
    torch.testing.assert_close(post.precision.diagonal(), total + online_lora.PRIOR)
    last = co.DiagonalGGN(lin, fisher="empirical").diagonal()
    torch.testing.assert_close(alone.precision.diagonal(), last + online_lora.PRIOR)


def test_losses_are_relative_to_all_data_and_first_episodes_agree(monkeypatch):
    for name in ("SENTENCES", "TEST"):
        monkeypatch.setattr(online_lora, name, 2)
    base = online_lora.pretrained(0, steps=1)
    found = {
        name: online_lora.run(online_lora.METHODS[name], base, 0, steps=1).unsqueeze(0) for name in ("plain", "offline")
    }
    above = online_lora.relative(found)
    assert set(above) == {"plain"}
    assert all(float(each[0, 0]) == 0 for each in above.values())
    losses = torch.arange(16.0).view(1, 4, 4)
    assert online_lora.forgotten(losses).tolist() == [8.0]  # (12 − 0 + 13 − 5 + 14 − 10) / 3


def test_a_sparse_process_trains_at_the_points_of_the_pivoted_cholesky(monkeypatch):
    for name, value in (("RANK", 5), ("BATCH", 10), ("STEPS", 20), ("WIDTHS", {40: (many_points.INPUTS, 6, 1)})):
        monkeypatch.setattr(many_points, name, value)
    model, x, y = many_points.problem(40, torch.float32)
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(many_points.NOISE))
    training = many_points.Training(x, y, lin, learn=False)
    before = training.process.covar_module.prior_precision.clone()
    assert training.epoch() > 0
    at = training.process.variational_strategy.inducing_points
    rows = co.gp.reduced_posterior(lin, 5, many_points.PRIOR, check_mode=False).rows
    assert torch.equal(at, x[rows[:, 0]]) and not at.requires_grad
    assert not torch.equal(training.process.covar_module.prior_precision, before)
    mean, variance = training.moments(many_points.held_out(torch.float32))
    assert mean.shape == variance.shape == (many_points.TEST,) and bool((variance > 0).all())


def test_errors_are_relative_to_the_exact_standard_deviations():
    exact = {"near": torch.tensor([1.0, 4.0])}
    row = many_points.score(lambda x: 4 * exact["near"].unsqueeze(1), {"near": torch.zeros(2, 1)}, exact)
    assert row["near"] == 1
    assert many_points.percent(0.0123) == "1.2 %" and many_points.percent(12.5) == "1,250 %"


def test_features_of_the_reprior_predict_as_its_readout_does():
    """Given the hidden weights: the mean is that of T at φ = 0 of the readout, the evidence the ratio of densities."""
    x, y, new = infinite_width.problem()
    model = infinite_width.network("gelu", 8)
    prior = co.sampling.ntk_precision(model, infinite_width.WEIGHT_STD, infinite_width.BIAS_STD)
    rep = co.sampling.reprior(model, (x, y.unsqueeze(1)), infinite_width.NOISE, prior_precision=prior)
    draws = [
        {name: block[0] for name, block in rep.normal(1, torch.Generator().manual_seed(s)).items()} for s in range(3)
    ]
    points = torch.cat([x, new])
    K = torch.stack([infinite_width.feature_kernel(model, points, rep.map(phi)) for phi in draws])
    mean, covariance = infinite_width.given_features(K, y)
    for phi, row in zip(draws, mean):
        middle = rep.map({name: 0 * block if name in rep.readout else block for name, block in phi.items()})
        torch.testing.assert_close(torch.func.functional_call(model, middle, (new,)).squeeze(1), row)
    ratios = torch.stack([rep.log_ratio(phi) for phi in draws])
    found = infinite_width.log_evidence(K, y)
    torch.testing.assert_close(found - found[0], ratios - ratios[0])
    exact = infinite_width.of_limit(x, y, new)
    assert bool((infinite_width.distances(exact, exact) == 0).all())
    alone = infinite_width.mixture((mean, covariance), torch.tensor([0.0, 2.0, 0.0]).double())
    torch.testing.assert_close(alone, (mean[1], covariance[1]))


def test_the_exponent_of_a_power_of_the_width():
    assert infinite_width.slope((4, 16, 64), [3 * w**-0.5 for w in (4, 16, 64)]) == pytest.approx(-0.5)


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
