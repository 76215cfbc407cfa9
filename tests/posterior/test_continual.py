"""Tasks one after another: penalties, and posteriors as priors."""

import pytest
import torch
from torch import nn

import curvops as co
from tests.posterior.trained import problem

DOUBLE = torch.float64
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def normal(*shape, seed=1):
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def first():
    model, x, y = problem()
    return model, co.laplace(co.linearize(model, (x, y), "classification"), prior_precision=1.0)


@pytest.mark.parametrize("curvature", [co.GGN, co.KFAC, co.DiagonalGGN])
def test_the_penalty_is_the_negative_log_density_with_its_gradient(first, curvature):
    model, post = first
    post = co.laplace(post.lin, curvature, temperature=0.5, check_mode=False)
    moved = {name: (p.detach() + 0.1).requires_grad_() for name, p in model.named_parameters()}
    value = post.penalty(moved)
    gap, P = torch.full((51,), 0.1, dtype=DOUBLE), post.precision.to_dense()
    torch.testing.assert_close(value, gap @ P @ gap, **TIGHT)  # ½ of it, over T = ½
    gradient = post.lin.flatten(dict(zip(moved, torch.autograd.grad(value, list(moved.values())))))
    torch.testing.assert_close(gradient, 2 * P @ gap, **TIGHT)
    torch.testing.assert_close(post.penalty(post.mean + 0.1), value.detach(), **TIGHT)
    assert float(post.penalty(post.mean)) == 0.0


def test_training_with_the_penalty_stays_nearer_to_the_first_task(first):
    """Of two descents on other labels, the one that is penalised keeps the first task's loss lower."""
    _, post = first
    x, y = normal(30, 4, seed=5), torch.arange(30) % 3
    before = post.lin.log_likelihood()
    kept = {}
    for penalised in (False, True):
        model, x_first, y_first = problem()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(60):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
            if penalised:
                loss = loss + post.penalty(dict(model.named_parameters()))
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            kept[penalised] = -nn.functional.cross_entropy(model(x_first), y_first, reduction="sum")
    assert float(before) > float(kept[True]) > float(kept[False])


@pytest.mark.parametrize("curvature", [co.GGN, co.KFAC, co.DiagonalGGN])
def test_updates_of_a_linear_model_are_the_posterior_of_all_data(curvature):
    """Three tasks; for KFAC and the diagonal the sums of the tasks' own curvatures."""
    model = nn.Linear(3, 2).double()
    x, y = normal(21, 3), normal(21, 2, seed=2)
    likelihood = co.likelihoods.Gaussian(noise=0.3)
    parts = [(x[i : i + 7], y[i : i + 7]) for i in (0, 7, 14)]

    def at_mode(data, make):
        """Refit by Newton's step from the prior of `make`, then linearise there."""
        post = make(co.linearize(model, data, likelihood))
        pull = post.lin.gradient() + post.prior.gradient(post.mean)
        nn.utils.vector_to_parameters(
            post.mean - torch.linalg.solve(post.precision.to_dense(), pull), model.parameters()
        )
        return make(co.linearize(model, data, likelihood))

    post = at_mode(parts[0], lambda lin: co.laplace(lin, curvature, 1.5, check_mode=False))
    for data in parts[1:]:
        before = post
        post = at_mode(data, lambda lin, before=before: before.update(lin, check_mode=False))
    own = [curvature(co.linearize(model, data, likelihood)).to_dense() for data in parts]
    P = sum(own) + 1.5 * torch.eye(8, dtype=DOUBLE)
    torch.testing.assert_close(post.precision.to_dense(), P, **TIGHT)
    if curvature is co.GGN:
        joint = at_mode((x, y), lambda lin: co.laplace(lin, curvature, 1.5, check_mode=False))
        torch.testing.assert_close(post.mean, joint.mean, **TIGHT)
        torch.testing.assert_close(post.predict(x[:2]).variance, joint.predict(x[:2]).variance, rtol=1e-7, atol=1e-9)
        assert post.mode_gap < 1e-8
    if curvature is co.DiagonalGGN:
        assert post.precision._closed_form() is not None  # diagonals add up to one


def test_a_compressed_update_says_what_the_compression_cost(first):
    _, post = first
    other, x, y = problem(n=20)
    lin = co.linearize(other, (x, y), "classification")
    generator = torch.Generator().manual_seed(0)
    exact = post.update(lin, check_mode=False)
    for rank in (5, 30):
        kept = post.update(lin, rank=rank, generator=generator, check_mode=False)
        low, high = kept.prior_precision.base.error.interval()
        true = (kept.prior_precision.to_dense() - post.precision.to_dense()).norm() / post.curvature.to_dense().norm()
        assert low <= true <= high
        error = (kept.precision.to_dense() - exact.precision.to_dense()).norm()
        assert float(error) == pytest.approx(float(true * post.curvature.to_dense().norm()), rel=1e-6)


WRONG = {
    "a module": (lambda post: post.penalty(nn.Linear(2, 2)), TypeError, "named_parameters"),
    "a missing name": (lambda post: post.penalty({"0.weight": torch.zeros(6, 4)}), ValueError, "0.bias"),
    "another length": (lambda post: post.penalty(torch.zeros(3)), ValueError, "51"),
    "another dtype": (lambda post: post.penalty(post.mean.float()), ValueError, "float32"),
    "the same data": (lambda post: post.update(post.lin, check_mode=False), ValueError, "count twice"),
    "its own prior": (lambda post: post.with_prior(post), ValueError, "count twice"),
    "data in place of a linearisation": (lambda post: post.update((torch.zeros(2, 4), None)), TypeError, "linearised"),
    "another selection": (
        lambda post: post.update(co.linearize(*_last_layer(), parameters="last_layer"), check_mode=False),
        ValueError,
        "different parameters",
    ),
}


def _last_layer():
    model, x, y = problem(n=20)
    return model, (x, y), "classification"


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls_are_refused_by_name(first, case):
    call, error, match = WRONG[case]
    with pytest.raises(error, match=match):
        call(first[1])
