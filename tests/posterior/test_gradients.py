"""Every gradient that a posterior gives is that of finite differences; every other one is refused by name."""

import pytest
import torch
from torch import nn

import curvops as co
from tests.randomness import perceptron, seeded

STEP = 1e-5
DOUBLE = torch.float64


@pytest.fixture(scope="module")
def network():
    model = perceptron(3, 4, 2)
    x = torch.randn(12, 3, dtype=DOUBLE)
    return model, x, x[:, :2].sin()


def linearised(network, noise):
    model, x, y = network
    return co.linearize(model, (x, y), co.likelihoods.Gaussian(noise))


def linearised_at(lin, noise):
    return lin.with_likelihood(co.likelihoods.Gaussian(torch.tensor(noise, dtype=DOUBLE)))


def with_own_noise(lin):
    own = co.likelihoods.FromDistribution(lambda f: torch.distributions.Normal(f, lin.likelihood.noise))
    return co.laplace(lin.with_likelihood(own), co.GGN, 1.0, check_mode=False)


X = torch.linspace(-1, 1, 6, dtype=DOUBLE).reshape(2, 3)
QUANTITIES = {
    "variance": lambda post: post.predict(X).variance,
    "joint": lambda post: post.predict(X, joint=True).covariance_matrix,
    "sample": lambda post: post.sample(2, seeded()),
    "evidence": lambda post: post.log_evidence().value,
    "predictive of draws": lambda post: post.predict(X, samples=post.sample(3, seeded())).variance,
}
CURVATURES = {
    "GGN": co.GGN,
    "EmpiricalFisher": co.EmpiricalFisher,
    "KFAC": co.KFAC,
    "DiagonalGGN": co.DiagonalGGN,
    "BlockDiagonal": co.BlockDiagonal,
    "low rank": lambda lin: co.low_rank(co.GGN(lin), rank=5, generator=seeded()),
}
WITH_NOISE = CURVATURES.keys() - {"low rank"} | {"EKFAC", "Hessian", "mc", "empirical"}
MADE = CURVATURES | {
    "EKFAC": co.EKFAC,
    "Hessian": co.Hessian,
    "mc": lambda lin: co.KFAC(lin, fisher="mc", sharing="reduce", generator=seeded()),
    "empirical": lambda lin: co.DiagonalGGN(lin, fisher="empirical"),
}


def weighted(value):
    """One number that depends on every entry."""
    return (value * torch.linspace(1, 2, value.numel(), dtype=DOUBLE).reshape(value.shape)).sum()


def agrees(function, at):
    """A number, or each of several that a function gives by name; for a vector along that of ones."""

    def values(at):
        found = function(at)
        return found if isinstance(found, dict) else {"value": found}

    leaf = at.clone().requires_grad_()
    found = {name: torch.autograd.grad(v, leaf, retain_graph=True)[0].sum() for name, v in values(leaf).items()}
    with torch.no_grad():
        above, below = values(at + STEP), values(at - STEP)
    for name, slope in found.items():
        expected = (above[name] - below[name]) / (2 * STEP)
        torch.testing.assert_close(slope, expected, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")
        assert abs(expected) > 1e-6, name  # else the comparison says nothing


def weighted_quantities(lin, curvature, prior):
    """Each of a posterior of its own, which shares the linearisation and the curvature alone."""
    return {
        name: weighted(quantity(co.laplace(lin, curvature, prior, check_mode=False)))
        for name, quantity in QUANTITIES.items()
    }


@pytest.mark.parametrize("curvature", CURVATURES)
def test_gradients_in_the_prior_precision(network, curvature):
    lin = linearised(network, 0.5)
    G = CURVATURES[curvature](lin)
    for at in (torch.tensor(1.3, dtype=DOUBLE), torch.full((lin.num_parameters,), 1.3, dtype=DOUBLE)):
        agrees(lambda prior: weighted_quantities(lin, G, prior), at)


@pytest.mark.parametrize("curvature", sorted(WITH_NOISE))
def test_gradients_in_the_noise(network, curvature):
    def value(noise):
        lin = linearised(network, noise)
        return weighted_quantities(lin, MADE[curvature](lin), 30.0)

    agrees(value, torch.tensor(0.5, dtype=DOUBLE))


@pytest.mark.parametrize("curvature", sorted(WITH_NOISE))
def test_the_evidence_follows_its_noise_as_the_dense_formula_does(network, curvature):
    """Its value and both gradients, at the noise that the curvature was made at and after changes in place."""
    noise, prior = (torch.tensor(v, dtype=DOUBLE, requires_grad=True) for v in (0.5, 100.0))
    lin, fixed = linearised(network, noise), linearised(network, 0.5)
    post, G = co.laplace(lin, MADE[curvature](lin), prior, check_mode=False), MADE[curvature](fixed).to_dense()
    power, eye = 2 if curvature in ("EmpiricalFisher", "empirical") else 1, torch.eye(len(G), dtype=DOUBLE)
    f, y = network[0](network[1]).detach(), network[2]

    def dense():
        log_likelihood = torch.distributions.Normal(f, noise.sqrt()).log_prob(y).sum()
        P = (0.5 / noise) ** power * G + prior * eye
        return log_likelihood - 0.5 * (prior * lin.theta @ lin.theta + P.logdet() - len(G) * prior.log())

    for change in (lambda: None, lambda: noise.mul_(1.6), lambda: noise.data.mul_(0.4)):
        with torch.no_grad():
            change()
            torch.testing.assert_close(post.log_evidence().value, dense(), rtol=1e-10, atol=0)
        for _ in range(2):  # no graph outlives its use
            found, expected = (torch.autograd.grad(v, (noise, prior)) for v in (post.log_evidence().value, dense()))
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_the_noise_may_be_a_function_of_a_tensor_have_one_entry_and_be_that_of_a_sequence(network):
    def slope(at, noise, lin):
        return torch.autograd.grad(co.laplace(lin(noise), co.KFAC, 30.0, check_mode=False).log_evidence().value, at)[0]

    noise = torch.tensor(0.5, dtype=DOUBLE, requires_grad=True)
    log = noise.detach().log().requires_grad_()
    one = noise.detach().reshape(1).requires_grad_()
    expected = slope(noise, noise, lambda noise: linearised(network, noise))
    close = {"rtol": 1e-10, "atol": 0}
    torch.testing.assert_close(slope(log, log.exp(), lambda noise: linearised(network, noise)), 0.5 * expected, **close)
    torch.testing.assert_close(slope(one, one, lambda noise: linearised(network, noise))[0], expected, **close)

    _, x, y = network
    points, sequence = (x, y), (x.reshape(3, 4, 3), y.reshape(3, 4, 2))
    layer = nn.Linear(3, 2).double()
    slopes = [
        slope(noise, noise, lambda noise, data=data: co.linearize(layer, data, co.likelihoods.Gaussian(noise)))
        for data in (points, sequence)
    ]
    torch.testing.assert_close(*slopes, **close)


def test_a_posterior_that_follows_its_noise_is_saved_and_tuned_at_its_present_one(network, tmp_path):
    noise = torch.tensor(0.5, dtype=DOUBLE, requires_grad=True)
    post = co.laplace(linearised(network, noise), co.KFAC, 3.0, check_mode=False)
    expected = co.evidence.maximize(co.laplace(linearised(network, 0.5), co.KFAC, 3.0, check_mode=False), "noise")
    assert co.evidence.maximize(post, "noise").observation_noise == pytest.approx(expected.observation_noise, rel=1e-8)
    post.save(tmp_path / "kept")
    kept = co.load(tmp_path / "kept", network[0], (network[1], network[2]))
    with torch.no_grad():
        torch.testing.assert_close(kept.log_evidence().value, post.log_evidence().value, rtol=1e-10, atol=0)
        torch.testing.assert_close(kept.predict(X).variance, post.predict(X).variance, rtol=1e-10, atol=0)
        noise.mul_(2.0)
    with pytest.raises(ValueError, match="has changed since the curvature was built"):
        post.save(tmp_path / "changed")


@pytest.mark.parametrize("link", ["probit", "bridge", "mc"])
def test_gradients_of_probabilities(network, link):
    model, x, _ = network
    lin = co.linearize(model, (x, (x[:, 0] > 0).long()), "classification")

    def value(prior):
        post = co.laplace(lin, co.GGN, prior_precision=prior, check_mode=False)
        return weighted(post.probabilities(X, link=link, generator=seeded()))

    agrees(value, torch.tensor(1.3, dtype=DOUBLE))


def test_gradients_in_the_draws(network):
    post = co.laplace(linearised(network, 0.5), co.GGN, 1.0, check_mode=False)
    agrees(lambda draws: weighted(post.predict(X, samples=draws).variance), post.sample(3, seeded()))
    noise = torch.tensor(0.5, dtype=DOUBLE, requires_grad=True)  # that of a function is a constant of draws
    assert not with_own_noise(linearised(network, noise)).sample(2, seeded()).requires_grad


@pytest.mark.parametrize("curvature", ["KFAC", "DiagonalGGN", "BlockDiagonal", "low rank"])
def test_gradients_of_the_effective_number_of_parameters(network, curvature):
    lin = linearised(network, 0.5)
    G = CURVATURES[curvature](lin)

    def value(prior):
        return co.laplace(lin, G, prior, check_mode=False).effective_parameters().value

    agrees(value, torch.tensor(1.3, dtype=DOUBLE))


def test_gradients_of_a_tangent_kernel_in_its_prior(network):
    lin, at = linearised(network, 0.5), torch.tensor(1.3, dtype=DOUBLE)
    for value in (lambda K: K.to_dense(), lambda K: K @ torch.ones(4, dtype=DOUBLE)):
        agrees(lambda prior, value=value: weighted(value(co.TangentKernel(lin, prior, X))), at)
    dense, prior = co.TangentKernel(lin, 1.3, X).to_dense(), torch.tensor(1.3, dtype=DOUBLE, requires_grad=True)
    torch.testing.assert_close(co.TangentKernel(lin, prior, X).to_dense(), dense, rtol=1e-12, atol=1e-12)


def test_values_with_a_gradient_are_those_without(network):
    noise, prior = (torch.tensor(v, dtype=DOUBLE, requires_grad=True) for v in (0.5, 1.3))
    post = co.laplace(linearised(network, noise), co.GGN, prior_precision=prior, check_mode=False)
    for quantity in QUANTITIES.values():
        with torch.no_grad():
            expected = quantity(post)
        torch.testing.assert_close(quantity(post).detach(), expected, rtol=1e-8, atol=1e-10)


def test_a_gradient_in_the_inputs_that_is_not_asked_for_is_refused_by_name(network):
    lin, x = linearised(network, 0.5), X.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"inputs requires a gradient.*detach"):
        lin.jacobian(x)
    with torch.no_grad():
        lin.jacobian(x)


@pytest.mark.parametrize(
    "build",
    [
        co.KFAC,
        co.EKFAC,
        co.DiagonalGGN,
        co.BlockDiagonal,
        co.Hessian,
        lambda lin: co.GGN(lin, mc_samples=2),
        lambda lin: co.Subnetwork(co.GGN(lin), [0, 1]),
    ],
)
def test_a_curvature_that_would_lose_the_gradient_in_several_variances_is_refused(network, build):
    lin = linearised(network, torch.tensor([0.5, 0.7], dtype=DOUBLE, requires_grad=True))
    with pytest.raises(ValueError, match=r"no gradient for the (hyperparameters|tensors inside its matrix).*detach"):
        build(lin)
    with torch.no_grad():
        built = build(lin)
    if built.shape[0] == lin.num_parameters:
        post = co.laplace(lin, built, prior_precision=100.0, check_mode=False)
        for use in (post.log_evidence, lambda: post.sample(2), post.effective_parameters, lambda: post.predict(X)):
            with pytest.raises(ValueError, match="no gradient for the hyperparameters"):
                use()
        with torch.no_grad():
            assert post.predict(X).variance.isfinite().all()


@pytest.mark.parametrize(
    "use",
    [
        lambda lin: co.GGN(lin, mc_samples=2),
        lambda lin: co.low_rank(co.KFAC(lin), 3),
        lambda lin: co.laplace(lin, co.KFAC(linearised_at(lin, 0.5)), 1.0, check_mode=False).log_evidence(),
        lambda lin: co.laplace(at := linearised_at(lin, 0.5), lin.likelihood.noise * co.GGN(at), 1.0).log_evidence(),
        lambda lin: with_own_noise(lin).log_evidence(mode="linear"),
    ],
)
def test_what_would_lose_the_gradient_in_one_noise_is_refused(network, use):
    with pytest.raises(ValueError, match=r"no gradient for the.*detach"):
        use(linearised(network, torch.tensor(0.5, dtype=DOUBLE, requires_grad=True)))


def test_a_gradient_of_the_effective_number_that_cannot_come_is_refused(network):
    prior = torch.tensor(1.3, dtype=DOUBLE, requires_grad=True)
    post = co.laplace(linearised(network, 0.5), co.GGN, prior_precision=prior, check_mode=False)
    with pytest.raises(ValueError, match="no gradient.*no_grad"):
        post.effective_parameters()
    with torch.no_grad():
        assert post.effective_parameters().value > 0


def test_a_grid_of_prior_precisions_keeps_their_gradients(network):
    lin = linearised(network, 0.5)
    post = co.laplace(lin, co.GGN, 1.0, check_mode=False)
    agrees(
        lambda priors: weighted(torch.stack([e.value for e in co.evidence.grid(post, priors)])),
        torch.tensor([0.5, 2.0], dtype=DOUBLE),
    )
