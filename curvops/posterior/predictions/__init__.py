"""Predictions of any posterior: outputs, covariances, probabilities, uncertainty and scores.

The distributions are `Normal` and `MultitaskNormal`; `outputs` has their moments and draws, `answers` the formulas.
"""

from curvops.posterior.predictions import answers, outputs
from curvops.posterior.predictions.normals import MultitaskNormal, Normal

__all__ = ["MultitaskNormal", "Normal", "answers", "outputs"]
