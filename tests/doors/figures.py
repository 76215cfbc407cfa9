"""What figures refuse, and what is no way to show progress."""

from __future__ import annotations

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
        "evidence_trace",
        rows={
            "no tuning": (lambda: plots.evidence_trace({}), ValueError, "got none"),
            "a posterior that was not tuned": (
                lambda: plots.evidence_trace({"prior 1": posterior()}),
                TypeError,
                r"a posterior from co.evidence.mackay or its tuning; got \['NoneType'\]",
            ),
        },
    ),
    Door(
        "trace and autocorrelation",
        rows={
            "a trace of nothing": (lambda: plots.trace({}), ValueError, "got none"),
            "a trace of a matrix": (lambda: plots.trace({"weight": np.zeros((2, 5, 3))}), ValueError, "single entries"),
            "a trace without names": (lambda: plots.trace(np.zeros((2, 5))), TypeError, "got ndarray"),
            "an autocorrelation of nothing": (lambda: plots.autocorrelation({}), ValueError, "got none"),
            "an autocorrelation of a matrix": (
                lambda: plots.autocorrelation({"weight": np.zeros((2, 5, 3))}),
                ValueError,
                "single entries",
            ),
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
            "inputs of two features": (
                lambda: plots.regression(posterior(), np.ones((5, 2))),
                ValueError,
                r"x must be a vector \(N,\), or a column \(N, 1\), of at least one number, got shape \(5, 2\)",
            ),
            "no inputs": (
                lambda: plots.regression(posterior(), []),
                ValueError,
                r"at least one number, got shape \(0,\)",
            ),
            "words": (lambda: plots.regression(posterior(), ["a"]), ValueError, "at least one number, got list"),
            "a network of two features": (
                lambda: plots.regression(posterior(features=2), GRID),
                ValueError,
                r"one input feature, and this network has inputs of shape \(6, 2\); draw post.predict",
            ),
            "two outputs": (
                lambda: plots.regression(posterior(outputs=2), GRID),
                ValueError,
                "this network has 2; pass output=0 to 1, got None",
            ),
            "an output too many": (lambda: plots.regression(posterior(), GRID, output=1), ValueError, "got 1"),
        },
    ),
    Door(
        "reliability by a tired user",
        rows={
            "nothing": (lambda: plots.reliability({}, LABELS), ValueError, "got none"),
            "classes": (
                lambda: plots.reliability({"network": LABELS}, LABELS),
                TypeError,
                r"class probabilities \(N, C\); got torch.int64 of shape \(5,\) for 'network'",
            ),
            "logits": (
                lambda: plots.reliability({"network": torch.randn(5, 3)}, LABELS),
                ValueError,
                "probabilities",
            ),
            "other points": (lambda: plots.reliability(torch.full((4, 2), 0.5), LABELS), ValueError, "labels"),
            "labels first": (lambda: plots.reliability(LABELS, torch.full((5, 2), 0.5)), TypeError, "int64"),
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
                r"co.evidence.grid\(post, precisions\), or the tuning of co.evidence.validate",
            ),
            "residuals": (
                lambda: plots.convergence({"plain": GRID}),
                TypeError,
                r"draws {name: Solution}, each the result of A.cg\(b\); got \['ndarray'\]",
            ),
            "no solution": (lambda: plots.convergence({}), ValueError, "got none"),
        },
    ),
    Door(
        "spectral_density",
        rows={
            "eigenvalues": (lambda: plots.spectral_density(GRID), TypeError, r"got ndarray of shape \(5,\).*ax.hist"),
            "another scale": (
                lambda: plots.spectral_density(spectrum()[0], scale="ln"),
                ValueError,
                "symlog",
            ),
            "the log scale of a linear density": (
                lambda: plots.spectral_density(spectrum()[0], scale="log"),
                ValueError,
                r"compute it with spectral_density\(A, scale='log'\)",
            ),
            "a matrix of eigenvalues": (
                lambda: plots.spectral_density(spectrum()[0], top=np.eye(3)),
                ValueError,
                r"top must be a vector \(N,\)",
            ),
        },
    ),
    Door(
        "training_spectra",
        rows={
            "no checkpoints": (lambda: plots.training_spectra({}), ValueError, "at least one checkpoint"),
            "values alone": (
                lambda: plots.training_spectra({0: (*spectrum()[:1], GRID, *spectrum()[2:])}),
                TypeError,
                "SpectralDensity, Eigenpairs, Estimate.*'ndarray'.* at step 0",
            ),
            "a list": (lambda: plots.training_spectra([spectrum()]), TypeError, "got list"),
            "a density alone": (lambda: plots.training_spectra({0: spectrum()[0]}), TypeError, "got SpectralDensity"),
            "names for steps": (lambda: plots.training_spectra({"a": spectrum()}), TypeError, "at step 'a'"),
            "other numbers of eigenvalues": (
                lambda: plots.training_spectra({0: spectrum(), 1: spectrum(k=3)}),
                ValueError,
                r"equally many.*\[2, 3\]",
            ),
            "the log scale": (
                lambda: plots.training_spectra({0: spectrum(scale="log")}),
                ValueError,
                "scale='linear'",
            ),
        },
    ),
    Door(
        "influence and pruning",
        rows={
            "nothing predicted": (lambda: plots.influence(GRID, {}), ValueError, "named vectors"),
            "another number of points": (
                lambda: plots.influence(GRID, {"GGN": GRID[1:]}),
                ValueError,
                r"equal length, got \(5,\), .*GGN.*\(4,\)",
            ),
            "a matrix": (lambda: plots.influence(np.eye(3), {"GGN": np.eye(3)}), ValueError, "must be a vector"),
            "no names": (lambda: plots.influence(GRID, GRID), TypeError, "got ndarray for the latter"),
            "not a number": (lambda: plots.influence(GRID, {"GGN": GRID * np.nan}), ValueError, "and GGN has others"),
            "errors of other shares": (lambda: plots.pruning(GRID, {"OBS": GRID[1:]}), ValueError, "equal length"),
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
            ),
        },
    ),
]
