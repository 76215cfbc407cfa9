"""Check and measure the library on a GPU, one stage after the other.

    python -m benchmarks.gpu [--output FOLDER]        # from the tree, with PYTHONPATH; nothing needs to be installed
    python -m benchmarks.gpu --rehearse               # every stage at toy size, on a CPU
    python -m benchmarks.gpu --predict                # on any machine: what the products of a GPU will take at least
    python -m benchmarks.gpu --report                 # docs/gpu.md from what was measured

Stages run in the order of their worth, each in a process of its own with a limit of time. A stage writes its rows to
FOLDER/STAGE.json as they are found, and ends what it has begun in a second run: rows that are there, in FOLDER or in
benchmarks/measured/gpu, are not measured again. A stage that fails says so, and the next one begins.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

STAGES = {"right": 110, "waits": 25, "products": 120, "headline": 90, "profile": 30, "tasks": 90}
"""The stages and their limits in seconds, 465 in all."""
KEPT = Path(__file__).parents[1] / "measured" / "gpu"
ROOT = Path(__file__).parents[2]


MARGIN = 5
"""Seconds of a stage's limit that are kept for its start and its end."""


def limit(name: str, toy: bool) -> int:
    """Return the seconds of a stage; a rehearsal may run on a machine with other work."""
    return STAGES[name] * (5 if toy else 1)


def has_ended(path: Path) -> bool:
    """Return whether a stage's file says that it ended; one that cannot be read does not."""
    try:
        return bool(json.loads(path.read_text())["ended"])
    except (OSError, ValueError):
        return False


def run_stages(output: Path, names: list[str], device: str, toy: bool) -> int:
    """Run these stages; return how many did not end well."""
    output.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in names:
        path = output / f"{name}.json"
        if not toy and not path.exists() and (KEPT / path.name).exists():
            shutil.copy(KEPT / path.name, path)
        if has_ended(path):
            print(f"{name}: done before", flush=True)
            continue
        begin = time.perf_counter()
        command = [sys.executable, "-m", "benchmarks.gpu", "--stage", name, "--output", str(output), "--device", device]
        try:
            code: int | str = subprocess.run(
                command + ["--rehearse"] * toy, cwd=ROOT, timeout=limit(name, toy), check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"stopped after its {limit(name, toy)} s"
        failed += code != 0
        result = "done" if code == 0 else f"FAILED ({code})"
        print(f"{name}: {result}, {time.perf_counter() - begin:.1f} s", flush=True)
    return failed


def run_stage(name: str, output: Path, device: str, toy: bool) -> int:
    """Run one stage in this process; return 1 if one of its rows failed."""
    from importlib import import_module

    if device == "stand-in":
        import_module("tests.cuda.stand_in")  # before torch
        device = "cuda"
    import torch

    from benchmarks.gpu.stage import Stage

    stage = Stage(output / f"{name}.json", torch.device(device), toy, limit(name, toy) - MARGIN)
    import_module(f"benchmarks.gpu.{name}").measure(stage)
    stage.end()
    return int(any("error" in row for row in stage.rows))


def main() -> int:
    """Run what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--output", type=Path, default=None, help="folder of results, by default benchmarks/measured/gpu"
    )
    parser.add_argument("--rehearse", action="store_true", help="every stage at toy size, into a scratch folder")
    parser.add_argument("--device", default=None, help="cuda; in a rehearsal cpu, or stand-in")
    parser.add_argument("--stages", default=",".join(STAGES), help="some of them, separated by commas")
    parser.add_argument("--stage", choices=STAGES, help="run one stage in this process")
    parser.add_argument("--predict", action="store_true", help="count what the products launch and move")
    parser.add_argument("--report", action="store_true", help="fill docs/gpu.md from benchmarks/measured/gpu")
    options = parser.parse_args()
    if options.predict or options.report:
        from benchmarks.gpu import page

        if options.predict:
            page.predict(KEPT)
        page.fill_page(KEPT)
        return 0
    device = options.device or ("cpu" if options.rehearse else "cuda")
    output = options.output or (ROOT / ".rehearsal" if options.rehearse else KEPT)
    if options.stage:
        return run_stage(options.stage, output, device, options.rehearse)
    unknown = set(options.stages.split(",")) - STAGES.keys()
    if unknown:
        parser.error(f"no stage is called {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}.")
    return min(1, run_stages(output, options.stages.split(","), device, options.rehearse))


if __name__ == "__main__":
    sys.exit(main())
