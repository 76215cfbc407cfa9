"""The demo's figures: their numbers are computed here, and `curvops.plots` draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import curvops as co
from curvops import metrics, plots
from curvops.cli.demo.digits import Images
from curvops.cli.demo.network import minimize
from curvops.cli.demo.report import LabelledPredictions, Row
from curvops.linalg import Estimate, draw

CG_RTOL = 1e-5
EIGEN_RTOL = 1e-3
TOP = 10
"""The number of eigenvalues shown one by one."""
NOISE = 0.1
REGRESSION_STEPS = 3000
VALIDATION_DRAWS = 16
VALIDATION_RTOL = 1e-2


def reliability(rotated: Mapping[str, LabelledPredictions], path: Path) -> None:
    """Draw reliability diagrams of every method on the rotated digits."""
    curves, errors = {}, {}
    for name, p in rotated.items():
        bins = metrics.reliability_bins(p.probabilities, p.labels)
        share = bins.count / bins.count.sum()
        curves[name] = (bins.confidence.numpy(), bins.accuracy.numpy(), share.numpy())
        errors[name] = float(metrics.ece(p.probabilities, p.labels))
    plots.save(plots.reliability(curves, "Digits rotated by 15–90°", errors), path)


def rotation(rows: Mapping[str, Row], followed: Sequence[str], path: Path) -> None:
    """Draw epistemic uncertainty against the angle, and the confidence and accuracy of some methods."""
    angles = sorted(next(iter(rows.values())).by_angle)

    def curve(row: Row, score: str) -> np.ndarray:
        return np.array([row.by_angle[angle][score] for angle in angles])

    epistemic = {name: curve(row, "epistemic") for name, row in rows.items() if row.auroc_epistemic is not None}
    confidence = {name: curve(rows[name], "confidence") for name in followed}
    accuracy = {name: curve(rows[name], "accuracy") for name in followed}
    plots.save(plots.rotation(np.array(angles), confidence, epistemic, accuracy), path)


def evidence(
    precisions: Sequence[float], estimates: Sequence[Estimate], nll: Sequence[float], chosen: float, path: Path
) -> None:
    """Draw evidence and validation NLL against the prior precision."""
    low, high = zip(*(estimate.interval() for estimate in estimates))
    value = [float(estimate.value) for estimate in estimates]
    x, y, lower, upper, loss = (np.array([float(v) for v in column]) for column in (precisions, value, low, high, nll))
    plots.save(plots.evidence(x, y, lower, upper, loss, chosen), path)


def validation_nll(post: co.posterior.Laplace, data: Images, generator: torch.Generator) -> float:
    """Compute the NLL on held-out data, in nats per point, from a few draws solved to graphical accuracy."""
    noise = draw(post.precision, VALIDATION_DRAWS, generator)
    solution = post.precision.cg(noise, rtol=VALIDATION_RTOL, preconditioner=post.precision.preconditioner(16))
    probabilities = post.probabilities(data.x, link="mc", samples=post.mean + solution.x.mT)
    return float(metrics.nll(probabilities, data.y))


def convergence(post: co.posterior.Laplace, columns: int, generator: torch.Generator, path: Path) -> dict[str, Any]:
    """Draw three ways to solve for the same right-hand sides; return their products and iterations."""
    P = post.precision
    B = torch.randn(columns, len(post.mean), generator=generator, dtype=post.mean.dtype).mT
    sketch = co.linalg.nystrom(
        post.curvature, rank=None, shift=float(post.prior_precision), rhs=columns, generator=generator
    )
    runs = {
        "plain": (P.cg(B, rtol=CG_RTOL, block=False), 0),
        "block": (P.cg(B, rtol=CG_RTOL), 0),
        "preconditioned": (P.cg(B, rtol=CG_RTOL, preconditioner=sketch.preconditioner()), sketch.matvecs),
    }
    histories, costs = {}, {}
    for name, (solution, spent) in runs.items():
        worst = solution.history.max(1).values.numpy()
        steps = np.arange(len(worst)) / max(1, len(worst) - 1)
        histories[name] = (spent + steps * solution.matvecs, worst)
        costs[name] = {"products": spent + solution.matvecs, "sketch": spent, "iterations": solution.iterations}
    plots.save(plots.convergence(histories, CG_RTOL), path)
    return costs


def regression(generator: torch.Generator, path: Path) -> None:
    """Draw a small network with one input, whose data have a gap, and the band of its posterior."""
    x = torch.cat([torch.rand(40, 1, generator=generator) * 2 - 3, torch.rand(40, 1, generator=generator) * 2 + 1])
    y = torch.sin(2 * x) + NOISE * torch.randn(x.shape, generator=generator)
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1)).double()
    x, y = x.double(), y.double()
    _fit(model, x, y, prior_precision=1.0, generator=generator)
    post = co.laplace(co.linearize(model, (x, y), co.likelihoods.Gaussian(noise=NOISE**2)), prior_precision=1.0)
    line = torch.linspace(-4, 4, 161, dtype=torch.float64)[:, None]
    predicted = post.predict(line)
    mean, std = predicted.mean.detach(), predicted.stddev.detach()
    x_train, y_train, points, centre, spread = (v.flatten().numpy() for v in (x, y, line, mean, std))
    plots.save(plots.regression(x_train, y_train, points, centre, spread, NOISE), path)


def _fit(model: nn.Module, x: Tensor, y: Tensor, prior_precision: float, generator: torch.Generator) -> None:
    for parameter in model.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.5
        nn.init.normal_(parameter, std=scale, generator=generator)

    def loss() -> Tensor:
        penalty = sum((p.square().sum() for p in model.parameters()), x.new_zeros(()))
        return 0.5 * (model(x) - y).square().sum() / NOISE**2 + 0.5 * prior_precision * penalty

    minimize(loss, model.parameters(), REGRESSION_STEPS, 1e-2)


def covariance(post: co.posterior.Laplace, x: Tensor, labels: Sequence[str], path: Path) -> None:
    """Draw the joint covariance of a few points' logits."""
    matrix = post.predict(x, joint=True, rtol=1e-3).covariance_matrix.detach().numpy()
    plots.save(plots.covariance(matrix, labels), path)


def spectrum(curvature: co.linalg.Operator, generator: torch.Generator, path: Path) -> dict[str, Any]:
    """Draw the curvature's spectral density and largest eigenvalues; return products, depth and eigenvalues."""
    spectrum = curvature.spectral_density(probes=4, steps=40, generator=generator)
    pairs = curvature.eigsh(TOP, rtol=EIGEN_RTOL, generator=generator).raise_if_failed()
    size, title = curvature.shape[-1], "Eigenvalues of the GGN"
    plots.save(plots.spectral_density(spectrum, top=pairs.values, size=size, title=title), path)
    products, depth = spectrum.matvecs + pairs.matvecs, spectrum.nodes.shape[1]
    return {"products": products, "depth": depth, "largest": pairs.values.tolist()}
