"""Reward models: two items a point, and what is said of a preference comes from the difference of their rewards.

Tests `categorical.py`.
"""

import pytest
import torch
from torch import nn

import curvops as co
from tests.posterior.test_predictive import normal_average
from tests.randomness import perceptron, seeded

DOUBLE = torch.float64
TIGHT = {"rtol": 1e-10, "atol": 1e-10}
CURVATURES = [co.GGN, co.KFAC, co.EKFAC, co.DiagonalGGN]


class Named(nn.Module):
    """Inputs by name, and logits in an object, as a Hugging Face model has them."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, scale):
        return type("Output", (), {"logits": self.net(x * scale)})


def reward():
    return perceptron(3, 5, 1)


PAIRS = torch.randn(12, 2, 3, dtype=DOUBLE, generator=seeded(1))
NEW = torch.randn(4, 2, 3, dtype=DOUBLE, generator=seeded(2))
CHOSEN = torch.arange(12) % 2


def posterior(curvature=co.GGN, model=None, pairs=PAIRS, targets=CHOSEN, **options):
    model = co.likelihoods.RewardPairs(model or reward())
    lin = co.linearize(model, (pairs, targets), co.likelihoods.BradleyTerry(), **options)
    return co.laplace(lin, curvature, prior_precision=0.7, check_mode=False)


@pytest.mark.parametrize("parameters", [None, "last_layer"])
@pytest.mark.parametrize("curvature", CURVATURES)
def test_rewards_and_their_difference_are_those_of_the_dense_matrix(curvature, parameters):
    """J of single items by autograd; G of the difference, of which each pair is one Bernoulli trial."""
    net, post = reward(), posterior(curvature, parameters=parameters)
    names = [name.removeprefix("model.") for name in post.lin.model.selection.names]
    params = {name: tensor.detach() for name, tensor in net.named_parameters()}

    def rows(items):
        chosen = {name: params[name] for name in names}
        call = lambda given: torch.func.functional_call(net, {**params, **given}, items).squeeze(-1)  # noqa: E731
        found = torch.func.jacrev(call)(chosen)
        return torch.cat([found[name].flatten(1) for name in names], 1), call(chosen)

    J, f = rows(PAIRS.flatten(0, 1))
    apart, margin = J[1::2] - J[::2], f[1::2] - f[::2]
    G = apart.mT @ (margin.sigmoid() * (-margin).sigmoid()).diag() @ apart
    torch.testing.assert_close(co.GGN(post.lin).to_dense(), G, **TIGHT)
    P = post.precision.to_dense()
    if curvature is co.GGN:
        torch.testing.assert_close(P, G + 0.7 * torch.eye(len(P), dtype=DOUBLE), **TIGHT)
    J, f = rows(NEW.flatten(0, 1))
    covariance = J @ torch.linalg.solve(P, J.mT)
    predicted = post.predict(NEW)
    torch.testing.assert_close(predicted.mean, f.view(4, 2), **TIGHT)
    for n in range(4):
        block = slice(2 * n, 2 * n + 2)
        torch.testing.assert_close(predicted.covariance_matrix[n], covariance[block, block], **TIGHT)
    torch.testing.assert_close(post.predict(NEW, joint=True).covariance_matrix, covariance, **TIGHT)
    D = J[1::2] - J[::2]
    variance, margin = (D @ torch.linalg.solve(P, D.mT)).diagonal(), f[1::2] - f[::2]
    second = (margin / (1 + torch.pi / 8 * variance).sqrt()).sigmoid()
    torch.testing.assert_close(post.probabilities(NEW), torch.stack([1 - second, second], 1), **TIGHT)
    exact = normal_average(torch.sigmoid, margin, variance)
    assert float((post.probabilities(NEW)[:, 1] - exact).abs().max()) < 0.02
    drawn = post.probabilities(NEW, "mc", generator=seeded(3))[:, 1]
    assert float((drawn - exact).abs().max()) < 5 * 0.5 / 1000**0.5


def test_what_all_rewards_have_in_common_does_not_matter():
    """Adding one number to all rewards, however uncertain it is, changes no preference."""
    mean, covariance = torch.randn(5, 2, dtype=DOUBLE), torch.eye(2, dtype=DOUBLE).expand(5, 2, 2)
    preference = co.posterior.predictions.answers.preference
    found = preference(mean, covariance).softmax(-1)
    torch.testing.assert_close(preference(mean + 7, covariance + 1e4).softmax(-1), found, **TIGHT)
    torch.testing.assert_close(found.sum(1), torch.ones(5, dtype=DOUBLE), **TIGHT)
    assert bool((posterior().uncertainty(NEW, generator=seeded()).epistemic > 0).all())


def test_mappings_soft_preferences_and_files(tmp_path):
    scale = torch.ones(12, 2, 1, dtype=DOUBLE)
    named = posterior(model=Named(reward()), pairs={"x": PAIRS, "scale": scale})
    expected = posterior().predict(NEW)
    found = named.predict({"x": NEW, "scale": scale[:4]})
    torch.testing.assert_close(found.covariance_matrix, expected.covariance_matrix, **TIGHT)
    soft = posterior(targets=nn.functional.one_hot(CHOSEN, 2).double())
    torch.testing.assert_close(soft.predict(NEW).covariance_matrix, expected.covariance_matrix, **TIGHT)
    posterior(co.KFAC).save(tmp_path / "post")
    back = co.load(tmp_path / "post", co.likelihoods.RewardPairs(reward()))
    torch.testing.assert_close(back.probabilities(NEW), posterior(co.KFAC).probabilities(NEW), **TIGHT)
