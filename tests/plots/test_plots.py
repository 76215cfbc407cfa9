"""Each figure carries labels with units, the lines it promises, and can be written; nothing global changes.

Tests `chain_plots.py`, `cost_plots.py`, `density.py`, `prediction_plots.py`, `prior_plots.py`, `removal_plots.py`,
`style.py`.
"""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure

import curvops as co
from curvops import plots
from curvops.posterior.log_evidence.tuning import Ending, Tuning, TuningStep

ROWS = ["MAP", "MAP + temperature", "Laplace (full GGN)"]


def reliability() -> Figure:
    rng = np.random.default_rng(0)
    bins = 15
    curves, errors = {}, {}
    for name, slope in zip(ROWS, [0.75, 0.92, 1.03]):
        centre = (np.arange(bins) + 0.5) / bins
        share = np.exp(9 * centre)
        share[:2] = 0
        share /= share.sum()
        truth = np.clip(slope * centre + 0.03 * rng.standard_normal(bins), 0, 1)
        empty = share == 0
        curves[name] = (np.where(empty, np.nan, centre), np.where(empty, np.nan, truth), share)
        errors[name] = float(np.sum(share * np.abs(truth - centre)))
    return plots.reliability(curves, "Rotated digits, 15–90°", errors)


ANGLES = np.arange(0, 91, 15)


def rotation() -> Figure:
    fall = 1 / (1 + np.exp((ANGLES - 45) / 12))
    confidence = {name: 1 - drop * (1 - fall) for name, drop in zip(ROWS, [0.18, 0.3, 0.5])}
    accuracy = {name: 0.15 + 0.84 * fall - shift for name, shift in zip(ROWS, [0, 0, 0.01])}
    return plots.rotation(ANGLES, confidence, 0.4 * (1 - fall), accuracy)


def evidence() -> Figure:
    precisions = np.logspace(-2, 4, 25)
    log = np.log10(precisions)
    value = -420 - 60 * (log - 1.2) ** 2
    nll = 0.06 + 0.02 * (log - 0.8) ** 2
    return plots.evidence(precisions, value, value - 14, value + 14, nll, chosen=15.3)


def convergence() -> Figure:
    histories = {}
    for name, block, offset, rate in [
        ("plain", 1, 0, 0.97),
        ("block of 16", 16, 0, 0.8),
        ("preconditioned", 1, 64, 0.8),
    ]:
        steps = np.arange(int(np.log(1e-6) / np.log(rate)) + 1)
        wiggle = np.exp(0.3 * np.sin(steps / 7)) if len(steps) > 1 else 1.0
        residual = rate**steps * np.where(steps > 0, wiggle, 1.0)
        histories[name] = (offset + steps * block, residual)
    return plots.convergence(histories, rtol=1e-5)


def regression() -> Figure:
    rng = np.random.default_rng(1)
    x_train = np.concatenate([rng.uniform(-3, -0.8, 40), rng.uniform(1.2, 3, 40)])
    y_train = np.sin(2 * x_train) + 0.1 * rng.standard_normal(80)
    x = np.linspace(-4, 4, 300)
    distance = np.abs(x[:, None] - x_train).min(-1)
    return plots.regression(x_train, y_train, x, np.sin(2 * x), 0.04 + 0.6 * distance**1.5 / (1 + distance), 0.1)


def ray() -> Figure:
    distances = np.logspace(-1, 4, 50)
    confidence = {"MAP": 1 / (1 + np.exp(-distances)), "Laplace": 1 / (1 + np.exp(-distances / (1 + distances)))}
    return plots.ray(distances, confidence, {"Laplace": 0.731}, radius=2.0)


def covariance() -> Figure:
    rng = np.random.default_rng(2)
    factor = rng.standard_normal((40, 15)) * np.repeat([0.5, 1.0, 1.5, 1.0], 10)[:, None]
    factor += np.tile(rng.standard_normal((10, 15)), (4, 1))
    return plots.covariance(factor @ factor.T / 15, ["7", "7, 45°", "3", "8"])


def spectral_density() -> Figure:
    grid = np.linspace(-0.5, 20, 400)
    bells = np.exp(-0.5 * ((grid[:, None] - np.array([0, 5, 12, 19])) / 0.2) ** 2) @ np.array([0.97, 0.01, 0.01, 0.01])
    density = bells / (0.2 * np.sqrt(2 * np.pi))
    top = np.array([19.0, 12.0, 5.0])
    return plots.spectral_density(grid, density, 0.5 * density, 2 * density, 0.2, top, 1000, title="Eigenvalues")


def solves() -> Figure:
    steps = np.arange(1, 50)
    curves = {
        (method, preconditioner): (8.0 * steps + setup, 0.01 * steps, rate**steps)
        for method, rate in [("cg", 0.8), ("block-cg", 0.6)]
        for preconditioner, setup in [("none", 0), ("nystrom", 40)]
    }
    return plots.solves(curves, 1e-6, "decaying, n = 1,000")


def estimates() -> Figure:
    rng, budgets = np.random.default_rng(3), np.array([25.0, 50.0, 100.0])
    curve = (budgets, np.abs(rng.standard_normal((3, 5))) / budgets[:, None], 2 / budgets)
    exact = (budgets, np.zeros((3, 5)), np.zeros(3))
    return plots.estimates({"trace": {"hutchinson": curve, "exact": exact}, "logdet": {"auto": curve}}, "flat")


def evidence_trace() -> Figure:
    def step(alpha: float, gamma: float, matvecs: int) -> TuningStep:
        entries = (torch.tensor([value, 2 * value]) for value in (alpha, gamma, 0.1 * gamma))
        return TuningStep(*entries, None, matvecs)

    steps = tuple(step(1 + 2.0**-i, 20 - 2.0**-i, 100 - 10 * i) for i in range(5))
    exact = Tuning("em", ("0", "2"), "linear", steps, Ending.CONVERGED)
    ended = Tuning("mackay", ("0", "2"), "linear", steps[:2], Ending.STEPS_SPENT)
    return plots.evidence_trace({"exact": exact, "8 draws": ended})


def chains() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    series = rng.standard_normal((3, 400))
    for t in range(1, 400):
        series[:, t] = 0.9 * series[:, t - 1] + 0.4 * series[:, t]
    return {"0.weight[0, 0]": series, "0.bias[2]": rng.standard_normal((3, 400)) + np.array([[0], [0], [3]])}


def trace() -> Figure:
    return plots.trace(chains())


def autocorrelation() -> Figure:
    return plots.autocorrelation(chains(), lags=60)


def checkpoint(size: float, seed: int) -> tuple[Any, Any, Any]:
    A = torch.diag(size * torch.linspace(-0.1, 1, 40, dtype=torch.float64) ** 3)
    g = torch.Generator().manual_seed(seed)
    density = co.linalg.spectral_density(A, probes=4, steps=10, generator=g)
    return density, co.linalg.eigsh(A, 2, generator=g), co.linalg.trace(A, max_matvecs=20, generator=g)


def training_spectra() -> Figure:
    return plots.training_spectra({step: checkpoint(1 + step / 100, step) for step in range(0, 600, 100)}, bound=5.0)


def influence() -> Figure:
    rng = np.random.default_rng(5)
    truth = rng.standard_normal(80) ** 3
    return plots.influence(truth, {"GGN": 0.8 * truth, "EKFAC": truth + 0.2 * rng.standard_normal(80)})


def pruning() -> Figure:
    shares = np.linspace(0, 0.9, 10)
    return plots.pruning(shares, {"magnitude": 0.1 + shares**4, "OBS": 0.1 + shares**8}, 0.1)


# figure, panels, lines over all panels, what the labels of the axes must say
FIGURES = [
    (reliability, 3, 2 * 3, ["largest probability", "fraction of points"]),
    (rotation, 2, 3 + 3 + 1, ["degrees", "(nats)", "fraction"]),
    (evidence, 2, (1 + 2 + 1) + 3, ["log evidence (nats)", "nats per point", "prior precision"]),
    (evidence_trace, 3, (4 + 2) + 4 + 2, ["prior precision", "effective parameters", "products with single vectors"]),
    (convergence, 1, 3 + 3 + 1 + 1, ["products with single vectors", "relative residual"]),
    (solves, 2, 2 * (4 + 1), ["products with single vectors", "seconds", "worst relative residual"]),
    (estimates, 2, 3 * (5 + 1 + 1), ["products with single vectors (budget)", "relative error"]),
    (regression, 1, 2 + 2, ["input x", "target y", "arbitrary units"]),
    (ray, 1, 2 + 1, ["distance along the ray", "largest probability"]),
    (covariance, 2, 2 * 3, ["outputs 0 … 9", "squared logits"]),
    (spectral_density, 1, 1 + 1 + 1, ["eigenvalue λ", "per unit of λ"]),
    (trace, 4, 2 * 3, ["draw", "density", "0.weight[0, 0]", "0.bias[2]"]),
    (autocorrelation, 1, 2 + 2, ["lag (draws)", "autocorrelation"]),
    (training_spectra, 2, 4 + 2 + 3 + 1, ["eigenvalue λ", "per unit of λ", "step of training", "trace"]),
    (influence, 1, 1 + 2, ["training without the point", "predicted change"]),
    (pruning, 1, 2 + 1, ["weights removed (fraction)", "test error"]),
]


@pytest.mark.parametrize(("draw", "panels", "lines", "words"), FIGURES, ids=[row[0].__name__ for row in FIGURES])
def test_figure_reads_without_the_text(draw, panels, lines, words, tmp_path):
    settings = dict(matplotlib.rcParams)
    figure = draw()
    assert dict(matplotlib.rcParams) == settings
    assert len(figure.axes) == panels
    assert sum(len(axes.lines) for axes in figure.axes) == lines
    labels = " | ".join(axes.get_xlabel() + " | " + axes.get_ylabel() for axes in figure.axes)
    assert all(word in labels for word in words), labels
    plots.save(figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5_000


def test_no_figure_reaches_pyplot():
    before = pyplot.get_fignums()
    for draw, *_ in FIGURES:
        draw()
    assert pyplot.get_fignums() == before


def test_an_interval_of_the_evidence_narrower_than_the_curve_has_ends_that_show() -> None:
    x, value = np.array([1.0, 10.0, 100.0]), np.array([-50.0, -40.0, -60.0])
    axes = plots.evidence(x, value, value - 0.01, value + 0.03, -value, chosen=10.0).axes[0]
    lower, upper = (line.get_ydata() for line in axes.lines if line.get_marker() == "_")
    np.testing.assert_allclose([lower, upper], [value - 0.01, value + 0.03])
    assert "95 % interval, at most ±0.02 nats" in [text.get_text() for text in axes.get_legend().get_texts()]
    assert all(
        line.get_markersize() > axes.lines[0].get_markersize() for line in axes.lines if line.get_marker() == "_"
    )


def test_one_epistemic_array_belongs_to_the_last_row():
    last, right = rotation().axes[0].lines[2], rotation().axes[1].lines[0]
    assert right.get_color() == last.get_color()


def test_the_sketch_is_drawn_as_a_run_up():
    starts = [line.get_xdata() for line in convergence().axes[0].lines if line.get_linestyle() == ":"]
    assert [0, 64] in [list(start) for start in starts]


def test_bins_without_points_leave_no_marker():
    curve = reliability().axes[0].lines[1]
    assert len(curve.get_xdata()) == 13


def test_reliability_has_three_panels_a_row():
    bins = np.array([0.25, 0.75])
    figure = plots.reliability({name: (bins, bins, np.array([0.5, 0.5])) for name in "abcde"})
    assert len(figure.axes) == 5
    assert [axes.get_subplotspec().rowspan.start for axes in figure.axes] == [0, 0, 0, 1, 1]
    assert [bool(axes.get_ylabel()) for axes in figure.axes] == [True, False, False, True, False]


def test_chains_that_disagree_are_worth_few_draws_in_the_legend():
    labels = [text.get_text() for text in autocorrelation().axes[0].get_legend().get_texts()]
    assert labels[1] == "0.bias[2]: 2 of 1,200 draws"


def test_a_log_spectrum_says_its_unit_and_what_counts_as_zero():
    grid = np.logspace(-3, 2, 300)
    density = np.exp(-0.5 * np.log(grid) ** 2)
    figure = plots.spectral_density(grid, density, 0 * density, 2 * density, 0.1, scale="log", zero_mass=0.25)
    axes = figure.axes[0]
    assert axes.get_xscale() == "log" and "log λ" in axes.get_ylabel() and "25.0 %" in axes.get_title()


def test_eigenvalues_of_both_signs_on_a_symlog_axis():
    grid = np.linspace(-20, 1000, 300)
    density = np.exp(-np.abs(grid) / 10)
    axes = plots.spectral_density(grid, density, 0 * density, 2 * density, 5.0, scale="symlog").axes[0]
    assert axes.get_xscale() == "symlog" and axes.get_xlim() == (-20, 1000)
    assert np.isnan(axes.lines[0].get_ydata()).any()


@pytest.mark.usefixtures("annotations_unchecked")
def test_a_spectral_density_is_drawn_as_it_was_computed() -> None:
    A = torch.diag(torch.logspace(-3, 1, 60, dtype=torch.float64))
    for scale in ("linear", "log"):
        found = co.linalg.spectral_density(A, scale=scale, probes=4, generator=torch.Generator().manual_seed(0))
        axes = plots.spectral_density(found, top=torch.tensor([10.0, 8.0]), size=60).axes[0]
        grid, density, low, high = (part.numpy() for part in (found.grid, found.density, found.lower, found.upper))
        by_arrays = plots.spectral_density(
            grid, density, low, high, found.bandwidth, size=60, scale=scale, zero_mass=found.zero_mass
        ).axes[0]
        assert axes.get_xscale() == by_arrays.get_xscale() == scale
        np.testing.assert_array_equal(axes.lines[0].get_xydata(), by_arrays.lines[0].get_xydata())
