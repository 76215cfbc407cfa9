"""Predictive distributions at any scale of the targets: no floor, no warning, gradients.

`tests/gp/test_citizenship.py` asks what gpytorch makes of them.

Tests `normals.py`.
"""

import functools
import warnings

import pytest
import torch
from torch import nn

import curvops as co
from tests.zoo_modules import Applied

SCALES = [1.0, 1e-6, 1e6]
DTYPES = [torch.float64, torch.float32]
CURVATURES = [co.GGN, co.KFAC, co.DiagonalGGN]
X = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@functools.cache
def posterior(scale, dtype=torch.float64, curvature=co.GGN):
    """Targets, noise and network in one unit: every variance of the outputs is scale² times that at scale 1."""
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), Applied(lambda f: scale * f)
    model = nn.Sequential(*layers).double().to(dtype)
    x = torch.randn(20, 3, dtype=torch.float64).to(dtype)
    likelihood = co.likelihoods.Gaussian(noise=torch.tensor([0.1, 0.2], dtype=dtype) * scale**2)
    lin = co.linearize(model, (x, scale * x[:, :2].sin()), likelihood)
    return co.laplace(lin, curvature, prior_precision=2.0, check_mode=False)


@pytest.fixture(autouse=True)
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


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
