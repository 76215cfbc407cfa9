"""What do the curvature operators cost?   python -m benchmarks.operators diagonal kfac products

Every figure is the median ratio of alternating runs (`timing.py`); the parts are modules of `benchmarks.parts`. Results
are added to the file given by --json: parts that it already holds are replaced.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import cores, facts
from benchmarks.parts import (
    choice,
    diagonal,
    first_answer,
    fishers,
    kernel,
    kfac,
    last_layer,
    peaks,
    predictions,
    products,
    scaling,
    solvers,
    transformers,
)
from benchmarks.parts.figures import Figures, Settings
from benchmarks.report import MEASURED, fill_pages

PARTS: dict[str, Callable[[Figures], None]] = {
    "choice": choice.measure,
    "diagonal": diagonal.measure,
    "laplace": diagonal.measure_beside_laplace,
    "kfac": kfac.measure,
    "first_answer": first_answer.measure,
    "fishers": fishers.measure,
    "peaks": peaks.measure,
    "products": products.measure,
    "predictions": predictions.measure,
    "kernel": kernel.measure,
    "last_layer": last_layer.measure,
    "transformer": transformers.measure,
    "scaling": scaling.measure,
    "solvers": solvers.measure,
}


def main() -> None:
    """Measure the named parts, write the figures after each, print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operators", description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--pairs", type=int, default=9, help="pairs of alternating runs behind a median")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--no-peers", action="store_true", help="leave other packages out")
    parser.add_argument("--json", type=Path, default=MEASURED / "operators.json", metavar="FILE")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - PARTS.keys():
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")  # other packages'
    result: dict[str, Any] = {"kind": "operators", "parts": {}}
    if arguments.json.exists():
        result = json.loads(arguments.json.read_text())
    for name in arguments.parts:
        print(name, file=sys.stderr)
        figures = Figures(Settings(arguments.pairs, arguments.threads, not arguments.no_peers))
        machine = facts(arguments.threads)
        PARTS[name](figures)
        result["parts"][name] = {"machine": machine, "pairs": arguments.pairs, **figures.as_json()}
        gc.collect()
        arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        fill_pages(result)


if __name__ == "__main__":
    main()
