"""What Gaussian processes of networks cost: grouped predictions, gradients in the inputs, rounds of an acquisition.

    python -m benchmarks.gaussian_processes             # on a quiet machine
    python -m benchmarks.gaussian_processes --cpu 1     # processor time, on a machine with other work

Alternating pairs in one process, float64: the ratio of each candidate's time to that of its unit.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import curvops as co
from benchmarks import study_page
from benchmarks.layers import linear_layers
from benchmarks.tables import spread_cell, table
from benchmarks.timing import Comparison, Spread, alternate, seconds

DOUBLE = torch.float64
INPUTS, TRAINING = 8, 500
PAIRS_OF_POINTS, CANDIDATES = 512, 20
MIDDLE, LARGE = (60, 55, 2), (130, 145, 1)
"""Widths with 4,007 and 20,311 weights."""
RESTARTS, STEPS, TOGETHER, RAW, SAMPLES = 20, 50, 4, 128, 64
RANK = 20

Clock = Callable[[], float]
Row = dict[str, Any]


def network(widths: tuple[int, ...]) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network with its data, as it starts: weights at a mode cost the same."""
    torch.manual_seed(0)
    x = torch.rand(TRAINING, INPUTS, dtype=DOUBLE)
    y = torch.stack([(x @ torch.randn(INPUTS, dtype=DOUBLE)).sin() for _ in range(widths[-1])], 1)
    return linear_layers(INPUTS, *widths).double(), x, y


def posterior(curvature: str, widths: tuple[int, ...] = MIDDLE) -> co.posterior.Laplace:
    """A posterior by its name."""
    model, x, y = network(widths)
    options = {"parameters": "last_layer"} if curvature == "last layer" else {}
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(0.1), **options)
    if curvature == "low rank":
        operator: Any = co.low_rank(co.GGN(lin), RANK, generator=torch.Generator().manual_seed(0))
    else:
        operator = {"KFAC": co.KFAC, "last layer": co.GGN, "full GGN": co.GGN}[curvature]
    return co.laplace(lin, operator, prior_precision=1.0, check_mode=False)


def grouped(curvature: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """J Σ Jᵀ of each pair from rows of J and the dense covariance Σ of the weights, and `predict(x, groups=2)`."""
    post = posterior(curvature)
    sigma = post.precision.inverse().to_dense()
    x = torch.rand(2 * PAIRS_OF_POINTS, INPUTS, dtype=DOUBLE)

    def dense() -> Tensor:
        J = post.lin.jacobian(x).formed().mT.unflatten(0, (PAIRS_OF_POINTS, -1))
        return (J @ sigma) @ J.mT

    def ours() -> Tensor:
        found: Tensor = post.predict(x, groups=2).covariance_matrix
        return found

    torch.testing.assert_close(ours(), dense(), rtol=1e-5, atol=1e-7)
    return dense, ours


def with_gradient(curvature: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The variances of 20 points, and the same with the gradient of their sum in the points."""
    post, x = posterior(curvature), torch.rand(CANDIDATES, INPUTS, dtype=DOUBLE)

    def plain() -> Tensor:
        return post.predict(x).variance

    def graded() -> Tensor:
        z = x.clone().requires_grad_()
        return torch.autograd.grad(post.predict(z).variance.sum(), z)[0]

    return plain, graded


def conditioned(curvature: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A prediction of 4 points, and one after conditioning on 4 points."""
    model = co.gp.LaplaceModel(posterior(curvature))
    x, X, Y = (torch.rand(4, d, dtype=DOUBLE) for d in (INPUTS, INPUTS, MIDDLE[-1]))
    return lambda: model.posterior(x).variance, lambda: model.condition_on_observations(X, Y).posterior(x).variance


MEASURED = {
    "`predict(x, groups=2)` of 512 pairs / batched J Σ Jᵀ": (grouped, ("KFAC", "last layer", "full GGN"), 2.0),
    "variances of 20 points with their gradient / without": (
        with_gradient,
        ("KFAC", "low rank", "last layer", "full GGN"),
        3.0,
    ),
    "prediction after conditioning on 4 points / before": (conditioned, ("KFAC", "full GGN"), 10.0),
}
ROUND, ROUND_BOUND = "a round of `optimize_acqf`", 10.0


def acquisition_round() -> Callable[[], Any]:
    """20 restarts of 50 steps over four candidates, a KFAC posterior of an MLP with 20,311 weights."""
    from botorch.acquisition.logei import qLogExpectedImprovement
    from botorch.optim import optimize_acqf
    from botorch.sampling import SobolQMCNormalSampler

    model = co.gp.LaplaceModel(posterior("KFAC", LARGE))
    sampler = SobolQMCNormalSampler(torch.Size([SAMPLES]), seed=0)
    acquisition = qLogExpectedImprovement(model, best_f=1.0, sampler=sampler)
    cube = torch.stack([torch.zeros(INPUTS, dtype=DOUBLE), torch.ones(INPUTS, dtype=DOUBLE)])
    options = {"maxiter": STEPS}
    return partial(optimize_acqf, acquisition, cube, TOGETHER, RESTARTS, raw_samples=RAW, options=options)


def rows(pairs: int, clock: Clock) -> Iterator[Row]:
    """A row for each figure as it is known."""
    for what, (make, curvatures, bound) in MEASURED.items():
        for curvature in curvatures:
            unit, candidate = make(curvature)
            found: Comparison = alternate(unit, candidate, pairs, warmup=2, timer=clock)
            yield {"what": what, "curvature": curvature, "bound": bound, **found.as_json()}
    run = acquisition_round()
    times = [seconds(run, clock) for _ in range(3)]
    yield {"what": ROUND, "curvature": "KFAC", "bound": ROUND_BOUND, "seconds": vars(Spread.of(times))}


def measure(pairs: int, cpu: int) -> list[Row]:
    """All rows."""
    found = []
    warnings.simplefilter("ignore")
    for row in rows(pairs, time.process_time if cpu else time.perf_counter):
        spread = row.get("ratio", row["seconds"])
        print(row["what"], row["curvature"], {k: round(v, 3) for k, v in spread.items()}, flush=True)
        found.append(row | {"cpu": cpu})
    return found


def ratios_table(found: list[Row]) -> str:
    """Ratios with their bounds, and the round in seconds."""
    parts: dict[str, list[list[str]]] = {}
    for row in found:
        if row["what"] != ROUND:
            milliseconds = [f"{1e3 * row[key]['median']:.2f}" for key in ("unit_seconds", "seconds")]
            cells = [row["curvature"], spread_cell(row), f"{row['bound']:g}", *milliseconds]
            parts.setdefault(row["what"], []).append(cells)
    header = ["curvature", "ratio", "bound", "one (ms)", "other (ms)"]
    apart = "\n\n".join(f"{what[0].upper()}{what[1:]}:\n\n{table(header, cells)}" for what, cells in parts.items())
    last = next(row for row in found if row["what"] == ROUND)
    kind = "processor time, the machine had other work" if last["cpu"] else "time on a quiet machine"
    weights = [sum((m + 1) * n for m, n in pairwise((INPUTS, *widths))) for widths in (MIDDLE, LARGE)]
    text = (
        f"Ratios of alternating runs in one process, float64: median (least–greatest); {kind}. The network has "
        f"{weights[0]:,} weights and two outputs, {TRAINING} points. {ROUND[0].upper()}{ROUND[1:]} ({RESTARTS} "
        f"restarts, {STEPS} steps, {TOGETHER} candidates, {RAW} raw samples, an MLP with {weights[1]:,} weights, KFAC) "
        f"takes {last['seconds']['median']:.1f} s, the bound is {ROUND_BOUND:g} s."
    )
    return f"{apart}\n\n{text}"


STUDY = study_page.Study(
    "gaussian_processes",
    __doc__,
    measure,
    {"gaussian_processes": ratios_table},
    "docs/gaussian_processes.md",
    options={"pairs": (15, "pairs a ratio"), "cpu": (0, "1 for processor time")},
)

if __name__ == "__main__":
    STUDY.run()
