"""Tasks one after another: penalties, and posteriors as priors.

Tests `kfac.py`, `updating.py`.
"""

import copy
import warnings

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
    return model, co.laplace(co.linearize(model, (x, y), "classification"), co.GGN, prior_precision=1.0)


@pytest.mark.parametrize("curvature", [co.GGN, co.KFAC, co.DiagonalGGN])
def test_the_penalty_is_the_negative_log_density_with_its_gradient(first, curvature):
    model, post = first
    post = co.laplace(post.lin, curvature, 1.0, temperature=0.5, check_mode=False)
    moved = {name: (p.detach() + 0.1).requires_grad_() for name, p in model.named_parameters()}
    value = post.penalty(moved)
    gap, P = torch.full((51,), 0.1, dtype=DOUBLE), post.precision.to_dense()
    torch.testing.assert_close(value, gap @ P @ gap, **TIGHT)  # ½ of it, over T = ½
    gradient = post.lin.flatten(dict(zip(moved, torch.autograd.grad(value, list(moved.values())))))
    torch.testing.assert_close(gradient, 2 * P @ gap, **TIGHT)
    torch.testing.assert_close(post.penalty(post.mean + 0.1), value.detach(), **TIGHT)
    assert float(post.penalty(post.mean)) == float(post.penalty(model).detach()) == 0.0
    twin = copy.deepcopy(model)
    twin.load_state_dict({name: p.detach() for name, p in moved.items()})
    for trained in (twin, nn.DataParallel(twin)):
        found = post.penalty(trained)
        torch.testing.assert_close(found, value.detach(), **TIGHT)
        slopes = nn.utils.parameters_to_vector(torch.autograd.grad(found, list(twin.parameters())))
        torch.testing.assert_close(slopes, gradient, **TIGHT)
    torch.testing.assert_close(post.log_prob(twin).value, post.log_prob(post.mean + 0.1).value, **TIGHT)


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
        step = torch.linalg.solve(post.precision.to_dense(), pull)
        nn.utils.vector_to_parameters(post.mean - step, model.parameters())
        return make(co.linearize(model, data, likelihood))

    post = at_mode(parts[0], lambda lin: co.laplace(lin, curvature, 1.5, check_mode=False))
    evidence = post.log_evidence().value
    for data in parts[1:]:
        before = post
        post = at_mode(data, lambda lin, before=before: before.update(lin, check_mode=False))
        evidence = evidence + post.log_evidence().value
    own = [curvature(co.linearize(model, data, likelihood)).to_dense() for data in parts]
    P = sum(own) + 1.5 * torch.eye(8, dtype=DOUBLE)
    torch.testing.assert_close(post.precision.to_dense(), P, **TIGHT)
    if curvature is co.GGN:
        joint = at_mode((x, y), lambda lin: co.laplace(lin, curvature, 1.5, check_mode=False))
        torch.testing.assert_close(post.mean, joint.mean, **TIGHT)
        torch.testing.assert_close(evidence, joint.log_evidence().value, **TIGHT)
        torch.testing.assert_close(post.predict(x[:2]).variance, joint.predict(x[:2]).variance, rtol=1e-7, atol=1e-9)
        assert post.mode_gap < 1e-8
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # at a mode there is nothing to warn of
            torch.testing.assert_close(before.update(post.lin).log_evidence().value, post.log_evidence().value, **TIGHT)
    if curvature is co.DiagonalGGN:
        assert post.precision._closed_form() is not None  # diagonals add up to one


@pytest.mark.parametrize("n, rank", [(20, 5), (20, 30)])
def test_low_rank_with_the_rest_of_the_diagonal_and_what_it_leaves_out(first, n, rank):
    _, post = first
    other, x, y = problem(n=n)
    lin = co.linearize(other, (x, y), "classification")
    generator = torch.Generator().manual_seed(0)
    kept = post.update(lin, rank=rank, form="low_rank_diagonal", generator=generator, check_mode=False)
    C = post.curvature.to_dense()
    found = kept.prior_precision.to_dense() - torch.eye(51, dtype=DOUBLE)
    torch.testing.assert_close(found.diagonal(), C.diagonal(), **TIGHT)
    alone = post.update(lin, rank=rank, generator=torch.Generator().manual_seed(0), check_mode=False)
    without = alone.prior_precision.to_dense() - torch.eye(51, dtype=DOUBLE)
    assert (C - found).norm() < (C - without).norm()
    for updated, left_out in ((kept, C - found), (alone, C - without)):
        low, high = updated.compression.interval()
        assert low <= left_out.norm() / C.norm() <= high
    exact = post.update(lin, check_mode=False)
    torch.testing.assert_close(alone.precision.to_dense() - exact.precision.to_dense(), without - C, **TIGHT)


# Kronecker posteriors


class Heads(nn.Module):
    """A shared layer and a head for each task; what the other heads know of this task is nothing."""

    def __init__(self, task):
        super().__init__()
        torch.manual_seed(3)
        self.task, self.body = task, nn.Linear(4, 3)
        self.heads = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))

    def forward(self, x):
        return self.heads[self.task](self.body(x).tanh())


def task(t, moved=0.1):
    model = Heads(t).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(moved * t)
    x = normal(12, 4, seed=10 + t)
    return co.linearize(model, (x, (x[:, 0] > 0).long()), "classification")


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("bias", ["joint", "separate"])
def test_kronecker_posteriors_stay_kronecker_and_are_their_own_dense_definition(bias, temperature):
    """The error is that of the blocks against their sum; `test_combinations.py` asks for draws and predictions."""
    lins = [task(t) for t in range(3)]
    post = co.laplace(lins[0], co.KFAC(lins[0], bias=bias), 1.5, temperature=temperature, check_mode=False)
    shift = 1.5
    for lin in lins[1:]:
        before = post
        post = before.update(lin, form="kronecker", check_mode=False)
        scale = 1 / before.temperature
        exact = before.precision.to_dense() * scale + post.curvature.to_dense()
        shift = shift * scale
        eye = torch.eye(lin.num_parameters, dtype=DOUBLE)
        P = post.precision.to_dense()
        assert post.curvature.arguments == {"bias": bias}
        true = (P - exact).norm() / (exact - shift * eye).norm()
        torch.testing.assert_close(post.compression.value, true, rtol=1e-7, atol=1e-8)
        assert post.compression.stderr == 0 and 0 < true < 0.5
        A, gap = post.prior_precision.to_dense(), post.mean - before.mean
        ratio = torch.logdet(P) - torch.logdet(A) + gap @ A @ gap
        torch.testing.assert_close(post.log_evidence().value, lin.log_likelihood() - 0.5 * ratio, **TIGHT)
    other_heads = {name for names in post.precision.base.names for name in names}
    assert other_heads == set(lins[0].unflatten(lins[0].theta))


def test_the_error_of_a_kronecker_posterior_counts_blocks_that_add_up_exactly():
    """A PReLU has no factors: its block is a part of what the error is relative to, not of the error."""
    model, x = nn.Sequential(nn.Linear(4, 3), nn.PReLU(3), nn.Linear(3, 2)).double(), normal(12, 4)
    lins = [co.linearize(model, (x + t, (x[:, t] > 0).long()), "classification") for t in range(2)]
    first = co.laplace(lins[0], co.KFAC, 1.5, check_mode=False)
    post = first.update(lins[1], form="kronecker", check_mode=False)
    exact = first.precision.to_dense() + post.curvature.to_dense()
    P, eye = post.precision.to_dense(), 1.5 * torch.eye(len(post.mean), dtype=DOUBLE)
    names = list(dict(model.named_parameters()))
    marked = {name: torch.full_like(p, name == names[2]) for name, p in model.named_parameters()}
    of_slopes = lins[0].flatten(marked) > 0
    slopes = of_slopes.nonzero(), of_slopes.nonzero().mT
    torch.testing.assert_close(P[slopes], exact[slopes], **TIGHT)
    assert float((exact - eye)[slopes].norm()) > 0.1
    torch.testing.assert_close(post.compression.value, (P - exact).norm() / (exact - eye).norm(), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("curvature", [co.GGN, co.KFAC])
def test_an_updated_posterior_follows_a_learned_noise(curvature):
    """Its precision is made once, and is right at the noise of each question."""
    noise, model, x = torch.tensor(0.3, dtype=DOUBLE, requires_grad=True), nn.Linear(3, 2).double(), normal(9, 3)
    lins = [
        co.linearize(model, (x, normal(9, 2, seed=seed)), co.likelihoods.Gaussian(own))
        for seed, own in ((1, 0.3), (2, noise))
    ]
    first = co.laplace(lins[0], curvature, 0.5, check_mode=False)
    post = first.update(lins[1], form="kronecker" if curvature is co.KFAC else None, check_mode=False)
    expected = first.precision.to_dense() + post.curvature.to_dense().detach()
    torch.testing.assert_close(post.precision.to_dense().detach(), expected, **TIGHT)
    before = post.predict(x).variance.detach()
    with torch.no_grad():
        noise /= 4
    expected += 3 * post.curvature.to_dense().detach() / 4
    torch.testing.assert_close(post.precision.to_dense().detach(), expected, **TIGHT)
    J = post.lin.jacobian(x).to_dense()
    variances = (J @ torch.linalg.solve(expected, J.mT)).diagonal().view_as(before)
    torch.testing.assert_close(post.predict(x).variance.detach(), variances, **TIGHT)
    assert bool((variances < before).all())


# The curvature of the next task


ALIKE = {
    "mc": lambda lin: co.GGN(lin, mc_samples=2, generator=torch.Generator().manual_seed(0)),
    "kfac": lambda lin: co.KFAC(lin, "empirical", bias="separate"),
    "diagonal": lambda lin: co.DiagonalGGN(lin, fisher="mc", mc_samples=3),
    "blocks": lambda lin: co.BlockDiagonal(lin, blocks=[["0.*"], ["2.*"]]),
    "tokens": lambda lin: co.EmpiricalFisher(lin, per_token=True),
    "class": co.EKFAC,
}


@pytest.mark.parametrize("kind", ALIKE)
def test_the_next_curvature_is_made_as_the_last_one_was(first, kind):
    _, post = first
    own = ALIKE[kind]
    post = co.laplace(post.lin, own if kind == "class" else own(post.lin), 1.0, check_mode=False)
    model, x, y = problem(n=20)
    lin = co.linearize(model, (x, y), "classification")
    found = post.update(lin, generator=torch.Generator().manual_seed(0), check_mode=False).curvature
    assert type(found) is type(post.curvature) and found.arguments == post.curvature.arguments
    if kind in ("mc", "kfac", "blocks", "tokens", "class"):
        torch.testing.assert_close(found.to_dense(), own(lin).to_dense(), **TIGHT)


UNKNOWN = {
    "a multiple": lambda lin: 0.5 * co.GGN(lin),
    "low rank": lambda lin: co.low_rank(co.GGN(lin), 5),
    "low rank plus diagonal": lambda lin: co.low_rank(co.GGN(lin), 5).with_diagonal(co.GGN(lin).diagonal()),
    "a sum": lambda lin: 0.5 * co.GGN(lin) + 0.5 * co.KFAC(lin),
    "a matrix": lambda lin: co.linalg.Dense(torch.eye(51, dtype=DOUBLE), psd=True),
    "another dtype": lambda lin: co.GGN(lin.cast(torch.float32)).to(DOUBLE),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_curvature_that_does_not_say_how_it_was_made_has_to_be_given(first, kind):
    _, post = first
    post = co.laplace(post.lin, UNKNOWN[kind](post.lin), 1.0, check_mode=False)
    model, x, y = problem(n=20)
    lin = co.linearize(model, (x, y), "classification")
    with pytest.raises(ValueError, match="curvature= is needed"):
        post.update(lin, check_mode=False)
    assert post.update(lin, co.KFAC, check_mode=False).curvature.arguments == {}
