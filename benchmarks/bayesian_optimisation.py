"""Bayesian optimisation with networks as surrogates:     python -m benchmarks.bayesian_optimisation

Branin (2 inputs), Hartmann-6, and draws of a random network with 30 inputs are maximised with two evaluations at a
time. In each round every surrogate is fitted to all targets so far, starting from its state in the previous round, and
the next points are those with the largest `qLogExpectedImprovement`. After an interruption the same command continues
with the next seed.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise, product
from typing import Any

import torch
from botorch.acquisition.logei import qLogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.ensemble import EnsembleModel
from botorch.models.model import Model
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.sampling.index_sampler import IndexSampler
from botorch.test_functions import Branin, Hartmann
from gpytorch.mlls import ExactMarginalLogLikelihood
from matplotlib.figure import Figure
from torch import Tensor, nn

import curvops as co
from benchmarks import study_page
from benchmarks.layers import linear_layers
from benchmarks.tables import table
from curvops.plots import style

DOUBLE = torch.float64
TOGETHER = 2
"""Evaluations a round."""
MEMBERS, WIDE = 5, 50
"""Networks of the ensemble; units of each hidden layer where few weights have a posterior, or none."""
STEPS = 10
"""Of the evidence's maximisation in a round: the next one goes on from there."""
MOST_NOISE = 0.01
"""Of the targets' variance. The functions have no noise; where the evidence finds more, the noise is left as it was."""
PICTURED = "Branin"
GRID = 41
"""Points a side of the figure's grid."""

Objective = Callable[[Tensor], Tensor]
"""Of points (n, d) in the unit cube the values (n,), to be maximised."""


@dataclass(frozen=True)
class Problem:
    """A function of the unit cube, the same for all methods of a seed."""

    inputs: int
    start: int
    """Points of a scrambled Sobol sequence before the first round."""
    rounds: int
    width: int
    """Units of each of the two hidden layers where all weights have a posterior: about 1,000 of them."""
    make: Callable[[int], tuple[Objective, float]]
    """Of a seed the function and its largest value."""


def synthetic(name: type[Branin] | type[Hartmann]) -> Callable[[int], tuple[Objective, float]]:
    """A function of BoTorch's, moved to the unit cube."""

    def make(_: int) -> tuple[Objective, float]:
        function = name(negate=True).double()
        low, high = function.bounds
        return lambda x: function(low + (high - low) * x), float(function.optimal_value)

    return make


@cache
def network_draw(seed: int) -> tuple[Objective, float]:
    """A random tanh network of two layers with 50 units and 30 inputs, in units of its deviation over the cube."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=DOUBLE)

    sizes = (30, 50, 50, 1)
    layers = [(2 * normal(i, o) / math.sqrt(i), normal(o)) for i, o in pairwise(sizes)]

    def raw(x: Tensor) -> Tensor:
        h = 2 * x - 1
        for i, (weight, bias) in enumerate(layers):
            h = (h.tanh() if i else h) @ weight + bias
        return h.squeeze(-1)

    some = torch.rand(2000, 30, generator=generator, dtype=DOUBLE)
    deviation = float(raw(some).std())
    x = some[raw(some).topk(300).indices].requires_grad_()  # the maximum, by ascent from the best of them
    optimizer = torch.optim.Adam([x], 0.02)
    for _ in range(300):
        optimizer.zero_grad()
        (-raw(x).sum()).backward()
        optimizer.step()
        with torch.no_grad():
            x.clamp_(0, 1)
    return lambda x: raw(x) / deviation, float(raw(x.detach()).max()) / deviation


PROBLEMS = {
    "Branin": Problem(2, 6, 10, 24, synthetic(Branin)),
    "Hartmann-6": Problem(6, 10, 15, 24, synthetic(Hartmann)),
    "network, 30 inputs": Problem(30, 20, 12, 13, network_draw),
}


class HalfCircles(nn.Module):
    """Each input of the unit cube as a point of a half circle, so that all points have one norm.

    A linearised network doubts its outputs the more, the larger its inputs are: with the cube's own coordinates two
    thirds of the points chosen on Hartmann-6 lay on its faces, and the best was found no sooner than at random.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., 2 d)."""
        return torch.cat([(math.pi * x).cos(), (math.pi * x).sin()], -1)


class Surrogate:
    """A model that is fitted again and again, each time from where it was."""

    sampler: Any = None

    def __init__(self, problem: Problem, seed: int) -> None:
        self.problem, self.seed = problem, seed
        torch.manual_seed(seed)

    def fit(self, x: Tensor, y: Tensor) -> Model:
        """Return a model of the standardised targets y (n, 1)."""
        raise NotImplementedError


class LinearisedNetwork(Surrogate):
    """A network at a mode, its full-GGN posterior, layers' prior precisions and noise of largest evidence."""

    width: int | None = None

    def __init__(self, problem: Problem, seed: int) -> None:
        super().__init__(problem, seed)
        width = self.width or problem.width
        self.network = nn.Sequential(HalfCircles(), *linear_layers(2 * problem.inputs, width, width, 1)).double()
        self.precisions, self.noise, self.first = [1.0] * 3, 1e-3, True

    def fit(self, x: Tensor, y: Tensor) -> Model:
        """Alternate training and tuning, more often in the first round."""
        for _ in range(3 if self.first else 1):
            self._train(x, y)
            post = self._tuned(x, y)
        self.first = False
        return co.gp.LaplaceModel(post)

    def _train(self, x: Tensor, y: Tensor) -> None:
        layers = [list(layer.parameters()) for layer in self.network if isinstance(layer, nn.Linear)]
        optimizer = torch.optim.LBFGS(self.network.parameters(), max_iter=100, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            squares = [a * sum(p.square().sum() for p in layer) for a, layer in zip(self.precisions, layers)]
            value = (self.network(x) - y).square().sum() / (2 * self.noise) + sum(squares) / 2
            value.backward()
            return value.detach()

        optimizer.step(loss)

    def _tuned(self, x: Tensor, y: Tensor) -> co.posterior.Laplace:
        lin = self._linearized((x, y), co.likelihoods.Gaussian(torch.tensor(self.noise, dtype=DOUBLE)))
        names = sorted({name.split(".")[0] for name in lin.unflatten(lin.theta)})
        start = {f"{name}.*": a for name, a in zip(names, self.precisions[-len(names) :])}
        post = co.laplace(lin, co.GGN, start, check_mode=False)
        best = co.evidence.maximize(post, over=("layers", "noise"), steps=STEPS)
        if best.observation_noise > MOST_NOISE:
            best = co.evidence.maximize(post, over="layers", steps=STEPS)
        found = lin.unflatten(best.prior_precision.expand_as(lin.theta))
        self.precisions[-len(names) :] = [float(found[f"{name}.bias"][0]) for name in names]
        self.noise = best.observation_noise
        return best

    def _linearized(
        self, data: tuple[Tensor, Tensor], likelihood: co.likelihoods.Gaussian
    ) -> co.operators.Linearization:
        return co.linearize(self.network, data, likelihood)


class LinearisedLastLayer(LinearisedNetwork):
    """The same of a wider network with the weights of the last layer alone (Snoek et al. 2015); others' prior is 1."""

    width = WIDE

    def _linearized(
        self, data: tuple[Tensor, Tensor], likelihood: co.likelihoods.Gaussian
    ) -> co.operators.Linearization:
        return co.linearize(self.network, data, likelihood, parameters="last_layer")


class GaussianProcess(Surrogate):
    """BoTorch's `SingleTaskGP` as it comes."""

    def fit(self, x: Tensor, y: Tensor) -> Model:
        """By the marginal likelihood."""
        model = SingleTaskGP(x, y)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        return model


class Ensemble(EnsembleModel):
    """Networks of one shape with weights of their own, all in one pass."""

    _num_outputs = 1

    def __init__(self, widths: tuple[int, ...], members: int) -> None:
        super().__init__()
        networks = [linear_layers(*widths).double() for _ in range(members)]
        pairs = [[p.detach() for p in network.parameters()] for network in networks]
        self.layers = nn.ParameterList([torch.stack(parts) for parts in zip(*pairs)])

    def forward(self, X: Tensor) -> Tensor:
        """Return (..., members, n, 1)."""
        h, pairs = HalfCircles()(X).unsqueeze(-3), list(zip(self.layers[::2], self.layers[1::2]))
        for i, (weight, bias) in enumerate(pairs):
            h = (h.tanh() if i else h) @ weight.mT + bias.unsqueeze(-2)
        return h


class DeepEnsemble(Surrogate):
    """Members with the prior N(0, I) and the noise 0.01, by Adam."""

    def __init__(self, problem: Problem, seed: int) -> None:
        super().__init__(problem, seed)
        self.model = Ensemble((2 * problem.inputs, WIDE, WIDE, 1), MEMBERS)
        self.sampler, self.first = IndexSampler(torch.Size([MEMBERS]), seed=seed), True

    def fit(self, x: Tensor, y: Tensor) -> Model:
        """Many steps in the first round, fewer in those after it."""
        parameters = list(self.model.layers)
        optimizer = torch.optim.Adam(parameters, 1e-2)
        for _ in range(1000 if self.first else 200):
            optimizer.zero_grad()
            penalty = torch.stack([p.square().sum() for p in parameters]).sum() / 2
            ((self.model.forward(x) - y).square().sum() / (2 * 0.01) + penalty).backward()
            optimizer.step()
        self.first = False
        return self.model


METHODS: dict[str, type[Surrogate] | None] = {
    "linearised, all weights": LinearisedNetwork,
    "linearised, last layer": LinearisedLastLayer,
    "SingleTaskGP": GaussianProcess,
    "deep ensemble": DeepEnsemble,
    "random search": None,
}


def run(problem: Problem, method: str, seed: int) -> tuple[list[float], Tensor, Tensor, Surrogate | None]:
    """The simple regret at the start and after each round, all points and values in order, and the surrogate."""
    function, best = problem.make(seed)
    draw = torch.quasirandom.SobolEngine(problem.inputs, scramble=True, seed=seed).draw(problem.start, dtype=DOUBLE)
    generator, kind = torch.Generator().manual_seed(seed), METHODS[method]
    surrogate = None if kind is None else kind(problem, seed)
    x, y = draw, function(draw)
    regret = [best - float(y.max())]
    cube = torch.stack([torch.zeros(problem.inputs, dtype=DOUBLE), torch.ones(problem.inputs, dtype=DOUBLE)])
    for round_ in range(problem.rounds):
        if surrogate is None:
            new = torch.rand(TOGETHER, problem.inputs, generator=generator, dtype=DOUBLE)
        else:
            torch.manual_seed(1000 * seed + round_)
            scaled = ((y - y.mean()) / y.std()).unsqueeze(1)
            model = surrogate.fit(x, scaled)
            sampler = surrogate.sampler or SobolQMCNormalSampler(torch.Size([64]), seed=round_)
            acquisition = qLogExpectedImprovement(model, scaled.max(), sampler=sampler)
            options = {"maxiter": 30}
            new, _ = optimize_acqf(acquisition, cube, TOGETHER, num_restarts=3, raw_samples=32, options=options)
        x, y = torch.cat([x, new]), torch.cat([y, function(new)])
        regret.append(best - float(y.max()))
    return regret, x, y, surrogate


def cell(name: str, method: str, seed: int) -> dict[str, Any]:
    """Regrets and seconds of one run; of the first method on two inputs, with the first seed, what the figure shows."""
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", co.evidence.MaxStepsWarning)
        warnings.simplefilter("ignore", RuntimeWarning)  # of L-BFGS-B's last line search
        regret, x, y, surrogate = run(PROBLEMS[name], method, seed)
    found: dict[str, Any] = {"regret": regret, "seconds": time.process_time() - start}
    print(seed, name, method, [round(value, 3) for value in regret], flush=True)
    if (name, method, seed) == (PICTURED, next(iter(METHODS)), 0) and surrogate is not None:
        found["picture"] = picture(surrogate, x, y)
    return found


def picture(surrogate: Surrogate, x: Tensor, y: Tensor) -> dict[str, Any]:
    """The surrogate's mean and deviation on a grid, in the function's units, and the points."""
    model = surrogate.fit(x, ((y - y.mean()) / y.std()).unsqueeze(1))
    side = torch.linspace(0, 1, GRID, dtype=DOUBLE)
    with torch.no_grad():
        found = model.posterior(torch.cartesian_prod(side, side).unsqueeze(1))
    mean, deviation = (y.mean() + y.std() * found.mean).flatten(), (y.std() * found.variance.sqrt()).flatten()
    rounded = {"mean": mean.view(GRID, GRID), "deviation": deviation.view(GRID, GRID), "x": x}
    return {key: [[round(float(v), 4) for v in row] for row in value] for key, value in rounded.items()}


def study(seeds: int) -> dict[str, Any]:
    """By problem and method the regrets (seeds, rounds + 1) and the seconds a run; and the figure's picture."""
    found: dict[str, Any] = {name: {method: [] for method in METHODS} for name in PROBLEMS}
    for seed, name, method in product(range(seeds), PROBLEMS, METHODS):
        part = f"{seed}, {name}, {method}"
        found[name][method].append(study_page.part("bayesian_optimisation", part, partial(cell, name, method, seed)))
    shown = found[PICTURED][next(iter(METHODS))][0]["picture"]
    return {name: {method: columns(rows) for method, rows in each.items()} for name, each in found.items()} | {
        "picture": shown
    }


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The regrets and the seconds of all runs."""
    return {key: [row[key] for row in rows] for key in ("regret", "seconds")}


def results_table(found: dict[str, Any]) -> str:
    """Final regrets, mean ± standard error over seeds, and the seconds of a run."""
    rows = []
    for method in METHODS:
        cells = []
        for name in PROBLEMS:
            last = found[name][method]["regret"][:, -1]
            cells.append(f"{last.mean():.2f} ± {last.std() / len(last) ** 0.5:.2f}")
        seconds = [f"{found[name][method]['seconds'].mean():.1f}" for name in PROBLEMS]
        rows.append([method, *cells, " / ".join(seconds)])
    seeds = len(found[PICTURED][method]["regret"])
    counts = ", ".join(f"{name} {p.start} + {TOGETHER} × {p.rounds}" for name, p in PROBLEMS.items())
    text = (
        f"Simple regret after the last round, mean ± standard error over {seeds} seeds, which set the first points, "
        f"the starts of networks, and the function of the third problem. Evaluations: {counts}. *s*: seconds of a core "
        "for a run on each of the three problems, measured while the machine had other work. The third function is a "
        "random network: its regret is in units of the standard deviation of the function over the cube, and its "
        "largest value was found by gradient ascent from 300 points."
    )
    return f"{table(['surrogate', *PROBLEMS, 's'], rows)}\n\n{text}"


def verdicts(found: dict[str, Any]) -> str:
    """For each problem the differences of the final regret to that of the Gaussian process, seed by seed."""
    rows = []
    for method in (m for m in METHODS if m != "SingleTaskGP"):
        cells = []
        for name in PROBLEMS:
            gap = (found[name][method]["regret"] - found[name]["SingleTaskGP"]["regret"])[:, -1]
            cells.append(f"{gap.mean():+.2f} ± {gap.std() / len(gap) ** 0.5:.2f}")
        rows.append([method, *cells])
    text = "Final regret less that of `SingleTaskGP` with the same first points, mean ± standard error over seeds."
    return f"{table(['surrogate', *PROBLEMS], rows)}\n\n{text}"


def curves(found: dict[str, Any]) -> Figure:
    """Simple regret against evaluations, with standard errors over seeds."""
    figure = style.blank(11, 3.6)
    panels = figure.subplots(1, len(PROBLEMS))
    for axes, (name, problem) in zip(panels, PROBLEMS.items()):
        counts = problem.start + TOGETHER * torch.arange(problem.rounds + 1)
        for i, (method, look) in enumerate(style.looks(METHODS).items()):
            values = found[name][method]["regret"]
            errors = values.std(0) / len(values) ** 0.5
            options = look._asdict() | {"label": method, "markersize": 3.5, "linewidth": 1.4, "capsize": 1.5}
            axes.errorbar(counts + 0.12 * (i - 2), values.mean(0), errors, errorevery=(i % 3, 3), **options)
        axes.set_yscale("log")
        style.dress(axes, "evaluations", "simple regret" if axes is panels[0] else "", name)
    panels[0].legend(fontsize=style.SMALL - 2, frameon=False, loc="lower left")
    return figure


def surrogate_figure(found: dict[str, Any]) -> Figure:
    """The function, the surrogate's mean and its deviation in two dimensions, with the points evaluated."""
    picture, problem = found["picture"], PROBLEMS[PICTURED]
    side = torch.linspace(0, 1, GRID, dtype=DOUBLE)
    truth = problem.make(0)[0](torch.cartesian_prod(side, side)).view(GRID, GRID)
    figure = style.blank(11, 3.6)
    panels = figure.subplots(1, 3)
    shown = {f"−{PICTURED}": truth, "mean of the surrogate": picture["mean"], "its deviation": picture["deviation"]}
    for axes, (title, values) in zip(panels, shown.items()):
        filled = axes.contourf(side, side, values.mT, levels=16, cmap="viridis")
        figure.colorbar(filled, ax=axes)
        x = picture["x"]
        axes.scatter(*x[: problem.start].T, s=26, marker="s", facecolor="white", edgecolor=style.INK, label="first")
        axes.scatter(
            *x[problem.start :].T, s=26, marker="o", facecolor=style.COLOURS[1], edgecolor="white", label="chosen"
        )
        style.dress(axes, "x₁", "x₂" if axes is panels[0] else "", title)
        axes.grid(False)
    panels[0].legend(fontsize=style.SMALL - 1, loc="upper right")
    return figure


STUDY = study_page.Study(
    "bayesian_optimisation",
    __doc__,
    study,
    {"bayesian_optimisation": results_table, "beside_the_process": verdicts},
    "docs/bayesian_optimisation.md",
    figures={"bayesian-optimisation": curves, "bayesian-optimisation-branin": surrogate_figure},
    options={"seeds": (10, "runs of each method on each problem")},
)

if __name__ == "__main__":
    STUDY.run()
