"""The demo's report: scores of its predictions, upright and rotated, time and products of its stages, results.json."""

from __future__ import annotations

import json
import math
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm

import curvops as co
from curvops import metrics

SCORES = ("accuracy", "nll", "brier", "ece")
PARTS = ("aleatoric", "epistemic")
HEADINGS = {"accuracy": "accuracy", "nll": "NLL", "brier": "Brier", "ece": "ECE"}
TURNS = (("0°", "0"), ("turned", "rotated"))
WIDTH = 100
"""The width of a line of the report."""
SHOWN = 5e-5
"""A smaller difference prints as 0.0000."""
MeanAndError = tuple[float, float | None]
"""A mean over seeds and its standard error, None for one seed."""


@dataclass(frozen=True, eq=False)
class LabelledPredictions:
    """The predictions of one method at one angle; `uncertainty` is None for a method with a single network."""

    labels: Int[Tensor, " N"]
    probabilities: Float[Tensor, "N C"]
    uncertainty: co.posterior.Uncertainty | None


@dataclass(frozen=True)
class Row:
    """The scores of one method by angle in degrees, and the AUROC of its uncertainty, rotated against upright."""

    by_angle: dict[int, dict[str, float]]
    auroc_total: float
    auroc_epistemic: float | None

    def values(self) -> dict[str, float | None]:
        """Return the columns of the table: upright, mean over the rotations, parts of the uncertainty, detection."""
        turned = [angle for angle in self.by_angle if angle]
        named = [name for name in (*SCORES, *PARTS) if name in self.by_angle[0]]
        upright = {f"{name}_0": self.by_angle[0][name] for name in named}
        rotated = {f"{name}_rotated": _mean([self.by_angle[a][name] for a in turned]) for name in named}
        return {**upright, **rotated, "auroc_total": self.auroc_total, "auroc_epistemic": self.auroc_epistemic}


def score(predicted: Mapping[int, LabelledPredictions], is_unambiguous: Bool[Tensor, " N"]) -> Row:
    """Score one method; `predicted[0]` are all test digits, and other angles leave the ambiguous ones out.

    AUROC compares each rotation with the unambiguous digits at 0°, so that both sides contain the same digits.
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


def _scores(p: LabelledPredictions) -> dict[str, float]:
    scores = {name: float(getattr(metrics, name)(p.probabilities, p.labels)) for name in SCORES}
    scores["confidence"] = float(p.probabilities.max(-1).values.mean())
    if p.uncertainty is not None:
        scores |= {part: float(getattr(p.uncertainty, part).mean()) for part in PARTS}
    return scores


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def mean_and_error(values: list[float]) -> MeanAndError:
    """Return the mean over seeds and its standard error, None for one seed."""
    column = torch.tensor(values, dtype=torch.float64)
    error = float(column.std() / len(values) ** 0.5) if len(values) > 1 else None
    return float(column.mean()), error


def summarize(rows: Sequence[Mapping[str, Row]]) -> dict[str, dict[str, MeanAndError | None]]:
    """Summarize seeds by method and column: mean and standard error, or None if a method has no such column."""
    summary: dict[str, dict[str, MeanAndError | None]] = {}
    for name in rows[0]:
        by_seed = [of_seed[name].values() for of_seed in rows]
        summary[name] = {}
        for column in by_seed[0]:
            values = [value for value in (of_seed[column] for of_seed in by_seed) if value is not None]
            summary[name][column] = mean_and_error(values) if values else None
    return summary


def table(summaries: Mapping[str, Mapping[str, MeanAndError | None]]) -> str:
    """Format four blocks for a terminal of 100 columns: upright, rotated, parts of the uncertainty, detection."""
    blocks = [
        ("upright (0°)", [(HEADINGS[s], f"{s}_0") for s in SCORES]),
        ("mean over 15–90°", [(HEADINGS[s], f"{s}_rotated") for s in SCORES]),
        ("uncertainty (nats)", [(f"{part}, {where}", f"{part}_{key}") for where, key in TURNS for part in PARTS]),
        ("AUROC rotated", [("total", "auroc_total"), ("epistemic", "auroc_epistemic")]),
    ]
    lines = []
    for title, columns in blocks:
        lines.append(f"{title:<20}" + "".join(f"{heading:>18}" for heading, _ in columns))
        for name, values in summaries.items():
            cells = [_cell(values.get(column)) for _, column in columns]
            if set(cells) != {"-"}:
                lines.append(f"{name:<20}" + "".join(f"{cell:>18}" for cell in cells))
        lines.append("")
    return "\n".join(lines).rstrip()


def _cell(value: MeanAndError | None) -> str:
    if value is None:
        return "-"
    mean, error = value
    return f"{mean:.4f}" if error is None else f"{mean:.4f} ± {error:.4f}"


def conclude(rows: Sequence[Mapping[str, Row]], network: str, posterior: str) -> str:
    """Say in three sentences how the scores of one posterior compare with those of the network alone.

    Differences are paired by seed: means, with their standard errors if there are several seeds. A difference that
    rounds to 0.0000 counts as none.
    """

    def scores(name: str, column: str) -> list[float]:
        values = (of_seed[name].values()[column] for of_seed in rows)
        return [value for value in values if value is not None]

    def difference(name: str, column: str, other: str | None = None) -> MeanAndError:
        pairs = zip(scores(name, column), scores(network, other or column))
        return mean_and_error([one - alone for one, alone in pairs])

    posteriors = [name for name, row in rows[0].items() if row.auroc_epistemic is not None]
    higher = sum(difference(name, "nll_0")[0] >= SHOWN for name in posteriors)
    rotated = {name: _mean(scores(name, "nll_rotated")) for name in rows[0]}
    best = min(rotated, key=lambda name: rotated[name])
    near, far = (_mean(scores(posterior, column)) for column in ("epistemic_0", "epistemic_rotated"))
    found, alone = _mean(scores(posterior, "auroc_epistemic")), _mean(scores(network, "auroc_total"))
    sentences = (
        f"Upright, the NLL of {posterior}, in nats per point, is {_compared(difference(posterior, 'nll_0'))} that of "
        f"{network}; that of {higher} of the {len(posteriors)} posteriors is higher.",
        f"Rotated, it is {_compared(difference(posterior, 'nll_rotated'))} that of {network}; the lowest of all is "
        f"that of {best}, {rotated[best]:.4f}.",
        f"The epistemic uncertainty of {posterior} is {near:.4f} nats upright and {far:.4f} rotated; its AUROC, "
        f"{found:.4f}, is {_compared(difference(posterior, 'auroc_epistemic', 'auroc_total'))} the {alone:.4f} of "
        f"{network}'s entropy.",
    )
    return "\n".join(textwrap.fill(sentence, WIDTH) for sentence in sentences)


def _compared(difference: MeanAndError) -> str:
    """Say in words how far one score is from another: "0.0090 ± 0.0010 above"."""
    mean, error = difference
    if not math.isfinite(mean):
        return "not comparable with"
    if abs(mean) < SHOWN:
        return "equal to"
    bar = "" if error is None else f" ± {error:.4f}"
    doubt = "" if error is None or abs(mean) > 2 * error else " (within two standard errors)"
    return f"{abs(mean):.4f}{bar} {'above' if mean > 0 else 'below'}{doubt}"


def write(results: Mapping[str, Any], path: Path) -> None:
    """Write all raw numbers as JSON."""
    path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass
class Stages:
    """The seconds and products by stage, in order; a stage that runs again adds to its entry."""

    seconds: dict[str, float] = field(default_factory=dict)
    products: dict[str, int] = field(default_factory=dict)
    spent: int = 0
    began: float = field(default_factory=time.perf_counter)
    _bar: tqdm[NoReturn] = field(default_factory=lambda: tqdm(disable=True), repr=False)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a block under this name, and show its number of products in the last line of a terminal."""
        self.announce(name)
        start, before = time.perf_counter(), self.spent
        with tqdm(desc=name, unit=" products", disable=None, leave=False) as self._bar:
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.products[name] = self.products.get(name, 0) + self.spent - before

    def announce(self, what: str) -> None:
        """Write a line with the seconds so far if standard error is not a terminal, which shows no bar."""
        if sys.stderr is not None and not sys.stderr.isatty():
            print(f"{time.perf_counter() - self.began:7.1f} s  {what}", file=sys.stderr, flush=True)

    def curvature(self) -> type[co.GGN]:
        """Return a GGN class whose products with single vectors are counted here."""
        stages = self

        class CountedGGN(co.GGN):
            def _product(self, block: Tensor) -> Tensor:
                stages.spent += block.shape[1]
                stages._bar.update(block.shape[1])
                return super()._product(block)

        return CountedGGN

    def rows(self) -> list[tuple[str, float, int]]:
        """Return (name, seconds, products), in the order of first use."""
        return [(name, seconds, self.products[name]) for name, seconds in self.seconds.items()]

    def table(self) -> str:
        """Format seconds and products of each stage; a product takes one vector through the GGN or the Jacobian."""
        lines = [f"{'stage':<44}{'seconds':>9}{'products':>10}"]
        lines += [f"{name:<44}{seconds:>9.1f}{products or '-':>10}" for name, seconds, products in self.rows()]
        return "\n".join(lines)
