"""Operators of curvlinops on the data of a benchmark; curvlinops is installed in a separate environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks.machine import peer_version
from benchmarks.networks import Problem

PACKAGE = "curvlinops-for-pytorch"


def label() -> str | None:
    """The package with the version that is measured, None where it is not installed."""
    version = peer_version(PACKAGE)
    return None if version is None else f"curvlinops {version}"


def operator(problem: Problem, name: str, **options: Any) -> Any:
    """Its operator of this name; positions are its points, by one more module that flattens them."""
    import curvlinops

    model, data = problem.model, problem.batches()
    if problem.targets.ndim == 2:
        model = nn.Sequential(model, nn.Flatten(0, 1))
        data = [(inputs, targets.flatten()) for inputs, targets in data]
    loss = nn.CrossEntropyLoss(reduction="sum")
    return getattr(curvlinops, name)(model, loss, problem.parameters, data, check_deterministic=False, **options)


def kfac_factors(problem: Problem, fisher: str) -> Callable[[], object]:
    """Builds the factors of its KFAC, weights and biases together as in curvops."""
    kfac = operator(problem, "KFACLinearOperator", fisher_type=fisher, separate_weight_and_bias=False)

    def factors() -> object:
        kfac._input_covariances, kfac._gradient_covariances = {}, {}
        kfac.compute_kronecker_factors()
        return kfac

    return factors


def ggn(problem: Problem) -> Any | None:
    """Its GGN, None where it is not installed."""
    return None if label() is None else operator(problem, "GGNLinearOperator")
