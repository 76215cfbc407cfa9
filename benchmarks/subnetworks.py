"""Which weights matter? Subnetwork inference compared with cheaper posteriors over all weights (Daxberger et al. 2021).

    python -m benchmarks.subnetworks

Regression in one dimension with a gap, and the gap splits of scikit-learn's diabetes data (Foong et al. 2019): for each
feature the middle third of the points is the test set. All posteriors have one prior precision and one noise, chosen on
a validation set.
"""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from linear_operator.utils.warnings import NumericalWarning
from matplotlib.figure import Figure
from torch import Tensor, nn

import curvops as co
from benchmarks import study_page
from benchmarks.layers import linear_layers
from benchmarks.tables import table
from curvops.plots import style

SHARES = (0.01, 0.03, 0.1, 0.5, 1.0)
SCORES = ("variance", "swag", "marginal", "predictive", "magnitude", "obd", "random")
BASELINES = ("MAP", "diagonal", "last layer", "KFAC", "full GGN")
PRIORS = (0.1, 1.0, 10.0)
NOISES = {"one dimension": (0.0025, 0.01, 0.04), "diabetes": (0.25, 0.5, 1.0)}
EPOCHS = 30
"""Snapshots of SGD for "swag": one an epoch, rate 0.01, momentum 0.9, from the mode."""

Found = dict[str, dict[str, Any]]
"""Measures of each `key(score, share)` and of each baseline, one number a split."""


def key(score: str, share: float) -> str:
    """The name of a share of the weights picked by a score."""
    return f"{score}, {100 * share:g} %"


@dataclass(frozen=True, eq=False)
class Split:
    """Training points outside a gap, and test points within it."""

    x: Tensor
    y: Tensor
    x_gap: Tensor
    y_gap: Tensor


def one_dimension(count: int) -> Iterator[Split]:
    """cos(4 x + 0.8) + noise of 0.1 on two intervals, the gap between them."""
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        x = torch.rand(100, 1, generator=generator, dtype=torch.float64)
        x = torch.where(torch.arange(100).unsqueeze(1) < 50, -1 + 0.3 * x, 0.5 + 0.5 * x)
        x_gap = torch.linspace(-0.7, 0.5, 60, dtype=torch.float64).unsqueeze(1)
        noise = 0.1 * torch.randn(160, 1, generator=generator, dtype=torch.float64)
        y, y_gap = ((4 * z + 0.8).cos() for z in (x, x_gap))
        yield Split(2 * x, y + noise[:100], 2 * x_gap, y_gap + noise[100:])


def diabetes(count: int) -> Iterator[Split]:
    """For each feature but the binary one, its middle third; standardised by the training part."""
    x, y = import_module("sklearn.datasets").load_diabetes(return_X_y=True)
    x, y = torch.as_tensor(x), torch.as_tensor(y).unsqueeze(1)
    features = [i for i in range(x.shape[1]) if len(x[:, i].unique()) > 2]
    for feature in features[:count]:
        order = x[:, feature].argsort(stable=True)
        gap = order[len(x) // 3 : -(len(x) // 3)]
        train = torch.cat([order[: len(x) // 3], order[-(len(x) // 3) :]])
        (m, s), (m_y, s_y) = ((z[train].mean(0), z[train].std(0)) for z in (x, y))
        parts = ((z - centre) / scale for z, centre, scale in ((x, m, s), (y, m_y, s_y)))
        xs, ys = parts
        yield Split(xs[train], ys[train], xs[gap], ys[gap])


DATA = {"one dimension": (one_dimension, (1, 30, 30, 1)), "diabetes": (diabetes, (10, 50, 1))}
SPLITS = {"one dimension": 5, "diabetes": 9}
OVERLAP = {"one dimension": 0.0, "diabetes": 0.5}
"""Test points of a split over its training points, where splits are of the same points."""


def fit(widths: tuple[int, ...], x: Tensor, y: Tensor, prior: float, noise: float, seed: int) -> nn.Sequential:
    """A ReLU network near a mode of its posterior, by Adam and then L-BFGS."""
    torch.manual_seed(seed)
    network = linear_layers(*widths, activation=nn.ReLU).double()

    def loss() -> Tensor:
        optimizer.zero_grad()
        squares = torch.stack([p.square().sum() for p in network.parameters()]).sum()
        value = (network(x) - y).square().sum() / (2 * noise) + 0.5 * prior * squares
        value.backward()
        return value.detach()

    optimizer: torch.optim.Optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(300):
        loss()
        optimizer.step()
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=300, line_search_fn="strong_wolfe")
    optimizer.step(loss)
    return network


def snapshots(network: nn.Sequential, split: Split, prior: float, noise: float) -> list[Tensor]:
    """Weights after each epoch of SGD from the mode, weight decay = prior precision / N on a mean loss."""
    N = len(split.x)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=prior * noise / N)
    before, found = [p.detach().clone() for p in network.parameters()], []
    for epoch in range(EPOCHS):
        order = torch.randperm(N, generator=torch.Generator().manual_seed(epoch))
        for part in order.split(20):
            optimizer.zero_grad()
            (0.5 * (network(split.x[part]) - split.y[part]).square().mean()).backward()
            optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in network.parameters()]))
    with torch.no_grad():
        for p, value in zip(network.parameters(), before):
            p.copy_(value)
    return found


def choose(name: str, split: Split, seed: int) -> tuple[float, float]:
    """Prior precision and noise of the best log-likelihood of the full posterior on a fifth of the training points."""
    order = torch.randperm(len(split.x), generator=torch.Generator().manual_seed(seed))
    held, kept = order[: len(order) // 5], order[len(order) // 5 :]

    def score(pair: tuple[float, float]) -> float:
        prior, noise = pair
        network = fit(DATA[name][1], split.x[kept], split.y[kept], prior, noise, seed)
        lin = co.linearize(network, (split.x[kept], split.y[kept]), co.likelihoods.Gaussian(noise=noise))
        post = co.laplace(lin, whole(lin), prior, check_mode=False)
        return float(post.log_likelihood(split.x[held], split.y[held]).value.mean())

    return max(((prior, noise) for prior in PRIORS for noise in NOISES[name]), key=score)


def whole(lin: co.operators.Linearization) -> co.Subnetwork:
    """The full GGN as a matrix: small networks are solved by Cholesky."""
    return co.Subnetwork(co.GGN(lin), torch.arange(lin.num_parameters))


def measure(name: str, split: Split, seed: int, found: Found) -> None:
    """Every posterior on one split."""
    prior, noise = choose(name, split, seed)
    network = fit(DATA[name][1], split.x, split.y, prior, noise, seed)
    data, likelihood = (split.x, split.y), co.likelihoods.Gaussian(noise=noise)
    lin = co.linearize(network, data, likelihood)
    G, D = co.GGN(lin), lin.num_parameters
    full = co.laplace(lin, whole(lin), prior, check_mode=False)
    reference = full.predict(split.x_gap).stddev

    def note(of: str, post: co.posterior.Laplace | None, **further: float) -> None:
        measures = found[of]
        if post is None:
            residuals = lin.predict(split.x_gap) - split.y_gap
            variance, ratio = torch.full_like(residuals, noise), 0.0
            nll = 0.5 * (residuals.square() / variance + (2 * torch.pi * variance).log())
        else:
            nll = -post.log_likelihood(split.x_gap, split.y_gap).value
            ratio = float((post.predict(split.x_gap).stddev / reference).mean())
        for what, value in {"sd": ratio, "nll": float(nll.mean()), **further}.items():
            measures[what].append(value)

    note("MAP", None)
    note("diagonal", co.laplace(lin, co.DiagonalGGN, prior, check_mode=False))
    last = co.linearize(network, data, likelihood, parameters="last_layer")
    note("last layer", co.laplace(last, whole(last), prior, check_mode=False))
    note("KFAC", co.laplace(lin, co.KFAC, prior, check_mode=False))
    note("full GGN", full)
    size = float(torch.linalg.inv(full.precision.to_dense()).trace())
    curvature = G.diagonal()
    taken, generator = snapshots(network, split, prior, noise), torch.Generator().manual_seed(seed)
    for score in SCORES:
        for share in SHARES:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", co.errors.InertWeightsWarning)
                chosen = co.select(
                    lin, round(share * D), score, prior_precision=prior, snapshots=taken, generator=generator
                )
            part = co.linearize(network, data, likelihood, parameters=chosen)
            post = co.laplace(part, co.Subnetwork(G, chosen), prior, check_mode=False)
            distance = 0.0 if share == 1.0 else float(co.wasserstein(full, chosen).value) / size
            inert = float((curvature[chosen] <= torch.finfo(curvature.dtype).eps * curvature.max()).double().mean())
            note(key(score, share), post, distance=distance, inert=inert)


def study(splits: int) -> dict[str, Found]:
    """All splits of both data sets."""
    warnings.simplefilter("ignore", NumericalWarning)  # gpytorch's, of variances below 1e-10: of inert weights
    results: dict[str, Found] = {}
    for name in DATA:
        found = results[name] = defaultdict(lambda: defaultdict(list))
        for seed, split in enumerate(DATA[name][0](min(splits, SPLITS[name]))):
            start = time.perf_counter()
            measure(name, split, seed, found)
            print(f"{name}, split {seed}: {time.perf_counter() - start:.0f} s", flush=True)
    return results


def standard_error(name: str, values: Tensor) -> float:
    """Of the mean over splits; where they overlap, with the variance that they share.

    The splits of one dimension are data drawn anew. Those of the diabetes data share their points: the variance of a
    mean over J of them is about (1/J + test points / training points) times that of one (Nadeau & Bengio 2003).
    """
    shared = OVERLAP[name]
    return float(values.std()) * (1 / len(values) + shared) ** 0.5


def results_tables(name: str, found: Found) -> str:
    """One table a measure: scores by shares, and the posteriors over all weights."""
    count = len(found["MAP"]["nll"])
    shares = [f"{100 * share:g} %" for share in SHARES]
    texts = {
        "sd": "Standard deviation in the gap, as a share of the full posterior's",
        "nll": "Negative log-likelihood of the points in the gap, nats a point",
        "distance": "W₂² to the full posterior, as a share of tr P⁻¹ (that of inferring no weight)",
    }
    said = f"Mean ± standard error over {count} splits"
    if OVERLAP[name]:
        said += ", which share their points: the error is Nadeau & Bengio's (2003), not that of independent splits"
    parts = [f"### {name.capitalize()}", f"{said}."]
    for what, text in texts.items():
        rows = [[s, *(_cell(name, found, key(s, share), what) for share in SHARES)] for s in SCORES]
        parts += [f"{text}:", table(["score", *shares], rows)]
        if what != "distance":
            rows = [[_cell(name, found, b, what) for b in BASELINES]]
            parts += [table(list(BASELINES), rows)]
    inert = [f"{100 * float(found[key('variance', share)]['inert'].mean()):.0f} %" for share in SHARES]
    parts += [
        "Share of weights without curvature among those that *variance* picks: "
        + ", ".join(f"{own} of the first {share}" for own, share in zip(inert, shares))
        + "."
    ]
    return "\n\n".join(parts)


def _cell(name: str, found: Found, of: str, what: str) -> str:
    values = found[of][what]
    return f"{float(values.mean()):.2f} ± {standard_error(name, values):.2f}"


def curves(results: dict[str, Found]) -> Figure:
    """Uncertainty in the gap and its worth, against the share of weights inferred."""
    figure = style.blank(9.6, 6.4)
    panels = figure.subplots(2, len(results), sharex=True, squeeze=False)
    looks = style.looks(SCORES[:-1])
    looks["random"] = style.Look(style.GREY, ":", "x")
    for column, (name, found) in enumerate(results.items()):
        for row, (what, label) in enumerate(
            (("sd", "sd in the gap / full posterior's"), ("nll", "NLL in the gap (nats a point)"))
        ):
            axes = panels[row, column]
            for score, look in looks.items():
                means = [float(found[key(score, share)][what].mean()) for share in SHARES]
                axes.plot(
                    [100 * s for s in SHARES],
                    means,
                    label=score,
                    color=look.color,
                    linestyle=look.linestyle,
                    marker=look.marker,
                    markersize=5,
                    linewidth=1.5,
                )
            for baseline, dash in (("diagonal", "--"), ("last layer", "-."), ("KFAC", ":"), ("MAP", (0, (6, 3)))):
                level = float(found[baseline][what].mean())
                if baseline != "MAP" or what == "nll":
                    axes.axhline(level, color=style.INK, linestyle=dash, linewidth=1.0, label=baseline, zorder=0)
            axes.set_xscale("log")
            axes.set_xticks([100 * s for s in SHARES], [f"{100 * s:g}" for s in SHARES])
            axes.minorticks_off()
            style.dress(
                axes, "weights inferred (%)" if row else "", label if not column else "", name if not row else ""
            )
    handles, labels = panels[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=style.SMALL, frameon=False, loc="outside lower center", ncols=6)
    return figure


STUDY = study_page.Study(
    "subnetworks",
    __doc__,
    study,
    {"subnetworks": lambda results: "\n\n".join(results_tables(name, found) for name, found in results.items())},
    "docs/subnetworks.md",
    figures={"subnetworks": curves},
    options={"splits": (9, "no more splits of a data set")},
)

if __name__ == "__main__":
    STUDY.run()
