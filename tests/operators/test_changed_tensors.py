"""What changes in place afterwards: tensors inside an operator, those given to a posterior, the data, an answer.

Tests `cache.py`.
"""

import contextlib
from functools import partial

import pytest
import torch
from torch import nn

import curvops as co

DOUBLE = torch.float64
D = 35
CURVATURES = {
    "GGN": co.GGN,
    "KFAC": co.KFAC,
    "diagonal": co.DiagonalGGN,
    "low rank": lambda lin: co.low_rank(co.GGN(lin), 5, generator=torch.Generator().manual_seed(0)),
    "dense": lambda lin: co.linalg.Dense(co.GGN(lin).to_dense(), psd=True),
}
ANSWERS = {
    "dense": lambda P: P.to_dense(),
    "solve": lambda P: P.solve(torch.ones(D, 1, dtype=DOUBLE)),
    "logdet": lambda P: P.logdet(),
    "cholesky": lambda P: P.cholesky().to_dense(),
    "root": lambda P: P.root_decomposition().to_dense(),
    "inverse root": lambda P: P.root_inv_decomposition().to_dense(),
    "eigenvalues": lambda P: P.eigvalsh(),
    "inverse": lambda P: P.inverse() @ torch.ones(D, dtype=DOUBLE),
    "rows": lambda P: P[:3].to_dense(),
}


def network(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.Linear(2, outputs)).double()


@pytest.fixture(scope="module")
def lin():
    data = torch.randn(12, 3, dtype=DOUBLE), torch.randn(12, 1, dtype=DOUBLE)
    return co.linearize(network(), data, co.likelihoods.Gaussian(noise=1.0))


@pytest.mark.parametrize("name", CURVATURES)
def test_a_prior_that_changes_in_place_changes_every_answer(lin, name):
    G = CURVATURES[name](lin)
    for what, answer in ANSWERS.items():
        prior = torch.full((D,), 0.7, dtype=DOUBLE)
        P = G.add_diagonal(prior)
        answer(P)
        prior.mul_(2)
        torch.testing.assert_close(answer(P), answer(G.add_diagonal(prior.clone())), rtol=1e-10, atol=1e-10, msg=what)


def test_a_dense_matrix_that_its_reader_changes_is_a_copy(lin):
    P = co.GGN(lin).add_diagonal(0.5)
    expected, b = P.to_dense().clone(), torch.ones(D, 1, dtype=DOUBLE)
    P.to_dense().zero_()
    torch.testing.assert_close(P.to_dense(), expected, rtol=0, atol=0)
    torch.testing.assert_close(expected @ P.solve(b), b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CURVATURES)
def test_predictions_can_be_differentiated_again(lin, name):
    prior = torch.tensor(0.7, dtype=DOUBLE, requires_grad=True)
    post = co.laplace(lin, CURVATURES[name](lin), prior, check_mode=False)
    x = torch.ones(2, 3, dtype=DOUBLE)
    once, again = (torch.autograd.grad(post.predict(x).variance.sum(), prior)[0] for _ in range(2))
    torch.testing.assert_close(again, once, rtol=1e-12, atol=0)


# What a user hands in is read at the call; only a tensor that requires a gradient is followed.

X, V = torch.linspace(-1, 1, 6, dtype=DOUBLE).reshape(2, 3), torch.linspace(-1, 1, D, dtype=DOUBLE)
MADE = CURVATURES | {
    "Monte-Carlo Fisher": lambda lin: co.GGN(lin, mc_samples=2, generator=torch.Generator().manual_seed(0)),
    "empirical": co.EmpiricalFisher,
    "Hessian": co.Hessian,
    "EKFAC": co.EKFAC,
    "blocks": co.BlockDiagonal,
    "sum": lambda lin: 0.5 * co.GGN(lin) + 0.5 * co.GGN(lin),
}
FOLLOWING = {"GGN", "empirical", "KFAC", "diagonal", "EKFAC", "blocks", "sum", "Hessian"}
FULL, ONE = torch.full((D,), 50.0, dtype=DOUBLE), torch.tensor(50.0, dtype=DOUBLE)
GIVEN = {
    "numbers": {"noise": torch.tensor([0.3], dtype=DOUBLE), "prior": ONE, "mean": ONE / 500},
    "vectors": {"prior": FULL, "mean": FULL / 500},
    "copies": {"noise": torch.tensor(0.3), "prior": torch.tensor(50.0)},  # of another dtype
    "layers": {"layer": ONE, "mean": FULL.float() / 500},
}


def posterior(curvature, noise=0.3, prior=50.0, mean=0.0, layer=None):
    torch.manual_seed(1)
    data = torch.randn(12, 3, dtype=DOUBLE), torch.randn(12, 1, dtype=DOUBLE)
    lin = co.linearize(network(), data, co.likelihoods.Gaussian(noise))
    precision = prior if layer is None else {"0.*": layer, "[23].*": prior}
    return co.laplace(lin, MADE[curvature](lin), precision, mean, check_mode=False)


def said(post):
    """What a posterior answers, as one vector, and a draw last."""
    _ = post.precision @ V  # the engine is built after the first product, and rounds in its own way
    predicted = post.predict(X)
    return torch.cat(
        [
            *(predicted.mean.flatten(), predicted.variance.flatten(), post.precision @ V, post.prior_mean.reshape(-1)),
            *(post.log_evidence().value.reshape(1), post.effective_parameters().value.reshape(1)),
            torch.tensor([post.mode_gap], dtype=DOUBLE),
            post.deviations(1, generator=torch.Generator().manual_seed(0)).draws.flatten(),
        ]
    )


@pytest.mark.parametrize("curvature", MADE)
def test_what_was_given_changes_no_posterior_afterwards(curvature):
    """Numbers for each curvature; vectors, copies and layers, which are read in one place, for three."""
    for what, values in GIVEN.items() if curvature in ("GGN", "KFAC", "low rank") else [("numbers", GIVEN["numbers"])]:
        given = {name: value.clone() for name, value in values.items()}
        before, late = (posterior(curvature, **given) for _ in range(2))
        expected = said(before)
        for tensor in given.values():
            tensor.mul_(2)
        for post in (before, late):  # `late` has not been asked before
            torch.testing.assert_close(said(post), expected, rtol=0, atol=0, msg=f"{curvature}, {what}")


LEARNED = [
    *(("noise", curvature) for curvature in MADE),
    *(("prior", curvature) for curvature in ("GGN", "KFAC", "EKFAC", "blocks", "Hessian", "dense")),
    *(("vector", curvature) for curvature in ("GGN", "diagonal", "low rank")),
    ("mean", "GGN"),
]


@pytest.mark.parametrize(("what", "curvature"), LEARNED)
def test_what_is_learned_is_followed_or_refused_by_name(what, curvature):
    """A loop that moves a tensor in place under one posterior: every answer is that of a posterior made anew."""
    name, value = {"vector": ("prior", FULL)}.get(what, (what, GIVEN["numbers"].get(what)))
    given = value.clone().requires_grad_()
    follows = what != "noise" or curvature in FOLLOWING
    with torch.set_grad_enabled(follows and what == "noise"):
        post = posterior(curvature, **{name: given})
    with torch.no_grad():
        said(post)
        for change in (lambda t: t.mul_(2), lambda t: t.data.mul_(0.7)):
            change(given)
            if follows:
                anew = said(posterior(curvature, **{name: given.detach().clone()}))
                parts = slice(-D if curvature == "Hessian" else None)  # eigenvectors have no sign of their own
                torch.testing.assert_close(said(post)[parts], anew[parts], rtol=1e-8, atol=1e-8)
            else:
                for answer in (post.log_evidence, partial(post.predict, X), partial(post.sample, 1)):
                    with pytest.raises(ValueError, match="has changed since .* was built"):
                        answer()


@pytest.mark.parametrize(("group", "name"), [("copies", "noise"), ("copies", "prior"), ("layers", "layer")])
def test_a_gradient_through_a_copy_is_refused_once_its_origin_has_changed(group, name):
    given = GIVEN[group][name].clone().requires_grad_()
    post = posterior("GGN", **{name: given})
    (slope,) = torch.autograd.grad(post.log_evidence().value, given)
    step, double = 1e-5, given.detach().double()
    either = [posterior("GGN", **{name: double + sign * step}).log_evidence().value for sign in (1, -1)]
    torch.testing.assert_close(slope.double(), (either[0] - either[1]) / (2 * step), rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        given.mul_(2)
    with pytest.raises(ValueError, match="changed after it was given"):
        torch.autograd.grad(post.log_evidence().value, given)


def test_options_and_positions_are_copies_too():
    torch.manual_seed(2)
    x, labels, yes = torch.randn(12, 3, dtype=DOUBLE), torch.arange(12) % 3, torch.rand(12, 3).round().double()
    weight, positive = torch.rand(3, dtype=DOUBLE) + 0.5, torch.rand(3, dtype=DOUBLE) + 0.5
    index, subset, A = torch.arange(0, 41, 2), torch.arange(5), torch.rand(41, dtype=DOUBLE) + 1
    make = {
        "class weights": (weight, lambda: co.linearize(network(3), (x, labels), co.likelihoods.Categorical(weight))),
        "a loss's": (weight, lambda: co.linearize(network(3), (x, labels), nn.CrossEntropyLoss(weight=weight))),
        "pos_weight": (
            positive,
            lambda: co.linearize(network(3), (x, yes), co.likelihoods.Bernoulli(pos_weight=positive)),
        ),
        "positions": (index, lambda: co.linearize(network(3), (x, labels), "classification", index)),
    }
    for what, (given, linearize) in make.items():
        lin = linearize()
        v = torch.ones(lin.num_parameters, dtype=DOUBLE)
        made = co.KFAC(lin) if what != "positions" else co.DiagonalGGN(lin)

        def answers(lin=lin, made=made, v=v):
            return torch.cat([lin.gradient(), co.GGN(lin) @ v, made @ v, lin.log_likelihood().reshape(1)])

        expected, was = answers(), given.clone()
        given.add_(1)
        torch.testing.assert_close(answers(), expected, rtol=1e-12, atol=1e-12, msg=what)
        given.copy_(was)
    lin = make["class weights"][1]()
    block, kernel = co.Subnetwork(co.GGN(lin), subset), co.TangentKernel(lin, A)
    expected = [block.to_dense().clone(), kernel.to_dense().clone()]
    subset.add_(7), A.mul_(2)
    torch.testing.assert_close([block.to_dense(), kernel.to_dense()], expected, rtol=0, atol=0)
    assert (
        co.linearize(network(3), (x, labels), co.likelihoods.Categorical(weight.requires_grad_()))
        .log_likelihood()
        .requires_grad
        is False
    )


@pytest.mark.parametrize("engine", ["auto", "autodiff", "layerwise", "streamed"])
def test_data_that_change_in_place_are_refused_or_change_nothing(engine):
    """They are not copied: what kept a pass answers as before, and what reads them again says that they changed."""
    torch.manual_seed(3)
    x, y = torch.randn(12, 3, dtype=DOUBLE), torch.randn(12, 1, dtype=DOUBLE)
    lin, v = (
        co.linearize(network(), (x, y), co.likelihoods.Gaussian(noise=1.0), engine=engine),
        torch.ones(D, dtype=DOUBLE),
    )
    asked = {
        "GGN": lambda: co.GGN(lin) @ v,
        "Fisher": lambda: co.EmpiricalFisher(lin) @ v,
        "KFAC": lambda: co.KFAC(lin) @ v,
        "gradient": lambda: lin.gradient(),
        "likelihood": lambda: lin.log_likelihood(),
        "Hessian": lambda: co.Hessian(lin) @ v,
        "variance": lambda: co.laplace(lin, co.GGN, 1.0, check_mode=False).predict(X).variance,
    }
    expected = {what: answer() for what, answer in asked.items() for _ in range(3)}
    for changed in (x, y):
        changed.mul_(2)
        for what, answer in asked.items():
            with contextlib.suppress(co.errors.DataChangedError):
                torch.testing.assert_close(answer(), expected[what], rtol=1e-12, atol=0, msg=what)
