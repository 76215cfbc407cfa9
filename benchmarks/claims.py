"""Did a claim hold? Differences over seeds, their interval, and a verdict, as every study of a paper reports them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from scipy import stats
from torch import Tensor

from benchmarks.tables import table

LEVEL = 0.95

Claim = tuple[str, Sequence[float] | Tensor]
"""A claim in words, and by seed the difference that is positive where it holds."""


def interval(values: Sequence[float] | Tensor, level: float = LEVEL) -> tuple[float, float, float]:
    """The mean over seeds and Student's interval for it."""
    v = torch.as_tensor(values, dtype=torch.float64)
    if v.ndim != 1 or len(v) < 2:
        raise ValueError(f"an interval needs two seeds or more, got values {tuple(v.shape)}.")
    mean, error = float(v.mean()), float(v.std()) / len(v) ** 0.5
    reach = float(stats.t.ppf((1 + level) / 2, len(v) - 1)) * error
    return mean, mean - reach, mean + reach


def verdict(values: Sequence[float] | Tensor) -> str:
    """ "held" where the interval lies above 0, "the reverse" where it lies below, else "open"."""
    _, low, high = interval(values)
    return "held" if low > 0 else "the reverse" if high < 0 else "open"


def claims_table(claims: Iterable[Claim], unit: str, digits: int = 3) -> str:
    """A row a claim: its difference with the interval, and the verdict."""
    rows = []
    for claim, values in claims:
        mean, low, high = interval(values)
        rows.append([claim, f"{mean:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})", verdict(values)])
    return table(["claim", f"difference, {unit}", "verdict"], rows)


def spread(values: Sequence[float] | Tensor, digits: int = 3) -> str:
    """Mean ± standard deviation over seeds."""
    v = torch.as_tensor(values, dtype=torch.float64)
    return f"{float(v.mean()):.{digits}f} ± {float(v.std()):.{digits}f}"
