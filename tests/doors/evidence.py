"""What the tuning of hyperparameters refuses."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

import curvops as co
from tests.doors.door import Door
from tests.posterior.trained import linear_problem

DOUBLE = torch.float64


@cache
def linear() -> tuple[co.posterior.Laplace, Tensor, Tensor]:
    """The linear problem, made once for all rows."""
    return linear_problem()


def post() -> co.posterior.Laplace:
    return linear()[0]


@cache
def other() -> co.posterior.Laplace:
    """Of fewer points and weights."""
    x = torch.linspace(-1, 1, 15, dtype=DOUBLE).view(5, 3)
    lin = co.linearize(nn.Linear(3, 1, bias=False).double(), (x, x[:, :1]), co.likelihoods.Gaussian(1.0))
    return co.laplace(lin, co.GGN, 1.0, check_mode=False)


@cache
def network(likelihood: object = 0.3) -> co.posterior.Laplace:
    """Of two layers and two outputs; a number is the noise of a Gaussian."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = torch.randn(25, 4, dtype=DOUBLE)
    if likelihood == "classification":
        return co.laplace(co.linearize(model, (x, x[:, :2].argmax(1)), likelihood), co.GGN, 1.0, check_mode=False)
    likelihood = co.likelihoods.Gaussian(likelihood)
    return co.laplace(co.linearize(model, (x, x[:, :2].sin()), likelihood), co.GGN, 1.0, check_mode=False)


DATA = torch.rand(20, 64, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 10


def classifier() -> nn.Linear:
    return nn.Linear(64, 10)


def fitted(prior_precision: object = 1.0, prior_mean: object = 0.0, **options: object) -> co.posterior.ModeFit:
    return co.fit_mode(classifier(), DATA, "classification", prior_precision, prior_mean, **options)


def huge() -> nn.Module:
    """Of outputs whose exponentials overflow."""
    model = nn.Linear(64, 1)
    model.weight.data.fill_(50.0)
    return model


DOORS = [
    Door(
        "mackay",
        rows={
            "no posterior": (lambda: co.evidence.mackay(post().lin), TypeError, "posterior"),
            "no draws": (lambda: co.evidence.mackay(post(), 0), ValueError, "at least 1"),
            "one draw": (lambda: co.evidence.mackay(post(), 1), ValueError, "two or more"),
            "half a draw": (lambda: co.evidence.mackay(post(), 2.5), TypeError, "whole number"),
            "no steps": (lambda: co.evidence.mackay(post(), 4, 0), ValueError, "steps"),
            "another prior": (lambda: co.evidence.mackay(post(), prior="layers"), ValueError, "'layer'"),
            "another update": (lambda: co.evidence.mackay(post(), update="EM"), ValueError, "'em'"),
            "a number for noise": (lambda: co.evidence.mackay(post(), noise=0.1), TypeError, "noise"),
            "noise without draws": (
                lambda: co.evidence.mackay(post(), None, noise=post().deviations(2).noise),
                ValueError,
                "leave noise",
            ),
            "few draws of noise": (
                lambda: co.evidence.mackay(post(), 4, noise=post().deviations(2).noise),
                ValueError,
                "2 draws",
            ),
            "noise of another problem": (
                lambda: co.evidence.mackay(post(), 2, noise=other().deviations(2).noise),
                ValueError,
                "other data",
            ),
            "a flag that is none": (lambda: co.evidence.mackay(post(), tune_noise=0.1), TypeError, "tune_noise"),
            "an operator": (
                lambda: co.evidence.mackay(post().with_prior(post().precision.detached_from_weights())),
                ValueError,
                "with_prior",
            ),
            "noise of an empirical Fisher": (
                lambda: co.evidence.mackay(
                    co.laplace(post().lin, co.EmpiricalFisher, 1.0, check_mode=False), tune_noise=True
                ),
                ValueError,
                "square",
            ),
            "no curvature": (
                lambda: co.evidence.mackay(co.laplace(post().lin, 0 * co.GGN(post().lin), 1.0, check_mode=False), None),
                ValueError,
                "likelihood of the curvature",
            ),
        },
    ),
    Door(
        "maximize",
        rows={
            "no posterior": (lambda: co.evidence.maximize(network().lin, "layers"), TypeError, "posterior"),
            "a word": (lambda: co.evidence.maximize(network(), "layer"), ValueError, "layers"),
            "a number": (lambda: co.evidence.maximize(network(), 0.01), TypeError, "layers"),
            "nothing": (lambda: co.evidence.maximize(network(), ()), ValueError, "layers"),
            "twice": (lambda: co.evidence.maximize(network(), ("noise", "noise")), ValueError, "pair"),
            "two priors": (lambda: co.evidence.maximize(network(), ("layers", "scalar")), ValueError, "pair"),
            "no probe": (lambda: co.evidence.maximize(network(), "layers", probes=0), ValueError, "probes"),
            "half a step": (lambda: co.evidence.maximize(network(), "layers", steps=1.5), TypeError, "steps"),
            "a scalar from a vector": (
                lambda: co.evidence.maximize(network().with_prior(torch.ones(network().lin.num_parameters).double())),
                ValueError,
                "with_prior",
            ),
            "an operator": (
                lambda: co.evidence.maximize(
                    network().with_prior(network().precision.detached_from_weights()), "layers"
                ),
                ValueError,
                "operator",
            ),
            "noise of an empirical Fisher": (
                lambda: co.evidence.maximize(
                    co.laplace(network().lin, co.EmpiricalFisher, 1.0, check_mode=False), "noise"
                ),
                ValueError,
                "square",
            ),
            "noise of an empirical diagonal": (
                lambda: co.evidence.maximize(
                    co.laplace(network().lin, co.DiagonalGGN(network().lin, fisher="empirical"), 1.0, check_mode=False),
                    "noise",
                ),
                ValueError,
                "square",
            ),
            "noise of a sum": (
                lambda: co.evidence.maximize(
                    co.laplace(network().lin, co.low_rank(network().curvature), 1.0, check_mode=False), "noise"
                ),
                ValueError,
                "how it was built",
            ),
            "noise that is zero": (lambda: network().with_noise(0.0), ValueError, "noise"),
            "noise that is a word": (lambda: network().with_noise("1"), TypeError, "noise"),
            "noises for more outputs": (
                lambda: network().with_noise(torch.ones(7)),
                ValueError,
                "a number or a tensor",
            ),
            "noises that are negative": (lambda: network().with_noise(-torch.ones(1)), ValueError, "variance"),
            "noise of several outputs": (
                lambda: co.evidence.maximize(network(torch.tensor([0.1, 0.2])), "noise"),
                ValueError,
                "Gaussian",
            ),
            "noise of classes": (
                lambda: co.evidence.maximize(network("classification"), "noise"),
                ValueError,
                "Categorical",
            ),
        },
    ),
    Door(
        "fit_mode",
        rows={
            "no prior": (lambda: co.fit_mode(classifier(), DATA, "classification"), TypeError, "prior_precision"),
            "a precision of zero": (lambda: fitted(0.0), ValueError, "positive"),
            "a precision of one layer": (lambda: fitted({"weight": 1.0}), ValueError, "bias"),
            "a mean of another size": (lambda: fitted(1.0, torch.zeros(3)), ValueError, "650"),
            "targets apart": (
                lambda: co.fit_mode(classifier(), DATA[0], DATA[1], 1.0),
                TypeError,
                "one argument",
            ),
            "no likelihood": (lambda: co.fit_mode(classifier(), DATA, "adam", 1.0), TypeError, "classification"),
            "a linearisation": (
                lambda: co.fit_mode(co.linearize(classifier(), DATA, "classification"), DATA, "classification", 1.0),
                TypeError,
                "nn.Module",
            ),
            "dropout in train mode": (
                lambda: co.fit_mode(nn.Sequential(classifier(), nn.Dropout()), DATA, "classification", 1.0),
                ValueError,
                r"model.eval\(\)",
            ),
            "an iterator": (
                lambda: co.fit_mode(classifier(), iter([DATA]), "classification", 1.0),
                TypeError,
                "only once",
            ),
            "no tolerance": (lambda: fitted(atol=0.0), ValueError, "atol"),
            "no steps": (lambda: fitted(maxiter=0), ValueError, "maxiter"),
            "half a step": (lambda: fitted(maxiter=2.5), TypeError, "maxiter"),
            "a word for progress": (lambda: fitted(progress="yes"), TypeError, "progress"),
            "no such parameters": (lambda: fitted(parameters="head.*"), ValueError, "head"),
            "an infinite loss": (
                lambda: co.fit_mode(huge(), (DATA[0], DATA[1].float().unsqueeze(1)), co.likelihoods.Poisson(), 1.0),
                ValueError,
                "scale inputs",
            ),
        },
    ),
    Door(
        "train",
        rows={
            "weights": (
                lambda: co.evidence.train(classifier(), (*DATA, DATA[1]), "classification", epochs=1),
                TypeError,
                "third item",
            ),
            "an iterator": (
                lambda: co.evidence.train(classifier(), iter([DATA]), "classification", epochs=1),
                TypeError,
                "only once",
            ),
            "a loader and a size": (
                lambda: co.evidence.train(classifier(), [DATA], "classification", epochs=1, batch_size=3),
                ValueError,
                "data come in batches",
            ),
            "no epochs": (
                lambda: co.evidence.train(classifier(), DATA, "classification", epochs=0),
                ValueError,
                "epochs",
            ),
            "half a batch": (
                lambda: co.evidence.train(classifier(), DATA, "classification", epochs=1, batch_size=2.5),
                TypeError,
                "batch_size",
            ),
            "weight decay twice": (
                lambda: co.evidence.train(
                    classifier(),
                    DATA,
                    "classification",
                    epochs=1,
                    optimizer=lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1),
                ),
                ValueError,
                "weight decay",
            ),
            "no precision": (
                lambda: co.evidence.train(classifier(), DATA, "classification", epochs=1, prior_precision=0.0),
                ValueError,
                "positive",
            ),
            "diverging": (
                lambda: co.evidence.train(
                    classifier(),
                    DATA,
                    "classification",
                    epochs=60,
                    every=100,
                    optimizer=lambda p: torch.optim.SGD(p, 1e30),
                ),
                ValueError,
                "smaller learning rate",
            ),
            "what is tuned": (
                lambda: co.evidence.train(classifier(), DATA, "classification", epochs=3, every=1, over="everything"),
                ValueError,
                "layers",
            ),
        },
    ),
    Door(
        "validate",
        rows={
            "no posterior": (
                lambda: co.evidence.validate(linear()[0].lin, linear()[1], linear()[2]),
                TypeError,
                "posterior",
            ),
            "no targets": (lambda: co.evidence.validate(linear()[0], linear()[1], None), TypeError, "A batch is"),
            "too few targets": (
                lambda: co.evidence.validate(linear()[0], linear()[1], linear()[2][:-1]),
                ValueError,
                "39",
            ),
            "layers": (
                lambda: co.evidence.validate(linear()[0], linear()[1], linear()[2], "layers"),
                ValueError,
                "scalar",
            ),
            "a number": (lambda: co.evidence.validate(linear()[0], linear()[1], linear()[2], 3), ValueError, "scalar"),
            "precisions of a noise": (
                lambda: co.evidence.validate(linear()[0], linear()[1], linear()[2], "noise", prior_precisions=[1.0]),
                ValueError,
                "leave them out",
            ),
            "a precision of zero": (
                lambda: co.evidence.validate(linear()[0], linear()[1], linear()[2], prior_precisions=[0.0]),
                ValueError,
                "posi",
            ),
            "one precision": (
                lambda: co.evidence.validate(linear()[0], linear()[1], linear()[2], prior_precisions=1.0),
                TypeError,
                "sequence",
            ),
            "no tolerance": (
                lambda: co.evidence.validate(linear()[0], linear()[1], linear()[2], xtol=0),
                ValueError,
                "xtol",
            ),
            "joint of a word": (
                lambda: co.evidence.validate(linear()[0], linear()[1], linear()[2], joint="yes"),
                TypeError,
                "joint",
            ),
        },
    ),
]
