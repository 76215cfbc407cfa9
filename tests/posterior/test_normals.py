"""Predictive distributions at any scale of the targets: no floor, no warning, gradients, and what is made of them.

Tests `normals.py`.
"""

import copy
import functools
import pickle
import warnings

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from torch import nn

import curvops as co

SCALES = [1.0, 1e-6, 1e6]
DTYPES = [torch.float64, torch.float32]
CURVATURES = [co.GGN, co.KFAC, co.DiagonalGGN]
X = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Times(nn.Module):
    """A network whose outputs are multiplied by a number, as are its targets."""

    def __init__(self, scale):
        super().__init__()
        self.net, self.scale = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), scale

    def forward(self, x):
        return self.scale * self.net(x)


@functools.cache
def posterior(scale, dtype=torch.float64, curvature=co.GGN):
    """Targets, noise and network in one unit: every variance of the outputs is scale² times that at scale 1."""
    torch.manual_seed(0)
    model = Times(scale).double().to(dtype)
    x = torch.randn(20, 3, dtype=torch.float64).to(dtype)
    likelihood = co.likelihoods.Gaussian(noise=torch.tensor([0.1, 0.2], dtype=dtype) * scale**2)
    lin = co.linearize(model, (x, scale * x[:, :2].sin()), likelihood)
    return co.laplace(lin, curvature, prior_precision=2.0, check_mode=False)


def likelihood(scale, outputs, joint):
    """gpytorch's own likelihood with a noise in the unit of the targets."""
    given = {"noise_constraint": gpytorch.constraints.Positive(torch.exp, torch.log)}
    made = gpytorch.likelihoods.GaussianLikelihood(**given).double()
    if joint:
        made = gpytorch.likelihoods.MultitaskGaussianLikelihood(outputs, has_task_noise=False, **given).double()
    made.noise = torch.tensor(0.3 * scale**2, dtype=X.dtype)
    return made


def plain(d):
    """The same distribution of gpytorch's own class."""
    kind = MultitaskMultivariateNormal if isinstance(d, MultitaskMultivariateNormal) else MultivariateNormal
    return kind(d.mean, d.lazy_covariance_matrix)


MADE = {
    "itself": lambda d, scale: d,
    "points": lambda d, scale: d[1:4],
    "a point": lambda d, scale: d[2],
    "an output": lambda d, scale: d[..., 1],
    "some outputs": lambda d, scale: d[1:4, 0:1],
    "multiple": lambda d, scale: d * 3,
    "quotient": lambda d, scale: d / 3,
    "shifted": lambda d, scale: d + scale,
    "sum": lambda d, scale: d + d,
    "with gpytorch's": lambda d, scale: d + plain(d),
    "gpytorch's with it": lambda d, scale: plain(d) + d,
    "summed": lambda d, scale: sum([d, d]),
    "marginal": lambda d, scale: likelihood(scale, 2, isinstance(d, MultitaskMultivariateNormal))(d),
    "pickled": lambda d, scale: pickle.loads(pickle.dumps(d)),
    "copied": lambda d, scale: copy.deepcopy(d),
    "expanded": lambda d, scale: d.expand(torch.Size((2, *d.batch_shape))),
    "each point": lambda d, scale: d.to_data_independent_dist(),
}


@pytest.fixture(autouse=True)
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@functools.cache
def prediction(scale, kind):
    """One for all that is made of it."""
    post = posterior(scale)
    draws = post.mean + torch.randn(9, len(post.mean), dtype=X.dtype, generator=torch.Generator().manual_seed(2))
    return post.predict(X, **{"independent": {}, "joint": {"joint": True}, "drawn": {"samples": draws}}[kind])


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("kind", ["independent", "joint", "drawn"])
def test_what_is_made_of_a_prediction_has_its_variances(kind, made):
    def variance(scale):
        found = MADE[made](prediction(scale, kind), scale)
        torch.testing.assert_close(found.stddev, found.variance.sqrt(), rtol=1e-12, atol=0)
        if hasattr(found, "confidence_region"):
            low, high = found.confidence_region()
            torch.testing.assert_close((high - low) / 4, found.stddev, rtol=1e-8, atol=0)
        if isinstance(found, MultivariateNormal):
            diagonal = found.covariance_matrix.diagonal(dim1=-2, dim2=-1).reshape(found.variance.shape)
            torch.testing.assert_close(found.variance, diagonal, rtol=1e-12, atol=0)
        return found.variance

    torch.testing.assert_close(variance(1e-6) / 1e-6**2, variance(1.0), rtol=1e-10, atol=0)


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_predictions_are_equivariant_to_the_unit_of_the_targets(dtype, curvature):
    """Variances, their gradient in x, intervals, roots, draws, densities and decompositions."""
    rtol = 1e-10 if dtype == torch.float64 else 1e-4

    def answers(scale):
        post, x = posterior(scale, dtype, curvature), X.to(dtype).clone().requires_grad_()
        predicted, joint = post.predict(x), post.predict(x.detach(), joint=True)
        (gradient,) = torch.autograd.grad(predicted.confidence_region()[1].sum(), x)
        drawn = post.predict(x.detach(), samples=torch.full((4, len(post.mean)), 0.3, dtype=dtype))
        parts = post.uncertainty(x.detach())
        noise = torch.randn(3, *joint.mean.shape, dtype=dtype, generator=torch.Generator().manual_seed(3))
        targets = scale * X[:, :2].to(dtype).cos()
        density = post.predict(x.detach(), noise=True).log_prob(targets) + 2 * torch.tensor(scale, dtype=dtype).log()
        held_out = post.log_likelihood(x.detach(), targets).value + 2 * torch.tensor(scale, dtype=dtype).log()
        torch.manual_seed(0)
        return {
            "variance": predicted.variance.detach() / scale**2,
            "joint": joint.variance / scale**2,
            "gradient": gradient / scale,
            "interval": torch.stack(drawn.variance_interval()) / scale**2,
            "epistemic": parts.epistemic / scale**2,
            "total": parts.total / scale**2,
            "given noise": (joint.rsample(base_samples=noise) - joint.mean) / scale,
            "drawn": (joint.rsample(torch.Size([2])) - joint.mean) / scale,
            "density": density,
            "held out": held_out,
        }

    unit = answers(1.0)
    for scale in SCALES[1:]:
        for name, found in answers(scale).items():
            size = float(unit[name].abs().max())
            torch.testing.assert_close(found, unit[name], rtol=rtol, atol=10 * rtol * size, msg=name)


def test_gradients_of_standard_deviations_are_those_of_the_definition():
    """By differences, at a scale where gpytorch's floor would give none."""
    post, x, step = posterior(1e-6), X.clone().requires_grad_(), 1e-5
    (gradient,) = torch.autograd.grad(post.predict(x).stddev.sum(), x)
    for entry in [(0, 0), (3, 2)]:
        moved = torch.zeros_like(X)
        moved[entry] = step
        change = post.predict(X + moved).stddev.sum() - post.predict(X - moved).stddev.sum()
        torch.testing.assert_close(gradient[entry], change / (2 * step), rtol=1e-6, atol=0)


def test_a_root_of_a_singular_covariance_is_one_of_it_alone():
    """More outputs than weights: what makes the matrix definite is small beside it at any scale."""
    for scale in SCALES:
        torch.manual_seed(0)
        root = scale * torch.randn(3, 12, 4, dtype=torch.float64)
        covariance = co.linalg.Dense(root @ root.mT, psd=True)
        found = covariance.root_decomposition().root.to_dense()
        torch.testing.assert_close(found @ found.mT / scale**2, root @ root.mT / scale**2, rtol=1e-10, atol=1e-10)
    zero = co.linalg.Dense(torch.zeros(5, 5, dtype=torch.float64), psd=True)
    assert not zero.zero_mean_mvn_samples(3).any()
