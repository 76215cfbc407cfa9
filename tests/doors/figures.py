"""What figures refuse, and what is no way to show progress."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import curvops as co
from curvops import plots
from tests.doors.door import Door

GRID = np.linspace(1, 2, 5)

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
