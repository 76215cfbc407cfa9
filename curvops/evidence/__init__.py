"""Tuning a posterior's hyperparameters by its evidence; every function returns a new posterior."""

from curvops.errors import MaxStepsWarning, OscillationWarning, UndeterminedWarning
from curvops.evidence.mackay import mackay
from curvops.evidence.maximize import Grid, grid, maximize
from curvops.evidence.train import train
from curvops.evidence.validate import validate
from curvops.posterior.log_evidence import Ending, Evidence, Tuning, TuningStep, Validation

__all__ = [
    "Ending",
    "Evidence",
    "Grid",
    "OscillationWarning",
    "MaxStepsWarning",
    "Tuning",
    "TuningStep",
    "UndeterminedWarning",
    "Validation",
    "grid",
    "mackay",
    "maximize",
    "train",
    "validate",
]
