"""The GGN of a last layer whose outputs do not interact, against dense definitions: a block for each output."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from tests.linalg.samples import assert_covariance
from tests.network.definitions import TIGHT, normal

N, T, C, WIDTH = 20, 3, 60, 5
lik = co.likelihoods


def network(y: Tensor) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, C)).double()
    return model, normal(N, T, 2) if y.ndim > 2 else normal(N, 2)


BY_OUTPUT: dict[str, tuple[Any, Tensor, Tensor | None]] = {
    "events": (lik.Bernoulli(), (normal(N, C, seed=5) > 1).double(), None),
    "events at positions": (lik.Bernoulli(), (normal(N, T, C, seed=5) > 1).double(), normal(N, T, seed=2).square()),
    "counts of weighted points": (lik.Poisson(), (normal(N, C, seed=5) > 1).double(), normal(N, seed=2).square()),
    "noises": (lik.Gaussian(torch.linspace(0.1, 2.0, C).double()), normal(N, C), None),
    "one noise": (lik.Gaussian(0.3), normal(N, C), None),
}


@pytest.mark.parametrize(("parameters", "dtype"), [("last_layer", torch.float64), ("2.weight", torch.float32)])
@pytest.mark.parametrize("name", BY_OUTPUT)
def test_a_posterior_over_outputs_that_do_not_interact_is_solved_output_by_output(
    name: str, parameters: str, dtype: torch.dtype
) -> None:
    likelihood, y, w = BY_OUTPUT[name]
    model, x = network(y)
    data = (x, y) if w is None else (x, y, w)
    kept = co.linearize(model, data, likelihood, parameters, weights=w is not None)
    dense = co.GGN(kept).to_dense()
    lin = kept.cast(dtype)
    tight = TIGHT if dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-4}
    D = lin.num_parameters
    prior = torch.linspace(0.5, 2.0, D).double()
    expected = dense + prior.diag()
    P = co.GGN(lin).add_diagonal(prior.to(dtype))
    b = normal(D, 3, seed=9)

    def close(found: Tensor, value: Tensor) -> None:
        torch.testing.assert_close(found.double(), value, **tight)

    close(P.solve(b.to(dtype)), torch.linalg.solve(expected, b))
    close(P.inverse().diagonal(), expected.inverse().diagonal())
    assert "closed form" in set(P.plan().chosen.values())
    post = co.laplace(lin, co.GGN(lin), prior_precision=prior.to(dtype), check_mode=False)
    assert set(post.plan(20).chosen.values()) == {"closed form"}
    at = normal(4, *x.shape[1:], seed=11)
    J = kept.jacobian(at).to_dense()
    covariance = J @ torch.linalg.solve(expected, J.mT)
    blocks = covariance.unflatten(0, (-1, C)).unflatten(2, (-1, C)).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    predicted = post.predict(at.to(dtype))
    close(predicted.variance.reshape(-1, C), blocks.diagonal(dim1=1, dim2=2))
    close(predicted.covariance_matrix.reshape(-1, C, C), blocks)
    together = post.predict(at.to(dtype), joint=True).covariance_matrix
    close(together, covariance)
    ratio = torch.linalg.slogdet(expected)[1] - prior.log().sum()
    close(post.log_evidence().log_determinant_ratio.value, ratio)
    if dtype == torch.float64:
        assert_covariance(lambda k, generator: co.linalg.draw(P.inverse(), k, generator), expected.inverse())


def test_the_gradient_for_a_prior_goes_through_the_blocks_by_output() -> None:
    model, x = network(normal(N, C))
    lin = co.linearize(model, (x, normal(N, C)), lik.Gaussian(0.5), "last_layer")
    prior = torch.tensor(2.0).double().requires_grad_()
    dense = co.GGN(lin).to_dense()
    expected = torch.linalg.slogdet(dense + prior * torch.eye(len(dense)).double())[1]
    value = co.GGN(lin).add_diagonal(prior).logdet()
    (found,), (gradient,) = (torch.autograd.grad(each, prior) for each in (value, expected))
    torch.testing.assert_close(found, gradient, **TIGHT)


def test_blocks_by_output_follow_a_noise_that_changes_in_place() -> None:
    noise = torch.full((C,), 0.5).double()
    model, x = network(normal(N, C))
    lin = co.linearize(model, (x, normal(N, C)), lik.Gaussian(noise.requires_grad_()), "last_layer")
    with torch.no_grad():
        G, b = co.GGN(lin), normal(lin.num_parameters, 1)
        for value in (0.5, 0.1):
            noise.fill_(value)
            for P in (G.add_diagonal(1.0), G.add_diagonal(2.0)):
                assert P.plan().chosen and torch.allclose(P @ P.solve(b), b, rtol=1e-9, atol=1e-10)
