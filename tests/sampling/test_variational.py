"""Variational families come to the known optimum of linear models; their parts are exact."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from curvops.sampling import Variational, VariationalState
from curvops.sampling.state import NoiseSource
from tests.sampling.linear_models import NOISE, PRIOR, exact, linear

N = 30
FAMILIES = ("diagonal", "dense", "low_rank_diagonal", "kronecker")


def known():
    """A linear model, its data, its log posterior, and its exact posterior: θ̄, P."""
    model, x, y = linear(N)
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(NOISE))
    return model, (x, y), co.sampling.log_posterior(lin, prior_precision=PRIOR), *exact(model, x, y)


def cubature(m: int) -> Tensor:
    """±√m e_i: 2m points whose mean is 0 and whose covariance is I, so that averages of quadratics are exact."""
    units = m**0.5 * torch.eye(m, dtype=torch.float64)
    return torch.cat([units, -units])


def numbers_of(sampler: Variational, state: VariationalState) -> Tensor:
    m = sampler.family.noise(
        state.structure, 1, state.theta, NoiseSource(state.random.clone(), state.theta.device)
    ).shape[1]
    return cubature(m)


def fitted(sampler: Variational, start, batch) -> VariationalState:
    """The optimum of the exact NELBO, by L-BFGS on cubature points: no sampling noise is left."""
    state = sampler.init(start, torch.Generator().manual_seed(0))
    tensors = [state.theta, *state.spread.values()]
    points = numbers_of(sampler, state)
    optimizer = torch.optim.LBFGS(
        tensors, 1.0, 400, tolerance_grad=1e-13, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        info, of_mean, of_spread, _ = sampler.gradients(state, batch, points)
        for tensor, slope in zip(tensors, [of_mean, *of_spread.values()]):
            tensor.grad = slope.clone()
        return info.nelbo

    for _ in range(3):
        optimizer.step(closure)
    return state


def covariance(sampler: Variational, state: VariationalState) -> Tensor:
    order = torch.arange(len(state.theta))
    return sampler.family.covariance(state.spread, state.structure, order)[0].to_dense()


@pytest.mark.usefixtures("annotations_unchecked")
def test_the_kronecker_family_comes_to_the_posterior_where_that_is_one() -> None:
    """Without a bias P = I ⊗ (XᵀX/σ² + λ), a Kronecker product."""
    _, (x, y), _, _, _ = known()
    model = nn.Linear(3, 2, bias=False).double()
    log_posterior = co.sampling.log_posterior(
        co.linearize(model, (x, y), co.likelihoods.Gaussian(NOISE)), prior_precision=PRIOR
    )
    sampler = co.sampling.vi(log_posterior, "kronecker", stick_the_landing=False, lr=1e-2)
    state = fitted(sampler, log_posterior.params, (x, y))
    A = torch.linalg.inv(x.mT @ x / NOISE + PRIOR * torch.eye(3).double()).contiguous()
    assert torch.allclose(covariance(sampler, state), torch.kron(torch.eye(2).double(), A), atol=1e-8)


@pytest.mark.usefixtures("annotations_unchecked")
def test_low_rank_plus_a_diagonal_comes_between_the_diagonal_and_the_dense_family() -> None:
    _, batch, log_posterior, mode, P = known()
    values = {}
    for family in ("diagonal", "low_rank_diagonal", "dense"):
        rank = {"rank": 8} if family == "low_rank_diagonal" else {}
        sampler = co.sampling.vi(log_posterior, family, stick_the_landing=False, lr=1e-2, **rank)
        state = fitted(sampler, log_posterior.params, batch)
        assert torch.allclose(state.theta, mode, atol=1e-5)
        values[family] = float(sampler.gradients(state, batch, numbers_of(sampler, state))[0].nelbo)
    full = values["dense"]
    assert full < values["diagonal"] - 1e-3
    assert full - 1e-9 <= values["low_rank_diagonal"] < full + 0.2 * (values["diagonal"] - full)
    d = len(mode)  # log evidence of the linear model, in nats a point: the least NELBO there is
    at_mode = log_posterior(state.structure.unflatten(mode), batch)
    exact = -(at_mode + (0.5 * d * torch.log(torch.tensor(2 * torch.pi)) - 0.5 * torch.logdet(P)) / N)
    assert full == pytest.approx(float(exact), abs=1e-8)


def test_kronecker_misfits_are_the_means_over_columns_and_rows_of_the_whole_one() -> None:
    """E[uZᵀ] in blocks: of tensors with one, two and three columns, by random numbers in place of their mean."""
    sampler = co.sampling.vi(lambda params, batch: -params["a"].sum(), "kronecker", lr=1e-2, data_size=1)
    params = {"a": torch.zeros(2, 3), "b": torch.zeros(3, 2), "c": torch.zeros(4)}
    structure = sampler.init(params, torch.Generator().manual_seed(0)).structure
    u, z = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = torch.einsum("ki,kj->ij", u, z) / 5
    found, start = sampler.family.misfits(structure, u, z), 0
    for i, (p, q) in enumerate([(2, 3), (3, 2), (4, 1)]):
        block = whole[start : start + p * q, start : start + p * q].view(p, q, p, q)
        start += p * q
        assert torch.allclose(found[f"left.{i}"], block.diagonal(dim1=1, dim2=3).mean(-1), atol=1e-12)
        if q > 1:
            assert torch.allclose(found[f"right.{i}"], block.diagonal(dim1=0, dim2=2).mean(-1), atol=1e-12)
    assert set(found) == {"left.0", "right.0", "left.1", "right.1", "left.2"}


def test_sticking_to_the_landing_has_no_noise_at_the_posterior() -> None:
    """Whatever is drawn, the gradient is zero where q is the posterior; with the score it is not."""
    _, batch, log_posterior, mode, P = known()
    sampler = co.sampling.vi(log_posterior, "dense", draws=1, lr=1e-2)
    state = sampler.init(log_posterior.params, torch.Generator().manual_seed(0))
    L = torch.linalg.cholesky(torch.linalg.inv(P))
    state.theta.copy_(mode)
    state.spread["factor"].copy_(L.tril(-1) + torch.diag(L.diagonal().log()))
    numbers = torch.randn(1, len(mode), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    _, of_mean, of_spread, _ = sampler.gradients(state, batch, numbers)
    assert float(of_mean.abs().max()) < 1e-12 and float(of_spread["factor"].abs().max()) < 1e-12
    scored = co.sampling.vi(log_posterior, "dense", stick_the_landing=False, lr=1e-2)
    _, of_mean, *_ = scored.gradients(state, batch, numbers)
    assert float(of_mean.abs().max()) > 1e-4


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("family", FAMILIES)
def test_misfits_are_zero_at_the_optimum_and_relative_errors_of_the_precision_elsewhere(family: str) -> None:
    """On cubature points, whose averages are exact: T^T P T − I, of which each family has its own part.

    The optimum is θ̄, with the covariance τP⁻¹ for the dense family, τ/diag(P) for the diagonal one.
    """
    _, batch, log_posterior, mode, P = known()
    rank = {"rank": 3} if family == "low_rank_diagonal" else {}
    sampler = co.sampling.vi(log_posterior, family, stick_the_landing=False, temperature=0.5, lr=1e-2, **rank)
    state = fitted(sampler, log_posterior.params, batch)
    assert torch.allclose(state.theta, mode, atol=1e-8 if family in ("dense", "diagonal") else 1e-5)
    if family in ("dense", "diagonal"):
        exact = torch.linalg.inv(P) if family == "dense" else torch.diag(1 / P.diagonal())
        assert torch.allclose(covariance(sampler, state), 0.5 * exact, atol=1e-8)
    points = numbers_of(sampler, state)

    def misfits():
        residual = sampler.gradients(state, batch, points)[3]
        return residual.mean(0), sampler.family.misfits(state.structure, residual, points)

    at_optimum = misfits()
    assert float(at_optimum[0].abs().max()) < 1e-5
    assert all(float(each.abs().max()) < 1e-4 for each in at_optimum[1].values())
    with torch.no_grad():  # every standard deviation times 1.5, the mean off
        if family == "dense":
            state.spread["factor"].copy_(1.5 * state.spread["factor"].tril(-1))
            state.spread["factor"].diagonal().copy_(0.4 + 0.2 * torch.arange(8) / 8)
        if family == "diagonal":
            state.spread["log_scale"].add_(0.1)
        state.theta.add_(0.1)
    mean, parts = misfits()
    if family == "dense":
        L = torch.linalg.cholesky(covariance(sampler, state))
        assert torch.allclose(mean, L.mT @ P @ (state.theta - mode) / 0.5, atol=1e-10)
        assert torch.allclose(parts["factor"], L.mT @ P @ L / 0.5 - torch.eye(8).double(), atol=1e-9)
    else:
        assert float(mean.abs().max()) > 0.1
    if family == "diagonal":
        assert torch.allclose(parts["log_scale"], torch.full_like(mean, math.expm1(0.2)), atol=1e-9)


@pytest.mark.usefixtures("annotations_unchecked")
def test_a_fit_is_settled_where_its_averaged_misfits_are_zero_within_their_standard_errors() -> None:
    """Of 100 numbers one that is off is seen alone; where its standard error covers it nothing is known."""
    sampler = co.sampling.vi(lambda params, batch: -0.5 * params.square().sum(), data_size=1)
    begun = sampler.init(torch.zeros(100, dtype=torch.float64), torch.Generator().manual_seed(0))
    centre = {"theta": begun.theta, **begun.spread}
    ending, few, many = co.sampling.FitEnding, 20, 10**6
    one = torch.zeros(100, dtype=torch.float64)
    one[3] = -0.3
    nothing, all_of_them = 0 * one, one[3].expand(100)
    for average, spread, steps, said in [
        (nothing, 0.0, many, ending.SETTLED),
        (nothing, 30.0, many, ending.SETTLED),
        (all_of_them / 6, 0.0, few, ending.SETTLED),
        (-all_of_them / 6, 0.0, few, ending.SETTLED),
        (one, 66.0, many, ending.SETTLED),
        (nothing, 1.0, few, ending.NOISY),
        (one, 0.0, few, ending.DRIFTING),
        (one, 1.0, many, ending.DRIFTING),
        (one, 1.0, few, ending.NOISY),
        (all_of_them, 0.0, few, ending.DRIFTING),
        (all_of_them / 3.2, 0.0, many, ending.SETTLED),  # the limit is a tenth
        (all_of_them / 2.8, 0.0, many, ending.DRIFTING),
        (nothing, 4.7, 1600, ending.SETTLED),  # of 1600 steps, 700 with equal weights
        (nothing, 5.3, 1600, ending.NOISY),
        (nothing, 0.0, 0, ending.NOISY),
    ]:
        step = torch.full_like(begun.step, steps)
        moments = {"average": {"mean": average}, "square": {"mean": average.square() + spread**2}}
        assert sampler.ending(replace(begun, step=step, centre=centre, **moments)) is said, (spread, steps, said)


def test_a_fit_says_whether_it_is_at_its_optimum() -> None:
    """Adam's steps of 1e-3 move a log scale by 0.15 in 150 steps, far less than it has to go."""
    model, batch, _, mode, P = known()

    def log_posterior(params, batch):
        gap = torch.cat([params["weight"].flatten(), params["bias"]]) - mode
        return -0.5 * gap @ P @ gap / N

    start = {"weight": mode[:6].view(2, 3), "bias": mode[6:]}
    endings = co.sampling.FitEnding
    cosine = co.sampling.Cosine(0.05, 400)
    for family, lr, steps, said in [
        ("dense", 1e-3, 150, endings.DRIFTING),
        ("diagonal", 0.1, 150, endings.SCATTERED),
        ("diagonal", cosine, 400, endings.SETTLED),
        ("kronecker", cosine, 1, endings.NOISY),
    ]:
        sampler = co.sampling.vi(log_posterior, family, lr=lr, data_size=N)
        generator = torch.Generator().manual_seed(0)
        state = co.sampling.run(sampler, start, [None], steps=steps, generator=generator, progress=False).state
        ratios = covariance(sampler, state).diagonal()
        ratios = ratios * P.diagonal() if family == "diagonal" else ratios / torch.linalg.inv(P).diagonal()
        off = float(ratios.log().abs().max())
        assert sampler.ending(state) is said, (family, lr, steps, off)
        assert (off < 0.2) == (said is endings.SETTLED), (family, lr, off)
        model.load_state_dict(state.params)
        lin = co.linearize(model, batch, co.likelihoods.Gaussian(NOISE))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sampler.posterior(state, lin)
        assert [said.value in str(each.message) for each in caught] == [True] * (said is not endings.SETTLED)


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("method", ["vi", "optimizer"])
@pytest.mark.parametrize("way", ["update", "run"])
def test_what_diverges_names_the_step_that_its_user_can_set(method: str, way: str) -> None:
    """The default lr of Adam, where none was given: 1e-3. After some steps the energy runs away, or is NaN."""
    _, batch, log_posterior, _, _ = known()
    calls = []

    def away(params, batch):
        calls.append(1)
        value = log_posterior(params, batch)
        return value * (torch.nan if len(calls) > 5 else 1.0) if way == "update" else value - 1e9 * (len(calls) > 5)

    make = co.sampling.vi if method == "vi" else lambda f, **given: co.sampling.optimizer(torch.optim.Adam, f, **given)
    with pytest.raises(co.errors.DivergenceError, match=r"lr=0\.001.*lr=0\.00025\.$") as caught:
        sampler = make(away, data_size=N)
        if way == "run":
            co.sampling.run(sampler, log_posterior.params, [batch], steps=30, progress=False)
        state = sampler.init(log_posterior.params)
        for _ in range(30):
            state, _ = sampler.update(state, batch)
    assert "step_size" not in str(caught.value)


def test_both_gradients_are_the_same_in_the_mean() -> None:
    """On cubature points they differ by the score's mean, which is zero for quadratic log q."""
    _, batch, log_posterior, _, _ = known()
    for family in FAMILIES:
        found = []
        for sticking in (True, False):
            rank = {"rank": 3} if family == "low_rank_diagonal" else {}
            sampler = co.sampling.vi(log_posterior, family, stick_the_landing=sticking, lr=1e-2, **rank)
            state = sampler.init(log_posterior.params, torch.Generator().manual_seed(0))
            found.append(sampler.gradients(state, batch, numbers_of(sampler, state)))
        (_, mean, spread, _), (_, other_mean, other_spread, _) = found
        assert torch.allclose(mean, other_mean, atol=1e-10)
        assert all(torch.allclose(spread[name], other_spread[name], atol=1e-10) for name in spread), family


@pytest.mark.parametrize("inputs", [3, 2, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_density_and_covariance_are_those_of_the_draws(family: str, inputs: int) -> None:
    _, _, log_posterior, _, _ = known()
    rank = {"rank": 3} if family == "low_rank_diagonal" else {}
    sampler = co.sampling.vi(log_posterior, family, lr=1e-2, **rank)
    params = {"weight": torch.zeros(6 // inputs, inputs).double(), "bias": torch.zeros(2).double()}
    state = sampler.init(params, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    spread = {
        name: t + 0.3 * torch.randn(t.shape, generator=generator, dtype=t.dtype) for name, t in state.spread.items()
    }
    points = numbers_of(sampler, state)
    z = sampler.family.transform(spread, state.structure, points)
    sigma, precision = sampler.family.covariance(spread, state.structure, torch.arange(8))
    dense = sigma.to_dense()
    assert torch.allclose(z.mT @ z / len(z), dense, atol=1e-10)
    expected = torch.distributions.MultivariateNormal(torch.zeros(8).double(), dense).log_prob(z)
    assert torch.allclose(sampler.family.log_density(spread, state.structure, z), expected, atol=1e-9)
    order = torch.tensor([3, 1, 7, 0, 2, 6, 5, 4])
    moved, inverse = sampler.family.covariance(spread, state.structure, order)
    assert torch.allclose(moved.to_dense(), dense[order][:, order], atol=1e-12)
    for given, matrix in ((precision, dense), (inverse, dense[order][:, order])):
        assert given is None or torch.allclose(given.to_dense(), torch.linalg.inv(matrix), atol=1e-8)


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.filterwarnings("ignore::curvops.sampling.UnsettledWarning")
def test_the_posterior_of_a_network_is_saved_and_follows_the_linearisation_s_order(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(20, 3).double(), torch.arange(20) % 2
    log_posterior = co.sampling.log_posterior(model, "classification", data_size=20)
    backwards = dict(reversed(log_posterior.params.items()))
    for family in FAMILIES:
        sampler = co.sampling.vi(log_posterior, family, lr=1e-2)
        state = sampler.init(backwards, torch.Generator().manual_seed(0))
        for _ in range(3):
            state, _ = sampler.update(state, (x, y))
        model.load_state_dict(state.params)
        post = sampler.posterior(state, co.linearize(model, (x, y), "classification"))
        dense = sampler.family.covariance(state.spread, state.structure, torch.arange(len(state.theta)))[0].to_dense()
        own = post.covariance.to_dense().diagonal()
        ours = {name: part.flatten() for name, part in state.structure.unflatten(dense.diagonal()).items()}
        assert torch.allclose(own, torch.cat([ours[name] for name in post.lin.model.selection.names]), atol=1e-14)
        assert post.probabilities(x).shape == (20, 2) and post.sample(3).shape == (3, 26)
        assert bool((post.uncertainty(x).epistemic > 0).all())
        post.save(tmp_path / family)
        loaded = co.load(tmp_path / family, model)
        assert torch.equal(loaded.predict(x).variance, post.predict(x).variance)
