"""What does a dense posterior over S weights take?     python -m benchmarks.dense_blocks

The demo's network of 101,042 weights on 300 digits, S of them at random, float32. Each size runs in a process of its
own, whose peak resident set is its memory; times are of the processor, on one thread.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import curvops as co
from benchmarks import study_page
from benchmarks.machine import of_its_own, resident
from benchmarks.tables import table
from curvops.cli.demo.digits import load_digits
from curvops.cli.demo.network import add_corrections, convolutional_network

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

    found: dict[str, Any] = {"S": size}
    gradient()
    start = time.process_time()
    for _ in range(20):
        gradient()
    unit = (time.process_time() - start) / 20
    G = co.GGN(lin)
    co.Subnetwork(G, chosen[:2])
    start = time.process_time()
    block = co.Subnetwork(G, chosen)
    found["block"] = time.process_time() - start
    found["gradients"] = found["block"] / unit
    part = co.linearize(network, (x, y), "classification", parameters=chosen)
    start = time.process_time()
    _ = co.laplace(part, block, 1.0, check_mode=False).predict(x[:64]).variance
    found["predict"] = time.process_time() - start
    found["memory"] = resident("VmHWM")
    if size in DISTANCES:
        post = co.laplace(lin, co.KFAC, 1.0, check_mode=False)
        start = time.process_time()
        co.wasserstein(post, chosen)
        found["distance"], found["with distance"] = time.process_time() - start, resident("VmHWM")
    return found


def results_table(rows: list[dict[str, Any]]) -> str:
    """Sizes by what they took."""
    header = ["S", "block, s", "block, gradients", "S/8", "predict 64 points, s", "peak, GiB", "W₂², s", "peak, GiB"]
    body = []
    for row in rows:
        cells = [f"{row['block']:.1f}", f"{row['gradients']:.0f}", f"{row['S'] / 8:.0f}", f"{row['predict']:.1f}"]
        cells += [f"{row['memory'] / 2**30:.1f}"]
        far = "distance" in row
        cells += [f"{row['distance']:.1f}", f"{row['with distance'] / 2**30:.1f}"] if far else ["–", "–"]
        body.append([f"{row['S']:,}", *cells])
    return table(header, body)


STUDY = study_page.Study(
    "dense_blocks",
    __doc__,
    lambda: {"rows": [of_its_own("benchmarks.dense_blocks", "--size", size)[-1] for size in SIZES]},
    {"dense blocks": lambda found: results_table(found["rows"])},
    "docs/subnetworks.md",
    rows={"size": lambda size: [measure(size)]},
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    STUDY.run()
