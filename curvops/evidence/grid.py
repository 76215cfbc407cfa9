"""The log evidence on a grid of prior precisions, from one set of Lanczos runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from curvops.checks import check_accuracy, check_kind
from curvops.posterior.core.linear_mode import warn_of_mode
from curvops.posterior.gaussians.laplace import Laplace, check_posterior, checked_mode
from curvops.posterior.log_evidence import Evidence, find_evidence, prepare
from curvops.summary import Table, Tabular, by_columns_of, summary


class Grid(list[Evidence], Tabular):
    """The log evidences at several prior precisions: a list that prints as a table.

    Args:
        evidences: the log evidences.
        prior_precisions: the prior precision of each.

    Examples:
        >>> grid = co.evidence.grid(post, [0.1, 1.0, 10.0])
        >>> grid.prior_precisions, [evidence.reason.name for evidence in grid]
        ((0.1, 1.0, 10.0), ['CONVERGED', 'CONVERGED', 'CONVERGED'])
    """

    def __init__(self, evidences: Iterable[Evidence], prior_precisions: Sequence[float | Tensor]) -> None:
        super().__init__(evidences)
        self.prior_precisions = tuple(prior_precisions)
        """The prior precisions, in the order of the evidences."""

    __repr__ = Tabular.as_text

    def _tables(self) -> list[Table]:
        columns = {
            "prior precision": [summary(value) for value in self.prior_precisions],
            "log evidence": [one.number for one in self],
            "log likelihood": [f"{float(one.log_likelihood):.6g}" for one in self],
            "scatter": [f"{float(one.scatter):.6g}" for one in self],
            "log determinant ratio": [f"{float(one.log_determinant_ratio.value):.6g}" for one in self],
            "reason": [one.reason.name for one in self],
        }
        return [by_columns_of(columns)]


def grid(
    post: Laplace,
    prior_precisions: Sequence[float] | Tensor,
    rtol: float = 0.01,
    generator: torch.Generator | None = None,
    mode: str = "auto",
) -> Grid:
    """Compute the log evidence in nats at each scalar prior precision, with the curvature held fixed.

    The products are spent once, for the smallest precision; further values cost none. The exception is the linear
    model's mode, which takes solves, each started from the previous mode.

    Args:
        post: a posterior from `co.laplace`.
        prior_precisions: positive numbers, at least one. Tensors keep their gradients.
        rtol: as in `Laplace.log_evidence`.
        generator: the source of the probes.
        mode: as in `Laplace.log_evidence`.

    Returns:
        An `Evidence` for each prior precision, in a list that prints as a table.

    Raises:
        TypeError: `post` is not a posterior, or prior_precisions is not a sequence of numbers.
        ValueError: a precision is not positive and finite, or the sequence is empty.

    Examples:
        >>> grid = co.evidence.grid(post, [0.1, 1.0, 10.0])
        >>> best = max(range(3), key=lambda i: float(grid[i]))
        >>> best
        0
    """
    check_posterior(post, "grid")
    check_accuracy(rtol, generator)
    at = checked_mode(mode, post.lin)
    values = checked_precisions(prior_precisions)
    if at == "map":
        warn_of_mode(post)
    prepare(post.cache, min(map(_number, values)), rtol, generator)
    evidences: list[Evidence] = []
    for value in values:
        start = evidences[-1].theta if evidences else None
        evidences.append(find_evidence(post.with_prior(value).terms, start, rtol, generator, at))
    return Grid(evidences, values)


def checked_precisions(prior_precisions: Any) -> list[float | Tensor]:
    """Return positive numbers, at least one; raise TypeError or ValueError for anything else."""
    check_kind("prior_precisions", prior_precisions, Iterable, "a sequence of positive numbers")
    values = list(prior_precisions)  # tensors keep their gradients
    if not values or not all(0 < _number(value) < math.inf for value in values):
        raise ValueError(f"prior_precisions must be positive finite numbers, at least one; got {values}.")
    return values


def _number(value: float | Tensor) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)
