"""What curvops does in the demo, and all of it: from a trained network to predictions that know what they do not know.

This file is the example to copy. It needs the network, its training data and the prior precision of its training.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import curvops as co
from curvops.cli.demo.digits import Images

EVIDENCE_RTOL = 0.02
"""Relative accuracy of the log-determinant in the evidence."""


def posterior(
    model: nn.Module, train: Images, prior_precision: float, curvature: Any = co.GGN, parameters: Any = None
) -> co.Laplace:
    """The posterior around the network's weights: with the full GGN, which is never formed, or a cheaper curvature.

    That the weights are a mode is checked for all of them together, not for a part.
    """
    lin = co.linearize(model, (train.x, train.y), co.likelihoods.Categorical(), parameters=parameters)
    return co.laplace(lin, curvature=curvature, prior_precision=prior_precision, check_mode=parameters is None)


def tune(post: co.Laplace, generator: torch.Generator) -> co.Laplace:
    """The same posterior under the prior precision of largest evidence."""
    return co.evidence.maximize(post, rtol=EVIDENCE_RTOL, generator=generator)


def evidence(post: co.Laplace, generator: torch.Generator) -> co.evidence.Evidence:
    """Log evidence in nats, with its parts and tr(P⁻¹G), each with its error bar; free after `tune`."""
    return post.log_evidence(rtol=EVIDENCE_RTOL, generator=generator)


def subnetwork(post: co.Laplace, size: int, x: Float[Tensor, "N 1 8 8"]) -> Int[Tensor, " size"]:
    """The weights whose uncertainty moves the predictions at x most, by a diagonal posterior."""
    return co.select(post.lin, size, "predictive", prior_precision=float(post.prior_precision), x=x)


def exact_variances(post: co.Laplace, x: Float[Tensor, "N 1 8 8"]) -> Float[Tensor, "N C"]:
    """Predictive variances of every logit: one solve with P for each, in blocks."""
    return post.predict(x, rtol=1e-5).variance
