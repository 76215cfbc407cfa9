"""Sampling and filtering tasks, compared with the package posteriors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import curvops as co
from benchmarks.networks import linear_layers
from benchmarks.tasks.task import Task

S = co.sampling
PRECISION = 100.0
"""Of the filter's prior."""
STEP, FRICTION, STEPS, CHAINS, THIN = 1e-2, 1.0, 10_000, 16, 10


@dataclass
class Regression:
    """A network and its data."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor

    @property
    def points(self) -> int:
        return len(self.inputs)


def sine() -> Regression:
    """61 weights, 100 points."""
    torch.manual_seed(0)
    x = torch.linspace(-3, 3, 100).unsqueeze(1)
    return Regression(linear_layers(1, 20, 1), x, x.sin() + 0.1 * torch.randn(100, 1))


def stream() -> Regression:
    """3,855 weights, 500 points."""
    torch.manual_seed(0)
    x = torch.randn(500, 20)
    return Regression(linear_layers(20, 50, 50, 5), x, x[:, :5].sin())


# 10,000 steps of SGHMC, 16 chains. Both keep every tenth draw.


def sghmc_ours(problem: Regression) -> Tensor:
    f = S.log_posterior(problem.model, co.likelihoods.Gaussian(noise=1.0), data_size=problem.points)
    sampler = S.chains(S.sghmc(f, STEP, alpha=FRICTION), CHAINS)
    data = [(problem.inputs, problem.targets)]
    chain = S.run(
        sampler, f.params, data, steps=STEPS, thin=THIN, generator=torch.Generator(problem.inputs.device).manual_seed(0)
    )
    return chain.theta


def sghmc_theirs(problem: Regression) -> Tensor:
    import posteriors

    data, N = (problem.inputs, problem.targets), problem.points

    def of_chain(params: Any, batch: Any) -> Tensor:
        squares = (torch.func.functional_call(problem.model, params, (batch[0],)) - batch[1]).square().sum()
        return -0.5 * (squares + sum(p.square().sum() for p in params.values())) / N

    def log_posterior(params: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return torch.func.vmap(of_chain, in_dims=(0, None))(params, batch).sum(), torch.tensor([])

    torch.manual_seed(0)
    sampler = posteriors.sgmcmc.sghmc.build(log_posterior, lr=STEP, alpha=FRICTION, temperature=1 / N)
    start = {name: p.detach().expand(CHAINS, *p.shape).clone() for name, p in problem.model.named_parameters()}
    state = sampler.init(start)
    kept = []
    for i in range(STEPS):
        state, _ = sampler.update(state, data, inplace=True)
        if i % THIN == THIN - 1:
            kept.append(torch.cat([p.flatten(1) for p in state.params.values()], 1))
    return torch.stack(kept, 1)


def likelihood_of(problem: Regression, draws: Tensor) -> dict[str, float]:
    """The mean square of residuals over the second half of the draws (chains, kept, D)."""
    half = draws[:, draws.shape[1] // 2 :].flatten(0, 1)[::8]
    shapes = {name: p.shape for name, p in problem.model.named_parameters()}

    def squares(draw: Tensor) -> Tensor:
        parts = draw.split([shape.numel() for shape in shapes.values()])
        params = {name: part.view(shapes[name]) for name, part in zip(shapes, parts)}
        return (torch.func.functional_call(problem.model, params, (problem.inputs,)) - problem.targets).square().mean()

    return {"mean square": float(torch.vmap(squares)(half).mean())}


# A pass of the diagonal extended Kalman filter, point by point.


def ekf_ours(problem: Regression) -> Tensor:
    f = S.log_posterior(
        problem.model, co.likelihoods.Gaussian(noise=1.0), prior_precision=PRECISION, data_size=problem.points
    )
    ekf = S.ekf(f, fisher="empirical")
    state = ekf.init(f.params)
    for x, y in zip(problem.inputs.split(1), problem.targets.split(1)):
        state, _ = ekf.update(state, (x, y))
    return torch.cat([p.flatten() for p in state.params.values()])


def ekf_theirs(problem: Regression) -> Tensor:
    import posteriors

    def log_likelihood(params: Any, batch: Any) -> tuple[Tensor, Tensor]:
        outputs = torch.func.functional_call(problem.model, params, (batch[0],))
        return -0.5 * (outputs - batch[1]).square().sum(1), outputs

    ekf = posteriors.ekf.diag_fisher.build(log_likelihood, lr=1.0, per_sample=True, init_sds=PRECISION**-0.5)
    state = ekf.init({name: p.detach().clone() for name, p in problem.model.named_parameters()})
    for x, y in zip(problem.inputs.split(1), problem.targets.split(1)):
        state, _ = ekf.update(state, (x, y))
    return torch.cat([p.flatten() for p in state.params.values()])


def norm_of(problem: Regression, weights: Tensor) -> dict[str, float]:
    """The norm of the weights at the end."""
    return {"norm": float(weights.norm())}


TASKS = {
    "sghmc": Task(
        "10,000 steps of SGHMC, 16 chains, 61 weights",
        sine, sghmc_ours, sghmc_theirs, "posteriors", ("posteriors",), likelihood_of,
        lambda ours, theirs: abs(ours["mean square"] / theirs["mean square"] - 1) <= 0.05,
    ),
    "ekf": Task(
        "a diagonal EKF over 500 points, 3,855 weights",
        stream, ekf_ours, ekf_theirs, "posteriors", ("posteriors",), norm_of,
        lambda ours, theirs: abs(ours["norm"] / theirs["norm"] - 1) <= 1e-3,
    ),
}  # fmt: skip
