"""Draws, prior precision and predictions of a small CNN by solves, compared with their dense definition.

    python -m benchmarks.sampled_inference

After Antorán et al. 2023: the path of the prior precision under EM and MacKay's update, from 8 draws and exactly; the
marginal and joint (dyadic) log-likelihoods of test digits; the passes over the data that block CG, and stochastic
gradient descent on both losses, take to reach an accuracy of the predictive variances; and the gradient noise of both
losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import curvops as co
from benchmarks import study_page
from benchmarks.digits import Images, load_digits
from benchmarks.layers import fit
from benchmarks.tables import table, tables
from curvops.operators.curvatures.ggn import root_of
from curvops.plots import style

DRAWS, TEST_DRAWS, MANY, STEPS = 8, 64, 1000, 15
START = 30.0
TOLERANCES = (0.5, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
EPOCHS = (3, 10, 30, 100)
GOAL = 0.05
PRIORS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)

Found = dict[str, Any]
"""Raw results by name."""


def lenet() -> nn.Sequential:
    """Two convolutions and two linear layers for 8 × 8 digits; 2,618 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 12, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(48, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


@dataclass(frozen=True, eq=False)
class Setting:
    """The trained network, linearised; its posterior at the start; training and test digits."""

    model: nn.Module
    lin: co.operators.Linearization
    post: co.posterior.Laplace
    train: Images
    test: Images


def setting(seed: int) -> Setting:
    """Trained on 1,000 digits under prior precision 1."""
    digits = load_digits(1000)
    train, test = digits.train, digits.test
    torch.manual_seed(seed)
    model = fit(lenet(), train, prior_precision=1.0, steps=1000, rate=1e-2, cosine=True)
    lin = co.linearize(model, (train.x, train.y), "classification")
    post = co.laplace(lin, co.GGN, prior_precision=START, check_mode=False)
    return Setting(model, lin, post, train, test)


def paths(given: Setting, seed: int) -> Found:
    """By update, α before each step and in the end, γ, products and ending: from draws, and by the eigenvalues."""
    found: Found = {}
    for update in ("mackay", "em"):
        for samples in (None, DRAWS):
            generator = torch.Generator().manual_seed(seed)
            post = co.evidence.mackay(given.post, samples, STEPS, update=update, generator=generator)
            tuning = post.tuning
            assert isinstance(tuning, co.evidence.Tuning)
            found[f"{update}, {'exact' if samples is None else f'{samples} draws'}"] = {
                "path": [float(step.prior_precision) for step in tuning.steps] + [float(post.prior_precision)],
                "gamma": [float(step.effective_parameters) for step in tuning.steps],
                "stderr": [float(step.stderr) for step in tuning.steps],
                "products": [step.matvecs for step in tuning.steps],
                "converged": tuning.converged,
            }
    return found


def paths_table(found: Found) -> str:
    """α and γ at the end, products by step."""
    rows = []
    for name, row in found["paths"].items():
        gamma = f"{float(row['gamma'][-1]):.1f} ± {float(row['stderr'][-1]):.1f}"
        products = ", ".join(f"{count:.0f}" for count in row["products"])
        ending = "converged" if row["converged"] else "steps ran out"
        rows.append([name, f"{float(row['path'][-1]):.4f}", gamma, str(len(row["products"])), ending, products])
    header = ["update", "α", "γ at the last step", "steps", "ending", "products of each step"]
    return tables(header, rows, header[:-1], ["update", "products of each step"])


def likelihoods(given: Setting, alpha: float, seed: int) -> Found:
    """Mean marginal and dyadic log-likelihood of test digits, nats a point and a pair of ten."""
    exact = given.post.with_prior(alpha)
    last = co.linearize(given.model, (given.train.x, given.train.y), "classification", parameters="last_layer")
    posts = {
        "last layer": co.laplace(last, co.GGN, prior_precision=alpha, check_mode=False),
        "KFAC": co.laplace(given.lin, co.KFAC, alpha, check_mode=False),
        "sampled": exact,
    }
    samples = {name: post.sample(TEST_DRAWS, torch.Generator().manual_seed(seed)) for name, post in posts.items()}
    many = exact.sample(MANY, torch.Generator().manual_seed(seed + 1))
    rows = {"MAP": _scores(exact, exact.mean.expand(2, -1), given.test, seed)}
    rows |= {f"{name}, {TEST_DRAWS} draws": _scores(posts[name], samples[name], given.test, seed) for name in posts}
    rows[f"exact covariance, {MANY:,} draws"] = _scores(exact, many, given.test, seed)
    return rows


def _scores(post: co.posterior.Laplace, samples: Tensor, test: Images, seed: int) -> Found:
    pairs = torch.Generator().manual_seed(seed)
    found = {
        "marginal": post.log_likelihood(test.x, test.y, samples=samples),
        "dyadic": post.log_likelihood(test.x, test.y, joint=True, samples=samples, generator=pairs),
    }
    return {name: {"mean": e.value.mean(), "stderr": e.value.std() / len(e.value) ** 0.5} for name, e in found.items()}


def scores_table(found: Found) -> str:
    """A row a predictive."""
    rows = [
        [name, *(f"{row[score]['mean']:.4f} ± {row[score]['stderr']:.4f}" for score in ("marginal", "dyadic"))]
        for name, row in found["scores"].items()
    ]
    return table(["predictive", "marginal, nats a point", "dyadic, nats a pair of ten"], rows)


def courses(post: co.posterior.Laplace, test: Images, seed: int) -> Found:
    """Passes, and the root mean square of the relative error of predictive variances that they reach.

    Of block CG by its tolerance, of gradient descent by its epochs; one noise, so that one answer is right.
    """
    exact = post.deviations(DRAWS, method="cg", rtol=1e-6, generator=torch.Generator().manual_seed(seed))

    def variances(draws: Tensor) -> Tensor:
        return post.predict(test.x, samples=post.mean + draws).variance

    right = variances(exact.draws)

    def error(draws: Tensor) -> float:
        return float((variances(draws) / right - 1).square().mean().sqrt())

    found: Found = {"block CG": {"passes": [], "errors": []}}
    for rtol in TOLERANCES:
        cold = co.laplace(
            post.lin, co.GGN, prior_precision=post.prior_precision, check_mode=False
        )  # makes its own sketch
        solved = cold.deviations(DRAWS, exact.noise, "cg", rtol=rtol)
        found["block CG"]["passes"].append(solved.matvecs / DRAWS)
        found["block CG"]["errors"].append(error(solved.draws))
    for loss, name in (("low_variance", "SGD on L′"), ("standard", "SGD on L")):
        found[name] = {"passes": [], "errors": []}
        for epochs in EPOCHS:
            options = co.posterior.StochasticDescent(loss, batch_size=100, epochs=epochs)
            try:
                draws = post.deviations(DRAWS, exact.noise, options, rtol=1e-6).draws
            except co.linalg.ConvergenceError as stopped:
                draws = stopped.deviations.draws  # type: ignore[attr-defined]
            found[name]["passes"].append(epochs)
            found[name]["errors"].append(error(draws))
    return found


def passes_table(found: Found) -> str:
    """The first passes that reach the goal, and all of them."""
    rows = []
    for name, row in found["courses"].items():
        reached = list(zip(row["passes"].tolist(), row["errors"].tolist()))
        first = next((passes for passes, error in reached if error <= GOAL), float("inf"))
        rows.append([name, f"{first:g}", ", ".join(f"{error:.3f} ({passes:g})" for passes, error in reached)])
    header = ["method", f"passes a draw to an error of {GOAL:.0%}", "errors reached (passes)"]
    return tables(header, rows, header[:2], ["method", "errors reached (passes)"])


def gradient_noise(given: Setting, seed: int) -> Found:
    """Σ_i E‖term_i‖² of the gradient at the minimiser, of L and of L′, by the formula and from draws.

    tr M_i − tr M_iΣM_i of L and tr M_iΣM_i of L′, over prior precisions; M_i = S_i S_iᵀ.
    """
    found: Found = {what: {name: [] for name in ("L", "L′")} for what in ("formula", "measured")}
    root = root_of(given.post.curvature)
    assert root is not None
    S, N = root.to_dense().double(), given.lin.num_data
    values, U = torch.linalg.eigh(S @ S.mT)
    W = (U.mT @ S).unflatten(1, (N, -1)).transpose(0, 1)  # (N, D, R)
    inner = W.mT @ W
    for prior in PRIORS:
        post = given.post.with_prior(prior)
        covariance = W.mT @ (W / (values.clamp_min(0) + prior).unsqueeze(-1))
        inside = (covariance * inner).sum()
        found["formula"]["L′"].append(float(inside))
        found["formula"]["L"].append(float(inner.diagonal(dim1=1, dim2=2).sum() - inside))
        drawn = post.deviations(TEST_DRAWS, method="cg", rtol=1e-4, generator=torch.Generator().manual_seed(seed))
        pushed = (S.mT @ drawn.draws.mT.double()).unflatten(0, (N, -1))
        noise = drawn.noise.of_data(root.shape[-1], range(TEST_DRAWS), drawn.draws).double().unflatten(0, (N, -1))
        for name, e in (("L′", pushed), ("L", pushed - noise)):
            found["measured"][name].append(float((e * (inner @ e)).sum() / TEST_DRAWS))
    return found


def figure(found: Found) -> Figure:
    """Left: α by step; middle: error against passes; right: gradient noise against the prior precision."""
    drawn = style.blank(12.6, 3.8)
    left, middle, right = drawn.subplots(1, 3)
    for look, (name, row) in enumerate(found["paths"].items()):
        _line(left, look, range(len(row["path"])), row["path"], name)
    for look, (name, row) in enumerate(found["courses"].items()):
        _line(middle, look, row["passes"], row["errors"], name)
    middle.axhline(GOAL, color=style.GREY, linewidth=1, linestyle=":")
    noise = found["noise"]
    for look, name in enumerate(noise["formula"]):
        _line(right, look, PRIORS, noise["formula"][name], f"{name}, by the formula")
        rings = {"label": "measured" if look else None, "fillstyle": "none", "markersize": 8}
        right.plot(PRIORS, noise["measured"][name], "o", color=style.COLOURS[look], **rings)
    for axes in (left, middle, right):
        axes.set_yscale("log")
    for axes in (middle, right):
        axes.set_xscale("log")
    style.dress(left, "step", "prior precision α")
    style.dress(middle, "passes over the data a draw", "rms relative error of a variance")
    style.dress(right, "prior precision α", "gradient noise Σ E‖term‖²")
    for axes in (left, middle, right):
        axes.legend(fontsize=style.SMALL, frameon=False)
    return drawn


def _line(axes: Axes, look: int, x: Sequence[float] | Tensor, y: Tensor, label: str) -> None:
    axes.plot(x, y, color=style.COLOURS[look], marker=style.MARKERS[look], linestyle=style.DASHES[look], label=label)


def study(seed: int) -> Found:
    """All parts; draws, scores and noise at the α that MacKay's update finds from draws."""
    given = setting(seed)
    found: Found = {"paths": paths(given, seed)}
    alpha = found["paths"][f"mackay, {DRAWS} draws"]["path"][-1]
    found["courses"] = courses(given.post.with_prior(alpha), given.test, seed)
    found["noise"] = gradient_noise(given, seed)
    found["scores"] = likelihoods(given, alpha, seed)
    return found


STUDY = study_page.Study(
    "sampled_inference",
    __doc__,
    study,
    {"paths": paths_table, "scores": scores_table, "passes": passes_table},
    "docs/sampled.md",
    figures={"sampled": figure},
    options={"seed": (0, "of the network and of all draws")},
)

if __name__ == "__main__":
    STUDY.run()
