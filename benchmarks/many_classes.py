"""Predictions of thousands of classes: time and peak memory of a last layer.   python -m benchmarks.many_classes

A linear layer with 512 features and 5,000 classes under each curvature: the variances of all classes at 64 points, and
the probabilities from the probit link. The covariances between the classes would take 6.4 GB at these points. Every row
is a separate process: its peak is its greatest resident set minus the resident set before the data were created.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.machine import reset_peak, resident, run_apart
from benchmarks.tables import MIB, table

FEATURES, POINTS, TRAINING = 512, 64, 256
RANK, DRAWS = 20, 16
BOUND = 2 * 2**30
CURVATURES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "diagonal": lambda co, lin, _: co.DiagonalGGN(lin, fisher="mc"),
    "KFAC": lambda co, lin, _: co.KFAC(lin, fisher="mc"),
    f"low rank {RANK}": lambda co, lin, generator: co.low_rank(co.GGN(lin), RANK, generator=generator),
    "draws, full GGN": lambda co, lin, _: co.GGN(lin),
    "draws, diagonal": lambda co, lin, _: co.DiagonalGGN(lin, fisher="mc"),
}


def child(names: list[str], classes: int, threads: int) -> None:
    """One curvature after the other; a JSON row for each."""
    import torch
    from torch import nn

    import curvops as co
    from benchmarks.peak import load_code

    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    load_code()
    generator = torch.manual_seed(0)
    model = nn.Linear(FEATURES, classes)
    x, y = torch.randn(TRAINING, FEATURES), torch.randint(classes, (TRAINING,))
    points = torch.randn(POINTS, FEATURES)
    for name in names:
        before = reset_peak()
        lin = co.linearize(model, (x, y), "classification", memory_budget=BOUND // 4)
        start = time.perf_counter()
        post = co.laplace(lin, CURVATURES[name](co, lin, generator), prior_precision=10.0, check_mode=False)
        draws = post.sample(DRAWS, generator, rtol=0.01) if name.startswith("draws") else None
        first = post.predict(points, samples=draws).variance
        built = time.perf_counter() - start
        start = time.perf_counter()
        variance = post.predict(points, samples=draws).variance
        seconds = time.perf_counter() - start
        probabilities = post.probabilities(points, samples=draws)
        assert torch.equal(first, variance) and variance.shape == probabilities.shape == (POINTS, classes)
        assert bool((variance > 0).all()) and bool(((probabilities.sum(1) - 1).abs() < 1e-4).all())
        row = {"curvature": name, "classes": classes, "over": resident("VmHWM") - before, "bound": BOUND}
        print(json.dumps(row | {"built": round(built, 2), "seconds": round(seconds, 4)}), flush=True)
        del lin, post, draws, first, variance, probabilities


def rows(names: Sequence[str], classes: int = 5000, threads: int = 1) -> list[dict[str, Any]]:
    """Measure in a process of its own, and return its rows."""
    arguments = ["--classes", classes, "--threads", threads]
    return run_apart("benchmarks.many_classes", "--child", *names, *arguments, prompt=True)


def main() -> None:
    """Measure every curvature and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_classes", description=__doc__)
    parser.add_argument("--classes", type=int, default=5000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--child", nargs="+", default=None, choices=CURVATURES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child, options.classes, options.threads)
        return
    header = ["curvature", "peak, MiB", "build and first prediction, s", "variances of 64 points, s"]
    found = [row for name in CURVATURES for row in rows([name], options.classes, options.threads)]
    lines = [[r["curvature"], f"{r['over'] / MIB:,.0f}", f"{r['built']:.1f}", f"{r['seconds']:.3f}"] for r in found]
    print(table(header, lines))


if __name__ == "__main__":
    main()
