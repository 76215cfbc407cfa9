"""The picture at the top of the README:   python -m benchmarks.front_picture docs/figures/front.png

On the left, a small regression network: the error bars of four posteriors open in a gap between the data and beyond
them. On the right, the spectrum of a classifier's GGN with its band over the probes. It needs matplotlib.
"""

from __future__ import annotations

import sys

import torch
from matplotlib.axes import Axes
from torch import nn

import curvops as co
from curvops.plots import style

NOISE, PRECISION = 0.04, 0.5
CURVATURES = {"full GGN": co.GGN, "KFAC": co.KFAC, "diagonal": co.DiagonalGGN}
SPAN = 7.0


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 80 inputs with a gap between them, and their targets."""
    x = torch.cat([torch.linspace(-4, -1, 40), torch.linspace(1.5, 4, 40)]).unsqueeze(1).double()
    noise = torch.randn(80, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, x.sin() + NOISE**0.5 * noise


def trained() -> co.operators.Linearization:
    """Linearise a network of 1,153 weights at a mode."""
    torch.manual_seed(0)
    x, y = data()
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2000, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        squares = torch.stack([p.square().sum() for p in model.parameters()]).sum()
        value = (model(x) - y).square().sum() / (2 * NOISE) + PRECISION * squares / 2
        value.backward()
        return value

    optimizer.step(loss)
    return co.linearize(model, (x, y), co.likelihoods.Gaussian(NOISE))


def doubt(axes: Axes, lin: co.operators.Linearization) -> None:
    """Draw the mean, and two standard deviations of the function under each posterior."""
    at = torch.linspace(-SPAN, SPAN, 281).unsqueeze(1).double()
    posteriors = {name: co.laplace(lin, curvature, PRECISION) for name, curvature in CURVATURES.items()}
    for (name, post), look in zip(posteriors.items(), style.looks(posteriors).values()):
        predicted = post.predict(at)
        mean, spread = predicted.mean.squeeze(1), 2 * predicted.stddev.squeeze(1)
        if name == "full GGN":
            axes.fill_between(at[:, 0], mean - spread, mean + spread, color=look.color, alpha=style.BAND, linewidth=0)
            axes.plot(at[:, 0], mean, color=style.INK, linewidth=1.8, label="mean")
        for side in (-1, 1):
            label = f"±2 std, {name}" if side > 0 else None
            axes.plot(at[:, 0], mean + side * spread, linewidth=1.6, label=label, **look.line)
    axes.plot(
        *(part[:, 0] for part in data()), linestyle="none", marker="o", markersize=4, color=style.INK, label="data"
    )
    axes.set(xlim=(-SPAN, SPAN), ylim=(-3.5, 4.8))
    style.dress(axes, "input", "target", "Doubt opens in the gap and beyond the data")
    axes.legend(fontsize=style.SMALL, loc="upper left", ncols=2, framealpha=0.9)


def classifier() -> co.operators.Linearization:
    """Linearise a classifier of 3,107 weights on 300 points of three classes, trained to small losses."""
    torch.manual_seed(0)
    x = 2 * torch.randn(300, 6).double()
    y = (x[:, 0] > x[:, 1].sin()).long() + (x[:, 1] > x[:, 2])
    model = nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 3)).double()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=1e-3)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return co.linearize(model, (x, y), "classification")


def spectrum(axes: Axes, lin: co.operators.Linearization) -> None:
    """Draw the density of the GGN's eigenvalues with its band, and the eight largest eigenvalues."""
    generator = torch.Generator().manual_seed(0)
    G = co.GGN(lin)
    found = G.spectral_density(probes=10, steps=80, scale="log", bandwidth=0.5, generator=generator)
    top = G.eigsh(8, generator=generator).values
    blue, orange = style.COLOURS[:2]
    axes.fill_between(
        found.grid, found.lower, found.upper, color=blue, alpha=style.BAND, linewidth=0, label="95 % band"
    )
    axes.plot(found.grid, found.density, color=blue, linewidth=1.8, label="density")
    height = axes.get_xaxis_transform()
    marks = {"linestyle": "none", "marker": "|", "markersize": 15, "markeredgewidth": 1.8, "color": orange}
    axes.plot(top, torch.full((8,), 0.05), transform=height, label="8 largest eigenvalues", **marks)
    axes.set(xscale="log", xlim=(4e-3, 4e3), yscale="log", ylim=(1e-4, 0.1))
    style.dress(axes, "eigenvalue λ of the GGN", "density per unit of log λ", "A spectrum, with its error")
    axes.legend(fontsize=style.SMALL, loc="upper right", framealpha=0.9)


def main(path: str) -> None:
    """Draw the picture to a file."""
    figure = style.blank(11.5, 4.4)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    doubt(left, trained())
    spectrum(right, classifier())
    style.save(figure, path)


if __name__ == "__main__":
    main(sys.argv[1])
