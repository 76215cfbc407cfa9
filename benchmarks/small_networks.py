"""Fixed costs of a call for networks of 61 and 3,855 weights, which cost almost nothing, compared with other packages.

`OMP_NUM_THREADS=1 .venv-peers/bin/python -m benchmarks.small_networks`: medians of alternating runs in one process, in
milliseconds of processor time, on one thread. Everything has run before.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvops as co
from benchmarks.layers import linear_layers
from benchmarks.machine import peer_version
from benchmarks.study_page import Study
from benchmarks.tables import table
from benchmarks.timing import Run, alternate

NETWORKS = ((1, 20, 1), (20, 50, 50, 5))
POINTS, BATCH = 100, 32


def measure(pairs: int) -> dict[str, Any]:
    """A row a call: our milliseconds, the other package's, the ratio."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for sizes in NETWORKS:
        torch.manual_seed(0)
        model, X, Y = linear_layers(*sizes), torch.randn(POINTS, sizes[0]), torch.randn(POINTS, sizes[-1])
        D = sum(p.numel() for p in model.parameters())
        for what, ours, theirs in cells(model, X, Y):
            found = alternate(theirs or ours, ours, pairs, warmup=3, timer=time.process_time)
            mine, other = 1e3 * found.seconds.median, 1e3 * found.unit_seconds.median
            beside = {} if theirs is None else {"theirs": other, "ratio": mine / other}
            rows.append({"weights": D, "what": what, "ours": mine, **beside})
            print(rows[-1], flush=True)
    return {"peers": {name: peer_version(name) for name in ("laplace-torch", "posteriors")}, "rows": rows}


def text(found: Any) -> str:
    """A table a network, a row a call."""
    parts = []
    for D in dict.fromkeys(row["weights"] for row in found["rows"]):
        of = [row for row in found["rows"] if row["weights"] == D]
        cells = [[*(f"{row[key]:.2f}" if key in row else "" for key in ("ratio", "ours", "theirs"))] for row in of]
        heads = [f"{D:,} weights", "ratio", "curvops, ms", "other, ms"]
        parts.append(table(heads, [[row["what"], *numbers] for row, numbers in zip(of, cells)]))
    peers = ", ".join(f"{name} {version}" for name, version in found["peers"].items())
    return "\n\n".join([*parts, f"The other packages: {peers}."])


def cells(model: nn.Module, X: Tensor, Y: Tensor) -> Iterator[tuple[str, Run, Run | None]]:
    """Yield (what, ours, theirs)."""
    from laplace import Laplace  # an environment of its own has these

    for points in (1, BATCH):
        for fisher in ("empirical", "ggn"):
            what = f"diagonal EKF, {points} a batch, {fisher}, beside posteriors' empirical"
            yield what, *filters(model, (X[:points], Y[:points]), fisher)
    yield "linearize", lambda: co.linearize(model, (X, Y), co.likelihoods.Gaussian(noise=1.0)), None
    loader: Any = DataLoader(TensorDataset(X, Y), batch_size=POINTS)

    def evidence() -> object:
        lin = co.linearize(model, (X, Y), co.likelihoods.Gaussian(noise=1.0))
        return co.laplace(lin, co.KFAC, 1.0, check_mode=False).log_evidence()

    def kron() -> Any:
        found: Any = Laplace(copy.copy(model), "regression", "all", "kron")
        found.fit(loader)
        return found

    yield (
        "linearize, KFAC and evidence, beside laplace-torch's kron fit and evidence",
        evidence,
        lambda: kron().log_marginal_likelihood(),
    )
    post, theirs, x = (
        co.laplace(co.linearize(model, (X, Y), co.likelihoods.Gaussian(noise=1.0)), co.KFAC, 1.0),
        kron(),
        X[:2],
    )
    yield (
        "joint prediction of two points",
        lambda: post.predict(x, joint=True).covariance_matrix,
        lambda: theirs(x, joint=True),
    )


def filters(model: nn.Module, batch: tuple[Tensor, Tensor], fisher: str) -> tuple[Run, Run]:
    """A step of each package's filter, from the state before."""
    import posteriors

    def log_likelihood(params: Any, given: Any) -> tuple[Tensor, Tensor]:
        outputs = torch.func.functional_call(model, params, (given[0],))
        return -0.5 * (outputs - given[1]).square().sum(1), outputs

    theirs = posteriors.ekf.diag_fisher.build(log_likelihood, lr=1.0, per_sample=True)
    log_posterior = co.sampling.log_posterior(model, co.likelihoods.Gaussian(noise=1.0), data_size=POINTS)
    ours = co.sampling.ekf(log_posterior, fisher=fisher)
    states: list[Any] = [ours.init(log_posterior.params), theirs.init(log_posterior.params)]

    def step(i: int, transition: Any) -> None:
        states[i], _ = transition.update(states[i], batch)

    return lambda: step(0, ours), lambda: step(1, theirs)


STUDY = Study(
    name="small_networks",
    description=__doc__,
    measure=measure,
    sections={"small networks": text},
    page="docs/benchmarks.md",
    options={"pairs": (51, "alternating runs")},
)


if __name__ == "__main__":
    STUDY.run()
