"""Each figure: labelled axes with units, a legend where lines need one, a file on disk, clear errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from curvops import plots

RNG = np.random.default_rng(0)


def bins(shift: float) -> dict[str, np.ndarray]:
    edges = np.linspace(0, 1, 16)
    confidence = (edges[1:] + edges[:-1]) / 2
    count = np.round(200 * confidence**3)
    accuracy = np.where(count > 0, np.clip(confidence - shift, 0, 1), np.nan)
    return {"edges": edges, "confidence": np.where(count > 0, confidence, np.nan), "accuracy": accuracy, "count": count}


def reliability() -> Figure:
    upright = {"MAP": bins(0.1), "MAP, temperature": bins(0.05), "Laplace": bins(0.02)}
    turned = {"MAP": bins(0.4), "MAP, temperature": bins(0.3), "Laplace": bins(0.1)}
    return plots.reliability([upright, turned], ["upright", "rotated 15-90°"])


def rotation() -> Figure:
    angles = np.arange(0, 91, 15)
    confidence = {
        "MAP": 0.98 - 0.001 * angles,
        "MAP, temperature": 0.95 - 0.002 * angles,
        "Laplace": 0.95 - 0.006 * angles,
    }
    uncertainty = {
        "total, Laplace": 0.1 + 0.015 * angles,
        "epistemic, Laplace": 0.01 + 0.01 * angles,
        "total, MAP": 0.1 + 0.005 * angles,
    }
    return plots.rotation(angles, 0.98 - 0.009 * angles, confidence, uncertainty)


def evidence() -> Figure:
    precision = np.logspace(-1, 4, 15)
    value = -50 - 3 * np.log(precision / 80) ** 2
    half = 5 / np.sqrt(precision)
    nll = 0.08 + 0.002 * np.log(precision[::2] / 200) ** 2
    return plots.evidence(precision, value, (value - half, value + half), (precision[::2], nll), 83.2, 0.11)


def convergence() -> Figure:
    def line(rate: float, start: float, n: int) -> tuple[np.ndarray, np.ndarray]:
        return start + 8 * np.arange(n), 10 ** (-rate * np.arange(n))

    slow = {"plain CG": line(0.05, 0, 120), "block CG": line(0.15, 0, 40), "block CG + Nyström": line(0.5, 64, 13)}
    fast = {"plain CG": line(0.2, 0, 30), "block CG": line(0.4, 0, 15), "block CG + Nyström": line(0.8, 32, 9)}
    return plots.convergence([fast, slow], ["prior precision 83", "prior precision 0.83"], 1e-6)


def regression() -> Figure:
    x = np.linspace(-4, 4, 200)
    data = np.concatenate([RNG.uniform(-3.5, -1, 40), RNG.uniform(1.5, 3, 30)])
    deviation = 0.03 + 0.5 * np.exp(-((x - 0.25) ** 2)) + 0.1 * np.maximum(np.abs(x) - 3, 0)
    draws = np.sin(x) + deviation * RNG.standard_normal((5, 1))
    return plots.regression(
        x, np.sin(x), deviation, 0.1, (data, np.sin(data) + 0.1 * RNG.standard_normal(70)), np.sin(x), draws
    )


def covariance() -> Figure:
    root = RNG.standard_normal((50, 12))
    labels = [f"digit {d}, {a}°" for d, a in ((3, 0), (3, 45), (8, 0), (8, 45), (1, 0))]
    return plots.covariance(root @ root.T / 12, labels, "covariance of logits (nats²)", "Outputs vary together")


FIGURES = {f.__name__: f for f in (reliability, rotation, evidence, convergence, regression, covariance)}
UNITS = {
    "reliability": ("probability", "fraction"),
    "rotation": ("degrees", "nats"),
    "evidence": ("1 / variance", "nats"),
    "convergence": ("products", "residual"),
    "regression": ("unitless", "unitless"),
    "covariance": ("outputs", "outputs"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figure_is_labelled_with_units_and_written(name: str, tmp_path: Path) -> None:
    figure = FIGURES[name]()
    text = " ".join(label for ax in figure.axes for label in (ax.get_xlabel(), ax.get_ylabel()))
    assert all(unit in text for unit in UNITS[name])
    assert all(ax.get_xlabel() or ax.get_ylabel() or len(figure.axes) > 1 for ax in figure.axes)
    path = plots.save(figure, tmp_path / "figures" / f"{name}.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_plots_keep_out_of_pyplot() -> None:
    source = "".join(path.read_text() for path in Path(plots.__file__).parent.glob("*.py"))
    assert "pyplot" not in source


def test_bad_arrays_are_refused() -> None:
    x = np.arange(3.0)
    with pytest.raises(ValueError, match="one length"):
        plots.rotation(x, x, {"MAP": x[:2]}, {})
    with pytest.raises(ValueError, match="one length"):
        plots.evidence(x, x, (x, x[:1]), (x, x), 1.0)
    with pytest.raises(ValueError, match="one length"):
        plots.regression(x, x, x[:1], 0.1, (x, x))
    with pytest.raises(ValueError, match="title"):
        plots.convergence([{}], [], 1e-6)
    with pytest.raises(ValueError, match="title"):
        plots.reliability([], [])
    with pytest.raises(ValueError, match="blocks"):
        plots.covariance(np.eye(5), ["a", "b"], "nats")
