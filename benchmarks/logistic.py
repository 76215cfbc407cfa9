"""Logistic regression with a Pyro model: samplers of this library compared with Pyro's NUTS.

    .venv-peers/bin/python -m benchmarks.logistic

Scikit-learn's breast cancer data, 569 points and 8 standardised features, weights ~ N(0, 1). The density is a Pyro
model's; every sampler takes it as `log_posterior`, on all data or on batches of 64. Each is judged by the moments of a
long NUTS run: the largest error of a mean in posterior standard deviations, the mean ratio of standard deviations, and
the kernel Stein discrepancy with the full score. The preconditioner is the covariance of the Laplace approximation.
Pyro is imported only where it is used, so that the table can be made again without it.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor

import curvops as co
from benchmarks import study_page
from benchmarks.tables import table

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
    import pyro
    import pyro.distributions as dist

    w = pyro.sample("w", dist.Normal(x.new_zeros(FEATURES), 1.0).to_event(1))
    b = pyro.sample("b", dist.Normal(x.new_zeros(()), 1.0))
    with pyro.plate("points", size, subsample=torch.arange(len(x))):  # counts each point size/len(x) times
        pyro.sample("y", dist.Bernoulli(logits=x @ w + b), obs=y)


@dataclass(frozen=True)
class PyroDensity:
    """(params, batch) -> the model's log density over N, which is mean log-likelihood + log prior / N."""

    data_size: int

    def __call__(self, params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        import pyro

        conditioned = pyro.poutine.condition(model, data=params)
        total = pyro.poutine.trace(conditioned).get_trace(*batch, self.data_size).log_prob_sum()
        return total / self.data_size


def nuts(x: Tensor, y: Tensor, draws: int, warmup: int) -> tuple[Tensor, float]:
    """Draws (draws, 9) of Pyro's NUTS, and its seconds."""
    import pyro
    from pyro.infer.mcmc import MCMC, NUTS

    pyro.set_rng_seed(0)
    pyro.enable_validation(False)
    begin = time.process_time()
    mcmc = MCMC(NUTS(model), num_samples=draws, warmup_steps=warmup, disable_progbar=True)
    mcmc.run(x, y, len(x))
    found = mcmc.get_samples()
    return torch.cat([found["b"][:, None], found["w"]], 1), time.process_time() - begin


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


def study(steps: int, reference: int) -> dict[str, Any]:
    """NUTS and every sampler, by name: what `judged` says, and seconds of the process."""
    warnings.simplefilter("ignore", co.sampling.NotVectorizedWarning)
    x, y = data()
    density = PyroDensity(len(x))
    exact, seconds = nuts(x, y, reference, REFERENCE_WARMUP)
    start, covariance = mode(density, x, y)
    largest = float(torch.linalg.eigvalsh(covariance.inverse() / len(x)).max())
    found = {"NUTS (Pyro)": judged(exact.unsqueeze(0), exact, density, (x, y)) | {"seconds": seconds}}
    generator = torch.Generator().manual_seed(0)
    for name, (sampler, batched) in samplers(density, start, covariance, largest).items():
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, y),
            batch_size=BATCH if batched else len(x),
            shuffle=batched,
            drop_last=batched,
            generator=generator,
        )
        begin = time.process_time()
        chain = co.sampling.run(
            co.sampling.chains(sampler, CHAINS),
            start,
            loader if batched else [(x, y)],
            steps=steps,
            warmup=WARMUP,
            thin=THIN,
            generator=generator,
            progress=False,
        )
        seconds = time.process_time() - begin
        found[name] = judged(chain.theta, exact, density, (x, y)) | {"seconds": seconds}
        print(name, found[name], flush=True)
    return found


def judged(draws: Tensor, reference: Tensor, density: PyroDensity, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Moments of draws (k, S, 9) against the reference, their discrepancy and effective sample size."""
    flat = draws.flatten(0, 1)
    spread = reference.std(0)
    some = flat[:: max(1, len(flat) // 500)]
    scores = torch.stack([score(density, theta, batch) for theta in some])
    stein = co.sampling.diagnostics.stein_discrepancy(some.unsqueeze(0), scores.unsqueeze(0))
    return {
        "mean": float(((flat.mean(0) - reference.mean(0)) / spread).abs().max()),
        "deviation": float((flat.std(0) / spread).mean()),
        "stein": {"value": float(stein.value), "stderr": float(stein.stderr)},
        "ess": float(co.sampling.diagnostics.ess({"theta": draws})["theta"].min()),
    }


def results_table(found: dict[str, Any]) -> str:
    """A row a sampler."""
    heads = ["sampler", "largest error of a mean", "ratio of standard deviations", "Stein discrepancy", "least ESS"]
    rows = [
        [
            name,
            f"{row['mean']:.3f}",
            f"{row['deviation']:.3f}",
            f"{row['stein']['value']:.3f} ± {row['stein']['stderr']:.3f}",
            f"{row['ess']:,.0f}",
            f"{row['seconds']:.1f}",
        ]
        for name, row in found.items()
    ]
    return table([*heads, "seconds"], rows)


def score(density: PyroDensity, theta: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The gradient of the full log density."""
    theta = theta.detach().requires_grad_()
    value = density.data_size * density({"b": theta[0], "w": theta[1:]}, batch)
    return torch.autograd.grad(value, theta)[0]


STUDY = study_page.Study(
    "logistic",
    __doc__,
    study,
    {"logistic": results_table},
    "docs/samplers_measured.md",
    options={"steps": (STEPS, "of each chain"), "reference": (REFERENCE, "draws of NUTS")},
)

if __name__ == "__main__":
    STUDY.run()
