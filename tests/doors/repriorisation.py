"""What repriorisation refuses: `reprior`, its calls, and readouts that are not linear."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import curvops as co
from tests.doors.door import Door
from tests.sampling.readouts import Wrapped
from tests.sampling.repriors import NOISE, classes, mlp, one, regression

reprior = co.sampling.reprior
DATA = regression()


def frozen_head():
    model = mlp(3, 4, 2)
    model[2].bias.requires_grad_(False)
    return model


def rep() -> co.sampling.Reprior:
    return reprior(mlp(3, 4, 2), DATA, NOISE)


def of(*args: Any, **options: Any) -> Callable[[], object]:
    """A reprior of the network of two outputs."""
    return lambda: reprior(mlp(3, 4, 2), DATA, *args, **options)


def phi() -> dict[str, torch.Tensor]:
    return one(rep())


DOORS = [
    Door(
        "reprior",
        rows={
            "no noise": (of(), "noise is missing"),
            "last with ntk": (of(NOISE, form="ntk", last="2"), "leave out one"),
            "classes without a level": (
                lambda: reprior(mlp(3, 4, 3), classes(), likelihood="classification"),
                "classes need reg=λ",
            ),
            "two variances": (of(NOISE, likelihood=co.likelihoods.Gaussian(1.0)), "both give a variance"),
            "a variance an output": (
                of(likelihood=co.likelihoods.Gaussian(torch.tensor([1.0, 2.0]))),
                "one noise variance",
            ),
            "a softmax": (
                lambda: reprior(Wrapped(nn.Linear(4, 2), lambda f, h: f.softmax(1)), DATA, NOISE),
                "no linear readout: no single layer",
            ),
            "a softmax, named": (
                lambda: reprior(Wrapped(nn.Linear(4, 2), lambda f, h: f.softmax(1)), DATA, NOISE, last="head"),
                "or another operation follows",
            ),
            "not the last": (of(NOISE, last="0"), r"readout '0' \(Linear\)"),
            "an activation": (of(NOISE, last="1"), "has no parameters"),
            "frozen": (lambda: reprior(frozen_head(), DATA, NOISE), r"\['2.bias'\] are to be sampled"),
            "a function": (
                lambda: reprior((lambda p, x: x @ p["w"], {"w": torch.ones(3, 2).double()}), DATA, NOISE),
                TypeError,
                "readout of an nn.Module",
            ),
            "a prior by rows": (
                of(NOISE, prior_precision=torch.arange(1.0, 27.0)),
                "differs between the rows of the readout's '2.weight'",
            ),
            "float32 beyond its digits": (
                lambda: reprior(mlp(3, 20, 2).float(), DATA, 1e-07, form="feature"),
                r"beyond torch.float32.*model.double\(\)",
            ),
        },
    ),
    Door(
        "calls of a reprior",
        rows={
            "a name less": (lambda: rep().energy({"0.weight": phi()["0.weight"]}), "phi must have the names"),
            "stacked": (lambda: rep().map(rep().normal(2)), "torch.vmap"),
            "float32": (lambda: rep()({n: b.float() for n, b in phi().items()}), "float32 on cpu, but the network"),
            "one sample": (lambda: rep().divergence(1), "at least 2"),
            "one draw": (lambda: rep().gradient_gap(rep().normal(1)), "at least 2"),
            "no estimate": (lambda: rep().estimated_logdet(phi()), "closed form: use logdet"),
            "a batch": (lambda: rep()(phi(), DATA), "leave batches out"),
        },
    ),
    Door(
        "ntk_precision",
        rows={
            "a layer that is not linear": (
                lambda: co.sampling.ntk_precision(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))),
                "the fan-in of .* is unknown",
            )
        },
    ),
]
