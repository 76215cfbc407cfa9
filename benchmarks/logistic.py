"""Logistic regression of a Pyro model: samplers of this library beside Pyro's NUTS.

    .venv-peers/bin/python -m benchmarks.logistic --page docs/samplers_measured.md

Scikit-learn's breast cancer data, 569 points and 8 standardised features, weights ~ N(0, 1). The density is a Pyro
model's; every sampler takes it as `log_posterior`, on all data or on batches of 64, and is judged by the moments of a
long NUTS run: the largest error of a mean in posterior standard deviations, the mean ratio of standard deviations, and
the kernel Stein discrepancy with the full score. The preconditioner is the covariance of the Laplace approximation.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.mcmc import MCMC, NUTS
from sklearn.datasets import load_breast_cancer
from torch import Tensor

import curvops as co
from benchmarks.machine import facts
from benchmarks.report import publish
from benchmarks.tables import machine_line, table

FEATURES, BATCH, CHAINS = 8, 64, 4
STEPS, WARMUP, THIN = 4_000, 500, 8
REFERENCE, REFERENCE_WARMUP = 4_000, 500


def data() -> tuple[Tensor, Tensor]:
    """Standardised features (N, 8) and labels (N,), float64."""
    x, y = load_breast_cancer(return_X_y=True)
    x = torch.tensor(x[:, :FEATURES])
    return (x - x.mean(0)) / x.std(0), torch.tensor(y, dtype=torch.float64)


def model(x: Tensor, y: Tensor, size: int) -> None:
    """The Pyro model of `size` points, of which some are seen."""
    w = pyro.sample("w", dist.Normal(x.new_zeros(FEATURES), 1.0).to_event(1))
    b = pyro.sample("b", dist.Normal(x.new_zeros(()), 1.0))
    with pyro.plate("points", size, subsample=torch.arange(len(x))):  # counts each point size/len(x) times
        pyro.sample("y", dist.Bernoulli(logits=x @ w + b), obs=y)


@dataclass(frozen=True)
class PyroDensity:
    """(params, batch) -> the model's log density over N, which is mean log-likelihood + log prior / N."""

    data_size: int

    def __call__(self, params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        conditioned = pyro.poutine.condition(model, data=params)
        total = pyro.poutine.trace(conditioned).get_trace(*batch, self.data_size).log_prob_sum()
        return total / self.data_size


def nuts(x: Tensor, y: Tensor, draws: int, warmup: int) -> tuple[Tensor, float]:
    """Draws (draws, 9) of Pyro's NUTS, and its seconds."""
    pyro.set_rng_seed(0)
    begin = time.perf_counter()
    mcmc = MCMC(NUTS(model), num_samples=draws, warmup_steps=warmup, disable_progbar=True)
    mcmc.run(x, y, len(x))
    found = mcmc.get_samples()
    return torch.cat([found["b"][:, None], found["w"]], 1), time.perf_counter() - begin


def mode(density: PyroDensity, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The posterior's mode, and the covariance of its Laplace approximation."""
    params = {"b": x.new_zeros(()), "w": x.new_zeros(FEATURES)}

    def flat(theta: Tensor) -> Tensor:
        return -density({"b": theta[0], "w": theta[1:]}, (x, y))

    theta = torch.cat([params["b"][None], params["w"]])
    for _ in range(20):
        hessian = torch.autograd.functional.hessian(flat, theta)
        theta = theta - torch.linalg.solve(hessian, torch.autograd.functional.jacobian(flat, theta))
    return {"b": theta[0], "w": theta[1:]}, hessian.inverse() / len(x)


def samplers(
    density: PyroDensity, mean: dict[str, Tensor], covariance: Tensor, largest: float
) -> dict[str, tuple[Any, bool]]:
    """The samplers by name, and whether they take minibatches; `largest` is the greatest curvature of −log_posterior.

    Steps are shares of the limit of stability; preconditioned by the covariance times N, the curvature is 1. The
    Gaussian of pCN is the Laplace approximation.
    """
    D = co.linalg.Dense(covariance * density.data_size, psd=True)
    s = co.sampling
    second = largest**-0.5
    return {
        "HMC": (s.hmc(density, 1.0, leapfrog_steps=5, preconditioner=D), False),
        "LMC": (s.lmc(density, 0.7, refreshment=0.5, preconditioner=D), False),
        "pCN": (s.pcn(density, 0.9, covariance=co.linalg.Dense(covariance, psd=True), mean=mean), False),
        "SGLD": (s.sgld(density, 0.2 / largest), False),
        "SGLD, preconditioned": (s.sgld(density, 0.1, preconditioner=D), False),
        "SGHMC": (s.sghmc(density, 0.2 * second, alpha=second**-1), False),
        "SGNHT": (s.sgnht(density, 0.2 * second, alpha=second**-1), False),
        "BAOA": (s.baoa(density, 0.5 * second, alpha=0.3 * second**-1), False),
        "BAOA, preconditioned": (s.baoa(density, 0.5, alpha=1.0, preconditioner=D), False),
        "SGLD, batches": (s.sgld(density, 0.02 / largest), True),
        "BAOA, batches": (s.baoa(density, 0.1 * second, alpha=second**-1), True),
        "BAOA, preconditioned, batches": (s.baoa(density, 0.1, alpha=1.0, preconditioner=D), True),
    }


def main() -> None:
    """Run NUTS and every sampler; print or write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.logistic", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--reference", type=int, default=REFERENCE, help="draws of NUTS")
    parser.add_argument("--page", type=Path, default=None, metavar="FILE", help="whose section is filled")
    arguments = parser.parse_args()
    machine = machine_line({"machine": facts(torch.get_num_threads())})
    warnings.simplefilter("ignore", co.sampling.NotVectorized)
    pyro.enable_validation(False)
    x, y = data()
    density = PyroDensity(len(x))
    reference, seconds = nuts(x, y, arguments.reference, REFERENCE_WARMUP)
    start, covariance = mode(density, x, y)
    largest = float(torch.linalg.eigvalsh(covariance.inverse() / len(x)).max())
    rows = [row("NUTS (Pyro)", reference.unsqueeze(0), reference, seconds, density, (x, y))]
    generator = torch.Generator().manual_seed(0)
    for name, (sampler, batched) in samplers(density, start, covariance, largest).items():
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, y),
            batch_size=BATCH if batched else len(x),
            shuffle=batched,
            drop_last=batched,
            generator=generator,
        )
        begin = time.perf_counter()
        chain = co.sampling.run(
            co.sampling.chains(sampler, CHAINS),
            start,
            loader if batched else [(x, y)],
            steps=arguments.steps,
            warmup=WARMUP,
            thin=THIN,
            generator=generator,
            progress=False,
        )
        rows.append(row(name, chain.theta, reference, time.perf_counter() - begin, density, (x, y)))
    heads = [
        "sampler",
        "largest error of a mean",
        "ratio of standard deviations",
        "Stein discrepancy",
        "least ESS",
        "seconds",
    ]
    publish(arguments.page, "logistic", f"{table(heads, rows)}\n\n{machine}")


def row(
    name: str, draws: Tensor, reference: Tensor, seconds: float, density: PyroDensity, batch: tuple[Tensor, Tensor]
) -> list[str]:
    """Moments of draws (k, S, 9) against the reference, and their discrepancy and effective sample size."""
    flat = draws.flatten(0, 1)
    spread = reference.std(0)
    error = ((flat.mean(0) - reference.mean(0)) / spread).abs().max()
    ratio = (flat.std(0) / spread).mean()
    some = flat[:: max(1, len(flat) // 500)]
    scores = torch.stack([score(density, theta, batch) for theta in some])
    found = co.sampling.diagnostics.stein_discrepancy(some.unsqueeze(0), scores.unsqueeze(0))
    size = co.sampling.diagnostics.ess({"theta": draws})["theta"].min()
    cells = [f"{error:.3f}", f"{ratio:.3f}", f"{found.value:.3f} ± {found.stderr:.3f}", f"{size:,.0f}"]
    return [name, *cells, f"{seconds:.1f}"]


def score(density: PyroDensity, theta: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The gradient of the full log density."""
    theta = theta.detach().requires_grad_()
    value = density.data_size * density({"b": theta[0], "w": theta[1:]}, batch)
    return torch.autograd.grad(value, theta)[0]


if __name__ == "__main__":
    main()
