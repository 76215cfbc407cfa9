"""Records of posteriors: their parts as plain values and tensors, for saving and loading."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg import Inverse
from curvops.network import record_of_network
from curvops.operators import Linearization
from curvops.operators.operator_record import operator_of_record, record_of_operator, record_of_value, value_of_record
from curvops.posterior.core.arguments import check_operator
from curvops.posterior.core.terms import CurvatureCache, KroneckerPrior, Prior

KIND = "posterior"
"""The kind of a posterior's folder."""
OF_LAPLACE, OF_GAUSSIANS = VERSIONS = 1, 2
"""Versions of the schema; a version is raised when an older program would misread it."""

PRIORS = {kind.__name__: kind for kind in (KroneckerPrior, Prior)}


@torch.no_grad()
def record_of_posterior(post: Any, inputs: Any = None) -> dict[str, Any]:
    """Return the record of a Laplace posterior; raise ValueError for an operator that cannot be saved."""
    lin, prior, cache = post.lin, post.prior, post.cache
    likelihood = cache.known("log likelihood")
    if likelihood is None and not isinstance(cache.data, str):
        # If the data can no longer be read, a file without it is better than none.
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            likelihood = cache.log_likelihood().detach()
    return {
        "linearization": record_of_network(lin, inputs),
        "curvature": record_of_operator(post.curvature, lin),
        "prior": {
            "class": type(prior).__name__,
            "precision": record_of_value(prior.precision, lin, "the prior precision"),
            "mean": prior.mean.detach(),
            "chosen_by": prior.chosen_by,
        },
        "prior_error": record_of_value(post.prior_error, lin),
        "temperature": post.temperature,
        "log_likelihood": likelihood,
        "gradient": cache.known("gradient"),
    }


def record_of_gaussian(
    lin: Linearization, covariance: LinearOperator, precision: LinearOperator, inputs: Any = None
) -> dict[str, Any]:
    """Return the record of a Gaussian that is not Laplace's; raise ValueError for an operator that cannot be saved.

    If one operator is the lazy inverse of the other, only the other is recorded.
    """
    kept: dict[str, Any] = {"covariance": None, "precision": None}
    for name, operator, other in (("covariance", covariance, precision), ("precision", precision, covariance)):
        if not (isinstance(operator, Inverse) and operator.base is other):
            kept[name] = record_of_operator(operator, lin, f"the {name}")
    return {"linearization": record_of_network(lin, inputs), **kept}


def read_gaussian(record: Mapping[str, Any], lin: Linearization) -> dict[str, Any]:
    """Return the operators in the record of a Gaussian that is not Laplace's."""
    kept = {name: record[name] for name in ("covariance", "precision")}
    return {name: None if part is None else operator_of_record(part, lin) for name, part in kept.items()}


def read_parts(record: Mapping[str, Any], lin: Linearization) -> dict[str, Any]:
    """Return the arguments of `Laplace` that a record holds, in addition to the linearisation."""
    device, known = lin.theta.device, record["prior"]
    curvature, precision = operator_of_record(record["curvature"], lin), value_of_record(known["precision"], lin)
    check_operator("the saved curvature", curvature, lin.model)
    if not isinstance(precision, Tensor):
        check_operator("the saved prior precision", precision, lin.model)
    cache = CurvatureCache(lin, curvature, checks_mode=False)  # the data may be absent
    for name, tensor in (("log likelihood", record["log_likelihood"]), ("gradient", record["gradient"])):
        if tensor is not None:
            cache.put(name, tensor.to(device))
    return {
        "curvature": curvature,
        # Folders of version 0.2 do not say what chose the precision.
        "prior": PRIORS[known["class"]](precision, known["mean"].to(device), known.get("chosen_by", "")),
        "prior_error": value_of_record(record["prior_error"], lin),
        "cache": cache,
        "temperature": record["temperature"],
    }
