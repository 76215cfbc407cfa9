"""Likelihoods with a diagonal output Fisher, against torch's losses, distributions and autograd in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, gaussian_nll_loss, poisson_nll_loss

from curvops.network.likelihoods import Bernoulli, Gaussian, HeteroscedasticGaussian, Likelihood, Poisson, as_likelihood
from tests.network.definitions import (
    TIGHT,
    autograd_gradient,
    autograd_hessians,
    binary_outcomes,
    dense_fisher,
    enumerated_moment,
    normal,
    require_consistent_products,
    require_sampled_moment,
)

N, C = 7, 4
SAMPLE_WEIGHT = torch.tensor([1.0, 0.0, 2.5, 1.0, 0.3, 4.0, 1.0], dtype=torch.float64)
WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.3], dtype=torch.float64)
POSITIVE = torch.tensor([3.0, 0.0, 1.0, 0.2], dtype=torch.float64)

BERNOULLIS: dict[str, dict[str, Tensor]] = {
    "plain": {},
    "weight": {"weight": WEIGHT},
    "pos_weight": {"pos_weight": POSITIVE},
    "both": {"weight": WEIGHT, "pos_weight": POSITIVE},
    "0-d": {"weight": WEIGHT[3], "pos_weight": POSITIVE[0]},
}
HARD = (normal(N, C, seed=1) > 0).double()
SOFT = torch.rand(N, C, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
COUNTS = torch.randint(0, 6, (N, C), generator=torch.Generator().manual_seed(2))

NATURAL: dict[str, tuple[Likelihood, Tensor]] = {
    **{f"bernoulli, {name}": (Bernoulli(**options), HARD) for name, options in BERNOULLIS.items()},
    "bernoulli, both, soft": (Bernoulli(**BERNOULLIS["both"]), SOFT),
    "bernoulli, integers": (Bernoulli(pos_weight=POSITIVE), HARD.long()),
    "bernoulli, boolean": (Bernoulli(), HARD.bool()),
    "bernoulli, one output": (Bernoulli(pos_weight=POSITIVE[:1]), HARD[:, :1]),
    "poisson": (Poisson(), COUNTS),
    "poisson, floating": (Poisson(), COUNTS.double()),
    "poisson, one output": (Poisson(), COUNTS[:, :1]),
}
ALL: dict[str, tuple[Likelihood, Tensor]] = {
    **NATURAL,
    "heteroscedastic": (HeteroscedasticGaussian(), normal(N, C // 2, seed=1)),
    "heteroscedastic, one mean": (HeteroscedasticGaussian(), normal(N, 1, seed=1)),
}
WEIGHTS = pytest.mark.parametrize("w", [None, SAMPLE_WEIGHT], ids=["unweighted", "weighted"])


def outputs_for(likelihood: Likelihood, y: Tensor, **options: float) -> Tensor:
    columns = 2 * y.shape[1] if isinstance(likelihood, HeteroscedasticGaussian) else y.shape[1]
    return normal(N, columns, **options)


def fisher(likelihood: Likelihood, f: Tensor, y: Tensor, w: Tensor | None) -> Tensor:
    if not isinstance(likelihood, HeteroscedasticGaussian):
        return autograd_hessians(likelihood, f, y, w)
    m = y.shape[1]
    H = torch.diag_embed(torch.cat([1 / f[:, m:].exp(), torch.full_like(y, 0.5)], 1))
    return H if w is None else w[:, None, None] * H


@WEIGHTS
@pytest.mark.parametrize("name", ALL)
def test_residual_is_the_gradient(name: str, w: Tensor | None) -> None:
    likelihood, y = ALL[name]
    f = outputs_for(likelihood, y, scale=2.0)
    torch.testing.assert_close(likelihood.residual(f, y, w), autograd_gradient(likelihood, f, y, w), **TIGHT)


@WEIGHTS
@pytest.mark.parametrize("name", ALL)
def test_products_match_the_dense_fisher(name: str, w: Tensor | None) -> None:
    likelihood, y = ALL[name]
    f = outputs_for(likelihood, y, scale=2.0)
    require_consistent_products(likelihood, f, y, w, fisher(likelihood, f, y, w))


@WEIGHTS
@pytest.mark.parametrize("name", [name for name in ALL if name.startswith("bernoulli")])
def test_monte_carlo_residuals_of_events_average_to_the_fisher(name: str, w: Tensor | None) -> None:
    likelihood, y = ALL[name]
    f = outputs_for(likelihood, y)
    moment = enumerated_moment(likelihood, f, y, w, binary_outcomes(f))
    torch.testing.assert_close(moment, fisher(likelihood, f, y, w), **TIGHT)


@WEIGHTS
@pytest.mark.parametrize("name", ["bernoulli, both", "poisson", "heteroscedastic"])
def test_monte_carlo_residuals_have_the_fisher_as_second_moment(name: str, w: Tensor | None) -> None:
    """4 standard errors, some 100 different entries a case: a false alarm below 4 % in all at a random seed."""
    likelihood, y = ALL[name]
    f = outputs_for(likelihood, y)
    require_sampled_moment(likelihood, f, y, w, fisher(likelihood, f, y, w))


@pytest.mark.parametrize("name", ["bernoulli, plain", "poisson", "heteroscedastic"])
def test_samples_have_the_mean_and_suit_the_likelihood(name: str) -> None:
    """Mean of 10,000 draws within 4 standard errors, 28 entries a case."""
    likelihood, y = ALL[name]
    f = outputs_for(likelihood, y).repeat_interleave(10_000, 0)
    drawn = likelihood.sample(f, torch.Generator().manual_seed(1))
    likelihood.check_targets(drawn, f.shape[1])
    assert torch.equal(drawn, likelihood.sample(f, torch.Generator().manual_seed(1)))
    drawn = drawn.unflatten(0, (N, 10_000))
    error = (drawn.mean(1) - likelihood.mean(f[::10_000])).abs()
    assert (error <= 4 * drawn.std(1) / 100).all()


@pytest.mark.parametrize("y", [HARD, SOFT], ids=["hard", "soft"])
@pytest.mark.parametrize("options", BERNOULLIS.values(), ids=BERNOULLIS)
def test_bernoulli_is_torchs_loss(options: dict[str, Tensor], y: Tensor) -> None:
    f = normal(N, C, scale=2.0)
    likelihood = Bernoulli(**options)

    def loss(g: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(g, y, reduction="sum", **options)

    torch.testing.assert_close(-likelihood.log_prob(f, y).sum(), loss(f), **TIGHT)
    torch.testing.assert_close(likelihood.residual(f, y), torch.autograd.functional.jacobian(loss, f), **TIGHT)


@pytest.mark.parametrize("full", [False, True])
def test_poisson_is_torchs_loss_and_distribution(full: bool) -> None:
    f, y = normal(N, C), COUNTS.double()
    expected = torch.distributions.Poisson(f.exp()).log_prob(y).sum(-1)
    torch.testing.assert_close(Poisson().log_prob(f, y), expected, **TIGHT)
    gradient = torch.autograd.functional.jacobian(lambda g: poisson_nll_loss(g, y, full=full, reduction="sum"), f)
    likelihood = as_likelihood(nn.PoissonNLLLoss(full=full))
    torch.testing.assert_close(likelihood.residual(f, y), gradient, **TIGHT)


def test_heteroscedastic_is_torchs_loss() -> None:
    f, y = normal(N, C), normal(N, 2, seed=1)
    expected = gaussian_nll_loss(f[:, :2], y, f[:, 2:].exp(), full=True, eps=0, reduction="none").sum(-1)
    torch.testing.assert_close(-HeteroscedasticGaussian().log_prob(f, y), expected, **TIGHT)


def test_a_noise_may_be_an_array() -> None:
    for given in (np.array(0.5), np.array([0.5, 2.0], dtype=np.float32)):
        noise = Gaussian(given).noise
        assert np.array_equal(noise.numpy(), given) and noise.numpy().dtype == given.dtype


def test_the_heteroscedastic_fisher_is_positive_where_the_hessian_is_not() -> None:
    f, y = torch.zeros(1, 2).double(), torch.tensor([[2.0]]).double()
    (hessian,) = autograd_hessians(HeteroscedasticGaussian(), f, y, None)
    assert abs(torch.linalg.eigvalsh(hessian)[0] + 0.5616) < 1e-4
    expected = torch.diag(torch.tensor([1.0, 0.5])).double()
    torch.testing.assert_close(dense_fisher(HeteroscedasticGaussian(), f, y, None)[0], expected, **TIGHT)


@pytest.mark.parametrize("name", ["bernoulli, both, soft", "poisson", "heteroscedastic"])
def test_gradients_through_outputs_and_vectors(name: str) -> None:
    likelihood, y = ALL[name]
    f, u = normal(N, C).requires_grad_(), normal(N, C, seed=2).requires_grad_()

    def products(f: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        return (
            likelihood.log_prob(f, y, SAMPLE_WEIGHT),
            likelihood.residual(f, y, SAMPLE_WEIGHT),
            likelihood.hessian_product(f, u, y, SAMPLE_WEIGHT),
            likelihood.root_product(f, u, y, SAMPLE_WEIGHT),
            likelihood.root_transpose_product(f, u, y, SAMPLE_WEIGHT),
        )

    assert torch.autograd.gradcheck(products, (f, u), fast_mode=True)


@pytest.mark.parametrize(("name", "size"), [("bernoulli, plain", 100.0), ("poisson", 80.0), ("heteroscedastic", 80.0)])
def test_extreme_outputs_in_float32(name: str, size: float) -> None:
    """Finite, and accurate: 1 - p from p itself would be 0 already at a logit of 17."""
    likelihood, y64 = ALL[name]
    f32 = size * torch.tensor([[1.0], [-1.0]]).repeat(4, C)[:N]
    if isinstance(likelihood, HeteroscedasticGaussian):
        f32[:, : C // 2] = 0.0
    u32, y32 = normal(N, C, dtype=torch.float32), y64.to(torch.float32) if y64.is_floating_point() else y64
    f, u, y = f32.double(), u32.double(), y32.double() if y32.is_floating_point() else y32
    pairs = [
        (likelihood.log_prob(f32, y32), likelihood.log_prob(f, y)),
        (likelihood.residual(f32, y32), likelihood.residual(f, y)),
        (likelihood.hessian_product(f32, u32, y32), likelihood.hessian_product(f, u, y)),
        (likelihood.root_product(f32, u32, y32), likelihood.root_product(f, u, y)),
    ]
    for single, double in pairs:
        assert single.dtype == torch.float32
        assert single.isfinite().all()
        torch.testing.assert_close(single.double(), double, rtol=2e-5, atol=1e-37)


def test_gradients_at_extreme_logits_are_finite() -> None:
    f = (1e4 * torch.tensor([[1.0, -1.0]])).requires_grad_()
    u, y = torch.ones(1, 2), torch.tensor([[0.0, 1.0]])
    (gradient,) = torch.autograd.grad(Bernoulli().root_product(f, u, y).sum(), f)
    assert gradient.isfinite().all()


def test_losses_that_stand_for_them() -> None:
    spec = nn.BCEWithLogitsLoss(weight=WEIGHT, pos_weight=POSITIVE, reduction="mean")
    assert repr(as_likelihood(spec)) == repr(Bernoulli(WEIGHT, POSITIVE))
    assert repr(as_likelihood(nn.BCEWithLogitsLoss())) == repr(Bernoulli())
    assert isinstance(as_likelihood(nn.PoissonNLLLoss()), Poisson)
    with pytest.raises(ValueError, match="Pass weights of points with the data"):
        as_likelihood(nn.BCEWithLogitsLoss(weight=torch.ones(N, 1)), torch.Size([C]))


def test_cross_entropy_of_log_probabilities_is_that_of_logits() -> None:
    """What the remedy for NLLLoss says, of value, gradient and curvature pulled back to the logits."""
    f, y = normal(N, C), torch.tensor([0, 3, 1, 2, 2, 2, 0])
    likelihood = as_likelihood(nn.CrossEntropyLoss())
    log_p, J = f.log_softmax(-1), torch.func.vmap(torch.func.jacrev(lambda g: g.log_softmax(-1)))(f)
    torch.testing.assert_close(likelihood.log_prob(log_p, y), likelihood.log_prob(f, y), **TIGHT)
    pulled = (J.mT @ likelihood.residual(log_p, y).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(pulled, likelihood.residual(f, y), **TIGHT)
    pulled = J.mT @ dense_fisher(likelihood, log_p, y, None) @ J
    torch.testing.assert_close(pulled, dense_fisher(likelihood, f, y, None), **TIGHT)


def test_targets_are_checked_as_far_as_possible_without_c() -> None:
    Bernoulli(WEIGHT).check_targets(HARD[:, :2])
    Poisson().check_targets(COUNTS)
    HeteroscedasticGaussian().check_targets(normal(N, 3))
    with pytest.raises(ValueError, match="an even number of outputs; the model has 3"):
        HeteroscedasticGaussian().check_targets(normal(N, 3), 3)
    with pytest.raises(ValueError, match=r"shape \(n, m\)"):
        HeteroscedasticGaussian().check_targets(normal(N))


def test_to_moves_the_weights() -> None:
    likelihood = Bernoulli(WEIGHT, POSITIVE)
    moved = likelihood.to("cpu", torch.float32)
    assert moved.weight.dtype == moved.pos_weight.dtype == torch.float32
    assert likelihood.weight is WEIGHT
    assert moved.hessian_product(torch.zeros(N, C), torch.ones(N, C), HARD).dtype == torch.float32
