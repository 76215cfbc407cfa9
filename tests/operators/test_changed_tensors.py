"""A tensor inside an operator that changes in place changes every answer; what was answered belongs to its reader."""

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


@pytest.fixture(scope="module")
def lin():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.Linear(2, 1)).double()
    return co.linearize(model, (torch.randn(12, 3, dtype=DOUBLE), torch.randn(12, 1, dtype=DOUBLE)), "regression")


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


def test_a_noise_that_changes_in_place_changes_the_evidence():
    torch.manual_seed(0)
    data = torch.randn(12, 3, dtype=DOUBLE), torch.randn(12, 1, dtype=DOUBLE)
    model, noise = nn.Linear(3, 1).double(), torch.tensor(0.3, dtype=DOUBLE)

    def posterior(noise):
        return co.laplace(co.linearize(model, data, co.likelihoods.Gaussian(noise)), check_mode=False)

    def answers(post):
        return post.log_evidence().value, post.effective_parameters().value, torch.tensor(post.mode_gap)

    post = posterior(noise)
    answers(post)
    noise.mul_(2)
    for found, expected in zip(answers(post), answers(posterior(noise.clone()))):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
