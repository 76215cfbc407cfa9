"""Linear algebra tasks with the GGN, compared with curvlinops with SciPy and linear_operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import curvops as co
from benchmarks.networks import linear_layers
from benchmarks.tasks.task import Task

PRECISION, CLOSE = 1.0, 0.01
"""The prior precision of draws and log-determinants; the relative error that counts as equal."""


@dataclass
class Curved:
    """A trained network and its data."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return self.inputs, self.targets


def digits(points: int) -> Curved:
    """Ten patterns of 8 × 8 under noise, and a network of 97,260 weights trained on them."""
    torch.manual_seed(0)
    labels = torch.randint(10, (points,))
    x = torch.randn(10, 64)[labels] + 2.0 * torch.randn(points, 64)
    model = linear_layers(64, 300, 250, 10)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(60):
        optimizer.zero_grad()
        penalty = PRECISION / 2 * sum(p.square().sum() for p in model.parameters())
        (nn.functional.cross_entropy(model(x), labels) + penalty / points).backward()
        optimizer.step()
    return Curved(model.eval(), x, labels)


def many() -> Curved:
    """1,000 points."""
    return digits(1000)


def few() -> Curved:
    """200 points, so that the exact log-determinant is that of 2,000 numbers."""
    return digits(200)


# 64 draws from the Laplace posterior of the full GGN.


def draws_ours(problem: Curved) -> Tensor:
    lin = co.linearize(problem.model, problem.data, "classification")
    post = co.laplace(lin, co.GGN, prior_precision=PRECISION, check_mode=False)
    return post.deviations(64, generator=torch.Generator(problem.inputs.device).manual_seed(0)).draws


def draws_theirs(problem: Curved) -> Tensor:
    from curvlinops import GGNLinearOperator, TransposedJacobianLinearOperator
    from linear_operator.utils.linear_cg import linear_cg

    params = list(problem.model.parameters())
    G = GGNLinearOperator(problem.model, nn.CrossEntropyLoss(reduction="sum"), params, [problem.data])
    Jt: Any = TransposedJacobianLinearOperator(problem.model, params, [problem.data])
    p = problem.model(problem.inputs).softmax(1).detach()
    noise = p.sqrt().unsqueeze(-1) * torch.randn(*p.shape, 64)
    noise = noise - p.unsqueeze(-1) * noise.sum(1, keepdim=True)  # of covariance diag(p) − ppᵀ
    D = sum(w.numel() for w in params)
    right = Jt @ noise.flatten(0, 1) + PRECISION**0.5 * torch.randn(D, 64)
    return linear_cg(  # type: ignore[no-any-return]
        lambda V: G @ V + PRECISION * V, right, tolerance=1e-3, max_iter=1000, max_tridiag_iter=1
    ).mT


def squares_of(problem: Curved, draws: Tensor) -> dict[str, float]:
    """The mean of zᵀPz/D, which is 1 for draws of N(0, P⁻¹)."""
    P = co.GGN(co.linearize(problem.model, problem.data, "classification")).add_diagonal(PRECISION)
    return {"mean of zᵀPz/D": float(((P @ draws.mT) * draws.mT).sum(0).mean() / draws.shape[1])}


# The largest eigenvalues and the spectral density.


def spectrum_ours(problem: Curved) -> Any:
    G = co.GGN(co.linearize(problem.model, problem.data, "classification"))
    generator = torch.Generator(problem.inputs.device).manual_seed(0)
    return G.eigsh(20, generator=generator).values, G.spectral_density(probes=4, steps=60, generator=generator)


def spectrum_theirs(problem: Curved) -> Any:
    from curvlinops import GGNLinearOperator
    from curvlinops.papyan2020traces.spectrum import lanczos_approximate_spectrum
    from scipy.sparse.linalg import eigsh

    params = list(problem.model.parameters())
    G: Any = GGNLinearOperator(problem.model, nn.CrossEntropyLoss(reduction="sum"), params, [problem.data])
    values = eigsh(G.to_scipy(), k=20, which="LM", tol=1e-4, return_eigenvectors=False)
    largest = float(values.max())  # without these bounds it looks for the smallest eigenvalue for minutes
    return torch.as_tensor(values), lanczos_approximate_spectrum(G, ncv=60, num_repeats=4, boundaries=(0.0, largest))


def largest_of(problem: Curved, answer: Any) -> dict[str, float]:
    """The sum of the twenty largest eigenvalues."""
    return {"sum of eigenvalues": float(answer[0].sum())}


# log det(G + I) to one per cent, as the evidence needs it.


def logdet_ours(problem: Curved) -> float:
    lin = co.linearize(problem.model, problem.data, "classification")
    post = co.laplace(lin, co.GGN, prior_precision=PRECISION, check_mode=False)
    return float(post.log_evidence(mode="map").log_determinant_ratio)


def logdet_theirs(problem: Curved) -> float:
    import linear_operator
    from curvlinops import GGNLinearOperator

    class Regularized(linear_operator.LinearOperator):
        def _matmul(self, rhs: Tensor) -> Tensor:
            return self._kwargs["G"] @ rhs + PRECISION * rhs

        def _size(self) -> torch.Size:
            return torch.Size(self._kwargs["G"].shape)

        def _transpose_nonbatch(self) -> Any:
            return self

    params = list(problem.model.parameters())
    G = GGNLinearOperator(problem.model, nn.CrossEntropyLoss(reduction="sum"), params, [problem.data])
    settings, P = linear_operator.settings, Regularized(torch.zeros(1, 1), G=G)
    with settings.num_trace_samples(30), settings.max_cg_iterations(20), settings.cg_tolerance(1e-3):
        return float(P.logdet())


def error_of(problem: Curved, value: float) -> dict[str, float]:
    """The relative error; the exact value comes from the formed kernel of the N·C outputs, in double precision."""
    lin = co.linearize(problem.model.double(), (problem.inputs.double(), problem.targets), "classification")
    post = co.laplace(lin, co.GGN, prior_precision=PRECISION, check_mode=False)
    exact = float(post.log_evidence(rtol=1e-4, mode="map").log_determinant_ratio)
    problem.model.float()
    return {"relative error": abs(value - exact) / exact}


CURVLINOPS = "curvlinops-for-pytorch"
CG = "linear_operator.utils.linear_cg"

TASKS = {
    "draws": Task(
        "64 posterior draws, full GGN of 97,260 weights, 1,000 points",
        many, draws_ours, draws_theirs, CURVLINOPS, ("curvlinops", CG), squares_of,
        lambda ours, theirs: all(abs(x["mean of zᵀPz/D"] - 1) <= CLOSE for x in (ours, theirs)),
    ),
    "spectrum": Task(
        "20 largest eigenvalues and spectral density of that GGN",
        many, spectrum_ours, spectrum_theirs, CURVLINOPS, ("curvlinops.papyan2020traces.spectrum",), largest_of,
        lambda ours, theirs: abs(ours["sum of eigenvalues"] / theirs["sum of eigenvalues"] - 1) <= 1e-3,
    ),
    "logdet": Task(
        "log det(G + I) of it for the evidence, 200 points",
        few, logdet_ours, logdet_theirs, CURVLINOPS, ("curvlinops", CG), error_of,
        lambda ours, theirs: ours["relative error"] <= CLOSE and theirs["relative error"] <= 2 * CLOSE,
    ),
}  # fmt: skip
