"""What `reprior` finds as a readout, and the precisions of a tangent-kernel prior.

Tests `changes_of_weights.py`.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvops as co
from tests.sampling.readouts import Wrapped
from tests.sampling.repriors import NOISE, jacobian, mlp, one, regression

reprior = co.sampling.reprior
pytestmark = pytest.mark.usefixtures("annotations_unchecked")


class Scaled(nn.Module):
    """A layer in the tangent-kernel parametrisation: not an nn.Linear, but linear in what it holds."""

    def __init__(self, d, outputs):
        super().__init__()
        self.matrix, self.offset = nn.Parameter(torch.randn(outputs, d)), nn.Parameter(torch.randn(outputs))

    def forward(self, h):
        return F.linear(h, self.matrix * (2.0 / h.shape[1]) ** 0.5, 0.1 * self.offset)


DATA = regression()


def test_the_same_regression_is_taken_in_float64():
    assert reprior(mlp(3, 20, 2), DATA, 1e-7, form="feature").reg == 1e-7
    assert reprior(mlp(3, 20, 2).float(), DATA, 1e-7, 1e-2, form="feature").reg == 1e-2


def test_the_readout_is_found_whatever_the_order_of_registration():
    rep = reprior(Wrapped(nn.Linear(4, 2)), DATA, NOISE)
    assert rep.readout == ("head.weight", "head.bias")
    named = reprior(Wrapped(nn.Linear(4, 2)), DATA, NOISE, last="head")
    assert named.readout == rep.readout


@pytest.mark.parametrize("form", ["feature", "data"])
def test_a_readout_may_scale_its_parameters(form):
    rep = reprior(Wrapped(Scaled(4, 2)), DATA, NOISE, form=form)
    phi = one(rep)
    assert rep.readout == ("head.matrix", "head.offset")
    torch.testing.assert_close(rep.logdet(phi), torch.linalg.slogdet(jacobian(rep, phi))[1], rtol=1e-10, atol=1e-10)
    leaves = {name: block.requires_grad_() for name, block in phi.items()}
    gradient = torch.autograd.grad(rep.energy(leaves), leaves["head.matrix"])[0]
    torch.testing.assert_close(gradient, phi["head.matrix"].detach(), rtol=1e-10, atol=1e-10)


def test_a_proposal_far_away_has_no_density_and_no_error():
    rep = reprior(mlp(3, 4, 2), DATA, NOISE)
    far = {name: block * math.inf for name, block in one(rep).items()}
    assert not math.isfinite(float(rep(far)))


def test_precisions_of_fan_in():
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.ConvTranspose2d(6, 4, 2), nn.Flatten(), nn.Linear(8, 2))
    found = co.sampling.ntk_precision(model, 2.0, 0.5)
    assert found == {
        "0.weight": 18 / 4, "0.bias": 4.0, "1.weight": 24 / 4, "1.bias": 4.0, "3.weight": 2.0, "3.bias": 4.0,
    }  # fmt: skip
    model[0].bias.requires_grad_(False)
    assert "0.bias" not in co.sampling.ntk_precision(model)
