"""Targets that are missing, and weights of single targets, against the loss over the observed entries by autograd.

Tests `independent.py`, `likelihood.py`.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Normal, Poisson

import curvops as co
from curvops.errors import NoiseWarning
from tests.network.definitions import TIGHT, normal
from tests.zoo import dense_jacobian

N, T, C = 9, 3, 2
NOISE = torch.tensor([0.5, 1.7], dtype=torch.float64)
LIKELIHOODS = co.likelihoods
LogFactors = Callable[[Tensor, Tensor], Tensor]


def noisy(f: Tensor, y: Tensor) -> Tensor:
    m = y.shape[-1]
    return Normal(f[..., :m], (0.5 * f[..., m:]).exp()).log_prob(y)


TARGETS = {
    "numbers": lambda shape: normal(*shape, seed=1),
    "labels": lambda shape: (normal(*shape, seed=1) > 0).double(),
    "counts": lambda shape: normal(*shape, seed=1).abs().round(),
}
MEMBERS: dict[str, tuple[Callable[..., co.likelihoods.Likelihood], LogFactors, str]] = {
    "gaussian": (lambda **k: LIKELIHOODS.Gaussian(0.7, **k), lambda f, y: Normal(f, 0.7**0.5).log_prob(y), "numbers"),
    "gaussian per output": (
        lambda **k: LIKELIHOODS.Gaussian(NOISE, **k),
        lambda f, y: Normal(f, NOISE.sqrt()).log_prob(y),
        "numbers",
    ),
    "bernoulli": (LIKELIHOODS.Bernoulli, lambda f, y: Bernoulli(logits=f).log_prob(y), "labels"),
    "poisson": (LIKELIHOODS.Poisson, lambda f, y: Poisson(f.exp()).log_prob(y), "counts"),
    "heteroscedastic": (LIKELIHOODS.HeteroscedasticGaussian, noisy, "numbers"),
}
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "rows": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, C)), (N, 4)),
    "sequences": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, C)), (N, T, 4)),
}
WAYS = ("missing", "weights", "missing and weights", "missing and weights of points")
CASES = [(member, "rows", "missing") for member in MEMBERS]
CASES += [(member, "sequences", "missing and weights") for member in MEMBERS]
CASES += [(member, "rows", way) for member in ("gaussian per output", "heteroscedastic") for way in WAYS[1:]]
CASES += [("gaussian per output", "sequences", way) for way in ("missing", "missing and weights of points")]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """The network that is made with this seed, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().double()


def case(member: str, model: str, way: str) -> tuple[nn.Module, Tensor, Tensor, Tensor, co.linearize, LogFactors]:
    """The model, inputs, targets without gaps, the weight of each target, lin, and log p."""
    make, log_factors, kind = MEMBERS[member]
    net, x = seeded(MODELS[model][0]), normal(*MODELS[model][1])
    shape = (*x.shape[:-1], C // 2 if member == "heteroscedastic" else C)
    y, gone = TARGETS[kind](shape), normal(*shape, seed=2) > 0.5
    gone[0] = True  # nothing is known of this point
    w = torch.ones_like(y)
    data: tuple[Tensor, ...] = (x, y)
    if "weights" in way:
        w = normal(*shape, seed=3).abs()
        w[1] = 0
        data = (x, y, w)
    if "points" in way:
        of_points = 1.0 + normal(N, seed=4).abs()
        w = of_points.reshape(N, *[1] * (y.ndim - 1)).expand_as(y)
        data = (x, y, of_points)
    options = {}
    if "missing" in way:
        options, w = {"missing": "ignore"}, w * ~gone
        data = (x, y.masked_fill(gone, math.nan), *data[2:])
    lin = co.linearize(net, data, make(**options), weights=len(data) == 3)
    return net, x, y, w, lin, log_factors


def by_autograd(net: nn.Module, x: Tensor, y: Tensor, w: Tensor, log_factors: LogFactors) -> tuple[Tensor, ...]:
    """The log-likelihood over the entries that count, its gradient, and its Hessian in the outputs, entry by entry."""
    counts = w != 0
    f = net(x)
    score = (w * log_factors(f, y))[counts].sum()
    gradient = torch.autograd.grad(-score, list(net.parameters()), retain_graph=True)
    g = f.detach().requires_grad_()
    (slope,) = torch.autograd.grad(-(w * log_factors(g, y))[counts].sum(), g, create_graph=True)
    curvature = torch.autograd.grad(slope.sum(), g)[0]
    return score.detach(), torch.cat([part.flatten() for part in gradient]), slope.detach(), curvature


@pytest.mark.parametrize(("member", "model", "way"), CASES)
def test_sums_over_the_data_are_those_of_the_observed_targets(member: str, model: str, way: str) -> None:
    net, x, y, w, lin, log_factors = case(member, model, way)
    score, gradient, slope, curvature = by_autograd(net, x, y, w, log_factors)
    if member == "heteroscedastic":  # its H is the Fisher
        s = net(x).detach()[..., 1:]
        curvature = w.repeat_interleave(2, -1) * torch.cat([(-s).exp(), torch.full_like(s, 0.5)], -1)
    J = dense_jacobian(net, x)
    torch.testing.assert_close(lin.log_likelihood(), score, **TIGHT)
    torch.testing.assert_close(lin.gradient(), gradient, **TIGHT)
    G = J.mT @ (curvature.reshape(-1, 1) * J)
    torch.testing.assert_close(co.GGN(lin).to_dense(), G, **TIGHT)
    torch.testing.assert_close(co.DiagonalGGN(lin).to_dense().diagonal(), G.diagonal(), **TIGHT)
    rows = torch.einsum("nc,ncd->nd", slope.reshape(N, -1), J.unflatten(0, (N, -1)))
    largest = w.flatten(1).amax(1)  # of the observed targets
    empirical = torch.einsum("nd,n,ne->de", rows, (1 / largest).where(largest > 0, 0), rows)
    torch.testing.assert_close(co.EmpiricalFisher(lin).to_dense(), empirical, **TIGHT)
    precision = G + 0.3 * torch.eye(len(G), dtype=G.dtype)
    evidence = score - 0.15 * lin.theta.square().sum() - 0.5 * (precision.logdet() - len(G) * math.log(0.3))
    post = co.laplace(lin, co.GGN, 0.3, check_mode=False)
    torch.testing.assert_close(post.log_evidence().value, evidence, **TIGHT)


FACTORS = [(member, co.KFAC, fisher) for member in MEMBERS for fisher in ("exact", "mc", "empirical")]
FACTORS += [(member, co.EKFAC, fisher) for member in ("gaussian", "bernoulli") for fisher in ("mc", "empirical")]


@pytest.mark.parametrize(("member", "kind", "fisher"), FACTORS)
def test_factors_of_missing_targets_are_those_of_weights_zero(member: str, kind: type, fisher: str) -> None:
    """One layer: the inputs of points that have an observed target, and the Fisher of the outputs, in closed form."""
    make, _, targets = MEMBERS[member]
    m = C // 2 if member == "heteroscedastic" else C
    net = seeded(lambda: nn.Linear(4, C, bias=False))
    x, y, gone = normal(N, 4), TARGETS[targets]((N, m)), normal(N, m, seed=2) > 0.5
    gone[0] = True
    holes, w = y.masked_fill(gone, math.nan), normal(N, m, seed=3).abs() * torch.where(gone, 100.0, 1.0)
    hollow, weighted = co.linearize(net, (x, holes), make(missing="ignore")), (~gone).double()
    pairs = [
        (hollow, co.linearize(net, (x, y, weighted), make(), weights=True)),
        (
            co.linearize(net, (x, holes, w), make(missing="ignore"), weights=True),
            co.linearize(net, (x, y, w * weighted), make(), weights=True),
        ),
    ]
    for pair in pairs:
        found, expected = (
            kind(lin, fisher=fisher, generator=torch.Generator().manual_seed(1)).to_dense() for lin in pair
        )
        torch.testing.assert_close(found, expected, **TIGHT)
    if fisher == "exact" and kind is co.KFAC:
        f, seen = net(x).detach(), ~gone.all(1)
        H = make().hessian_product(f, torch.ones_like(f), y) * (~gone).double().repeat(1, C // m)
        A = x[seen].mT @ x[seen] / seen.sum()
        torch.testing.assert_close(kind(hollow).to_dense(), torch.kron(torch.diag(H.sum(0)), A), **TIGHT)


@pytest.mark.parametrize("noise", [None, "per_output"])
def test_the_noise_is_that_of_the_observed_residuals(noise: str | None) -> None:
    net, x = nn.Linear(4, C).double(), normal(N, 4)
    y, gone = normal(N, C, seed=1), normal(N, C, seed=2) > 0.5
    lin = co.linearize(net, (x, y.masked_fill(gone, math.nan)), LIKELIHOODS.Gaussian(noise, missing="ignore"))
    squares = ((net(x).detach() - y).square() * ~gone).sum(0)
    expected = squares / (~gone).sum(0) if noise else squares.sum() / (~gone).sum()
    torch.testing.assert_close(lin.likelihood.noise, expected, rtol=1e-3, atol=0)
    assert repr(lin.likelihood).endswith("estimated, missing='ignore')")


def test_the_noise_of_an_output_without_targets_counts_as_one() -> None:
    net, x, y = nn.Linear(4, C).double(), normal(N, 4), normal(N, C, seed=1)
    y[:, 1] = math.nan
    with pytest.warns(NoiseWarning, match=r"noise of outputs \[1\] is unknown, since all their targets are missing"):
        lin = co.linearize(net, (x, y), LIKELIHOODS.Gaussian("per_output", missing="ignore"))
    expected = (net(x).detach() - y).square().mean(0).nan_to_num(1.0)
    torch.testing.assert_close(lin.likelihood.noise, expected, rtol=1e-3, atol=0)
    with pytest.warns(NoiseWarning, match=r"noise of outputs \[1\] is unknown"):
        noise = co.laplace(lin, co.GGN, 1.0).lin.likelihood.noise  # of left-out points
    assert noise[1] == 1 and bool((noise >= expected * 0.999).all())
    with pytest.warns(NoiseWarning, match="its residuals do not show it: it has no targets"):
        co.linearize(net, (x, y * math.nan), LIKELIHOODS.Gaussian(missing="ignore"))


@pytest.mark.filterwarnings("ignore::curvops.errors.ModeWarning")
@pytest.mark.parametrize("update", ["mackay", "em"])
def test_tuning_counts_the_observed_targets(update: str) -> None:
    x, y, gone = normal(40, 4), normal(40, C, seed=1), normal(40, C, seed=2) > 0.5
    y = y + 2 * x[:, :C]
    net = seeded(lambda: nn.Linear(4, C))
    hollow = co.linearize(net, (x, y.masked_fill(gone, math.nan)), LIKELIHOODS.Gaussian(1.0, missing="ignore"))
    weighted = co.linearize(net, (x, y, (~gone).double()), LIKELIHOODS.Gaussian(1.0), weights=True)
    tuned = [
        co.evidence.mackay(
            co.laplace(lin, co.GGN, 1.0, check_mode=False), samples=None, steps=200, update=update, tune_noise=True
        )
        for lin in (hollow, weighted)
    ]
    assert tuned[0].tuning.targets == pytest.approx(int((~gone).sum()))
    for name in ("observation_noise", "prior_precision"):
        torch.testing.assert_close(*(torch.as_tensor(getattr(post, name)) for post in tuned), rtol=1e-8, atol=0)


def test_test_targets_may_be_missing_too() -> None:
    _, x, y, *_, lin, _ = case("gaussian per output", "rows", "missing")
    post = co.laplace(lin, co.GGN, 1.0, check_mode=False)
    at = post.predict(x)
    covariance = at.lazy_covariance_matrix.to_dense() + torch.diag_embed(NOISE.expand(N, C))
    hollow = y.clone()
    hollow[0], hollow[1, 0], hollow[2, 1] = math.nan, math.nan, math.nan
    found = post.log_likelihood(x, hollow).value
    assert float(found[0]) == 0
    for n, c in ((1, 1), (2, 0)):
        marginal = Normal(at.mean[n, c], covariance[n, c, c].sqrt())
        torch.testing.assert_close(found[n], marginal.log_prob(y[n, c]), **TIGHT)
    whole = torch.distributions.MultivariateNormal(at.mean, covariance).log_prob(y)
    torch.testing.assert_close(found[3:], whole[3:], **TIGHT)


def test_weights_of_channels_go_with_images() -> None:
    net = seeded(lambda: nn.Conv2d(2, C, 3, padding=1))
    x, y, w = normal(4, 2, 5, 5), normal(4, C, 5, 5, seed=1), normal(4, C, 5, 5, seed=2).abs()
    lin = co.linearize(net, (x, y, w), LIKELIHOODS.Gaussian(NOISE.view(C, 1, 1)), weights=True)
    J = dense_jacobian(net, x)
    H = (w / NOISE.view(C, 1, 1)).reshape(-1, 1)
    torch.testing.assert_close(co.GGN(lin).to_dense(), J.mT @ (H * J), **TIGHT)


@pytest.mark.parametrize("kind", [co.EmpiricalFisher, co.KFAC])
def test_the_weight_of_an_ignored_label_does_not_count(kind: type) -> None:
    net = seeded(MODELS["sequences"][0])
    x, labels, w = normal(N, T, 4), torch.arange(N * T).reshape(N, T) % C, normal(N, T, seed=3).abs()
    gone = torch.zeros(N, T, dtype=torch.bool)
    gone[:, 1] = True
    ignored = co.linearize(
        net, (x, labels.masked_fill(gone, -100), w.masked_fill(gone, 100.0)), "classification", weights=True
    )
    left_out = co.linearize(net, (x, labels, w.masked_fill(gone, 0.0)), "classification", weights=True)
    torch.testing.assert_close(kind(ignored).to_dense(), kind(left_out).to_dense(), **TIGHT)
