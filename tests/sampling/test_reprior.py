"""Identities of repriorisation: exact in float64, for each form and λ.

Tests `changes_of_weights.py`.
"""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev

import curvops as co
from tests.sampling.repriors import NOISE, classes, flat, jacobian, mlp, named, one, precision, regression, slope

FORMS = ["feature", "data", "ntk"]
close = {"rtol": 1e-10, "atol": 1e-10}


def built(form=None, reg=None, n=6, model=None, prior=None, **options):
    model = mlp(3, 4, 3, 2) if model is None else model
    prior = precision(model) if prior is None else prior
    return co.sampling.reprior(model, regression(n), NOISE, reg, form, prior_precision=prior, **options)


def dense_log_density(model, data, theta, prior, noise=NOISE):
    """log p(y | θ) + log p(θ) by torch.distributions."""
    x, y = data
    likelihood = torch.distributions.Normal(functional_call(model, theta, (x,)), noise**0.5).log_prob(y).sum()
    priors = (
        torch.distributions.Normal(torch.zeros(()).double(), prior[name] ** -0.5).log_prob(block).sum()
        for name, block in theta.items()
    )
    return likelihood + sum(priors)


@pytest.mark.parametrize("reg", [None, 0.4, 1e13])
@pytest.mark.parametrize("form", FORMS)
def test_the_log_determinant_is_that_of_the_jacobian(form, reg):
    rep = built(form, reg)
    phi = one(rep)
    torch.testing.assert_close(rep.logdet(phi), torch.linalg.slogdet(jacobian(rep, phi))[1], **close)
    if reg == 1e13:  # T is the prior's scale alone
        torch.testing.assert_close(flat(rep.map(phi)), flat(built(None, math.inf).map(phi)), **close)


@pytest.mark.parametrize("reg", [None, 0.4, math.inf])
@pytest.mark.parametrize("form", ["feature", "data"])
def test_the_energy_is_that_of_the_weights_less_the_log_determinant(form, reg):
    model, data = mlp(3, 4, 3, 2), regression()
    rep, prior = built(form, reg, model=model), precision(model)
    phi = one(rep)
    theta = rep.map(phi)
    expected = dense_log_density(model, data, theta, prior) + torch.linalg.slogdet(jacobian(rep, phi))[1]
    torch.testing.assert_close(-rep.energy(phi), expected, **close)
    torch.testing.assert_close(rep(phi), expected / 6, **close)


@pytest.mark.parametrize("n", [3, 9])
def test_the_forms_have_one_density_at_the_noise_and_other_images(n):
    feature, data = built("feature", n=n), built("data", n=n)
    phi = one(feature)
    torch.testing.assert_close(feature.energy(phi), data.energy(phi), **close)
    torch.testing.assert_close(flat(slope(feature, phi)), flat(slope(data, phi)), **close)
    assert (flat(feature.map(phi)) - flat(data.map(phi))).abs().max() > 1e-3
    chosen = built(n=n)
    assert chosen.form == ("feature" if n == 9 else "data")
    torch.testing.assert_close(chosen.energy(phi), data.energy(phi), **close)


def test_both_forms_are_roots_of_one_covariance_with_one_mean():
    """T is affine in the readout: its linear part R has R Rᵀ = Σ, its value at 0 is μ; Σ and μ by dense inverses."""
    model = mlp(3, 4, 2)
    x, y = regression()
    for reg in (NOISE, 0.7):
        for form in ("feature", "data"):
            rep = built(form, reg, model=model, prior=2.0)
            phi = one(rep)
            still = {name: torch.zeros_like(b) if name in rep.readout else b for name, b in phi.items()}
            J = jacobian(rep, phi)
            R = J[-10:, -10:]
            W, b = phi["0.weight"] / 2**0.5, phi["0.bias"] / 2**0.5
            psi = torch.cat([(x @ W.mT + b).tanh(), torch.ones(6, 1)], 1) / 2**0.5
            sigma = reg * torch.linalg.inv(reg * torch.eye(5).double() + psi.mT @ psi)
            mean = sigma @ psi.mT @ y / reg
            moved = rep.map(still)
            torch.testing.assert_close(torch.cat([moved["2.weight"].mT, moved["2.bias"][None]]), mean / 2**0.5, **close)
            order = [*(torch.arange(8).view(2, 4)[0].tolist()), 8]  # the first output's weights and its bias
            torch.testing.assert_close((R @ R.mT)[order][:, order], sigma / 2, **close)


@pytest.mark.parametrize(("form", "n"), [("data", 4), ("feature", 9)])
def test_the_energy_has_derivatives_by_reverse_and_forward_mode(form, n):
    """One within the other either way, and side by side for several draws."""
    rep = built(form, n=n, model=mlp(3, 3, 2))
    phi = one(rep)
    v = flat(phi)

    def energy(w):
        return rep.energy(named(w, phi))

    H = jacrev(jacrev(energy))(v)
    for outer in (jacrev, jacfwd):
        for inner in (jacrev, jacfwd):
            torch.testing.assert_close(outer(inner(energy))(v), H, **close)
    torch.testing.assert_close(jacfwd(energy)(v), grad(energy)(v), **close)
    stacked = torch.stack([v, 2 * v, -v])
    torch.testing.assert_close(torch.vmap(grad(energy))(stacked), torch.stack([*map(grad(energy), stacked)]), **close)


def test_a_noise_to_be_learned_keeps_its_derivative():
    """λ is a number: the derivative in σ² is that of the likelihood, at T(φ)."""
    noise = torch.tensor(NOISE, dtype=torch.float64, requires_grad=True)
    model, (x, y) = mlp(3, 4, 2), regression()
    rep = co.sampling.reprior(model, (x, y), likelihood=co.likelihoods.Gaussian(noise))
    phi = one(rep)
    (found,) = torch.autograd.grad(rep.energy(phi), noise)
    residual = (functional_call(model, rep.map(phi), (x,)) - y).detach()
    torch.testing.assert_close(found, (12 / NOISE - residual.square().sum() / NOISE**2) / 2, **close)


@pytest.mark.parametrize("n", [6, 90])
def test_in_float32_the_gradient_is_that_of_float64_to_the_condition_number(n):
    x, y = regression(n)
    model = mlp(3, 60, 2)
    prior = precision(model)
    exact = co.sampling.reprior(model, (x, y), NOISE, prior_precision=prior)
    phi = one(exact)
    short = co.sampling.reprior(mlp(3, 60, 2).float(), (x.float(), y.float()), NOISE, prior_precision=prior)
    rounded = {name: block.float() for name, block in phi.items()}
    assert short.energy(rounded).dtype == torch.float64  # in which it is summed
    expected = flat(slope(exact, phi))
    gap = flat(slope(short, rounded)).double() - expected
    kappa = 1 + float(torch.linalg.matrix_norm(exact._change.features(phi), 2)) ** 2 / NOISE
    assert float(gap.norm() / expected.norm()) < kappa * torch.finfo(torch.float32).eps < 0.01


@pytest.mark.parametrize("form", ["feature", "data"])
@pytest.mark.parametrize("bias", [True, False])
def test_of_a_linear_model_the_posterior_is_the_prior(form, bias):
    model, (x, y) = nn.Linear(3, 2, bias=bias).double(), regression()
    rep = co.sampling.reprior(model, (x, y), NOISE, form=form)
    drawn = [one(rep, seed) for seed in (0, 1)]
    ratios = torch.stack([rep.log_ratio(phi) for phi in drawn])
    design = torch.cat([x, torch.ones(6, 1)], 1) if bias else x
    evidence = torch.distributions.MultivariateNormal(
        torch.zeros(6).double(), NOISE * torch.eye(6).double() + design @ design.mT
    )
    torch.testing.assert_close(ratios, evidence.log_prob(y.mT).sum().expand(2), **close)
    torch.testing.assert_close(flat(slope(rep, drawn[0])), flat(drawn[0]), **close)
    gap = rep.gradient_gap(samples=40)
    assert float(gap.total) < 1e-20 and float(gap.readout) < 1e-20
    assert float(rep.divergence(40)) == pytest.approx(0, abs=1e-10)


@pytest.mark.parametrize("reg", [None, 0.4, 1e6, math.inf])
@pytest.mark.parametrize("form", ["feature", "data"])
def test_the_inverse_undoes_the_map(form, reg):
    rep = built(form, reg)
    phi = one(rep)
    torch.testing.assert_close(flat(rep.inverse(rep.map(phi))), flat(phi), **close)
    theta = dict(mlp(3, 4, 3, 2).named_parameters())
    torch.testing.assert_close(flat(rep.map(rep.params)), flat(theta), **close)


class Looking(nn.Module):
    """A network that looks at its own numbers, which `torch.vmap` refuses, or does not."""

    def __init__(self, looks):
        super().__init__()
        torch.manual_seed(0)
        self.looks, self.body, self.head = looks, mlp(3, 2), nn.Linear(2, 2).double()

    def forward(self, x):
        hidden = self.body(x)
        return self.head(0 * hidden if self.looks and float(hidden.detach().abs().max()) > 1e9 else hidden)


def test_draws_that_cannot_be_mapped_side_by_side_are_mapped_one_by_one():
    one_by_one, together = (built(model=Looking(looks), reg=0.4) for looks in (True, False))
    phi = one_by_one.normal(3, torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError):
        torch.vmap(one_by_one)(phi)
    found, expected = (rep.divergence(5, torch.Generator().manual_seed(0)).value for rep in (one_by_one, together))
    torch.testing.assert_close(found, expected, **close)


def test_gradients_exist_where_points_coincide():
    """The symmetric root has equal eigenvalues there, whose derivative by automatic differentiation is NaN."""
    x, y = regression(4)
    doubled = torch.cat([x, x, x]), torch.cat([y, y, y])
    model = mlp(3, 20, 2)
    rep = co.sampling.reprior(model, doubled, NOISE, 0.3, "data", prior_precision=precision(model))
    phi = one(rep)
    leaf = phi["0.weight"].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda w: rep.energy({**phi, "0.weight": w}), leaf, rtol=1e-5)


def test_weights_of_points_count_as_repeated_points():
    x, y = regression()
    model = mlp(3, 4, 2)
    counts = torch.tensor([1, 2, 0, 1, 3, 1])
    repeated = x.repeat_interleave(counts, 0), y.repeat_interleave(counts, 0)
    plain = co.sampling.reprior(model, repeated, NOISE, form="feature")
    weighted = co.sampling.reprior(model, (x, y, counts.double()), NOISE, form="feature", weights=True)
    phi = one(plain)
    torch.testing.assert_close(flat(weighted.map(phi)), flat(plain.map(phi)), **close)
    constant = [rep.energy(phi) - rep.energy(one(plain, 1)) for rep in (plain, weighted)]
    torch.testing.assert_close(constant[0], constant[1], **close)


@pytest.mark.parametrize("form", ["feature", "data"])
def test_classes_keep_their_exact_energy(form):
    model, (x, y) = mlp(3, 4, 3), classes()
    rep = co.sampling.reprior(model, (x, y), reg=0.3, form=form, likelihood="classification")
    phi = one(rep)
    theta = rep.map(phi)
    exact = -nn.functional.cross_entropy(functional_call(model, theta, (x,)), y, reduction="sum")
    prior = -0.5 * (flat(theta).square() + math.log(2 * math.pi)).sum()
    torch.testing.assert_close(-rep.energy(phi), exact + prior + torch.linalg.slogdet(jacobian(rep, phi))[1], **close)
    surrogate = nn.functional.one_hot(y, 3).double() - 1 / 3
    gaussian = co.sampling.reprior(model, (x, surrogate), 0.3, form=form)
    torch.testing.assert_close(flat(rep.map(phi)), flat(gaussian.map(phi)), **close)
    assert rep.noise is None and "classes" in repr(rep)


def test_labels_that_are_ignored_change_nothing():
    model, (x, y) = mlp(3, 4, 3), classes()
    ignored = torch.cat([y, torch.tensor([-100])]), torch.cat([x, 3 * torch.ones(1, 3).double()])
    some = co.sampling.reprior(model, (ignored[1], ignored[0]), reg=0.3, likelihood="classification", form="feature")
    none = co.sampling.reprior(model, (x, y), reg=0.3, likelihood="classification", form="feature")
    phi = one(none)
    torch.testing.assert_close(some.energy(phi), none.energy(phi), **close)


def test_batches_of_the_data_add_up():
    x, y = regression()
    model = mlp(3, 4, 2)
    whole = co.sampling.reprior(model, (x, y), NOISE)
    parts = co.sampling.reprior(model, [(x[:4], y[:4]), (x[4:], y[4:])], NOISE)
    phi = one(whole)
    torch.testing.assert_close(parts.energy(phi), whole.energy(phi), **close)
    kept = float(whole.energy(phi))
    x.zero_()
    assert float(whole.energy(phi)) == kept
