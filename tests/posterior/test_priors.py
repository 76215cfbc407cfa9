"""Every kind of prior, and tempered posteriors, against the dense definition.

Tests `maximize.py`, `parameters.py`.
"""

from dataclasses import replace

import pytest
import torch

import curvops as co
from tests.posterior.trained import problem
from tests.randomness import seeded

TIGHT = {"rtol": 1e-8, "atol": 1e-10}


def normal(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


def by_layer(lin):
    return {"0.*": 0.7, "2.weight": 2.0, "2.bias": torch.tensor(5.0)}


def psd(lin):
    root = normal(lin.num_parameters, lin.num_parameters) / 10
    return root @ root.mT + torch.eye(lin.num_parameters, dtype=torch.float64)


PRIORS = {
    "number": lambda lin: 1.3,
    "by layer": by_layer,
    "dense": lambda lin: co.linalg.Dense(psd(lin), psd=True),
    "ggn plus a number": lambda lin: co.GGN(lin).add_diagonal(0.3),
}
CURVATURES = {"ggn": co.GGN, "kfac": co.KFAC}


def dense_of(lin, name):
    """A as a matrix; that of layers written out by hand."""
    prior = PRIORS[name](lin)
    if name == "by layer":
        values, sizes = torch.tensor([0.7, 0.7, 2.0, 5.0], dtype=torch.float64), torch.tensor([24, 6, 18, 3])
        return torch.diag(values.repeat_interleave(sizes))
    if isinstance(prior, float):
        return prior * torch.eye(lin.num_parameters, dtype=torch.float64)
    return prior.to_dense()


@pytest.mark.parametrize("name", PRIORS)
@pytest.mark.parametrize("curvature", CURVATURES)
def test_variances_evidence_and_the_gap_of_the_mode_are_those_of_dense_matrices(lin, curvature, name):
    """Under a mean and a temperature; `test_combinations.py` asks for all other answers."""
    mean, x = normal(lin.num_parameters, seed=2), normal(4, 4)
    post = co.laplace(lin, CURVATURES[curvature], PRIORS[name](lin), mean, temperature=0.25, check_mode=False)
    A, gap = dense_of(lin, name), lin.theta - mean
    P, J = post.curvature.to_dense() + A, lin.jacobian(x).to_dense()
    variance = 0.25 * (J @ torch.linalg.solve(P, J.mT)).diagonal().view(4, 3)
    torch.testing.assert_close(post.predict(x).variance, variance, **TIGHT)
    log_ratio = torch.logdet(P) - torch.logdet(A)
    found = post.log_evidence(1e-3, seeded())
    assert found.stderr == 0 and post.effective_parameters(1e-3, seeded()).stderr == 0
    torch.testing.assert_close(found.value, lin.log_likelihood() - 0.5 * (gap @ A @ gap + log_ratio), **TIGHT)
    pull = lin.gradient() + A @ gap
    assert post.mode_gap == pytest.approx(float(pull.norm() / (A @ gap).norm()), rel=1e-8)


def test_kfac_takes_one_precision_a_layer_and_separate_ones_for_biases(lin):
    by_two = torch.tensor([0.7, 2.0], dtype=torch.float64).repeat_interleave(torch.tensor([30, 21]))
    for curvature, prior, A in (
        (co.KFAC(lin), {"0.*": 0.7, "2.*": 2.0}, torch.diag(by_two)),
        (co.KFAC(lin, bias="separate"), by_layer(lin), dense_of(lin, "by layer")),
    ):
        post = co.laplace(lin, curvature, prior, check_mode=False)
        found = post.log_evidence()
        assert found.matvecs == 0 and found.stderr == 0
        log_ratio = torch.logdet(curvature.to_dense() + A) - torch.logdet(A)
        expected = lin.log_likelihood() - 0.5 * (lin.theta @ A @ lin.theta + log_ratio)
        torch.testing.assert_close(found.value, expected, **TIGHT)


def test_yesterdays_posterior_is_todays_prior_with_its_mean_and_temperature(lin):
    model, x, y = problem(n=20)
    before = co.laplace(co.linearize(model, (x, y), "classification"), co.GGN, prior_precision=0.8, temperature=0.5)
    post = co.laplace(lin, co.GGN, prior_precision=before, check_mode=False)
    A = before.precision.to_dense() / 0.5
    torch.testing.assert_close(post.precision.to_dense(), post.curvature.to_dense() + A, **TIGHT)
    torch.testing.assert_close(post.prior_mean, before.mean, rtol=0, atol=0)
    assert post.temperature == 1.0
    gap = post.mean - before.mean
    assert float(gap.norm()) > 0.1  # other weights: the guard lets a prior through
    expected = lin.log_likelihood() - 0.5 * (gap @ A @ gap + torch.logdet(post.precision.to_dense()) - torch.logdet(A))
    torch.testing.assert_close(post.log_evidence().value, expected, **TIGHT)


def test_a_mean_by_name_is_the_vector(lin):
    start = {name: normal(*shape, seed=3) for name, shape in zip(*layout(lin))}
    post = co.laplace(lin, co.GGN, 1.0, prior_mean=start, check_mode=False)
    torch.testing.assert_close(post.prior_mean, lin.flatten(start), rtol=0, atol=0)
    some = co.laplace(lin, co.GGN, 1.0, prior_mean={"0.*": 1.0, "2.*": 0.0}, check_mode=False)
    assert float(some.prior_mean.sum()) == 30


def layout(lin):
    parts = lin.unflatten_weights(lin.theta)
    return list(parts), [part.shape for part in parts.values()]


def test_another_prior_keeps_the_mean_unless_told(lin):
    mean = normal(lin.num_parameters)
    post = co.laplace(lin, co.GGN, 1.0, prior_mean=mean, temperature=2.0, check_mode=False)
    moved = post.with_prior({"0.*": 2.0, "2.*": 3.0})
    assert moved.prior_mean is post.prior_mean and moved.temperature == 2.0
    assert float(post.with_prior(2.0, 0.0).prior_mean) == 0.0
    grid = co.evidence.grid(post, [0.5, 2.0])
    torch.testing.assert_close(grid[1].value, post.with_prior(2.0).log_evidence().value, **TIGHT)


def test_gradients_in_the_prior_mean_and_the_precisions_of_layers(lin):
    values = torch.tensor([0.7, 2.0], dtype=torch.float64, requires_grad=True)
    mean, curvature = normal(lin.num_parameters).requires_grad_(), co.KFAC(lin)

    def evidence(values, mean):
        prior = {"0.*": values[0], "2.*": values[1]}
        return co.laplace(lin, curvature, prior, mean, check_mode=False).log_evidence().value

    assert torch.autograd.gradcheck(evidence, (values, mean))


def test_an_operator_at_other_weights_is_refused_until_it_is_detached(lin):
    other = co.GGN(co.linearize(*_other(), "classification")).add_diagonal(1.0)
    with pytest.raises(ValueError, match="detached_from_weights"):
        co.laplace(lin, co.GGN, prior_precision=other, check_mode=False)
    post = co.laplace(lin, co.GGN, prior_precision=other.detached_from_weights(), check_mode=False)
    torch.testing.assert_close(post.precision.to_dense(), post.curvature.to_dense() + other.to_dense(), **TIGHT)


def _other():
    model, x, y = problem(n=20)
    return model, (x, y)


def test_a_singular_prior_has_no_evidence_and_says_so(lin):
    post = co.laplace(lin, co.GGN(lin).add_diagonal(1.0), co.low_rank(co.GGN(lin), rank=4), check_mode=False)
    assert post.sample(2).isfinite().all()
    with pytest.raises(ValueError, match="singular"):
        post.log_evidence()


def test_a_posterior_makes_its_sum_once_and_posteriors_that_share_a_prior_have_their_own(lin):
    prior = co.laplace(lin, co.GGN, prior_precision=2.0, check_mode=False).prior
    one, other = (co.linalg.Diagonal(torch.full((lin.num_parameters,), value).double()) for value in (1.0, 2.0))
    posts = [replace(co.laplace(lin, each, 1.0, check_mode=False), prior=prior) for each in (one, other)]
    assert [float(post.precision.diagonal().unique()) for post in posts] == [3.0, 4.0]
    assert all(post.precision is post.precision for post in posts)
