"""Likelihoods from `torch.distributions`: against the closed forms, and refusing what has no exact Fisher."""

import itertools

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.distributions import Distribution

import curvops as co
from curvops.network.likelihoods import (
    Bernoulli,
    Categorical,
    FromDistribution,
    Gaussian,
    Likelihood,
    Poisson,
    as_likelihood,
)
from tests.network.definitions import (
    TIGHT,
    autograd_gradient,
    binary_outcomes,
    class_outcomes,
    dense_fisher,
    enumerated_moment,
    normal,
    require_consistent_products,
    require_sampled_moment,
)

N, C = 6, 3
W = torch.tensor([1.0, 0.0, 2.5, 1.0, 0.3, 4.0], dtype=torch.float64)
COVARIANCE = torch.tensor([[1.0, 0.3, 0.0], [0.3, 2.0, 0.5], [0.0, 0.5, 0.7]], dtype=torch.float64)
LABELS, COUNTS = torch.tensor([0, 2, 1, 1, 2, 0]), torch.randint(0, 5, (N, C)).double()
BITS, REALS = (normal(N, C, seed=4) > 0).double(), normal(N, C, seed=5)

PAIRS: dict[str, tuple[FromDistribution, Likelihood, Tensor]] = {
    "categorical": (FromDistribution(lambda f: distributions.Categorical(logits=f)), Categorical(), LABELS),
    "bernoulli": (FromDistribution(lambda f: distributions.Bernoulli(logits=f)), Bernoulli(), BITS),
    "independent": (
        FromDistribution(lambda f: distributions.Independent(distributions.Bernoulli(logits=f), 1)),
        Bernoulli(),
        BITS,
    ),
    "binomial": (FromDistribution(lambda f: distributions.Binomial(1, logits=f)), Bernoulli(), BITS),
    "normal": (FromDistribution(lambda f: distributions.Normal(f, 0.5)), Gaussian(0.25), REALS),
    "poisson": (FromDistribution(lambda f: distributions.Poisson(f.exp())), Poisson(), COUNTS),
}
WEIGHTS = pytest.mark.parametrize("w", [None, W], ids=["unweighted", "weighted"])


@WEIGHTS
@pytest.mark.parametrize("name", PAIRS)
def test_closed_forms_are_reproduced(name: str, w: Tensor | None) -> None:
    general, closed, y = PAIRS[name]
    f = normal(N, C)
    H = dense_fisher(closed, f, y, w)
    torch.testing.assert_close(general.log_prob(f, y, w), closed.log_prob(f, y, w), **TIGHT)
    torch.testing.assert_close(general.residual(f, y, w), closed.residual(f, y, w), **TIGHT)
    torch.testing.assert_close(general.fisher(f, y, w), H, **TIGHT)
    torch.testing.assert_close(general.mean(f), closed.mean(f), **TIGHT)
    require_consistent_products(general, f, y, w, H)


def gaussian_vector(f: Tensor) -> Distribution:
    return distributions.MultivariateNormal(f, COVARIANCE.to(f.dtype))


def coupled_events(f: Tensor) -> Distribution:
    """Two events from three outputs, each depending on all of them."""
    mixed = torch.stack([f.sum(-1), f[:, 0] * f[:, 1] - f[:, 2].sin()], 1)
    return distributions.Bernoulli(logits=mixed)


@WEIGHTS
def test_a_normal_vector_of_known_covariance(w: Tensor | None) -> None:
    likelihood, f = FromDistribution(gaussian_vector), normal(N, C)
    H = torch.linalg.inv(COVARIANCE).expand(N, C, C)
    require_consistent_products(likelihood, f, REALS, w, H if w is None else w[:, None, None] * H)


@WEIGHTS
def test_the_fisher_of_coupled_events_is_not_the_hessian(w: Tensor | None) -> None:
    likelihood, f, y = FromDistribution(coupled_events), normal(N, C), BITS[:, :2]
    H = torch.zeros(N, C, C).double()
    for bits in itertools.product([0.0, 1.0], repeat=2):
        drawn = torch.tensor(bits).double().expand(N, 2)
        r = autograd_gradient(likelihood, f, drawn, None)
        H += likelihood.log_prob(f, drawn).exp()[:, None, None] * r.unsqueeze(2) * r.unsqueeze(1)
    require_consistent_products(likelihood, f, y, w, H if w is None else w[:, None, None] * H)
    torch.testing.assert_close(likelihood.residual(f, y, w), autograd_gradient(likelihood, f, y, w), **TIGHT)


def test_monte_carlo_residuals_average_to_the_fisher() -> None:
    f = normal(N, C)
    for name, outcomes in [("categorical", class_outcomes(f)), ("bernoulli", binary_outcomes(f))]:
        likelihood, closed, y = PAIRS[name]
        moment = enumerated_moment(likelihood, f, y, W, outcomes)
        torch.testing.assert_close(moment, dense_fisher(closed, f, y, W), **TIGHT)


def student(f: Tensor) -> Distribution:
    return distributions.StudentT(4.0, f)


REFUSED = {
    "student": (student, "depends on the target"),
    "rate": (lambda f: distributions.Poisson(nn.functional.softplus(f)), "depends on the target"),
    "variance": (lambda f: distributions.Normal(f[:, :2], f[:, 1:].exp()), "depends on the target"),
    "kink": (lambda f: distributions.Laplace(f, 1.0), "has a kink"),
    "support": (lambda f: distributions.Uniform(torch.zeros_like(f), f.exp()), "is not the output Fisher"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hessians_that_are_not_the_fisher_are_refused(name: str) -> None:
    function, message = REFUSED[name]
    likelihood, f = FromDistribution(function), normal(N, C)
    y = likelihood.sample(f)
    for product in (likelihood.hessian_product, likelihood.root_product, likelihood.root_transpose_product):
        with pytest.raises(ValueError, match=rf"{message}.*co.GGN\(lin, mc_samples=...\)"):
            product(f, f, y)


def test_monte_carlo_residuals_serve_where_the_hessian_does_not() -> None:
    """The Fisher of Student's t about its location, (nu + 1) / (nu + 3) at scale 1 (Lange et al. 1989)."""
    f = normal(N, C)
    require_sampled_moment(FromDistribution(student), f, REALS, None, 5 / 7 * torch.eye(C).double().expand(N, C, C))


def test_a_rare_event_does_not_hide_a_dependence_on_the_target() -> None:
    """At rates of 1e-8 all draws are 0, and look alike; the observed counts do not."""
    likelihood = FromDistribution(lambda f: distributions.Poisson(nn.functional.softplus(f)))
    f = torch.full((N, 1), -18.0).double()
    likelihood.fisher(f, torch.zeros(N, 1).double())
    with pytest.raises(ValueError, match="depends on the target"):
        likelihood.fisher(f, torch.ones(N, 1).double())
    natural = PAIRS["poisson"][0]
    torch.testing.assert_close(natural.fisher(f, COUNTS[:, :1]), f.exp().unsqueeze(2), rtol=1e-10, atol=0)


def test_samples_follow_the_generator_and_leave_torchs_alone() -> None:
    likelihood, f = PAIRS["normal"][0], normal(N, C)
    state = torch.get_rng_state()
    first, again, other = (likelihood.sample(f, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    likelihood.fisher(f, REALS)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    likelihood.sample(f)
    assert not torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_products_need_no_gradient_mode(mode: type) -> None:
    for name in ("bernoulli", "normal"):
        general, closed, y = PAIRS[name]
        with mode():
            f, u = normal(N, C), normal(N, C, seed=1)
            torch.testing.assert_close(general.residual(f, y.clone()), closed.residual(f, y), **TIGHT)
            product = general.hessian_product(f, u, y.clone())
        torch.testing.assert_close(product.clone(), closed.hessian_product(f, u, y).clone(), **TIGHT)


def test_gradients_through_outputs_and_vectors() -> None:
    for name in ("bernoulli", "poisson"):
        likelihood, _, y = PAIRS[name]
        f, u = normal(2, C).requires_grad_(), normal(2, C, seed=2).requires_grad_()

        def products(
            f: Tensor, u: Tensor, likelihood: Likelihood = likelihood, y: Tensor = y[:2]
        ) -> tuple[Tensor, ...]:
            return likelihood.residual(f, y), likelihood.hessian_product(f, u, y, W[:2])

        assert torch.autograd.gradcheck(products, (f, u))


@pytest.mark.parametrize("name", ["categorical", "bernoulli", "normal"])
def test_extreme_outputs_in_float32(name: str) -> None:
    likelihood, _, y = PAIRS[name]
    f, u = 100 * torch.eye(N, C) - 100 * torch.eye(N, C).roll(1, 1), torch.ones(N, C)
    y = y.float() if y.is_floating_point() else y
    for result in (likelihood.residual(f, y), likelihood.hessian_product(f, u, y), likelihood.root_product(f, u, y)):
        assert result.dtype == torch.float32
        assert result.isfinite().all()


def test_the_door_takes_a_function() -> None:
    function = PAIRS["bernoulli"][0].function
    assert isinstance(as_likelihood(function), FromDistribution)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, C)).double()
    x, v = normal(N, 2), normal(27)
    lin, closed = co.linearize(model, (x, BITS), function), co.linearize(model, (x, BITS), Bernoulli())
    torch.testing.assert_close(co.GGN(lin) @ v, co.GGN(closed) @ v, **TIGHT)
    torch.testing.assert_close(lin.gradient(), closed.gradient(), **TIGHT)
    torch.testing.assert_close(lin.log_likelihood(), closed.log_likelihood(), **TIGHT)
    with pytest.raises(TypeError, match="a function from outputs to a torch.distributions.Distribution"):
        as_likelihood(distributions.Bernoulli)


def test_targets_outside_the_support_are_refused_after_a_compiled_model_too() -> None:
    """`torch.compile` switches torch's own check off, in the whole process."""
    before, x = Distribution._validate_args, torch.ones(3, 2)
    Distribution.set_default_validate_args(False)
    try:
        with pytest.raises(ValueError, match="within the support"):
            co.linearize(nn.Linear(2, 1), (x, -torch.ones(3)), lambda f: distributions.Poisson(f[:, 0].exp()))
        unchecked = lambda f: distributions.Normal(f, 1.0, validate_args=False)  # noqa: E731
        co.linearize(nn.Linear(2, 1), (x, torch.ones(3, 1)), unchecked)
    finally:
        Distribution.set_default_validate_args(before)
