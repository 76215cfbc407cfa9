"""Each figure carries labels with units, the lines it promises, and can be written; nothing global changes.

Tests `prediction_plots.py`, `spectrum_plots.py`, `style.py`, `tuning_plots.py`.
"""

import functools
from collections.abc import Iterator
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import curvops as co
from curvops import metrics, plots
from curvops.evidence import Ending, Tuning, TuningStep
from tests.randomness import seeded

GRID = torch.linspace(-4, 4, 30).double()


@pytest.fixture(autouse=True)
def figures_closed() -> Iterator[None]:
    pyplot.close("all")  # those that another test file left open
    yield
    pyplot.close("all")


@functools.cache
def posterior(outputs: int = 1, features: int = 1, targets: Any = None) -> Any:
    """The posterior of a linear model with a gap between its inputs."""
    torch.manual_seed(0)
    x = torch.cat([torch.rand(20, features) - 3, torch.rand(20, features) + 2]).double()
    likelihood = co.likelihoods.Gaussian(noise=0.09) if targets is None else co.likelihoods.Poisson()
    loader = DataLoader(TensorDataset(x, torch.ones(40, outputs).double()), 7)
    lin = co.linearize(nn.Linear(features, outputs).double(), loader, likelihood)
    return co.laplace(lin, co.GGN, prior_precision=1.0, check_mode=False)


def regression(**options: Any) -> Axes:
    return plots.regression(posterior(), GRID, **options)


def predictions() -> tuple[dict[str, Any], torch.Tensor]:
    logits = 3 * torch.randn(400, 4, generator=seeded())
    labels = torch.multinomial((logits / 2).softmax(-1), 1, generator=seeded()).squeeze(1)
    return {"network": logits.softmax(-1), "Laplace": (logits / 2).softmax(-1)}, labels


def reliability(**options: Any) -> Axes:
    return plots.reliability(*predictions(), **options)


def matrix(size: float = 10.0) -> Any:
    return torch.diag(size * torch.linspace(-0.1, 1, 40, dtype=torch.float64) ** 3)


@functools.cache
def spectrum() -> tuple[Any, Any]:
    A = matrix()
    return co.linalg.spectral_density(A, probes=4, generator=seeded()), co.linalg.eigsh(A, 3)


def spectral_density(**options: Any) -> Axes:
    density, top = spectrum()
    return plots.spectral_density(density, top=top, **options)


def checkpoint(size: float, seed: int) -> tuple[Any, Any, Any]:
    A, g = matrix(size), seeded(seed)
    density = co.linalg.spectral_density(A, probes=4, steps=10, generator=g)
    return density, co.linalg.eigsh(A, 2, generator=g), co.linalg.trace(A, max_matvecs=20, generator=g)


def training_spectra() -> np.ndarray:
    return plots.training_spectra({step: checkpoint(1 + step / 100, step) for step in (0, 100, 200, 400)}, bound=5.0)


@functools.cache
def solutions() -> dict[str, Any]:
    A = co.linalg.Dense(torch.diag(torch.linspace(1, 30, 40).double()), psd=True)
    B = torch.randn(40, 4, generator=seeded()).double()
    return {"plain": A.cg(B, block=False), "block": A.cg(B), "zero": A.cg(0 * B)}


def convergence(**options: Any) -> Axes:
    return plots.convergence(solutions(), rtol=1e-5, **options)


@functools.cache
def evidences() -> Any:
    return co.evidence.grid(posterior(), [10.0, 0.1, 1.0])


def evidence(**options: Any) -> Axes:
    return plots.evidence(evidences(), chosen=2.0, **options)


def evidence_trace() -> np.ndarray:
    def step(alpha: float, gamma: float, matvecs: int) -> TuningStep:
        entries = (torch.tensor([value, 2 * value]) for value in (alpha, gamma, 0.1 * gamma))
        return TuningStep(*entries, None, matvecs)

    steps = tuple(step(1 + 2.0**-i, 20 - 2.0**-i, 100 - 10 * i) for i in range(5))
    exact = Tuning("em", ("0", "2"), "linear", steps, Ending.CONVERGED)
    ended = Tuning("mackay", ("0", "2"), "linear", steps[:2], Ending.STEPS_SPENT)
    return plots.evidence_trace({"exact": exact, "8 draws": ended})


def ray(**options: Any) -> Axes:
    distances = torch.logspace(-1, 4, 50)
    confidence = {"MAP": distances.sigmoid(), "Laplace": (distances / (1 + distances)).sigmoid()}
    return plots.ray(distances, confidence, limits={"Laplace": 0.731}, radius=2.0, **options)


@functools.cache
def chains() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    series = rng.standard_normal((3, 400))
    for t in range(1, 400):
        series[:, t] = 0.9 * series[:, t - 1] + 0.4 * series[:, t]
    return {"0.weight[0, 0]": series, "0.bias[2]": rng.standard_normal((3, 400)) + np.array([[0], [0], [3]])}


def trace() -> np.ndarray:
    return plots.trace(chains())


def autocorrelation(**options: Any) -> Axes:
    return plots.autocorrelation(chains(), lags=60, **options)


def influence(**options: Any) -> Axes:
    truth = torch.randn(80, generator=seeded()) ** 3
    return plots.influence(truth, {"GGN": 0.8 * truth, "EKFAC": (truth + 0.2)[:, None].numpy()}, **options)


def pruning(**options: Any) -> Axes:
    shares = np.linspace(0, 0.9, 10)
    return plots.pruning(shares, {"magnitude": 0.1 + shares**4, "OBS": 0.1 + shares**8}, full=0.1, **options)


# figure, panels, lines over all panels, what the labels of the axes must say
FIGURES = [
    (regression, 1, 2 + 2, ["input x", "target y"]),
    (reliability, 1, 1 + 2, ["largest probability", "fraction of points"]),
    (spectral_density, 1, 1 + 1 + 1, ["eigenvalue λ", "per unit of λ"]),
    (training_spectra, 2, 4 + 2 + 3 + 1, ["eigenvalue λ", "per unit of λ", "step of training", "trace"]),
    (convergence, 1, 3 * (1 + 1) + 1, ["products with single vectors", "relative residual"]),
    (evidence, 1, 1 + 1 + 1, ["log evidence (nats)", "prior precision"]),
    (evidence_trace, 3, (4 + 2) + 4 + 2, ["prior precision", "effective parameters", "products with single vectors"]),
    (ray, 1, 2 + 1, ["distance along the ray", "largest probability"]),
    (trace, 4, 2 * 3, ["draw", "density", "0.weight[0, 0]", "0.bias[2]"]),
    (autocorrelation, 1, 2 + 2, ["lag (draws)", "autocorrelation"]),
    (influence, 1, 1 + 2, ["training without the point", "predicted change"]),
    (pruning, 1, 2 + 1, ["weights removed (fraction)", "test error"]),
]
NAMES = [row[0].__name__ for row in FIGURES]


def test_every_function_is_drawn() -> None:
    assert {*NAMES, "save"} == set(plots.__all__)


@pytest.mark.parametrize(("draw", "panels", "lines", "words"), FIGURES, ids=NAMES)
def test_figure_reads_without_the_text(draw, panels, lines, words, tmp_path):
    settings = dict(matplotlib.rcParams)
    drawn = draw()
    assert dict(matplotlib.rcParams) == settings
    axes = [drawn] if isinstance(drawn, Axes) else list(drawn.flat)
    assert len(axes) == panels == len(axes[0].figure.axes)
    assert sum(len(one.lines) for one in axes) == lines
    labels = " | ".join(one.get_xlabel() + " | " + one.get_ylabel() for one in axes)
    assert all(word in labels for word in words), labels
    assert pyplot.get_fignums()  # a notebook shows it
    plots.save(drawn, tmp_path / "figure.png")
    assert not pyplot.get_fignums()
    assert (tmp_path / "figure.png").stat().st_size > 5_000


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("draw", [row[0] for row in FIGURES if row[1] == 1], ids=lambda draw: draw.__name__)
def test_figures_of_one_panel_draw_into_given_axes(draw):
    figure, (left, right) = pyplot.subplots(1, 2)
    figures = pyplot.get_fignums()
    assert draw(ax=right) is right
    assert len(figure.axes) == 2 and pyplot.get_fignums() == figures and not left.lines and right.lines
    with pytest.raises(TypeError, match="ax must be the axes of one panel, got <Figure .*pass ax"):
        draw(ax=figure)


@pytest.mark.usefixtures("annotations_unchecked")
def test_inputs_of_a_regression_in_any_form_draw_the_same_curve():
    post = posterior()
    mean = post.predict(GRID[:, None]).mean[:, 0]
    forms = GRID, GRID[:, None], GRID.flip(0).numpy(), GRID.tolist(), GRID.float(), GRID.clone().requires_grad_()
    for form in forms:
        curve = plots.regression(post, form).lines[0]
        np.testing.assert_allclose(curve.get_xdata(), GRID, rtol=1e-6)
        np.testing.assert_allclose(curve.get_ydata(), mean, rtol=1e-5)


def test_bands_of_a_regression_are_two_standard_deviations_and_its_data_those_of_training() -> None:
    post = posterior(outputs=2)
    axes = plots.regression(post, GRID, output=1)
    for band, noise in zip(axes.collections, (True, False), strict=True):
        predicted = post.predict(GRID[:, None], noise=noise)
        top = predicted.mean[:, 1] + 2 * predicted.stddev[:, 1]
        np.testing.assert_allclose(band.get_datalim(axes.transData).y1, float(top.max()), rtol=1e-6)
    data = axes.lines[1].get_xydata()
    np.testing.assert_array_equal(data[:, 0], torch.cat([batch.inputs for batch in post.lin.data])[:, 0])
    assert [text.get_text() for text in axes.texts] == ["no data"]
    assert len(plots.regression(posterior(targets="counts"), GRID).collections) == 1  # no Gaussian noise: one band


def heads(params: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """A class, and two values, of one feature."""
    return {name: x @ weight for name, weight in params.items()}


def test_one_of_several_outputs_is_drawn_by_its_name() -> None:
    x = torch.linspace(-1, 1, 20).double().unsqueeze(1)
    y = {"kind": torch.arange(20) % 3, "values": torch.cat([x.sin(), x.cos()], 1)}
    weights = {"kind": torch.ones(1, 3).double(), "values": torch.ones(1, 2).double()}
    choice = {"kind": "classification", "values": co.likelihoods.Gaussian(0.1)}
    post = co.laplace(co.linearize((heads, weights), (x, y), choice), prior_precision=1.0, check_mode=False)
    axes = plots.regression(post, x, name="values", output=1)
    np.testing.assert_allclose(axes.lines[0].get_ydata(), post.predict(x)["values"].mean[:, 1], rtol=1e-12)
    np.testing.assert_allclose(axes.lines[1].get_ydata(), x.cos()[:, 0], rtol=1e-12)
    total = post.uncertainty(x)["values"].total[:, 1].sqrt()
    top = axes.collections[0].get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(float((post.predict(x)["values"].mean[:, 1] + 2 * total).max()))
    with pytest.raises(ValueError, match="pass name=, one of"):
        regression(name="values")


@pytest.mark.parametrize(
    "likelihood",
    [
        co.likelihoods.HeteroscedasticGaussian(),
        lambda f: torch.distributions.Normal(f[:, :1], (0.5 * f[:, 1:]).exp()),
    ],
    ids=["heteroscedastic", "of a user"],
)
def test_a_noise_that_depends_on_the_inputs_has_its_band(likelihood) -> None:
    x = torch.linspace(-1, 1, 20).double().unsqueeze(1)
    lin = co.linearize(nn.Linear(1, 2).double(), (x, x.sin()), likelihood)
    G = co.GGN(lin, mc_samples=2, generator=torch.Generator().manual_seed(0))
    post = co.laplace(lin, G, prior_precision=1.0, check_mode=False)
    axes = plots.regression(post, x)
    noisy, lower = post.predict(x, noise=True), axes.collections[0].get_paths()[0].vertices[:, 1].min()
    assert len(axes.collections) == 2 and len(axes.lines[1].get_ydata()) == 20
    assert lower == pytest.approx(float((noisy.mean - 2 * noisy.stddev).min()), rel=0.1)


def test_a_reliability_diagram_shows_the_bins_of_the_metrics() -> None:
    named, labels = predictions()
    axes = plots.reliability(named, labels, bins=7)
    for line, (name, p) in zip(axes.lines[1:], named.items(), strict=True):
        bins = metrics.reliability_bins(p, labels, bins=7)
        shown = bins.count > 0
        np.testing.assert_array_equal(line.get_xydata(), torch.stack([bins.confidence, bins.accuracy], 1)[shown])
        assert line.get_label() == f"{name}, ECE {100 * metrics.ece(p, labels, bins=7):.1f} %"


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_probabilities_in_any_form(device):
    named, labels = predictions()
    first = plots.reliability(named["network"], labels).lines[1].get_xydata()
    for p in (named["network"].numpy(), named["network"].to(device).requires_grad_()):
        np.testing.assert_array_equal(plots.reliability(p, labels.to(device)).lines[1].get_xydata(), first)
    images = named["network"].unflatten(0, (4, 10, 10)).movedim(-1, 1)
    np.testing.assert_array_equal(plots.reliability(images, labels.view(4, 10, 10)).lines[1].get_xydata(), first)
    ones, two = named["network"][:, 0], torch.stack([1 - named["network"][:, 0], named["network"][:, 0]], 1)
    is_zero = (labels == 0).long()
    both = plots.reliability(two, is_zero.numpy()).lines[1].get_xydata()
    for p in (ones, ones[:, None]):
        np.testing.assert_array_equal(plots.reliability(p, is_zero).lines[1].get_xydata(), both)


def test_evidence_with_an_interval_has_ends_that_show_and_held_out_scores_have_none() -> None:
    post = posterior()
    found = co.evidence.grid(post, [1.0, 10.0, 100.0])
    axes = plots.evidence(found)
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [float(one) for one in found])
    checked = co.evidence.validate(
        post, torch.ones(5, 1).double(), torch.ones(5, 1).double(), prior_precisions=[1.0, 9.0]
    )
    axes = plots.evidence(checked.tuning)
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), checked.tuning.scores)
    assert "held-out" in axes.get_ylabel() and not axes.collections


def test_a_tuned_posterior_stands_for_its_tuning() -> None:
    tuned = co.evidence.mackay(posterior(), None)
    lines = [plots.evidence_trace({"exact": each})[0].lines[0] for each in (tuned, tuned.tuning)]
    np.testing.assert_array_equal(*(line.get_xydata() for line in lines))


def test_chains_that_disagree_are_worth_few_draws_in_the_legend():
    labels = [text.get_text() for text in autocorrelation().get_legend().get_texts()]
    assert labels[1] == "0.bias[2]: 2 of 1,200 draws"


def test_a_spectral_density_is_drawn_as_it_was_computed() -> None:
    A = torch.diag(torch.logspace(-3, 1, 60, dtype=torch.float64))
    for scale in ("linear", "log"):
        found = co.linalg.spectral_density(A, scale=scale, probes=4, generator=seeded())
        axes = plots.spectral_density(found, top=co.linalg.eigsh(A, 2))
        assert axes.get_xscale() == scale and ("log λ" in axes.get_ylabel()) == (scale == "log")
        curve, shown = axes.lines[0], ~np.isnan(axes.lines[0].get_ydata())
        np.testing.assert_array_equal(curve.get_xdata(), found.grid)
        np.testing.assert_array_equal(curve.get_ydata()[shown], found.density[torch.as_tensor(shown)])
        assert "one eigenvalue of 60" in axes.get_legend_handles_labels()[1]
        assert len(axes.lines[-1].get_xdata()) == 2


def test_a_log_spectrum_says_what_counts_as_zero():
    A = torch.diag(torch.cat([torch.zeros(10), torch.logspace(-3, 1, 30)]).double())
    found = co.linalg.spectral_density(A, scale="log", probes=4, generator=seeded())
    assert found.zero_mass and "count as zero" in plots.spectral_density(found).get_title()


def test_eigenvalues_of_both_signs_on_a_symlog_axis():
    axes = spectral_density(scale="symlog")
    assert axes.get_xscale() == "symlog" and np.isnan(axes.lines[0].get_ydata()).any()
