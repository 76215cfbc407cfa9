"""What figures refuse, and what is no way to show progress."""

from typing import Any

import numpy as np
import torch
from torch import nn

import curvops as co
from curvops import plots
from tests.doors.door import Door

GRID = np.linspace(1, 2, 5)


LABELS = torch.tensor([0, 1, 0, 1, 1])


def posterior(outputs: int = 1, features: int = 1) -> Any:
    data = torch.ones(6, features), torch.ones(6, outputs)
    lin = co.linearize(nn.Linear(features, outputs), data, co.likelihoods.Gaussian(1.0))
    return co.laplace(lin, co.GGN, prior_precision=1.0, check_mode=False)


def spectrum(k: int = 2, **options: Any) -> Any:
    A = torch.diag(torch.linspace(1, 2, 20, dtype=torch.float64))
    return co.linalg.spectral_density(A, probes=2, **options), co.linalg.eigsh(A, k), co.linalg.trace(A, max_matvecs=9)


DOORS = [
    Door(
        "traces",
        rows={
            "no tuning": (lambda: plots.evidence_trace({}), "got none"),
            "a trace of a matrix": (lambda: plots.trace({"weight": np.zeros((2, 5, 3))}), "each an array"),
            "a trace without names": (lambda: plots.trace(np.zeros((2, 5))), TypeError, "got ndarray"),
        },
    ),
    Door(
        "regression by a tired user",
        rows={
            "no posterior": (
                lambda: plots.regression(GRID, GRID),
                TypeError,
                "a posterior from co.laplace.*got ndarray",
            ),
            "words": (lambda: plots.regression(posterior(), ["a"]), "at least one number, got list"),
            "a network of two features": (
                lambda: plots.regression(posterior(features=2), GRID),
                r"one input feature, and this network has inputs Tensor of shape \(6, 2\)",
            ),
            "two outputs": (
                lambda: plots.regression(posterior(outputs=2), GRID),
                "one output of 2: pass output=0 to 1, got None",
            ),
        },
    ),
    Door(
        "reliability by a tired user",
        rows={
            "nothing": (lambda: plots.reliability({}, LABELS), "got none"),
            "classes": (
                lambda: plots.reliability({"network": LABELS}, LABELS),
                TypeError,
                r"class probabilities \(N, C\); got torch.int64 of shape \(5,\) for 'network'",
            ),
            "panels": (
                lambda: plots.reliability(torch.full((5, 2), 0.5), LABELS, ax=plots.trace({"a": np.ones((1, 5))})),
                TypeError,
                r"ax must be the axes of one panel, got ndarray of shape \(1, 2\); pass ax",
            ),
        },
    ),
    Door(
        "evidence and convergence",
        rows={
            "a posterior": (
                lambda: plots.evidence(posterior()),
                TypeError,
                r"the result of co.evidence.grid, or the tuning of validate",
            ),
            "residuals": (
                lambda: plots.convergence({"plain": GRID}),
                TypeError,
                r"'plain' must be the result of A.cg\(b\), got ndarray",
            ),
        },
    ),
    Door(
        "spectral_density and training_spectra",
        rows={
            "the log scale in training": (
                lambda: plots.training_spectra({0: spectrum(scale="log")}),
                "scale='linear'",
            ),
            "eigenvalues": (lambda: plots.spectral_density(GRID), TypeError, r"spectral_density\(A\), got ndarray"),
            "another scale": (lambda: plots.spectral_density(spectrum()[0], scale="ln"), "symlog"),
            "the log scale of a linear density": (
                lambda: plots.spectral_density(spectrum()[0], scale="log"),
                r"does not fit this density",
            ),
        },
    ),
    Door(
        "influence and pruning",
        rows={
            "nothing predicted": (lambda: plots.influence(GRID, {}), "named vectors"),
            "no names": (
                lambda: plots.influence(GRID, GRID),
                TypeError,
                "influence draws must be {name: vector}, got ndarray",
            ),
            "not a number": (lambda: plots.influence(GRID, {"GGN": GRID * np.nan}), "and GGN has others"),
        },
    ),
    Door(
        "progress",
        rows={
            "a word": (
                lambda: co.linearize(
                    nn.Linear(2, 2), (torch.ones(3, 2), torch.zeros(3, 2)), "regression", progress="yes"
                ),
                TypeError,
                "progress must be None, False, True or a function.*'yes'",
            )
        },
    ),
]
