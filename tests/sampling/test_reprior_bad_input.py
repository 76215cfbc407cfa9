"""What `reprior` refuses, by name; and what it finds as a readout.

Tests `ntk_precision.py`, `readout.py`, `reprior_problem.py`.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvops as co
from tests.sampling.repriors import NOISE, classes, flat, jacobian, mlp, one, regression

reprior = co.sampling.reprior
pytestmark = pytest.mark.usefixtures("annotations_unchecked")


class Wrapped(nn.Module):
    """A body, a readout, and whatever comes after it."""

    def __init__(self, head, after=lambda f, h: f):
        super().__init__()
        self.head, self.body, self.after = head, nn.Linear(3, 4), after  # the readout is registered first
        self.double()

    def forward(self, x):
        h = self.body(x).tanh()
        return self.after(self.head(h), h)


class Tied(nn.Module):
    """A weight that serves two layers."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.head.weight = self.body.weight
        self.double()

    def forward(self, x):
        return self.head(self.body(x).tanh())


class Scaled(nn.Module):
    """A layer in the tangent-kernel parametrisation: not an nn.Linear, but linear in what it holds."""

    def __init__(self, d, outputs):
        super().__init__()
        self.matrix, self.offset = nn.Parameter(torch.randn(outputs, d)), nn.Parameter(torch.randn(outputs))

    def forward(self, h):
        return F.linear(h, self.matrix * (2.0 / h.shape[1]) ** 0.5, 0.1 * self.offset)


class Exponential(nn.Linear):
    """A layer that is not linear in its weight."""

    def forward(self, h):
        return F.linear(h, self.weight.exp(), self.bias)


def frozen_head():
    model = mlp(3, 4, 2)
    model[2].bias.requires_grad_(False)
    return model


def with_nan():
    model = nn.Sequential(nn.Linear(3, 4), Infinite(), nn.Linear(4, 2)).double()
    return model


class Infinite(nn.Module):
    """Features that overflow at the fourth point."""

    def forward(self, h):
        return torch.cat([h[:3], h[3:] * math.inf]) if len(h) > 3 else h


DATA = regression()
BAD = {
    "no noise": (lambda: reprior(mlp(3, 4, 2), DATA), ValueError, "noise is missing"),
    "noise 0": (lambda: reprior(mlp(3, 4, 2), DATA, 0.0), ValueError, "noise must be positive and finite, got 0"),
    "negative noise": (lambda: reprior(mlp(3, 4, 2), DATA, -1), ValueError, "noise must be positive"),
    "infinite noise": (lambda: reprior(mlp(3, 4, 2), DATA, math.inf), ValueError, "noise must be positive and finite"),
    "noise is a vector": (lambda: reprior(mlp(3, 4, 2), DATA, torch.ones(2)), TypeError, "noise must be a number"),
    "noise is a flag": (lambda: reprior(mlp(3, 4, 2), DATA, True), TypeError, "noise must be a number"),
    "reg 0": (lambda: reprior(mlp(3, 4, 2), DATA, NOISE, 0), ValueError, "reg must be positive, got 0"),
    "reg negative": (lambda: reprior(mlp(3, 4, 2), DATA, NOISE, -0.1), ValueError, "reg must be positive"),
    "reg is NaN": (lambda: reprior(mlp(3, 4, 2), DATA, NOISE, math.nan), ValueError, "reg must be positive"),
    "reg infinite, ntk": (
        lambda: reprior(mlp(3, 4, 2), DATA, NOISE, math.inf, "ntk"),
        ValueError,
        "reg must be positive and finite",
    ),
    "form": (lambda: reprior(mlp(3, 4, 2), DATA, NOISE, form="cholesky"), ValueError, "'feature', 'data', 'ntk'"),
    "last with ntk": (lambda: reprior(mlp(3, 4, 2), DATA, NOISE, form="ntk", last="2"), ValueError, "leave one"),
    "no points": (
        lambda: reprior(mlp(3, 4, 2), (torch.zeros(0, 3), torch.zeros(0, 2)), NOISE),
        ValueError,
        "[Tt]he data are empty|hold no points",
    ),
    "targets of another shape": (
        lambda: reprior(mlp(3, 4, 2), (DATA[0], DATA[1][:, :1]), NOISE),
        ValueError,
        r"\(6, 1\)",
    ),
    "labels as real targets": (lambda: reprior(mlp(3, 4, 3), classes(), NOISE), TypeError, "classification"),
    "targets as classes": (
        lambda: reprior(mlp(3, 4, 2), DATA, NOISE, likelihood="classification"),
        ValueError,
        "class probabilities",
    ),
    "classes without a level": (
        lambda: reprior(mlp(3, 4, 3), classes(), likelihood="classification"),
        ValueError,
        "classes need reg=λ",
    ),
    "regression by name": (
        lambda: reprior(mlp(3, 4, 2), DATA, likelihood="regression"),
        ValueError,
        "give noise=variance alone",
    ),
    "two variances": (
        lambda: reprior(mlp(3, 4, 2), DATA, NOISE, likelihood=co.likelihoods.Gaussian(1.0)),
        ValueError,
        "both give a variance",
    ),
    "a variance an output": (
        lambda: reprior(mlp(3, 4, 2), DATA, likelihood=co.likelihoods.Gaussian(torch.tensor([1.0, 2.0]))),
        ValueError,
        "one noise variance",
    ),
    "counts": (
        lambda: reprior(mlp(3, 4, 2), (DATA[0], torch.ones(6, 2)), NOISE, likelihood=co.likelihoods.Poisson()),
        TypeError,
        "real targets with one noise variance, or classes",
    ),
    "an unannounced third item": (
        lambda: reprior(mlp(3, 4, 2), (*DATA, torch.ones(6)), NOISE),
        TypeError,
        "of unknown meaning",
    ),
    "a softmax": (lambda: reprior(Wrapped(nn.Linear(4, 2), lambda f, h: f.softmax(1)), DATA, NOISE), ValueError,
                  "no linear readout: no single layer"),
    "a softmax, named": (
        lambda: reprior(Wrapped(nn.Linear(4, 2), lambda f, h: f.softmax(1)), DATA, NOISE, last="head"),
        ValueError,
        "not linear in its parameters, or another operation follows",
    ),
    "a branch beside it": (
        lambda: reprior(Wrapped(nn.Linear(4, 2), lambda f, h: f + h[:, :2]), DATA, NOISE, last="head"),
        ValueError,
        "another operation follows it",
    ),
    "not linear in its weight": (lambda: reprior(Wrapped(Exponential(4, 2)), DATA, NOISE), ValueError,
                                 "not linear in its parameters"),
    "not the last": (lambda: reprior(mlp(3, 4, 2), DATA, NOISE, last="0"), ValueError, r"readout '0' \(Linear\)"),
    "an activation": (lambda: reprior(mlp(3, 4, 2), DATA, NOISE, last="1"), ValueError, "has no parameters"),
    "an unknown name": (lambda: reprior(mlp(3, 4, 2), DATA, NOISE, last="head"), ValueError, r"are \['0', '2'\]"),
    "a module": (lambda: reprior(mlp(3, 4, 2), DATA, NOISE, last=nn.Linear(4, 2)), TypeError, "must be the name"),
    "shared": (lambda: reprior(Tied(), regression(outputs=3), NOISE), ValueError, "shares its weight with body.weight"),
    "frozen": (lambda: reprior(frozen_head(), DATA, NOISE), ValueError, r"\['2.bias'\] are to be sampled"),
    "a function": (
        lambda: reprior((lambda p, x: x @ p["w"], {"w": torch.ones(3, 2).double()}), DATA, NOISE),
        TypeError,
        "readout of an nn.Module",
    ),
    "called twice": (
        lambda: reprior(Twice(), regression(outputs=4, inputs=4), NOISE, last="head"),
        ValueError,
        "called 2 times",
    ),
    "not finite": (lambda: reprior(with_nan(), DATA, NOISE), ValueError, "NaN or Inf"),
    "train mode": (
        lambda: reprior(nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 2)).double(), DATA, NOISE),
        ValueError,
        "eval",
    ),
    "a prior by rows": (
        lambda: reprior(mlp(3, 4, 2), DATA, NOISE, prior_precision=torch.arange(1.0, 27.0)),
        ValueError,
        "differs between the rows of the readout's '2.weight'",
    ),
    "a prior operator": (
        lambda: reprior(mlp(3, 4, 2), DATA, NOISE, prior_precision=co.linalg.Dense(torch.eye(26).double(), psd=True)),
        TypeError,
        "independent weights",
    ),
    "a prior of 0": (lambda: reprior(mlp(3, 4, 2), DATA, NOISE, prior_precision=0.0), ValueError, "positive"),
    "float32 beyond its digits": (
        lambda: reprior(mlp(3, 20, 2).float(), DATA, 1e-7, form="feature"),
        ValueError,
        r"beyond torch.float32.*model.double\(\)",
    ),
}  # fmt: skip


class Twice(nn.Module):
    """A readout that is applied to its own outputs."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4).double()

    def forward(self, x):
        return self.head(self.head(x).tanh())


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_by_name(case):
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()


def test_the_same_regression_is_taken_in_float64():
    assert reprior(mlp(3, 20, 2), DATA, 1e-7, form="feature").reg == 1e-7
    assert reprior(mlp(3, 20, 2).float(), DATA, 1e-7, 1e-2, form="feature").reg == 1e-2


CALLS = {
    "a vector": (lambda rep, phi: rep.map(flat(phi)), TypeError, "phi must be a mapping of parameter names"),
    "a name less": (lambda rep, phi: rep.energy({"0.weight": phi["0.weight"]}), ValueError, r"missing \['0.bias'"),
    "a name more": (lambda rep, phi: rep.logdet({**phi, "3": phi["0.bias"]}), ValueError, r"unknown \['3'\]"),
    "stacked": (lambda rep, phi: rep.map(rep.normal(2)), ValueError, "torch.vmap"),
    "float32": (
        lambda rep, phi: rep({n: b.float() for n, b in phi.items()}),
        ValueError,
        "float32 on cpu, the network",
    ),
    "theta": (lambda rep, phi: rep.inverse(list(phi)), TypeError, "theta must be a mapping"),
    "no draws": (lambda rep, phi: rep.sample(0), ValueError, "at least 1"),
    "half a draw": (lambda rep, phi: rep.normal(1.5), TypeError, "whole number"),
    "one sample": (lambda rep, phi: rep.divergence(1), ValueError, "at least 2"),
    "one draw": (lambda rep, phi: rep.gradient_gap(rep.normal(1)), ValueError, "at least 2"),
    "a seed": (lambda rep, phi: rep.sample(2, 0), TypeError, "manual_seed"),
    "no estimate": (lambda rep, phi: rep.estimated_logdet(phi), ValueError, "closed form: use logdet"),
    "a batch of two lengths": (
        lambda rep, phi: rep(phi, (DATA[0], DATA[1][:2])),
        ValueError,
        "6 inputs and 2 targets",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_bad_calls_are_refused_by_name(case):
    rep = reprior(mlp(3, 4, 2), DATA, NOISE)
    call, error, message = CALLS[case]
    with pytest.raises(error, match=message):
        call(rep, one(rep))


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


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d])
def test_under_precisions_of_fan_in_outputs_keep_the_variance_of_unit_inputs(kind, groups):
    """The variances of weights, summed over what an output inside the image sees, are σ_w²."""
    layer = kind(6, 4, 3, groups=groups)
    (of_weight, of_bias) = co.sampling.ntk_precision(layer, 1.5, 0.5).values()
    with torch.no_grad():
        layer.weight.fill_(1 / of_weight), layer.bias.fill_(1 / of_bias)
    size = (7,) * (layer.weight.ndim - 2)
    outputs = layer(torch.ones(1, 6, *size))[0].flatten(1)
    torch.testing.assert_close(outputs[:, outputs.shape[1] // 2], torch.full((4,), 1.5**2 + 0.5**2))


def test_precisions_of_fan_in():
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.ConvTranspose2d(6, 4, 2), nn.Flatten(), nn.Linear(8, 2))
    found = co.sampling.ntk_precision(model, 2.0, 0.5)
    assert found == {
        "0.weight": 18 / 4, "0.bias": 4.0, "1.weight": 24 / 4, "1.bias": 4.0, "3.weight": 2.0, "3.bias": 4.0,
    }  # fmt: skip
    model[0].bias.requires_grad_(False)
    assert "0.bias" not in co.sampling.ntk_precision(model)
    with pytest.raises(ValueError, match=r"\['1.weight', '1.bias'\] belong to no linear"):
        co.sampling.ntk_precision(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    with pytest.raises(TypeError, match="must be an nn.Module"):
        co.sampling.ntk_precision({"weight": 1.0})
    with pytest.raises(ValueError, match="weight_std must be positive"):
        co.sampling.ntk_precision(nn.Linear(2, 2), 0.0)
