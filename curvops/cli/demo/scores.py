"""How good are the demo's predictions, upright and turned? One `Row` for each way of predicting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from curvops import Uncertainty
from curvops.posterior import metrics

SCORES = ("accuracy", "nll", "brier", "ece")
PARTS = ("aleatoric", "epistemic")


@dataclass(frozen=True, eq=False)
class Predicted:
    """Predictions of one method at one angle; `uncertainty` is None for a method with a single network."""

    labels: Int[Tensor, " N"]
    probabilities: Float[Tensor, "N C"]
    uncertainty: Uncertainty | None


@dataclass(frozen=True)
class Row:
    """Scores of one method by angle in degrees, and how well its uncertainty tells turned digits from upright ones."""

    by_angle: dict[int, dict[str, float]]
    auroc_total: float
    auroc_epistemic: float | None

    def values(self) -> dict[str, float | None]:
        """The columns of the table: upright, mean over the rotations, uncertainty in parts, detection."""
        turned = [angle for angle in self.by_angle if angle]
        named = [name for name in (*SCORES, *PARTS) if name in self.by_angle[0]]
        upright = {f"{name}_0": self.by_angle[0][name] for name in named}
        rotated = {f"{name}_rotated": _mean([self.by_angle[a][name] for a in turned]) for name in named}
        return {**upright, **rotated, "auroc_total": self.auroc_total, "auroc_epistemic": self.auroc_epistemic}


def row(predicted: Mapping[int, Predicted], is_unambiguous: Bool[Tensor, " N"]) -> Row:
    """Scores of one method. `predicted[0]` are all test digits, other angles leave the ambiguous ones out.

    AUROC compares every rotation with those digits at 0° that are unambiguous, so that both sides hold the same ones.
    """
    compared = [(predicted[0], is_unambiguous)]
    compared += [(p, torch.ones_like(p.labels, dtype=torch.bool)) for angle, p in predicted.items() if angle]
    positive = torch.cat([torch.full_like(kept[kept], i > 0) for i, (_, kept) in enumerate(compared)])
    total = torch.cat([metrics.predictive_entropy(p.probabilities)[kept] for p, kept in compared])
    epistemic = [p.uncertainty.epistemic[kept] for p, kept in compared if p.uncertainty is not None]
    return Row(
        {angle: _scores(p) for angle, p in predicted.items()},
        float(metrics.auroc(total, positive)),
        float(metrics.auroc(torch.cat(epistemic), positive)) if epistemic else None,
    )


def _scores(p: Predicted) -> dict[str, float]:
    found = {name: float(getattr(metrics, name)(p.probabilities, p.labels)) for name in SCORES}
    found["confidence"] = float(p.probabilities.max(-1).values.mean())
    if p.uncertainty is not None:
        found |= {part: float(getattr(p.uncertainty, part).mean()) for part in PARTS}
    return found


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def mean_and_error(values: list[float]) -> tuple[float, float | None]:
    """Mean over seeds and its standard error; None for one seed."""
    column = torch.tensor(values, dtype=torch.float64)
    error = float(column.std() / len(values) ** 0.5) if len(values) > 1 else None
    return float(column.mean()), error
