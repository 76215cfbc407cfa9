"""Kalman filters are recursive least squares on linear models, in any order; forms are exact where they can be."""

import pickle

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from tests.sampling.linear_models import NOISE, PRIOR, N, exact, linear
from tests.zoo import ZOO
from tests.zoo import call as run_model

FORMS = ("diagonal", "dense", "low_rank_diagonal")


def known(model, likelihood=None, **given):
    likelihood = co.likelihoods.Gaussian(NOISE) if likelihood is None else likelihood
    return co.sampling.log_posterior(model, likelihood, data_size=N, **{"prior_precision": PRIOR, **given})


def filtered(sampler, x: Tensor, y: Tensor, start=None, size: int = 5, order=None):
    state = sampler.init(sampler.log_posterior.params if start is None else start, torch.Generator().manual_seed(0))
    parts = list(zip(x.split(size), y.split(size)))
    for i in range(len(parts)) if order is None else order:
        state, info = sampler.update(state, parts[i])
        assert bool(info.log_posterior.isfinite())
    return state


def matrix(sampler, state) -> Tensor:
    held = state.precision
    if sampler.form == "dense":
        return held["matrix"]
    found = torch.diag(held["diagonal"])
    return found if sampler.form == "diagonal" else found + held["root"] @ held["root"].mT


def zeros(sampler) -> dict[str, Tensor]:
    return {name: torch.zeros_like(t) for name, t in sampler.log_posterior.params.items()}


@pytest.mark.parametrize("form", ["dense", "low_rank_diagonal"])
def test_one_pass_is_the_posterior_of_a_linear_model_in_any_order(form: str) -> None:
    model, x, y = linear()
    mode, P = exact(model, x, y)
    rank = {"rank": 2 * N} if form == "low_rank_diagonal" else {}
    sampler = co.sampling.ekf(known(model), form, **rank)
    for order, size in ((None, 5), ([3, 0, 4, 1, 2], 5), (None, N), (None, 1)):
        state = filtered(sampler, x, y, zeros(sampler), size, order)
        assert torch.allclose(state.theta, mode, atol=1e-10)
        assert torch.allclose(matrix(sampler, state), P, atol=1e-10)


def test_a_cut_at_the_rank_of_the_data_loses_nothing_and_below_it_keeps_the_diagonal() -> None:
    model, x, y = linear()
    mode, P = exact(model, x, y)
    whole = co.sampling.ekf(known(model), "low_rank_diagonal")  # rank 10, of 8 weights
    state = filtered(whole, x, y, zeros(whole))
    assert state.precision["root"].shape == (8, 8)
    assert torch.allclose(matrix(whole, state), P, atol=1e-8) and torch.allclose(state.theta, mode, atol=1e-8)
    few = co.sampling.ekf(known(model), "low_rank_diagonal", rank=3)
    state = filtered(few, x, y, zeros(few), N)
    assert state.precision["root"].shape == (8, 3)
    assert torch.allclose(matrix(few, state).diagonal(), P.diagonal(), atol=1e-8)
    assert torch.allclose(state.theta, mode, atol=1e-10)  # the step is made before the cut


@pytest.mark.parametrize("fisher", ["ggn", "empirical"])
@pytest.mark.parametrize("form", FORMS)
def test_a_step_is_the_printed_formula(form: str, fisher: str) -> None:
    """On a network, with a transition and a rate: P = (P₀⁻¹ + q)⁻¹ + ε G, θ = θ₀ − ε P⁻¹ g, diagonals where asked."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x, y = torch.randn(6, 2).double(), torch.arange(6) % 2
    rank = {"rank": 40} if form == "low_rank_diagonal" else {}
    log_posterior = known(model, "classification")
    sampler = co.sampling.ekf(log_posterior, form, fisher=fisher, transition_noise=0.1, lr=0.3, **rank)
    state = sampler.init(log_posterior.params)
    P = PRIOR * torch.eye(17, dtype=torch.float64)
    for _ in range(2):
        lin = log_posterior.linearize(state.theta, (x, y))
        G = (co.EmpiricalFisher if fisher == "empirical" else co.GGN)(lin).to_dense()
        G = torch.diag(G.diagonal()) if form == "diagonal" else G
        P = torch.linalg.inv(torch.linalg.inv(P) + 0.1 * torch.eye(17).double()) + 0.3 * G
        expected = state.theta - 0.3 * torch.linalg.solve(P, lin.gradient())
        state, info = sampler.update(state, (x, y))
        assert torch.allclose(state.theta, expected, atol=1e-10)
        assert torch.allclose(matrix(sampler, state), P, atol=1e-10)
        assert float(info.log_posterior) == pytest.approx(float(lin.log_likelihood()) / 6, rel=1e-12)


NETWORKS = [
    "mlp", "transformer_encoder", "lstm", "embedding_padding", "linear_twice", "shared_parameter", "own_parameters",
    "function_pair", "numpy_backward",
]  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_one_pass_gives_what_three_give(name: str) -> None:
    """Log-likelihood, gradient and diagonal: shared layers, layers without a rule, positions, and at other weights."""
    model, inputs = ZOO[name].build()
    outputs = run_model(model, inputs).detach()
    targets, weights = torch.randn_like(outputs), torch.rand(len(outputs)).double()
    log_posterior = known(model, weights=True)
    for scale, fisher in ((1.0, "exact"), (1.1, "empirical")):
        sampler = co.sampling.ekf(log_posterior, fisher="empirical" if fisher == "empirical" else "ggn")
        batch = inputs, targets, weights
        before = sampler.init({name: scale * value for name, value in log_posterior.params.items()})
        after, info = sampler.update(before, batch)
        lin, P = log_posterior.linearize(before.theta, batch), after.precision["diagonal"]
        found = info.log_posterior * len(targets), (before.theta - after.theta) * P, P - PRIOR
        expected = lin.log_likelihood(), lin.gradient(), co.DiagonalGGN(lin, fisher=fisher).entries
        for value, wanted in zip(found, expected):
            torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-10)


def test_a_diagonal_step_runs_the_model_once() -> None:
    model, x, y = linear()
    runs = []
    network = nn.Sequential(model, nn.Tanh())
    network.register_forward_hook(lambda *_: runs.append(1))
    sampler = co.sampling.ekf(known(network))
    state = sampler.init(sampler.log_posterior.params)
    for _ in range(3):
        del runs[:]
        state, _ = sampler.update(state, (x, y))
    assert len(runs) == 1


@pytest.mark.parametrize("form", FORMS)
def test_the_posterior_has_the_filter_s_precision(form: str, tmp_path) -> None:
    model, x, y = linear()
    rank = {"rank": 3} if form == "low_rank_diagonal" else {}
    sampler = co.sampling.ekf(known(model), form, **rank)
    chain = co.sampling.run(sampler, zeros(sampler), list(zip(x.split(6), y.split(6))), steps=4, progress=False)
    state = chain.state
    model.load_state_dict(state.params)
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(NOISE))
    post = sampler.posterior(state, lin)
    P = matrix(sampler, state)
    J = lin.jacobian(x[:4]).to_dense()
    joint = J @ torch.linalg.inv(P) @ J.mT
    assert torch.allclose(post.predict(x[:4], joint=True).covariance_matrix, joint, atol=1e-10)
    assert torch.allclose(post.predict(x[:4]).variance.flatten(), joint.diagonal(), atol=1e-10)
    assert torch.allclose(post.precision.to_dense(), P, atol=1e-10)
    further, other = (each.update(state, (x, y))[0] for each in (sampler, pickle.loads(pickle.dumps(sampler))))
    assert torch.equal(further.theta, other.theta)
    post.save(tmp_path / "filter")
    assert torch.equal(co.load(tmp_path / "filter", model).predict(x).variance, post.predict(x).variance)


def test_a_prior_operator_is_the_dense_filter_s_start() -> None:
    model, _, _ = linear()
    root = torch.randn(8, 8, dtype=torch.float64)
    A = co.linalg.Dense(root @ root.mT + torch.eye(8).double(), psd=True)
    sampler = co.sampling.ekf(known(model, prior_precision=A), "dense")
    assert torch.allclose(sampler.init(sampler.log_posterior.params).precision["matrix"], A.to_dense())
    with pytest.raises(ValueError, match="use form='dense'"):
        diagonal = co.sampling.ekf(known(model, prior_precision=A))
        diagonal.init(diagonal.log_posterior.params)
