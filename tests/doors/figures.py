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


def spectrum(k: int = 2, **options: Any) -> Any:
    A = torch.diag(torch.linspace(1, 2, 20, dtype=torch.float64))
    return co.linalg.spectral_density(A, probes=2, **options), co.linalg.eigsh(A, k), co.linalg.trace(A, max_matvecs=9)


DOORS = [
    Door(
        "evidence_trace",
        rows={
            "no steps": (lambda: plots.evidence_trace({}), ValueError, "at least one step"),
        },
    ),
    Door(
        "trace and autocorrelation",
        rows={
            "a trace of nothing": (lambda: plots.trace({}), ValueError, "got none"),
            "a trace of a matrix": (lambda: plots.trace({"weight": np.zeros((2, 5, 3))}), ValueError, "single entries"),
            "an autocorrelation of nothing": (lambda: plots.autocorrelation({}), ValueError, "got none"),
            "an autocorrelation of a matrix": (
                lambda: plots.autocorrelation({"weight": np.zeros((2, 5, 3))}),
                ValueError,
                "single entries",
            ),
        },
    ),
    Door(
        "covariance",
        rows={
            "labels that do not divide the rows": (
                lambda: plots.covariance(np.eye(9), ["a", "b"]),
                ValueError,
                "9 rows do not divide evenly among 2 labels",
            ),
        },
    ),
    Door(
        "spectral_density",
        rows={
            "a density beside a result": (
                lambda: plots.spectral_density(co.linalg.spectral_density(torch.eye(9).double()), GRID),
                TypeError,
                "alone",
            ),
            "a density without bounds": (lambda: plots.spectral_density(GRID, GRID), TypeError, "or grid"),
            "another length": (
                lambda: plots.spectral_density(GRID, GRID[1:], GRID, GRID, 0.1),
                ValueError,
                "one length",
            ),
            "another scale": (
                lambda: plots.spectral_density(GRID, GRID, GRID, GRID, 0.1, scale="ln"),
                ValueError,
                "symlog",
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
            "a matrix": (lambda: plots.influence(np.eye(3), {"GGN": np.eye(3)}), ValueError, "draws a vector"),
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
