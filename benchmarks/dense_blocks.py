"""Time and memory of a dense posterior over S weights.     python -m benchmarks.dense_blocks

The demo's network with 101,042 weights on 300 digits; S of the weights are chosen at random, float32. Each size runs in
its own process, whose peak resident set is its memory; times are processor times, on one thread.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

import curvops as co
from benchmarks import study_page
from benchmarks.digits import load_digits
from benchmarks.layers import add_corrections, convolutional_network
from benchmarks.machine import resident, run_apart
from benchmarks.tables import tables
from benchmarks.timing import clock

SIZES = (500, 2000, 5000, 10000)
DISTANCES = (500, 2000, 5000)
"""Sizes that a Wasserstein distance is measured at, to the KFAC posterior: S solves, and S³ operations."""


def measure(size: int) -> dict[str, Any]:
    """The block, its posterior's predictive, and where asked for the distance to the whole posterior."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = load_digits().train
    x, y = data.x[700:1000], data.y[700:1000]
    network = add_corrections(convolutional_network())
    lin = co.linearize(network, (x, y), "classification")
    weights = [p for p in network.parameters() if p.requires_grad]
    chosen = torch.randperm(lin.num_parameters)[:size].sort().values

    def gradient() -> Any:
        loss = torch.nn.functional.cross_entropy(network(x), y, reduction="sum")
        return torch.autograd.grad(loss, weights)

    spent = partial(clock, timer=time.process_time)
    found: dict[str, Any] = {"S": size}
    gradient()
    unit = spent(lambda: [gradient() for _ in range(20)])[1] / 20
    G = co.GGN(lin)
    co.Subnetwork(G, chosen[:2])
    block, found["block"] = spent(lambda: co.Subnetwork(G, chosen))
    found["gradients"] = found["block"] / unit
    part = co.linearize(network, (x, y), "classification", parameters=chosen)
    predict = spent(lambda: co.laplace(part, block, 1.0, check_mode=False).predict(x[:64]).variance)
    found["predict"] = predict[1]
    found["memory"] = resident("VmHWM")
    if size in DISTANCES:
        post = co.laplace(lin, co.KFAC, 1.0, check_mode=False)
        _, found["distance"] = spent(lambda: co.wasserstein(post, chosen))
        found["with distance"] = resident("VmHWM")
    return found


def results_table(rows: list[dict[str, Any]]) -> str:
    """Sizes by what they took."""
    header = ["S", "block, s", "block, gradients", "S/8", "predict 64 points, s", "peak, GiB"]
    header += ["W₂², s", "peak with W₂², GiB"]
    body = []
    for row in rows:
        cells = [f"{row['block']:.1f}", f"{row['gradients']:.0f}", f"{row['S'] / 8:.0f}", f"{row['predict']:.1f}"]
        cells += [f"{row['memory'] / 2**30:.1f}"]
        far = "distance" in row
        cells += [f"{row['distance']:.1f}", f"{row['with distance'] / 2**30:.1f}"] if far else ["–", "–"]
        body.append([f"{row['S']:,}", *cells])
    return tables(header, body, header[:6], ["S", *header[6:]])


STUDY = study_page.Study(
    "dense_blocks",
    __doc__,
    lambda: {"rows": [run_apart("benchmarks.dense_blocks", "--size", size)[-1] for size in SIZES]},
    {"dense blocks": lambda found: results_table(found["rows"])},
    "docs/subnetworks.md",
    rows={"size": lambda size: [measure(size)]},
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    STUDY.run()
