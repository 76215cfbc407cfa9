"""Reduced posteriors of many points, compared with laplace-torch's function-space classes and gpytorch's SVGP.

    .venv-peers/bin/python -m benchmarks.many_points

Errors: 2,000 points with eight inputs, and a trained network of 1,409 weights in float64. The reference is the exact
posterior under the same prior and noise; each method is compared with its standard deviations at 500 other points
(near: where the data are; far: inputs two to three times as large). Times: 50,000 points, and a network of 4,801
weights in float32; each method has its own process, whose greatest resident set is its memory; seconds are processor
times on one thread. laplace-torch is imported only where it is used, so that tables and figure can be made again
without it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any

import gpytorch
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvops as co
from benchmarks import study_page
from benchmarks.layers import perceptron
from benchmarks.machine import peer_version, run_apart
from benchmarks.peak import peak_bytes
from benchmarks.tables import MIB, table
from curvops.plots import style

INPUTS, NOISE, PRIOR = 8, 0.1, 3.5
FEW, MANY, TEST = 2_000, 50_000, 500
STEPS = 2_000
"""Steps of the network's training, on batches of `BATCH`."""
WIDTHS = {FEW: (INPUTS, 32, 33, 1), MANY: (INPUTS, 64, 64, 1)}
RANKS = (50, 100, 200, 400, 800)
SHOWN = (200, 800)
"""Ranks of the table beside laplace-torch."""
ITERATIONS = 100
"""Steps of VaLLA, on batches of `BATCH`: its default. They are dear, and it is run at the first rank alone."""
RANK, BATCH, EPOCHS, ROUNDS = 200, 500, 6, 3
BUDGET = 512 * MIB
CHOICES = {"inducing": "inducing points", "leading": "leading features", "random": "random features"}
NAMES = {
    **CHOICES,
    **{f"{kind}, without the rest": f"{words}, without the rest" for kind, words in CHOICES.items()},
    "KFAC": "`co.KFAC`, for comparison",
    "subset": "laplace-torch: subset of data",
    "ELLA": "laplace-torch: ELLA",
    "VaLLA": "laplace-torch: VaLLA",
}
METHODS = ("nothing", "inducing", "leading", "random", "KFAC", "SVGP, RBF", "SVGP, network", "subset", "ELLA")
"""Processes of the run on many points, by number."""
LABELS = {
    "nothing": "data and network alone",
    **{kind: f"`reduced_posterior`, {words}" for kind, words in CHOICES.items()},
    "KFAC": "`co.KFAC`, for comparison",
    "SVGP, RBF": f"gpytorch's SVGP, RBF kernel, {EPOCHS} epochs",
    "SVGP, network": f"gpytorch's SVGP, `LinearizedKernel`, {EPOCHS} epochs",
    "subset": "laplace-torch: subset of data",
    "ELLA": "laplace-torch: ELLA",
}

Row = dict[str, Any]


def truth(x: Tensor) -> Tensor:
    """Interactions of five inputs; three do nothing."""
    a, b, c, d, e = x[:, :5].unbind(1)
    return (torch.sin(3 * a) + b * c + torch.cos(4 * d * e)).unsqueeze(1)


def problem(points: int, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    """A trained network and its data."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(points, INPUTS, generator=generator) * 2 - 1).to(dtype)
    y = truth(x) + NOISE**0.5 * torch.randn(points, 1, generator=generator).to(dtype)
    torch.manual_seed(0)
    model = perceptron(*WIDTHS[points]).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        chosen = torch.randint(points, (BATCH,), generator=generator)
        loss = nn.functional.mse_loss(model(x[chosen]), y[chosen]) / NOISE
        decay = sum(p.square().sum() for p in model.parameters()) * PRIOR / points
        optimizer.zero_grad()
        (loss + decay).backward()
        optimizer.step()
        schedule.step()
    return model, x, y


def held_out(dtype: torch.dtype, scale: tuple[float, float] = (0.0, 1.0)) -> Tensor:
    """Other inputs, each as long as those of training times a number from `scale`; (0, 1) is where the data are."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(TEST, INPUTS, generator=generator) * 2 - 1
    if scale != (0.0, 1.0):
        x = x.sign() * (scale[0] + (scale[1] - scale[0]) * torch.rand(TEST, INPUTS, generator=generator))
    return x.to(dtype)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the processor, and the result."""
    begin = time.process_time()
    found = call()
    return time.process_time() - begin, found


def score(variance: Callable[[Tensor], Tensor], places: dict[str, Tensor], exact: dict[str, Tensor]) -> Row:
    """The root mean square of relative errors of standard deviations, by place, and the seconds of predictions."""
    row: Row = {}
    for place, x in places.items():
        seconds, found = timed(lambda x=x: variance(x).flatten())
        row[place] = float((found.clamp_min(0).sqrt() / exact[place].sqrt() - 1).square().mean().sqrt())
        row["predict"] = row.get("predict", 0.0) + seconds
    return row


def errors() -> dict[str, Any]:
    """What each method errs by at each rank, and what it takes."""
    model, x, y = problem(FEW, torch.float64)
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(NOISE), progress=False)
    dense = co.linalg.Dense(co.GGN(lin).to_dense(), psd=True)
    whole = co.laplace(lin, dense, PRIOR, check_mode=False)
    places = {"near": held_out(torch.float64), "far": held_out(torch.float64, (2.0, 3.0))}
    exact = {place: whole.predict(at).variance.flatten() for place, at in places.items()}
    parameters = float(whole.effective_parameters())
    rows: list[Row] = []
    for kind in CHOICES:
        for rank in RANKS:
            generator = torch.Generator().manual_seed(0)
            build, post = timed(
                lambda kind=kind, rank=rank, generator=generator: co.gp.reduced_posterior(
                    lin, rank, PRIOR, features=kind, generator=generator, check_mode=False
                )
            )
            found = {"rank": rank, "build": build, "left": float(post.error), "remainder": float(post.remainder)}
            rows.append({"method": kind, **found} | score(lambda at, p=post: p.predict(at).variance, places, exact))
            rest = score(lambda at, p=post: p.without_rest().predict(at).variance, places, exact)
            rows.append({"method": f"{kind}, without the rest", "rank": rank, "build": build} | rest)
    build, structured = timed(lambda: co.laplace(lin, co.KFAC, PRIOR, check_mode=False))
    of_layers = score(lambda at: structured.predict(at).variance, places, exact)
    rows.append({"method": "KFAC", "rank": 0, "build": build} | of_layers)
    for name in PEERS:
        ranks = SHOWN[:1] if name == "VaLLA" else SHOWN
        rows += [{**peer(name, rank, model, x, y, places, exact), "rank": rank} for rank in ranks]
    return {"rows": rows, "parameters": parameters, "weights": lin.num_parameters}


PEERS = ("subset", "ELLA", "VaLLA")


def peer(
    name: str, rank: int, model: nn.Module, x: Tensor, y: Tensor, places: dict[str, Tensor], exact: dict[str, Tensor]
) -> Row:
    """A row of one of laplace-torch's classes, with the same prior and noise."""
    build, fitted = timed(lambda: fitted_peer(name, rank, model, x, y))
    return {"method": name, "build": build} | score(lambda at: fitted(at)[1], places, exact)


def fitted_peer(name: str, rank: int, model: nn.Module, x: Tensor, y: Tensor) -> Any:
    """laplace-torch's posterior of a rank, its backends the defaults; VaLLA with prior and noise held."""
    from laplace.baselaplace import ELLA, FunctionalLaplace, VaLLA

    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH)
    common = {"sigma_noise": NOISE**0.5, "prior_precision": PRIOR}
    if name == "subset":
        found = FunctionalLaplace(model, "regression", rank, **common)
        found.fit(loader)
    elif name == "ELLA":
        found = ELLA(model, "regression", min(len(x), 4 * rank), rank, **common)
        found.fit(loader)
    else:
        shuffled = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)
        found = VaLLA(model, "regression", "kmeans", num_inducing=rank, **common)
        found.log_prior_precision.requires_grad_(False)
        found.log_noise_variance.requires_grad_(False)
        found.fit(shuffled, iterations=ITERATIONS, lr=1e-2)
    return found


class Process(gpytorch.models.ApproximateGP):
    """A sparse variational Gaussian process, as gpytorch's documentation makes it."""

    def __init__(self, Z: Tensor, mean: gpytorch.means.Mean, kernel: gpytorch.kernels.Kernel, learn: bool) -> None:
        q = gpytorch.variational.CholeskyVariationalDistribution(len(Z))
        strategy = gpytorch.variational.VariationalStrategy(self, Z, q, learn_inducing_locations=learn)
        super().__init__(strategy)
        self.mean_module, self.covar_module = mean, kernel

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@cache
def inducing(lin: co.operators.Linearization) -> Tensor:
    """The points that a pivoted Cholesky of the network's kernel chooses."""
    rows = co.gp.reduced_posterior(lin, RANK, PRIOR, check_mode=False).rows
    assert rows is not None
    return rows[:, 0]


class Training:
    """An SVGP with what trains it, epoch by epoch."""

    def __init__(self, x: Tensor, y: Tensor, lin: co.operators.Linearization | None = None, learn: bool = True) -> None:
        """Over the RBF kernel, or over that of a network at the points of its pivoted Cholesky."""
        self.generator = torch.Generator().manual_seed(0)
        if lin is None:
            chosen, mean = torch.randperm(len(x), generator=self.generator)[:RANK], gpytorch.means.ConstantMean()
            kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=INPUTS))
        else:
            chosen, mean = inducing(lin), co.gp.LinearizedMean(lin, lin.theta)
            kernel = co.gp.LinearizedKernel(lin, PRIOR)
        self.x, self.y = x, y.flatten()
        self.process, self.likelihood = (
            Process(x[chosen], mean, kernel, learn),
            gpytorch.likelihoods.GaussianLikelihood(),
        )
        self.likelihood.noise = NOISE
        self.objective = gpytorch.mlls.VariationalELBO(self.likelihood, self.process, len(x))
        self.optimizer = torch.optim.Adam([*self.process.parameters(), *self.likelihood.parameters()], 1e-2)

    def epoch(self, steps: int | None = None) -> float:
        """Seconds of an epoch, or of so many steps."""
        order = torch.randperm(len(self.x), generator=self.generator).split(BATCH)[:steps]

        def run() -> None:
            for chosen in order:
                self.optimizer.zero_grad()
                loss = -self.objective(self.process(self.x[chosen]), self.y[chosen])
                loss.backward()
                self.optimizer.step()

        return timed(run)[0]

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of new targets."""
        self.process.eval()
        with torch.no_grad():
            found = self.likelihood(self.process(x))
        return found.mean, found.variance


def one(number: int) -> Row:
    """The row of a method on many points, with the greatest resident set of this process."""
    torch.set_num_threads(1)
    method = METHODS[number]
    model, x, y = problem(MANY, torch.float32)
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(NOISE), memory_budget=BUDGET, progress=False)
    at, row = held_out(torch.float32), {"method": method, "weights": lin.num_parameters}
    target = truth(at).flatten() + NOISE**0.5 * torch.randn(TEST, generator=torch.Generator().manual_seed(2))

    def nll(mean: Tensor, variance: Tensor) -> float:
        return float(-torch.distributions.Normal(mean, variance.detach().sqrt()).log_prob(target).mean())

    moments: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    if method in CHOICES:
        generator = torch.Generator().manual_seed(0)
        row["build"], post = timed(
            lambda: co.gp.reduced_posterior(lin, RANK, PRIOR, features=method, generator=generator, check_mode=False)
        )
        row |= {"left": float(post.error)}
        priors = [PRIOR * 10 ** (i / 4) for i in range(17)]
        best = max((post.with_prior(prior) for prior in priors), key=lambda each: float(each.log_evidence_bound()))
        mean = lin.predict(at).flatten()
        others = {"without the rest": post.without_rest(), "prior by the bound": best}
        row["others"] = {name: nll(mean, each.predict(at).variance.flatten() + NOISE) for name, each in others.items()}
        row["prior"] = float(best.prior_precision)
        moments = lambda at: (lin.predict(at).flatten(), post.predict(at).variance.flatten() + NOISE)  # noqa: E731
    elif method.startswith("SVGP"):
        training = Training(x, y) if method == "SVGP, RBF" else Training(x, y, lin, learn=False)
        epochs = [training.epoch() for _ in range(EPOCHS)]
        row |= {"build": sum(epochs), "epoch": median(epochs)}
        moments = training.moments
    elif method == "KFAC":
        row["build"], layers = timed(lambda: co.laplace(lin, co.KFAC, PRIOR, check_mode=False))
        moments = lambda at: (lin.predict(at).flatten(), layers.predict(at).variance.flatten() + NOISE)  # noqa: E731
    elif method != "nothing":
        row["build"], fitted = timed(lambda: fitted_peer(method, RANK, model, x, y))
        moments = lambda at: (fitted(at)[0].flatten(), fitted(at)[1].flatten() + NOISE)  # noqa: E731
    if moments is not None:
        row["predict"], (mean, variance) = timed(lambda: moments(at))
        row["rmse"] = float((mean - truth(at).flatten()).square().mean().sqrt())
        row["nll"] = nll(mean, variance)
    return row | {"peak": peak_bytes()}


def alternating() -> dict[str, list[float]]:
    """Seconds of epochs of SVGP with each kernel, taking turns, and of 10 steps with learned inducing points."""
    torch.set_num_threads(1)
    model, x, y = problem(MANY, torch.float32)
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(NOISE), memory_budget=BUDGET, progress=False)
    trainings = {"rbf": Training(x, y), "network": Training(x, y, lin, False), "learned": Training(x, y, lin, True)}
    found: dict[str, list[float]] = {name: [] for name in trainings}
    for _ in range(ROUNDS):
        for name, training in trainings.items():
            steps = 10 if name == "learned" else None
            found[name].append(training.epoch(steps) * (MANY / BATCH / 10 if steps else 1))
    return found


def measure() -> dict[str, Any]:
    """Errors on few points, times and memory on many."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "errors": errors(),
            "many": [run_apart("benchmarks.many_points", "--method", i)[-1] for i in range(len(METHODS))],
            "epochs": alternating(),
            "laplace-torch": peer_version("laplace-torch"),
            "gpytorch": peer_version("gpytorch"),
        }


def percent(value: float) -> str:
    """A relative error."""
    return f"{100 * value:.2g} %" if value < 0.995 else f"{100 * value:,.0f} %"


def errors_table(found: Any) -> str:
    """Errors and times of each method at two ranks."""
    result = found["errors"]
    shown = sorted((row for row in result["rows"] if row["rank"] in (0, *SHOWN)), key=lambda row: row["rank"])
    rows = [
        [
            NAMES[row["method"]],
            f"{row['rank'] or ''}",
            percent(row["near"]),
            percent(row["far"]),
            percent(row["left"]) if "left" in row else "",
            f"{row['build']:.2f} s",
            f"{row['predict'] * 1e3:.0f} ms",
        ]
        for row in shown
    ]
    header = ["posterior", "K", "error near", "error far", "left out", "made in", "1,000 predictions"]
    text = (
        f"N = {FEW:,} and D = {result['weights']:,}, of which {result['parameters']:.0f} parameters are effective. "
        "*Error*: the root mean square of the relative errors of standard deviations. *Left out*: `post.error`. "
        f"laplace-torch {found['laplace-torch']}; VaLLA takes its default of {ITERATIONS} steps, at fixed prior and "
        "noise."
    )
    return f"{text}\n\n{table(header, rows)}"


def many_table(found: Any) -> str:
    """Times, memory and scores on many points."""
    rows = []
    for row in found["many"]:
        cells = {
            "NLL": f"{row['nll']:.3f}" if "nll" in row else "",
            "RMSE": f"{row['rmse']:.3f}" if "rmse" in row else "",
            "made in": f"{row['build']:.1f} s" if "build" in row else "",
            "an epoch": f"{row['epoch']:.2f} s" if "epoch" in row else "",
            "predictions": f"{row['predict'] * 1e3:.0f} ms" if "predict" in row else "",
            "peak": f"{row['peak'] / MIB:,.0f} MiB",
        }
        rows.append([LABELS[row["method"]], *cells.values()])
        for name, value in row.get("others", {}).items():
            rows.append([f"the same, {name}", f"{value:.3f}", *[""] * 5])
    header = ["method", "NLL", "RMSE", "made in", "an epoch", f"{TEST} predictions", "peak of the process"]
    epochs = {name: [float(s) for s in seconds] for name, seconds in found["epochs"].items()}
    ratio, learned = (median(a / b for a, b in zip(epochs[name], epochs["rbf"])) for name in ("network", "learned"))
    text = (
        f"N = {MANY:,}, D = {found['many'][0]['weights']:,}, K = {RANK} and prior precision {PRIOR}. The NLL is that "
        "of a new target, in nats; the RMSE is that of the noiseless function. The *prior by the bound* has the "
        "largest `post.log_evidence_bound()` among multiples of 1 to 10,000. The SVGP has "
        f"{RANK} inducing points and batches of {BATCH}; over the network's kernel the inducing points are those "
        "of the pivoted Cholesky, and fixed."
    )
    pairs = (
        f"In alternating runs in one process, an epoch over the network's kernel takes {ratio:.1f} times as long as "
        "one over the RBF kernel. If the inducing points are learned (by gradients of the kernel in its inputs) it "
        f"takes {learned:.0f} times as long, extrapolated from 10 steps. gpytorch {found['gpytorch']}."
    )
    return f"{text}\n\n{table(header, rows)}\n\n{pairs}"


def figure(found: Any) -> Figure:
    """The error of standard deviations near the data, and far away, against the rank."""
    drawn = style.blank(9.2, 3.8)
    rows = found["errors"]["rows"]
    for axes, place in zip(drawn.subplots(1, 2, sharey=True), ("near", "far")):
        for i, (kind, words) in enumerate(CHOICES.items()):
            for rest, dashes in (("", "-"), (", without the rest", "--")):
                chosen = [row for row in rows if row["method"] == kind + rest]
                ranks, values = [row["rank"] for row in chosen], [row[place] for row in chosen]
                axes.plot(
                    ranks, values, dashes, color=style.COLOURS[i], marker=style.MARKERS[i], label=f"{words}{rest}"
                )
        (of_layers,) = (row[place] for row in rows if row["method"] == "KFAC")
        axes.axhline(of_layers, label="KFAC", **style.REFERENCE)
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(RANKS, [f"{rank:,}" for rank in RANKS])
        axes.minorticks_off()
        what = "rms error of a std, relative" if place == "near" else ""
        style.dress(axes, "features, K", what, "near the data" if place == "near" else "far away")
        if place == "near":
            axes.legend(fontsize=style.SMALL - 2, frameon=False)
    return drawn


STUDY = study_page.Study(
    "many_points",
    __doc__,
    measure,
    {"errors of reduced posteriors": errors_table, "many points": many_table},
    "docs/many_points.md",
    figures={"many_points": figure},
    rows={"method": lambda number: [one(number)]},
)

if __name__ == "__main__":
    STUDY.run()
