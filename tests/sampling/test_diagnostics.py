"""Effective sample sizes, R̂ and Stein discrepancies against closed forms, quadrature and brute force.

Tests the draws of chains in `state.py`.
"""

import itertools
import math
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

import curvops as co
from curvops.sampling.diagnostics import AT_A_TIME, autocorrelation, effective_size, effective_sizes, u_statistic

diagnostics = co.sampling.diagnostics


def autoregressive(chains: int, draws: int, rho: float, size: int = 1, seed: int = 0) -> Tensor:
    """Stationary x_t = ρ x_{t−1} + √(1 − ρ²) ξ of unit variance."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(draws, chains, size, generator=generator, dtype=torch.float64)
    x, found = noise[0], [noise[0]]
    for each in noise[1:]:
        x = rho * x + math.sqrt(1 - rho**2) * each
        found.append(x)
    return torch.stack(found, 1)


def test_rank_normalised_rhat_and_effective_sizes_are_arviz_own() -> None:
    import arviz

    draws = {"weight": autoregressive(4, 60, 0.5, 6).unflatten(2, (2, 3)), "bias": autoregressive(4, 60, 0.9)[..., 0]}
    for found, expected in [
        (diagnostics.rhat(draws), lambda a: arviz.rhat(a, method="rank")),
        (diagnostics.ess(draws), lambda a: arviz.ess(a, method="bulk")),
        (diagnostics.ess(draws, "tail"), lambda a: arviz.ess(a, method="tail")),
    ]:
        assert {name: t.shape for name, t in found.items()} == {"weight": (2, 3), "bias": ()}
        assert float(found["weight"][1, 2]) == expected(draws["weight"][:, :, 1, 2].numpy())
    data = diagnostics.to_inference_data(draws)
    assert data.posterior.sizes["chain"] == 4 and data.posterior.sizes["draw"] == 60
    assert np.shares_memory(data.posterior["weight"].values, draws["weight"].numpy())


def test_the_correlation_by_fourier_transform_is_the_mean_of_lagged_products() -> None:
    series = autoregressive(2, 17, 0.7, 3)
    moved = series - series.mean(1, keepdim=True)
    expected = torch.stack([(moved[:, : 17 - l] * moved[:, l:]).mean(1) for l in range(17)], 1)
    assert torch.allclose(autocorrelation(series), expected / expected[:, :1], atol=1e-12)


def test_effective_sizes_are_the_printed_sum_up_to_the_first_negative_term() -> None:
    series = autoregressive(3, 40, 0.8)[..., 0]
    rho = autocorrelation(series)
    for chain, found in zip(rho, effective_sizes(series)):
        total, lag = 0.0, 1
        while lag < 40 and chain[lag] >= 0:
            total, lag = total + (1 - lag / 40) * float(chain[lag]), lag + 1
        assert float(found) == pytest.approx(40 / (1 + 2 * total), rel=1e-12)


def test_chains_that_disagree_are_worth_few_draws_together() -> None:
    series = autoregressive(4, 200, 0.0)[..., 0]
    assert float(effective_size(series)) > 500
    assert float(effective_size(series + 10 * torch.arange(4.0).unsqueeze(1))) < 4
    assert float(effective_size(series[:, :1])) == 4
    assert float(effective_size(torch.zeros(2, 10))) <= 20


def test_projections_are_those_of_all_weights_in_one_vector() -> None:
    draws = {"a": autoregressive(3, 20, 0.5, 6).unflatten(2, (2, 3)), "b": autoregressive(3, 20, 0.5, 4, seed=1) + 1e6}
    found = diagnostics.random_projections(draws, 7, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    columns = [torch.randn(d, 7, generator=generator, dtype=torch.float64) for d in (6, 4)]
    series = sum((t.flatten(2) - t.flatten(2)[:1, :1]) @ omega for t, omega in zip(draws.values(), columns))
    assert torch.allclose(found.series, series, rtol=1e-9)
    within, total = series.var(1, correction=0).mean(0), series.flatten(0, 1).var(0, correction=0)
    assert found.r_squared is not None and torch.allclose(found.r_squared, total / within, rtol=1e-9)
    assert bool((found.r_squared >= 1).all()) and found.ess.shape == (3, 7)


def test_projections_of_entries_that_come_some_at_a_time_are_those_of_all() -> None:
    size = AT_A_TIME // 4
    draws = torch.randn(2, 4, size + 10, generator=torch.Generator().manual_seed(1)).double()
    found = diagnostics.random_projections(draws, 2, torch.Generator().manual_seed(0))
    generator, widths = torch.Generator().manual_seed(0), (size // 2, size // 2, 10)
    columns = torch.cat([torch.randn(width, 2, generator=generator, dtype=torch.float64) for width in widths])
    assert torch.allclose(found.series, (draws - draws[:1, :1]) @ columns, rtol=1e-9)


def test_r_squared_is_exactly_one_and_the_share_of_the_between_chain_variance() -> None:
    same = autoregressive(1, 30, 0.3).expand(2, -1, -1)
    found = diagnostics.random_projections(same, 2)
    assert found.r_squared is not None and torch.allclose(found.r_squared, torch.ones(2).double())
    apart = torch.cat([same[:1] - 3, same[:1] + 3])
    found = diagnostics.random_projections(apart, 2)
    ratio = 1 + 9 / float(same[0].var(correction=0))
    assert found.r_squared is not None and torch.allclose(found.r_squared, torch.tensor(ratio).double().expand(2))
    assert diagnostics.random_projections(same[:1], 2).r_squared is None


# The kernel Stein discrepancy


def brute_force(x: Tensor, score: Tensor, scale: float) -> Tensor:
    """u by automatic differentiation of the kernel, pair by pair."""
    n = len(x)

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (scale**2 + (a - b).square().sum()).rsqrt()

    a, b = x.repeat_interleave(n, 0).requires_grad_(), x.repeat(n, 1).requires_grad_()
    k = torch.stack([kernel(*pair) for pair in zip(a, b)])
    of_first, of_second = torch.autograd.grad(k.sum(), (a, b), create_graph=True)
    cross = sum(torch.autograd.grad(of_first[:, d].sum(), b, retain_graph=True)[0][:, d] for d in range(x.shape[1]))
    s, t = score.repeat_interleave(n, 0), score.repeat(n, 1)
    found = (s * t).sum(1) * k + (s * of_second).sum(1) + (t * of_first).sum(1) + cross
    return found.detach().view(n, n)


def test_the_discrepancy_is_that_of_the_kernel_s_own_derivatives() -> None:
    generator = torch.Generator().manual_seed(0)
    x, score = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)
    found = diagnostics.stein_discrepancy(x.unsqueeze(0), score.unsqueeze(0), 0.7)
    u = brute_force(x, score, 0.7)
    assert float(found.value) == pytest.approx(float((u.sum() - u.trace()) / 20), rel=1e-10)
    named = diagnostics.stein_discrepancy(
        {"a": x[:, :2].unsqueeze(0), "b": x[:, 2].unsqueeze(0)},
        {"a": score[:, :2].unsqueeze(0), "b": score[:, 2].unsqueeze(0)},
        0.7,
    )
    assert float(named.value) == pytest.approx(float(found.value), rel=1e-10)


def test_the_variance_of_a_u_statistic_is_the_one_over_distinct_quadruples() -> None:
    u = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3 * torch.arange(6.0)
    u = u + u.mT
    found = u_statistic(u)
    pairs = [float(u[i, j]) for i, j in itertools.permutations(range(6), 2)]
    four = [float(u[i, j] * u[k, l]) for i, j, k, l in itertools.permutations(range(6), 4)]
    mean = sum(pairs) / len(pairs)
    assert float(found.value) == pytest.approx(mean, rel=1e-12)
    assert float(found.stderr) ** 2 == pytest.approx(mean**2 - sum(four) / len(four), rel=1e-9)


def test_the_median_scale_is_the_median_distance() -> None:
    x = torch.randn(1, 9, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    median = float(torch.pdist(x[0]).sort().values[17])
    by_name, by_number = (diagnostics.stein_discrepancy(x, -x, scale) for scale in ("median", median))
    assert float(by_name.value) == pytest.approx(float(by_number.value), rel=1e-12)


def linear_chain():
    """Draws of a run on a linear model of 20 points, with its exact posterior."""
    x = torch.randn(20, 3, dtype=torch.float64)
    y = torch.randn(20, 1, dtype=torch.float64)
    model = torch.nn.Linear(3, 1, bias=False).double()
    log_posterior = co.sampling.log_posterior(model, co.likelihoods.Gaussian(0.5), prior_precision=2.0, data_size=20)
    batches = list(zip(x.split(8), y.split(8)))
    sampler = co.sampling.chains(co.sampling.sgld(log_posterior, 1e-2), 2)
    chain = co.sampling.run(sampler, log_posterior.params, batches, steps=5, progress=False)
    P = x.mT @ x / 0.5 + 2 * torch.eye(3, dtype=torch.float64)
    return log_posterior, chain, batches, P, torch.linalg.solve(P, x.mT @ y / 0.5).flatten()


def test_scores_are_those_of_the_summed_log_posterior() -> None:
    log_posterior, chain, batches, P, mode = linear_chain()
    found = diagnostics.scores(log_posterior, chain, batches)
    assert torch.allclose(found["weight"].flatten(2), -(chain.theta - mode) @ P, atol=1e-10)
    x, y = batches[0]
    part = diagnostics.scores(log_posterior, chain, batches[:1], part=True)["weight"].flatten(2)
    residual = y.flatten() - chain.theta @ x.mT
    assert torch.allclose(part, 20 / 8 * (residual @ x / 0.5) - 2.0 * chain.theta, atol=1e-10)
    assert diagnostics.stein_discrepancy(chain, found).samples == 10


# What a tired user gives

TWO = torch.randn(2, 8, 2, dtype=torch.float64)


def test_without_arviz_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match=r"pip install curvops\[diagnostics\]"):
        diagnostics.rhat(TWO)
    assert diagnostics.random_projections(TWO).ess.shape == (2, 100)
