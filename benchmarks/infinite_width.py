"""How fast do wide networks approach the Gaussian process of their limit?

    python -m benchmarks.infinite_width

A network with two hidden layers, four inputs and one output, on 16 points, float64; weights N(0, 2/fan-in), biases
N(0, .5²). First the kernels at random weights: the covariance of the outputs given the features, and the empirical
tangent kernel, compared with `InfiniteWidthKernel`. Then predictions at 16 further points, for targets drawn from the
limit with noise of variance .1: those of repriorisation's T(φ), φ ~ N(0, I), which no chain has corrected; those of the
exact posterior, from the same draws weighted by their evidence; and those of a chain in φ. All are compared with the
limit's exact process. The readout is integrated in closed form everywhere, given the hidden weights, so that the
figures show the hidden layers alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import gpytorch
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter
from torch import Tensor, nn
from torch.func import functional_call

import curvops as co
from benchmarks import study_page
from benchmarks.tables import table
from curvops.plots import style

WEIGHT_STD, BIAS_STD, NOISE = 2**0.5, 0.5, 0.1
INPUTS, POINTS, TEST = 4, 16, 16
WIDTHS = (16, 32, 64, 128, 256, 512, 1024)
KERNELS = ("nngp", "ntk")
GROUPS = 10
"""Of draws, whose figures give a standard error by leaving out one at a time."""
CHAINS, STEPS, THIN = (32, 256), 6000, 4
"""Widths at which a chain is run, its steps, and how many of them lie between draws that count."""
PREDICTED = "gelu"


class Erf(nn.Module):
    """The error function."""

    def forward(self, u: Tensor) -> Tensor:
        """Return erf(u)."""
        return u.erf()


MODULES = {"relu": nn.ReLU, "erf": Erf, "gelu": nn.GELU}

Normal = tuple[Tensor, Tensor]
"""Mean (M,) and covariance (M, M) of predictions."""


def network(activation: str, width: int) -> nn.Sequential:
    """Two hidden layers between four numbers and one."""
    make = MODULES[activation]
    layers = [nn.Linear(INPUTS, width), make(), nn.Linear(width, width), make(), nn.Linear(width, 1)]
    return nn.Sequential(*layers).double()


def limit(activation: str, kind: str) -> co.gp.InfiniteWidthKernel:
    """The kernel at infinite width."""
    variances = torch.tensor([[WEIGHT_STD**2], [BIAS_STD**2]], dtype=torch.float64)
    return co.gp.InfiniteWidthKernel(2, activation, kind, weight_variance=variances[0], bias_variance=variances[1])


@torch.no_grad()
def redraw(model: nn.Module, generator: torch.Generator) -> None:
    """Draw the weights from the prior."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.normal_(0, WEIGHT_STD / layer.in_features**0.5, generator=generator)
            layer.bias.normal_(0, BIAS_STD, generator=generator)


@torch.no_grad()
def feature_kernel(model: nn.Sequential, x: Tensor, theta: Mapping[str, Tensor] | None = None) -> Tensor:
    """The covariance of the outputs over the readout's prior, given the hidden weights: ΨΨᵀ."""
    hidden = model[:-1]
    features = (
        hidden(x) if theta is None else functional_call(hidden, {n: theta[n] for n, _ in hidden.named_parameters()}, x)
    )
    return WEIGHT_STD**2 * features @ features.mT / features.shape[1] + BIAS_STD**2


def tangent_kernel(model: nn.Module, x: Tensor) -> Tensor:
    """The empirical tangent kernel, J A⁻¹Jᵀ under the prior."""
    lin = co.linearize(model, (x, x[:, :1]), co.likelihoods.Gaussian(noise=1.0))
    return co.TangentKernel(lin, co.sampling.ntk_precision(model, WEIGHT_STD, BIAS_STD)).to_dense()


def kernel_errors(activation: str, width: int, draws: int, x: Tensor) -> dict[str, dict[str, float]]:
    """By kind: the root mean square of ‖K̂ − K‖/‖K‖ over draws, with its standard error; ‖mean K̂ − K‖/‖K‖, and what
    of it the draws' spread alone would give."""
    model, generator = network(activation, width), torch.Generator().manual_seed(width)
    kernels: dict[str, list[Tensor]] = {kind: [] for kind in KERNELS}
    for _ in range(draws):
        redraw(model, generator)
        kernels["nngp"].append(feature_kernel(model, x))
        kernels["ntk"].append(tangent_kernel(model, x))
    found = {}
    for kind, each in kernels.items():
        exact = limit(activation, kind)(x).to_dense().detach()
        deviations = (torch.stack(each) - exact) / exact.norm()
        squares, mean = deviations.square().sum((1, 2)), deviations.mean(0)
        rms = squares.mean().sqrt()
        found[kind] = {
            "rms": float(rms),
            "stderr": float(squares.std() / draws**0.5 / (2 * rms)),
            "mean": float(mean.norm()),
            "by chance": float(((deviations - mean).square().sum() / (draws - 1) / draws).sqrt()),
        }
    return found


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """Training inputs and targets, and test inputs; the targets are of the limit of `PREDICTED`."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(POINTS + TEST, INPUTS, dtype=torch.float64, generator=generator)
    K = limit(PREDICTED, "nngp")(x[:POINTS]).to_dense().detach() + NOISE * torch.eye(POINTS, dtype=torch.float64)
    y = torch.linalg.cholesky(K) @ torch.randn(POINTS, dtype=torch.float64, generator=generator)
    return x[:POINTS], y, x[POINTS:]


class Process(gpytorch.models.ExactGP):
    """The limit as a process of gpytorch."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any) -> None:
        super().__init__(x, y, likelihood)
        self.covar_module = limit(PREDICTED, "nngp")

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        """Return the prior at x."""
        return gpytorch.distributions.MultivariateNormal(x.new_zeros(len(x)), self.covar_module(x))


def of_limit(x: Tensor, y: Tensor, new: Tensor) -> Normal:
    """The predictive of the limit's process."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = torch.tensor(NOISE, dtype=torch.float64)
    with torch.no_grad():
        predicted = Process(x, y, likelihood).eval()(new)
        return predicted.mean, predicted.covariance_matrix


def given_features(K: Tensor, y: Tensor) -> Normal:
    """Predictives at the last points of the regression on features of Gram matrices K (k, N + M, N + M)."""
    n = len(y)
    factor = torch.linalg.cholesky(K[:, :n, :n] + NOISE * torch.eye(n, dtype=K.dtype))
    across = torch.cholesky_solve(K[:, :n, n:], factor)
    return (across.mT @ y), K[:, n:, n:] - K[:, n:, :n] @ across


def log_evidence(K: Tensor, y: Tensor) -> Tensor:
    """log N(y; 0, K + noise), (k,), less its constant."""
    n = len(y)
    factor = torch.linalg.cholesky(K[:, :n, :n] + NOISE * torch.eye(n, dtype=K.dtype))
    solved = torch.cholesky_solve(y.expand(len(K), n).unsqueeze(2), factor).squeeze(2)
    return -0.5 * solved @ y - factor.diagonal(dim1=1, dim2=2).log().sum(1)


def mixture(each: Normal, weights: Tensor) -> Normal:
    """Mean and covariance of a mixture with weights (k,), which are normalised here."""
    w = weights / weights.sum()
    mean = w @ each[0]
    off = each[0] - mean
    return mean, torch.tensordot(w, each[1], 1) + (off.mT * w) @ off


def distances(found: Normal, exact: Normal) -> Tensor:
    """The root mean square of the means' differences in standard deviations, and ‖Σ − Σ'‖/‖Σ'‖."""
    mean = ((found[0] - exact[0]).square() / exact[1].diagonal()).mean().sqrt()
    return torch.stack([mean, (found[1] - exact[1]).norm() / exact[1].norm()])


def with_error(each: Normal, weights: Tensor, exact: Normal) -> dict[str, Any]:
    """The distances of a mixture, with the jackknife's standard errors over `GROUPS` runs of draws."""
    groups = torch.arange(len(weights)) * GROUPS // len(weights)
    value = distances(mixture(each, weights), exact)
    without = torch.stack([distances(mixture(each, weights * (groups != g)), exact) for g in range(GROUPS)])
    error = ((GROUPS - 1) * (without - without.mean(0)).square().mean(0)).sqrt()
    effective = float(weights.sum().square() / weights.square().sum())
    return {"distance": value, "stderr": error, "effective": effective}


def predictions(width: int, draws: int) -> dict[str, dict[str, Any]]:
    """By way to predict, the distances from the limit."""
    x, y, new = problem()
    model, generator = network(PREDICTED, width), torch.Generator().manual_seed(width)
    prior = co.sampling.ntk_precision(model, WEIGHT_STD, BIAS_STD)
    rep = co.sampling.reprior(model, (x, y.unsqueeze(1)), NOISE, prior_precision=prior)
    exact, points = of_limit(x, y, new), torch.cat([x, new])

    def kernels(phis: Iterable[Mapping[str, Tensor]]) -> Tensor:
        return torch.stack([feature_kernel(model, points, rep.map(phi)) for phi in phis])

    K = kernels({name: block[0] for name, block in rep.normal(1, generator).items()} for _ in range(draws))
    each, log_weights = given_features(K, y), log_evidence(K, y)
    found = {
        "T of the prior": with_error(each, torch.ones(draws, dtype=K.dtype), exact),
        "posterior": with_error(each, (log_weights - log_weights.max()).exp(), exact),
    }
    if width in CHAINS:
        sampler = co.sampling.lmc(rep, 0.2, refreshment=0.4, sigma=POINTS**-0.5)
        start = {name: block[0] for name, block in rep.normal(1, generator).items()}
        options: dict[str, Any] = {"warmup": STEPS // 3, "target_acceptance": 0.9, "generator": generator}
        chain = co.sampling.run(sampler, start, steps=STEPS, **options)
        K = kernels({name: block[0, k] for name, block in chain.params.items()} for k in range(0, STEPS, THIN))
        found["chain"] = with_error(given_features(K, y), torch.ones(len(K), dtype=K.dtype), exact)
        found["chain"]["acceptance"] = float(chain.acceptance.mean())
    return found


def study(draws: int) -> dict[str, Any]:
    """Kernels and predictions at all widths."""
    x, _, _ = problem()
    kernels = {name: {str(w): kernel_errors(name, w, _fewer(draws, w), x) for w in WIDTHS} for name in MODULES}
    return {"kernels": kernels, "predictions": {str(w): predictions(w, 6 * draws) for w in WIDTHS}}


def _fewer(draws: int, width: int) -> int:
    """So many draws up to a width of 128, fewer for wider networks."""
    return max(GROUPS, draws * 128 // max(width, 128))


def slope(widths: Iterable[float], errors: Iterable[float]) -> float:
    """The exponent of the width in a least-squares fit of the errors' logarithms."""
    u = torch.tensor([math.log(w) for w in widths], dtype=torch.float64)
    v = torch.tensor([math.log(e) for e in errors], dtype=torch.float64)
    return float(((u - u.mean()) * (v - v.mean())).sum() / (u - u.mean()).square().sum())


def kernels_table(found: Mapping[str, Any]) -> str:
    """For each kernel the distances, and the distances of the means: a row a width, a column an activation."""
    kernels = found["kernels"]
    parts = ["Root mean square over draws of the weights of ‖K̂ − K‖/‖K‖, ± standard error."]
    for k in KERNELS:
        rows = [
            [_count(w), *[_cell(of[w][k]["rms"], of[w][k]["stderr"]) for of in kernels.values()]] for w in _widths()
        ]
        fitted = [slope(WIDTHS, [of[w][k]["rms"] for w in _widths()]) for of in kernels.values()]
        rows.append(["exponent", *[f"{value:.2f}" for value in fitted]])
        parts.append(table([f"{k.upper()}, width", *kernels], rows))
    parts.append("The mean over draws, ‖mean K̂ − K‖/‖K‖, and in brackets what it would be if the mean were K.")
    for k in KERNELS:
        cells = [[(of[w][k]["mean"], of[w][k]["by chance"]) for of in kernels.values()] for w in _widths(128)]
        rows = [[_count(w), *[f"{a:.4f} ({b:.4f})" for a, b in row]] for w, row in zip(_widths(128), cells)]
        parts.append(table([f"{k.upper()}, width", *kernels], rows))
    return "\n\n".join(parts)


def predictions_table(found: Mapping[str, Any]) -> str:
    """The distances of the means and of the covariances, a row a width, a column a way to predict."""
    ways = {"T of the prior": "T(φ), φ ~ N(0, I)", "posterior": "posterior", "chain": "chain"}
    parts = []
    for which, what in enumerate(("mean", "covariance")):
        rows = []
        for w in _widths():
            entries = [found["predictions"][w].get(way) for way in ways]
            cells = [_cell(float(e["distance"][which]), float(e["stderr"][which])) if e else "" for e in entries]
            rows.append([_count(w), *cells, f"{found['predictions'][w]['posterior']['effective']:,.0f}"])
        parts.append(f"Distance of the {what}:\n\n{table(['width', *ways.values(), 'effective draws'], rows)}")
    return "\n\n".join(parts)


def _widths(most: int = max(WIDTHS)) -> list[str]:
    """The widths as the raw results name them."""
    return [str(w) for w in WIDTHS if w <= most]


def _count(width: str) -> str:
    return f"{int(width):,}"


def _cell(value: float, error: float) -> str:
    digits = max(2, 1 - math.floor(math.log10(error))) if error > 0 else 3
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def figure(found: Mapping[str, Any]) -> Figure:
    """Left: kernels at random weights; right: predictions of the reprior and the posterior."""
    drawn = style.blank(9.2, 3.8)
    left, right = drawn.subplots(1, 2)
    columns = {f"{name}, {kind.upper()}": (name, kind) for name in found["kernels"] for kind in KERNELS}
    for label, look in style.looks(columns).items():
        name, kind = columns[label]
        errors = [found["kernels"][name][str(w)][kind]["rms"] for w in WIDTHS]
        left.plot(WIDTHS, errors, label=label, linewidth=1.6, markersize=5, **look._asdict())
    ways = [(way, which) for way in ("T of the prior", "posterior") for which in (0, 1)]
    labels = {f"{'mean' if which == 0 else 'covariance'}, {_short(way)}": (way, which) for way, which in ways}
    for label, look in style.looks(labels).items():
        way, which = labels[label]
        entries = [found["predictions"][str(w)][way] for w in WIDTHS]
        values, errors = ([float(e[key][which]) for e in entries] for key in ("distance", "stderr"))
        right.errorbar(WIDTHS, values, errors, label=label, linewidth=1.6, markersize=5, capsize=2, **look._asdict())
    for axes, power, start, what in (
        (left, -0.5, 1.0, "‖K̂ − K‖ / ‖K‖"),
        (right, -1.0, 0.5, "distance from the limit"),
    ):
        top = max(line.get_ydata()[0] for line in axes.get_lines())
        axes.plot(
            WIDTHS,
            [start * top * (w / WIDTHS[0]) ** power for w in WIDTHS],
            label=f"width^{power:g}",
            **style.REFERENCE,
        )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(WIDTHS, [f"{w:,}" for w in WIDTHS])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.minorticks_off()
        style.dress(axes, "width of the hidden layers", what)
        axes.legend(fontsize=style.SMALL - 2, frameon=False)
    return drawn


def _short(way: str) -> str:
    return "T(φ)" if way == "T of the prior" else way


STUDY = study_page.Study(
    "infinite_width",
    __doc__,
    study,
    {"kernels": kernels_table, "predictions": predictions_table},
    "docs/infinite_width.md",
    figures={"infinite_width": figure},
    options={"draws": (500, "of the weights for kernels, fewer beyond width 128; six times as many for predictions")},
)

if __name__ == "__main__":
    STUDY.run()
