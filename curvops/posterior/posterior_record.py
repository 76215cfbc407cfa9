"""What a posterior is made of, as plain values and tensors, and the posterior's parts of such a record."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg import Estimate
from curvops.operators import Linearization
from curvops.operators.linearization_record import record_of_linearization
from curvops.operators.operator_record import record_of_operator, record_of_value, recorded_operator, recorded_value
from curvops.posterior.arguments import check_operator
from curvops.posterior.priors import KroneckerPrior, Prior
from curvops.posterior.spectrum import Spectrum

KIND, VERSION = "posterior", 1
"""What the saved folder says that it holds. The version is raised when an older program would misread it."""

PRIORS = {kind.__name__: kind for kind in (KroneckerPrior, Prior)}


@torch.no_grad()
def record_of_posterior(
    lin: Linearization,
    curvature: LinearOperator,
    prior: Prior,
    spectrum: Spectrum,
    temperature: float,
    prior_error: Estimate | None,
    inputs: Any = None,
) -> dict[str, Any]:
    """The record. Raises ValueError for an operator that cannot be saved."""
    likelihood, gradient = spectrum.known()
    if likelihood is None and not isinstance(spectrum.data, str):
        # A file without it is better than none, where the data cannot be read any more.
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            likelihood = spectrum.log_likelihood().detach()
    return {
        "linearization": record_of_linearization(lin, inputs),
        "curvature": record_of_operator(curvature, lin),
        "prior": {
            "class": type(prior).__name__,
            "precision": record_of_value(prior.precision, lin, "the prior precision"),
            "mean": prior.mean.detach(),
        },
        "prior_error": record_of_value(prior_error, lin),
        "temperature": temperature,
        "log_likelihood": likelihood,
        "gradient": gradient,
    }


def recorded_parts(record: Mapping[str, Any], lin: Linearization) -> dict[str, Any]:
    """The arguments of `Laplace` that a record holds, beside the linearisation."""
    device, known = lin.theta.device, record["prior"]
    curvature, precision = recorded_operator(record["curvature"], lin), recorded_value(known["precision"], lin)
    check_operator("the saved curvature", curvature, lin.model)
    if not isinstance(precision, Tensor):
        check_operator("the saved prior precision", precision, lin.model)
    spectrum = Spectrum(lin, curvature)
    spectrum.take(*(None if t is None else t.to(device) for t in (record["log_likelihood"], record["gradient"])))
    return {
        "curvature": curvature,
        "prior": PRIORS[known["class"]](precision, known["mean"].to(device)),
        "prior_error": recorded_value(record["prior_error"], lin),
        "spectrum": spectrum,
        "temperature": record["temperature"],
    }
