"""Do products stay within their memory budget?   python -m benchmarks.memory

The bound is `memory_budget` + one batch's forward and backward pass + the vectors. The last two, with the interpreter
and the data, are the baseline: the peak of a process that does nothing else. All peaks come from separate processes,
whose allocator returns large freed blocks at once: the library does not hold the blocks that glibc would otherwise keep
in its heap (their size varies from run to run). `--allocator default` keeps glibc's behaviour.

This process does not import torch: a child's peak starts from the resident set of its parent process.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.machine import cores, facts, run_apart
from benchmarks.report import MEASURED, fill_pages
from benchmarks.tables import MIB


def run(network: str, outputs: int, options: argparse.Namespace, budget: int | None) -> dict[str, Any]:
    """Run one process of `benchmarks.peak`; return its peak in bytes and the engine of its products."""
    arguments: list[object] = [network, "--outputs", outputs]
    for name in ("batches", "columns", "products", "threads", "engine"):
        arguments += [f"--{name}", getattr(options, name)]
    arguments += [] if budget is None else ["--memory-budget", budget]
    (found,) = run_apart("benchmarks.peak", *arguments, prompt=options.allocator == "prompt")
    return found


def measure(network: str, outputs: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each budget."""
    baseline = run(network, outputs, options, None)["peak"]
    rows = []
    for budget in (round(mebibytes * MIB) for mebibytes in options.budgets):
        result = run(network, outputs, options, budget)
        row = {"network": network, "outputs": outputs, "columns": options.columns, "batches": options.batches}
        rows.append({**row, "memory_budget": budget, "baseline": baseline, **result})
        sizes = ", ".join(f"{k} {rows[-1][k] / MIB:,.0f}" for k in ("memory_budget", "baseline", "peak"))
        print(f"  {network} C={outputs}: {sizes} MiB, {result['engine']}", file=sys.stderr)
    return rows


def main() -> None:
    """Measure the named networks at every budget, print the table, write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("networks", nargs="*", default=["mlp", "cnn", "resnet"])
    parser.add_argument("--outputs", type=int, nargs="+", default=[10], metavar="C")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0, 64, 256, 1024], metavar="MIB")
    parser.add_argument("--batches", type=int, default=4, help="equal batches that the data come in")
    parser.add_argument("--columns", type=int, default=1, metavar="K", help="vectors of a product")
    parser.add_argument("--products", type=int, default=8, help="products before the peak is read")
    parser.add_argument("--engine", default="auto", choices=["auto", "autodiff", "layerwise"])
    parser.add_argument("--allocator", default="prompt", choices=["prompt", "default"])
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--json", type=Path, default=MEASURED / "memory.json", metavar="FILE")
    options = parser.parse_args()
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    result: dict[str, Any] = {"kind": "memory", "machine": facts(options.threads), "settings": settings, "rows": []}
    for network in options.networks:
        for outputs in options.outputs:
            result["rows"] += measure(network, outputs, options)
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    fill_pages(result)


if __name__ == "__main__":
    main()
