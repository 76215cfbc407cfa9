"""What repriorisation refuses: `reprior`, its calls, and readouts that are not linear."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

import curvops as co
from tests.doors.door import Door
from tests.sampling.readouts import Wrapped
from tests.sampling.repriors import NOISE, classes, flat, mlp, one, regression

reprior = co.sampling.reprior
DATA = regression()


class Tied(nn.Module):
    """A weight that serves two layers."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.head.weight = self.body.weight
        self.double()

    def forward(self, x):
        return self.head(self.body(x).tanh())


class Exponential(nn.Linear):
    """A layer that is not linear in its weight."""

    def forward(self, h):
        return F.linear(h, self.weight.exp(), self.bias)


def frozen_head():
    model = mlp(3, 4, 2)
    model[2].bias.requires_grad_(False)
    return model


class Infinite(nn.Module):
    """Features that overflow at the fourth point."""

    def forward(self, h):
        return torch.cat([h[:3], h[3:] * math.inf]) if len(h) > 3 else h


def with_nan():
    model = nn.Sequential(nn.Linear(3, 4), Infinite(), nn.Linear(4, 2)).double()
    return model


class Twice(nn.Module):
    """A readout that is applied to its own outputs."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4).double()

    def forward(self, x):
        return self.head(self.head(x).tanh())


def rep() -> co.sampling.Reprior:
    return reprior(mlp(3, 4, 2), DATA, NOISE)


def phi() -> dict[str, torch.Tensor]:
    return one(rep())


DOORS = [
    Door(
        "reprior",
        rows={
            "no noise": (lambda: reprior(mlp(3, 4, 2), DATA), ValueError, "noise is missing"),
            "noise 0": (
                lambda: reprior(mlp(3, 4, 2), DATA, 0.0),
                ValueError,
                "noise must be positive and finite, got 0",
            ),
            "negative noise": (lambda: reprior(mlp(3, 4, 2), DATA, -1), ValueError, "noise must be positive"),
            "infinite noise": (
                lambda: reprior(mlp(3, 4, 2), DATA, math.inf),
                ValueError,
                "noise must be positive and finite",
            ),
            "noise is a vector": (
                lambda: reprior(mlp(3, 4, 2), DATA, torch.ones(2)),
                TypeError,
                "noise must be a number",
            ),
            "noise is a flag": (lambda: reprior(mlp(3, 4, 2), DATA, True), TypeError, "noise must be a number"),
            "reg 0": (lambda: reprior(mlp(3, 4, 2), DATA, NOISE, 0), ValueError, "reg must be positive, got 0"),
            "reg negative": (lambda: reprior(mlp(3, 4, 2), DATA, NOISE, -0.1), ValueError, "reg must be positive"),
            "reg is NaN": (lambda: reprior(mlp(3, 4, 2), DATA, NOISE, math.nan), ValueError, "reg must be positive"),
            "reg infinite, ntk": (
                lambda: reprior(mlp(3, 4, 2), DATA, NOISE, math.inf, "ntk"),
                ValueError,
                "reg must be positive and finite",
            ),
            "form": (
                lambda: reprior(mlp(3, 4, 2), DATA, NOISE, form="cholesky"),
                ValueError,
                "'feature', 'data', 'ntk'",
            ),
            "last with ntk": (
                lambda: reprior(mlp(3, 4, 2), DATA, NOISE, form="ntk", last="2"),
                ValueError,
                "leave out one",
            ),
            "no points": (
                lambda: reprior(mlp(3, 4, 2), (torch.zeros(0, 3), torch.zeros(0, 2)), NOISE),
                ValueError,
                "[Tt]he data are empty|no points",
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
                "give noise=variance",
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
            "a softmax": (
                lambda: reprior(Wrapped(nn.Linear(4, 2), lambda f, h: f.softmax(1)), DATA, NOISE),
                ValueError,
                "no linear readout: no single layer",
            ),
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
            "not linear in its weight": (
                lambda: reprior(Wrapped(Exponential(4, 2)), DATA, NOISE),
                ValueError,
                "not linear in its parameters",
            ),
            "not the last": (
                lambda: reprior(mlp(3, 4, 2), DATA, NOISE, last="0"),
                ValueError,
                r"readout '0' \(Linear\)",
            ),
            "an activation": (lambda: reprior(mlp(3, 4, 2), DATA, NOISE, last="1"), ValueError, "has no parameters"),
            "an unknown name": (
                lambda: reprior(mlp(3, 4, 2), DATA, NOISE, last="head"),
                ValueError,
                r"are \['0', '2'\]",
            ),
            "a module": (
                lambda: reprior(mlp(3, 4, 2), DATA, NOISE, last=nn.Linear(4, 2)),
                TypeError,
                "must be the name",
            ),
            "shared": (
                lambda: reprior(Tied(), regression(outputs=3), NOISE),
                ValueError,
                "shares its weight with body.weight",
            ),
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
                lambda: reprior(
                    mlp(3, 4, 2), DATA, NOISE, prior_precision=co.linalg.Dense(torch.eye(26).double(), psd=True)
                ),
                TypeError,
                "independent weights",
            ),
            "a prior of 0": (lambda: reprior(mlp(3, 4, 2), DATA, NOISE, prior_precision=0.0), ValueError, "positive"),
            "float32 beyond its digits": (
                lambda: reprior(mlp(3, 20, 2).float(), DATA, 1e-07, form="feature"),
                ValueError,
                r"beyond torch.float32.*model.double\(\)",
            ),
        },
    ),
    Door(
        "calls of a reprior",
        rows={
            "a vector": (lambda: rep().map(flat(phi())), TypeError, "phi must be a mapping of parameter names"),
            "a name less": (lambda: rep().energy({"0.weight": phi()["0.weight"]}), ValueError, r"missing \['0.bias'"),
            "a name more": (lambda: rep().logdet({**phi(), "3": phi()["0.bias"]}), ValueError, r"unknown \['3'\]"),
            "stacked": (lambda: rep().map(rep().normal(2)), ValueError, "torch.vmap"),
            "float32": (
                lambda: rep()({n: b.float() for n, b in phi().items()}),
                ValueError,
                "float32 on cpu, but the network",
            ),
            "theta": (lambda: rep().inverse(list(phi())), TypeError, "theta must be a mapping"),
            "no draws": (lambda: rep().sample(0), ValueError, "at least 1"),
            "half a draw": (lambda: rep().normal(1.5), TypeError, "whole number"),
            "one sample": (lambda: rep().divergence(1), ValueError, "at least 2"),
            "one draw": (lambda: rep().gradient_gap(rep().normal(1)), ValueError, "at least 2"),
            "a seed": (lambda: rep().sample(2, 0), TypeError, "manual_seed"),
            "no estimate": (lambda: rep().estimated_logdet(phi()), ValueError, "closed form: use logdet"),
            "a batch of two lengths": (
                lambda: rep()(phi(), (DATA[0], DATA[1][:2])),
                ValueError,
                "6 inputs, but 2 targets",
            ),
        },
    ),
    Door(
        "ntk_precision",
        rows={
            "a layer that is not linear": (
                lambda: co.sampling.ntk_precision(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))),
                ValueError,
                r"\['1.weight', '1.bias'\] belong to no linear",
            ),
            "no module": (lambda: co.sampling.ntk_precision({"weight": 1.0}), TypeError, "must be an nn.Module"),
            "no spread": (
                lambda: co.sampling.ntk_precision(nn.Linear(2, 2), 0.0),
                ValueError,
                "weight_std must be positive",
            ),
        },
    ),
]
