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
from curvops.operators.operator_record import record_of_operator, recorded_operator
from curvops.posterior.arguments import check_operator
from curvops.posterior.priors import KroneckerPrior, Prior
from curvops.posterior.spectrum import Spectrum

ERROR = ("value", "stderr", "samples", "matvecs")
"""What is kept of the error of a form that an earlier posterior was kept in."""
KIND, VERSION = "posterior", 1
"""What the saved folder says that it holds. The version is raised when an older program would misread it."""


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
    precision = prior.precision
    whole = isinstance(precision, Tensor)
    likelihood, gradient = spectrum.known()
    if likelihood is None and not isinstance(spectrum.data, str):
        # A file without it is better than none, where the data cannot be read any more.
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            likelihood = spectrum.log_likelihood().detach()
    return {
        "linearization": record_of_linearization(lin, inputs),
        "curvature": record_of_operator(curvature, lin),
        "prior": {
            "diagonal": precision.detach() if whole else None,
            "operator": None if whole else record_of_operator(precision, lin, "the prior precision"),
            "mean": prior.mean.detach(),
            "kronecker": isinstance(prior, KroneckerPrior),
        },
        "prior_error": None if prior_error is None else {name: getattr(prior_error, name) for name in ERROR},
        "temperature": temperature,
        "log_likelihood": likelihood,
        "gradient": gradient,
    }


def recorded_parts(record: Mapping[str, Any], lin: Linearization) -> dict[str, Any]:
    """The arguments of `Laplace` that a record holds, beside the linearisation."""
    device, known = lin.theta.device, record["prior"]
    curvature = recorded_operator(record["curvature"], lin)
    check_operator("the saved curvature", curvature, lin)
    if known["operator"] is None:
        precision = known["diagonal"].to(device)
    else:
        precision = recorded_operator(known["operator"], lin)
        check_operator("the saved prior precision", precision, lin)
    spectrum = Spectrum(lin, curvature)
    spectrum.take(*(None if t is None else t.to(device) for t in (record["log_likelihood"], record["gradient"])))
    kind, error = KroneckerPrior if known.get("kronecker") else Prior, record.get("prior_error")
    return {
        "curvature": curvature,
        "prior": kind(precision, known["mean"].to(device)),
        "prior_error": None if error is None else Estimate(**error),
        "spectrum": spectrum,
        "temperature": record["temperature"],
    }
